"""States of the decisions that a complete run of the suite must reach at least once, each with its item.

A predicate reads the arguments of a stage by the names in `spec.backend`, with `p` for the parameters. It also reads
the result as `found`, and the values that `DERIVED` computes from these. A choice of a parameter is not a state,
because tests select it by name.

The tests call the stages through the fixture `judged`. In a complete run, this plugin wraps the stages and counts the
states over all processes. It watches only the reference, because other backends get the same inputs. `nox -s
conformance` loads the plugin, `kvspec verify` does not.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace as View
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from conformance.oracles.s2 import interface_weights
from conformance.paths import ROOT
from conformance.plugin import profile_of, subject_of

if TYPE_CHECKING:
    from spec.backend import Backend

State = tuple[str, Callable[[Any], Any]]
SMALL = 64
"""Number of tokens of the longest segment whose interfaces are all examined."""


def _observed(c: View) -> dict[str, Any]:
    n = c.q.shape[1]
    return {"n": n, "before": len(c.positions) - n, "near": c.found.intra >= 0, "far": c.found.cross >= 0}


def _cut(c: View) -> dict[str, Any]:
    """Return the borders of trunks and of sentences, counted from 0.

    Also return the trunk of each border of sentences that is inside a trunk.
    """
    offsets = c.found.offsets - c.coattention.start
    sentences = np.unique([0, *(np.flatnonzero(c.ends) + 1), len(c.ends)])
    merged = np.searchsorted(offsets, np.setdiff1d(sentences, offsets)) - 1
    view = View(**vars(c), offsets=offsets, sentences=sentences)
    small = c.p.merge == "fixed" and len(c.ends) <= SMALL
    return {"offsets": offsets, "sentences": sentences, "merged": merged, "apart": _apart(view) if small else []}


def _apart(c: View) -> list[View]:
    """Return a view of each border at which nothing was merged.

    A view tells if both sides fit, has the values of Eq. 18, and tells if there are strong edges that do not count.
    """
    edges = zip(*(column.tolist() for column in c.coattention.edges()), strict=True)
    E, tau, found = [(a - c.coattention.start, b - c.coattention.start, w) for a, b, w in edges], c.p.tau_merge, []
    committed = np.intersect1d(c.sentences, c.offsets).tolist()
    for start, at in pairwise(committed[:-1]):
        left = list(range(start, at))
        right = list(range(at, int(c.sentences[np.searchsorted(c.sentences, at) + 1])))
        w = interface_weights(left, right, E)
        found.append(View(
            fits=len(left) + len(right) <= c.p.T_max, k=len(w), excess=sum(w) - tau * len(w),
            back=any(a in right[:5] and b in left[-5:] and w > tau for a, b, w in E),
            beyond=any(a in left and b in right and w > tau for a, b, w in E),
        ))
    return found


def _linked(c: View) -> dict[str, Any]:
    E = c.coattention.edges()
    a, b = (np.searchsorted(c.trunks.offsets, x, side="right") - 1 for x in (E.first, E.second))
    pairs = np.unique(np.sort(np.stack([a, b])[:, a != b], axis=0), axis=1)
    return {"pruned": 2 * pairs.shape[1] > len(c.found.indices), "deg": c.found.degree}


def _scored(c: View) -> dict[str, Any]:
    return {"M": c.impact[~c.protected], "safe": c.impact[c.protected]}


def _evicted(c: View) -> dict[str, Any]:
    """Return the unprotected trunks by ascending score, and how the budget was used."""
    n, B_prot = len(c.impact), int(c.trunks.sizes[c.protected].sum())
    alive = np.flatnonzero(~c.protected)
    order = alive[np.lexsort((alive, c.score[alive]))]
    goes, r = n > c.budget >= B_prot, c.found.ratio
    return {
        "n": n, "B": c.budget, "B_prot": B_prot, "goes": goes, "over": c.budget - len(c.found.kept), "r": r[order],
        "size": c.trunks.sizes[order], "s": c.score[order], "partial": np.flatnonzero((r > 0) & (r < 1)),
        "cut": goes and c.p.allocation == "cut" and not c.p.coverage,
        "tiers": goes and c.p.allocation == "tiers" and not c.p.coverage,
        "reserve": int(c.p.coverage * (c.budget - B_prot)) if goes else 0,
    }


def _tie_inside(c: View) -> bool:
    """Return True if a partial trunk keeps one of two members with equal impact, and evicts the other."""
    offsets, stays = c.trunks.offsets - c.trunks.offsets[0], np.zeros(c.n, dtype=np.bool_)
    stays[c.found.kept - c.trunks.offsets[0]] = True
    members = [slice(*offsets[g : g + 2]) for g in c.partial]
    return any(c.impact[g][stays[g]].min() == c.impact[g][~stays[g]].max() for g in members)


def _activated(c: View) -> dict[str, Any]:
    norms, sizes = c.live.inverse_norms, c.live.sizes
    finite = np.isfinite(norms)
    eta = np.where(finite, norms / norms[finite].max(initial=1e-300), 1.0)
    above = np.add.reduceat(eta > c.p.theta_act, c.live.offsets[:-1], dtype=np.int64) if len(sizes) else sizes
    return {"finite": finite, "at": (eta == c.p.theta_act).any(), "half": (2 * above == sizes).any()}


def _network(c: View) -> dict[str, Any]:
    """Return the number of active ends of each entry of W, and the inactive trunks next to an active one."""
    row, column = np.repeat(c.active, np.diff(c.W.indptr)), c.active[c.W.indices]
    near = np.isin(np.arange(len(c.active)), c.W.indices[row]) & ~c.active
    return {"ends": row.astype(int) + column, "near": near, "before": len(c.W.weights)}


def _joined(c: View) -> dict[str, Any]:
    old = len(c.W.indptr) - 1
    return {"old": old, "back": (c.found.indices[c.found.indptr[old] :] < old).any()}


def _chosen(c: View) -> dict[str, Any]:
    worth, n = np.where(np.isnan(c.s), -np.inf, c.s), len(c.s)
    plain = np.lexsort((np.arange(n), -worth, ~c.retained))[: c.k]
    stays = np.isin(np.arange(n), c.found)
    return {"n": n, "held": int(c.retained.sum()), "plain": np.isin(plain, c.found).all(), "goes": ~stays,
            "own": stays & ~c.retained}


def _ranked(c: View) -> dict[str, Any]:
    """Return for each row its values, share, pinned tokens, evicted tokens, and tokens kept because of their value."""
    rows, kept = [], zip(c.found.offsets, c.found.offsets[1:], strict=False)
    for values, B, pinned, (a, b) in zip(c.values, c.shares, c.pinned, kept, strict=True):
        stays = np.isin(np.arange(len(values)), c.found.positions[a:b])
        rows.append(View(s=values, B=B, pinned=pinned, goes=~stays, own=stays & ~pinned))
    return {"rows": rows}


def _in_a_row(holds: Callable[[Any], Any]) -> State:
    return "PO-TOP-UNITS", lambda c: any(map(holds, c.rows))


def _border(c: View) -> Any:
    """Return True if a token is kept and a token with an equal value is evicted."""
    return c.own.any() and c.goes.any() and (np.nanmin(np.append(c.s[c.own], np.inf)) == c.s[c.goes]).any()


def _tied(weights: Any, listed: Any) -> Any:
    return ((weights[:, 1:] == weights[:, :-1]) & listed[:, 1:]).any()


DERIVED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "crystal.coattention": _observed, "crystal.trunks": _cut, "crystal.graph": _linked, "crystal.score": _scored,
    "crystal.dissolve": _evicted, "breath.activation": _activated, "breath.resonance": _network,
    "breath.hebbian": _network, "breath.segment_graph": _joined, "diversity.diverse": _chosen,
    "policies.best_tokens": _ranked,
}

STATES: dict[str, dict[str, State]] = {
    "crystal.coattention": {
        "salience at M_max": ("CC-SALIENCE", lambda c: (c.found.salience == c.p.M_max).any()),
        "neighbours that tau cuts": ("CC-INTRA", lambda c: c.n > c.p.k_intra > 0 and not c.near[:, -1].all()),
        "neighbours tie": ("CC-INTRA", lambda c: _tied(c.found.intra_weight, c.near)),
        "sources that tau cuts": ("CC-CROSS", lambda c: c.before > c.p.k_cross > 0 and not c.far[:, -1].all()),
        "sources tie": ("CC-CROSS", lambda c: _tied(c.found.cross_weight, c.far)),
    },
    "crystal.trunks": {
        "strong edges beyond the interface": ("CC-INTERFACE", lambda c: any(
            x.fits and not x.k and x.beyond for x in c.apart)),
        "strong edges backwards alone": ("CC-INTERFACE-EDGES", lambda c: any(
            x.fits and not x.k and x.back for x in c.apart)),
        "three sentences merge": ("CC-MERGE", lambda c: len(c.merged) > len(np.unique(c.merged))),
        "a merge to T_max": ("CC-MERGE", lambda c: (np.diff(c.offsets)[c.merged] == c.p.T_max).any()),
        "T_max refuses a merge": ("CC-MERGE", lambda c: any(x.excess > 0 and not x.fits for x in c.apart)),
        "an interface without an edge": ("CC-MERGE", lambda c: any(x.fits and not x.k for x in c.apart)),
        "an interface below tau": ("CC-MERGE", lambda c: any(x.fits and x.excess < 0 for x in c.apart)),
        "an interface at tau": ("CC-MERGE", lambda c: any(x.fits and x.k and x.excess == 0 for x in c.apart)),
        "a sentence is split": ("CC-SPLIT", lambda c: len(np.setdiff1d(c.offsets, c.sentences))),
        "pieces differ in size": ("CC-SPLIT", lambda c: any(
            s > c.p.T_max and s % -(-s // c.p.T_max) for s in np.diff(c.sentences))),
        "a merge by the median": ("CC-ADAPTIVE-MERGE", lambda c: c.p.merge == "median" and len(c.merged)),
    },
    "crystal.graph": {
        "a weight is pruned": ("CC-TRUNK-WEIGHT", lambda c: c.pruned),
        "a trunk without an edge beside others": ("CC-DEGREE", lambda c: c.deg.any() and not c.deg.all()),
        "no edge": ("CC-CRYSTALLIZATION", lambda c: len(c.deg) > 1 and not c.deg.any()),
        "equal degrees": ("CC-CRYSTALLIZATION", lambda c: len(c.deg) > 1 and c.deg[0] > 0 == np.ptp(c.deg)),
    },
    "crystal.score": {
        "no trunk to score": ("CC-NORMALISED-IMPACT", lambda c: len(c.M) == 0),
        "one trunk to score": ("CC-NORMALISED-IMPACT", lambda c: len(c.M) == 1),
        "equal impacts": ("CC-NORMALISED-IMPACT", lambda c: len(c.M) > 1 and np.ptp(c.M) == 0),
        "the greatest impact is protected": ("CC-NORMALISED-IMPACT", lambda c: (
            len(c.M) and c.safe.max(initial=0) > c.M.max())),
    },
    "crystal.dissolve": {
        "as many tokens as B": ("CC-CUT", lambda c: c.n == c.B),
        "the protected are B": ("CC-CUT", lambda c: c.n > c.B == c.B_prot > 0),
        "above B by its protected, cut at T_alive": ("CC-CUT", lambda c: c.n > c.B_prot > c.B),
        "above B, and all is protected": ("CC-CUT", lambda c: c.n == c.B_prot > c.B),
        "whole trunks meet B": ("CC-ALLOCATE", lambda c: c.cut and c.over == 0 == len(c.partial)),
        "a partial trunk alone": ("CC-ALLOCATE", lambda c: c.cut and len(c.partial) and c.r.all()),
        "a partial trunk behind others": ("CC-ALLOCATE", lambda c: c.cut and len(c.partial) and not c.r.all()),
        "a remnant of N_min": ("CC-ALLOCATE", lambda c: (
            c.cut and len(c.partial) and c.p.N_min == np.rint(c.r * c.size)[c.r < 1].max())),
        "a partial trunk, and N_min is 0": ("CC-ALLOCATE", lambda c: c.cut and len(c.partial) and not c.p.N_min),
        "an overshoot of 1": ("CC-ALLOCATE", lambda c: c.cut and c.over == 1),
        "an overshoot of 2": ("CC-ALLOCATE", lambda c: c.cut and c.over == 2),
        "an overshoot above 2, by a larger N_min": ("CC-ALLOCATE", lambda c: c.cut and c.over > 2),
        "members tie in a partial trunk": ("CC-KEEP-COUNT", lambda c: c.cut and _tie_inside(c)),
        "a partial trunk with D": ("CC-DISSOLVE-D", lambda c: c.D[c.partial].any()),
        "scores tie where the eviction ends": ("CC-DISSOLVE", lambda c: c.cut and (
            (c.s[:-1] == c.s[1:]) & (c.r[:-1] < 1) & (c.r[1:] == 1)).any()),
        "no trunk": ("CC-DISSOLVE", lambda c: len(c.D) == 0),
        "tiers: several partial trunks": ("CC-TIER-COUNT", lambda c: c.tiers and len(c.partial) > 1),
        "tiers: an overshoot": ("CC-TIERS", lambda c: c.tiers and c.over > 0),
        "a share below one token": ("CC-COVERAGE", lambda c: c.goes and c.p.coverage and not c.reserve),
        "a share of the evicted": ("CC-COVERAGE", lambda c: c.reserve and not c.r.all()),
        "a share that holds all evicted": ("CC-COVERAGE", lambda c: c.reserve and c.r.all()),
    },
    "breath.inverse_key_norms": {
        "a zero key in all heads": ("CC-KEY-NORM", lambda c: (c.k == 0).all(axis=(0, 2)).any()),
        "a zero key in one head of several": ("CC-KEY-NORM", lambda c: (
            np.isinf(c.found) & ~(c.k == 0).all(axis=(0, 2))).any()),
    },
    "breath.activation": {
        "a zero key beside others": ("CC-ETA", lambda c: c.finite.any() and not c.finite.all()),
        "zero keys alone": ("CC-ETA", lambda c: len(c.finite) and not c.finite.any()),
        "eta is theta": ("CC-ACTIVATION", lambda c: c.at),
        "half of a trunk": ("CC-ACTIVATION", lambda c: c.half),
    },
    "breath.resonance": {
        "a pulse arrives at one hop": ("CC-PULSE", lambda c: (c.near & (c.found > c.D)).any()),
        "a pulse arrives at two hops": ("CC-PULSE", lambda c: (~c.near & ~c.active & (c.found > c.D)).any()),
        "a pulse ends on its way": ("CC-PULSE", lambda c: (c.near & (c.found == c.D) & (c.D < 1)).any()),
        "D stays at 1": ("CC-RAISE", lambda c: (c.active & (c.D == 1)).any()),
    },
    "breath.hebbian": {
        "a weight ends at 1": ("CC-HEBB", lambda c: (c.found.weights == 1).any() and (c.ends == 2).any()),
        "an edge is pruned": ("CC-HEBB", lambda c: 0 < len(c.found.weights) < c.before),
    },
    "breath.segment_graph": {
        "an edge to an older trunk": ("CC-SEGMENT-GRAPH", lambda c: c.back),
        "an older trunk with gaps": ("CC-SEGMENT-GRAPH", lambda c: (
            c.back and (c.sizes[: c.old] < np.diff(c.bounds)[: c.old]).any())),
    },
    "diversity.diverse": {
        "a zero signature": ("DV-COSINE", lambda c: c.n and not c.V.any(axis=1).all()),
        "a better score gives way": ("DV-GREEDY", lambda c: not c.plain),
        "lam is 0": ("DV-GREEDY", lambda c: c.lam == 0 and c.held < c.k < c.n),
        "the retained alone": ("DV-GREEDY", lambda c: 0 < c.held == c.k < c.n),
        "scores tie at the border": ("DV-GREEDY", lambda c: c.lam == 0 and _border(c)),
        "one without a score stays": ("DV-GREEDY", lambda c: c.k < c.n and np.isnan(c.s[c.own]).any()),
        "an infinite score": ("DV-GREEDY", lambda c: c.k < c.n and np.isposinf(c.s).any()),
    },
    "nestedkv.anomaly_score": {
        "a short last block": ("NK-EPISODIC", lambda c: c.k.shape[1] > c.p.b_max and c.k.shape[1] % c.p.b_max),
        "fewer tokens than the window": ("NK-CURRENT", lambda c: 1 < c.k.shape[1] < c.p.W),
        "nothing is an anomaly": ("NK-MIN-MAX", lambda c: c.k.shape[1] > 1 and not c.found.any()),
    },
    "policies.best_tokens": {
        "more pinned than the share": _in_a_row(lambda x: x.pinned.sum() > x.B),
        "scores tie at the border": _in_a_row(_border),
        "one without a score stays": _in_a_row(lambda x: x.goes.any() and np.isnan(x.s[x.own]).any()),
        "the worst score before none": _in_a_row(
            lambda x: np.isneginf(x.s[x.own]).any() and np.isnan(x.s[x.goes]).any()),
        "an infinite score": _in_a_row(lambda x: x.goes.any() and np.isposinf(x.s[x.own]).any()),
    },
}

REFUSALS = {
    "crystal.coattention": ("CC-COATTENTION", ("q", "k", "lse")), "breath.inverse_key_norms": ("CC-KEY-NORM", ("k",)),
    "diversity.diverse": ("DV-GREEDY", ("lam", "k", "V")), "nestedkv.anomaly_score": ("NK-SCORE", ("k",)),
}
"""Arguments that stages reject with an error, for stages that are called directly (spec/implementing.md)."""

SUITE = ROOT / "conformance" / "suite"
ENOUGH = 100
"""Number of times after which a process stops looking for a state."""
LEAVE_OUT = ("keyword", "markexpr", "deselect", "lf", "stepwise", "maxfail", "collectonly")
"""Options with which pytest runs only some of the given tests."""

_met = pytest.StashKey[Counter[str]]()


def whole(config: pytest.Config, collected: Iterable[Path]) -> bool:
    """Return True if all tests of the suite test the reference with all examples."""
    part = any(getattr(config.option, name, None) for name in LEAVE_OUT) or any("::" in word for word in config.args)
    every = set(SUITE.glob("test_*.py")) <= set(collected)
    return every and not part and subject_of(config) == "numpy" and profile_of(config) != "few"


def expected() -> dict[str, str]:
    """Return all states, including errors, each with its item."""
    states = {f"{stage}: {state}": item for stage, rows in STATES.items() for state, (item, _) in rows.items()}
    refused = {f"{stage}: {name} is refused": item for stage, (item, names) in REFUSALS.items() for name in names}
    return states | refused


def watched(backend: "Backend", met: Counter[str]) -> "Backend":
    """Return the backend with stages that count the states of their calls."""
    from conformance.engine.ops import stages
    from spec.backend import FAMILIES

    families: dict[str, Any] = {
        family: View(**{
            name: _stage(getattr(getattr(backend, family), name), f"{family}.{name}", met) for name in stages(family)
        }) for family in FAMILIES
    }
    return replace(backend, **families)


def _stage(stage: Callable[..., Any], op: str, met: Counter[str]) -> Callable[..., Any]:
    from conformance.engine.ops import OPS
    from spec.errors import SpecError

    wanted = {f"{op}: {state}": holds for state, (_, holds) in STATES.get(op, {}).items()}
    names = ["p" if name == "parameters" else name for name in OPS[op].arguments]

    def call(*given: Any) -> Any:
        try:
            found = stage(*given)
        except SpecError as error:
            met[f"{op}: {error.argument} is refused"] += 1
            raise
        if wanted:
            view = View(**dict(zip(names, given, strict=False)), found=found)
            vars(view).update(DERIVED[op](view) if op in DERIVED else {})
            for state in [state for state, holds in wanted.items() if holds(view)]:
                met[state] += 1
                if met[state] == ENOUGH:
                    del wanted[state]
        return found

    return call


@pytest.fixture(scope="session")
def judged(judged: "Backend", request: pytest.FixtureRequest) -> "Backend":
    """Return the backend under test. In a complete run, its calls are counted."""
    if not whole(request.config, {item.path for item in request.session.items}):
        return judged
    return watched(judged, request.config.stash.setdefault(_met, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of an xdist worker."""
    theirs = getattr(node, "workeroutput", {}).get("kvspec_met")
    if theirs is not None:
        node.config.stash.setdefault(_met, Counter()).update(theirs)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass the counts of a worker on. Fail a complete run that did not reach all states."""
    met = session.config.stash.get(_met, None)
    if met is None:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kvspec_met"] = dict(met)
    elif session.exitstatus == pytest.ExitCode.OK and not met.keys() >= expected().keys():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how many states were reached, the least frequent ones, and those not reached with their items."""
    met = config.stash.get(_met, None)
    if met is not None:
        items = expected()
        least = sorted((met[state], state) for state in items if met[state])[:3]
        terminalreporter.section("states of the decisions")
        terminalreporter.line(f"{sum(1 for state in items if met[state])} of {len(items)} were met; least often: "
                              + ", ".join(f"{state} ({count})" for count, state in least))
        for state in items:
            if not met[state]:
                terminalreporter.line(f"never met: {state} [{items[state]}]", red=True)
