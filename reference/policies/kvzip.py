"""KVzip: a token counts by the most attention that it gets while the model repeats its context."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reference.crystalcache.coattention import attention
from reference.policies.attention import group_maximum, wide
from reference.policies.budgets import across_layers, even
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, stacked
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, Int64, IntVector, Matrix
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Rehearsal, Repeat, Scores
from spec.retention import Granularity

__all__ = ["KVzipPlus", "kvzip", "kvzip_plus", "kvzip_plus_score", "kvzip_score", "kvzip_uniform", "rehearsal_chunks"]

_ROWS = 32  # queries at a time: no (H, r, m + r) array is made, and what is made stays in the cache


def rehearsal_chunks(
    token_ids: Int64[IntVector, " n"], rehearsal: Rehearsal,
) -> list[tuple[int, int, Int64[IntVector, " r"]]]:
    """Start and stop of each chunk of the context, and the r tokens that the model reads behind the prompt for it.

    Implements: PO-REHEARSAL

    Source: KVzip, Section 3.4 and Figure 7; the order of the parts is the official code's.
    """
    assert rehearsal.template is not None
    first, later, answer = rehearsal.template
    found: list[tuple[int, int, IntVector]] = []
    end, overlap = len(token_ids) - rehearsal.N_recent, min(rehearsal.overlap, rehearsal.chunk)
    for start in range(rehearsal.N_sink, end, rehearsal.chunk):
        stop = min(start + rehearsal.chunk, end)
        request = [*later, *token_ids[start - overlap : start]] if found else first
        found.append((start, stop, np.array([*request, *answer, *token_ids[start:stop]], dtype=np.int64)))
    return found


def _attended(view: LayerView, N_sink: int) -> Iterator[tuple[Repeat, slice, Float64[Cube, "H rows m"]]]:
    """The weights of a repeat's queries, some rows at a time, on its chunk's keys.

    The sinks and the repeat itself, which is causal, stand in the denominator; the rest of the prompt does not.
    """
    if view.repeats is None:
        raise SpecError("repeats", None, "KVzip scores prompts that were rehearsed")
    k = wide(view.k)
    for repeat in view.repeats:
        q, own = wide(repeat.q), wide(repeat.k)
        keys = np.concatenate([k[:, :N_sink], k[:, repeat.start : repeat.stop], own], axis=1)
        position, before = np.arange(keys.shape[1]), keys.shape[1] - own.shape[1]
        for first in range(0, q.shape[1], _ROWS):
            rows = slice(first, first + _ROWS)
            asked = position[before:][rows]
            visible = slice(int(asked[-1]) + 1)
            A = attention(q[:, rows], keys[:, visible], asked, position[visible], view.scaling, view.softcap)
            yield repeat, rows, A[:, :, N_sink:before]


def kvzip_score(view: LayerView, N_sink: int) -> Float64[Matrix, "H_kv n"]:
    """The largest weight over the group and all queries of the chunk's repeat; NaN for what no chunk holds.

    Implements: PO-KVZIP

    Source: KVzip, Eq. 2 and Section 3.4.

    Raises:
        SpecError: where the prompt was not rehearsed.
    """
    scores = np.full(view.k.shape[:2], np.nan)
    for repeat, _, A in _attended(view, N_sink):
        chunk = scores[:, repeat.start : repeat.stop]
        np.fmax(chunk, group_maximum(A, len(chunk)).max(axis=1), out=chunk)
    return scores


def kvzip_plus_score(
    view: LayerView, N_sink: int, W_o: Float64[Cube, "H d hidden"],
) -> Float64[Matrix, "H_kv n"]:
    """The same of the weights times ||W_o v_i||_2 of the query head, over the norm of what the query was made of.

    Implements: PO-KVZIP-PLUS

    Source: kvpress, KVzipPress with `kvzip_plus_normalization`.

    Raises:
        SpecError: when the values were not captured, or a norm is not positive.
    """
    if view.v is None or any((repeat.norms <= 0).any() for repeat in view.repeats or ()):
        raise SpecError("v" if view.v is None else "norms", None, "KVzip+ weighs by values, and by norms above 0")
    size = np.linalg.norm(np.matmul(np.repeat(wide(view.v), len(W_o) // len(view.v), axis=0), W_o), axis=2)
    scores = np.full(view.k.shape[:2], np.nan)
    for repeat, rows, A in _attended(view, N_sink):
        chunk = scores[:, repeat.start : repeat.stop]
        output = A * size[:, None, repeat.start : repeat.stop] / repeat.norms[rows, None]
        np.fmax(chunk, group_maximum(output, len(chunk)).max(axis=1), out=chunk)
    return scores


@dataclass(frozen=True)
class KVzipPlus:
    """KVzip+ over all layers; needs each layer's output projection (H, d, hidden), under the layer's index."""

    needs: Needs
    W_o: Mapping[int, Cube]
    N_sink: int

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        rows = [
            kvzip_plus_score(view, self.N_sink, wide(self.W_o[layer])) for layer, view in observation.layers.items()
        ]
        return stacked(observation, rows)


def kvzip(
    template: Sequence[Sequence[int]] | None = None, N_sink: int = 4, N_recent: int = 0, chunk: int = 2000,
    overlap: int = 8,
) -> Policy:
    """The first N_sink and last N_recent tokens, and the best others of all layers and heads together.

    The official code sets N_sink to the length of its system prompt, reads what follows the context later, and keeps
    what scores above a threshold: fewer than the budget. kvpress has 4 sinks and chunks of 2048, evicts what stands
    between sinks and context first of all, and rounds once for all heads. Both compute in the model's precision; the
    template is theirs to word.

    Raises:
        SpecError: without a template, or for constants below their least values.
    """
    rehearsal = Rehearsal(template, N_sink, N_recent, chunk, overlap)
    scorer = LayerScorer(
        Needs("all", 0, token_ids=True, rehearsal=rehearsal), partial(kvzip_score, N_sink=N_sink), separable=False
    )
    return Policy(
        "kvzip", scorer, across_layers, top_units, SinkAndRecent(N_sink, N_recent), granularity=Granularity.HEAD,
        floor=N_sink + N_recent,
    )


def kvzip_uniform(
    template: Sequence[Sequence[int]] | None = None, N_sink: int = 4, N_recent: int = 0, chunk: int = 2000,
    overlap: int = 8,
) -> Policy:
    """The same scores, and as many tokens in each head; in kvpress (`layerwise`) the heads of a layer compete.

    Raises:
        SpecError: as `kvzip`.
    """
    return replace(kvzip(template, N_sink, N_recent, chunk, overlap), name="kvzip-uniform", budgets=even)


def kvzip_plus(
    W_o: Mapping[int, Cube], template: Sequence[Sequence[int]] | None = None, N_sink: int = 4, N_recent: int = 0,
    chunk: int = 2000, overlap: int = 8,
) -> Policy:
    """KVzip's budgets over its scores with the output's norm.

    Raises:
        SpecError: as `kvzip`.
    """
    plain = kvzip(template, N_sink, N_recent, chunk, overlap)
    scorer = KVzipPlus(replace(plain.scorer.needs, values=True), W_o, N_sink)
    return replace(plain, name="kvzip-plus", scorer=scorer)
