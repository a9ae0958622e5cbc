"""Policies: wrong readings of each method."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of, method_instead_of
from reference.crystalcache.coattention import attention
from reference.directions import unit_keys
from reference.policies import (
    chunkkv,
    chunkkv_described,
    h2o_described,
    pyramidkv,
    pyramidkv_described,
    snapkv,
    streaming_llm,
)
from reference.policies.adakv import adakv_score
from reference.policies.attention import (
    average_pool,
    group_maximum,
    group_mean,
    max_pool,
    observed_attention,
    received_attention,
    softmax,
    wide,
)
from reference.policies.budgets import Pyramid, even
from reference.policies.caote import caote_error
from reference.policies.chunkkv import chunk_offsets, chunk_scores
from reference.policies.defensivekv import defensive_maximum, first_stage, output_share
from reference.policies.epicache import epicache_score
from reference.policies.expected_attention import expected_logits, query_statistics
from reference.policies.h2o import HeavyHitters, h2o_score
from reference.policies.keydiff import keydiff_score
from reference.policies.knorm import knorm_score
from reference.policies.lagkv import lagkv, lagkv_information, lagkv_score
from reference.policies.protections import SinkAndRecent
from reference.policies.rkv import rkv_importance, rkv_redundancy
from reference.policies.scorers import with_window
from reference.policies.selectors import recent_half, top_units
from reference.policies.snapkv import snapkv_score
from reference.policies.tova import tova_score
from spec.policy import Policy, Scores, Selection

__all__: list[str] = []


@instead_of(streaming_llm, "PO-STREAMINGLLM")
def sinks_beside_the_budget(N_sink: int = 4) -> Policy:
    """The window is B tokens, and the sinks come on top."""
    return replace(streaming_llm(N_sink), budgets=lambda total, scores: even(total + N_sink, scores))


@instead_of(streaming_llm, "PO-STREAMINGLLM")
def no_sinks(N_sink: int = 4) -> Policy:
    """The last B tokens stay, and nothing else."""
    return replace(streaming_llm(0), floor=N_sink)


@method_instead_of(HeavyHitters, "step", "PO-H2O")
def only_the_last_query(scorer: Any, records: object, observation: Any) -> Scores:
    """A step forgets what earlier queries attended to."""
    return HeavyHitters(scorer.needs, scorer.score).step(np.zeros_like(np.asarray(records)), observation)


@method_instead_of(HeavyHitters, "keep", "PO-H2O")
def sums_stay_in_their_slots(scorer: Any, records: object, slots: Array) -> Any:
    """Sums do not follow their tokens when others go."""
    return np.asarray(records)[:, : slots.shape[1]]


@instead_of(recent_half, "PO-H2O")
def heavy_hitters_alone(scores: Scores, budgets: Array, protected: Array, choose: Any = None) -> Selection:
    """No half is kept for the newest tokens."""
    return top_units(scores, budgets, protected)


@instead_of(h2o_score, "PO-H2O-DESCRIBED")
def mean_over_queries(view: Any, received: Any = received_attention) -> Any:
    """Each key's sum is divided by the number of queries that see it."""
    total = h2o_score(view, received)
    return total / np.arange(total.shape[1], 0, -1)


@instead_of(h2o_described, "PO-H2O-DESCRIBED")
def half_recent(W: int = 128) -> Policy:
    """Half of the budget is recent, instead of W tokens."""
    return replace(h2o_described(W), selector=recent_half)


@instead_of(snapkv_score, "PO-SNAPKV")
def averages_instead_of_maxima(view: Any, W: int, kernel: int) -> Any:
    """The pool is an average."""
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]].sum(axis=1)
    return with_window(group_mean(average_pool(past, kernel), len(view.k)), A.shape[2])


@instead_of(snapkv_score, "PO-SNAPKV")
def group_before_the_pool(view: Any, W: int, kernel: int) -> Any:
    """The group is averaged before the pool."""
    return adakv_score(view, W, kernel)


@instead_of(snapkv_score, "PO-SNAPKV")
def pool_that_sees_the_window(view: Any, W: int, kernel: int) -> Any:
    """Keys of the window are in the pool, and cut off behind it."""
    A = observed_attention(view, W)
    pooled = max_pool(A.sum(axis=1), kernel)[:, : A.shape[2] - A.shape[1]]
    return with_window(group_mean(pooled, len(view.k)), A.shape[2])


@instead_of(snapkv_score, "PO-SNAPKV")
def window_without_a_mask(view: Any, W: int, kernel: int) -> Any:
    """Each query of the window sees all of its keys."""
    k, n = wide(view.k), view.k.shape[1]
    q, positions = wide(view.q)[:, -min(W, n) :], np.arange(n)
    A = attention(q, k, np.full(q.shape[1], n), positions, view.scaling, view.softcap)
    past = A[:, :, : n - q.shape[1]].sum(axis=1)
    return with_window(group_mean(max_pool(past, kernel), len(view.k)), n)


@instead_of(snapkv_score, "PO-SNAPKV")
def ties_of_a_pool_to_the_higher(view: Any, W: int, kernel: int) -> Any:
    """Of tokens that share a maximum the higher position stays."""
    score = snapkv_score(view, W, kernel)
    return score * (1 + 1e-12 * np.arange(score.shape[1]))


@instead_of(snapkv, "PO-SNAPKV")
def window_beside_the_budget(W: int = 32, kernel: int = 7) -> Policy:
    """The window comes on top of B."""
    return replace(snapkv(W, kernel), budgets=lambda total, scores: even(total, scores) + W)


@instead_of(pyramidkv, "PO-PYRAMIDKV")
def flat(W: int = 32, kernel: int = 7, beta: int = 20) -> Policy:
    """Every layer has the same share."""
    return replace(pyramidkv(W, kernel, beta), budgets=even)


@instead_of(pyramidkv, "PO-PYRAMIDKV")
def steeper(W: int = 32, kernel: int = 7, beta: int = 20) -> Policy:
    """The window is part of the line, not below it."""
    return replace(pyramidkv(W, kernel, beta), budgets=_without_window)


def _without_window(total: int, scores: Scores) -> Any:
    return np.maximum(Pyramid(0)(total, scores), int(np.isnan(scores.values[0]).sum()))


@instead_of(pyramidkv_described, "PO-PYRAMIDKV-DESCRIBED")
def as_published(W: int = 128, beta: int = 20) -> Policy:
    """Scores are those of the observation window."""
    return pyramidkv(W, 1, beta)


@instead_of(pyramidkv_described, "PO-PYRAMIDKV-DESCRIBED")
def cumulative_and_flat(W: int = 128, beta: int = 20) -> Policy:
    """Every layer has the same share of cumulative attention."""
    return h2o_described(W)


@instead_of(chunk_scores, "PO-CHUNKKV")
def mean_of_a_chunk(members: Array, offsets: Array) -> Any:
    """A chunk scores the mean of its tokens, so that a short one is not behind."""
    return chunk_scores(members, offsets) / np.diff(offsets)


@instead_of(chunk_offsets, "PO-CHUNKKV")
def short_chunk_first(past: int, n: int, c: int) -> Any:
    """Chunks are counted back from the window: the first one is the short one."""
    ends = sorted({0, *range(past, 0, -c), *([past] if past < n else []), n})
    return np.array(ends, dtype=np.int64)


@instead_of(chunkkv, "PO-CHUNKKV")
def without_reuse(c: int = 10, W: int = 32, N_reuse: int = 1) -> Policy:
    """Every layer has chunks of its own, whatever N_reuse."""
    return chunkkv(c, W, 1)


@instead_of(chunkkv_described, "PO-CHUNKKV-DESCRIBED")
def with_the_published_window(c: int = 10) -> Policy:
    """Only the last query scores, and its token stays."""
    return chunkkv(c, 1)


@instead_of(chunkkv_described, "PO-CHUNKKV-DESCRIBED")
def with_a_pinned_end(c: int = 10) -> Policy:
    """The last token is protected."""
    return replace(chunkkv_described(c), protection=SinkAndRecent(0, 1), floor=1)


@instead_of(tova_score, "PO-TOVA")
def newest_is_safe(view: Any, received: Any = received_attention) -> Any:
    """The last token cannot go."""
    scores = tova_score(view, received)
    scores[:, -1] = scores.max() + 1
    return scores


@instead_of(tova_score, "PO-TOVA")
def largest_head(view: Any, received: Any = received_attention) -> Any:
    """A key's score is that of its best head."""
    return observed_attention(view, 1).max(axis=0)


@instead_of(keydiff_score, "PO-KEYDIFF")
def anchor_of_raw_keys(view: Any) -> Any:
    """The anchor is the mean of the keys as they are."""
    unit = unit_keys(wide(view.k))
    anchor = wide(view.k).mean(axis=1, keepdims=True)
    length = np.sqrt((anchor * anchor).sum(axis=2))
    return -(unit * anchor).sum(axis=2) / np.where(length > 0, length, 1)


@instead_of(keydiff_score, "PO-KEYDIFF")
def like_keys_stay(view: Any) -> Any:
    """Keys like the anchor are kept."""
    return -keydiff_score(view)


@instead_of(knorm_score, "PO-KNORM")
def large_keys_stay(view: Any) -> Any:
    """Keys of large norm are kept."""
    return -knorm_score(view)


@instead_of(knorm_score, "PO-KNORM")
def sum_of_magnitudes(view: Any) -> Any:
    """The norm is the sum of magnitudes."""
    return -np.abs(wide(view.k)).sum(axis=2)


@instead_of(expected_logits, "PO-EXPECTED-ATTENTION")
def queries_without_spread(mean: Array, covariance: Array, k: Array, scaling: float) -> Any:
    """The covariance is left out."""
    return expected_logits(mean, np.zeros_like(covariance), k, scaling)


@instead_of(query_statistics, "PO-EXPECTED-ATTENTION")
def second_moment(q: Array) -> tuple[Array, Array]:
    """The covariance is not centred."""
    return query_statistics(q)[0], np.matmul(q.transpose(0, 2, 1), q) / q.shape[1]


@instead_of(adakv_score, "PO-ADAKV")
def pool_before_the_group(view: Any, W: int, kernel: int) -> Any:
    """Query heads are pooled one by one, then averaged."""
    return snapkv_score(view, W, kernel)


@instead_of(adakv_score, "PO-ADAKV")
def best_query_head(view: Any, W: int, kernel: int) -> Any:
    """A group scores what its best query head does."""
    A = observed_attention(view, W)
    past = np.expand_dims(A[:, :, : A.shape[2] - A.shape[1]].mean(axis=1), 1)
    return with_window(max_pool(group_maximum(past, len(view.k))[:, 0], kernel), A.shape[2])


@instead_of(lagkv_information, "PO-LAGKV")
def spread_with_divisor_d(x: Array, lag: int) -> Any:
    """The deviation is that of a population: divided by d, not by d - 1."""
    shrunk = np.log(lagkv_information(x, lag)) * np.sqrt((x.shape[2] - 1) / x.shape[2])
    return softmax(shrunk)


@instead_of(lagkv_information, "PO-LAGKV")
def judged_by_the_partition_before(x: Array, lag: int) -> Any:
    """A partition's reference is the one before it; the last one and the first change places."""
    H, n, _ = x.shape
    turned = x.reshape(H, n // lag, lag, -1)[:, ::-1].reshape(x.shape)
    return lagkv_information(turned, lag).reshape(H, -1, lag)[:, ::-1].reshape(-1, lag)


@instead_of(lagkv_score, "PO-LAGKV")
def keys_alone(view: Any, N_sink: int, lag: int) -> Any:
    """Values say nothing."""
    return lagkv_score(replace(view, v=view.k), N_sink, lag)


@instead_of(lagkv, "PO-LAGKV")
def sinks_are_ranked(N_sink: int = 4, lag: int = 128) -> Policy:
    """Partitions begin at position 0, and no sink is kept."""
    return lagkv(0, lag)


@instead_of(rkv_redundancy, "PO-RKV")
def nothing_is_spared(k: Array) -> Any:
    """No column is spared: the newest of two like keys is as redundant as the older."""
    unit = k / (np.sqrt((k * k).sum(axis=1, keepdims=True)) + 1e-8)
    C = unit @ unit.T
    np.fill_diagonal(C, 0.0)
    powers = np.exp(C.mean(axis=0))[None]
    return powers / powers.sum()


@instead_of(rkv_redundancy, "PO-RKV")
def oldest_is_spared(k: Array) -> Any:
    """Each row spares its first like key, not its last."""
    return rkv_redundancy(k[::-1])[:, ::-1]


@instead_of(rkv_importance, "PO-RKV")
def softmax_with_the_window(view: Any, W: int, kernel: int) -> Any:
    """The window's keys are in the softmax."""
    return adakv_score(view, W, kernel)[:, : view.k.shape[1] - min(W, view.q.shape[1])]


@instead_of(caote_error, "PO-CAOTE")
def without_renormalising(alpha: Array, v: Array) -> Any:
    """The others are not renormalised: alpha times the distance."""
    error = caote_error(alpha, v)
    return np.where(np.isinf(error), error, error * (1 - alpha))


@instead_of(caote_error, "PO-CAOTE")
def mean_value(alpha: Array, v: Array) -> Any:
    """X is the mean of the values."""
    distance = np.sqrt(((v.mean(axis=1, keepdims=True) - v) ** 2).sum(axis=2))
    return alpha / np.maximum(1 - alpha, 1e-300) * distance


@instead_of(defensive_maximum, "PO-DEFENSIVEKV")
def without_the_prior(A: Array, kernel: int, H_kv: int) -> Any:
    """Low scores are not held up."""
    pooled: Any = average_pool(A.reshape(-1, A.shape[2]), kernel).reshape(A.shape)
    pooled *= A.sum(axis=2, keepdims=True) / pooled.sum(axis=2, keepdims=True)
    return group_maximum(pooled, H_kv).max(axis=1)


@instead_of(output_share, "PO-DEFENSIVEKV")
def share_over_tokens(v: Array, W_o: Array) -> Any:
    """A value's output is divided by its head's sum over tokens."""
    size = group_mean(np.abs(np.matmul(np.repeat(v, len(W_o) // len(v), axis=0), W_o)).sum(axis=2), len(v))
    return size / size.sum(axis=1, keepdims=True)


@instead_of(first_stage, "PO-DEFENSIVEKV")
def no_first_stage(A: Array, H_kv: int, W: int, most: int) -> list[Array]:
    """No key is safe by its mean attention."""
    return first_stage(A, H_kv, W, 0)


@instead_of(epicache_score, "PO-EPICACHE")
def mean_of_the_queries(view: Any) -> Any:
    """A key scores the mean over the patched prompt."""
    rows = [replace(view, q=view.q[:, at : at + 1]) for at in range(view.q.shape[1])]
    mean: Array = np.mean([epicache_score(row) for row in rows], axis=0)
    return mean


@instead_of(epicache_score, "PO-EPICACHE")
def causal_patched_prompt(view: Any) -> Any:
    """The patched prompt is taken for the prompt itself: a query sees the keys up to its own place."""
    return group_maximum(observed_attention(view, view.q.shape[1]), len(view.k)).max(axis=1)
