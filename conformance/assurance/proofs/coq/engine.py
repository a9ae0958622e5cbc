"""The extracted model as an engine of spec/protocol.md: `python -m conformance.assurance.proofs.coq.engine [PROGRAM]`.

A family is offered whole or not at all, so the reference answers for the stages that the model lacks, and for the
essay's forms of those that it has. Recursion is as deep as a prompt is long: the process gets all the stack it may.
"""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from typing import Any

from conformance.assurance.proofs.coq.build import ENGINE
from conformance.engine.ops import OPS
from conformance.engine.serve import answer
from conformance.engine.wire import as_it_is, decode
from spec.backend import Backend, resolve
from spec.errors import SpecError
from spec.validate import check_diversity

__all__ = ["MODELLED", "main"]

MODELLED = {
    "crystal.trunks": {"merge": "fixed", "trunk_impact": "mean"},
    "crystal.dissolve": {"allocation": "cut", "coverage": (0.0).hex()},
    "crystal.score": {},
    "policies.best_tokens": {},
    "diversity.diverse": {},
    "PO-BEST-BLOCKS": {},
}
"""The stages that the model has, and the parameters that it was written for; and an item that is no stage, which the
protocol does not offer: `three_way` asks for it."""


def modelled(request: Any) -> bool:
    """Whether the model answers a request; what must be refused is left to the reference."""
    forms, arguments = MODELLED.get(request["op"]), request["arguments"]
    if request["op"] == "diversity.diverse":
        return _admitted(arguments)
    return forms is not None and all(arguments["parameters"][name] == form for name, form in forms.items())


def _admitted(arguments: Any) -> bool:
    row = OPS["diversity.diverse"].arguments
    try:
        check_diversity(*(decode(kind, arguments[name], as_it_is) for name, kind in row.items()))
    except SpecError:
        return False
    return True


def offered() -> Backend:
    """The reference, as far as its families have a stage of the model or are judged through one."""
    reference = resolve("numpy")
    return replace(reference, name="coq", nestedkv=None)


def main(arguments: list[str]) -> int:
    """Answer the requests of standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_STACK, (resource.getrlimit(resource.RLIMIT_STACK)[1],) * 2)
    program = arguments[0] if arguments else str(ENGINE)
    backend = offered()
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as model:
        assert model.stdin is not None
        assert model.stdout is not None
        for line in sys.stdin:
            request = json.loads(line)
            if request["op"] != "hello" and modelled(request):
                model.stdin.write(line)
                model.stdin.flush()
                print(model.stdout.readline(), end="", flush=True)
            else:
                print(answer(backend, "float64", line), flush=True)
        model.stdin.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
