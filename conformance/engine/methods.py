"""Published methods as operations of an engine. The arguments follow from the needs of the method's policy.

A method with decode-time eviction also has kept sets after each decode step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from inspect import signature
from typing import Any

import numpy as np

from conformance.engine.ops import KeptSets, Op
from reference import policies
from reference.calibration import Calibration, Gates, Identity, Networks
from reference.policies.describe import example_policy
from reference.policies.names import BACKEND, POLICIES, make_policy
from reference.policies.retain import shown_to
from spec.backend import Backend
from spec.budget import Budget
from spec.parameters import NestedKVParameters
from spec.policy import LayerView, Observation, Policy, Repeat

FAMILY = "methods"
_UNSENT = frozenset({"every", "slack", BACKEND, "template", "chunk", "overlap", "calibration"})
"""Constants that are not sent.

They do not affect the decision at the end of a prompt, or other arguments replace them.
"""
DECODED = ("h2o", "tova", "caote", "morphkv")
"""Methods that are also tested after some decode steps."""
SHARED: Mapping[str, str] = {
    "g": "number of kept sets: one for the model, or for each layer, or for each layer and KV head, layer by layer",
    "n": "number of tokens of the prompt", "B": "tokens that a kept set holds on average, at least what is protected",
    "k": "cached keys after rotation", "v": "cached values",
    "q": "queries of the last m tokens after rotation; query head h belongs to KV head h // (H / H_kv)",
    "scaling": "factor of the logits", "softcap": "logits are softcap * tanh(logit / softcap)",
    "sinks": "logit of each query head's attention sink: one more term of the softmax, which has no weight of its own",
    "steps": "number of tokens that are decoded after the prompt; k, q and v have them too, and t is n + steps",
    "W_o": "output projection of each head", "inv_freq": "rotary frequencies; channels f and f + d / 2 are a pair",
    "factor": "what rotation multiplies by", "parameters": "all parameters of NestedKV",
    "chunks": "start and stop of each chunk that the model repeats after the prompt",
    "repeats": "chunk c is repeated by the tokens repeats[c] to repeats[c + 1] of repeat_q, repeat_k and norms",
    "repeat_q": "queries of the r repeating tokens after rotation", "repeat_k": "keys of the r repeating tokens",
    "norms": "norms of the hidden states that the attention of a layer reads, for the r repeating tokens",
    "covariance": "calibrated covariance of the queries before rotation",
    "head_scores": "calibrated score of each KV head", "filters": "calibrated filter of each KV head",
    "mean": "calibrated mean of the queries before rotation",
    "magnitude": "calibrated mean modulus of each pair of channels of the queries before rotation",
    "hidden": "hidden states that the attention of a layer reads, behind its norm",
    "W_1": "weights of the first of two linear maps of hidden states, or null for one map", "b_1": "biases of W_1",
    "W_2": "weights of the only or the second linear map, which gives the scores; one map has a = e",
    "b_2": "biases of W_2",
    "W_q": "weights of the queries of a gate", "b_q": "biases of W_q", "W_k": "weights of the keys of a gate",
    "norm_q": "weights of the norm of the queries of a gate", "norm_k": "weights of the norm of the keys of a gate",
    "base": "base keys of a gate", "bias": "bias of the logit of each query head of a gate",
}
"""Meaning of the arguments that are not constants."""
_OF_MODEL = {"W_o": "float[L, H, d, e]", "inv_freq": "float[f]", "factor": "float"}
_REPEATS = {
    "chunks": "int[c, 2]", "repeats": "int[c + 1]", "repeat_q": "float[L, H, r, d]", "repeat_k": "float[L, H_kv, r, d]",
    "scaling": "float", "softcap": "float or null", "sinks": "float[L, H] or null",
}
_HEADS = {"head_scores": "float[L, H_kv]"}
_FILTERS = {"filters": "float[L, H_kv, d]"}
_NETWORKS = {
    "W_2": "float[L, H_kv, a]", "b_2": "float[L, H_kv]", "W_1": "float[L, a, e] or null", "b_1": "float[L, a] or null",
}
_GATES = {
    "W_q": "float[L, H, r, e]", "b_q": "float[L, H, r]", "W_k": "float[L, H_kv, r, e]", "norm_q": "float[L, r]",
    "norm_k": "float[L, r]", "base": "float[L, H_kv, s, r]", "bias": "float[L, H]",
}
_GAUSSIAN = {
    "mean": "float[L, H, d]", "covariance": "float[L, H, d, d]", "inv_freq": "float[f]", "factor": "float",
}
_STATISTICS = {"mean": "float[L, H, d]", "magnitude": "float[L, H, f]", "inv_freq": "float[f]", "factor": "float"}
_PARTS = ("mean", "magnitude", "head_scores", "filters", "covariance")
"""Names of the arrays of a calibration."""
_KINDS = {int: "int", float: "float", str: "text", Fraction: "text", NestedKVParameters: "nestedkv"}


def _constants(name: str) -> dict[str, Any]:
    """Return the constants of a policy with their defaults, without the constants that depend on the model."""
    row = POLICIES[name]
    result = {key: one.default for key, one in signature(row.make).parameters.items()}
    return {key: value for key, value in result.items() if key not in {*row.model_constants, *row.decided, *_UNSENT}}


@cache
def method_ops() -> Mapping[str, Op]:
    """Return the operation of each published policy, named `methods.NAME`."""
    names = [name for name in POLICIES if name not in ("crystalcache", "fullcache")]
    return {f"{FAMILY}.{name}": Op(_arguments(name), "KeptSets") for name in names}


def _calibrated(name: str) -> dict[str, str]:
    """Return the arguments that are parts of a calibration."""
    if "calibration" not in signature(POLICIES[name].make).parameters:
        return {}
    parts = {
        "kvzip-heads": _HEADS, "q-filters": _FILTERS, "kvzap": _NETWORKS, "fast-kvzip": _GATES,
        "expected-attention-stats": _GAUSSIAN,
    }
    return parts.get(name, _STATISTICS)


def _arguments(name: str) -> dict[str, str]:
    needs, calibrated = example_policy(name).scorer.needs, _calibrated(name)
    result = {"g": "int", "n": "int", "B": "int"}
    if needs.layers == "all" and calibrated != _HEADS:
        result["k"] = "float[L, H_kv, n, d]"
    if needs.query_rows != 0:
        result |= {
            "q": "float[L, H, m, d]", "scaling": "float", "softcap": "float or null", "sinks": "float[L, H] or null",
        }
    if name in DECODED:
        result |= {"steps": "int", "k": "float[L, H_kv, t, d]"}
    if needs.hidden:
        result["hidden"] = "float[L, n, e]"
    if needs.values:
        result["v"] = f"float[L, H_kv, {'t' if name in DECODED else 'n'}, d]"
    if needs.rehearsal is not None:
        result |= _REPEATS | ({"norms": "float[L, r]"} if needs.values else {})
    result |= calibrated | {key: kind for key, kind in _OF_MODEL.items() if key in POLICIES[name].model_constants}
    return result | {key: _KINDS[type(value)] for key, value in _constants(name).items()}


def arguments_of(name: str, observation: Observation, B: int, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an operation's arguments.

    `constants` also contains the constants that depend on the model, and the number of decode steps.
    """
    views = list(observation.layers.values())
    result: dict[str, Any] = {"g": observation.groups, "n": observation.seen - constants.get("steps", 0), "B": B}
    if views:
        result |= {"scaling": views[0].scaling, "softcap": views[0].softcap, "sinks": None}
        result |= {one: np.stack([np.asarray(getattr(view, one)) for view in views])
                  for one in ("q", "k", "v", "sinks", "hidden") if getattr(views[0], one) is not None}
        result |= _repeats_as_arguments(views)
    constants_given = {**_constants(name), **constants}
    if "W_o" in constants_given:
        constants_given["W_o"] = np.stack([constants_given["W_o"][at] for at in sorted(constants_given["W_o"])])
    if "calibration" in constants_given:
        taken = constants_given["calibration"]
        for part in (taken, taken.identity, taken.networks, taken.gates):
            constants_given |= {} if part is None else vars(part)
    return {**constants_given, **result}


def _repeats_as_arguments(views: Sequence[LayerView]) -> dict[str, Any]:
    """Return the repetitions of all chunks, concatenated."""
    if views[0].repeats is None:
        return {}
    parts = views[0].repeats
    result = {
        "chunks": np.array([(part.start, part.stop) for part in parts], np.int64).reshape(-1, 2),
        "repeats": np.cumsum([0, *(len(part.norms) for part in parts)]),
    }
    for name, axis, none in (("q", 1, views[0].q[:, :0]), ("k", 1, views[0].k[:, :0]), ("norms", 0, np.zeros(0))):
        rows = [np.concatenate([none, *(getattr(one, name) for one in view.repeats or ())], axis) for view in views]
        result["norms" if name == "norms" else f"repeat_{name}"] = np.stack(rows)
    return result


def answered(op: str, given: Mapping[str, Any], backend: Backend) -> KeptSets:
    """Return the kept sets of the reference, with the scores of a backend, as an engine would answer."""
    name = op.partition(".")[2]
    engine = {BACKEND: backend} if name != "streamingllm" else {}
    policy = make_policy(name, {**_constants_from(name, given), **engine})
    if given.get("steps"):
        layers = list(_observation(policy, given).layers.values())
        *_, kept = decoded(policy, layers, given["g"], given["B"], given["n"])
        return KeptSets(np.concatenate(kept), np.cumsum([0, *map(len, kept)]))
    observed = _observation(policy, given)
    result = policies.retain(policy, Budget(count=given["B"]), observed)
    seen = replace(shown_to(policy.scorer.needs, observed), B=given["B"])
    scores = policy.scorer(seen, policy.protection(given["n"])).values
    return KeptSets(result.positions, result.offsets, scores if scores.shape[1] == given["n"] else None)


def _constants_from(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of a policy from the arguments of its operation."""
    row, kinds = POLICIES[name], method_ops()[f"{FAMILY}.{name}"].arguments
    result: dict[str, Any] = {
        key: Fraction(given[key]) if kinds[key] == "text" and given[key][0].isdigit() else given[key]
        for key in (*_constants(name), *(row.model_constants & given.keys()))
    }
    if "W_o" in result:
        result["W_o"] = dict(enumerate(result["W_o"]))
    if "chunks" in given:
        result["template"] = ((), (), ())
    return result | (_calibration(given) if _calibrated(name) else {})


def _calibration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the calibration with the parts in the arguments, and the model of the calibration."""
    parts = {name: given[name] for name in _PARTS if name in given}
    nothing = np.zeros((*next(given[name] for name in (*_PARTS, "W_2", "W_q") if name in given).shape[:2], 0))
    if "W_2" in given:
        parts["networks"] = Networks(**{name: given[name] for name in _NETWORKS})
    if "W_q" in given:
        parts["gates"] = Gates(**{name: given[name] for name in _GATES})
    served = Identity("", given.get("inv_freq", np.zeros(0)), given.get("factor", 1.0))
    statistics = {"mean": nothing, "magnitude": nothing, **parts}
    return {"served": served, "calibration": Calibration(served, tuple(range(len(nothing))), **statistics)}


def _observation(policy: Policy, given: Mapping[str, Any]) -> Observation:
    views = {
        at: LayerView(
            given["q"][at] if "q" in given else k[:, :0], k, given["v"][at] if "v" in given else None,
            given.get("scaling", 1.0), given.get("softcap"), None, _repeats(given, at),
            None if given.get("sinks") is None else given["sinks"][at],
            given["hidden"][at] if "hidden" in given else None,
        ) for at, k in enumerate(given.get("k", ()))
    }
    return Observation(given["n"], given["g"], None, views)


def _repeats(given: Mapping[str, Any], at: int) -> tuple[Repeat, ...] | None:
    """Return the repetitions of the chunks in a layer."""
    if "chunks" not in given:
        return None
    q, k, ends = given["repeat_q"][at], given["repeat_k"][at], given["repeats"].tolist()
    norms = given["norms"][at] if "norms" in given else np.ones(ends[-1])
    return tuple(
        Repeat(start, stop, q[:, first:end], k[:, first:end], norms[first:end])
        for (start, stop), first, end in zip(given["chunks"].tolist(), ends, ends[1:], strict=False)
    )


Live = Sequence[Sequence[int]]


def cached(view: LayerView, live: Live, seen: int, first: int) -> LayerView:
    """Return the content of a cache: the live keys of each KV head, and the queries from position `first` on."""
    rows = [live[g % len(live)] for g in range(len(view.k))]
    k, v = (
        None if x is None else np.stack([head[list(at)] for head, at in zip(np.asarray(x), rows, strict=True)])
        for x in (view.k, view.v)
    )
    before = view.k.shape[1] - view.q.shape[1]
    hidden = None if view.hidden is None else np.asarray(view.hidden)[list(rows[0])]
    return replace(view, q=view.q[:, max(0, first - before) : seen - before], k=k, v=v, hidden=hidden)


def shown(layers: Sequence[LayerView], live: Live, seen: int, first: int) -> Observation:
    """Return the observation of kept sets with these live positions."""
    heads = len(live) // len(layers)
    views = {at: cached(view, live[at * heads :][: heads or 1], seen, first) for at, view in enumerate(layers)}
    return Observation(seen, len(live), None, views)


def decoded(
    policy: Policy, layers: Sequence[LayerView], groups: int, B: int, prompt: int,
) -> Iterator[list[list[int]]]:
    """Yield the live positions of every group, after the prompt of `prompt` tokens and after each decode step.

    A policy that decides only at the end of a prompt keeps every decoded token.
    """
    n, rows, budget = layers[0].k.shape[1], policy.scorer.needs.query_rows, Budget(count=B)
    first = 0 if rows is None else max(0, prompt - rows)
    seen = shown(layers, [range(prompt)] * groups, prompt, first)
    if policy.cadence.every is None:
        result = policies.retain(policy, budget, seen)
        kept = [result.group(g).tolist() for g in range(groups)]
        yield from ([[*head, *range(prompt, at)] for head in kept] for at in range(prompt, n + 1))
        return
    _, running = policies.start(policy, budget, seen)
    yield running.live.tolist()
    for at in range(prompt + 1, n + 1):
        live = np.column_stack([running.live, np.full(groups, at - 1)]).tolist()
        _, running = policies.advance(policy, budget, running, shown(layers, live, at, at - 1))
        yield running.live.tolist()
