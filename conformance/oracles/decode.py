"""Decode by brute force: one sequence between two forward passes, with trunks as objects and W as a dict."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction

from conformance.oracles import added, s2, s3, s4, s5, s6
from conformance.oracles.s1 import Edge, Rows
from spec.parameters import CrystalCacheParameters

Pair = frozenset[int]


@dataclass
class Trunk:
    """A live trunk. Its name is the first position that it ever contained, so the name remains after evictions."""

    name: int
    members: list[int]
    M_bar: float
    D: float


@dataclass
class Model:
    """State of one sequence. Values of tokens have positions as keys."""

    budget: Fraction | int
    seen: int = 0
    step: int = 0
    trunks: list[Trunk] = field(default_factory=list)
    M: dict[int, float] = field(default_factory=dict)
    norm: dict[int, float] = field(default_factory=dict)
    W: dict[Pair, float] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    mu: float = 0.0
    sigma: float = 1.0
    tail: list[tuple[int, float]] = field(default_factory=list)


def inverse_norm(keys: Rows) -> float:
    """Return the mean of 1 / length over one token's keys, one per KV head.

    If a key has length zero, the mean is infinite.
    """
    return math.fsum(map(inverse_length, keys)) / len(keys)


def inverse_length(key: Sequence[float]) -> float:
    """Return 1 over the length of a key.

    A key whose squares overflow or underflow float64 is multiplied by a power of two, which is exact.
    """
    largest = max(abs(x) for x in key)
    scale = 2.0**600 if largest < 2.0**-500 else 2.0**-600 if largest > 2.0**500 else 1.0
    square = math.fsum((scale * x) * (scale * x) for x in key)
    return scale / math.sqrt(square) if square > 0 else math.inf


def eta(inverse_norms: Sequence[float]) -> list[float]:
    """Return inverse norms divided by the largest finite one. An infinite inverse norm becomes 1."""
    finite = [x for x in inverse_norms if x < math.inf]
    return [1.0 if x == math.inf else x / max(finite) for x in inverse_norms]


def active(now: Model, p: CrystalCacheParameters) -> set[int]:
    """Return the names of the trunks with most of their members above the threshold.

    Half of the members is not enough.
    """
    positions = [i for g in now.trunks for i in g.members]
    share = dict(zip(positions, eta([now.norm[i] for i in positions]), strict=True))
    return {g.name for g in now.trunks if sum(share[i] > p.theta_act for i in g.members) > len(g.members) / 2}


def pulses(source: int, W: Mapping[Pair, float], p: CrystalCacheParameters) -> dict[int, float]:
    """Return the pulses of Eq. 37 from one trunk by name. In each level, the strongest path wins."""
    arrived, level = {source: 1.0}, {source: 1.0}
    for _ in range(p.max_hops):
        following: dict[int, float] = {}
        for pair, w in W.items():
            for g in pair & level.keys():
                (h,) = pair - {g}
                sent = level[g] * w * p.gamma_hop
                if h not in arrived and not sent < p.tau_pulse and sent >= following.get(h, 0.0):
                    following[h] = sent
        arrived |= following
        level = following
    return arrived


def raise_D(D: float, pulse: float, p: CrystalCacheParameters) -> float:
    """Return D after one pulse (Eq. 38)."""
    return min(1.0, D + p.alpha_res * pulse * (1.0 - D))


def resonance(now: Model, sources: Set[int], p: CrystalCacheParameters) -> None:
    """Apply the pulses of every source in turn: Eq. 38 once for each arriving pulse."""
    for source in sorted(sources):
        arrived = pulses(source, now.W, p)
        for g in now.trunks:
            if g.name in arrived:
                g.D = raise_D(g.D, arrived[g.name], p)


def hebb(W: Mapping[Pair, float], together: Set[int], p: CrystalCacheParameters) -> dict[Pair, float]:
    """Apply Eq. 39 to edges with both ends active and Eq. 40 to all other edges, then the prune of Eq. 25."""
    if p.hebb == "static":
        return dict(W)
    after = {
        pair: min(1.0, w + p.eta_Hebb) if pair <= together else p.gamma_decay * w for pair, w in W.items()
    }
    return {pair: w for pair, w in after.items() if w > p.tau_edge}


def decay(D: float, M_bar: float, p: CrystalCacheParameters) -> float:
    """Return D after one step (Eq. 36 with dt = 1)."""
    rho = p.beta_0 * math.exp(-D * M_bar / p.D_c)
    return max(0.0, D - rho * D)


def append(now: Model, token: int, norm: float) -> None:
    """Append a generated token to the tail."""
    now.tail.append((token, norm))
    now.seen += 1
    now.step += 1


def join_tail(now: Model, ends: Set[int], p: CrystalCacheParameters) -> None:
    """Convert the tail to trunks.

    The new trunks have no edges, salience M_min, rarity over all tokens seen, and D by Eq. 27 at degree 0.
    """
    if not now.tail:
        return
    start = now.seen - len(now.tail)
    ids = [token for token, _ in now.tail]
    now.counts.update(ids)
    for at, (token, norm) in enumerate(now.tail):
        now.M[start + at] = s3.token_impact(p.M_min, s3.rarity_of(now.counts[token], p), p, p.M_min)
        now.norm[start + at] = norm
    D = edgeless_D(now.mu, now.sigma, p)
    for members in s2.trunks([token in ends for token in ids], [], p, start):
        now.trunks.append(Trunk(members[0], members, s3.trunk_impact([now.M[i] for i in members], _all(members)), D))
    now.tail = []


def edgeless_D(mu: float, sigma: float, p: CrystalCacheParameters) -> float:
    """Return D by Eq. 27 for a trunk of degree 0 with given moments."""
    power = math.exp(-p.s * mu / sigma)
    return 0.0 if p.graph == "zero" else power / (1 + power)


def _all(members: Sequence[int]) -> list[int]:
    return list(range(len(members)))


def degrees(now: Model) -> list[float]:
    """Return the degree of every trunk (Eq. 26), summed in the order of neighbours."""
    def terms(g: Trunk) -> list[float]:
        return [now.W.get(frozenset({g.name, h.name}), 0.0) for h in now.trunks if h is not g]

    return [added(terms(g)) for g in now.trunks]


def add_segment(
    now: Model, E: Sequence[Edge], salience: Sequence[float], ids: Sequence[int], norms: Sequence[float],
    ends: Set[int], p: CrystalCacheParameters,
) -> None:
    """Append a segment with given co-attention after the tail. No token is evicted yet."""
    join_tail(now, ends, p)
    start, n = now.seen, len(ids)
    now.counts.update(ids)
    for at in range(n):
        now.M[start + at] = s3.token_impact(salience[at], s3.rarity_of(now.counts[ids[at]], p), p, max(salience))
        now.norm[start + at] = norms[at]
    lists = s2.trunks([token in ends for token in ids], E, p, start)
    M_bar = s3.unit_trunk_impact([s3.trunk_impact([now.M[i] for i in g], _all(g)) for g in lists], p)
    new = [Trunk(g[0], g, x, 0.0) for g, x in zip(lists, M_bar, strict=True)]
    everyone = now.trunks + new
    for b, late in enumerate(everyone):
        for early in everyone[:b]:
            if late in new:
                w = s4.trunk_weight(
                    s4.cross_weights(E, early.members, late.members), len(early.members), len(late.members), p.tau_edge
                )
                if w:
                    now.W[frozenset({early.name, late.name})] = w
    now.trunks, now.seen = everyone, start + n
    settle(degrees(now), everyone, new, p)
    if start == 0:
        now.mu, now.sigma = scale(degrees(now), p)


def in_windows(now: Model, p: CrystalCacheParameters) -> list[bool]:
    """Return True for each trunk with a position in the sink or in the recent window."""
    return s6.protected([g.members for g in now.trunks], now.seen, p.N_sink, p.W_recent)


def settle(
    deg: Sequence[float], trunks: Sequence[Trunk], new: Sequence[Trunk], p: CrystalCacheParameters,
) -> None:
    """Compute Eq. 27 over all trunks, and set D of the new trunks only."""
    for g, D in zip(trunks, s4.crystallization(deg, p), strict=True):
        if g in new:
            g.D = D


def scale(deg: Sequence[float], p: CrystalCacheParameters) -> tuple[float, float]:
    """Return mu and sigma of Eq. 27 after the prefill."""
    mu = math.fsum(deg) / len(deg)
    sigma = math.sqrt(math.fsum((x - mu) ** 2 for x in deg) / len(deg))
    return mu, sigma if sigma >= p.epsilon else 1.0


def protected(now: Model, p: CrystalCacheParameters) -> list[bool]:
    """Return True for each trunk that is protected at a breath (decode-time eviction)."""
    if p.breath_protection == "none":
        return [False] * len(now.trunks)
    return in_windows(now, p)


def evict(now: Model, safe: Sequence[bool], p: CrystalCacheParameters) -> None:
    """Compute S5, then apply Algorithm 1 to the unprotected trunks."""
    alive = [g for g in range(len(now.trunks)) if not safe[g]]
    evict_by(now, s5.score([g.D for g in now.trunks], [g.M_bar for g in now.trunks], alive, p), safe, p)


def evict_by(now: Model, score: Mapping[int, float], safe: Sequence[bool], p: CrystalCacheParameters) -> None:
    """Apply Algorithm 1 with given scores, and Eq. 30 with n = tokens seen."""
    order = sorted(i for g in now.trunks for i in g.members)
    D = [g.D for g in now.trunks]
    B = s6.effective_budget(now.budget, now.seen, p.N_sink, p.W_recent)
    slots = [[order.index(i) for i in g.members] for g in now.trunks]
    result = s6.evict(slots, score, [now.M[i] for i in order], D, safe, B, p)
    keep(now, {order[slot] for slot in result.kept}, result.D)


def keep(now: Model, left: Set[int], D: Sequence[float]) -> None:
    """Keep only these positions. A trunk without positions is removed, together with its edges."""
    for g, after in zip(now.trunks, D, strict=True):
        g.members, g.D = [i for i in g.members if i in left], after
    now.trunks = [g for g in now.trunks if g.members]
    names = {g.name for g in now.trunks}
    now.W = {pair: w for pair, w in now.W.items() if pair <= names}
    now.M, now.norm = ({i: x for i, x in values.items() if i in left} for values in (now.M, now.norm))


def before_eviction(before: Model, ends: Set[int], p: CrystalCacheParameters) -> Model:
    """Return the state after Section 3.8 (a) to (c) and the new trunks.

    The active trunks are determined first. W changes after the pulses.
    """
    now = deepcopy(before)
    together = active(now, p)
    for g in now.trunks:
        g.D += p.renewal * (1 - g.D) if g.name in together else 0.0
    resonance(now, together, p)
    now.W = hebb(now.W, together, p)
    join_tail(now, ends, p)
    return now


def breath(before: Model, ends: Set[int], p: CrystalCacheParameters) -> Model:
    """Return the state after a breath, Section 3.8 (a) to (d)."""
    now = before_eviction(before, ends, p)
    evict(now, protected(now, p), p)
    return now


def after_forward(before: Model, token: int, norm: float, p: CrystalCacheParameters) -> Model:
    """Return the state after a forward pass: append, then decay."""
    now = deepcopy(before)
    append(now, token, norm)
    for g in now.trunks:
        g.D = decay(g.D, g.M_bar, p)
    return now


def decode_step(
    before: Model, token: int, norm: float, ends: Set[int], p: CrystalCacheParameters,
) -> Model:
    """Return the state after a decode step: append, decay, and a breath if T_breath divides the number of the step."""
    now = after_forward(before, token, norm, p)
    return now if now.step % p.T_breath else breath(now, ends, p)


def join_chunk(
    now: Model, ids: Sequence[int], kept: Sequence[int], norms: Sequence[float], ends: Set[int],
    p: CrystalCacheParameters,
) -> None:
    """Append a spliced chunk of tokens.

    The tail becomes trunks first. Then the chunk becomes trunks, and its missing tokens are removed at once.
    """
    join_tail(now, ends, p)
    start = now.seen
    given = dict(zip(kept, norms, strict=True))
    now.tail = [(token, given.get(at, math.inf)) for at, token in enumerate(ids)]
    now.seen += len(ids)
    join_tail(now, ends, p)
    missing = {start + at for at in range(len(ids))} - {start + at for at in kept}
    keep(now, {i for g in now.trunks for i in g.members} - missing, [g.D for g in now.trunks])
