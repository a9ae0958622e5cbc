"""An engine as a process: start the process, exchange lines with it, and restart it after a failure."""

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
from conformance.engine.values import LONGEST_NAME, Json, checked, decode, decode_error_value, encode, parsed, sizes
from spec import SPEC_VERSION
from spec.backend import Backend
from spec.errors import SpecError
from spec.printing import printable

PROTOCOL = 1
PRECISIONS = ("float64", "float32")
HELLO_SECONDS = 60.0  # On a busy machine, an engine in Python takes more than ten seconds to import its packages.
SHOWN = 2000  # Maximum number of characters of a request, or of standard error, in a message.
LONGEST = 2**28  # Maximum number of bytes of an answer.
MOST_TEXT = 2000  # Maximum number of characters of a refusal.
CHUNK = 2**20  # Number of bytes that are read or written at once.
ALIVE_SECONDS = 0.2  # Seconds between two checks that a silent process still runs.
MOST_TIMEOUTS = 3
"""Maximum number of timeouts of one operation.

After that the operation fails without a request. Otherwise a stage that hangs would cost one timeout for each example.
"""
HIDDEN = ("PYTEST", "KVSPEC", "HYPOTHESIS")
"""Prefixes of environment variables that an engine does not receive, so that it answers as in normal use."""

T = TypeVar("T")


class EngineFailure(Exception):
    """Error of an engine that gave no result.

    The message contains the reason, the request or the name of a file with the request, and standard error.
    """

    def __init__(self, reason: str, request: str = "", complaint: str = "") -> None:
        self.reason = reason
        self.complaint = complaint
        super().__init__(f"{reason}\nrequest: {request}\nstandard error: {complaint or 'empty'}")


class EngineTimeout(EngineFailure):
    """The engine did not answer in time."""


class EngineCrash(EngineFailure):
    """The engine ended before it answered."""


class EngineGarbage(EngineFailure):
    """The engine gave an answer that violates spec/protocol.md."""


class EngineError(EngineFailure):
    """The engine reported an error."""


@dataclass(frozen=True)
class Hello:
    """Answer of an engine to `hello`: name, versions, precision and families."""

    spec: str
    name: str
    version: str
    precision: str
    families: Mapping[str, list[str]]


def hello_of(answer: Json) -> Hello:
    """Return an engine's answer to `hello`.

    Raises:
        ValueError: if the answer is malformed, has a different protocol, or offers only a part of a family.
    """
    protocol = answer.get("protocol") if isinstance(answer, dict) else None
    if type(protocol) is not int or protocol != PROTOCOL:
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
    return Hello(**{name: printable(text, LONGEST_NAME) for name, text in texts.items()}, families=families)


def check_methods(offered: Json) -> None:
    """Check a list of methods: each must have an operation.

    Raises:
        ValueError: if the list is empty or contains an unknown method.
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
        # A separate session, so that child processes of a shell end with it. Only the three streams are inherited.
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
        """Send a line and return the line that the engine answers.

        The method never waits for the end of a pipe, because a child of the engine may hold the pipe open for ever.

        Raises:
            EngineTimeout, EngineCrash, EngineGarbage: if the engine gives no answer, or an answer without a
                line end.
        """
        deadline, unsent = time.monotonic() + seconds, memoryview(line.encode() + b"\n")
        while b"\n" not in self._read[-CHUNK:]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineTimeout(f"no answer within {seconds:g} s")
            ended = self._popen.poll() is not None  # Poll first. The later select then finds all output.
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
        """Return the unsent rest of the line. The rest is empty if the engine no longer reads."""
        try:
            return unsent[os.write(self._in, unsent[:CHUNK]) :]
        except BlockingIOError:
            return unsent
        except OSError:
            return unsent[:0]

    def _receive(self) -> bool:
        """Read a chunk of the output. Return False at the end of the output."""
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
        """Read once from standard error, and store only the last bytes."""
        with suppress(BlockingIOError):
            chunk = os.read(self._err, CHUNK)
            self._complaint = (self._complaint + chunk)[-4 * SHOWN :]  # A character has at most 4 bytes.
            self._complains = bool(chunk)

    def complaint(self) -> str:
        """Return the end of the engine's standard error."""
        if self._complains:
            self._read_complaint()  # A pipe buffers less than CHUNK bytes.
        return self._complaint.decode(errors="replace")[-SHOWN:].strip()

    def stop(self) -> None:
        """Kill the process, and close the pipes that its children may hold open."""
        with suppress(OSError):
            if self._popen.poll() is None:  # Otherwise the process id may belong to another process.
                os.killpg(self._popen.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=5)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()


class Engine:
    """Engine of a command. The engine runs until it fails, and is restarted by the next request.

    Attributes:
        requests: function that makes the folder for requests that are too long for a message. Default: no requests are
            stored.

    Raises:
        SpecError: if the engine cannot be started, or does not answer `hello` as in spec/protocol.md in time.
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
            reason, complaint = getattr(error, "reason", str(error)), getattr(error, "complaint", "").splitlines()
            bound = "must start an engine of spec/protocol.md: " + "; it says: ".join([reason, *complaint[-1:]])
            raise SpecError("--command", command, bound) from error

    def _start(self) -> Hello:
        try:
            self._process = Process(self._command)
        except (OSError, ValueError) as error:
            raise EngineCrash(f"cannot be started: {error}", self._command) from error
        self._asked = 0
        try:
            return self._exchange("hello", self._hello, HELLO_SECONDS, hello_of)
        except (EngineError, SpecError):  # The engine reported the error and still runs.
            self.stop()
            raise

    def ask(self, op: str, arguments: Json, read: Callable[[Json], T]) -> T:
        """Return the result of an operation, converted by `read`. `read` raises ValueError for an invalid result.

        Raises:
            SpecError: if the engine answers with a refusal.
            EngineFailure: if the engine fails.
        """
        __tracebackhide__ = True  # pytest shows the line of the test and the message.
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
            kind, reason = type(failure), failure.reason  # A traceback would hold the answer in memory.
        complaint, request = self._process.complaint(), self._kept(op, line)
        if kind is not EngineError:
            self.stop()
        if kind is EngineTimeout:
            self._hung.setdefault(op, []).append(request)
        return _fail(kind, reason, request, complaint)

    def _kept(self, op: str, line: str) -> str:
        """Return the request, or the name of a file with `hello` and the request.

        A test has one file for each operation. Otherwise the shrinking of an example of 32 MB would fill the disk.
        """
        if len(line) <= SHOWN:
            return line
        if self.requests is None:
            return f"{line[:SHOWN]} ... ({len(line)} characters)"
        file = self.requests() / f"{op}.jsonl"
        file.write_text(f"{self._hello}\n{line}\n", encoding="utf-8")
        return f"{file} (pipe it into the engine)"

    def stop(self) -> None:
        """Stop the process if it runs."""
        if self._process is not None:
            self._process.stop()
            self._process = None


def _fail(kind: type[EngineFailure], reason: str, request: str, complaint: str) -> NoReturn:
    """Raise all failures of a kind from one line. Hypothesis then treats them as one failure, for any example."""
    __tracebackhide__ = True
    raise kind(reason, request, complaint)


def outcome(answer: bytes, number: int, read: Callable[[Json], T]) -> T:
    """Return the result in an answer to the request with this number.

    Raises:
        SpecError: if the answer is a refusal.
        EngineFailure: if the answer reports an error or is malformed.
    """
    try:
        reply = parsed(answer)
        if not isinstance(reply, dict) or type(reply.get("id")) is not int or reply["id"] != number:
            raise ValueError(f"must be an object with id = {number}")
        if reply.keys() == {"id", "result"}:
            return read(reply["result"])
        if reply.keys() == {"id", "error"}:
            raise EngineError(f"the engine failed: {str(reply['error'])[:SHOWN]}")
        refusal = {"argument": str, "value": object, "bound": str}
        given = reply.get("refusal")
        if reply.keys() != {"id", "refusal"} or not isinstance(given, dict) or given.keys() != refusal.keys():
            raise ValueError("must have one of result, error, and refusal with argument, value and bound")
        if not all(isinstance(given[name], kind) for name, kind in refusal.items()):
            raise ValueError("must name the argument and the bound as text")
        if len(given["argument"]) + len(given["bound"]) > MOST_TEXT:
            raise ValueError(f"must name the argument and the bound with at most {MOST_TEXT} characters")
    except (ValueError, TypeError, OverflowError) as error:
        shown = answer[:SHOWN].decode(errors="replace").strip()
        raise EngineGarbage(f"the answer {error}: {shown}") from error
    raise SpecError(given["argument"], decode_error_value(given["value"]), given["bound"])


def _ask_stage(engine: Engine, op: str, *given: Any) -> Any:
    __tracebackhide__ = True
    # Optional arguments, lse and sinks, are last.
    return _ask(engine, op, OPS[op], dict(zip_longest(OPS[op].arguments, given)))


def _ask(engine: Engine, op: str, row: Op, arguments: Mapping[str, Any]) -> Any:
    __tracebackhide__ = True
    written = {name: encode(name, kind, arguments[name]) for name, kind in row.arguments.items()}
    read: Callable[[Any], Any] = partial(decode, row.result, check=checked(sizes(row, arguments)))
    return engine.ask(op, written, read)


def ask_method(engine: Engine, name: str, arguments: Mapping[str, Any]) -> KeptSets:
    """Return the kept sets of an engine for a method.

    Raises:
        SpecError: if the engine does not offer the method, or answers with a refusal.
        EngineFailure: if the engine fails.
    """
    if name not in engine.hello.families.get(FAMILY, []):
        offered = ", ".join(engine.hello.families.get(FAMILY, [])) or "none"
        raise SpecError("as", name, f"is not offered by the engine {engine.hello.name}; the engine offers {offered}")
    kept: KeptSets = _ask(engine, f"{FAMILY}.{name}", method_ops()[f"{FAMILY}.{name}"], arguments)
    return kept


def backend_of(engine: Engine) -> Backend:
    """Return the families that the engine offers as a backend. Its stages raise the exceptions of `Engine.ask`."""
    families: dict[str, Any] = {
        family: SimpleNamespace(**{name: partial(_ask_stage, engine, f"{family}.{name}") for name in offered})
        for family, offered in engine.hello.families.items() if family != FAMILY
    }
    return Backend(f"{engine.hello.name} {engine.hello.version}", **families)
