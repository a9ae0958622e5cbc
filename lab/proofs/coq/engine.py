"""Engine of spec/protocol.md for the extracted model: `python -m lab.proofs.coq.engine [PROGRAM]`.

An engine offers all stages of a family or none. Therefore this engine calls the reference for each stage that the
extracted model lacks, and for the formulas of the essay. The depth of recursion equals the length of the prompt, so the
process takes the maximum stack size.
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

from conformance.engine.methods import FAMILY
from conformance.engine.ops import OPS
from conformance.engine.serve import answer
from conformance.engine.values import as_it_is, decode
from lab.proofs.coq.build import ENGINE
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
"""Stages of the model, and the parameter values that it supports."""
METHODS = ("streamingllm",)
"""Published methods of the model. Positions are the scores, and PO-TOP-UNITS chooses."""
ITEMS = frozenset({
    "CC-BUDGET-FORMS", "CC-BUDGET", "CC-PROTECTED", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT",
    "CC-DISSOLVE-D", "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-SCORE",
    "PO-TOP-UNITS", "PO-BEST-BLOCKS", "PO-WHOLE-SHARES", "PO-PYRAMID-BUDGET", "DV-COSINE",
})
"""Items that are not stages, so the protocol does not offer them. `three_way` uses them as in spec/vectors."""


def modelled(request: Any) -> bool:
    """Return True if the model answers a request.

    The reference answers malformed requests, and requests that must raise an error.
    """
    with suppress(SpecError, ValueError, LookupError, TypeError):
        op, arguments = request["op"], request["arguments"]
        if op == "diversity.diverse":
            row = OPS[op].arguments
            check_diversity(*(decode(kind, arguments[name], as_it_is) for name, kind in row.items()))
        forms = MODELLED.get(op, {})
        return (op in MODELLED or op in ITEMS) and all(arguments["parameters"][name] == forms[name] for name in forms)
    return False


def streamingllm(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of the stage that keeps the tokens of StreamingLLM.

    Sinks are pinned, and later positions have higher scores.
    """
    g, n, B, N_sink = (request["arguments"][name] for name in ("g", "n", "B", "N_sink"))
    rows = {"values": [float(at).hex() for at in range(n)], "pinned": [at < N_sink for at in range(n)], "shares": B}
    return {**request, "op": "policies.best_tokens", "arguments": {name: [row] * g for name, row in rows.items()}}


def offered() -> Backend:
    """Return the reference, with only the families that have a stage in the model or are tested through one."""
    reference = resolve("numpy")
    return replace(reference, name="coq", nestedkv=None)


class Model:
    """Process of the extracted program. It starts with the first request, and again after it has ended."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._running: subprocess.Popen[str] | None = None

    def answer(self, line: str, number: Any) -> str:
        """Return the answer to a line, or an error of the protocol if the process ends instead."""
        if self._running is None:
            self._running = subprocess.Popen([self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        with suppress(OSError):
            self._running.stdin.write(line)
            self._running.stdin.flush()
        output = self._running.stdout.readline().rstrip("\n")
        return output or json.dumps({"id": number, "error": f"the extracted model ended with exit code {self.stop()}"})

    def stop(self) -> int:
        """Stop the process, and return its exit code."""
        if self._running is None:
            return 0
        running, self._running = self._running, None
        with suppress(OSError):  # a pending write to an ended process fails
            running.communicate()
        return running.returncode


def main(arguments: list[str]) -> int:
    """Answer the requests from standard input until it ends."""
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
