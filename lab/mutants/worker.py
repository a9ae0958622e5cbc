"""Worker that tries mutants: it collects the suite once, and tries each mutant in a fork of that process.

The tests use the examples of a profile, with a fixed seed and without shrinking. A test that uses too much processor
time is stopped.
"""

import gc
import io
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

MEMORY = 16 << 30  # bytes of address space
HANGS = 1.5  # a fork hangs if it takes more seconds than this multiple of its processor seconds
AFTER_AN_ERROR = 60  # after so many errors without a failed assertion, the trial ends
PROFILES = ("dev", "ci")  # the cheaper profile first
# Processor seconds that a test may use: several times the seconds of the longest test without a mutant.
LIMITS = {"dev": 30.0, "ci": 90.0}
WHOLE = 20.0  # limit of all tests together, as a multiple of the limit of one test


class NotJudged(RuntimeError):
    """Error if the suite could not be run. Then no verdict is valid."""


@dataclass
class Verdict:
    """Result of the tests: the first failed assertion, or the first other error if no assertion failed.

    Attributes:
        outcome: "assertion", "error" (a test raised a different error), "timeout" or "survived".
    """

    outcome: str = "survived"
    profile: str = ""
    test: str = ""
    raised: str = ""
    any_backend: bool = False
    ran: int = 0
    seconds: float = 0.0  # processor time

    @property
    def killed(self) -> bool:
        """True if an assertion failed. A different error does not kill a mutant."""
        return self.outcome == "assertion"


@dataclass(frozen=True)
class Trial:
    """Mutant to try: `patch` puts it into a process, and `accepts` selects the tests that must detect it."""

    key: str
    accepts: Callable[[pytest.Item], bool]
    patch: Callable[[], None]
    rank: Callable[[pytest.Item], Any]
    """Sort key of the tests."""
    profiles: tuple[str, ...] = PROFILES


@dataclass
class Suite:
    """Collected tests. A test that fails on the unmutated code under the same profile does not kill mutants."""

    items: list[pytest.Item]
    limit: float
    sound: dict[str, bool] = field(default_factory=dict)

    def judge(self, accepts: Callable[[pytest.Item], bool], patch: Callable[[], None]) -> Verdict:
        """Return the verdict of the accepted tests on the mutant that `patch` puts into the fork."""
        while True:
            tests = [item for item in self.items if accepts(item) and self.sound.get(item.nodeid, True)]
            verdict = self._tried(tests, patch)
            if not verdict.test or self._passes(verdict.test):
                return verdict

    def _passes(self, test: str) -> bool:
        """Return True if a test passes without a mutant."""
        if test not in self.sound:
            alone = [item for item in self.items if item.nodeid == test]
            self.sound[test] = self._tried(alone, lambda: None).outcome == "survived"
            if not self.sound[test]:
                print(f"fails unmutated, so it judges nothing: {test}", file=sys.__stdout__, flush=True)
        return self.sound[test]

    def _tried(self, tests: Sequence[pytest.Item], patch: Callable[[], None]) -> Verdict:
        try:
            result: Verdict = _in_a_fork(lambda: _trial(tests, patch, self.limit), WHOLE * self.limit)
        except TimeoutError:
            return Verdict("timeout", seconds=WHOLE * self.limit)
        return result


def run(root: Path, trials: Sequence[Trial], files: Sequence[str]) -> dict[str, Verdict]:
    """Try mutants under the cheap profile, then the survivors under the other profile. Return the verdicts.

    Raises:
        NotJudged: if the suite cannot be run.
    """
    verdicts = dict[str, Verdict]()
    for profile in PROFILES:
        todo = [one for one in trials if profile in one.profiles and not verdicts.get(one.key, Verdict()).killed]
        for number, (trial, verdict) in enumerate(zip(todo, _verdicts(root, files, profile, todo), strict=True), 1):
            verdict.profile, verdicts[trial.key] = profile, verdict
            line = f"{number}/{len(todo)} {verdict.outcome:9} {verdict.seconds:6.1f} s  {trial.key}"
            print(f"{line}  {verdict.test.rpartition('/')[2]}", flush=True)
    return verdicts


def _verdicts(root: Path, files: Sequence[str], profile: str, trials: Sequence[Trial]) -> Iterator[Verdict]:
    """Yield the verdict on each mutant, from a process that has collected the tests of the files."""
    if not trials:
        return
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_collect, args=(root, files, profile, trials, theirs))
    process.start()
    theirs.close()
    with suppress(EOFError):
        while True:
            yield ours.recv()
    process.join()
    if process.exitcode:
        raise NotJudged(f"profile {profile}: the tests were not run, exit {process.exitcode}")


def _collect(root: Path, files: Sequence[str], profile: str, trials: Sequence[Trial], to: Connection) -> None:
    # Loading the entry points of other packages takes longer than most trials.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        code = pytest.main(
            ["-o", "addopts=", "-p", "conformance.plugin", "-p", "no:cacheprovider", "-s", "--rootdir",
             os.fspath(root), "--strict-markers", "--assert=plain", "--tb=native",
             # Without the filter pytest warns, because Hypothesis is imported before pytest is configured.
             "-W", "ignore::pytest.PytestAssertRewriteWarning", "--kvspec-profile", profile, "--backend", "numpy",
             *(os.fspath(root / name) for name in files)],
            plugins=[_Court(trials, to, LIMITS[profile])],
        )
    if code != pytest.ExitCode.OK:
        print(output.getvalue()[-4000:], file=sys.__stderr__, flush=True)
    sys.stdout.flush()
    os._exit(int(code))


class _Court:
    """Pytest plugin that tries mutants with the collected tests instead of running them, and sends the verdicts."""

    def __init__(self, trials: Sequence[Trial], to: Connection, limit: float) -> None:
        self.trials, self.to, self.limit = trials, to, limit

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants", settings.default, phases=(Phase.explicit, Phase.generate), derandomize=True, database=None,
            report_multiple_bugs=False,
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("not all tests can be imported")
        gc.collect()
        gc.freeze()
        suite = Suite(session.items, self.limit)
        for trial in self.trials:
            suite.items.sort(key=trial.rank)
            self.to.send(suite.judge(trial.accepts, trial.patch))
        return True


class _Jury:
    """Pytest plugin that stops at the first failed assertion."""

    def __init__(self, verdict: Verdict, seconds: float) -> None:
        self.verdict, self.seconds, self.errors = verdict, seconds, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        def too_long(*_: object) -> None:
            # End the process at once: an endless loop may run in a thread that nothing else stops.
            _answer(Verdict("timeout", item.nodeid, ran=self.verdict.ran, seconds=self.seconds))

        signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        done = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "call":
            self.verdict.ran += 1
        if call.excinfo is None or call.excinfo.errisinstance(pytest.skip.Exception):
            return
        # pytest.raises fails with pytest.fail.Exception if nothing was raised. This counts as an assertion.
        asserted = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
        self.errors += 1
        if asserted or self.verdict.outcome == "survived":
            self.verdict.outcome, self.verdict.test = "assertion" if asserted else "error", item.nodeid
            self.verdict.raised = call.excinfo.exconly().splitlines()[0][:120]
            self.verdict.any_backend = judges_any_backend(item)
        if asserted or self.errors > AFTER_AN_ERROR:
            item.session.shouldstop = "killed"


def _trial(tests: Sequence[pytest.Item], patch: Callable[[], None], seconds: float) -> Verdict:
    """Run the tests in this process, with the mutant in it."""
    verdict = Verdict()
    patch()
    if tests:
        tests[0].config.pluginmanager.register(_Jury(verdict, seconds))
    for item, following in zip(tests, [*tests[1:], None], strict=False):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.shouldstop:
            break
    used = resource.getrusage(resource.RUSAGE_SELF)
    verdict.seconds = used.ru_utime + used.ru_stime
    return verdict


def file_of(item: pytest.Item) -> str:
    """Return the path of a test's module from the root."""
    return item.path.relative_to(item.config.rootpath).as_posix()


def judges_any_backend(item: pytest.Item) -> bool:
    """Return True if the test also runs for backends other than the reference."""
    fixtures = set(getattr(item, "fixturenames", ()))
    return "backend_under_test" in fixtures and "reference_items" not in fixtures


def _in_a_fork(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of `work` in a separate process.

    Raises:
        TimeoutError: if the process uses more than this number of processor seconds, or hangs. The limit for a test
            that hangs is long, because on a busy machine a few processor seconds may take long.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, theirs, seconds))
    process.start()
    theirs.close()
    try:
        if not ours.poll(HANGS * seconds):
            raise TimeoutError
        return ours.recv()
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise TimeoutError from None
        return Verdict("error", "", f"process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


_pipe: list[Connection] = []  # in a fork: the connection for its answer


def _send(work: Callable[[], Any], to: Connection, seconds: float) -> None:
    _pipe.append(to)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 3))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _answer(work())


def _answer(result: Any) -> None:
    _pipe[0].send(result)
    _pipe[0].close()
    os._exit(0)
