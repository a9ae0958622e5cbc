"""KVzip: the score of a token is the largest attention weight on the token while the model repeats the context."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reference.policies.attention import group_maximum, largest_attention, wide
from reference.policies.budgets import across_layers, even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, stacked
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, Int64, IntVector, Matrix, Vector
from spec.backend import Backend, resolve
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Policy, Rehearsal, Repeat, Scores
from spec.retention import Granularity

__all__ = ["KVzipPlus", "kvzip", "kvzip_plus", "kvzip_plus_score", "kvzip_score", "kvzip_uniform", "rehearsal_chunks"]

Largest = Callable[[DeviceArray, DeviceArray, Vector, float, float | None, DeviceArray | None], Matrix]


def rehearsal_chunks(
    token_ids: Int64[IntVector, " n"], rehearsal: Rehearsal,
) -> list[tuple[int, int, Int64[IntVector, " r"]]]:
    """Return each chunk's start, stop, and the r token ids that the model processes to repeat the chunk.

    Implements: PO-REHEARSAL

    Source: KVzip, Section 3.4 and Figure 7. The parts of the r token ids have the same order as in the official code.
    """
    assert rehearsal.template is not None
    first, later, answer = rehearsal.template
    chunks: list[tuple[int, int, IntVector]] = []
    end, overlap = len(token_ids) - rehearsal.N_recent, min(rehearsal.overlap, rehearsal.chunk)
    for start in range(rehearsal.N_sink, end, rehearsal.chunk):
        stop = min(start + rehearsal.chunk, end)
        request = [*later, *token_ids[start - overlap : start]] if chunks else first
        chunks.append((start, stop, np.array([*request, *answer, *token_ids[start:stop]], dtype=np.int64)))
    return chunks


def _repeats(view: LayerView) -> tuple[Repeat, ...]:
    if view.repeats is None:
        raise SpecError("repeats", None, "are needed: KVzip scores tokens while the model repeats the prompt")
    return view.repeats


def _attended(
    view: LayerView, repeats: Iterable[Repeat], N_sink: int, largest: Largest,
) -> Iterator[tuple[slice, Float64[Cube, "H one m"]]]:
    """Yield each chunk's slice, and the largest quotient attention weight / query norm of each token of the chunk.

    The attention is the attention of the queries that repeat the chunk.

    The softmax denominator includes the sinks, the chunk and (causally) the repeated tokens, but not the rest of the
    prompt.
    """
    k = np.asarray(view.k)
    for repeat in repeats:
        keys = np.concatenate([k[:, :N_sink], k[:, repeat.start : repeat.stop], np.asarray(repeat.k)], axis=1)
        A = largest(repeat.q, keys, repeat.norms, view.scaling, view.softcap, view.sinks)
        yield slice(repeat.start, repeat.stop), A[:, None, N_sink : N_sink + repeat.stop - repeat.start]


def kvzip_score(
    view: LayerView, N_sink: int, largest: Largest = largest_attention,
) -> Float64[Matrix, "H_kv n"]:
    """Return each token's largest attention weight over all query heads and all queries that repeat the token's chunk.

    Tokens outside all chunks have the score NaN.

    Implements: PO-KVZIP

    Source: KVzip, Eq. 2 and Section 3.4.

    Raises:
        SpecError: if the model did not repeat the prompt.
    """
    scores = np.full(view.k.shape[:2], np.nan)
    plain = [replace(repeat, norms=np.ones_like(repeat.norms)) for repeat in _repeats(view)]
    for chunk, A in _attended(view, plain, N_sink, largest):
        scores[:, chunk] = np.fmax(scores[:, chunk], group_maximum(A, len(scores))[:, 0])
    return scores


def kvzip_plus_score(
    view: LayerView, N_sink: int, W_o: DeviceArray, largest: Largest = largest_attention,
) -> Float64[Matrix, "H_kv n"]:
    """Return KVzip's score, with each weight multiplied by ||W_o v_i||_2 and divided by the norm of the hidden state.

    W_o (H, d, hidden) is the layer's output projection, with one matrix for each query head. The hidden state is the
    input from which the layer computed the query.

    Implements: PO-KVZIP-PLUS

    Source: kvpress, KVzipPress with `kvzip_plus_normalization`.

    Raises:
        SpecError: if the values were not captured, or if a norm is not positive.
    """
    if view.v is None or any((repeat.norms <= 0).any() for repeat in _repeats(view)):
        raise SpecError("v" if view.v is None else "norms", None, "KVzip+ needs the values, and norms above 0")
    size = np.linalg.norm(np.matmul(np.repeat(wide(view.v), len(W_o) // len(view.v), axis=0), wide(W_o)), axis=2)
    scores = np.full(view.k.shape[:2], np.nan)
    for chunk, A in _attended(view, _repeats(view), N_sink, largest):
        scores[:, chunk] = np.fmax(scores[:, chunk], group_maximum(A * size[:, None, chunk], len(scores))[:, 0])
    return scores


@dataclass(frozen=True)
class KVzipPlus:
    """Scorer of KVzip+. `W_o` maps the index of a layer to the layer's output projection (H, d, hidden)."""

    needs: Needs
    W_o: Mapping[int, DeviceArray]
    N_sink: int
    largest: Largest = largest_attention
    score: Callable[..., DeviceArray] = kvzip_plus_score

    @property
    def provided(self) -> Provided:
        recent = 0 if self.needs.rehearsal is None else self.needs.rehearsal.N_recent
        return Provided(unscored=(self.N_sink, recent))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Return the scores of KVzip+.

        Raises:
            SpecError: as in `kvzip_plus_score`, or if a rehearsed token has no score because a norm on a device is 0.
        """
        scores = stacked(observation, [
            self.score(view, self.N_sink, self.W_o[layer], self.largest) for layer, view in observation.layers.items()
        ])
        for repeat in next(iter(observation.layers.values())).repeats or ():
            if np.isnan(scores.values[:, repeat.start : repeat.stop]).any():
                raise SpecError("norms", None, "KVzip+ needs the values, and norms above 0")
        return scores


@named(
    "kvzip", "Kim et al., KVzip (arXiv 2505.23416)",
    "tokens that the model attends to most while it repeats the prompt; all heads share one budget",
)
def kvzip(
    template: Sequence[Sequence[int]] | None = None, N_sink: int = 4, N_recent: int = 0, chunk: int = 2000,
    overlap: int = 8, backend: str | Backend = "numpy",
) -> Policy:
    """Return KVzip: keep the first N_sink, the last N_recent, and the best-scored other tokens of all layers and heads.

    The official code sets N_sink to the length of the system prompt. The official code evicts before it processes text
    after the context. The official code keeps the tokens with scores above a threshold, and keeps fewer tokens than the
    budget allows. KVzip in kvpress has 4 sinks and chunks of 2048 tokens. First, kvpress evicts tokens between the
    sinks and the context. kvpress rounds the budget once for all heads together. The official code and kvpress compute
    in the model's dtype. The templates of the official code and of kvpress use different words.

    Raises:
        SpecError: if there is no template, if a constant is too small, or if the backend is unknown.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family `policies`.
    """
    needs = Needs("all", query_rows=0, token_ids=True, rehearsal=Rehearsal(template, N_sink, N_recent, chunk, overlap))
    largest = resolve(backend).require_policies().largest_attention
    scorer = LayerScorer(needs, partial(kvzip_score, N_sink=N_sink, largest=largest), separable=False)
    return Policy(
        "kvzip", scorer, across_layers, top_units, SinkAndRecent(N_sink, N_recent), granularity=Granularity.HEAD,
    )


@named(
    "kvzip-uniform", "Kim et al., KVzip (arXiv 2505.23416)",
    "tokens with the best KVzip scores; each head keeps the same number of tokens",
)
def kvzip_uniform(
    template: Sequence[Sequence[int]] | None = None, N_sink: int = 4, N_recent: int = 0, chunk: int = 2000,
    overlap: int = 8, backend: str | Backend = "numpy",
) -> Policy:
    """Return KVzip with the same number of tokens in each head.

    With `layerwise` in kvpress, the heads of a layer compete for the layer's budget.

    Raises:
        SpecError: as in `kvzip`.
        BackendUnavailable: as in `kvzip`.
    """
    return replace(kvzip(template, N_sink, N_recent, chunk, overlap, backend), name="kvzip-uniform", budgets=even)


@named(
    "kvzip-plus", "Jegou and Jeblick, KVzap; kvpress",
    "tokens with the largest product of KVzip score and norm of the projected value; all heads share one budget",
    model_constants=frozenset({"W_o"}),
)
def kvzip_plus(
    W_o: Mapping[int, DeviceArray], template: Sequence[Sequence[int]] | None = None, N_sink: int = 4, N_recent: int = 0,
    chunk: int = 2000, overlap: int = 8, backend: str | Backend = "numpy",
) -> Policy:
    """Return KVzip+: KVzip with each token's score multiplied by the norm of the token's projected value.

    Raises:
        SpecError: as in `kvzip`.
        BackendUnavailable: as in `kvzip`.
    """
    plain = kvzip(template, N_sink, N_recent, chunk, overlap, backend)
    largest = resolve(backend).require_policies().largest_attention
    scorer = KVzipPlus(replace(plain.scorer.needs, values=True), W_o, N_sink, largest)
    return replace(plain, name="kvzip-plus", scorer=scorer)
