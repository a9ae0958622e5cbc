"""Check of a request's policy in vLLM's front end, which answers HTTP 400 with the message of the error."""

import os
from functools import lru_cache
from typing import Any

from models_integration.engines.vllm.arguments import KEY, Settings, parse_request
from models_integration.engines.vllm.plugin import VARIABLE
from models_integration.engines.vllm.seams import AdapterLogitsProcessor
from spec.errors import BackendUnavailable

__all__ = ["PolicyParameters"]


_read = lru_cache(maxsize=1)(Settings.read)


class PolicyParameters(AdapterLogitsProcessor):
    """Logits processor that changes no logits. vLLM calls `validate_params` before a request reaches the engine."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check the policy of a request.

        Raises:
            ValueError: if the policy, the budget or a constant is invalid, or not allowed by the server.
        """
        try:
            parse_request((sampling_params.extra_args or {}).get(KEY), _read(os.environ.get(VARIABLE, "{}")))
        except (ValueError, BackendUnavailable) as error:
            raise ValueError(f"kvspec: {error}") from error

    def is_argmax_invariant(self) -> bool:
        """Return True, so that greedy requests skip the processor."""
        return True

    def new_req_logits_processor(self, params: Any) -> None:
        """Return None: no request has a function for its logits."""
