"""KVzip: wrong readings of the rehearsal, of its attention, and of the one pool."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of
from conformance.assurance.saboteurs.size_inputs import random_rows, scored
from reference.crystalcache.coattention import attention
from reference.policies.attention import largest_attention, wide
from reference.policies.budgets import across_layers
from reference.policies.kvzip import kvzip_plus_score, kvzip_score, rehearsal_chunks
from spec.policy import LayerView, Rehearsal, Repeat, Scores

__all__: list[str] = []


def changed(view: LayerView, **parts: Any) -> LayerView:
    """The view with other parts of each repeat, by functions of it."""
    repeats = view.repeats and tuple(replace(x, **{at: make(x) for at, make in parts.items()}) for x in view.repeats)
    return replace(view, repeats=repeats)


def weights(view: LayerView, x: Repeat, N_sink: int, own: int | None = None) -> Array:
    """Of the repeat's queries on the chunk's keys, (H_kv, G, r, m); `own` of the repeat's keys are there, or all."""
    keys = np.concatenate([view.k[:, :N_sink], view.k[:, x.start : x.stop], x.k[:, :own]], axis=1)
    before = N_sink + x.stop - x.start
    asked = before + np.arange(x.q.shape[1])
    A = attention(x.q, keys, asked, np.arange(keys.shape[1]), view.scaling, view.softcap)[:, :, N_sink:before]
    return A.reshape(len(keys), -1, *A.shape[1:])


@instead_of(rehearsal_chunks, "PO-REHEARSAL")
def the_first_request_for_all(token_ids: Array, rehearsal: Rehearsal) -> Any:
    """Every chunk has the request of the first."""
    assert rehearsal.template is not None
    first, _, answer = rehearsal.template
    return rehearsal_chunks(token_ids, replace(rehearsal, template=(first, first, answer), overlap=0))


@instead_of(rehearsal_chunks, "PO-REHEARSAL")
def the_end_of_the_chunk_itself(token_ids: Array, rehearsal: Rehearsal) -> Any:
    """A request ends with the last tokens of the chunk that it asks for."""
    assert rehearsal.template is not None
    _, later, answer = rehearsal.template
    right = rehearsal_chunks(token_ids, rehearsal)
    return right[:1] + [
        (start, stop, np.array([
            *later, *token_ids[max(start, stop - rehearsal.overlap) : stop], *answer, *token_ids[start:stop],
        ], dtype=np.int64)) for start, stop, _ in right[1:]
    ]


@instead_of(rehearsal_chunks, "PO-REHEARSAL")
def the_last_tokens_are_context(token_ids: Array, rehearsal: Rehearsal) -> Any:
    """What stands behind the context is repeated too."""
    return rehearsal_chunks(token_ids, replace(rehearsal, N_recent=0))


@instead_of(kvzip_score, "PO-KVZIP")
def all_keys_in_the_denominator(view: LayerView, N_sink: int, largest: Any = largest_attention) -> Array:
    """The softmax runs over all keys of the prompt."""
    scores = np.full(view.k.shape[:2], np.nan)
    for x in view.repeats or ():
        own, whole = slice(x.start, x.stop), replace(x, start=N_sink, stop=view.k.shape[1])
        scores[:, own] = kvzip_score(replace(view, repeats=(whole,)), N_sink)[:, own]
    return scores


@instead_of(kvzip_score, "PO-KVZIP")
def without_the_repeat_s_keys(view: LayerView, N_sink: int, largest: Any = largest_attention) -> Array:
    """The repeat's own keys are not in the softmax."""
    scores = np.full(view.k.shape[:2], np.nan)
    for x in view.repeats or ():
        scores[:, x.start : x.stop] = weights(view, x, N_sink, own=0).max(axis=(1, 2))
    return scores


@instead_of(kvzip_score, "PO-KVZIP")
def without_the_sinks(view: LayerView, N_sink: int, largest: Any = largest_attention) -> Array:
    """The first tokens are not in the softmax."""
    return kvzip_score(view, 0)


@instead_of(kvzip_score, "PO-KVZIP")
def the_request_asks_nothing(view: LayerView, N_sink: int, largest: Any = largest_attention) -> Array:
    """Only the queries of the chunk's own tokens score, over what they see."""
    scores = np.full(view.k.shape[:2], np.nan)
    for x in view.repeats or ():
        own = slice(x.start, x.stop)
        scores[:, own] = weights(view, x, N_sink)[:, :, x.start - x.stop :].max(axis=(1, 2))
    return scores


@instead_of(kvzip_score, "PO-KVZIP")
def the_mean_over_queries(view: LayerView, N_sink: int, largest: Any = largest_attention) -> Array:
    """A token counts by its mean over the repeat's queries."""
    scores = np.full(view.k.shape[:2], np.nan)
    for x in view.repeats or ():
        scores[:, x.start : x.stop] = weights(view, x, N_sink).mean(axis=2).max(axis=1)
    return scores


@instead_of(kvzip_plus_score, "PO-KVZIP-PLUS")
def maxima_before_the_weight(view: LayerView, N_sink: int, W_o: Array, largest: Any = largest_attention) -> Array:
    """The plain score is weighed by the largest output of the group, and by no norm."""
    size = np.linalg.norm(np.matmul(np.repeat(wide(view.v), len(W_o) // len(view.k), axis=0), W_o), axis=2)
    weighed: Array = kvzip_score(view, N_sink) * size.reshape(len(view.k), -1, view.k.shape[1]).max(axis=1)
    return weighed


@instead_of(kvzip_plus_score, "PO-KVZIP-PLUS")
def without_the_norm(view: LayerView, N_sink: int, W_o: Array, largest: Any = largest_attention) -> Array:
    """The hidden state's norm is left out."""
    return kvzip_plus_score(changed(view, norms=lambda x: np.ones_like(x.norms)), N_sink, W_o)


@instead_of(kvzip_plus_score, "PO-KVZIP-PLUS")
def values_without_projection(view: LayerView, N_sink: int, W_o: Array, largest: Any = largest_attention) -> Array:
    """The norm is that of the value."""
    return kvzip_plus_score(view, N_sink, np.tile(np.eye(W_o.shape[1]), (len(W_o), 1, 1)))


@instead_of(largest_attention, "PO-KVZIP")
def logits_of_a_repeat_without_a_cap(q: Array, k: Array, norms: Array, scaling: float, softcap: float | None) -> Array:
    """The logits of a repeat have no soft cap."""
    return largest_attention(q, k, norms, scaling, None)


@instead_of(largest_attention, "PO-KVZIP")
def queries_see_all_that_was_repeated(
    q: Array, k: Array, norms: Array, scaling: float, softcap: float | None,
) -> Array:
    """A query's denominator holds the later tokens of the repeat too."""
    each = [largest_attention(q[:, at : at + 1], k, norms[at : at + 1], scaling, softcap) for at in range(len(norms))]
    most: Array = np.max(each, axis=0)
    return most


@instead_of(largest_attention, "PO-KVZIP-PLUS")
def the_norm_of_the_query_before(q: Array, k: Array, norms: Array, scaling: float, softcap: float | None) -> Array:
    """A query's weights are over the norm of the one before it."""
    return largest_attention(q, k, np.roll(norms, 1), scaling, softcap)


@instead_of(across_layers, "PO-GLOBAL-BUDGET")
def higher_sets_first(total: int, scores: Scores) -> Array:
    """Of equal scores the higher set's has its place."""
    return across_layers(total, replace(scores, values=scores.values[::-1]))[::-1]


@instead_of(across_layers, "PO-GLOBAL-BUDGET")
def the_official_threshold(total: int, scores: Scores) -> Array:
    """What scores above the last place's score is kept: the last place stays empty, and tied scores lose theirs."""
    pinned = int(np.isnan(scores.values[0]).sum())
    ordered = np.sort(scores.values[:, ~np.isnan(scores.values[0])].ravel())[::-1]
    free = total - pinned * len(scores.values)
    if free >= len(ordered) or free < 1:
        return across_layers(total, scores)
    kept: Array = pinned + (scores.values > ordered[free - 1]).sum(axis=1)
    return kept


@beyond("100 chunks", rehearsal_chunks, "PO-REHEARSAL", lambda: (
    np.arange(300), Rehearsal(((1,), (2,), (3,)), 0, 0, 2, 1),
))
def a_hundred_chunks(token_ids: Array, rehearsal: Rehearsal) -> Any:
    """What stands behind the hundredth chunk is not repeated."""
    return rehearsal_chunks(token_ids, rehearsal)[:100]


def asked(r: int) -> LayerView:
    """A chunk of five tokens, repeated by r queries of which the last attends most."""
    q = random_rows(1, r, 4) * np.linspace(0.1, 5.0, r)[:, None]
    repeat = Repeat(1, 6, q, random_rows(1, r, 4) - 3.0, np.arange(r, 0, -1, dtype=np.float64))
    return LayerView(q[:, :0], random_rows(1, 8, 4), random_rows(1, 8, 4), 0.5, None, None, (repeat,))


@beyond("256 queries", kvzip_score, "PO-KVZIP", lambda: (asked(300), 1))
def queries_up_to_256(view: LayerView, N_sink: int, largest: Any = largest_attention) -> Array:
    """The queries behind the first 256 of a repeat score nothing."""
    return kvzip_score(changed(view, q=lambda x: x.q[:, :256], k=lambda x: x.k[:, :256]), N_sink)


@beyond("256 queries", kvzip_plus_score, "PO-KVZIP-PLUS", lambda: (asked(300), 1, random_rows(1, 4, 3)))
def norms_of_256_queries(view: LayerView, N_sink: int, W_o: Array, largest: Any = largest_attention) -> Array:
    """Norms are read in blocks of 256, each from the first on."""
    return kvzip_plus_score(
        changed(view, norms=lambda x: x.norms[np.arange(len(x.norms)) % 256]), N_sink, W_o
    )


@beyond("64 queries of a block", largest_attention, "PO-KVZIP", lambda: (
    random_rows(2, 70, 4), random_rows(2, 70, 4), np.ones(70), 1.0, None,
))
def repeats_in_whole_blocks(q: Array, k: Array, norms: Array, scaling: float, softcap: float | None) -> Array:
    """Beyond 64 queries, those behind the last whole block of 64 give nothing."""
    over = len(norms) % 64 if len(norms) > 64 else 0
    whole = largest_attention(
        q[:, : len(norms) - over], k[:, : k.shape[1] - over], norms[: len(norms) - over], scaling, softcap
    )
    return np.pad(whole, ((0, 0), (0, over)))


@beyond("32 sets", across_layers, "PO-GLOBAL-BUDGET", lambda: (
    400, scored(random_rows(40, 20)),
))
def a_pool_of_32_sets(total: int, scores: Scores) -> Array:
    """Sets behind the thirty-second have even shares, and no part in the pool."""
    groups = len(scores.values)
    own = across_layers(total * min(groups, 32) // groups, replace(scores, values=scores.values[:32]))
    return np.concatenate([own, np.full(max(0, groups - 32), total // groups)])
