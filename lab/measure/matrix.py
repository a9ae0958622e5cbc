"""Measure which implementation conforms to which published method: `python -m lab.measure.matrix [NAME ...]`.

The command runs the named implementations, or all of this environment, and writes docs/results/matrix.json and
matrix.md. Cells of other implementations stay. These names have a different meaning:

- `page` writes only the page.
- `check`, which CI runs, fails if a policy, a backend or an example engine is not tested.
- `METHOD=NAME` measures one method of one implementation.

kvpress has a separate environment.
"""

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from conformance.engine.methods import FAMILY
from conformance.engine.process import Engine
from conformance.methods.method import METHODS as COMPARED
from conformance.methods.method import has_own_code, method_of
from conformance.paths import DOCS
from conformance.verify.__main__ import run
from conformance.verify.outcomes import Outcome
from conformance.verify.request import parsed
from conformance.verify.runs import prepared
from lab.measure.certificates.__main__ import PROGRAMS, compile_engine
from lab.proofs.coq import build as coq
from lab.proofs.coq import engine as coq_engine
from reference.policies.names import POLICIES
from spec import SPEC_VERSION
from spec.backend import BUILT_IN
from spec.errors import SpecError

STORE, PAGE = (DOCS / "results" / name for name in ("matrix.json", "matrix.md"))
CONFORMS, DIFFERS, ABSENT, NOT_RUN = "conforms", "differs", "not offered", "not run"
Cell = dict[str, Any]


@dataclass(frozen=True)
class Implementation:
    """Implementation to test: options of `kvspec verify`, the package with a version, and a function to compile it."""

    options: tuple[str, ...]
    package: str = ""
    compile: Callable[[], object] = lambda: None


def compile_coq() -> None:
    """Extract and compile the Coq model, without its proofs."""
    coq.fresh(coq.BUILD)
    coq.compile_all(coq.BUILD, coq.MODEL)
    coq.compile_engine(coq.BUILD)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "numpy": Implementation(("--backend", "numpy"), "numpy"),
    "numba": Implementation(("--backend", "numba"), "numba"),
    "torch": Implementation(("--backend", "torch"), "torch"),
    **{
        name: Implementation(("--command", str(program)), compile=partial(compile_engine, language, program))
        for name, (language, program) in PROGRAMS.items()
    },
    "engine-javascript": Implementation(("--command", "node docs/examples/javascript/engine.mjs")),
    "engine-coq": Implementation(
        ("--command", shlex.join([sys.executable, "-m", "lab.proofs.coq.engine"])),
        compile=compile_coq,
    ),
    "kvpress": Implementation((), "kvpress"),
}
NOT_HERE: Mapping[str, str] = {
    "llama.cpp": "PyPI has no wheel of llama-cpp-python. [The example](../engines.md#llamacpp) has no method: it"
                 " stores one kept set of a kvspec policy for all layers.",
    "official TriAttention": "PyPI has no package of [triattention](https://github.com/WeianMao/triattention).",
    "official R-KV": "PyPI has no package of [R-KV](https://github.com/Zefan-Cai/R-KV).",
}
"""Implementations that no environment of the project can run, with the reason."""
UNMEASURED: Mapping[str, str] = {
    "triton": "needs a GPU; its scores are those of torch",
    "fullcache": "evicts nothing",
    "crystalcache": "is judged by the items of its stages",
}
"""Backends and policies that the matrix leaves out, with the reason."""
METHODS = {name: brute for name, brute in COMPARED.items() if name not in UNMEASURED}
PRESS_OF = {
    "streamingllm": "StreamingLLM", "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "chunkkv": "ChunkKV", "tova": "TOVA",
    "keydiff": "KeyDiff", "knorm": "Knorm", "adakv": "AdaKV", "expected-attention": "ExpectedAttention",
    "criticalkv": "CriticalKV", "critical-adakv": "CriticalAdaKV", "lagkv": "LagKV", "h2o": "ObservedAttention",
    "kvzip": "KVzip", "kvzip-uniform": "KVzip by layer", "kvzip-plus": "KVzip+",
}


OFFERED: Mapping[str, Collection[str]] = {"kvpress": PRESS_OF, "engine-coq": coq_engine.METHODS}
"""Methods of implementations that not every environment runs."""


def offered(name: str) -> list[str]:
    """Return the methods for which a backend has separate code, or those that an engine offers in its hello."""
    if name in OFFERED:
        return list(OFFERED[name])
    kind, of = IMPLEMENTATIONS[name].options
    if kind != "--backend":
        return engine_methods(of)
    return [method for method in METHODS if has_own_code(of, method)]


def measured(name: str, methods: list[str]) -> dict[str, Cell]:
    """Return the cells of some methods from `kvspec verify --as ... --quick`, always on the same examples."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*IMPLEMENTATIONS[name].options, "--as", ",".join(methods), "--quick", "--seed", "0", "--out", folder]
        request = parsed(words)
        _, verdicts = run(request, prepared(request), "log.txt")
    outcomes = {method: [one for one in verdicts.outcomes if one.test.endswith(f"[{method}]")] for method in methods}
    return {method: cell_of(method, worst(outcomes[method])) for method in methods}


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome that decides the cell of a method: a failure, else a test that did not run, else any."""
    states = ("failed", NOT_RUN)
    return min(outcomes, key=lambda one: states.index(one.state) if one.state in states else len(states))


def cell_of(method: str, outcome: Outcome) -> Cell:
    """Return the cell for the outcome of a test."""
    if outcome.state == "passed":
        return {"verdict": CONFORMS, "as": str(method_of(method))}
    if outcome.state == NOT_RUN:
        return {"verdict": NOT_RUN}
    lines = outcome.found.strip().splitlines() or [outcome.state]
    return {"verdict": DIFFERS, "as": str(method_of(method)), "smallest": lines[0]}


def of_kvpress() -> dict[str, Cell]:
    """Return the cells of the presses on the inputs of docs/peers.md, with the readings that make kept sets equal."""
    from lab.measure.peers.__main__ import INPUTS, compared, runs

    result = {}
    for method, press in PRESS_OF.items():
        report = compared(press, INPUTS)
        cell: Cell = {"verdict": DIFFERS if report.unexplained else CONFORMS, "as": press, "inputs": INPUTS}
        cell["readings"] = sorted(report.counts)
        cell["equal without readings"] = report.equal
        if report.smallest:
            _, e = min(report.smallest.items(), key=lambda item: (item[1].size, item[0]))
            cell["smallest"] = f"{e.inputs.n} tokens, r = {e.inputs.ratio}: {runs(e.theirs)} instead of {runs(e.ours)}"
        result[method] = cell
    return result


def engine_methods(command: str) -> list[str]:
    """Return the methods that the hello of an engine offers."""
    engine = Engine(command, 60.0)
    try:
        return [name for name in engine.hello.families.get(FAMILY, []) if name in METHODS]
    finally:
        engine.stop()


def runs_here(name: str) -> bool:
    """Return True if this environment can run the implementation.

    kvpress needs an older transformers, so it has a separate environment. The Coq model needs Coq.
    """
    if name == "engine-coq" and coq.missing():
        return False
    return (name == "kvpress") == (find_spec("kvpress") is not None)


def renewed(name: str) -> Cell:
    """Return an implementation with a cell for each policy."""
    one = IMPLEMENTATIONS[name]
    one.compile()
    if name == "kvpress":
        there = of_kvpress()
    else:
        methods = offered(name)
        there = measured(name, methods) if methods else {}
    cells = {method: there.get(method, {"verdict": ABSENT}) for method in METHODS}
    return {"version": version(one.package) if one.package else "", "spec": SPEC_VERSION, "cells": cells}


def unjudged(store: Mapping[str, Any]) -> list[str]:
    """Return a line for each policy, backend or engine that is not tested, and for each missing cell."""
    cells = {name: store.get(name, {}).get("cells", {}) for name in IMPLEMENTATIONS}
    result = [
        f"policy {name}: conformance.methods has no method of this name" for name in POLICIES
        if name not in METHODS and name not in UNMEASURED
    ]
    result += [
        f"method {method}: no implementation was compared with the method; measure with {method}=numpy"
        for method in METHODS if not any(own.get(method, {}).get("verdict") in (CONFORMS, DIFFERS)
                                         for own in cells.values())
    ]
    result += [
        f"{name}: has no cell of {method}; measure with {method}={name}" for name, own in cells.items()
        for method in METHODS if method not in own
    ]
    commands = " ".join(word for one in IMPLEMENTATIONS.values() for word in one.options)
    languages = {language for language, _ in PROGRAMS.values()}
    result += [f"backend {name}: is not in IMPLEMENTATIONS" for name in BUILT_IN
              if name not in IMPLEMENTATIONS and name not in UNMEASURED]
    result += [
        f"engine docs/examples/{file.parent.name}: is not in IMPLEMENTATIONS"
        for file in sorted((DOCS / "examples").glob("*/engine.*"))
        if file.parent.name not in languages and f"docs/examples/{file.parent.name}/{file.name}" not in commands
    ]
    return result


def measure_one(method: str, name: str, store: dict[str, Any]) -> None:
    """Measure one method of one implementation. Its other cells stay.

    Raises:
        SpecError: if there is no such method or implementation.
    """
    if method not in METHODS or name not in store:
        raise SpecError("METHOD=NAME", f"{method}={name}", f"must name a method and one of {', '.join(store)}")
    if runs_here(name):
        IMPLEMENTATIONS[name].compile()
    does = method in offered(name)
    if does and (name == "kvpress" or not runs_here(name)):
        raise SpecError("METHOD=NAME", f"{method}={name}", f"cannot be measured alone: measure {name}")
    cell = measured(name, [method])[method] if does else {"verdict": ABSENT}
    cells = {**store[name]["cells"], method: cell}
    store[name]["cells"] = {known: cells[known] for known in METHODS if known in cells}


def page(store: Mapping[str, Any]) -> str:
    """Return the text of matrix.md for the contents of matrix.json."""
    names = [name for name in IMPLEMENTATIONS if name in store]
    run_cells = sum(cell["verdict"] in (CONFORMS, DIFFERS) for name in names for cell in store[name]["cells"].values())
    twice = ", ".join(name for name in names if store[name]["runs"] == 2)
    heads = [" ".join(filter(None, (name, store[name]["version"]))) for name in names]
    return "\n".join([
        "# Implementations and published methods", "",
        "This page shows which implementation keeps the tokens that a published method keeps."
        " `python -m lab.measure.matrix [NAME ...]` runs implementations again and writes the page and"
        f" [matrix.json](matrix.json). {run_cells} cells were run.", "",
        "| Cell | Meaning |", "|---|---|",
        "| conforms | The kept tokens are those of the equation, with the constants of the first column. |",
        "| conforms with readings | The kept tokens are equal under documented [readings](#kvpress). |",
        "| differs | The [smallest input](#differences) has different kept tokens. |",
        "| – | The implementation does not offer the method. |",
        "| not run | The run was stopped before this method. |", "",
        "The columns numpy to engine-coq are from `kvspec verify --as METHOD --quick --seed 0`. A backend offers"
        " a method if it has its own score or stage of the method. Backend triton uses the scores of torch."
        f" These columns were made twice, with the same cells: {twice}.", "",
        f"| Method | {' | '.join(heads)} |", f"|---{'|---' * len(names)}|",
        *(f"| `{method_of(method)}` | {' | '.join(shown(store[name]['cells'][method]) for name in names)} |"
          for method in METHODS if all(method in store[name]["cells"] for name in names)), "",
        "## Differences", "", *differing(store), "", *kvpress_table(store), "",
        "## Not run here", "", "| Implementation | Reason |", "|---|---|",
        *(f"| {name} | {reason} |" for name, reason in NOT_HERE.items()), "",
        "[Certificates](certificates/README.md) judge engines, caches and presses by stages, eviction or promises.", "",
    ])


def shown(cell: Mapping[str, Any]) -> str:
    """Return the text of a cell."""
    if cell["verdict"] == ABSENT:
        return "–"
    return f"{cell['verdict']} with readings" if cell.get("readings") else str(cell["verdict"])


def differing(store: Mapping[str, Any]) -> list[str]:
    """Return a line for each cell that differs."""
    result = [
        f"- {name}, {method}: {cell['smallest']}" for name in store for method, cell in store[name]["cells"].items()
        if cell["verdict"] == DIFFERS
    ]
    return result or ["No cell differs."]


def kvpress_table(store: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table with the readings of each press, and with an input that needs a reading."""
    cells = {method: cell for method, cell in store["kvpress"]["cells"].items() if cell["verdict"] != ABSENT}
    yield "## kvpress"
    yield ""
    yield ("A press gets the random inputs of [the comparison](../peers.md), and is compared with the reference. The"
           " readings are those that make the kept tokens equal on all inputs. The last column has the smallest input"
           " that needs a reading, with the ratio r of evicted tokens.")
    yield ""
    yield "| Method | Press | Equal without readings | Readings | kvpress keeps |"
    yield "|---|---|---|---|---|"
    for method, cell in cells.items():
        equal = f"{cell['equal without readings']} of {cell['inputs']}"
        yield f"| {method} | {cell['as']} | {equal} | {', '.join(cell['readings'])} | {cell.get('smallest', '')} |"


def main(names: list[str]) -> int:
    """Run the named implementations, or all that run here, and write both files."""
    pairs = [name.split("=") for name in names if name.count("=") == 1]
    if unknown := sorted(name for name in {*names} - {*IMPLEMENTATIONS, "page", "check"} if name.count("=") != 1):
        print(f"no implementation {', '.join(unknown)}: there are {', '.join(IMPLEMENTATIONS)}", file=sys.stderr)
        return 2
    store = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    if "check" in names:
        print("\n".join(complaints := unjudged(store)), file=sys.stderr)
        return int(bool(complaints))
    for method, name in pairs:
        measure_one(method, name, store)
        STORE.write_text(json.dumps(store, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in filter(runs_here, [one for one in names or IMPLEMENTATIONS if one in IMPLEMENTATIONS]):
        print(name, flush=True)
        before = {key: value for key, value in store.get(name, {}).items() if key != "runs"}
        created = renewed(name)
        store[name] = {"runs": 1 + (json.dumps(created) == json.dumps(before)), **created}
        ordered = {one: store[one] for one in IMPLEMENTATIONS if one in store}
        STORE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(store), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
