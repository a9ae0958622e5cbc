"""Check of a request's policy in vLLM's front end, which answers HTTP 400 with the message of the error."""

from typing import Any

from models_integration.engines.vllm.arguments import KEY
from models_integration.engines.vllm.plugin import check_request
from models_integration.engines.vllm.seams import LogitsProcessor
from spec.errors import BackendUnavailable

__all__ = ["PolicyParameters"]


class PolicyParameters(LogitsProcessor):
    """Logits processor that changes no logits. vLLM calls `validate_params` before a request reaches the engine."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check the policy of a request.

        Raises:
            ValueError: if the policy, the budget or a constant is invalid, or not allowed by the server.
        """
        try:
            check_request((sampling_params.extra_args or {}).get(KEY))
        except (ValueError, BackendUnavailable) as error:
            raise ValueError(f"kvspec: {error}") from error

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        """Return the logits unchanged."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return True, so that greedy requests skip the processor."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Ignore changes of the batch."""
