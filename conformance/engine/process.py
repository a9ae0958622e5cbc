"""An engine as a process: started, asked line by line, and started again when it has failed."""

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Event, Timer
from typing import TypeVar

from conformance.engine.ops import stages
from conformance.engine.wire import Json, told
from spec import SPEC_VERSION
from spec.errors import SpecError

__all__ = [
    "HELLO_SECONDS", "PROTOCOL", "Engine", "EngineCrash", "EngineError", "EngineFailure", "EngineGarbage",
    "EngineTimeout", "Hello",
]

PROTOCOL = 1
PRECISIONS = ("float64", "float32")
HELLO_SECONDS = 10.0
SHOWN = 2000  # characters of a request, or of standard error, in a message
LONGEST = 2**31  # bytes of an answer

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
    if not isinstance(answer, dict) or answer.get("protocol") != PROTOCOL:
        raise ValueError(f"must be an object with protocol = {PROTOCOL}")
    texts = {name: answer.get(name, "") for name in ("spec", "name", "version", "precision")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text or (name == "precision" and text not in PRECISIONS):
            raise ValueError(f"says {name} = {text!r}")
    families = answer.get("families")
    if not isinstance(families, dict) or not families:
        raise ValueError(f"says families = {families!r}: there is nothing to judge")
    for family, offered in families.items():
        whole = stages(family)
        if not whole or not isinstance(offered, list) or sorted(map(str, offered)) != sorted(whole):
            raise ValueError(f"offers {family} with {offered!r}: a family is whole ({', '.join(whole) or 'unknown'})")
    return Hello(**texts, families=families)


class Process:
    """One run of a command."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        if not words:
            raise ValueError("there is no word in it")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # A group of its own: what a shell starts ends with it.
            self._popen = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
                start_new_session=True,
            )
        except OSError:
            self._stderr.close()
            raise

    def exchange(self, line: str, seconds: float) -> bytes:
        """The line that comes back for a line.

        Raises:
            EngineTimeout, EngineCrash: when none does.
        """
        late = Event()
        timer = Timer(seconds, self._kill, [late])
        timer.daemon = True
        timer.start()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            with suppress(OSError):
                self._popen.stdin.write(line.encode() + b"\n")
                self._popen.stdin.flush()
            answer = self._popen.stdout.readline(LONGEST)
        finally:
            timer.cancel()
        if late.is_set():
            raise EngineTimeout(f"no answer within {seconds:g} s")
        if not answer.endswith(b"\n"):
            raise EngineCrash(f"ended{self._how()} before it had answered")
        return answer

    def _how(self) -> str:
        try:
            code = self._popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return " its output"
        return f" with exit code {code}" if code >= 0 else f" by signal {-code} ({signal.strsignal(-code)})"

    def complaint(self) -> str:
        """The end of what it has written to standard error."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - SHOWN))
        return self._stderr.read().decode(errors="replace").strip()

    def _kill(self, late: Event) -> None:
        late.set()
        if self._popen.returncode is not None:
            return  # waited for: its number may be another's by now
        with suppress(OSError):
            if os.name == "posix":
                os.killpg(self._popen.pid, signal.SIGKILL)
            else:
                self._popen.kill()

    def stop(self) -> None:
        """End it."""
        self._kill(Event())
        with suppress(OSError):  # what was not yet written cannot be
            self._popen.__exit__(None, None, None)
        self._stderr.close()


class Engine:
    """The engine of a command: it runs while it answers as it should, and is started again when it is asked next.

    Raises:
        SpecError: when it cannot be started, or does not say within seconds what spec/protocol.md asks it to.
    """

    def __init__(self, command: str, seconds: float) -> None:
        self._command, self._seconds = command, seconds
        self._process: Process | None = None
        self._asked = 0
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
        return self._exchange(self._hello, HELLO_SECONDS, hello_of)

    def ask(self, op: str, arguments: Json, read: Callable[[Json], T]) -> T:
        """The result of an operation as `read` makes it, which raises ValueError for what is none.

        Raises:
            SpecError: where the engine refuses.
            EngineFailure: where it fails.
        """
        __tracebackhide__ = True  # pytest shows where the suite asked, and the message
        if self._process is None:
            self._start()
        self._asked += 1
        line = json.dumps({"id": self._asked, "op": op, "arguments": arguments})
        return self._exchange(line, self._seconds, read)

    def _exchange(self, line: str, seconds: float, read: Callable[[Json], T]) -> T:
        __tracebackhide__ = True
        assert self._process is not None
        try:
            return outcome(self._process.exchange(line, seconds), self._asked, read)
        except EngineFailure as failure:
            complaint = self._process.complaint()
            if not isinstance(failure, EngineError):
                self.stop()
            raise type(failure)(failure.reason, self._kept(line), complaint) from None

    @cached_property
    def _home(self) -> str:
        """Where long requests are kept."""
        return tempfile.mkdtemp(prefix="kvspec-")

    def _kept(self, line: str) -> str:
        """The request, or the file that holds it behind hello."""
        if len(line) <= SHOWN:
            return line
        with tempfile.NamedTemporaryFile("w", dir=self._home, suffix=".jsonl", delete=False) as file:
            file.write(f"{self._hello}\n{line}\n")
        return f"{file.name} (pipe it into the engine)"

    def stop(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            self._process.stop()
            self._process = None


def outcome(answer: bytes, number: int, read: Callable[[Json], T]) -> T:
    """What an answer to the request of this number says.

    Raises:
        SpecError: where it is a refusal.
        EngineFailure: where it says that the engine failed, or is no answer.
    """
    try:
        said = _json(answer)
        if not isinstance(said, dict) or said.get("id") != number:
            raise ValueError(f"must be an object with id = {number}")
        if said.keys() == {"id", "result"}:
            return read(said["result"])
        if said.keys() == {"id", "error"}:
            raise EngineError(f"the engine failed: {said['error']}")
        refusal = {"argument": str, "value": object, "bound": str}
        given = said.get("refusal")
        if said.keys() != {"id", "refusal"} or not isinstance(given, dict) or given.keys() != refusal.keys():
            raise ValueError("must have one of result, error, and refusal with argument, value and bound")
        if not all(isinstance(given[name], kind) for name, kind in refusal.items()):
            raise ValueError("must name the argument and the bound as text")
    except (ValueError, TypeError, OverflowError) as error:
        shown = answer.decode(errors="replace").strip()
        raise EngineGarbage(f"the answer {error}: {shown[:SHOWN]}") from error
    raise SpecError(given["argument"], told(given["value"]), given["bound"])


def _json(answer: bytes) -> Json:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from error
