"""StreamingLLM: a policy that keeps attention sinks and a recent window."""

from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import recency
from reference.policies.selectors import top_units
from spec.policy import Policy
from spec.validate import check_whole

__all__ = ["streaming_llm"]


@named(
    "streamingllm", "Xiao et al., StreamingLLM (arXiv 2309.17453)",
    "the first tokens (attention sinks) and the most recent tokens", positions="renumbered",
)
def streaming_llm(N_sink: int = 4) -> Policy:
    """Return StreamingLLM, a policy that keeps the first N_sink tokens and the last B - N_sink tokens.

    The policy keeps the same tokens as the paper's policy. The paper also renumbers the positions of the kept tokens,
    as the rule "renumbered" of spec/positions.md. Well-known implementations differ in the number of tokens that each
    implementation keeps.

    Implements: PO-STREAMINGLLM

    Raises:
        SpecError: if N_sink is negative.
    """
    return Policy("streamingllm", recency, even, top_units, SinkAndRecent(check_whole("N_sink", N_sink), 0))
