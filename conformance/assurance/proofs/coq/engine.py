"""The extracted model as an engine of spec/protocol.md: `python -m conformance.assurance.proofs.coq.engine [PROGRAM]`.

A family is offered whole or not at all, so the reference answers for the stages that the model lacks, and for the
essay's forms of those that it has. Recursion is as deep as a prompt is long: the process gets all the stack it may.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.assurance.proofs.coq.build import ENGINE
from conformance.engine.methods import FAMILY
from conformance.engine.ops import OPS
from conformance.engine.serve import answer
from conformance.engine.values import as_it_is, decode
from spec.backend import Backend, resolve
from spec.errors import SpecError
from spec.validate import check_diversity

MODELLED = {
    "crystal.trunks": {"merge": "fixed", "trunk_impact": "mean"},
    "crystal.dissolve": {"allocation": "cut", "coverage": (0.0).hex()},
    "crystal.score": {},
    "policies.best_tokens": {},
    "diversity.diverse": {},
}
"""The stages that the model has, and the parameters that it was written for."""
METHODS = ("streamingllm",)
"""The published methods of the model: positions are scores, and PO-TOP-UNITS chooses."""
ITEMS = frozenset({
    "CC-BUDGET-FORMS", "CC-BUDGET", "CC-PROTECTED", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT",
    "CC-DISSOLVE-D", "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-SCORE",
    "PO-TOP-UNITS", "PO-BEST-BLOCKS", "PO-WHOLE-SHARES", "PO-PYRAMID-BUDGET", "DV-COSINE",
})
"""Items that are no stage, which the protocol does not offer: `three_way` asks for them, as spec/vectors does."""


def modelled(request: Any) -> bool:
    """Whether the model answers a request; what must be refused, and what is no request, is left to the reference."""
    with suppress(SpecError, ValueError, LookupError, TypeError):
        op, arguments = request["op"], request["arguments"]
        if op == "diversity.diverse":
            row = OPS[op].arguments
            check_diversity(*(decode(kind, arguments[name], as_it_is) for name, kind in row.items()))
        forms = MODELLED.get(op, {})
        return (op in MODELLED or op in ITEMS) and all(arguments["parameters"][name] == forms[name] for name in forms)
    return False


def streamingllm(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request of the stage that keeps what StreamingLLM keeps: sinks are pinned, later positions score higher."""
    g, n, B, N_sink = (request["arguments"][name] for name in ("g", "n", "B", "N_sink"))
    rows = {"values": [float(at).hex() for at in range(n)], "pinned": [at < N_sink for at in range(n)], "shares": B}
    return {**request, "op": "policies.best_tokens", "arguments": {name: [row] * g for name, row in rows.items()}}


def offered() -> Backend:
    """The reference, as far as its families have a stage of the model or are judged through one."""
    reference = resolve("numpy")
    return replace(reference, name="coq", nestedkv=None)


class Model:
    """The extracted program as a process, which is started when it is asked first, and again after it has ended."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._running: subprocess.Popen[str] | None = None

    def answer(self, line: str, number: Any) -> str:
        """Its answer to a line; an error by the protocol where it ends instead."""
        if self._running is None:
            self._running = subprocess.Popen([self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        with suppress(OSError):
            self._running.stdin.write(line)
            self._running.stdin.flush()
        said = self._running.stdout.readline().rstrip("\n")
        return said or json.dumps({"id": number, "error": f"the extracted model ended with exit code {self.stop()}"})

    def stop(self) -> int:
        """End it: the exit code."""
        if self._running is None:
            return 0
        running, self._running = self._running, None
        with suppress(OSError):  # what was not yet written cannot be
            running.communicate()
        return running.returncode


def main(arguments: list[str]) -> int:
    """Answer the requests of standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_STACK, (resource.getrlimit(resource.RLIMIT_STACK)[1],) * 2)
    program = Path(arguments[0]) if arguments else ENGINE
    if not program.is_file():
        print(f"{program} is not there: run `nox -s coq`, which compiles it", file=sys.stderr)
        return 2
    model, backend = Model(str(program)), offered()
    for line in sys.stdin:
        request: Any = None
        with suppress(ValueError, RecursionError):
            request = json.loads(line)
        with suppress(LookupError, TypeError):
            if request["op"] in [f"{FAMILY}.{name}" for name in METHODS]:
                request = streamingllm(request)
                line = json.dumps(request) + "\n"
        if isinstance(request, dict) and "id" in request and modelled(request):
            print(model.answer(line, request["id"]), flush=True)
        else:
            print(answer(backend, "float64", line, METHODS), flush=True)
    model.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
