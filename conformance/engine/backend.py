"""An engine of another language as a `spec.backend.Backend`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from conformance.engine.ops import OPS
from conformance.engine.process import Engine
from conformance.engine.wire import checked, decode, encode, sizes
from spec.backend import Backend

__all__ = ["backend_of"]


class _Family:
    """The stages of a family: each asks the engine what its row of `OPS` says."""

    def __init__(self, engine: Engine, family: str, names: list[str]) -> None:
        for name in names:
            setattr(self, name, partial(_ask, engine, f"{family}.{name}"))


def _ask(engine: Engine, op: str, *given: Any) -> Any:
    __tracebackhide__ = True
    row = OPS[op]
    # The one argument that a caller may leave out, lse, is the last.
    arguments = dict(zip(row.arguments, [*given, None], strict=False))
    written = {name: encode(name, kind, arguments[name]) for name, kind in row.arguments.items()}
    read: Callable[[Any], Any] = partial(decode, row.result, check=checked(sizes(row, arguments)))
    return engine.ask(op, written, read)


def backend_of(engine: Engine) -> Backend:
    """The families that the engine offers; its stages raise what `Engine.ask` raises."""
    families: dict[str, Any] = {name: _Family(engine, name, offered) for name, offered in engine.hello.families.items()}
    return Backend(f"{engine.hello.name} {engine.hello.version}", **families)
