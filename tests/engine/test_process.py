"""Tests of engines that fail to start, hang, crash or send garbage. Each failure has a verdict."""

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance import plugin
from conformance.engine import process, values
from conformance.engine.process import (
    Engine,
    EngineCrash,
    EngineError,
    EngineFailure,
    EngineGarbage,
    EngineTimeout,
    backend_of,
)
from conformance.paths import ROOT
from spec.backend import Backend
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import NESTEDKV
from tests.conformance.test_plugin import run
from tests.engine import scripted

pytestmark = pytest.mark.law("unusable-after-a-failure")

RIGHT = '{"id": %, "result": [0, 2]}'


def command(*answers: str, **hello: Any) -> str:
    return shlex.join([sys.executable, scripted.__file__, json.dumps(hello), *answers])


@pytest.fixture
def started() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.stop()


def subject(started: list[Engine], *answers: str, seconds: float = 20.0) -> Backend:
    started.append(Engine(command(*answers), seconds))
    return backend_of(started[-1])


def ask(backend: Backend, n: int = 3) -> list[int]:
    V = np.zeros((n, 2))
    kept: list[int] = backend.require_diversity().diverse(np.zeros(n), V, np.zeros(n, dtype=np.bool_), 2, 0.5).tolist()
    return kept


@pytest.mark.parametrize(("answer", "verdict", "words"), [
    ("hang", EngineTimeout, "no answer within 0.5 s"), ("die", EngineCrash, "ended with exit code 7"),
    ("Loading ...", EngineGarbage, "the answer is no JSON"), ("[1]", EngineGarbage, "must be an object with id = 1"),
    ('{"id": 9, "result": [0, 2]}', EngineGarbage, "id = 1"), ('{"id": %}', EngineGarbage, "must have one of result"),
    ('{"id": %, "result": [0, 1, 2]}', EngineGarbage, "is of shape [3], not [k] with"),
    ('{"id": %, "result": [0.5, 2]}', EngineGarbage, "must be of type int"),
    ('{"id": %, "result": [0, 2], "error": "?"}', EngineGarbage, "must have one of"),
    ('{"id": %, "refusal": {"argument": "k"}}', EngineGarbage, "must have one of"),
    ('{"id": %, "error": "no memory"}', EngineError, "the engine failed: no memory"),
    ('{"id": %.0, "result": [0, 2]}', EngineGarbage, "id = 1"),
    ('{"id": true, "result": [0, 2]}', EngineGarbage, "id = 1"),
    ('{"id": %, "result": [0, NaN]}', EngineGarbage, "NaN is no number of JSON"),
    ('{"id": %, "result": [0, 1e999]}', EngineGarbage, "1e999 is no number of JSON"),
    ('{"id": %, "id": %, "result": [0, 2]}', EngineGarbage, "a member twice"),
    ('\ufeff{"id": %, "result": [0, 2]}', EngineGarbage, "the answer is no JSON"),
    ('{"id": %, "result": {"dtype": "int64", "shape": [-1], "base64": "AAAAAAAAAAABAAAAAAAAAA=="}}', EngineGarbage,
     "has shape [-1], which is no list of sizes"),
])
def test_a_failure_is_named_with_its_request(
    started: list[Engine], answer: str, verdict: type[EngineFailure], words: str,
) -> None:
    """Check that the engine is started again for the next request."""
    backend = subject(started, answer, answer, seconds=0.5 if answer == "hang" else 20.0)
    for _ in range(1 if answer == "hang" else 2):
        with pytest.raises(EngineFailure) as caught:
            ask(backend)
        assert type(caught.value) is verdict
        assert words in str(caught.value)
        (line,) = re.findall(r'^request: (\{"id": \d, "op": "diversity.diverse".*\})$', str(caught.value), re.MULTILINE)
        assert json.loads(line)["arguments"]["k"] == 2
        assert ("a last word" in str(caught.value)) == (answer == "die")


@pytest.mark.parametrize(("answer", "words"), [("child", "no answer within 0.5 s"), ("orphan", "exit code 0")])
def test_a_child_that_holds_the_output_holds_nobody_up(started: list[Engine], answer: str, words: str) -> None:
    """Check a child in a separate session, which no signal to the engine reaches. The child runs for 40 seconds."""
    backend, before = subject(started, answer, seconds=0.5 if answer == "child" else 20.0), time.monotonic()
    with pytest.raises(EngineFailure, match=words):
        ask(backend)
    started[-1].stop()
    assert time.monotonic() - before < 30


def test_an_operation_that_hangs_costs_few_timeouts(
    started: list[Engine], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that Hypothesis treats all requests as one failure, of one type and line. Later operations still run."""
    backend, exchange = subject(started, "hang", seconds=0.3), process.Process.exchange
    lines, waits = set(), list[float]()

    def counted(self: process.Process, line: str, seconds: float) -> bytes:
        waits.append(seconds)
        return exchange(self, line, seconds)

    monkeypatch.setattr(process.Process, "exchange", counted)
    for n in range(3, 23):
        with pytest.raises(EngineTimeout) as caught:
            ask(backend, n)
        lines.add(traceback.extract_tb(caught.value.__traceback__)[-1].lineno)
        assert caught.value.__context__ is None
    assert waits.count(0.3) == 3
    assert len(lines) == 1
    assert "3 requests of diversity.diverse, which is not asked again" in str(caught.value)
    assert '"retained": [false, false, false], "k": 2' in str(caught.value)
    with pytest.raises(EngineTimeout, match=r"no answer within 0\.3 s\n"):
        backend.require_nestedkv().anomaly_score(np.ones((1, 2, 2)), NESTEDKV)


def test_an_engine_that_reads_nothing_is_late_as_well(started: list[Engine]) -> None:
    """Check a request that is longer than the pipe of the engine."""
    with pytest.raises(EngineTimeout):
        ask(subject(started, "hang", seconds=0.5), n=1_000_000)


def test_an_answer_without_an_end_is_bounded(started: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LONGEST", 10 << 20)
    with pytest.raises(EngineGarbage, match="longer than 10485760 bytes") as caught:
        ask(subject(started, "flood"))
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    kept = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, bytes | bytearray)]
    assert sum(map(len, kept)) < 1 << 20


@pytest.mark.parametrize(("answer", "words"), [
    ('{"id": %, "result": [' + "[]," * 1000 + "0]}", r"has about 2\d\d\d values, more than 2000; write large"),
    (json.dumps({"id": 1, "refusal": {"argument": "k", "value": 1, "bound": "head " * 500}}), "at most 2000 char"),
])
def test_values_and_texts_of_an_answer_are_bounded(
    answer: str, words: str, started: list[Engine], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python needs more memory for a value than the text has, and tests search the text of a refusal."""
    monkeypatch.setattr(values, "MOST_VALUES", 2000)
    with pytest.raises(EngineGarbage, match=words):
        ask(subject(started, answer))


def test_an_engine_does_not_see_who_asks(started: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPEC_PROFILE", "few")
    monkeypatch.setenv("PYTEST_VERSION", "9")
    with pytest.raises(EngineError, match="the engine failed: it sees\n"):
        ask(subject(started, "environment"))


def test_names_of_an_engine_are_one_line_without_control_characters(started: list[Engine]) -> None:
    started.append(Engine(command(name="a\nb\x1b[31mc", version="1" * 200), 20.0))
    assert (started[-1].hello.name, len(started[-1].hello.version)) == ("a b?[31mc", 100)


def test_a_signal_to_the_judge_ends_the_engine(tmp_path: Path) -> None:
    """Check an engine that hangs after hello, so that it does not notice the end of the input."""
    (tmp_path / "engine.py").write_text(
        f"import os, runpy, sys\nopen('pid', 'w').write(str(os.getpid()))\nsys.argv[1:] = ['{{}}', 'hang']\n"
        f"runpy.run_path({scripted.__file__!r}, run_name='__main__')\n", encoding="utf-8",
    )
    (tmp_path / "test_outside.py").write_text(
        "import numpy as np\ndef test_it(backend_under_test):\n    open('asked', 'w').close()\n"
        "    backend_under_test.require_diversity().diverse(np.ones(1), np.ones((1, 1)), np.zeros(1, bool), 1, 0.5)\n",
        "utf-8",
    )
    words = [sys.executable, "-m", "pytest", "-p", "conformance.plugin", "-p", "no:cacheprovider"]
    judge = subprocess.Popen(
        [*words, "--kvspec-command", f"{sys.executable} engine.py"], cwd=tmp_path, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    try:
        assert _becomes(lambda: (tmp_path / "asked").exists())
        judge.terminate()
        assert judge.wait(timeout=120) == -signal.SIGTERM
    finally:
        judge.kill()
    engine = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert _becomes(lambda: not _runs(engine))


def _runs(number: int) -> bool:
    stat = Path(f"/proc/{number}/stat")
    try:
        os.kill(number, 0)
        return not stat.exists() or ") Z " not in stat.read_text(encoding="utf-8")
    except (ProcessLookupError, FileNotFoundError):  # also between two of these calls
        return False


def _becomes(so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 120
    while not so() and time.monotonic() < until:
        time.sleep(0.05)
    return so()


def test_after_a_failure_the_next_request_is_answered(started: list[Engine]) -> None:
    """Check an invalid second answer. A new process gives the first answer again."""
    backend = subject(started, RIGHT, "garbage")
    assert ask(backend) == [0, 2]
    with pytest.raises(EngineGarbage):
        ask(backend)
    assert ask(backend) == [0, 2]


def test_a_long_request_is_kept_in_a_file(started: list[Engine], tmp_path: Path) -> None:
    """Check that the file has `hello` and the last request, so that the file can be piped into the engine."""
    backend = subject(started, "die", "die")
    started[-1].requests = lambda: tmp_path
    for n in (4000, 5000):
        with pytest.raises(EngineCrash) as caught:
            ask(backend, n)
    (name,) = re.findall(r"request: (\S+\.jsonl) \(pipe it into the engine\)", str(caught.value))
    hello, request = map(json.loads, Path(name).read_text(encoding="utf-8").splitlines())
    assert list(tmp_path.iterdir()) == [Path(name)]
    assert hello["op"] == "hello"
    assert len(request["arguments"]["s"]) == 5000
    assert request["arguments"]["V"]["shape"] == [5000, 2]
    started[-1].requests = None
    with pytest.raises(EngineCrash, match=r"\.\.\. \(\d+ characters\)"):
        ask(backend, 5000)


TWO_TESTS = """
import numpy as np
import pytest
@pytest.mark.parametrize("n", [4000, 5000])
def test_it(backend_under_test, n):
    backend_under_test.require_diversity().diverse(np.zeros(n), np.zeros((n, 1)), np.zeros(n, bool), 1, 0.5)
"""


@pytest.mark.parametrize("ends", ["die", "hang"])
def test_nothing_is_left_in_the_temporary_folder(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that only the folder of pytest remains, also after a signal. pytest keeps the folders of three runs."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (tmp_path / "test_outside.py").write_text(TWO_TESTS, encoding="utf-8")
    if ends == "die":
        done = run(tmp_path, "--kvspec-command", command("die", "die"))
        files = re.findall(r"request: (\S+\.jsonl) \(pipe it", done.stdout)
        sizes = [len(json.loads(Path(file).read_text("utf-8").splitlines()[1])["arguments"]["s"]) for file in {*files}]
        assert sorted(sizes) == [4000, 5000]
    else:
        judge = subprocess.Popen(
            [*shlex.split(f"{sys.executable} -m pytest -p conformance.plugin -p no:cacheprovider --kvspec-timeout 1"),
             "--kvspec-command", command("die", "hang", "hang")],
            cwd=tmp_path, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        assert _becomes(lambda: any(temporary.rglob("*.jsonl")))
        judge.terminate()
        assert judge.wait(timeout=120) == -signal.SIGTERM
    assert [path.name.partition("-")[0] for path in temporary.iterdir()] == ["pytest"]


def test_standard_error_is_bounded_and_its_end_is_shown(started: list[Engine]) -> None:
    """Check an endless standard error. The request times out, no file grows, and the error has the last lines."""
    with pytest.raises(EngineTimeout) as caught:
        ask(subject(started, "complain", seconds=1.0))
    assert str(caught.value).endswith("!" * 100)
    assert len(str(caught.value)) < 2 * process.SHOWN + 500
    with pytest.raises(EngineCrash, match="a last word"):
        ask(subject(started, "die"))


def test_a_refusal_is_the_one_error_of_the_specification(started: list[Engine]) -> None:
    given = '{"id": %, "refusal": {"argument": "V", "value": ["0x1.8p+0", 2, "9007199254740993"], "bound": "no"}}'
    with pytest.raises(SpecError) as caught:
        ask(subject(started, given))
    assert (caught.value.argument, caught.value.value, caught.value.bound) == ("V", [1.5, 2, 2**53 + 1], "no")


def test_a_family_that_is_not_offered_is_refused_by_name(started: list[Engine]) -> None:
    with pytest.raises(BackendUnavailable, match=r"'scripted 1' has no stage family 'crystal'; it has: \['diversity'"):
        subject(started).require_crystal()


@pytest.mark.parametrize(("line", "words"), [
    ("no-such-engine", "cannot be started"), ("false", "ended with exit code 1"), ("", "cannot be started"),
    (command(protocol=2), "protocol = 1"), (command(precision="bfloat16"), "precision = 'bfloat16'"),
    (command(families={"breath": ["decay"]}), "a family is whole (inverse_key_norms, impact, decay"),
    (command(families={"methods": ["snapkw"]}), "offers methods with ['snapkw']: must be some of streamingllm, adakv"),
    (command(families={"attention": []}), "a family is whole (unknown)"),
    (command(families={}), "must offer at least one stage family"),
    (command(name=None), "name = "),
])
def test_what_cannot_be_judged_is_refused_in_one_line(line: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Engine(line, 1.0)
    assert caught.value.argument == "--command"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class Options(dict[str, Any]):
    """Part of a pytest configuration that the plugin reads."""

    getoption = dict.__getitem__


@pytest.mark.parametrize(("changes", "words"), [
    ({"--backend": "numpy"}, "give either --backend"), ({"--kvspec-timeout": 0.0}, "positive number"),
    ({"--kvspec-timeout": float("nan")}, "positive number"), ({"--kvspec-command": "false"}, "exit code 1"),
])
def test_options_that_do_not_fit_are_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    options = Options({"--kvspec-command": command(), "--backend": None, "--kvspec-timeout": 9.0, **changes})
    with pytest.raises(pytest.UsageError) as caught:
        plugin.engine_of(options)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_suite_says_whom_it_judges_and_in_what_precision(tmp_path: Path) -> None:
    """Check that the precision is that of the engine, unless the option has a different precision."""
    test = (
        "def test_it(backend_under_test, precision):\n"
        "    assert (backend_under_test.name, precision) == ('scripted 1', 'float32')\n"
    )
    (tmp_path / "test_outside.py").write_text(test, encoding="utf-8")
    line = command(precision="float32")
    done = run(tmp_path, "--kvspec-command", line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kvspec: backend {line}, S1 in float32, spec " in done.stdout


def test_an_engine_whose_hello_is_an_error_is_ended(tmp_path: Path) -> None:
    answer = shlex.quote('{"id": 0, "error": "no licence"}')
    with pytest.raises(SpecError, match="the engine failed: no licence"):
        Engine(shlex.join(["sh", "-c", f"echo $$ > {tmp_path}/pid; read line; echo {answer}; sleep 1000"]), 20.0)
    assert _becomes(lambda: not _runs(int((tmp_path / "pid").read_text(encoding="utf-8"))))


def test_the_answer_of_an_engine_that_ends_at_once_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an engine that writes and ends between two checks: of the output, and of the process."""
    engine, look, looks = process.Process("sh -c 'read one; read two; echo {}'"), select.select, list[int]()

    def late(*given: Any) -> Any:
        looks.append(1)
        if len(looks) != 2:
            return look(*given)
        os.write(engine._in, b"\n")
        engine._popen.wait()
        return [], [], []

    monkeypatch.setattr(process, "select", SimpleNamespace(select=late))
    assert engine.exchange("hello", 20.0) == b"{}"
    engine.stop()


def test_an_engine_that_says_nothing_is_refused_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HELLO_SECONDS", 0.2)
    with pytest.raises(SpecError, match=r"no answer within 0\.2 s"):
        Engine(f"sh -c {shlex.quote('sleep 100; true')}", 1.0)
