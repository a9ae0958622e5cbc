"""What is run, in which order, and pytest in a process of its own that nothing here disturbs."""

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from conformance import exceptions
from conformance.items import known_items
from conformance.methods.method import check_own_code, method_of
from conformance.paths import ROOT
from conformance.plugin import known_vectors
from conformance.suite.conftest import INTERPRETERS
from conformance.verify.request import ENGINES, Request
from conformance.verify.subject import OF_KIND, Subject
from spec.errors import SpecError

SUITE = ROOT / "conformance" / "suite"
SCALE = SUITE / "test_scale_*.py"
SUITES = {kind: SUITE.with_name(f"{kind}_suite") for kind in ("policy", "cache", "server")}
BETWEEN_LINES = 10.0
"""Seconds from one line of progress to the next."""
LOOK_SECONDS = 0.2  # between two looks at whether pytest still runs
CHUNK = 2**20

# Other plugins of the environment reorder tests, draw other numbers or write files; of pytest's, none is to store.
PLUGINS = ["_hypothesis_pytestplugin", "conformance.plugin", "conformance.verify.outcomes", "no:cacheprovider"]
WHOLE = ["-o", "verbosity_assertions=2"]
"""Assertions are told whole, and cut where they are shown: pytest would cut out their middle."""


def suite_of(request: Request) -> Path:
    """The folder of the tests that judge such a subject."""
    return SUITES.get("policy" if request.method else request.kind, SUITE)


def _command(request: Request) -> list[str]:
    """pytest with the options of a request, without the scale lane if it is to be quick."""
    options = {
        "--backend": request.backend, "--kvspec-command": request.command, "--kvspec-policy": request.policy,
        "--kvspec-cache": request.cache, "--kvspec-server": request.server, "--kvspec-model": request.model,
        "--kvspec-timeout": request.timeout, "--kvspec-positions": request.positions,
        "--kvspec-precision": request.precision, "--kvspec-profile": request.profile,
        "--kvspec-exceptions": request.exceptions, "--hypothesis-seed": request.seed,
    }
    return [
        sys.executable, "-m", "pytest", *(word for name in PLUGINS for word in ("-p", name)),
        "-c", os.devnull, *(word for at in ("--rootdir", "--confcutdir") for word in (at, str(suite_of(request)))),
        *(f"{option}={value}" for option, value in options.items() if value is not None),
        *(f"--kvspec-as={method}" for method in request.method),
        *([f"--ignore-glob={SCALE}"] if request.quick else []),
    ]


def _environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # A module that was found here is found there: a script's folder need not be the current one.
    return {**mine, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def _started(
    command: list[str], said: IO[bytes] | None = None, inherited: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, however that ends, and by a signal on which it ends its engine."""
    process = subprocess.Popen(
        command, stdout=said, stderr=said and subprocess.STDOUT, env=_environment(), pass_fds=inherited,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def selected(request: Request) -> int:
    """Run what was chosen behind `--`, in sight; pytest's exit code."""
    suite = suite_of(request)
    tests = [suite / word if word.startswith("test_") and ".py" in word else word for word in request.pytest]
    everything = [] if any(isinstance(word, Path) for word in tests) else [suite]
    command = [*_command(request), *map(str, [*everything, *tests])]
    with _started(command) as process:
        return process.wait()


def judged(request: Request, log: Path) -> list[dict[str, Any]]:
    """Run the suite, all of it or without the scale lane; the lines of conformance.verify.outcomes.

    The lines come through a socket that only pytest inherits. An engine of a command is started by pytest: a file could
    be renamed by the engine, and the end of a pipe could be opened by the engine in /proc. A socket has no name.

    Raises:
        pytest.UsageError: if pytest stopped before its work was done, or if its lines contradict its exit code. That a
            test ends the process is a verdict.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, log.open("wb") as said:
        option = f"--kvspec-outcomes={theirs.fileno()}"
        command = [*_command(request), option, "-rA", "--tb=short", *WHOLE, str(suite_of(request))]
        with _started([*command, *["-x"] * request.fail_fast], said, [theirs.fileno()]) as process:
            theirs.close()
            lines = list(_received(ours, process))
    over = {line.get("began") for line in lines} <= {line.get("test") for line in lines}
    if not lines or (over and process.returncode not in (0, 1)):
        raise pytest.UsageError(_complaint(log))
    if over and (reason := contradiction(lines, process.returncode)):
        raise pytest.UsageError(f"{reason}; there is no verdict; the log: {log}")
    return [*lines, {"ended": process.returncode}]


def _received(connection: socket.socket, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that a process sends until it ends, without the last one if the process died while it wrote.

    Raises:
        pytest.UsageError: for a line that pytest did not write.
    """
    progress, rest, ended = Progress(), b"", False
    while not ended:
        ended = process.poll() is not None  # before the look, which then finds all that was sent
        while select.select([connection], [], [], 0 if ended else LOOK_SECONDS)[0]:
            if not (chunk := connection.recv(CHUNK)):
                process.wait()
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield progress.count(_parsed(line))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise pytest.UsageError(f"a line of outcomes is no JSON: {line[:80]!r}; there is no verdict") from error
    if not isinstance(found, dict):
        raise pytest.UsageError(f"a line of outcomes is no object: {line[:80]!r}; there is no verdict")
    return found


def contradiction(lines: Sequence[Mapping[str, Any]], code: int) -> str:
    """Why the lines of a run of pytest cannot be true beside its exit code, 0 or 1; nothing if they can."""
    collected = [line["collected"] for line in lines if "collected" in line]
    if len(collected) != 1:
        return f"pytest collected its tests {len(collected)} times"
    said = [line["test"] for line in lines if "test" in line]
    if unknown := sorted({*said, *(line["began"] for line in lines if "began" in line)} - collected[0].keys()):
        return f"a result is of the test {unknown[0]}, which pytest did not collect"
    failed = sorted({line["test"] for line in lines if line.get("state") == "failed"})
    if code == 1 and not failed:
        return "pytest ended with 1 (a test failed), but no result is a failure"
    if code == 0 and failed:
        return f"pytest ended with 0 (no test failed), but {failed[0]} failed"
    if code == 0 and (missing := sorted(collected[0].keys() - set(said))):
        return f"pytest ended with 0, but {len(missing)} tests have no result, {missing[0]} the first"
    return ""


def _complaint(log: Path) -> str:
    """Why pytest stopped, in its own words."""
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    wrong = [line for line in said if "Error" in line or line.startswith("ERROR")]
    return f"{(wrong or said or ['pytest stopped'])[-1].removeprefix('ERROR: ')}; the log: {log}"


class Progress:
    """A line on stderr when the tests are collected, and now and then."""

    def __init__(self) -> None:
        self.last, self.tests, self.done, self.failed = time.monotonic(), 0, 0, 0

    def count(self, line: dict[str, Any]) -> dict[str, Any]:
        """Count a line of outcomes, and report if it is time to; the line."""
        self.tests = len(line["collected"]) if "collected" in line else self.tests
        self.done += "test" in line
        self.failed += line.get("state") == "failed"
        if "collected" in line or time.monotonic() - self.last >= BETWEEN_LINES:
            self.last = time.monotonic()
            print(f"  {self.done} of {self.tests} tests, {self.failed} failed", file=sys.stderr, flush=True)
        return line


def prepared(request: Request) -> Subject:
    """The subject of a request that can be run.

    Raises:
        SpecError: for a folder, an exceptions file or a subject that is wrong; for a method not offered.
        BackendUnavailable: for one that cannot be loaded.
        pytest.UsageError: for an entry of the exceptions file.
    """
    if request.exceptions is not None:
        check_exceptions(request.exceptions)
    for method in map(method_of, request.method):
        if request.backend is not None:
            check_own_code(request.backend, method.name)
    subject = OF_KIND[request.kind](request.named, *request.method[: request.kind == "policy"])
    if request.kind in ENGINES and not request.method and not request.quick and not request.pytest:
        check_compiled()
    check_out(request.out)  # last: what is refused leaves no folder
    return subject


def check_out(folder: Path) -> None:
    """Make the folder of results.

    Raises:
        SpecError: where it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created as a folder ({error.strerror}); choose a different path"
        raise SpecError("out", str(folder), reason) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError("out", str(folder), "is not writable; choose a different folder")


def check_exceptions(file: Path) -> None:
    """Every entry names what there is; a case of a test is known when the tests are collected.

    Raises:
        pytest.UsageError: for an entry that is wrong.
        SpecError: for one whose test is not in the suite.
    """
    for entry in exceptions.read(file, known_items(), known_vectors()):
        if entry.grain != "test":
            continue
        name, _, test = entry.subject.partition("[")[0].partition("::")
        path = SUITE / name
        if not path.is_file() or not re.search(rf"^def {re.escape(test)}\(", path.read_text("utf-8"), re.MULTILINE):
            raise SpecError("exceptions", entry.subject, f"must be the name of a test of the suite (in {file})")


def check_compiled() -> None:
    """Kernels run as they are used.

    Raises:
        SpecError: where a variable has them interpreted: full sizes would take hours.
    """
    for name in INTERPRETERS:
        if os.environ.get(name, "0") not in ("", "0"):
            raise SpecError(name, os.environ[name], "skips full-size inputs, which a certificate needs; add --quick")
