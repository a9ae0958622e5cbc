"""`kvspec.verify`: the verdict of `kvspec verify`, as a Python object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec.errors import SpecError

if TYPE_CHECKING:
    from conformance.verify.request import Request


@dataclass(frozen=True)
class Verdict:
    """Result of `verify`.

    Attributes:
        passed: True if `kvspec verify` would exit with code 0.
        headline: the verdict as one sentence.
        failing: names of the spec items, or of the promises of a policy, that fail.
        certificate: the content of certificate.toml, or of quick.toml, as a dictionary.
        files: the files of the run, in the folder `out`.
        text: the lines that `kvspec verify` prints.
    """

    passed: bool
    headline: str
    failing: tuple[str, ...]
    certificate: Mapping[str, Any]
    files: tuple[Path, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def verify(
    *, backend: str | None = None, command: str | None = None, policy: str | None = None, cache: str | None = None,
    method: str | Sequence[str] = (), model: str | None = None, positions: str | None = None,
    timeout: float | None = None,
    precision: str | None = None, profile: str | None = None, seed: int | None = None, quick: bool = False,
    fail_fast: bool = False, exceptions: str | Path | None = None, out: str | Path = "results/verify",
) -> Verdict:
    """Test a backend, an engine, a policy or a cache as `kvspec verify` does, and return the verdict.

    The tests run in a separate process. The process imports the subject by name, so the subject must be in a module.

        verdict = kvspec.verify(policy="mine:POLICY", method="snapkv", quick=True)
        assert verdict.passed, verdict.failing

    Args:
        backend: name of a backend, or `module:ATTRIBUTE` of a `spec.backend.Backend`. Exactly one of `backend`,
            `command`, `policy` and `cache` must be given.
        command: command that starts an engine in any language.
        policy: `module:ATTRIBUTE` of a `spec.policy.Policy`, tested on its promises.
        cache: `module:ATTRIBUTE` of a function that returns logits after eviction.
        method: published method that `policy` must be, as in "snapkv" or "snapkv(W=16, kernel=5)"; a list of methods
            for `backend` and `command`. Default: none.
        model: folder of a transformers model, for `cache`. Default: tiny random models.
        positions: "absolute" or "renumbered", for `cache`. Default: "absolute".
        timeout: seconds that `command` may take for an answer.
        precision: "float32" or "float64", the precision of S1. Default: "float32", for numpy "float64".
        profile: number of examples, "few", "dev", "ci" or "nightly". Default: "ci".
        seed: seed of the examples, 0 or more. Default: a new seed, which the certificate records.
        quick: use the profile "few" without full sizes. No certificate is written.
        fail_fast: stop at the first failure.
        exceptions: TOML file of known failures.
        out: folder for the certificate, the log and the reports.

    Returns:
        The verdict. A failing subject is a verdict too, and raises nothing.

    Raises:
        SpecError: if an option is wrong, or if the subject does not exist.
        BackendUnavailable: if the subject cannot be loaded.
        pytest.UsageError: if pytest stops before the verdict.
    """
    for needed in ("pytest", "hypothesis"):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(f"{needed} is missing: pip install 'kvspec[conformance]'", name=needed)
    from conformance.verify.request import parsed

    given = {
        "backend": backend, "command": command, "policy": policy, "cache": cache, "model": model,
        "positions": positions, "timeout": timeout, "precision": precision, "profile": profile, "seed": seed,
        "exceptions": exceptions, "out": out,
    }
    _check(given)
    methods = [f"--as={one}" for one in ([method] if isinstance(method, str) else method)]
    flags = [*methods, *["--quick"] * quick, *["--fail-fast"] * fail_fast]
    return _judged(parsed([f"--{option}={value}" for option, value in given.items() if value is not None] + flags))


def _check(given: Mapping[str, Any]) -> None:
    """Refuse what the parser of the command line would end the process for."""
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
    from conformance.verify.__main__ import run, seeded, written
    from conformance.verify.certificate import PASSED
    from conformance.verify.page import headline, summary
    from conformance.verify.runs import prepared

    subject, request = prepared(request), seeded(request)
    made, verdicts = run(request, subject, "log.txt")
    files = tuple(request.out / name for name in (*written(request, made, verdicts), "log.txt"))
    text = "\n".join(summary(made))
    return Verdict(made["verdict"] in PASSED, headline(made), tuple(made["failing"]), made, files, text)
