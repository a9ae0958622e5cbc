"""StreamingLLM: attention sinks and a recent window."""

from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import recency
from reference.policies.selectors import top_units
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["streaming_llm"]


@named(
    "streamingllm", "Xiao et al., StreamingLLM (arXiv 2309.17453)",
    "the first tokens, the attention sinks, and the most recent ones",
)
def streaming_llm(N_sink: int = 4) -> Policy:
    """The first N_sink tokens and the last B - N_sink.

    The set is the published one. Positions stay absolute: the official code renumbers keys inside the cache, which is
    another model input and is not offered. Well-known implementations differ in what N_sink and the window add up to.

    Implements: PO-STREAMINGLLM

    Raises:
        SpecError: when N_sink is negative.
    """
    if N_sink < 0:
        raise SpecError("N_sink", N_sink, "must not be negative")
    return Policy("streamingllm", recency, even, top_units, SinkAndRecent(N_sink, 0), floor=N_sink)
