"""The published policies by name: one table, one class, each at its own granularity."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from transformers import PreTrainedModel

from models_integration.architecture import Architecture, describe
from models_integration.methods import Method
from models_integration.session import Session
from models_integration.weights import output_projections, rotary
from reference import policies
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["PUBLISHED", "Published"]

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
    "nestedkv-without-continuum": policies.nestedkv_without_continuum,
    "pyramidkv": policies.pyramidkv,
    "pyramidkv-described": policies.pyramidkv_described,
    "rkv": policies.rkv,
    "snapkv": policies.snapkv,
    "streamingllm": policies.streaming_llm,
    "tova": policies.tova,
}
"""What makes each policy, from its own constants. EpiCache is not here: its queries are not the prompt's own."""

# Constants that are the model's, and not the caller's.
_FROM_MODEL: Mapping[str, Callable[[Architecture], Mapping[str, Any]]] = {
    "defensivekv": lambda architecture: {"W_o": output_projections(architecture)},
    "expected-attention": rotary,
}


@dataclass(frozen=True, init=False)
class Published:
    """A published policy with its budget; calling it on a model gives the context manager, as every method does.

    Args:
        name: one of PUBLISHED.
        budget: a float or text with "." or "%" is a fraction of the prompt in (0, 1]; an int is tokens.
        constants: the policy's own, by the names that reference.policies gives them: `Published("snapkv", 0.25, W=16)`.

    Raises:
        SpecError: for an unknown name or constant, or a value that the specification does not admit.
    """

    name: str
    budget: Budget
    constants: Mapping[str, Any]

    def __init__(self, name: str, budget: float | int | str | Budget = 0.5, **constants: Any) -> None:
        if name not in PUBLISHED:
            raise SpecError("name", name, f"must be one of {', '.join(PUBLISHED)}")
        known = set(signature(PUBLISHED[name]).parameters) - {"W_o", "inv_freq", "factor"}
        for constant, value in constants.items():
            if constant not in known:
                raise SpecError(constant, value, f"{name} has the constants {', '.join(sorted(known)) or 'none'}")
        if name not in _FROM_MODEL:
            PUBLISHED[name](**constants)
        for field, given in (("name", name), ("budget", parse_budget(budget)), ("constants", constants)):
            object.__setattr__(self, field, given)

    def on(self, model: PreTrainedModel) -> Method:
        """The same as a method, with what the policy must know of this model.

        Raises:
            SpecError: for a model that cannot be compacted, or that lacks what the policy needs.
        """
        architecture = describe(model)
        learnt = _FROM_MODEL[self.name](architecture) if self.name in _FROM_MODEL else {}
        return Method(PUBLISHED[self.name](**learnt, **self.constants), self.budget)

    def __call__(self, model: PreTrainedModel) -> Session:
        """`with published(model) as run: ...`."""
        return self.on(model)(model)
