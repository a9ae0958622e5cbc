"""An engine as a process: started, asked line by line, and started again when it has failed."""

import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

from conformance.engine.methods import FAMILY, method_ops
from conformance.engine.ops import OPS, KeptSets, Op, stages
from conformance.engine.values import Json, checked, decode, encode, parsed, printable, sizes, told
from spec import SPEC_VERSION
from spec.backend import Backend
from spec.errors import SpecError

PROTOCOL = 1
PRECISIONS = ("float64", "float32")
HELLO_SECONDS = 10.0
SHOWN = 2000  # characters of a request, or of standard error, in a message
LONGEST = 2**28  # bytes of an answer
CHUNK = 2**20  # bytes read or written at once
ALIVE_SECONDS = 0.2  # between two looks at whether a silent process still runs
MOST_TIMEOUTS = 3
"""Of one operation; then it fails without being asked, or a stage that hangs would cost one for each example."""
HIDDEN = ("PYTEST", "KVSPEC", "HYPOTHESIS")
"""Beginnings of the names of variables that an engine does not get: it is to answer as it does when it is used."""

T = TypeVar("T")


class EngineFailure(Exception):
    """An engine that gave no result: why, the request or the name of the file that holds it, and standard error."""

    def __init__(self, reason: str, request: str = "", complaint: str = "") -> None:
        self.reason = reason
        self.complaint = complaint
        super().__init__(f"{reason}\nrequest: {request}\nstandard error: {complaint or 'empty'}")


class EngineTimeout(EngineFailure):
    """It did not answer in time."""


class EngineCrash(EngineFailure):
    """It ended before it had answered."""


class EngineGarbage(EngineFailure):
    """It answered something else than spec/protocol.md has."""


class EngineError(EngineFailure):
    """It said that it failed."""


@dataclass(frozen=True)
class Hello:
    """What an engine says of itself."""

    spec: str
    name: str
    version: str
    precision: str
    families: Mapping[str, list[str]]


def hello_of(answer: Json) -> Hello:
    """An engine's answer to hello.

    Raises:
        ValueError: where it is of another form, speaks another protocol, or offers a family in part.
    """
    said = answer.get("protocol") if isinstance(answer, dict) else None
    if type(said) is not int or said != PROTOCOL:
        raise ValueError(f"must be an object with protocol = {PROTOCOL}")
    texts = {name: answer.get(name, "") for name in ("spec", "name", "version", "precision")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text or (name == "precision" and text not in PRECISIONS):
            raise ValueError(f"says {name} = {text!r:.{SHOWN}}")
    families = answer.get("families")
    if not isinstance(families, dict) or not families:
        raise ValueError(f"reports families = {families!r:.80}: must offer at least one stage family")
    for family, offered in families.items():
        if family == FAMILY:
            check_methods(offered)
            continue
        whole = stages(family)
        if not whole or not isinstance(offered, list) or sorted(map(str, offered)) != sorted(whole):
            all_ = ", ".join(whole) or "unknown"
            raise ValueError(f"offers {family:.80} with {offered!r:.{SHOWN}}: a family is whole ({all_})")
    return Hello(**{name: printable(text) for name, text in texts.items()}, families=families)


def check_methods(offered: Json) -> None:
    """A list of methods that have an operation.

    Raises:
        ValueError: where it is none.
    """
    known = [op.partition(".")[2] for op in method_ops()]
    if not isinstance(offered, list) or not offered or not all(name in known for name in offered):
        raise ValueError(f"offers {FAMILY} with {offered!r:.{SHOWN}}: must be some of {', '.join(known)}")


class Process:
    """One run of a command, on POSIX."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        if not words:
            raise ValueError("there is no word in it")
        self._read, self._complaint, self._complains = bytearray(), b"", True
        # A group of its own: what a shell starts ends with it. It inherits no other file than its three streams.
        self._popen = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True, close_fds=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)},
        )
        pipes = self._popen.stdin, self._popen.stdout, self._popen.stderr
        self._in, self._out, self._err = (pipe.fileno() for pipe in pipes if pipe is not None)
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)

    def exchange(self, line: str, seconds: float) -> bytes:
        """The line that comes back for a line.

        Nothing waits for the end of a pipe: a child of the engine may hold it open for ever.

        Raises:
            EngineTimeout, EngineCrash, EngineGarbage: when none does, or one without an end.
        """
        deadline, unsent = time.monotonic() + seconds, memoryview(line.encode() + b"\n")
        while b"\n" not in self._read[-CHUNK:]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineTimeout(f"no answer within {seconds:g} s")
            ended = self._popen.poll() is not None  # before the look, which then finds all that it has written
            readable, writable, _ = select.select(
                [self._out, *[self._err] * self._complains], [self._in] if unsent else [], [], min(left, ALIVE_SECONDS),
            )
            if writable:
                unsent = self._send(unsent)
            if self._err in readable:
                self._read_complaint()
            if not (self._receive() if self._out in readable else self._err in readable or not ended):
                raise EngineCrash(f"ended{self._how()} before it had answered")
        answer, _, self._read = self._read.partition(b"\n")
        return bytes(answer)

    def _send(self, unsent: memoryview) -> memoryview:
        """What is left of it; nothing where nobody reads any more."""
        try:
            return unsent[os.write(self._in, unsent[:CHUNK]) :]
        except BlockingIOError:
            return unsent
        except OSError:
            return unsent[:0]

    def _receive(self) -> bool:
        """Whether the output goes on."""
        chunk = os.read(self._out, CHUNK)
        self._read += chunk
        if len(self._read) > LONGEST:
            raise EngineGarbage(f"the answer is longer than {LONGEST} bytes")
        return bool(chunk)

    def _how(self) -> str:
        try:
            code = self._popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return " its output"
        return f" with exit code {code}" if code >= 0 else f" by signal {-code} ({signal.strsignal(-code)})"

    def _read_complaint(self) -> None:
        """Read once from standard error, of which the end is kept."""
        with suppress(BlockingIOError):
            chunk = os.read(self._err, CHUNK)
            self._complaint = (self._complaint + chunk)[-4 * SHOWN :]  # a letter has 4 bytes at most
            self._complains = bool(chunk)

    def complaint(self) -> str:
        """The end of what it has written to standard error."""
        if self._complains:
            self._read_complaint()  # a pipe holds less than CHUNK
        return self._complaint.decode(errors="replace")[-SHOWN:].strip()

    def stop(self) -> None:
        """End it; what its children hold open is closed on this side."""
        with suppress(OSError):
            if self._popen.poll() is None:  # else its number may be another's by now
                os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()


class Engine:
    """The engine of a command: it runs while it answers as it should, and is started again when it is asked next.

    Attributes:
        requests: makes the folder for requests that are too long for a message. Default: none is kept.

    Raises:
        SpecError: when it cannot be started, or does not say within seconds what spec/protocol.md asks it to.
    """

    def __init__(self, command: str, seconds: float) -> None:
        self._command, self._seconds = command, seconds
        self._process: Process | None = None
        self.requests: Callable[[], Path] | None = None
        self._asked = 0
        self._hung: dict[str, list[str]] = {}
        self._hello = json.dumps({"id": 0, "op": "hello", "protocol": PROTOCOL, "spec": SPEC_VERSION})
        try:
            self.hello = self._start()
        except (ValueError, EngineFailure) as error:
            reason, said = getattr(error, "reason", str(error)), getattr(error, "complaint", "").splitlines()
            bound = "must start an engine of spec/protocol.md: " + "; it says: ".join([reason, *said[-1:]])
            raise SpecError("--command", command, bound) from error

    def _start(self) -> Hello:
        try:
            self._process = Process(self._command)
        except (OSError, ValueError) as error:
            raise EngineCrash(f"cannot be started: {error}", self._command) from error
        self._asked = 0
        try:
            return self._exchange("hello", self._hello, HELLO_SECONDS, hello_of)
        except (EngineError, SpecError):  # it says so, and runs
            self.stop()
            raise

    def ask(self, op: str, arguments: Json, read: Callable[[Json], T]) -> T:
        """The result of an operation as `read` makes it, which raises ValueError for what is none.

        Raises:
            SpecError: where the engine refuses.
            EngineFailure: where it fails.
        """
        __tracebackhide__ = True  # pytest shows where the suite asked, and the message
        self._check_answers("hello", HELLO_SECONDS)
        self._check_answers(op, self._seconds)
        if self._process is None:
            self._start()
        self._asked += 1
        line = json.dumps({"id": self._asked, "op": op, "arguments": arguments})
        return self._exchange(op, line, self._seconds, read)

    def _check_answers(self, op: str, seconds: float) -> None:
        __tracebackhide__ = True
        if len(hung := self._hung.get(op, [])) >= MOST_TIMEOUTS:
            reason = f"no answer within {seconds:g} s to {len(hung)} requests of {op}, which is not asked again"
            _fail(EngineTimeout, reason, hung[0], "")

    def _exchange(self, op: str, line: str, seconds: float, read: Callable[[Json], T]) -> T:
        __tracebackhide__ = True
        assert self._process is not None
        try:
            return outcome(self._process.exchange(line, seconds), self._asked, read)
        except EngineFailure as failure:
            kind, reason = type(failure), failure.reason  # its traceback would keep the answer
        complaint, request = self._process.complaint(), self._kept(op, line)
        if kind is not EngineError:
            self.stop()
        if kind is EngineTimeout:
            self._hung.setdefault(op, []).append(request)
        return _fail(kind, reason, request, complaint)

    def _kept(self, op: str, line: str) -> str:
        """The request, or the file that holds it behind hello.

        A test has one file for each operation, or shrinking an example of 32 MB would fill a disk.
        """
        if len(line) <= SHOWN:
            return line
        if self.requests is None:
            return f"{line[:SHOWN]} ... ({len(line)} characters)"
        file = self.requests() / f"{op}.jsonl"
        file.write_text(f"{self._hello}\n{line}\n", encoding="utf-8")
        return f"{file} (pipe it into the engine)"

    def stop(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            self._process.stop()
            self._process = None


def _fail(kind: type[EngineFailure], reason: str, request: str, complaint: str) -> NoReturn:
    """Raise all failures of a kind from one line: Hypothesis then takes them for one, whichever example it tries."""
    __tracebackhide__ = True
    raise kind(reason, request, complaint)


def outcome(answer: bytes, number: int, read: Callable[[Json], T]) -> T:
    """What an answer to the request of this number says.

    Raises:
        SpecError: where it is a refusal.
        EngineFailure: where it says that the engine failed, or is no answer.
    """
    try:
        said = parsed(answer)
        if not isinstance(said, dict) or type(said.get("id")) is not int or said["id"] != number:
            raise ValueError(f"must be an object with id = {number}")
        if said.keys() == {"id", "result"}:
            return read(said["result"])
        if said.keys() == {"id", "error"}:
            raise EngineError(f"the engine failed: {str(said['error'])[:SHOWN]}")
        refusal = {"argument": str, "value": object, "bound": str}
        given = said.get("refusal")
        if said.keys() != {"id", "refusal"} or not isinstance(given, dict) or given.keys() != refusal.keys():
            raise ValueError("must have one of result, error, and refusal with argument, value and bound")
        if not all(isinstance(given[name], kind) for name, kind in refusal.items()):
            raise ValueError("must name the argument and the bound as text")
    except (ValueError, TypeError, OverflowError) as error:
        shown = answer[:SHOWN].decode(errors="replace").strip()
        raise EngineGarbage(f"the answer {error}: {shown}") from error
    raise SpecError(given["argument"], told(given["value"]), given["bound"])


def _ask_stage(engine: Engine, op: str, *given: Any) -> Any:
    __tracebackhide__ = True
    # What a caller may leave out, lse and sinks, is last.
    return _ask(engine, op, OPS[op], dict(zip_longest(OPS[op].arguments, given)))


def _ask(engine: Engine, op: str, row: Op, arguments: Mapping[str, Any]) -> Any:
    __tracebackhide__ = True
    written = {name: encode(name, kind, arguments[name]) for name, kind in row.arguments.items()}
    read: Callable[[Any], Any] = partial(decode, row.result, check=checked(sizes(row, arguments)))
    return engine.ask(op, written, read)


def ask_method(engine: Engine, name: str, arguments: Mapping[str, Any]) -> KeptSets:
    """What an engine keeps as a method.

    Raises:
        SpecError: where the engine does not offer it, or refuses.
        EngineFailure: where it fails.
    """
    if name not in engine.hello.families.get(FAMILY, []):
        offered = ", ".join(engine.hello.families.get(FAMILY, [])) or "none"
        raise SpecError("as", name, f"is not offered by the engine {engine.hello.name}; the engine offers {offered}")
    kept: KeptSets = _ask(engine, f"{FAMILY}.{name}", method_ops()[f"{FAMILY}.{name}"], arguments)
    return kept


def backend_of(engine: Engine) -> Backend:
    """The families that the engine offers; its stages raise what `Engine.ask` raises."""
    families: dict[str, Any] = {
        family: SimpleNamespace(**{name: partial(_ask_stage, engine, f"{family}.{name}") for name in offered})
        for family, offered in engine.hello.families.items() if family != FAMILY
    }
    return Backend(f"{engine.hello.name} {engine.hello.version}", **families)
