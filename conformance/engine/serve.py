"""Any backend as an engine of spec/protocol.md: `python -m conformance.engine.serve module:ATTRIBUTE [float32]`.

The last argument is the precision of S1. Default: float64. The program is an example of an engine, and tests the
protocol. The complete suite through this engine takes minutes:

    pytest conformance/suite --kvspec-profile few --kvspec-command "python -m conformance.engine.serve numpy"
"""

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from conformance.engine.methods import FAMILY, answered, method_ops
from conformance.engine.ops import OPS, stages
from conformance.engine.process import PROTOCOL
from conformance.engine.values import Json, as_it_is, decode, encode
from spec import SPEC_VERSION
from spec.backend import FAMILIES, Backend, resolve
from spec.errors import SpecError


def answer(backend: Backend, precision: str, line: str, methods: Sequence[str] | None = None) -> str:
    """Return the answer to a request, as a line without its end. An invalid line has an error without an id.

    `hello` offers the given methods, or all if `methods` is None.
    """
    number = None
    try:
        request = json.loads(line)
        number = request["id"]
        hello = request["op"] == "hello"
        reply = {"result": _hello(backend, precision, methods) if hello else _result(backend, request)}
    except SpecError as error:
        reply = {"refusal": {"argument": error.argument, "value": _plain(error.value), "bound": error.bound}}
    except Exception:
        reply = {"error": traceback.format_exc()}
    return json.dumps({"id": number, **reply})


def _hello(backend: Backend, precision: str, methods: Sequence[str] | None) -> Json:
    families = {family: stages(family) for family in FAMILIES if getattr(backend, family) is not None}
    if backend.policies is not None:
        families[FAMILY] = list(methods or (op.partition(".")[2] for op in method_ops()))
    return {
        "protocol": PROTOCOL, "spec": SPEC_VERSION, "name": backend.name, "version": SPEC_VERSION,
        "precision": precision, "families": families,
    }


def _result(backend: Backend, request: Json) -> Json:
    family, _, stage = request["op"].partition(".")
    op = (method_ops() if family == FAMILY else OPS)[request["op"]]
    given = {name: decode(kind, request["arguments"][name], as_it_is) for name, kind in op.arguments.items()}
    if family == FAMILY:
        return encode("result", op.result, answered(request["op"], given, backend))
    return encode("result", op.result, getattr(getattr(backend, family), stage)(*given.values()))


def _plain(value: Any) -> Json:
    """Return a refused value as JSON: a number, lists of numbers, or text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value.hex()
    return value if isinstance(value, bool | int) or value is None else str(value)


def main(arguments: list[str]) -> int:
    """Answer the requests of standard input until the end of the input."""
    backend, precision = resolve(arguments[0]), (arguments[1:] or ["float64"])[0]
    for line in sys.stdin:
        print(answer(backend, precision, line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
