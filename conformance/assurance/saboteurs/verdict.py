"""One saboteur before the tests of its item, in a process of its own."""

import gc
import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.assurance import trace
from conformance.assurance.saboteurs.plugin import judges_any_backend
from conformance.assurance.saboteurs.registry import BY_SIZE
from conformance.paths import ROOT

__all__ = ["Verdict", "items_by_module", "judge", "modules_of", "warm"]

CONFORMANCE = ROOT / "conformance"
# Their markers are made from the pages, so no literal names them.
OWN = CONFORMANCE / "own"
EXAMPLES = (
    OWN / "spec" / "test_examples.py", OWN / "spec" / "test_nestedkv_examples.py",
    OWN / "models_integration" / "archive" / "test_examples.py",
)
# What tests import, by far the slowest part of a trial where each has to load it.
SLOW_TO_LOAD = ("hypothesis", "numba", "torch", "transformers.models.llama.modeling_llama")


@dataclass
class Verdict:
    """What became of a saboteur (or, without one, of the reference)."""

    name: str
    outcome: str = "survived"
    test: str = ""
    any_backend: bool = False
    ran: int = 0
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.outcome == "killed"


class _Jury:
    """Stops at the first assertion that fails; remembers a crash, which proves nothing."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "call":
            self.verdict.ran += 1
        if call.excinfo is None:
            return
        # Where nothing was raised, pytest.raises fails with pytest.fail.Exception: an assertion too.
        asserted = call.when == "call" and call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
        self.verdict.test = item.nodeid.rpartition("/")[2]
        self.verdict.any_backend = judges_any_backend(item)
        if asserted:
            self.verdict.outcome = "killed"
            item.session.shouldfail = "killed"
        else:
            self.verdict.outcome = f"crashed: {call.excinfo.exconly().splitlines()[0][:90]}"


@cache
def items_by_module() -> dict[Path, frozenset[str]]:
    """Which items each module of the suite has literal markers of."""
    modules = sorted(CONFORMANCE.rglob("test_*.py"))
    return {path: frozenset(dict(trace.markers(path.read_text(encoding="utf-8")))) for path in modules}


def warm() -> None:
    """Load here what each trial would load for itself, and let no trial's collector walk over it."""
    for name in SLOW_TO_LOAD:
        if find_spec(name.partition(".")[0]):
            import_module(name)
    items_by_module()
    gc.collect()
    gc.freeze()


def modules_of(item: str, by_size: bool = False) -> list[str]:
    """The modules of the suite that hold a test of the item; Triton's kernels are no part of the reference.

    The scale lane comes first for a saboteur by size, which no small input shows, and last for the others.
    """
    marked = [path for path, items in items_by_module().items() if item in items and "triton" not in path.parts]
    marked.sort(key=lambda path: path.name.startswith("test_scale_") != by_size)
    return [str(path) for path in dict.fromkeys([*marked, *EXAMPLES])]


def judge(name: str, item: str, options: Sequence[str] = ()) -> Verdict:
    """Run the item's tests in this process, with the saboteur in it if it is given a name."""
    verdict = Verdict(name)
    who = ["--saboteur", name] if name else ["--saboteur-item", item]
    # Entry points of other packages take longer to load than most trials last.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        code = pytest.main(
            ["-o", "addopts=", "-p", "conformance.plugin", "-p", "conformance.assurance.saboteurs.plugin", "-p",
             "no:cacheprovider", "--rootdir", os.fspath(CONFORMANCE.parent), "--strict-markers",
             # An assertion that is not explained is cheaper, and kills as well.
             "--assert=plain", "--tb=native",
             "--kvspec-profile", "ci", *who, *options, *modules_of(item, name in BY_SIZE)],
            plugins=[_Jury(verdict)],
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        last = (said.getvalue().strip().splitlines() or [""])[-1]
        verdict.outcome = f"not judged ({int(code)}): {last[:90]}"
    return verdict
