"""The function `kvspec.verify`, which returns the verdict of `kvspec verify` as a Python object."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec.errors import SpecError
from spec.html import html_table

if TYPE_CHECKING:
    from conformance.verify.request import Request

_OPTION = re.compile(r"--([a-z][a-z-]*)")
_NAMES = {"as": "method", "quick": "quick=True", "force": "force=True"}
"""Arguments of `verify`, by the option of the command line, if the two names differ."""


@dataclass(frozen=True)
class Verdict:
    """Result of `verify`.

    Attributes:
        passed: True if every test passed. If `passed` is True, `kvspec verify` exits with code 0.
        headline: one sentence with the result of the run.
        failing: names of the specification items that failed, or of the guarantees that the policy breaks.
        certificate: content of certificate.toml as a dictionary. If `quick` is True, `certificate` is the content of
            quick.toml.
        files: paths of the files that the run wrote to the folder `out`.
        text: output that `kvspec verify` prints.
    """

    passed: bool
    headline: str
    failing: tuple[str, ...]
    certificate: Mapping[str, Any]
    files: tuple[Path, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        verdict = {"passed": self.passed, "failing": ", ".join(self.failing) or "none"}
        return html_table(self.headline, verdict | {"files": ", ".join(map(str, self.files))})


def verify(
    *, backend: str | None = None, command: str | None = None, policy: str | None = None, cache: str | None = None,
    server: str | None = None,
    method: str | Sequence[str] = (), model: str | None = None, positions: str | None = None,
    timeout: float | None = None,
    precision: str | None = None, profile: str | None = None, seed: int | None = None, quick: bool = False,
    fail_fast: bool = False, exceptions: str | Path | None = None, out: str | Path = "results/verify",
    force: bool = False,
) -> Verdict:
    """Test a backend, engine, policy, cache or server with the tests of `kvspec verify`, and return the verdict.

    The tests run in a separate process. The process imports the tested object by name, so the module of the tested
    object must be importable. Give exactly one of `backend`, `command`, `policy`,
    `cache` and `server`.

        verdict = kvspec.verify(policy="mine:POLICY", method="snapkv", quick=True)
        assert verdict.passed, verdict.failing

    Args:
        backend: backend to test: a name, or `module:ATTRIBUTE` of a `spec.backend.Backend`.
        command: engine to test, in any language: the command that starts the engine.
        policy: policy to test: `module:ATTRIBUTE` of a `spec.policy.Policy`.
        cache: cache to test: `module:ATTRIBUTE` of a function that returns logits after eviction.
        method: published method that must keep the same tokens, such as "snapkv" or "snapkv(W=16, kernel=5)". If you
            test a `backend` or a `command`, `method` can be a list. Default: no comparison.
        server: address of a running server that evicts. Needs `model`.
        model: for `cache`: folder of the transformers model. Default: tiny random models. For `server`: folder or name
            of the weights that the server runs.
        positions: for `cache`: positions of the kept tokens, "kept" or "renumbered". Default: "kept".
        timeout: for `command`: maximum number of seconds that the engine may take to answer. Default: 60.
        precision: precision of stage S1 (co-attention). Default: "float64" for the numpy backend, otherwise "float32".
        profile: profile that sets the number of examples of each test: "few", "dev", "ci" or "nightly". Default: "ci".
        seed: random seed of the examples, 0 or more. Default: a new seed, which the certificate records.
        quick: run the profile "few", for an engine without full-size inputs. No certificate is written.
        fail_fast: stop at the first failed test.
        exceptions: TOML file that lists known failures.
        out: folder for the certificate, the log and the reports.
        force: replace files in the folder `out` that kvspec did not make, and the certificate of a different subject.

    Returns:
        The verdict. If a test fails, `verify` raises no error, and `passed` of the verdict is False.

    Raises:
        SpecError: if an argument is invalid, or if the tested object does not exist.
        BackendUnavailable: if the tested object cannot be loaded.
        pytest.UsageError: if pytest stops before the tests give a verdict.
    """
    for needed in ("pytest", "hypothesis"):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(f"{needed} is missing: pip install 'kvspec[conformance]'", name=needed)
    from conformance.verify.request import parsed

    given = {
        "backend": backend, "command": command, "policy": policy, "cache": cache, "server": server, "model": model,
        "positions": positions, "timeout": timeout, "precision": precision, "profile": profile, "seed": seed,
        "exceptions": exceptions, "out": out,
    }
    _check(given)
    methods = [f"--as={one}" for one in ([method] if isinstance(method, str) else method)]
    flags = [*methods, *["--quick"] * quick, *["--fail-fast"] * fail_fast, *["--force"] * force]
    options = [f"--{option}={value}" for option, value in given.items() if value is not None]
    with _argument_names():
        return _judged(parsed(options + flags))


@contextmanager
def _argument_names() -> Iterator[None]:
    """Context manager in which errors name the arguments of `verify` in place of the options of the command line."""
    try:
        yield
    except SpecError as error:
        bound = _OPTION.sub(lambda option: _NAMES.get(option[1], option[1].replace("-", "_")), error.bound)
        raise SpecError(_NAMES.get(error.argument, error.argument), error.value, bound) from error


def _check(given: Mapping[str, Any]) -> None:
    """Check the arguments for which the parser of the command line would end the process.

    Raises:
        SpecError: if there is not exactly one subject, or if an argument has an invalid value.
    """
    from conformance.plugin import POSITIONS, PROFILES
    from conformance.verify.request import KINDS, PRECISIONS

    subjects = [kind for kind in KINDS if given[kind] is not None]
    if len(subjects) != 1:
        raise SpecError("verify", ", ".join(subjects) or None, f"give exactly one of {', '.join(KINDS)}")
    for option, choices in (("positions", POSITIONS), ("precision", PRECISIONS), ("profile", PROFILES)):
        if given[option] not in (None, *choices):
            raise SpecError(option, given[option], f"must be one of {', '.join(choices)}")
    for option, kind in (("seed", int), ("timeout", (int, float))):
        if given[option] is not None and (isinstance(given[option], bool) or not isinstance(given[option], kind)):
            raise SpecError(option, given[option], "must be a number")


def _judged(request: "Request") -> Verdict:
    from conformance.verify.__main__ import check_out, run, seeded, written
    from conformance.verify.certificate import PASSED
    from conformance.verify.page import headline, summary
    from conformance.verify.runs import prepared

    subject, request = prepared(request), seeded(request)
    check_out(request)
    record, verdicts = run(request, subject, "log.txt")
    files = tuple(request.out / name for name in (*written(request, record, verdicts), "log.txt"))
    text = "\n".join(summary(record))
    return Verdict(record["verdict"] in PASSED, headline(record), tuple(record["failing"]), record, files, text)
