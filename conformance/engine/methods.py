"""Published methods as operations of an engine: their arguments follow from what the policy of a name needs.

A method whose policy needs a calibration, or a prompt that is repeated, has no operation.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from inspect import Parameter, signature
from typing import Any

import numpy as np

from conformance.engine.ops import Op
from conformance.engine.steps import decoded
from reference.policies.describe import example_policy
from reference.policies.names import BACKEND, POLICIES, make_policy
from reference.policies.retain import retain
from spec.backend import Backend
from spec.budget import Budget
from spec.parameters import NestedKVParameters
from spec.policy import LayerView, Observation, Policy, Selection

FAMILY = "methods"
_DECODING = frozenset({"every", "slack", BACKEND})
"""Constants that decide nothing at the end of a prompt."""
DECODED = ("h2o", "tova")
"""Methods that are asked for kept sets after some decoded tokens too."""
SHARED: Mapping[str, str] = {
    "g": "number of kept sets: one for the model, or for each layer, or for each layer and KV head, layer by layer",
    "n": "number of tokens of the prompt", "B": "tokens that a kept set holds on average, at least what is protected",
    "k": "cached keys after rotation", "v": "cached values",
    "q": "queries of the last m tokens after rotation; query head h belongs to KV head h // (H / H_kv)",
    "scaling": "factor of the logits", "softcap": "logits are softcap * tanh(logit / softcap)",
    "steps": "number of tokens that are decoded after the prompt; k and q have them too, and t is n + steps",
    "W_o": "output projection of each head", "inv_freq": "rotary frequencies; channels f and f + d / 2 are a pair",
    "factor": "what rotation multiplies by", "parameters": "all parameters of NestedKV",
}
"""What arguments mean that are no constants."""
_OF_MODEL = {"W_o": "float[L, H, d, e]", "inv_freq": "float[f]", "factor": "float"}
_KINDS = {int: "int", float: "float", str: "text", Fraction: "text", NestedKVParameters: "nestedkv"}


def _constants(name: str) -> dict[str, Any]:
    """The constants of a policy with their defaults, but for the model's."""
    row = POLICIES[name]
    found = {key: one.default for key, one in signature(row.make).parameters.items()}
    return {key: value for key, value in found.items() if key not in {*row.of_model, *_DECODING}}


@cache
def method_ops() -> Mapping[str, Op]:
    """An operation for each method, by its name behind `methods.`."""
    return {
        f"{FAMILY}.{name}": Op(arguments, "Selection") for name in POLICIES for arguments in [_arguments(name)]
        if arguments
    }


def _arguments(name: str) -> dict[str, str]:
    constants = _constants(name)
    if name == "fullcache" or any(value in (Parameter.empty, None) for value in constants.values()):
        return {}
    needs, of_model = example_policy(name).scorer.needs, POLICIES[name].of_model
    found = {"g": "int", "n": "int", "B": "int"}
    if needs.layers == "all":
        found["k"] = "float[L, H_kv, n, d]"
    if needs.query_rows != 0:
        found |= {"q": "float[L, H, m, d]", "scaling": "float", "softcap": "float or null"}
    if name in DECODED:
        found |= {"steps": "int", "k": "float[L, H_kv, t, d]"}
    if needs.values:
        found["v"] = "float[L, H_kv, n, d]"
    found |= {key: kind for key, kind in _OF_MODEL.items() if key in of_model}
    return found | {key: _KINDS[type(value)] for key, value in constants.items()}


def arguments_of(name: str, observation: Observation, B: int, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an operation's arguments; `constants` has the model's too, and the steps."""
    views = list(observation.layers.values())
    found: dict[str, Any] = {"g": observation.groups, "n": observation.seen - constants.get("steps", 0), "B": B}
    if views:
        found |= {"scaling": views[0].scaling, "softcap": views[0].softcap}
        found |= {one: np.stack([np.asarray(getattr(view, one)) for view in views]) for one in ("q", "k", "v")
                  if getattr(views[0], one) is not None}
    own = {**_constants(name), **constants}
    if "W_o" in own:
        own["W_o"] = np.stack([own["W_o"][at] for at in sorted(own["W_o"])])
    return {**own, **found}


def answered(op: str, given: Mapping[str, Any], backend: Backend) -> Selection:
    """What the reference keeps, with the scores of a backend: a model of an engine's answer."""
    name, kinds = op.partition(".")[2], method_ops()[op].arguments
    fixed = {"g", "n", "B", "k", "q", "v", "scaling", "softcap", "steps"}
    constants: dict[str, Any] = {
        key: Fraction(given[key]) if kind == "text" and given[key][0].isdigit() else given[key]
        for key, kind in kinds.items() if key not in fixed
    }
    if "W_o" in constants:
        constants["W_o"] = dict(enumerate(constants["W_o"]))
    policy = make_policy(name, {**constants, **({BACKEND: backend} if name != "streamingllm" else {})})
    if given.get("steps"):
        layers = list(_observation(policy, given).layers.values())
        kept = decoded(policy, layers, given["g"], given["B"], given["n"])[-1]
        return Selection(np.concatenate(kept), np.cumsum([0, *map(len, kept)]))
    found = retain(policy, Budget(count=given["B"]), _observation(policy, given))[0]
    return Selection(found.positions, found.offsets)


def _observation(policy: Policy, given: Mapping[str, Any]) -> Observation:
    views = {
        at: LayerView(
            given["q"][at] if "q" in given else k[:, :0], k, given["v"][at] if "v" in given else None,
            given.get("scaling", 1.0), given.get("softcap"),
        ) for at, k in enumerate(given.get("k", ()))
    }
    return Observation(given["n"], given["g"], None, views)
