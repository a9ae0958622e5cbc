"""Descriptions of all policies for `kvspec policies` and the guide: kept tokens, costs and supported uses."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from reference.calibration import Calibration, Gates, Identity, Networks
from reference.policies.composition import constant_name, constants_from_text, presets_of
from reference.policies.crystalcache import BREATH_PROTECTION
from reference.policies.grammar import parse_call, parse_composition
from reference.policies.layers import decides_again, is_cascading, is_layerwise
from reference.policies.names import (
    BACKEND,
    DIVERSE,
    NAMES,
    OF_SESSION,
    POLICIES,
    NamedPolicy,
    check_name,
    constants_of,
    constants_of_model,
    home_of,
    make_policy,
    split_session_constants,
)
from reference.policies.texts import text_of
from spec.errors import SpecError
from spec.policy import Needs, Policy
from spec.validate import check_choices

__all__ = ["MEANINGS", "PolicyDescription", "describe_parts", "describe_policy", "field_meanings", "list_policies"]


MEANINGS: Mapping[str, str] = {
    "N_future": "number of positions after the prompt over which the RoPE rotation is averaged",
    "N_recent": "number of last tokens that are always kept",
    "N_reuse": "number of consecutive layers that keep the same chunks; the first of these layers selects the chunks",
    "N_sink": "number of first tokens that are always kept",
    "W": "number of last tokens that are always kept; policies like SnapKV use the queries of these tokens for scores",
    "anchor": "bit pattern that kvcrush compares each block with: alternating, mean, zeros or ones",
    "backend": "library that scores tokens: numpy, numba, torch or triton; policy_from_name chooses the fastest",
    "beta": "divisor; in addition to the window, the last layer keeps 1 / beta of the mean budget beyond the window",
    "block": "number of tokens in a block",
    "c": "number of tokens in a chunk",
    "calibration": "file that `kvspec calibrate` writes for your model",
    "kvzap.calibration": "KVzap's model.safetensors for your model, or a file that `kvspec calibrate` made from it",
    "fast_kvzip.calibration": "gates.safetensors for your model, or a file that `kvspec calibrate` made from it",
    "chunk": "number of prompt tokens that the model repeats in one forward pass",
    "diversity": "weight of a token's similarity to kept tokens; called lambda in the paper",
    "every": "number of tokens between two evictions",
    "fusion": "combination of the attention of the last queries: sum or max",
    "gamma": "weight of the variance of attention in a score; the mean of attention has weight 1",
    "kernel": "odd number of adjacent tokens over which each score is pooled",
    "kvcrush.share": "fraction of the kept blocks that represent evicted blocks, from 0 to 1",
    "lag": "number of tokens in each partition of the prompt",
    "lam": "weight of attention in a score; redundancy has weight 1 - lam",
    "decode": "true to evict also while tokens are generated, after every T_breath tokens",
    "overlap": "number of tokens at the end of a chunk that are repeated in the request for the next chunk",
    "pin_prompt": "number of first tokens that are never evicted",
    "positions": "rotary positions of the kept tokens: kept (of the text) or renumbered",
    "rule": "alpha (tokens similar to kept tokens score lower) or variant_b (tokens like the mean value score higher)",
    "safeguard": "fraction of a layer's budget that is divided evenly among the heads, from 0 to 1",
    "seed": "random seed of the sampled tokens",
    "sentence_ends": "ids of tokens that end a sentence: kvspec.sentence_ends(tokenizer)",
    "signature": "values that represent a token: flat (all heads of all layers), layer (all heads of a layer) or head",
    "slack": "number of tokens above the budget that triggers an eviction",
    "stream": "true for one endless prompt: evict after every C tokens; the budget must be a number of tokens",
    "tau": "weight of the cosine between a key and the mean future query",
    "tau1": "temperature of the attention entropy in the formula for the budget of a layer",
    "tau2": "temperature of the attention variance in the formula for the budget of a layer",
    "threshold": "attention of the last query on first and recent tokens, above which a layer keeps only these tokens",
    "template": "token ids that ask the model to repeat the prompt: kvspec.repeat_template(tokenizer)",
    "vase.share": "fraction of the budget for sinks and tokens with the widest value ranges, from 0 to 1",
}
"""Meaning of each constant. A key is the constant's name, or `policy.name` if the meaning differs between policies.

Fields of a policy's `parameters` are documented in the class of `parameters`.
"""


_BY_NAME: Mapping[str, Mapping[str, object]] = {
    "crystalcache": {"breath_protection": BREATH_PROTECTION, "decode": False, "stream": False},
}
"""Defaults of `policy_from_name` that differ from those of the paper, by policy and constant."""


def field_meanings(record: type) -> dict[str, str]:
    """Return the docstring of each field as one line. For a Literal type, the line also lists the allowed values."""
    (definition,) = ast.parse(dedent(inspect.getsource(record))).body
    assert isinstance(definition, ast.ClassDef)
    choices = {
        name: f" ({', '.join(get_args(kind))})" for name, kind in get_type_hints(record).items()
        if get_origin(kind) is Literal
    }
    return {
        field.target.id: " ".join(doc.value.value.split()).rstrip(".") + choices.get(field.target.id, "")
        for field, doc in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


@dataclass(frozen=True)
class PolicyDescription:
    """Description of a policy: kept tokens, costs, supported uses and constants.

    Attributes:
        name: name or text of the policy in `policy_from_name`, in the option `--policies` and in rules files.
        paper: publication that defines the policy, or "" if there is no publication.
        keeps: description of the tokens that the policy keeps.
        passes: number of times that the model processes the prompt, 1 or 2.
        layers: layers whose tensors the scorer receives: "none", "observed" (one layer) or "all".
        tensors: tensors that the scorer receives from these layers, such as "queries" and "keys".
        granularity: part of the model that has a separate set of kept tokens: "model", "layer" or "layer and KV head".
        layer_by_layer: True if tokens are evicted from each layer during the forward pass over the prompt. If
            `layer_by_layer` is False, the full cache is in memory before eviction.
        decode_time: True if the policy evicts while tokens are generated.
        later_turns: True if the policy also evicts from later prompts on the same cache. If `later_turns` is False,
            pass later prompts to the model inside `with run.reading():`.
        padded_batches: True if the prompts of a batch may have different lengths.
        positions: rule of rotary positions in the paper: "kept" or "renumbered". The default of kvspec is "kept".
        constants: default values of the constants that have a default, by name.
        required: names of the constants that have no default.
        model_constants: names of the constants that kvspec reads from the model.
        meanings: explanation of each constant, by name.
    """

    name: str
    paper: str
    keeps: str
    passes: int
    layers: str
    tensors: tuple[str, ...]
    granularity: str
    layer_by_layer: bool
    decode_time: bool
    later_turns: bool
    padded_batches: bool
    positions: str
    constants: Mapping[str, object]
    required: tuple[str, ...]
    model_constants: tuple[str, ...]
    meanings: Mapping[str, str]


def list_policies() -> tuple[PolicyDescription, ...]:
    """Return the descriptions of all policies of kvspec, without the `diverse-` variants.

    >>> [one.name for one in list_policies() if one.passes == 2]
    ['kvzip', 'kvzip-plus', 'kvzip-uniform']
    """
    return tuple(describe_policy(name) for name in POLICIES)


def describe_policy(name: str) -> PolicyDescription:
    """Return the description of the policy that has a given name, or of a policy from text.

    >>> describe_policy("diverse-snapkv").constants["diversity"]
    0.5
    >>> describe_policy("snapkv:W=16/every=64").decode_time
    True
    >>> describe_policy("snapkv(w=16)").constants["W"]
    16
    >>> describe_policy("snapkv:positions=renumbered").constants["positions"]
    'renumbered'

    Raises:
        SpecError: if no policy of kvspec has the given name, or if parts do not fit. Policies that you wrote have no
            description.
    """
    whole, called, of_session = _parse_text(name)
    if (name := home_of(whole)) not in NAMES:
        raise SpecError("name", name, "has no description: give a name of `kvspec policies` or kvspec.list_policies()")
    row, policy = POLICIES[name.removeprefix(DIVERSE)], example_policy(whole, called)
    needs = policy.scorer.needs
    stepping = policy.cadence.every is not None
    given = {**{key: value for key, value in row.defaults.items() if key != "parameters"}, **_BY_NAME.get(name, {})}
    keeps, composition = row.keeps, parse_composition(whole)
    if name.startswith(DIVERSE):
        given |= {"diversity": 0.5, "signature": "flat", "rule": "alpha"}
        keeps += "; a token similar to a kept token has a lower score"
    given |= {**constants_from_text(row, composition.constants, given), **called, **of_session}
    if parts := ", ".join(f"{part}={value}" for part, (value, _) in composition.parts.items()):
        keeps = f"tokens by the {'scorer' if composition.scorer_only else 'parts'} of {name}, with {parts}"
    required = tuple(key for key, value in given.items() if value is Parameter.empty or key == "template")
    return PolicyDescription(
        whole, row.paper, keeps, 1 + (needs.rehearsal is not None), needs.layers, _tensors(needs),
        policy.granularity.value,
        layer_by_layer=name != "fullcache" and (needs.layers != "all" or is_layerwise(policy) or is_cascading(policy)),
        decode_time=stepping or bool(given.get("decode")),
        later_turns=decides_again(policy),
        padded_batches=needs.rehearsal is None,
        positions=row.positions,
        constants={key: value for key, value in given.items() if key not in required},
        required=required,
        model_constants=tuple(sorted(constants_of_model(whole))),
        meanings={key: _meaning(row, key) for key in given},
    )


def _parse_text(text: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of a text, the constants in the parentheses, and the constants of sessions."""
    head, given = parse_call(text, "name")
    head, of_session = split_session_constants(head)
    name = check_name(head)
    of_home = {"crystalcache": frozenset(OF_SESSION), "fullcache": frozenset[str]()}
    known = constants_of(name) | of_home.get(home_of(name), frozenset({"positions"}))
    if wrong := sorted(of_session.keys() - known):
        raise SpecError(wrong[0], of_session[wrong[0]], f"is not a constant of {name}")
    called = {constant_name(key, known): value for key, value in given.items()}
    if isinstance(chosen := called.get("parameters"), str) and home_of(name) in POLICIES:
        presets = presets_of(POLICIES[home_of(name)])
        check_choices("parameters", (chosen,), presets)
        called = {**presets[chosen], **{key: value for key, value in called.items() if key != "parameters"}}
    if unknown := sorted(called.keys() - known):
        reason = f"{name} has the constants {', '.join(sorted(known)) or 'none'}"
        raise SpecError(unknown[0], called[unknown[0]], reason)
    of_session |= {key: called.pop(key) for key in OF_SESSION.keys() & called.keys()}
    for key, value in of_session.items():
        if key != BACKEND:
            check_choices(key, (str(value),), ("kept", "renumbered") if key == "positions" else ("True", "False"))
    return name, called, of_session


def _tensors(needs: Needs) -> tuple[str, ...]:
    """Return the tensors of a layer that a scorer receives. Keys are part of each layer's view."""
    if needs.layers == "none":
        return ()
    received = {
        "queries": needs.query_rows != 0, "keys": True, "values": needs.values, "hidden states": needs.hidden,
    }
    return tuple(tensor for tensor, is_received in received.items() if is_received)


def _meaning(row: NamedPolicy, constant: str) -> str:
    """Return the meaning of a policy's constant, or "" if the constant is not documented."""
    parameters = signature(row.make).parameters.get("parameters")
    constants = {} if parameters is None else field_meanings(type(parameters.default))
    return constants.get(constant) or MEANINGS.get(f"{row.make.__name__}.{constant}") or MEANINGS.get(constant, "")


def describe_parts(name: str) -> str:
    """Return the text of the parts of a policy of kvspec, with the constants of the text or with default constants.

    >>> describe_parts("pyramidkv")
    'score=snapkv:W=32:kernel=7/layers=pyramid:beta=20'

    Raises:
        SpecError: if the name is unknown.
    """
    name, called, _ = _parse_text(name)
    return text_of(example_policy(name, called), _example_constants(name))


def example_policy(name: str, constants: Mapping[str, Any] | None = None) -> Policy:
    """Return the policy of a name or text with constants, for a model with one layer, two KV heads and d = 4."""
    return make_policy(name, {**_example_constants(name), **(constants or {})})


def _example_constants(name: str) -> dict[str, Any]:
    row, identity = POLICIES[home_of(name).removeprefix(DIVERSE)], Identity("example", np.ones(2), 1.0)
    gates = Gates(*(np.ones((1, *shape)) for shape in ((2, 2, 4), (2, 2), (2, 2, 4), (2,), (2,), (2, 1, 2), (2,))))
    calibration = Calibration(
        identity, (0,), np.zeros((1, 2, 4)), np.zeros((1, 2, 2)), np.ones((1, 2)), filters=np.ones((1, 2, 4)),
        networks=Networks(np.zeros((1, 2, 4)), np.zeros((1, 2))),
        covariance=np.ones((1, 2, 4, 4)), gates=gates,
    )
    stand_ins: dict[str, Any] = {
        "W_o": {0: np.zeros((2, 4, 4))}, "inv_freq": np.ones(2), "factor": 1.0, "served": identity,
        "calibration": calibration, "template": ((1,), (2,), (3,)), "sentence_ends": frozenset({0}),
    }
    wanted = (signature(row.make).parameters.keys() | constants_of_model(name)) & stand_ins.keys()
    return {key: stand_ins[key] for key in wanted}
