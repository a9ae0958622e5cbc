"""What every policy is, costs and serves: the list behind `kvspec policies` and the guide."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.constants import MEANINGS, field_meanings
from reference.policies.layers import is_layerwise
from reference.policies.names import DIVERSE, NAMES, POLICIES, NamedPolicy, check_name, make_policy
from spec.errors import SpecError
from spec.policy import Policy, SeparableScorer
from spec.retention import Granularity

__all__ = ["PolicyDescription", "describe_policy", "list_policies"]


@dataclass(frozen=True)
class PolicyDescription:
    """Description of a policy: costs, supported uses and constants.

    Attributes:
        name: name for `policy_from_name`, `--policies` and rules files.
        paper: the publication, or "".
        keeps: the kept tokens, as a noun phrase.
        passes: number of times that the model reads the prompt.
        layers: layers whose queries and keys are read: "none", "observed" (one layer) or "all".
        granularity: owner of a kept set: "model", "layer" or "layer and KV head".
        layer_by_layer: True if each layer is compacted while the prompt is read. Otherwise the peak memory is the full
            cache.
        decode_time: True if the policy evicts while tokens are generated.
        later_turns: True if the policy evicts from later turns too, that is from prompts on the same cache. If False,
            later turns are read inside `with run.reading():`.
        padded_batches: True if rows of a batch may have different lengths.
        constants: constants with their defaults.
        required: constants without a default.
        of_model: constants that are read from the model.
        meanings: the meaning of each constant.
    """

    name: str
    paper: str
    keeps: str
    passes: int
    layers: str
    granularity: str
    layer_by_layer: bool
    decode_time: bool
    later_turns: bool
    padded_batches: bool
    constants: Mapping[str, object]
    required: tuple[str, ...]
    of_model: tuple[str, ...]
    meanings: Mapping[str, str]


def list_policies() -> tuple[PolicyDescription, ...]:
    """Return the descriptions of all named policies, without the `diverse-` variants.

    >>> [one.name for one in list_policies() if one.passes == 2]
    ['kvzip', 'kvzip-plus', 'kvzip-uniform']
    """
    return tuple(describe_policy(name) for name in POLICIES)


def describe_policy(name: str) -> PolicyDescription:
    """Return the description of a policy.

    >>> describe_policy("diverse-snapkv").constants["diversity"]
    0.5

    Raises:
        SpecError: if no policy has this name, or if the policy is your own.
    """
    if check_name(name) not in NAMES:
        raise SpecError("name", name, "has no description: it is a policy of your own")
    row, policy = POLICIES[name.removeprefix(DIVERSE)], example_policy(name)
    needs = policy.scorer.needs
    stepping = policy.cadence.every is not None
    given = {key: one.default for key, one in signature(row.make).parameters.items() if key in row.constants}
    given = {key: value for key, value in given.items() if key != "parameters"} | row.parameters
    keeps = row.keeps
    if name.startswith(DIVERSE):
        given |= {"diversity": 0.5, "signature": "flat"}
        keeps += "; a token similar to a kept one loses"
    required = tuple(key for key, value in given.items() if value is Parameter.empty or key == "template")
    return PolicyDescription(
        name, row.paper, keeps, 1 + (needs.rehearsal is not None), needs.layers, policy.granularity.value,
        layer_by_layer=name != "fullcache" and (needs.layers != "all" or is_layerwise(policy)),
        decode_time=stepping,
        later_turns=needs.rehearsal is None and (stepping or _goes_on(policy)),
        padded_batches=needs.rehearsal is None and not stepping,
        constants={key: value for key, value in given.items() if key not in required},
        required=required,
        of_model=tuple(sorted(row.of_model)),
        meanings={key: _meaning(row, key) for key in given},
    )


def _meaning(row: NamedPolicy, constant: str) -> str:
    """What a constant means for a policy; "" if nothing documents it."""
    parameters = signature(row.make).parameters.get("parameters")
    own = {} if parameters is None else field_meanings(type(parameters.default))
    return own.get(constant) or MEANINGS.get(f"{row.make.__name__}.{constant}") or MEANINGS.get(constant, "")


def _goes_on(policy: Policy) -> bool:
    """Whether its kept sets can be decided again after they have come to differ."""
    scorer = policy.scorer
    return policy.granularity is Granularity.MODEL or (isinstance(scorer, SeparableScorer) and scorer.separable)


def example_policy(name: str) -> Policy:
    """The policy with its defaults, for a model of one layer, two KV heads and d = 4."""
    row, identity = POLICIES[name.removeprefix(DIVERSE)], Identity("example", np.ones(2), 1.0)
    calibration = Calibration(identity, (0,), np.zeros((1, 2, 4)), np.zeros((1, 2, 2)), np.ones((1, 2)))
    stand_ins: dict[str, Any] = {
        "W_o": {0: np.zeros((2, 4, 4))}, "inv_freq": np.ones(2), "factor": 1.0, "served": identity,
        "calibration": calibration, "template": ((1,), (2,), (3,)), "sentence_ends": frozenset({0}),
    }
    wanted = signature(row.make).parameters.keys() & stand_ins.keys()
    return make_policy(name, {key: stand_ins[key] for key in wanted})
