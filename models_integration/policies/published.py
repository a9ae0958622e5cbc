"""The published policies by name: one table, one class, each at its own granularity."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from os import PathLike
from typing import Any

from transformers import PreTrainedModel

from models_integration.model.architecture import describe
from models_integration.model.identity import ModelIdentity
from models_integration.model.weights import output_projections, rotary
from models_integration.policies.calibration import served_by
from models_integration.policies.methods import Method
from models_integration.session.session import Session
from reference import policies
from reference.calibration import Calibration, Identity, load_calibration
from spec.backend import Backend, resolve
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.policy import Policy
from spec.validate import check_penalty

__all__ = ["DIVERSE", "NAMES", "PUBLISHED", "Published", "check_name", "constants_of"]


def _triattention(
    calibration: Calibration | str | PathLike[str] | None = None, *, served: Identity, mode: str, pin_prompt: int = 0,
    slack: int = 128,
) -> Policy:
    return policies.triattention(_calibration(calibration), served, mode, pin_prompt, slack)


def _calibration(given: Calibration | str | PathLike[str] | None) -> Calibration:
    if given is None:
        raise SpecError("calibration", None, "is needed; `kvspec calibrate` or models_integration.calibrate makes it")
    return given if isinstance(given, Calibration) else load_calibration(given)


PUBLISHED: Mapping[str, Callable[..., Policy]] = {
    "adakv": policies.adakv,
    "caote": policies.caote,
    "chunkkv": policies.chunkkv,
    "chunkkv-described": policies.chunkkv_described,
    "defensivekv": policies.defensivekv,
    "expected-attention": policies.expected_attention,
    "h2o": policies.h2o,
    "h2o-described": policies.h2o_described,
    "keydiff": policies.keydiff,
    "knorm": policies.knorm,
    "nestedkv": policies.nestedkv,
    "nestedkv-without-adaptive": policies.nestedkv_without_adaptive,
    "nestedkv-without-both": policies.nestedkv_without_both,
    "nestedkv-without-continuum": policies.nestedkv_without_continuum,
    "pyramidkv": policies.pyramidkv,
    "pyramidkv-described": policies.pyramidkv_described,
    "rkv": policies.rkv,
    "snapkv": policies.snapkv,
    "streamingllm": policies.streaming_llm,
    "tova": policies.tova,
    "triattention": partial(_triattention, mode="global"),
    "triattention-by-head": partial(_triattention, mode="head"),
    "triattention-by-layer-and-head": partial(_triattention, mode="layer and head"),
}
"""What makes each policy, from its own constants. EpiCache is not here: its queries are not the prompt's own."""

DIVERSE = "diverse-"
"""Before a name: the same policy under set-conditioned selection, with the constants `diversity` and `signature`."""

_DIVERSITY = ("diversity", "signature", "backend")
NAMES = (*PUBLISHED, *(DIVERSE + name for name in PUBLISHED if name not in ("chunkkv", "chunkkv-described", "h2o")))
"""All names. Chunks have no signature; H2O's newest half is not protection, `diverse-h2o-described` has its sums."""

# Constants that are the model's, and not the caller's.
_FROM_MODEL: Mapping[str, Callable[[PreTrainedModel, ModelIdentity | None], Mapping[str, Any]]] = {
    "defensivekv": lambda model, identity: {"W_o": output_projections(describe(model))},
    "expected-attention": lambda model, identity: rotary(describe(model)),
    **dict.fromkeys(
        (name for name in PUBLISHED if name.startswith("triattention")),
        lambda model, identity: {"served": served_by(model, identity)},
    ),
}
_NOT_THE_CALLERS = {"W_o", "inv_freq", "factor", "served", "mode"}


def check_name(name: str) -> str:
    """A name of a policy, or DIVERSE and the name of one that keeps single tokens.

    Raises:
        SpecError: otherwise.
    """
    if name not in NAMES:
        raise SpecError("name", name, f"must be one of {', '.join(NAMES)}")
    return name


def constants_of(name: str) -> set[str]:
    """The constants that a caller may give for this name."""
    own = set(signature(PUBLISHED[name.removeprefix(DIVERSE)]).parameters) - _NOT_THE_CALLERS
    return own | set(_DIVERSITY) if name.startswith(DIVERSE) else own


@dataclass(frozen=True, init=False)
class Published:
    """A published policy with its budget; calling it on a model gives the context manager, as every method does.

    `Published("triattention", 0.3, calibration="statistics.npz")`: the file that `kvspec calibrate` writes, or a
    Calibration. `Published("diverse-adakv", 0.3, diversity=0.5, signature="head")`: any policy that keeps single
    tokens by their scores, under its own budgets, with set-conditioned selection; diversity is the paper's lambda.

    Args:
        name: one of NAMES.
        budget: a float or text with "." or "%" is a fraction of the prompt in (0, 1]; an int is tokens.
        identity: of the model, where it is known already: a calibration is checked without reading all parameters
            at each context.
        constants: the policy's own, by the names that reference.policies gives them: `Published("snapkv", 0.25, W=16)`.

    Raises:
        SpecError: for an unknown name or constant, a file that is no calibration, or a value that the specification
            does not admit.
        BackendUnavailable: when a backend cannot run here, or lacks what the policy needs.
    """

    name: str
    budget: Budget
    constants: Mapping[str, Any]
    identity: ModelIdentity | None

    def __init__(
        self, name: str, budget: float | int | str | Budget = 0.5, *, identity: ModelIdentity | None = None,
        **constants: Any,
    ) -> None:
        known = constants_of(check_name(name))
        for constant, value in constants.items():
            if constant not in known:
                raise SpecError(constant, value, f"{name} has the constants {', '.join(sorted(known)) or 'none'}")
        if "calibration" in known:
            constants["calibration"] = _calibration(constants.get("calibration"))
        check_penalty(constants.get("diversity", 0.0), "diversity")
        if name.removeprefix(DIVERSE) not in _FROM_MODEL:
            _made(name, constants)
        fields = {"name": name, "budget": parse_budget(budget), "constants": constants, "identity": identity}
        for field, given in fields.items():
            object.__setattr__(self, field, given)

    def on(self, model: PreTrainedModel) -> Method:
        """The same as a method, with what the policy must know of this model.

        Raises:
            SpecError: for a model that cannot be compacted, or that lacks what the policy needs; for a calibration
                of another model or rotation.
        """
        describe(model)
        learn = _FROM_MODEL.get(self.name.removeprefix(DIVERSE))
        learned = {} if learn is None else learn(model, self.identity)
        policy = _made(self.name, {**learned, **self.constants})
        return Method(policy, self.budget, resolve(self.constants.get("backend", "numpy")).name)

    def __call__(self, model: PreTrainedModel) -> Session:
        """`with published(model) as run: ...`."""
        return self.on(model)(model)


def _made(name: str, constants: Mapping[str, Any]) -> Policy:
    make = PUBLISHED[name.removeprefix(DIVERSE)]
    if not name.startswith(DIVERSE):
        return make(**constants)
    lam, mode = constants.get("diversity", 0.5), constants.get("signature", "flat")
    backend: str | Backend = constants.get("backend", "numpy")
    taken = set(signature(make).parameters)
    host = make(**{key: value for key, value in constants.items() if key in taken})
    return policies.diverse(host, lam, mode, backend)
