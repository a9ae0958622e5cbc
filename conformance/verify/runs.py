"""Run the tests of a request with pytest, in a separate process."""

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
from conformance.methods.method import check_separate_code, method_of
from conformance.paths import ROOT
from conformance.plugin import known_vectors
from conformance.suite.conftest import INTERPRETERS
from conformance.verify.page import stopped
from conformance.verify.request import ENGINES, Request
from conformance.verify.subject import OF_KIND, Subject
from reference.policies.grammar import is_composition
from spec.errors import SpecError
from spec.plugins import current_folder_last, search_path
from spec.printing import printable_lines

SUITE = ROOT / "conformance" / "suite"
SCALE = SUITE / "test_scale_*.py"
SUITES = {kind: SUITE.with_name(f"{kind}_suite") for kind in ("policy", "cache", "server")}
BETWEEN_LINES = 10.0
"""Minimum number of seconds between two lines of progress."""
LOOK_SECONDS = 0.2  # Seconds between two checks that pytest still runs.
CHUNK = 2**20
LOG = b"Log of kvspec verify.\n"
"""First line of a log. A later run replaces a log only if it has this line (`spec.files`)."""

# Only these plugins are loaded: other plugins could reorder tests, change random numbers or write files. The cache
# provider of pytest is off, because it stores files.
PLUGINS = ["_hypothesis_pytestplugin", "conformance.plugin", "conformance.verify.recording", "no:cacheprovider"]
WHOLE = ["-o", "verbosity_assertions=2"]
"""Option of pytest for complete assertion messages.

Without the option, pytest removes the middle of a long message. kvspec shortens messages when they are shown.
"""


def suite_of(request: Request) -> Path:
    """Return the folder of the tests for the subject of a request."""
    return SUITES.get("policy" if request.method else request.kind, SUITE)


def _command(request: Request) -> list[str]:
    """Return the pytest command of a request. For a quick run, tests with full-size inputs are left out."""
    options = {
        "--backend": request.backend, "--kvspec-command": request.command, "--kvspec-policy": request.policy,
        "--kvspec-cache": request.cache, "--kvspec-server": request.server, "--kvspec-model": request.model,
        "--kvspec-timeout": request.timeout, "--kvspec-positions": request.positions,
        "--kvspec-precision": request.precision, "--kvspec-profile": request.profile,
        "--kvspec-exceptions": request.exceptions, "--hypothesis-seed": request.seed,
    }
    return [
        sys.executable, "-P", "-m", "pytest", *(word for name in PLUGINS for word in ("-p", name)),
        "-c", os.devnull, *(word for at in ("--rootdir", "--confcutdir") for word in (at, str(suite_of(request)))),
        *(f"{option}={value}" for option, value in options.items() if value is not None),
        *(f"--kvspec-as={method}" for method in request.method),
        *([f"--ignore-glob={SCALE}"] if request.quick else []),
    ]


def _environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # The child must find the same modules: the folder of a script may differ from the current folder.
    with current_folder_last():
        return {**mine, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": search_path()}


@contextmanager
def _started(
    command: list[str], output: IO[bytes] | None = None, inherited: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and end the process at the end of the block.

    The process receives SIGTERM, so that pytest can end its engine. After 10 seconds the process is killed.
    """
    process = subprocess.Popen(
        command, stdout=output, stderr=output and subprocess.STDOUT, env=_environment(), pass_fds=inherited,
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
    """Run the tests that were selected after `--`, show the output of pytest, and return the exit code of pytest."""
    suite = suite_of(request)
    tests = [suite / word if word.startswith("test_") and ".py" in word else word for word in request.pytest]
    everything = [] if any(isinstance(word, Path) for word in tests) else [suite]
    command = [*_command(request), *map(str, [*everything, *tests])]
    with _started(command) as process:
        return process.wait()


def judged(request: Request, log: Path) -> list[dict[str, Any]]:
    """Run the suite with pytest, and return the lines that the recorder of `recording.py` wrote.

    The lines come through a socket that only pytest inherits, because pytest starts the engine of a command. The engine
    could rename a file, and could open the end of a pipe in /proc. A socket has no name.

    A test that ends the process is a failed test, not an error of the run. If a signal stops the run, the items decided
    so far are printed on stderr.

    Raises:
        pytest.UsageError: if pytest stopped before all tests ran, or if the lines contradict the exit code.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, log.open("wb") as output:
        option = f"--kvspec-outcomes={theirs.fileno()}"
        output.write(LOG)
        output.flush()
        command = [*_command(request), option, "-rA", "--tb=short", *WHOLE, str(suite_of(request))]
        with _started([*command, *["-x"] * request.fail_fast], output, [theirs.fileno()]) as process:
            theirs.close()
            lines = list[dict[str, Any]]()
            try:
                for line in _received(ours, process):
                    lines.append(line)
            except (KeyboardInterrupt, SystemExit):
                print(printable_lines("\n".join(stopped(lines))), file=sys.stderr, flush=True)
                raise
    over = {line.get("began") for line in lines} <= {line.get("test") for line in lines}
    if not lines or (over and process.returncode not in (0, 1)):
        raise pytest.UsageError(_complaint(log))
    if over and (reason := contradiction(lines, process.returncode)):
        raise pytest.UsageError(f"{reason}; there is no verdict; the log: {log}")
    return [*lines, {"ended": process.returncode}]


def _received(connection: socket.socket, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines that a process sends until the process ends.

    If the process ended while it wrote a line, this line is left out.

    Raises:
        pytest.UsageError: if pytest cannot have written a line.
    """
    progress, rest, ended = Progress(), b"", False
    while not ended:
        ended = process.poll() is not None  # Poll first. A later select then reads all lines that were sent.
        while select.select([connection], [], [], 0 if ended else LOOK_SECONDS)[0]:
            if not (chunk := connection.recv(CHUNK)):
                process.wait()
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield progress.count(_parsed(line))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        result = json.loads(line)
    except ValueError as error:
        raise pytest.UsageError(f"a line of outcomes is no JSON: {line[:80]!r}; there is no verdict") from error
    if not isinstance(result, dict):
        raise pytest.UsageError(f"a line of outcomes is no object: {line[:80]!r}; there is no verdict")
    return result


def contradiction(lines: Sequence[Mapping[str, Any]], code: int) -> str:
    """Return the reason why the lines contradict pytest's exit code 0 or 1, or ""."""
    collected = [line["collected"] for line in lines if "collected" in line]
    if len(collected) != 1:
        return f"pytest collected its tests {len(collected)} times"
    tests = [line["test"] for line in lines if "test" in line]
    if unknown := sorted({*tests, *(line["began"] for line in lines if "began" in line)} - collected[0].keys()):
        return f"a result is of the test {unknown[0]}, which pytest did not collect"
    failed = sorted({line["test"] for line in lines if line.get("state") == "failed"})
    if code == 1 and not failed:
        return "pytest ended with 1 (a test failed), but no result is a failure"
    if code == 0 and failed:
        return f"pytest ended with 0 (no test failed), but {failed[0]} failed"
    if code == 0 and (missing := sorted(collected[0].keys() - set(tests))):
        return f"pytest ended with 0, but {len(missing)} tests have no result, {missing[0]} the first"
    return ""


def _complaint(log: Path) -> str:
    """Return the line of the log with the reason why pytest stopped."""
    text = log.read_bytes().removeprefix(LOG).decode(errors="replace")
    written = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in written if "Error" in line or line.startswith("ERROR")]
    return f"{(wrong or written or ['pytest stopped'])[-1].removeprefix('ERROR: ')}; the log: {log}"


class Progress:
    """Progress of a run on stderr: one line after the collection, then a line every few seconds."""

    def __init__(self) -> None:
        self.last, self.tests, self.done, self.failed = time.monotonic(), 0, 0, 0

    def count(self, line: dict[str, Any]) -> dict[str, Any]:
        """Count a line of outcomes, print the progress if it is due, and return the line."""
        self.tests = len(line["collected"]) if "collected" in line else self.tests
        self.done += "test" in line
        self.failed += line.get("state") == "failed"
        if "collected" in line or time.monotonic() - self.last >= BETWEEN_LINES:
            self.last = time.monotonic()
            print(f"  {self.done} of {self.tests} tests, {self.failed} failed", file=sys.stderr, flush=True)
        return line


def prepared(request: Request) -> Subject:
    """Check a request and return its subject.

    Raises:
        SpecError: if a folder, the exceptions file, the subject or a method is invalid.
        BackendUnavailable: if the subject cannot be loaded.
        pytest.UsageError: if an entry of the exceptions file is invalid.
    """
    if request.exceptions is not None:
        check_exceptions(request.exceptions)
    for method in map(method_of, request.method):
        if request.backend is not None:
            check_separate_code(request.backend, method.home)
        if request.kind == "command" and is_composition(method.name):
            raise SpecError("as", str(method), "is not a method that an engine offers; use --policy or --backend")
    further = {"policy": request.method, "server": (request.model,)}.get(request.kind, ())
    with current_folder_last():
        subject = OF_KIND[request.kind](request.named, *further)
    if request.kind in ENGINES and not request.method and not request.quick and not request.pytest:
        check_compiled()
    check_out(request.out)  # Last check: an invalid request creates no folder.
    return subject


def check_out(folder: Path) -> None:
    """Create the folder of results.

    Raises:
        SpecError: if the folder cannot be created or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be created as a folder ({error.strerror}); choose a different path"
        raise SpecError("out", str(folder), reason) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError("out", str(folder), "is not writable; choose a different folder")


def check_exceptions(file: Path) -> None:
    """Check that every entry names an existing item, vector or test.

    The parameters of a test are checked later, when the tests are collected.

    Raises:
        pytest.UsageError: if an entry is invalid.
        SpecError: if the test of an entry is not in the suite.
    """
    for entry in exceptions.read(file, known_items(), known_vectors()):
        if entry.grain != "test":
            continue
        name, _, test = entry.subject.partition("[")[0].partition("::")
        path = SUITE / name
        if not path.is_file() or not re.search(rf"^def {re.escape(test)}\(", path.read_text("utf-8"), re.MULTILINE):
            raise SpecError("exceptions", entry.subject, f"must be the name of a test of the suite (in {file})")


def check_compiled() -> None:
    """Check that kernels are compiled, as in normal use.

    Raises:
        SpecError: if an environment variable makes the kernels interpreted. Full-size inputs would take hours.
    """
    for name in INTERPRETERS:
        if os.environ.get(name, "0") not in ("", "0"):
            raise SpecError(name, os.environ[name], "skips full-size inputs, which a certificate needs; add --quick")
