"""Calls of every stage, each with the same call after a change of one parameter or of one array's content.

Each change changes the result. Changed arrays keep their shapes, dtypes and outermost elements. Therefore a stage that
caches results by shape, dtype, outermost elements or the unchanged parameters fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.strategies.trunks import csr_of_matrix
from spec.decode import LiveTrunks, TrunkWeights
from spec.parameters import NESTEDKV, TINY
from spec.records import CoAttention, Trunks

TINIEST = 2.0**-1074


@dataclass(frozen=True)
class Calls:
    """Call of a stage, an item of the stage, and changes of its arguments by the names of the protocol."""

    item: str
    arguments: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, Any]]

    def changed(self, name: str) -> tuple[Any, ...]:
        return tuple({**self.arguments, **self.changes[name]}.values())

    @property
    def all_changed(self) -> tuple[Any, ...]:
        """Return the arguments with all changes of a single argument applied.

        Of two changes of one argument, the later is used.
        """
        alone = (change for change in self.changes.values() if len(change) == 1)
        return tuple({**self.arguments, **{name: x for change in alone for name, x in change.items()}}.values())

    def with_parameters(self, **changes: tuple[Any, ...]) -> "Calls":
        """Return the calls with more changes: one for each given value of a parameter."""
        p = self.arguments["parameters"]
        more = {f"{at} {x}": {"parameters": replace(p, **{at: x})} for at, result in changes.items() for x in result}
        return replace(self, changes={**self.changes, **more})

    def with_arrays(self, **changes: Any) -> "Calls":
        """Return the calls with more changes: each of these arrays."""
        return replace(self, changes={**self.changes, **{name: {name: x} for name, x in changes.items()}})


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def within(array: Any, *place: Any, value: Any) -> Any:
    """Return a copy with one changed element or row. Callers never change the first or the last element."""
    result = array.copy()
    result[place] = value
    return result


def coattention(weight: float = 0.75, n: int = 24, place: int = 3) -> CoAttention:
    """Return a co-attention record in which each token has its two successors and one token of the first half.

    The `weight` is set for the token at `place`, and for the last neighbour of the token before.
    """
    intra = np.stack([np.arange(1, n + 1), np.arange(2, n + 2)], axis=1)
    intra[intra >= n] = -1
    weights = np.where(intra >= 0, np.linspace(0.4, 0.9, 2 * n).reshape(n, 2), 0.0)
    weights[place], weights[place - 1, 1] = weight, weight
    cross = np.full((n, 1), -1)
    cross[n // 2 :, 0] = np.arange(n - n // 2)
    return CoAttention(0, np.ones(n), intra, weights, cross, np.where(cross >= 0, 0.5, 0.0))


S1 = replace(TINY, C=12, k_heads=1, k_intra=3, k_cross=3, tau_intra=0.0, tau_cross=0.0, M_min=0.0)
Q, K, VALUES = drawn(2, 24, 4), drawn(1, 24, 4, seed=1), drawn(1, 24, 4, seed=6)
SINKS = np.array([-1.0, 2.0])
NORMS = 1 + np.arange(24.0) % 5
P = replace(TINY, tau_edge=0.001)
OFFSETS, MOVED = np.arange(0, 25, 4), np.array([0, 4, 8, 12, 15, 20, 24])
IMPACT = 1 + np.arange(24) % 7 / 8
NONE = np.zeros(6, dtype=np.bool_)
D = np.linspace(0.1, 0.6, 6)
RING = csr_of_matrix(np.roll(0.75 * np.eye(6), 1, axis=1) + np.roll(0.75 * np.eye(6), -1, axis=1))
LIVE = LiveTrunks(np.arange(24), OFFSETS, np.ones(24), 1 / (1 + np.arange(24.0) % 5), np.ones(6))
ACTIVE = np.arange(6) == 1
ENDS = np.arange(24) % 4 == 3
LATER = replace(coattention(), start=24, intra=np.where(coattention().intra >= 0, 24 + coattention().intra, -1))
SCORES = np.linspace(0.2, 0.8, 6)
N_KEYS = (drawn(2, 40, 4, seed=2) + 1).astype(np.float32)
V = drawn(150, 8, seed=3) / 4
BEST = drawn(3, 40, seed=4)
ATTENTION = {"q": Q, "k": K, "scaling": 0.5, "softcap": None, "sinks": None}

CALLS: Mapping[str, Calls] = {
    "crystal.coattention": Calls("CC-COATTENTION", {
        "q": Q, "k": K, "positions": np.arange(24), "parameters": S1, "scaling": 0.5, "softcap": None, "lse": None,
        "sinks": None,
    }, {"scaling": {"scaling": 0.25}, "softcap": {"softcap": 0.5}, "sinks": {"sinks": SINKS}}).with_arrays(
        q=within(Q, 1, 12, value=3.0), k=within(K, 0, 5, value=-2.0), positions=np.arange(24) + 2**31 - 9,
    ).with_parameters(
        C=(8, 5), k_heads=(2,), k_intra=(2,), k_cross=(2,), tau_intra=(0.9,), tau_cross=(0.1,), M_min=(0.5,),
        M_max=(0.75,),
    ),
    "crystal.impact": Calls("CC-IMPACT", {
        "salience": np.linspace(0.2, 3.0, 24), "token_ids": np.arange(24) % 5, "parameters": TINY,
    }, {}).with_arrays(
        salience=within(np.linspace(0.2, 3.0, 24), 9, value=2.0), token_ids=within(np.arange(24) % 5, 9, value=2**32),
    ).with_parameters(impact=("salience", "unit"), rarity=("reciprocal", "exponential"), M_max=(30.0,)),
    "crystal.trunks": Calls("CC-TRUNKS", {
        "coattention": coattention(), "impact": IMPACT, "ends": ENDS, "parameters": replace(TINY, T_max=9),
    }, {"weights": {"coattention": coattention(0.0001)}}).with_arrays(
        impact=within(IMPACT, 9, value=5.0), ends=within(ENDS, 8, value=True),
    ).with_parameters(T_max=(5, 3), tau_merge=(0.7,), merge=("median",), trunk_impact=("unit",)),
    "crystal.graph": Calls("CC-TRUNK-WEIGHT", {
        "coattention": coattention(), "trunks": Trunks(OFFSETS, np.ones(6)), "parameters": P,
    }, {"weights": {"coattention": coattention(0.25)}, "offsets": {"trunks": Trunks(MOVED, np.ones(6))}},
    ).with_parameters(tau_edge=(0.3,), s=(2.0,), graph=("zero",), epsilon=(9.0,)),
    "crystal.score": Calls("CC-SCORE", {"D": D / 8, "impact": D, "protected": NONE, "parameters": TINY}, {
        "a subnormal D": {"D": within(0 * D, 3, value=TINIEST), "parameters": replace(TINY, alpha=0.0)},
    }).with_arrays(D=within(D / 8, 3, value=0.875), impact=within(D, 3, value=0.3), protected=ACTIVE).with_parameters(
        alpha=(0.5,), epsilon=(0.5,),
    ),
    "crystal.dissolve": Calls("CC-DISSOLVE", {
        "score": SCORES, "trunks": Trunks(OFFSETS, np.ones(6)), "impact": IMPACT, "D": D, "protected": NONE,
        "budget": 11, "parameters": replace(TINY, N_min=1),
    }, {"offsets": {"trunks": Trunks(MOVED, np.ones(6))}, "budget": {"budget": 14}}).with_arrays(
        score=within(SCORES, 2, value=0.79), impact=within(IMPACT, 13, value=0.5), D=within(D, 4, value=0.25),
        protected=ACTIVE,
    ).with_parameters(N_min=(4,), allocation=("tiers",), coverage=(0.5,)),
    "breath.inverse_key_norms": Calls("CC-KEY-NORM", {"k": K}, {}).with_arrays(k=within(K, 0, 5, value=TINIEST)),
    "breath.impact": Calls("CC-IMPACT", {
        "salience": np.linspace(0.2, 3.0, 24), "counts": 1 + np.arange(24) % 5, "parameters": TINY,
    }, {}).with_arrays(
        salience=within(np.linspace(0.2, 3.0, 24), 9, value=2.0), counts=within(1 + np.arange(24) % 5, 9, value=2**24),
    ).with_parameters(impact=("salience", "unit"), rarity=("reciprocal", "exponential"), M_max=(30.0,)),
    "breath.decay": Calls("CC-DECAY", {"D": D, "trunk_impact": 1 + D, "parameters": TINY}, {
        "a subnormal D": {"D": within(0 * D, 3, value=2**30 * TINIEST)},
    }).with_arrays(D=within(D, 3, value=0.125), trunk_impact=within(1 + D, 3, value=9.0)).with_parameters(
        beta_0=(0.25,), D_c=(0.5,),
    ),
    "breath.activation": Calls("CC-ACTIVATION", {"live": LIVE, "parameters": replace(TINY, theta_act=0.3)}, {
        "norms": {"live": replace(LIVE, inverse_norms=np.where(np.arange(24) // 4 == 2, 1.0, LIVE.inverse_norms))},
        "offsets": {"live": replace(LIVE, offsets=np.array([0, 3, 7, 9, 12, 22, 24]))},
    }).with_parameters(theta_act=(0.9, 0.0)),
    "breath.resonance": Calls("CC-RESONANCE", {"D": D, "W": RING, "active": ACTIVE, "parameters": TINY}, {
        "weights": {"W": RING._replace(weights=within(RING.weights, 3, value=0.5))},
        "neighbours": {"W": RING._replace(indices=within(RING.indices, 3, value=4))},
    }).with_arrays(D=within(D, 3, value=0.125), active=np.arange(6) == 2).with_parameters(
        max_hops=(1, 0), gamma_hop=(0.25,), tau_pulse=(0.3,), alpha_res=(0.5,),
    ),
    "breath.hebbian": Calls("CC-HEBB", {"W": RING, "active": np.arange(6) < 3, "parameters": P}, {
        "weights": {"W": RING._replace(weights=within(RING.weights, 3, value=0.5))},
    }).with_arrays(active=ACTIVE).with_parameters(
        eta_Hebb=(0.25,), gamma_decay=(0.5,), tau_edge=(0.745,), hebb=("static",),
    ),
    "breath.segment_graph": Calls("CC-SEGMENT-GRAPH", {
        "coattention": LATER,
        "bounds": np.concatenate([OFFSETS[:-1], [24, 30, 36, 48]]), "sizes": np.array([4] * 6 + [6, 6, 12]),
        "W": RING, "parameters": P,
    }, {"weights": {"W": RING._replace(weights=within(RING.weights, 3, value=0.5))}}).with_arrays(
        bounds=np.concatenate([OFFSETS[:-1], [24, 29, 36, 48]]), sizes=np.array([4, 4, 1, 4, 4, 4, 6, 6, 12]),
    ).with_parameters(tau_edge=(0.3,)),
    "breath.segment_crystallization": Calls("CC-SEGMENT-D", {"degree": D, "old": 2, "parameters": TINY}, {
        "old": {"old": 3},
    }).with_arrays(degree=within(D, 3, value=2.0)).with_parameters(s=(2.0,), epsilon=(9.0,), graph=("zero",)),
    "diversity.diverse": Calls("DV-GREEDY", {
        "s": drawn(150, seed=5), "V": V, "retained": np.arange(150) == 40, "k": 60, "lam": 0.5,
    }, {"k": {"k": 61}, "lam": {"lam": 4.0}, "a subnormal score": {
        "s": within(np.zeros(150), 90, value=TINIEST), "k": 2, "V": 0 * V,
    }, "equal scores": {"s": np.zeros(150), "k": 2, "V": 0 * V}}).with_arrays(
        s=within(drawn(150, seed=5), 77, value=9.0), V=V[::-1].copy(), retained=np.arange(150) == 1,
    ),
    "nestedkv.anomaly_score": Calls("NK-SCORE", {
        "k": N_KEYS, "parameters": replace(NESTEDKV, blocks=4, b_min=2, b_max=8, W=6, tau=0.1),
    }, {}).with_arrays(k=within(N_KEYS, 1, 22, value=-3.0)).with_parameters(
        b_max=(64, 12), blocks=(100,), W=(12,), p=(Fraction(1, 2),), beta=(1.0,), tau=(0.4,),
        kappa=(4.0,), w0=((0.2, 0.2, 0.6),),
    ),
    "policies.received_attention": Calls("PO-OBSERVED-ATTENTION", ATTENTION, {
        "scaling": {"scaling": 0.25}, "softcap": {"softcap": 0.5}, "sinks": {"sinks": SINKS},
    }).with_arrays(q=within(Q, 1, 12, value=3.0), k=within(K, 0, 5, value=-2.0)),
    "policies.largest_attention": Calls("PO-KVZIP-PLUS", {
        "q": Q, "k": K, "norms": NORMS, "scaling": 0.5, "softcap": None, "sinks": None,
    }, {"scaling": {"scaling": 0.25}, "softcap": {"softcap": 0.5}, "sinks": {"sinks": SINKS}}).with_arrays(
        q=within(Q, 1, 12, value=3.0), k=within(K, 0, 5, value=-2.0), norms=within(NORMS, 9, value=1e-60),
    ),
    "policies.expected_attention": Calls("PO-EXPECTED-ATTENTION", {
        "q": Q, "k": K, "v": VALUES, "at": np.arange(4, 28), "ahead": np.arange(28, 36),
        "inv_freq": np.array([1.0, 0.25]), "factor": 1.25, "scaling": 0.5, "sinks": None,
    }, {"scaling": {"scaling": 0.25}, "factor": {"factor": 1.5}, "sinks": {"sinks": SINKS}}).with_arrays(
        q=within(Q, 1, 12, value=3.0), k=within(K, 0, 5, value=-2.0), v=within(VALUES, 0, 5, value=9.0),
        at=within(np.arange(4, 28), 9, value=11), ahead=within(np.arange(28, 36), 3, value=40),
        inv_freq=np.array([1.0, 0.5]),
    ),
    "policies.best_tokens": Calls("PO-TOP-UNITS", {
        "values": BEST, "shares": np.array([5, 9, 30]), "pinned": np.zeros((3, 40), dtype=np.bool_),
    }, {}).with_arrays(
        values=within(BEST, 1, value=BEST[1, ::-1]), shares=np.array([5, 10, 30]),
        pinned=within(np.zeros((3, 40), dtype=np.bool_), 1, value=np.arange(40) % 7 == 3),
    ),
}

N, M, FAR = 9_002, 1_100, 7_501
"""Sizes of large arrays, and a place far from both ends.

N tokens with one number each, and M tokens with several channels each, take more than 64 KiB.
"""


def ring(m: int) -> TrunkWeights:
    """Return a graph in which each trunk has an edge to the next trunk, and the last to the first."""
    at = np.arange(m)
    pairs = np.sort(np.stack([(at - 1) % m, (at + 1) % m], axis=1), axis=1)
    return TrunkWeights(2 * np.arange(m + 1), pairs.ravel(), np.full(2 * m, 0.75))


def heavier(W: TrunkWeights, a: int, w: float) -> TrunkWeights:
    """Return the graph with a different weight between trunk `a` and the next trunk."""
    row = np.repeat(np.arange(len(W.indptr) - 1), np.diff(W.indptr))
    edge = ((row == a) & (W.indices == a + 1)) | ((row == a + 1) & (W.indices == a))
    return W._replace(weights=np.where(edge, w, W.weights))


def far(array: Any, value: Any, place: int = FAR) -> Any:
    """Return a copy with a different value at one place, or in one row of a head."""
    return within(array, *(0,) * (array.ndim == 3), place, value=value)


FEW_Q, MANY_K, MANY_Q, FEW_K = drawn(1, 2, 8), drawn(1, N, 8, seed=1), drawn(64, 33, 4), drawn(1, 33, 4, seed=1)
MANY_Q_OTHER = within(MANY_Q, 51, 20, value=3.0)
ONES, STEPS, EIGHTHS = np.ones(N), 4 * np.arange(N // 4 + 1), 1 + np.arange(N) % 7 / 8
SPREAD, NOWHERE, HEADS = (1 + np.arange(N) % 11) / 32, np.zeros(N, dtype=np.bool_), drawn(1, N, 4, seed=9)
SPANS = Trunks(2 * np.arange(N + 1), ONES)
TOKENS = LiveTrunks(np.arange(N), np.arange(N + 1), ONES, 1 / (1 + np.arange(N) % 5), ONES)
LONG_KEYS, WIDE_V, ROWS = drawn(1, M, 16, seed=2) + 1, drawn(M, 8, seed=3) / 4, drawn(8, N, seed=4)
ASKED = {"q": FEW_Q, "k": MANY_K, "scaling": 0.5, "softcap": None, "sinks": None}
LONG_COATTENTION = coattention(n=N, place=FAR + 2)

LARGE: list[tuple[str, Calls]] = [
    ("crystal.coattention", Calls("CC-COATTENTION", {
        "q": FEW_Q, "k": MANY_K, "positions": np.arange(N), "parameters": replace(S1, C=1), "scaling": 0.5,
        "softcap": None, "lse": None, "sinks": None,
    }, {}).with_arrays(k=far(MANY_K, 9.0 * FEW_Q[0, 1]), positions=np.arange(N) + (np.arange(N) >= FAR))),
    ("crystal.coattention", Calls("CC-COATTENTION", {
        "q": MANY_Q, "k": FEW_K, "positions": np.arange(33), "parameters": replace(S1, k_heads=64, M_max=1e3),
        "scaling": 0.5, "softcap": None, "lse": None, "sinks": None,
    }, {}).with_arrays(q=MANY_Q_OTHER)),
    ("crystal.impact", Calls("CC-IMPACT", {
        "salience": EIGHTHS, "token_ids": np.arange(N) % 5, "parameters": TINY,
    }, {}).with_arrays(salience=far(EIGHTHS, 2.5), token_ids=far(np.arange(N) % 5, 2**32))),
    ("crystal.trunks", Calls("CC-TRUNKS", {
        "coattention": LONG_COATTENTION, "impact": EIGHTHS, "ends": np.arange(N) % 4 == 3,
        "parameters": replace(TINY, T_max=9, tau_merge=0.9),
    }, {"weights": {"coattention": coattention(0.95, N, FAR + 2)}}).with_arrays(
        impact=far(EIGHTHS, 5.0), ends=far(np.arange(N) % 4 == 3, True, FAR - 3),
    )),
    ("crystal.graph", Calls("CC-TRUNK-WEIGHT", {
        "coattention": LONG_COATTENTION, "trunks": Trunks(np.append(STEPS, N), np.ones(len(STEPS))), "parameters": P,
    }, {"weights": {"coattention": coattention(0.25, N, FAR + 2)}})),
    ("crystal.score", Calls("CC-SCORE", {"D": SPREAD, "impact": EIGHTHS, "protected": NOWHERE, "parameters": TINY}, {
    }).with_arrays(D=far(SPREAD, 0.875), impact=far(EIGHTHS, 1.9), protected=far(NOWHERE, True))),
    ("crystal.dissolve", Calls("CC-DISSOLVE", {
        "score": SPREAD, "trunks": SPANS, "impact": np.tile([1.0, 2.0], N), "D": SPREAD, "protected": NOWHERE,
        "budget": N, "parameters": replace(TINY, N_min=1),
    }, {}).with_arrays(
        score=far(SPREAD, 0.0), D=far(SPREAD, 0.875, FAR - 1), protected=far(NOWHERE, True, 11 * 600),
    )),
    ("breath.inverse_key_norms", Calls("CC-KEY-NORM", {"k": MANY_K}, {}).with_arrays(k=far(MANY_K, 3.0))),
    ("breath.impact", Calls("CC-IMPACT", {"salience": EIGHTHS, "counts": 1 + np.arange(N) % 5, "parameters": TINY}, {
    }).with_arrays(salience=far(EIGHTHS, 2.5), counts=far(1 + np.arange(N) % 5, 2**24))),
    ("breath.decay", Calls("CC-DECAY", {"D": SPREAD, "trunk_impact": EIGHTHS, "parameters": TINY}, {}).with_arrays(
        D=far(SPREAD, 0.875), trunk_impact=far(EIGHTHS, 9.0),
    )),
    ("breath.activation", Calls("CC-ACTIVATION", {"live": TOKENS, "parameters": replace(TINY, theta_act=0.3)}, {
        "norms": {"live": replace(TOKENS, inverse_norms=far(TOKENS.inverse_norms, 0.01, 5 * 1_500))},
    })),
    ("breath.resonance", Calls("CC-RESONANCE", {
        "D": SPREAD, "W": ring(N), "active": np.arange(N) == FAR - 1, "parameters": TINY,
    }, {"weights": {"W": heavier(ring(N), FAR, 0.5)}}).with_arrays(
        D=far(SPREAD, 0.125), active=np.arange(N) == FAR - 3,
    )),
    ("breath.hebbian", Calls("CC-HEBB", {"W": ring(N), "active": np.arange(N) == FAR, "parameters": P}, {
        "weights": {"W": heavier(ring(N), FAR, 0.5)},
    }).with_arrays(active=(np.arange(N) >= FAR) & (np.arange(N) < FAR + 2))),
    ("breath.segment_graph", Calls("CC-SEGMENT-GRAPH", {
        "coattention": replace(LATER, start=4 * N, intra=np.where(LATER.intra >= 0, 4 * N - 24 + LATER.intra, -1),
                               cross=np.where(LATER.cross >= 0, 4 * FAR + 1, -1)),
        "bounds": np.append(4 * np.arange(N + 1), [4 * N + 12, 4 * N + 24]),
        "sizes": np.append(np.full(N, 4), [12, 12]), "W": ring(N), "parameters": P,
    }, {"weights": {"W": heavier(ring(N), FAR, 0.5)}}).with_arrays(
        bounds=far(np.append(4 * np.arange(N + 1), [4 * N + 12, 4 * N + 24]), 4 * FAR + 2),
        sizes=far(np.append(np.full(N, 4), [12, 12]), 1),
    )),
    ("breath.segment_crystallization", Calls("CC-SEGMENT-D", {"degree": EIGHTHS, "old": N - 8, "parameters": TINY}, {
    }).with_arrays(degree=far(EIGHTHS, 90.0))),
    ("diversity.diverse", Calls("DV-GREEDY", {
        "s": within(drawn(M, seed=5), 902, value=8.0), "V": WIDE_V, "retained": np.arange(M) == 40, "k": 60, "lam": 0.5,
    }, {}).with_arrays(s=within(drawn(M, seed=5), 902, value=-8.0), V=within(WIDE_V, 902, value=9.0))),
    ("nestedkv.anomaly_score", Calls("NK-SCORE", {"k": LONG_KEYS, "parameters": NESTEDKV}, {}).with_arrays(
        k=within(LONG_KEYS, 0, slice(990, 1_050), value=-LONG_KEYS[0, 990:1_050]),
    )),
    ("policies.received_attention", Calls("PO-OBSERVED-ATTENTION", ASKED, {}).with_arrays(k=far(MANY_K, 3.0))),
    ("policies.received_attention", Calls("PO-OBSERVED-ATTENTION", {**ATTENTION, "q": MANY_Q, "k": FEW_K}, {
    }).with_arrays(q=MANY_Q_OTHER)),
    ("policies.largest_attention", Calls("PO-KVZIP-PLUS", {
        "q": FEW_Q, "k": MANY_K, "norms": np.array([1.0, 2.0]), "scaling": 0.5, "softcap": None, "sinks": None,
    }, {}).with_arrays(k=far(MANY_K, 3.0))),
    ("policies.expected_attention", Calls("PO-EXPECTED-ATTENTION", {
        "q": HEADS, "k": HEADS, "v": HEADS, "at": np.arange(N), "ahead": N + np.arange(8),
        "inv_freq": np.array([1.0, 0.25]), "factor": 1.25, "scaling": 0.5, "sinks": None,
    }, {}).with_arrays(
        q=far(HEADS, 30.0), k=far(HEADS, 3.0), v=far(HEADS, 9.0), at=np.where(np.arange(N) == FAR, 11, np.arange(N)),
    )),
    ("policies.best_tokens", Calls("PO-TOP-UNITS", {
        "values": ROWS, "shares": np.full(8, 5), "pinned": np.zeros((8, N), dtype=np.bool_),
    }, {}).with_arrays(
        values=within(ROWS, 6, FAR, value=9.0), pinned=within(np.zeros((8, N), dtype=np.bool_), 6, FAR, value=True),
    )),
]
"""Calls with arrays of more than 64 KiB. For each array, one number or row far from both ends is changed."""
