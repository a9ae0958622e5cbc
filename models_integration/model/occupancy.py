"""Which models are inside a policy's context."""

from weakref import WeakSet

from torch import nn
from transformers import PreTrainedModel

from spec.errors import SpecError

__all__ = ["BUSY", "check_free"]

# Decoders inside a context: a second context on one of them would fight over its cache.
BUSY: WeakSet[nn.Module] = WeakSet()


def check_free(model: PreTrainedModel) -> None:
    """No context is open on the model.

    Raises:
        SpecError: otherwise: what it reads would be that policy's.
    """
    if model.get_decoder() in BUSY:  # type: ignore[no-untyped-call]
        raise SpecError("model", type(model).__name__, "is inside a context already: contexts do not nest")
