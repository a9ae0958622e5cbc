"""One mutant before its tests: a fork of a process that has imported all but the project.

The mutant takes the place of its module when the suite imports it; no file changes. The tests see the cases of a
profile, the same ones each time, without shrinking. What spends too much processor time is stopped.
"""

import importlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from conformance.assurance.mutation.items import Selection, test_modules
from conformance.assurance.mutation.mutants import SUBJECTS

__all__ = ["IMPORT", "Survey", "Verdict", "in_a_fork", "preload", "survey", "trial"]

PROJECT = ("spec", "reference", "accelerated", "conformance", "models_integration")
MEMORY = 16 << 30  # bytes of address space
PAUSE, IDLE = 2.0, 60.0  # seconds between looks at a fork, and without any processor time before it counts as hung
AFTER_AN_ERROR = 20  # tests that may still find an assertion to fail
IMPORT = "import of "


@dataclass
class Verdict:
    """What the tests said, the first assertion that failed before any other error."""

    outcome: str = "survived"
    test: str = ""
    raised: str = ""
    ran: int = 0
    seconds: float = 0.0  # of the processor
    trouble: str = ""  # why this is no verdict at all


@dataclass
class Survey:
    """What the unmutated suite imports, and which modules hold tests of which items."""

    third_party: list[str] = field(default_factory=list)
    files: dict[str, set[str]] = field(default_factory=dict)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__.partition(".")[0] == "reference":
            _check_arrays(module)


def _check_arrays(module: ModuleType) -> None:
    """Hold its functions to their annotations, as `nox -s conformance` does in all of the reference."""
    from beartype import beartype
    from jaxtyping import jaxtyped

    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                setattr(owner, name, jaxtyped(value, typechecker=beartype))


@dataclass(frozen=True)
class _Finder:
    """Gives one module's mutated code; whoever reads its file finds the original."""

    name: str
    path: str
    code: CodeType

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        package = Path(self.path).name == "__init__.py"
        return spec_from_loader(name, _Loader(name, self.path, self.code), is_package=package)


class _Jury:
    """Keeps the tests of the selection; stops at the first assertion that fails."""

    def __init__(
        self, selection: Selection, verdict: Verdict, without: Set[str], only: str | None, seconds: float,
    ) -> None:
        self.selection, self.verdict, self.without, self.only = selection, verdict, without, only
        self.seconds = seconds
        self.errors = 0

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutation", settings.default, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None,
            report_multiple_bugs=False,
        )
        settings.load_profile("mutation")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = self.selection
        items[:] = [
            item for item in items
            if item.nodeid not in self.without and self.only in (None, item.nodeid)
            and chosen.takes(_marked(item), _file(item))
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        def too_long(*_: object) -> None:
            # At once: what loops may do so in a thread that nothing else stops.
            _answer(Verdict("timeout", item.nodeid, "", self.verdict.ran, self.seconds))

        signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        done = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return done

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self._note("error", f"{IMPORT}{report.nodeid}", last.removeprefix("E").strip())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "call":
            self.verdict.ran += 1
        if call.excinfo is None or call.excinfo.errisinstance(pytest.skip.Exception):
            return
        # Where nothing was raised, pytest.raises fails with pytest.fail.Exception: an assertion too.
        asserted = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
        self._note("assertion" if asserted else "error", item.nodeid, call.excinfo.exconly().splitlines()[0])
        self.errors += 1
        if asserted or self.errors > AFTER_AN_ERROR:
            item.session.shouldstop = "killed"

    def _note(self, outcome: str, test: str, raised: str) -> None:
        if self.verdict.outcome == "survived" or outcome == "assertion":
            self.verdict.outcome, self.verdict.test, self.verdict.raised = outcome, test, raised[:120]


def _marked(item: pytest.Item) -> set[str]:
    return {name for mark in item.iter_markers("spec") for name in mark.args}


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath).as_posix()


def survey(root: Path) -> Survey:
    """Collect the whole suite here: for a fork, whose imports are lost with it."""
    found, before = Survey(), set(sys.modules)

    class Collector:
        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            for item in items:
                for name in _marked(item):
                    found.files.setdefault(name, set()).add(_file(item))

    files = [path.relative_to(root).as_posix() for path in test_modules(root)]
    _pytest(root, "numpy", "dev", files, [Collector()], "--collect-only")
    for folder, backend in SUBJECTS.items():
        if backend != "numpy" and (root / folder).is_dir():
            importlib.import_module(f"{folder.replace('/', '.')}.backend")
    found.third_party = [
        name for name in sys.modules if name not in before and name.partition(".")[0] not in PROJECT
    ]
    return found


def preload(names: Sequence[str]) -> None:
    """Import what the suite imports from elsewhere, once for all forks; not Triton, which complains at the end."""
    for name in names:
        if name.partition(".")[0] == "triton":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except Exception:  # a name that only stands in sys.modules; the forks import it where they need it
                continue


def _pytest(
    root: Path, backend: str, profile: str, files: Sequence[str], plugins: Sequence[object], *options: str,
) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        code = pytest.main(
            ["-o", "addopts=", "-p", "conformance.plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
             "-p", "no:benchmark", "--rootdir", os.fspath(root), "--strict-markers",
             # Hypothesis is imported before pytest is configured.
             "-W", "ignore::pytest.PytestAssertRewriteWarning", "--kvspec-profile", profile, "--backend", backend,
             *options, *(os.fspath(root / name) for name in sorted(files))],
            plugins=[*plugins],
        )
    return int(code), said.getvalue()


def trial(
    root: Path, selection: Selection, files: Sequence[str], profile: str, mutated: tuple[str, str, CodeType] | None,
    without: Set[str], seconds: float, only: str | None = None,
) -> Verdict:
    """Run the selection, or one test of it, in this process with the mutated (module, path, code) in it, or none.

    A test may spend so many seconds of the processor; more ends the process with the verdict "timeout".
    """
    verdict = Verdict()
    if mutated:
        sys.meta_path.insert(0, _Finder(*mutated))
    code, said = _pytest(root, selection.backend, profile, files, [_Jury(selection, verdict, without, only, seconds)])
    used = resource.getrusage(resource.RUSAGE_SELF)
    verdict.seconds = used.ru_utime + used.ru_stime
    broken = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
    if code in broken and verdict.outcome == "survived":
        last = (said.strip().splitlines() or [""])[-1][:120]
        if mutated:
            verdict.outcome, verdict.test, verdict.raised = "error", "start of the suite", last
        else:
            verdict.trouble = f"pytest ended with {code}: {last}"
    return verdict


def in_a_fork(work: Callable[[], Any], seconds: float) -> Any:
    """The result of `work` in a process of its own; TimeoutError past so many seconds of the processor."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, theirs, seconds))
    process.start()
    theirs.close()
    try:
        return _received(ours, process.pid or 0)
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise TimeoutError from None
        return Verdict("error", "", f"process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _received(ours: Connection, pid: int) -> Any:
    """What the fork sends. On a busy machine it may take long over few seconds; one that does nothing never ends."""
    used, idle = -1.0, 0
    while not ours.poll(PAUSE):
        now = _processor_seconds(pid)
        used, idle = now, idle + 1 if now == used else 0
        if idle > IDLE / PAUSE:
            raise TimeoutError
    return ours.recv()


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return perf_counter()  # no such file system: only the limit on processor time holds
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_pipe: list[Connection] = []  # of a fork: where its answer goes


def _send(work: Callable[[], Any], to: Connection, seconds: float) -> None:
    _pipe.append(to)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 3))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _answer(work())


def _answer(found: Any) -> None:
    _pipe[0].send(found)
    _pipe[0].close()
    os._exit(0)
