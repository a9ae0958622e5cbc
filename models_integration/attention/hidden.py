"""Hidden states that attention modules receive: the input of the query, key and value projections.

These are the states after the layer's input norm, as in kvpress, whose hook reads the argument of the same module. A
model without an input norm, such as OLMo 2, passes the states of the residual stream.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["hidden_of", "reading_hidden"]

# Hidden states of the attention module that runs now, if they are read.
_STATES: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


@contextmanager
def reading_hidden(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager that stores the hidden states of an attention module while the module runs."""
    # The attention function receives no hidden states (transformers 5.24), so hooks of the module read them. In all
    # models, the states of all rows and tokens are the argument `hidden_states` or the first argument.
    each, hooks = tuple(modules), list[RemovableHandle]()
    try:
        for module in each:
            hooks += [
                module.register_forward_pre_hook(_note, with_kwargs=True),
                module.register_forward_hook(_forget, always_call=True),
            ]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in each:
            _STATES.pop(module, None)


def _note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(args), None)
    if isinstance(given, Tensor):
        _STATES[module] = given.detach()


def _forget(module: nn.Module, args: object, output: object) -> None:
    _STATES.pop(module, None)


def hidden_of(module: nn.Module) -> Tensor | None:
    """Return the hidden states (rows, n, width) that a running module received, or None if they are not stored."""
    return _STATES.get(module)
