"""Items on random inputs: the function of the reference compared with the oracle, both called as vectors call them."""

from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks.vector_checks import BOUNDED, complaints
from conformance.oracles.nestedkv import unit
from conformance.strategies import numbers
from conformance.strategies.numbers import Numbers, seeds
from conformance.strategies.policy_inputs import TEMPLATE, drawn
from conformance.strategies.trunks import decode_parameters, flags, inverse_norms, sixteenths
from conformance.suite.test_decode import situations
from conformance.suite.test_nestedkv import lengths
from conformance.vectors.codec import fields_of, plain
from conformance.vectors.files import decoded
from lab.item_vectors import ITEMS
from lab.oracles import injection as oracle
from lab.vector_writer.brute_force import encoded
from lab.vector_writer.expected import OPERATIONS
from lab.vector_writer.expected_injection import ARMS as HALVES
from lab.vector_writer.expected_injection import FORMS
from reference.injection.quantisers import SCHEMES
from reference.injection.splicing import ARMS
from reference.statistics import draws
from reference.triattention import band_statistics
from spec.parameters import PAPER, CrystalCacheParameters
from tests.reference.test_injection import WORDS, attentions, keys, tensors

pytestmark = pytest.mark.usefixtures("reference_items")

Given = tuple[dict[str, Any], CrystalCacheParameters]
starts = st.integers(-64, 131072)


def of(parameters: st.SearchStrategy[CrystalCacheParameters] | None = None, **inputs: Any) -> st.SearchStrategy[Given]:
    """Return a strategy for inputs by name, drawn independently."""
    return st.tuples(st.fixed_dictionaries(inputs), st.just(PAPER) if parameters is None else parameters)


def built(make: Any, p: CrystalCacheParameters = PAPER, **inputs: Any) -> st.SearchStrategy[Given]:
    """Return a strategy for inputs that a function computes from drawn values."""
    return st.tuples(st.builds(make, **inputs), st.just(p))


@st.composite
def scored(draw: st.DrawFn, /, front: bool = False, **more: st.SearchStrategy[Any]) -> Given:
    """Draw integer scores with many ties, heads of a layer, protected tokens at one end, and B."""
    H, n = draw(st.integers(1, 4)), draw(st.integers(1, 14))
    pinned = draw(st.integers(0, n))
    protected = [i < pinned for i in range(n)][:: 1 if front else -1]
    row = st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n)
    values, second = (draw(st.lists(row, min_size=H, max_size=H)) for _ in range(2))
    inputs = {"values": values, "protected": protected, "B": draw(st.integers(max(1, pinned), n + 2))}
    return {**inputs, "second": second, **{name: draw(one) for name, one in more.items()}}, PAPER


def turned(given: Any, start: int) -> dict[str, Any]:
    x, theta = given
    return {"x": x.tolist(), "angles": oracle.shift_angles(x.shape[1], start, theta.tolist())}


def renumbered(given: Any, start: int, style: str) -> dict[str, Any]:
    """Return inputs for a turn. The last key stays at the computed position."""
    x, theta = given
    computed = [*range(start, start + x.shape[1])]
    assigned = [*(7 * at - 3 * start for at in computed[:-1]), computed[-1]]
    return {
        "keys": x.tolist(), "computed": computed, "assigned": assigned, "inverse_frequencies": theta.tolist(),
        "style": style,
    }


def kept_sets(n: int) -> st.SearchStrategy[list[list[int]]]:
    """Return a strategy for kept sets of different sizes, ascending, in range(n)."""
    return st.lists(st.sets(st.integers(0, n - 1)).map(sorted), min_size=1, max_size=4)


def moved(given: Any, start: int) -> dict[str, Any]:
    """Return inputs for the angles of a shift. The archive's keys have four times the live frequencies."""
    (x, theta), names = given, ("inverse_frequencies", "archived")
    frequencies = {**dict.fromkeys(names, theta.tolist()), "live": (theta / 4).tolist()}
    return {"n": x.shape[1], "start": start, **frequencies}


def alike(seed: int, d: int, start: int, style: str) -> dict[str, Any]:
    """Return keys of which one pair differs only by a rotation, and one key is zero."""
    rng, theta, at = np.random.default_rng(seed), [1.0, 0.01], [*range(3)]
    a, b = rng.standard_normal((2, 2, 3, d)).tolist()
    b[0][1] = oracle.turned(a[0][1], [start * value for value in theta], style == "interleaved")
    b[1][2] = [0.0] * d
    return {"archived": a, "fresh": b, "positions": [at, [start + t for t in at]], "inverse_frequencies": theta,
            "style": style}


def stepped(x: Any, bits: int) -> dict[str, Any]:
    step = float(np.float32(oracle.scale_of(x.ravel().tolist(), bits)))
    return {"x": x.tolist(), "step": [[[step]]], "bits": bits}


def deviating(seed: int, n: int, heads: int, r: float) -> dict[str, Any]:
    """Return small integers, so that deviations are exact and many are equal."""
    spliced, fresh = np.random.default_rng(seed).integers(-2, 3, (2, heads, n, 2)).astype(np.float64).tolist()
    return {"spliced": spliced, "fresh": fresh, "start": 7, "r": r}


@st.composite
def clustered(draw: st.DrawFn, clusters: bool) -> Given:
    differences = draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=6))
    m = draw(st.integers(1, len(differences))) if clusters else len(differences)
    rest = st.lists(st.integers(0, m - 1), min_size=len(differences) - m, max_size=len(differences) - m)
    inputs = {"differences": differences, "drawn": draws(m, 40, draw(st.integers(0, 99))).tolist(),
              "confidence": draw(st.sampled_from([0.5, 0.8, 0.9, 0.95]))}
    return {**inputs, "clusters": [*range(m), *draw(rest)]} if clusters else inputs, PAPER


def head_scores(seed: int, contexts: int, heads: int) -> dict[str, Any]:
    """Return head scores of exact numbers. The first tokens of some contexts were not rehearsed."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 64, (heads, int(n))) / 64 for n in rng.integers(2, 9, contexts)]
    skipped = rng.integers(0, 2, contexts)
    return {"contexts": [
        [[None] * int(first) + row[first:] for row in each.tolist()] for each, first in zip(rows, skipped, strict=True)
    ]}


def turned_back(seed: int, later: int) -> dict[str, Any]:
    """Return keys whose rotation by their position cancels."""
    inputs = drawn(seed, n=6)
    view, constants = inputs.layers[0], {"inv_freq": inputs.inv_freq.tolist(), "factor": inputs.factor}
    mean, magnitude = (actual.tolist() for actual in band_statistics(view.q))
    return {"k": view.k[0].tolist(), "positions": [0, 1, 5, 6, 9, 30], "t": 31 + later, "mean": mean,
            "magnitude": magnitude, **constants}


def unit_keys(seed: int, n: int, W: int, b: int) -> dict[str, Any]:
    directions = unit(numbers.keys(seed, 1, n).astype(np.float64)[0].tolist())
    return {"unit": directions, "N": [], "W": W, "blocks": 4, "b_min": b, "b_max": b + 2}


def with_memories(seed: int, n: int) -> dict[str, Any]:
    """Return memories: a memory longer than 2^-16 has a direction, and a memory of exactly 2^-16 has none."""
    memory = numbers.keys(seed + 1, 1, n).astype(np.float64)[0].tolist()
    return {**unit_keys(seed, n, 1, 1), "mu": [[0.0, 2.0**-16 * (1 + seed % 2), 0.0, 0.0], *memory[1:]]}


memories = built(unit_keys, seed=seeds, n=lengths, W=st.integers(1, 9), b=st.integers(1, 9))


@st.composite
def states(draw: st.DrawFn, /, **more: st.SearchStrategy[Any]) -> Given:
    """Draw a flat decode state. Any of its tokens may be evicted."""
    state, p = draw(situations())
    n, m = len(state.live.positions), len(state.D)
    fields = {name: plain(x) for name, x in fields_of(state).items()}
    fields |= {"slots": np.flatnonzero(draw(flags(n))).tolist(), "D_after": draw(sixteenths(m)).tolist()}
    return {**fields, "budget": 8, **{name: draw(one) for name, one in more.items()}}, p


def seen(before: list[int], new: list[int]) -> dict[str, Any]:
    ids, counts = np.unique(np.array(before, dtype=np.int64), return_counts=True)
    return {"ids": ids.tolist(), "counts": counts.tolist(), "new": new}


def targets(parts: list[int], divisor: int) -> dict[str, Any]:
    """Return fractions whose sum is an integer."""
    return {"targets": [str(Fraction(part, divisor)) for part in [parts[0] + -sum(parts) % divisor, *parts[1:]]]}


def tilted(B: int, rounds: int, share: float) -> dict[str, Any]:
    return {"B": B, "rounds": rounds, "tilt": round(share * (B - 1))}


tokens = st.lists(st.integers(0, 9), max_size=6)
rows = st.integers(1, 40).flatmap(lambda d: st.lists(
    st.lists(st.floats(-9, 9), min_size=d, max_size=d), min_size=5, max_size=5,
))
safeguards = st.integers(0, 20).map(lambda twentieths: f"{twentieths}/20")
trunk_sizes = st.lists(st.integers(1, 12), min_size=1, max_size=12)
counts = st.integers(1, 40)


class Case(NamedTuple):
    """Item and its inputs: drawn inputs with parameters, or large inputs."""

    item: str
    inputs: Any


CASES = [
    Case("CC-BUDGET", of(
        st.builds(CrystalCacheParameters, N_sink=st.integers(0, 9), W_recent=st.integers(0, 200)),
        n=st.integers(1, 200_000),
        budget=st.one_of(st.integers(1, 200_000), st.integers(1, 100).map(lambda percent: percent / 100)),
    )),
    Case("CC-CUT", built(
        lambda trunks, B: {"sizes": [size for size, _ in trunks], "protected": [shut for _, shut in trunks], "B": B},
        trunks=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=10), B=st.integers(0, 60),
    )),
    Case("CC-RARITY-FORMS", of(
        st.sampled_from([replace(PAPER, rarity="reciprocal"), replace(PAPER, rarity="exponential")]),
        c=st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
    )),
    Case("CC-TIER-COUNT", of(
        sizes=trunk_sizes, t=st.integers(-13, 13), N_min=st.sampled_from([3, 0, 1, 2, 4, 12]),
    )),
    *(Case(item, built(
        lambda rows: {"S": [S for S, _ in rows], "U": [U for _, U in rows]}, p,
        rows=st.lists(st.tuples(st.floats(PAPER.M_min, PAPER.M_max), st.floats(0.05, 0.6)), min_size=1, max_size=16),
    )) for item, p in {"CC-IMPACT": PAPER, "CC-UNIT-IMPACT": replace(PAPER, impact="unit")}.items()),
    Case("CC-SEEN-COUNT", built(
        seen, before=st.lists(st.integers(0, 12), max_size=24),
        new=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    )),
    Case("CC-ETA", of(inverse_norms=st.integers(0, 8).flatmap(inverse_norms).map(plain))),
    Case("CC-RENEWAL", built(
        lambda rows, share: {"D": [D for D, _ in rows], "active": [on for _, on in rows], "renewal": share},
        rows=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=8), share=st.floats(0, 1),
    )),
    Case("CC-TAIL", states(token_id=st.integers(0, 8), inverse_norm=st.sampled_from([0.5, float("inf")]))),
    Case("CC-TAIL-D", of(
        decode_parameters(), mu=st.integers(0, 40).map(lambda x: x / 8), sigma=st.integers(1, 40).map(lambda x: x / 8),
    )),
    Case("CC-LIVE", states()),
    Case("CC-LIVE-PROTECTED", states()),
    Case("CC-BREATH-PROTECTED", states()),
    Case("PO-POOL", of(
        row=st.lists(st.integers(-8, 8).map(float), max_size=12), kernel=st.sampled_from([1, 3, 5, 7, 9]),
    )),
    Case("PO-PYRAMID-BUDGET", built(
        lambda L, n, W, B, beta: {"L": L, "n": n, "W": min(W, n), "B": max(B, W), "beta": beta},
        L=st.integers(1, 40), n=st.integers(1, 400), W=st.integers(1, 20), B=st.integers(1, 420),
        beta=st.integers(1, 30),
    )),
    Case("PO-TOP-UNITS", scored()),
    Case("PO-FILL-UNITS", scored(c=st.integers(1, 5))),
    Case("PO-WHOLE-SHARES", built(
        targets, parts=st.lists(st.integers(0, 40), min_size=1, max_size=8), divisor=st.integers(1, 7),
    )),
    Case("PO-ADAPTIVE-BUDGET", scored(safeguard=safeguards)),
    Case("PO-COMPETITION-BUDGET", scored(safeguard=safeguards)),
    Case("PO-GLOBAL-BUDGET", scored(front=True)),
    Case("PO-TWO-STAGES", scored(front=True, share=st.fractions(0, 1, max_denominator=7).map(str))),
    Case("PO-PREFERENCE-BUDGET", of(
        preferences=st.lists(st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e6)), min_size=1, max_size=6),
        W=st.integers(0, 3), B=st.integers(3, 14), n=st.integers(3, 12),
    )),
    Case("PO-STEP", of(steps=st.lists(
        st.tuples(st.none() | st.integers(1, 6), st.integers(1, 6), counts, counts, counts), max_size=4,
    ))),
    Case("PO-UNIFORM", of(
        seed=st.integers(0, 2**64 - 1), group=st.integers(0, 2**40), seen=st.integers(1, 2**40), n=st.integers(1, 70),
    )),
    Case("PO-REHEARSAL", of(
        token_ids=st.integers(1, 40).map(lambda n: [*range(100, 100 + n)]), template=st.just(TEMPLATE),
        N_sink=st.integers(0, 5), N_recent=st.integers(0, 5), chunk=st.integers(1, 12), overlap=st.integers(0, 12),
    )),
    Case("PO-HEAD-SCORES", built(head_scores, seed=seeds, contexts=st.integers(1, 4), heads=st.integers(1, 6))),
    Case("PO-FULL-HEADS", built(
        lambda scores, n, window, extra: {"head_scores": scores, "n": n, "window": window, "B": window + extra},
        scores=st.lists(st.integers(0, 2).map(float), min_size=1, max_size=8), n=st.integers(1, 30),
        window=st.integers(0, 12), extra=st.integers(0, 25),
    )),
    Case("DV-COSINE", of(u=rows)),
    Case("DV-SIGNATURE", built(
        lambda seed, mode: {"values": [np.asarray(x.v).tolist() for x in drawn(seed).layers], "mode": mode},
        seed=seeds, mode=st.sampled_from(["flat", "layer", "head"]),
    )),
    Case("DV-SCHEDULE", built(tilted, B=st.integers(2, 200), rounds=st.integers(2, 30), share=st.floats(-1, 1))),
    Case("TA-SCORE", built(turned_back, seed=seeds, later=st.integers(0, 50))),
    Case("NK-STABLE", memories),
    Case("NK-EPISODIC", memories),
    Case("NK-CURRENT", memories),
    Case("NK-ANOMALY", built(with_memories, seed=seeds, n=lengths)),
    Case("IN-SCALE", of(
        x=tensors().map(plain), scheme=st.sampled_from(sorted(SCHEMES)), bits=st.sampled_from([2, 4, 8]),
    )),
    Case("IN-CODES", built(stepped, x=tensors(), bits=st.sampled_from([2, 4, 8]))),
    Case("IN-ARMS", of(arm=st.sampled_from(sorted(HALVES)), layers=st.integers(1, 9), tokens=st.integers(0, 20))),
    Case("IN-WRAP", of(
        form=st.sampled_from(sorted(FORMS)), chunk=st.lists(st.integers(20, 99), min_size=1, max_size=9),
        texts=st.just([*WORDS]), ids=st.just([*WORDS.values()]),
    )),
    Case("IN-SLICES", of(
        ids=st.lists(st.integers(0, 5), max_size=40), size=st.integers(1, 9),
        ends=st.lists(st.integers(0, 5), max_size=2, unique=True),
    )),
    Case("IN-HALF-SPLIT", built(turned, given=keys(), start=starts)),
    Case("IN-INTERLEAVED", built(turned, given=keys(), start=starts)),
    Case("IN-SHIFT-ANGLES", built(moved, given=keys(), start=starts)),
    Case("IN-REBASE-ANGLES", built(moved, given=keys(), start=starts)),
    Case("IN-PLACES", built(
        lambda n, hidden, start, kept: {
            "n": n, "hidden": hidden % n, "start": start, "kept": sorted(at for at in kept if at < n),
        },
        n=st.integers(1, 12), hidden=st.integers(0, 11), start=st.integers(0, 99), kept=st.sets(st.integers(0, 11)),
    )),
    Case("IN-BASELINES", of(
        arm=st.sampled_from(sorted(ARMS)), session=tokens, prefix=tokens, raw=st.lists(tokens, max_size=3),
        wrapped=st.lists(tokens, max_size=3),
    )),
    Case("POS-KEPT", of(kept=kept_sets(12), seen=st.integers(13, 40))),
    Case("POS-RENUMBERED", built(
        lambda kept, seen, share: {"kept": kept, "seen": seen, "base": share * (seen - max(map(len, kept))) // 8},
        kept=kept_sets(12), seen=st.integers(13, 40), share=st.integers(0, 8),
    )),
    Case("POS-BASE", built(
        lambda base, more, longest, tokens, space: {
            "seen": base + longest + more, "base": base, "longest": longest, "tokens": tokens,
            "limit": longest + tokens + space,
        },
        base=st.integers(0, 90), more=st.integers(0, 9), longest=st.integers(0, 20), tokens=st.integers(1, 9),
        space=st.integers(0, 9),
    )),
    Case("POS-TURN", built(
        renumbered, given=keys(), start=starts, style=st.sampled_from(["half_split", "interleaved"]),
    )),
    Case("IN-LEGOLINK", of(
        start=st.integers(0, 20), lengths=st.lists(st.integers(1, 6), max_size=4), k=st.integers(0, 7),
    )),
    Case("IN-CACHEBLEND", built(
        deviating, seed=st.integers(0, 99), n=st.integers(1, 9), heads=st.integers(1, 2),
        r=st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0]),
    )),
    Case("IN-ENTROPY", of(weights=attentions().map(plain))),
    Case("IN-SINK-MASS", built(
        lambda weights, at: {"weights": weights.tolist(), "positions": sorted(at)[: weights.shape[2]], "sinks": 4},
        weights=attentions(), at=st.sets(st.integers(0, 12), min_size=8),
    )),
    Case("IN-KEY-COSINE", built(
        alike, seed=seeds, d=st.integers(4, 6), start=st.integers(0, 3000),
        style=st.sampled_from(["half_split", "interleaved"]),
    )),
    Case("IN-BANDS", of(depth=st.integers(1, 130))),
    Case("IN-MCNEMAR", st.one_of(
        of(b=st.integers(0, 40), c=st.integers(0, 40)), of(b=st.just(350), c=st.integers(100, 400)),
    )),
    Case("IN-WILSON", built(
        lambda n, share, confidence: {"n": n, "correct": round(share * n), "confidence": confidence},
        n=st.integers(1, 500), share=st.floats(0, 1), confidence=st.sampled_from([0.5, 0.9, 0.95, 0.99]),
    )),
    Case("IN-BOOTSTRAP", clustered(clusters=False)),
    Case("IN-CLUSTER-BOOTSTRAP", clustered(clusters=True)),
    Case("IN-POWER", built(
        lambda n, halves, wins, alpha: {
            "n": n, "discordance": halves / 4, "difference": halves * wins / 16, "alpha": alpha,
        },
        n=st.integers(0, 7), halves=st.integers(1, 4), wins=st.integers(-4, 4),
        alpha=st.sampled_from([0.05, 0.25, 0.125, 0.5]),
    )),
    Case("IN-FUSE", of(
        rankings=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=3),
        # At a million, neighbouring ranks differ in the twelfth decimal. At three millions, they differ in the
        # thirteenth.
        k=st.sampled_from([0, 1, 60, 10**6, 3 * 10**6]),
    )),
]

LARGE = [
    Case("PO-GLOBAL-BUDGET", {
        "values": Numbers(5).fractions(70 * 700).reshape(70, 700).tolist(), "B": 300, "protected": [False] * 700,
    }),
    *(Case("PO-TWO-STAGES", {
        "values": [Numbers(n).fractions(n).tolist()], "second": [Numbers(n + 1).fractions(n).tolist()],
        "protected": [False] * n, "B": 3 * n // 4, "share": "1/2",
    }) for n in (257, 1_025, 5_000)),
    # Some layers are full, and preferences differ by factors of thousands.
    *(Case("PO-PREFERENCE-BUDGET", {
        "preferences": (Numbers(L).fractions(L) ** 8).tolist(), "B": 300, "W": 32, "n": 1_000,
    }) for L in (33, 80, 126)),
    *(Case("PO-REHEARSAL", {
        "token_ids": [*range(9_001)], "template": TEMPLATE, "N_sink": 5, "N_recent": 3, "chunk": chunk, "overlap": 8,
    }) for chunk in (40, 2000)),
    # The best token of a long context counts at every position.
    *(Case("PO-HEAD-SCORES", {"contexts": [[[i / 2**14 + 2 * (i == at) for i in range(9_000)]]]})
      for at in (0, 4_097, 8_500)),
]


def rows_of(cases: list[Case]) -> list[Any]:
    return [pytest.param(*one, id=one.item, marks=pytest.mark.spec(one.item)) for one in cases]


def gives_the_same(item: str, inputs: Any, p: CrystalCacheParameters) -> None:
    want = decoded(encoded(OPERATIONS[item].results(inputs, p)))
    bound = BOUNDED.get(item)
    test = {"inputs": inputs, "expected": want, "bounded": bound.results if bound else []}
    assert list(complaints(ITEMS[item](inputs, p), test, bound, p, "float64")) == []


@pytest.mark.parametrize(("item", "inputs"), rows_of(CASES))
@given(data=st.data())
def test_an_item_gives_what_its_oracle_gives(
    item: str, inputs: st.SearchStrategy[Given], data: st.DataObject,
) -> None:
    gives_the_same(item, *data.draw(inputs, label="inputs"))


@pytest.mark.parametrize(("item", "inputs"), rows_of(LARGE))
def test_an_item_gives_what_its_oracle_gives_of_many(item: str, inputs: Any) -> None:
    gives_the_same(item, inputs, PAPER)
