"""The methods under the names that users know: a policy of five parts, a budget, and the backend that decides."""

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from models_integration.cache.crystal_states import DecodeRule
from models_integration.cache.decide_anew import DecideAnew
from models_integration.cache.scorer_records import DecideInSteps
from models_integration.session.method import Method
from models_integration.session.session import Session
from reference.policies import crystalcache, full_cache, streaming_llm
from spec.backend import BUILT_IN, Backend, resolve
from spec.budget import Budget, parse_budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.parameters.crystalcache import BreathProtection
from spec.policy import Policy
from spec.validate import check_sentence_ends

__all__ = ["CrystalCache", "CustomPolicy", "FullCache", "RetentionPolicy", "StreamingLLM", "method_of"]

_FASTEST_FIRST = ("triton", "numba", "numpy")


class RetentionPolicy(ABC):
    """A retention policy with its budget, as users have it: put on a model, it gives a session.

        with policy(model) as run:
            output = model.generate(**inputs, max_new_tokens=200)
    """

    @abstractmethod
    def on(self, model: PreTrainedModel) -> Method:
        """What it does on this model: for `decide`.

        Raises:
            SpecError: for a model that lacks what the policy needs.
        """

    def __call__(self, model: PreTrainedModel) -> Session:
        """`with policy(model) as run: ...`.

        Raises:
            SpecError: for a model that cannot be compacted, or that lacks what the policy needs.
        """
        return Session(self.on(model), model)


def method_of(policy: Policy, budget: Budget, backend: str = "numpy") -> Method:
    """A policy of five parts as a method; where its cadence has steps, its scorer's records go on through them."""
    steps = policy.cadence.every is not None
    return Method(policy, budget, backend, DecideInSteps(policy.scorer.needs) if steps else DecideAnew())


@dataclass(frozen=True, init=False)
class CustomPolicy(RetentionPolicy):
    """Any policy of five parts, yours or one of `reference.policies`.

    Args:
        policy: scorer, budgets, selector, protection and cadence, at one granularity.
        budget: as CrystalCache's.
        backend: the name of the backend that its parts use, for reports.

    Raises:
        SpecError: for a budget that the specification does not admit.
    """

    method: Method

    def __init__(self, policy: Policy, budget: float | int | str | Budget = 0.5, backend: str = "numpy") -> None:
        self._be(method_of(policy, parse_budget(budget), backend))

    def _be(self, method: Method) -> None:
        object.__setattr__(self, "method", method)

    @property
    def backend(self) -> str:
        """The name of the backend that decides."""
        return self.method.backend

    def on(self, model: PreTrainedModel) -> Method:
        """The same on every model."""
        return self.method


class CrystalCache(CustomPolicy):
    """CrystalCache: sentences as trunks, scored by co-attention and impact, dissolved from the weakest.

    Args:
        budget: a float or text with "." or "%" is a fraction of the prompt in (0, 1]; an int is tokens.
        sentence_ends: ids of the tokens that end a sentence; `sentence_ends(tokenizer)` makes the set.
        parameters: constants of the method.
        backend: "auto" (triton where CUDA is, else numba, else numpy: `run.backend` says which), another name,
            "module:ATTRIBUTE" or a Backend.
        decode: the cache is held at its budget while tokens are generated, by a breath every T_breath steps. Without
            it only segments (the prompt, later turns) evict.
        stream: all that the model reads is one endless segment, cut every C tokens; needs an integer budget.
        breath_protection: what is safe at a breath, in place of the parameters' value: "sink+recent", or "none" as
            in the paper, where the newest tokens can be the first to go.

    Raises:
        SpecError: for a budget, ends, parameters or a backend that the specification does not admit, or a stream
            without an integer budget.
        BackendUnavailable: when the backend cannot run here.
    """

    def __init__(
        self, budget: float | int | str | Budget = 0.5, sentence_ends: Set[int] | None = None,
        parameters: CrystalCacheParameters = PAPER, backend: str | Backend = "auto", *, decode: bool = False,
        stream: bool = False, breath_protection: BreathProtection = "sink+recent",
    ) -> None:
        share = parse_budget(budget)
        if sentence_ends is None:
            raise SpecError(
                "sentence_ends", None, "is needed; models_integration.sentence_ends(tokenizer) makes the set"
            )
        ends = check_sentence_ends(sentence_ends)
        if not isinstance(parameters, CrystalCacheParameters):
            raise SpecError("parameters", parameters, "must be CrystalCacheParameters")
        if stream and share.count is None:
            raise SpecError("budget", str(share), "a stream needs a number of tokens: a fraction of it has no end")
        parameters = replace(parameters, breath_protection=breath_protection)
        chosen = _fastest() if backend == "auto" else resolve(backend)
        if decode or stream:
            chosen.require_breath()
        rule = DecodeRule(ends, parameters, chosen, share, decode, stream)
        self._be(Method(crystalcache(ends, parameters, chosen), share, chosen.name, rule))


class StreamingLLM(CustomPolicy):
    """StreamingLLM: the first N_sink tokens and the most recent ones.

    Args:
        budget: as CrystalCache's.
        N_sink: attention sinks, tokens.

    Raises:
        SpecError: for a budget or N_sink that the specification does not admit.
    """

    def __init__(self, budget: float | int | str | Budget = 0.5, N_sink: int = 4) -> None:
        super().__init__(streaming_llm(N_sink), budget)


class FullCache(CustomPolicy):
    """Nothing is evicted: the upper bound of every comparison."""

    def __init__(self) -> None:
        super().__init__(full_cache(), 1.0)


def _fastest() -> Backend:
    for name in _FASTEST_FIRST:
        if name in BUILT_IN and (name != "triton" or _has_cuda()):
            try:
                return resolve(name)
            except BackendUnavailable:
                continue
    raise BackendUnavailable(f"none of the backends {', '.join(_FASTEST_FIRST)} can run here")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
