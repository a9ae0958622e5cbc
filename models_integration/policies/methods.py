"""The methods under the names that users know: a policy of five parts, a budget, and the backend that decides."""

from collections.abc import Set
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from models_integration.session.crystal_decode import Life
from models_integration.session.session import Session
from reference.policies import crystalcache, full_cache, streaming_llm
from spec.backend import BUILT_IN, Backend, resolve
from spec.budget import Budget, parse_budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.parameters.crystalcache import BreathProtection
from spec.policy import Policy
from spec.validate import check_sentence_ends

__all__ = ["CrystalCache", "FullCache", "Method", "StreamingLLM"]

_FASTEST_FIRST = ("triton", "numba", "numpy")


@dataclass(frozen=True)
class Method:
    """Any policy with its budget; calling it on a model gives the context manager."""

    policy: Policy
    budget: Budget
    backend: str = "numpy"
    """The name of the backend that the policy's parts use."""
    life: Life | None = None
    """How CrystalCache's states go on after a prompt; other policies have none, and decide anew at each segment."""

    def __call__(self, model: PreTrainedModel) -> Session:
        """`with method(model) as run: ...`."""
        return Session(self, model)


class CrystalCache(Method):
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
        life = Life(ends, parameters, chosen, share, decode, stream)
        super().__init__(crystalcache(ends, parameters, chosen), share, chosen.name, life)


class StreamingLLM(Method):
    """StreamingLLM: the first N_sink tokens and the most recent ones.

    Args:
        budget: as CrystalCache's.
        N_sink: attention sinks, tokens.

    Raises:
        SpecError: for a budget or N_sink that the specification does not admit.
    """

    def __init__(self, budget: float | int | str | Budget = 0.5, N_sink: int = 4) -> None:
        super().__init__(streaming_llm(N_sink), parse_budget(budget))


class FullCache(Method):
    """Nothing is evicted: the upper bound of every comparison."""

    def __init__(self) -> None:
        super().__init__(full_cache(), parse_budget(1.0))


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
