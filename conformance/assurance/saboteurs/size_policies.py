"""Selectors, budgets and scorers by size: many units, groups, layers, and budgets of real caches."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import equal_trunks, random_rows, scored, view
from reference.diversity import cosines, dots, signatures
from reference.diversity import diverse as greedy
from reference.nestedkv import episodic_memory, gap, stable_memory
from reference.policies.attention import accumulated_attention, max_pool, observed_attention, received_attention
from reference.policies.budgets import Above, Competition, even, largest_remainder, pyramid_targets, winners
from reference.policies.lagkv import lagkv_score
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import _fill, best_tokens, fill_units, recent_half, top_units, touched_units
from reference.triattention import z_scores
from spec.budget import Budget, parse_budget
from spec.policy import LayerView, Scores, Selection

__all__: list[str] = []

_tokens, _competition, _sink_and_recent = Budget.tokens, Competition.__call__, SinkAndRecent.__call__
_above = Above.__call__


def tied(m: int, groups: int = 1) -> Scores:
    """Units of one token, all alike."""
    return scored(np.ones((groups, m)))


def nobody(n: int) -> Array:
    return np.zeros(n, dtype=np.bool_)


@beyond("32 units", top_units, "PO-TOP-UNITS", lambda: (tied(40), np.array([9]), nobody(40)))
def late_units_first_above_32(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Above 32 units the sort is not stable: of equal scores the later unit stays."""
    if scores.values.shape[1] <= 32:
        return top_units(scores, budgets, protected)
    n = int(scores.offsets[-1])
    turned = replace(scores, values=scores.values[:, ::-1], offsets=n - scores.offsets[::-1])
    found = top_units(turned, budgets, protected[::-1])
    groups = [n - 1 - found.positions[a:b][::-1] for a, b in zip(found.offsets, found.offsets[1:], strict=False)]
    return Selection(np.concatenate(groups), found.offsets)


@beyond("65 535 tokens", _fill, "PO-TOP-UNITS", lambda: (np.ones(3), equal_trunks(3, 30_000), 50_000, nobody(3)))
def kept_tokens_counted_in_16_bits(values: Array, offsets: Array, B: int, pinned: Array) -> Array:
    """The tokens of the units so far are counted in 16 bits: beyond 65 535 there seems to be room again."""
    sizes, order = np.diff(offsets), np.argsort(-values, kind="stable")
    order = np.concatenate([np.flatnonzero(pinned), order[~pinned[order]]])
    chosen = order[(np.cumsum(sizes[order]) % 2**16 <= B) | pinned[order]]
    kept = np.isin(np.arange(len(values)), chosen)
    positions: Array = offsets[0] + np.flatnonzero(np.repeat(kept, sizes))
    return positions


@beyond("64 units", touched_units, "PO-TOP-UNITS", lambda: (np.arange(80) >= 78, equal_trunks(80, 1)))
def touched_units_of_64_bits(protected: Array, offsets: Array) -> Array:
    """Units that hold a protected token are the bits of one word: later units are not protected."""
    return touched_units(protected, offsets) & (np.arange(len(offsets) - 1) < 64)


@beyond("127 units", fill_units, "PO-FILL-UNITS", lambda: (
    replace(scored(-np.arange(200.0)[None]), members=np.ones((1, 200))), np.array([50]), nobody(200),
))
def ranks_of_units_in_8_bits(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """A unit's rank is held in 8 bits with a sign: from 128 units on the lowest ranks come first."""
    order = np.argsort(-scores.values, axis=1, kind="stable")
    rank = np.argsort(order, axis=1).astype(np.int8).astype(np.float64)
    return fill_units(replace(scores, values=-rank), budgets, protected)


@beyond("budgets of 511", recent_half, "PO-H2O", lambda: (
    scored(-np.arange(700.0)[None]), np.array([600]), nobody(700),
))
def the_recent_half_in_8_bits(scores: Scores, budgets: Array, protected: Array, choose: Any = None) -> Selection:
    """Half of the budget is held in 8 bits."""
    n, first = len(protected), int(budgets[0])
    if first < 512:
        return recent_half(scores, budgets, protected)
    recent = protected | (np.arange(n) >= n - first // 2 % 256)
    return top_units(scores, budgets, recent)


@beyond("32 columns", winners, "PO-ADAPTIVE-BUDGET", lambda: (np.ones((2, 40)), 9))
def the_last_heads_win_ties_above_32(values: Array, k: int) -> Array:
    """Above 32 columns the sort is not stable: of equal scores the later head wins."""
    return winners(values, k) if values.shape[1] <= 32 else winners(values[::-1], k)[::-1]


def competing(heads: int, n: int) -> tuple[Any, ...]:
    """Heads of one layer; the last has all the best scores."""
    values = random_rows(heads, n) + np.arange(heads)[:, None]
    return Competition(Fraction(1, 5)), heads * n // 4, scored(values)


@beyond("32 tokens above", _above, "PO-THRESHOLD", lambda: (Above(0.5), 80, tied(40, groups=2)))
def counts_up_to_32(rule: Any, total: int, scores: Scores) -> Array:
    """No more than 32 tokens of a set are counted."""
    return np.minimum(_above(rule, total, scores), 32)


@beyond("16 heads of a layer", _competition, "PO-COMPETITION-BUDGET", lambda: competing(20, 30))
def competition_of_16_heads(rule: Any, total: int, scores: Scores) -> Array:
    """Sixteen heads of a layer compete; the others have their even share."""
    if scores.heads <= 16 or len(scores.values) != scores.heads:
        found: Array = _competition(rule, total, scores)
        return found
    shares = even(total, scores)
    first = replace(scores, values=scores.values[:16], heads=16)
    shares[:16] = _competition(rule, int(shares[:16].sum()), first)
    return shares


@beyond("32 groups", even, "PO-WHOLE-SHARES", lambda: (39, tied(4, groups=40)))
def the_rest_of_32_groups(total: int, scores: Scores) -> Array:
    """What does not divide goes to the first 32 groups; the others' token is lost."""
    shares = even(total, scores)
    shares[32:] = total // len(scores.values)
    return shares


@beyond("totals of 2^31", even, "PO-WHOLE-SHARES", lambda: (2**31 + 6, tied(1, groups=256)))
def totals_in_32_bits(total: int, scores: Scores) -> Array:
    """The total over layers and heads is held in 32 bits."""
    return even((total + 2**31) % 2**32 - 2**31, scores)


@beyond("16 targets", largest_remainder, "PO-WHOLE-SHARES", lambda: ([Fraction(at + 1, 21) for at in range(20)],))
def remainders_of_16_targets(targets: Sequence[Fraction]) -> Array:
    """Missing tokens go round the first 16 targets by remainder, then to the rest in order."""
    if len(targets) <= 16:
        return largest_remainder(targets)
    shares = np.array([int(target // 1) for target in targets], dtype=np.int64)
    order = sorted(range(len(targets)), key=lambda g: (g >= 16, -(targets[g] - int(shares[g])) if g < 16 else 0, g))
    shares[order[: int(sum(targets)) - int(shares.sum())]] += 1
    return shares


@beyond("32 layers", pyramid_targets, "PO-PYRAMID-BUDGET", lambda: (Fraction(50), 900, 40, 20))
def a_pyramid_of_32_layers(base: Fraction, past: int, L: int, beta: int) -> list[Fraction]:
    """The line falls over 32 layers; later layers have the mean of the budget."""
    if L <= 32:
        return pyramid_targets(base, past, L, beta)
    return [*pyramid_targets(base, past, 32, beta), *[min(base, Fraction(past))] * (L - 32)]


@beyond("products of 2^31", _tokens, "CC-BUDGET-FORMS", lambda: (parse_budget("0.3"), 2**30))
def shares_in_32_bits(budget: Budget, seen: int) -> int:
    """The fraction's numerator times the tokens seen is held in 32 bits."""
    if budget.fraction is None:
        return _tokens(budget, seen)
    product = (budget.fraction.numerator * seen + 2**31) % 2**32 - 2**31
    return -(-product // budget.fraction.denominator)


@beyond("1 024 recent tokens", _sink_and_recent, "PO-STREAMINGLLM", lambda: (SinkAndRecent(0, 1100), 3000))
def a_window_of_1024(protection: Any, seen: int) -> Array:
    """At most 1 024 recent tokens are protected."""
    found: Array = _sink_and_recent(replace(protection, recent=min(1024, protection.recent)), seen)
    return found


@beyond("256 queries", accumulated_attention, "PO-OBSERVED-ATTENTION", lambda: (view(300),))
def queries_of_one_block(shown: Any) -> Array:
    """The sum over queries ends with the first block of 256."""
    if shown.q.shape[1] <= 256:
        return accumulated_attention(shown)
    before = shown.k.shape[1] - shown.q.shape[1]
    found = accumulated_attention(replace(shown, q=shown.q[:, :256], k=shown.k[:, : before + 256]))
    return np.pad(found, ((0, 0), (0, shown.q.shape[1] - 256)))


@beyond("64 queries of a block", received_attention, "PO-OBSERVED-ATTENTION", lambda: (
    random_rows(2, 70, 4), random_rows(2, 70, 4), 1.0, None,
))
def queries_behind_the_last_whole_block(q: Array, k: Array, scaling: float, softcap: float | None) -> Array:
    """Beyond 64 queries, those behind the last whole block of 64 are left out."""
    m, n = q.shape[1], k.shape[1]
    over = m % 64 if m > 64 else 0
    found = received_attention(q[:, : m - over], k[:, : n - over], scaling, softcap)
    return np.pad(found, ((0, 0), (0, over)))


@beyond("16 KV heads", received_attention, "PO-OBSERVED-ATTENTION", lambda: (
    random_rows(18, 3, 4), random_rows(18, 3, 4), 1.0, None,
))
def heads_of_one_block(q: Array, k: Array, scaling: float, softcap: float | None) -> Array:
    """Of more than 16 KV heads, the others have the sums of the sixteenth."""
    found = received_attention(q, k, scaling, softcap)
    found[16:] = found[15:16]
    return found


@beyond("1 024 tokens", best_tokens, "PO-TOP-UNITS", lambda: (
    -np.arange(1100.0)[None], np.array([1050]), np.zeros((1, 1100), dtype=np.bool_),
))
def one_token_goes_at_most(values: Array, shares: Array, pinned: Array) -> Selection:
    """Beyond 1 024 tokens a step evicts the worst token and no other."""
    n = values.shape[1]
    return best_tokens(values, shares if n <= 1024 else np.maximum(shares, n - 1), pinned)


@beyond("windows of 64", observed_attention, "PO-OBSERVED-ATTENTION", lambda: (view(90), 70))
def a_window_of_64_queries(shown: Any, W: int) -> Array:
    """The observation window has room for 64 queries; earlier ones weigh nothing."""
    A = observed_attention(shown, W)
    A[:, : max(0, A.shape[1] - 64)] = 0.0
    return A


@beyond("kernels of 15", max_pool, "PO-POOL", lambda: (np.arange(40.0)[None], 21))
def kernels_up_to_15(x: Array, kernel: int) -> Array:
    """A pooling kernel has at most 15 entries."""
    return max_pool(x, min(kernel, 15))


def in_partitions(n: int, lag: int) -> tuple[Any, ...]:
    """Keys and values of one head, without sinks."""
    return LayerView(random_rows(1, 0, 4), random_rows(1, n, 4), random_rows(1, n, 4), 1.0, None), 0, lag


@beyond("partitions of 127 tokens", lagkv_score, "PO-LAGKV", lambda: in_partitions(900, 300))
def ranks_of_a_partition_in_8_bits(shown: Any, N_sink: int, lag: int) -> Array:
    """A rank is held in 8 bits with a sign: from the 128th on a token comes before the best."""
    scores = lagkv_score(shown, N_sink, lag)
    ranked = scores <= 0
    scores[ranked] = (scores[ranked].astype(np.int64) + 128) % 256 - 128
    return scores


@beyond("32 partitions", lagkv_score, "PO-LAGKV", lambda: in_partitions(160, 4))
def ranks_of_32_partitions(shown: Any, N_sink: int, lag: int) -> Array:
    """There is room for 32 partitions: tokens behind them are ranked by position."""
    scores, first = lagkv_score(shown, N_sink, lag), N_sink + 32 * lag
    late = scores[:, first:]
    late[late <= 0] = np.broadcast_to(-(np.arange(late.shape[1]) % lag), late.shape)[late <= 0]
    return scores


@beyond("128 channels", dots, "DV-COSINE", lambda: (random_rows(3, 200), random_rows(200)))
def cosines_of_128_channels(V: Array, x: Array) -> Array:
    """Inner products are summed over 128 channels."""
    return dots(V[:, :128], x[:128])


@beyond("32 parts", signatures, "DV-SIGNATURE", lambda: ([random_rows(4, 3, 5) for _ in range(10)], "flat"))
def signatures_of_32_parts(values: Sequence[Array], mode: Any) -> Array:
    """A mean is taken over the first 32 heads of the cache."""
    if mode != "flat" or sum(map(len, values)) <= 32:
        return signatures(values, mode)
    heads = [head for layer in values for head in layer]
    return signatures([np.stack(heads[:32])], mode)


def crowded(n: int) -> tuple[Any, ...]:
    """Tokens of two directions; those of one have the better scores."""
    V = np.eye(2)[np.arange(n) % 2]
    return random_rows(n) + 1 - np.arange(n) % 2, V, nobody(n), n // 2, 0.5


@beyond("64 choices", greedy, "DV-GREEDY", lambda: crowded(300))
def redundancy_of_64_choices(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """After 64 choices redundancy is no longer brought up to date: the rest go by worth as it stands."""
    held = int(retained.sum())
    if k - held <= 64:
        return greedy(s, V, retained, k, lam)
    first = greedy(s, V, retained, held + 64, lam)
    worth = np.where(np.isnan(s), -np.inf, s) - lam * cosines(V)[first].max(axis=0, initial=0.0)
    worth[first] = np.inf
    chosen: Array = np.sort(np.argsort(-worth, kind="stable")[:k])
    return chosen


@beyond("1 024 keys", stable_memory, "NK-STABLE", lambda: (random_rows(1, 1100, 4),))
def a_mean_of_1024_keys(unit: Array) -> Array:
    """The stable memory is the mean of the first 1 024 keys."""
    return stable_memory(unit[:, :1024])


@beyond("32 blocks", episodic_memory, "NK-EPISODIC", lambda: (random_rows(1, 160, 4), 4))
def memories_of_32_blocks(unit: Array, b: int) -> Array:
    """There is room for 32 blocks' memories: later tokens have the last of them."""
    memory = episodic_memory(unit, b)
    memory[:, 32 * b :] = memory[:, 32 * b - 1 : 32 * b]
    return memory


@beyond("32 values of a share", gap, "NK-GAP", lambda: (random_rows(3, 1, 800), Fraction(1, 10)))
def gaps_of_32_values(a: Array, p: Fraction) -> Array:
    """The top and the bottom share are 32 values at most."""
    return gap(a, min(p, Fraction(32, a.shape[2])))


@beyond("64 candidates", z_scores, "TA-RANKING", lambda: (random_rows(2, 90), np.ones(90, dtype=np.bool_)))
def moments_of_64_candidates(X: Array, candidates: Array) -> Array:
    """Mean and deviation are those of the first 64 candidates."""
    first = candidates & (np.cumsum(candidates) <= 64)
    if not candidates.any() or first.all():
        return z_scores(X, candidates)
    x = X[:, first]
    centred, sigma = X - x.mean(axis=1, keepdims=True), np.maximum(x.std(axis=1, keepdims=True), 1e-6)
    return np.where(candidates, np.where(first, z_scores(X, first), centred / sigma), np.nan)
