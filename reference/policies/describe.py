"""What every policy is, costs and serves: the list behind `kvspec policies` and the guide."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.names import DIVERSE, NAMES, POLICIES, check_name, make_policy
from spec.errors import SpecError
from spec.policy import Policy, SeparableScorer
from spec.retention import Granularity

__all__ = ["PolicyDescription", "describe_policy", "list_policies"]


@dataclass(frozen=True)
class PolicyDescription:
    """One policy, as a user chooses it.

    Attributes:
        name: for `policy_from_name`, `--policies` and rules files.
        paper: where the method is published; "" for none.
        keeps: what is kept, as a noun phrase.
        passes: how often the model reads the prompt.
        layers: of which layers queries and keys are read: "none", "observed" (one layer) or "all".
        granularity: what shares one kept set: "model", "layer" or "layer and KV head".
        layer_by_layer: each layer is compacted while the prompt is read, so that the full cache never exists.
            Otherwise the peak is the full cache.
        decode_time: it evicts while tokens are decoded.
        later_turns: a later prompt on the same cache is evicted again.
        padded_batches: rows of different lengths are served.
        constants: that a caller may give, with their defaults; a required one has none and is in `required`.
        required: constants without a default.
        of_model: constants that the served model decides.
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


def list_policies() -> tuple[PolicyDescription, ...]:
    """Every policy that has a name, the `diverse-` ones left out.

    >>> [one.name for one in list_policies() if one.passes == 2]
    ['kvzip', 'kvzip-plus', 'kvzip-uniform']
    """
    return tuple(describe_policy(name) for name in POLICIES)


def describe_policy(name: str) -> PolicyDescription:
    """One policy by its name; `diverse-snapkv` is SnapKV under set-conditioned selection.

    Raises:
        SpecError: for a name that no policy has. A policy of the user's own has no description.
    """
    if check_name(name) not in NAMES:
        raise SpecError("name", name, "has no description: it is a policy of your own")
    row, policy = POLICIES[name.removeprefix(DIVERSE)], _example(name)
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
        layer_by_layer=needs.layers != "all" and name != "fullcache",
        decode_time=stepping,
        later_turns=needs.rehearsal is None and (stepping or _goes_on(policy)),
        padded_batches=needs.rehearsal is None and not stepping,
        constants={key: value for key, value in given.items() if key not in required},
        required=required,
        of_model=tuple(sorted(row.of_model)),
    )


def _goes_on(policy: Policy) -> bool:
    """Whether its kept sets can be decided again after they have come to differ."""
    scorer = policy.scorer
    return policy.granularity is Granularity.MODEL or (isinstance(scorer, SeparableScorer) and scorer.separable)


def _example(name: str) -> Policy:
    """The policy with its defaults, for a model of one layer, two KV heads and d = 4."""
    row, identity = POLICIES[name.removeprefix(DIVERSE)], Identity("example", np.ones(2), 1.0)
    calibration = Calibration(identity, (0,), np.zeros((1, 2, 4)), np.zeros((1, 2, 2)), np.ones((1, 2)))
    stand_ins: dict[str, Any] = {
        "W_o": {0: np.zeros((2, 4, 4))}, "inv_freq": np.ones(2), "factor": 1.0, "served": identity,
        "calibration": calibration, "template": ((1,), (2,), (3,)), "sentence_ends": frozenset({0}),
    }
    wanted = signature(row.make).parameters.keys() & stand_ins.keys()
    return make_policy(name, {key: stand_ins[key] for key in wanted})
