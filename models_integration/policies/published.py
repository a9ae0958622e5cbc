"""Policies by name: `policy_from_name` takes every name, and gives what the class of that name gives."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from inspect import signature
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from models_integration.model.architecture import describe
from models_integration.model.identity import ModelIdentity
from models_integration.model.weights import output_projections, rotary
from models_integration.policies.calibration import served_by
from models_integration.policies.methods import CrystalCache, FullCache, RetentionPolicy, StreamingLLM, method_of
from models_integration.session.method import Method
from reference.calibration import Calibration, load_calibration
from reference.policies import names
from spec.backend import resolve
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.validate import check_penalty

__all__ = ["Published", "constants_of", "policy_from_name"]

_CLASSES: Mapping[str, Callable[..., RetentionPolicy]] = {
    "crystalcache": CrystalCache,
    "streamingllm": StreamingLLM,
    "fullcache": lambda budget: FullCache(),
}
"""Names whose policies have a class of their own."""


@dataclass(frozen=True, init=False)
class Published(RetentionPolicy):
    """A published policy with its budget; calling it on a model gives the context manager, as every method does.

    `Published("triattention", 0.3, calibration="statistics.npz")`: the file that `kvspec calibrate` writes, or a
    Calibration. `Published("diverse-adakv", 0.3, diversity=0.5, signature="head")`: any policy that keeps single
    tokens by their scores, under its own budgets, with set-conditioned selection; diversity is the paper's lambda.

    Args:
        name: one of `reference.policies.names.NAMES`; CrystalCache, StreamingLLM and FullCache are made by their
            classes, or by `policy_from_name`.
        budget: a float or text with "." or "%" is a fraction of the prompt in (0, 1]; an int is tokens.
        constants: the policy's own, by the names that reference.policies gives them: `Published("snapkv", 0.25, W=16)`.

    Raises:
        SpecError: for an unknown name or constant, a file that is no calibration, or a value that the specification
            does not admit.
        BackendUnavailable: when a backend cannot run here, or lacks what the policy needs.
    """

    name: str
    budget: Budget
    constants: Mapping[str, Any]
    identity: ModelIdentity | None = None
    """Of the model that it is for, once `knowing` has told it."""

    def __init__(self, name: str, budget: float | int | str | Budget = 0.5, **constants: Any) -> None:
        if name in _CLASSES:
            raise SpecError("name", name, "has a class of its own; policy_from_name takes every name")
        _check_constants(name, constants)
        if "calibration" in constants_of(name):
            constants["calibration"] = _calibration(constants.get("calibration"))
        check_penalty(constants.get("diversity", 0.0), "diversity")
        if not names.constants_of_model(name):
            names.make_policy(name, constants)
        for field, given in (("name", name), ("budget", parse_budget(budget)), ("constants", constants)):
            object.__setattr__(self, field, given)

    def knowing(self, identity: ModelIdentity) -> "Published":
        """The same for a model of this identity: a calibration is checked without reading all parameters once more."""
        told = copy(self)
        object.__setattr__(told, "identity", identity)
        return told

    def on(self, model: PreTrainedModel) -> Method:
        """What it does on this model, with what the policy must know of it.

        Raises:
            SpecError: for a model that cannot be compacted, or that lacks what the policy needs; for a calibration
                of another model or rotation.
        """
        policy = names.make_policy(self.name, {**_learned(self.name, model, self.identity), **self.constants})
        return method_of(policy, self.budget, resolve(self.constants.get("backend", "numpy")).name)


def policy_from_name(name: str, budget: float | int | str | Budget = 0.5, **constants: Any) -> RetentionPolicy:
    """The policy of a name: CrystalCache, StreamingLLM or FullCache, or a Published one.

    `policy_from_name("crystalcache", 0.3, sentence_ends=ends)` equals `CrystalCache(0.3, ends)`.

    Args:
        name: one of `reference.policies.names.NAMES`.
        budget: a float or text with "." or "%" is a fraction of the prompt in (0, 1]; an int is tokens. The full
            cache has none, whatever is given.
        constants: the policy's own, by name.

    Raises:
        SpecError: for an unknown name or constant, or what the policy's class refuses.
        BackendUnavailable: as the policy's class.
    """
    _check_constants(name, constants)
    if name in _CLASSES:
        return _CLASSES[name](budget, **constants)
    return Published(name, budget, **constants)


def constants_of(name: str) -> frozenset[str]:
    """The constants that `policy_from_name` takes for this name.

    Raises:
        SpecError: for an unknown name.
    """
    if name in _CLASSES:
        return frozenset(signature(_CLASSES[name]).parameters) - {"budget"}
    return names.constants_of(name)


def _check_constants(name: str, constants: Mapping[str, Any]) -> None:
    known = constants_of(name)
    for constant, value in constants.items():
        if constant not in known:
            raise SpecError(constant, value, f"{name} has the constants {', '.join(sorted(known)) or 'none'}")


def _calibration(given: Calibration | str | PathLike[str] | None) -> Calibration:
    if given is None:
        raise SpecError("calibration", None, "is needed; `kvspec calibrate` or models_integration.calibrate makes it")
    return given if isinstance(given, Calibration) else load_calibration(given)


def _learned(name: str, model: PreTrainedModel, identity: ModelIdentity | None) -> dict[str, Any]:
    """The constants that the model decides."""
    architecture, wanted = describe(model), names.constants_of_model(name)
    learned: dict[str, Any] = {}
    if "W_o" in wanted:
        learned["W_o"] = output_projections(architecture)
    if "inv_freq" in wanted:
        learned |= rotary(architecture)
    if "served" in wanted:
        learned["served"] = served_by(model, identity)
    return learned
