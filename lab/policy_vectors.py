"""Functions that run the reference on the vectors of the policies' items."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from conformance.methods import brutes
from conformance.methods.brute import Brute, from_vector, layers_of
from conformance.strategies.policy_inputs import decided
from conformance.vectors.codec import floats
from conformance.vectors.files import Json
from reference import policies
from reference.calibration import Calibration, Identity
from reference.policies.attention import accumulated_attention, average_pool, max_pool, observed_attention
from reference.policies.budgets import (
    Above,
    Adaptive,
    Competition,
    Pyramid,
    across_layers,
    adakv_official,
    even,
    largest_remainder,
)
from reference.policies.cadences import append_tokens
from reference.policies.cake import Preferred
from reference.policies.chunks import InChunks
from reference.policies.criticalkv import two_stages
from reference.policies.kvcrush import scored_or_representative
from reference.policies.kvzip import rehearsal_chunks
from reference.policies.kvzip_heads import FullHeads, head_scores
from reference.policies.parts import join_budgets
from reference.policies.pieces import InPieces
from reference.policies.protections import InEachPiece, SinkAndRecent
from reference.policies.selectors import best_blocks, fill_units, top_units
from reference.policies.tables import Table
from spec.budget import Budget
from spec.policy import Budgets, Cadence, LayerView, Observation, Policy, Rehearsal, Running, Scores, Selection

Result = Mapping[str, object]


def kept(i: Json, policy: Policy) -> Result:
    """Return the tokens that the policy keeps of the inputs, with B tokens each."""
    return {"kept": decided(policy, layers_of(i), i["B"])}


def rehearsal(i: Json) -> Result:
    given = Rehearsal(i["template"], i["N_sink"], i["N_recent"], i["chunk"], i["overlap"])
    result = rehearsal_chunks(np.array(i["token_ids"]), given)
    return {"chunks": [[start, stop] for start, stop, _ in result], "read": [ids.tolist() for _, _, ids in result]}


def scores(i: Json) -> tuple[Scores, Any]:
    """Return the scores of the heads of one layer, with NaN for protected tokens."""
    protected = np.array(i["protected"], dtype=np.bool_)
    values = np.where(protected, np.nan, floats(i["values"]))
    return Scores(values, np.arange(values.shape[1] + 1), heads=len(values)), protected


def lists(result: Selection) -> Result:
    return {"kept": [part.tolist() for part in np.split(result.positions, result.offsets[1:-1])]}


def topped(i: Json) -> Result:
    given, protected = scores(i)
    return lists(top_units(given, even(i["B"] * len(given.values), given), protected))


def filled(i: Json) -> Result:
    given, protected = scores(i)
    n = len(protected)
    past = n - int(protected.sum())
    offsets = np.array([*range(0, past, i["c"]), *([past] if past < n else []), n])
    totals = np.add.reduceat(given.values, offsets[:-1], axis=1)
    return lists(fill_units(Scores(totals, offsets, given.values), even(i["B"] * len(totals), given), protected))


def blocks(i: Json) -> Result:
    given, protected = scores(i)
    shares, pinned = even(i["B"] * len(given.values), given), np.broadcast_to(protected, given.values.shape)
    return lists(best_blocks(given.values, shares, pinned, i["b"]))


def in_pieces(i: Json) -> Result:
    """Return the best tokens of each piece, which protects its own first and last tokens."""
    values = floats(i["values"])
    protected = InEachPiece(SinkAndRecent(i["sink"], i["recent"]), i["c"])(values.shape[1])
    given = Scores(np.where(protected, np.nan, values), np.arange(values.shape[1] + 1), heads=len(values))
    return lists(InPieces(top_units, i["c"])(given, even(i["B"] * len(values), given), protected))


def in_chunks(i: Json) -> Result:
    given, protected = scores(i)
    return lists(InChunks(i["c"], i["gate"])(given, even(i["B"] * len(given.values), given), protected))


def scored_later(i: Json) -> Result:
    given, B, constants = from_vector({name: x for name, x in i.items() if name != "text"})
    assert not constants
    return {"kept": decided(policies.policy_from_text(i["text"]), given, B)}


def crushed(i: Json) -> Result:
    given, protected = scores(i)
    shares = even(i["B"] * len(given.values), given)
    return lists(scored_or_representative(given, shares, protected, i["b"], Fraction(i["share"]), i["anchor"]))


def full_heads(i: Json) -> Result:
    G, n = len(i["head_scores"]), i["n"]
    budgets = FullHeads(floats(i["head_scores"]), i["window"])
    return {"shares": budgets(i["B"] * G, Scores(np.zeros((G, n)), np.arange(n + 1)))}


def of_heads(i: Json) -> Result:
    """Return the kept sets of KVzip's head scores, the only input from a model that the policy uses."""
    scores, identity = floats(i["head_scores"]), Identity("vector", np.ones(1))
    nothing = np.zeros((len(scores), 1, 2))
    taken = Calibration(identity, tuple(range(len(scores))), nothing, nothing[:, :, :1], scores)
    policy = policies.kvzip_heads(taken, identity, i["N_sink"], i["N_recent"])
    result = policies.retain(policy, Budget(count=i["B"]), Observation(i["n"], scores.size, None, {}))
    return {"kept": [result.group(g).tolist() for g in range(result.groups)]}


def filtered(i: Json) -> Result:
    """Return the kept sets of Q-Filters with given filters."""
    filters, identity = floats(i["filters"]), Identity("vector", np.empty(0))
    nothing = np.zeros((len(filters), 1, 0))
    taken = Calibration(identity, tuple(range(len(filters))), nothing, nothing, filters=filters)
    return kept(i, policies.q_filters(taken, identity))


def of_statistics(i: Json) -> Result:
    """Return the kept sets of Expected Attention with given statistics of the queries."""
    mean, covariance = floats(i["mean"]), floats(i["covariance"])
    identity, nothing = Identity("vector", floats(i["inv_freq"])), np.zeros((*mean.shape[:2], 0))
    taken = Calibration(identity, tuple(range(len(mean))), mean, nothing, covariance=covariance)
    inputs = layers_of(i)
    heads = [replace(view, q=np.zeros((mean.shape[1], *view.k.shape[1:]))) for view in inputs.layers]
    policy = policies.expected_attention_stats(taken, identity, i["N_sink"], i["N_future"])
    return {"kept": decided(policy, replace(inputs, layers=heads), i["B"])}


def staged(i: Json) -> Result:
    given, protected = scores(i)
    shares = np.full(len(given.values), i["B"], dtype=np.int64)
    return lists(two_stages(replace(given, second=floats(i["second"])), shares, protected, Fraction(i["share"])))


def shared(i: Json, budgets: Budgets) -> Result:
    given, _ = scores(i)
    return {"shares": budgets(i["B"] * len(given.values), given)}


def preferred(i: Json) -> Result:
    L = len(i["preferences"])
    given = Scores(np.zeros((L, i["n"])), np.arange(i["n"] + 1), preferences=floats(i["preferences"]))
    return {"shares": Preferred(i["W"])(i["B"] * L, given)}


def table(i: Json) -> Result:
    """Return the shares of a table of weights, with all tokens as one unit."""
    given = Scores(np.zeros((i["L"] * i["heads"], 1)), np.array([0, i["n"]]), heads=i["heads"])
    return {"shares": Table(i["W"], i["shares"])(i["B"] * i["L"] * i["heads"], given)}


def pyramid(i: Json) -> Result:
    """Return the shares with all tokens as one unit, because the budgets read only the number of tokens."""
    given = Scores(np.zeros((i["L"], 1)), np.array([0, i["n"]]))
    return {"shares": Pyramid(i["W"], i["beta"])(i["B"] * i["L"], given)}


def composed(i: Json) -> Result:
    """Return the shares of a pyramid over layers, then of Ada-KV's rule over the heads of each layer."""
    budgets = join_budgets(Pyramid(i["W"], i["beta"]), Adaptive(Fraction(i["safeguard"])), i["W"])
    return shared(i, lambda total, scores, /: budgets(total, replace(scores, heads=i["heads"])))


def observed(i: Json) -> Result:
    (view,) = layers_of(i).layers
    return {"window": observed_attention(view, i["W"]), "accumulated": accumulated_attention(view)}


def turned(i: Json) -> Result:
    """Return the kept sets of Knorm in one layer after a turn. Each head stores different tokens."""
    policy = replace(policies.knorm(), protection=SinkAndRecent(i["sink"], i["recent"]))
    shown = [
        Observation(i["seen"], 1, None, {0: LayerView(np.zeros((1, 1, 1)), floats([k]), None, 1.0, None)})
        for k in i["k"]
    ]
    live = [np.array(positions, dtype=np.int64) for positions in i["positions"]]
    result = policies.retain_turn(policy, Budget(count=i["B"]), live, shown, len(live))
    return {"kept": [result.group(g).tolist() for g in range(result.groups)]}


def read(i: Json) -> Result:
    """Return the state of H2O in one layer, after further tokens were read."""
    before = Running(np.array(i["live"], dtype=np.int64), floats(i["sums"]))
    view = LayerView(floats(i["q"]), floats(i["k"]), None, i["scaling"], None)
    shown = Observation(i["seen"], len(i["k"]), None, {0: view})
    after = append_tokens(policies.h2o(), Budget(count=2), before, shown, i["tokens"])
    return {"live": after.live.tolist(), "sums": after.records}


def of_policy(brute: Brute, i: Json) -> Result:
    """Return the kept sets of a policy at the constants of the vector."""
    given, B, constants = from_vector(i)
    return {"kept": decided(brute.policy(given, constants), given, B)}


POLICY_ITEMS: Mapping[str, Callable[[Any], Result]] = {
    **{brute.item: partial(of_policy, brute) for brute in reversed(brutes()) if brute.item.startswith("PO-")},
    "PO-RETAIN": lambda i: kept(i, policies.knorm()),
    "PO-OBSERVED-ATTENTION": observed,
    "PO-POOL": lambda i: {
        "max": max_pool(floats([i["row"]]), i["kernel"])[0],
        "average": average_pool(floats([i["row"]]), i["kernel"])[0],
    },
    "PO-TOP-UNITS": topped,
    "PO-FILL-UNITS": filled,
    "PO-BEST-BLOCKS": blocks,
    "PO-BLOCKS": lambda i: kept(i, policies.in_blocks(policies.snapkv(i["W"], i["kernel"]), i["b"])),
    "PO-PIECES": in_pieces,
    "PO-CHUNKS": in_chunks,
    "PO-LATER-SCORES": scored_later,
    "PO-REPRESENTATIVES": crushed,
    "PO-WHOLE-SHARES": lambda i: {"shares": largest_remainder([Fraction(target) for target in i["targets"]])},
    "PO-PYRAMID-BUDGET": pyramid,
    "PO-TABLE-BUDGET": table,
    "PO-COMPOSE": composed,
    "PO-ADAPTIVE-BUDGET": lambda i: shared(i, Adaptive(Fraction(i["safeguard"]))),
    "PO-COMPETITION-BUDGET": lambda i: shared(i, Competition(Fraction(i["safeguard"]))),
    "PO-THRESHOLD": lambda i: shared(i, Above(i["tau"])),
    "PO-ADAKV-OFFICIAL": lambda i: {"shares": adakv_official(i["wins"], i["base"], Fraction(i["safeguard"]))},
    "PO-STEP": lambda i: {"due": [Cadence(*step[:2]).due(*step[2:]) for step in i["steps"]]},
    "PO-TURN": turned,
    "PO-READ": read,
    "PO-TWO-STAGES": staged,
    "PO-REHEARSAL": rehearsal,
    "PO-KVZIP": lambda i: kept(i, policies.kvzip([[], [], []], i["N_sink"], i["N_recent"])),
    "PO-KVZIP-PLUS": lambda i: kept(
        i, policies.kvzip_plus(dict(enumerate(map(floats, i["W_o"]))), [[], [], []], i["N_sink"], i["N_recent"])
    ),
    "PO-GLOBAL-BUDGET": lambda i: shared(i, across_layers),
    "PO-HEAD-SCORES": lambda i: {
        "head_scores": head_scores([np.array(rows, dtype=np.float64) for rows in i["contexts"]])
    },
    "PO-FULL-HEADS": full_heads,
    "PO-KVZIP-HEADS": of_heads,
    "PO-Q-FILTERS": filtered,
    "PO-EXPECTED-ATTENTION-STATS": of_statistics,
    "PO-PREFERENCE-BUDGET": preferred,
    "PO-EPICACHE": lambda i: kept(i, policies.epicache()),
}
