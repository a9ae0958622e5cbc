"""What a scorer is shown: what its needs ask for. What they leave out is missed by its name, where it is read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation

__all__ = ["shown_to"]


@dataclass(frozen=True)
class _Absent:
    """Stands where nothing was asked for."""

    what: str
    remedy: str

    def missed(self, *_: object, **__: object) -> NoReturn:
        """Whatever would read it ends here.

        Raises:
            SpecError: with the need that would show it.
        """
        raise SpecError(self.what, None, f"is read by the scorer, whose needs do not ask for it: Needs({self.remedy})")

    def __getattr__(self, name: str) -> NoReturn:
        self.missed()


# Operators are looked up on the type, so that __getattr__ does not see them.
for _operator in (
    "abs", "add", "array", "bool", "eq", "ge", "getitem", "gt", "iter", "le", "len", "lt", "matmul", "mul", "ne", "neg",
    "pow", "sub", "truediv",
):
    setattr(_Absent, f"__{_operator}__", cast(Callable[..., Any], _Absent.missed))

_VALUES = _Absent("v", "..., values=True")
_QUERIES = _Absent("q", "..., query_rows=n, or None for all")
_LAYERS = _Absent("layers", "'all' or 'observed', ...")
_IDS = _Absent("token_ids", "..., token_ids=True")


def shown_to(needs: Needs, observation: Observation) -> Observation:
    """An observation, less what the needs leave out.

    What they ask for and is not there is left as it is: that its maker showed too little is for the scorer to say.
    """
    layers: Any = _LAYERS
    if needs.layers != "none":
        layers = {layer: _view(needs, view) for layer, view in observation.layers.items()}
    return replace(observation, layers=layers, token_ids=observation.token_ids if needs.token_ids else cast(Any, _IDS))


def _view(needs: Needs, view: LayerView) -> LayerView:
    q, v = _QUERIES if needs.query_rows == 0 else view.q, view.v if needs.values else _VALUES
    return replace(view, q=q, v=v, repeats=None if needs.rehearsal is None else view.repeats)
