"""Base class of policies with a budget."""

from abc import ABC, abstractmethod
from typing import NoReturn

from transformers import PreTrainedModel

from models_integration.session.method import Method
from models_integration.session.session import Session
from spec.errors import SpecError

__all__ = ["RetentionPolicy"]


class RetentionPolicy(ABC):
    """Policy with a budget. `policy(model)` returns a context manager.

        with policy(model) as run:
            output = model.generate(**inputs, max_new_tokens=200)
    """

    @abstractmethod
    def on(self, model: PreTrainedModel) -> Method:
        """Prepare the policy for a model, and return the `method` argument of `decide`.

        Raises:
            SpecError: if the model does not support the policy.
        """

    def __call__(self, model: PreTrainedModel) -> Session:
        """Return the context manager of `with policy(model) as run`.

        Args:
            model: a causal model of transformers.

        Raises:
            SpecError: if kvspec does not support the model, or the model does not support the policy or its positions.
        """
        return Session(self.on(model), model)

    def __enter__(self, *_: object) -> NoReturn:
        """Raise an error, because the model is missing.

        Raises:
            SpecError: always. The message has the call to type.
        """
        raise SpecError("policy", type(self).__name__, "needs a model: type `with policy(model) as run:`")

    __exit__ = __enter__
    """Python looks up both methods before the block."""
