"""`python -m conformance.verify`, which `kvspec verify` starts."""

import secrets
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.engine.values import printable
from conformance.verify import certificate as certificate_module
from conformance.verify.certificate import PASSED, badge, certificate, entries_of, excepted, write
from conformance.verify.outcomes import Verdicts, verdicts_of
from conformance.verify.page import junit, markdown, page, summary
from conformance.verify.request import ENGINES, SEEDS, Request, parsed
from conformance.verify.runs import judged, prepared, selected
from conformance.verify.subject import Subject
from spec.errors import BackendUnavailable, SpecError
from spec.files import check_output, check_results

FILES = ("certificate.toml", "certificate.html", "quick.toml", "summary.md", "junit.xml", "badge.svg", "log.txt")
CHECKS = ("check.txt", "check-new-seed.txt")
"""Files that a run and a check write to the folder `out`."""
LONGEST_LINE = 4000
"""Letters of a line that somebody else may have written: an engine, or a certificate."""


def main() -> int:
    """Judge; the exit code. What is refused is one line on stderr."""
    try:
        request = parsed(sys.argv[1:])
        return check_again(request, request.check) if request.check else judge(request)
    except (SpecError, BackendUnavailable, OSError, pytest.UsageError) as error:
        print("kvspec:", printable(str(error), LONGEST_LINE), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvspec: stopped; there is no verdict", file=sys.stderr)
        return 130


def judge(request: Request) -> int:
    """The whole suite with a certificate, the quick one without, or a selection of tests."""
    subject = prepared(request)
    if request.pytest:
        return selected(request)
    check_out(request)
    request = seeded(request)
    made, verdicts = run(request, subject, "log.txt")
    print("\n".join(summary(made)))
    files = written(request, made, verdicts)
    if "quick.toml" in files:
        stopped = request.fail_fast and made["verdict"] not in PASSED
        part = f"profile {request.profile}, without full sizes (--quick)"
        print(f"{'stopped at the first failure' if stopped else part}: this is no certificate")
    print(f"written to {request.out}: {', '.join(files)}, log.txt")
    return int(made["verdict"] not in PASSED)


def check_out(request: Request) -> None:
    """Check that the files of the run replace no file of the user, and no file that the run reads.

    Raises:
        SpecError: as in `check_results` and `check_output`.
    """
    names = CHECKS if request.check else FILES
    check_results("out", request.out, names, force=request.force)
    for name in names:
        check_output("out", request.out / name, [request.exceptions] if request.exceptions else [], force=True)


def seeded(request: Request) -> Request:
    """The request with a seed, a new one if it has none: nobody can have prepared for its examples."""
    return request if request.seed is not None else replace(request, seed=secrets.randbelow(SEEDS))


def run(request: Request, subject: Subject, log: str) -> tuple[dict[str, Any], Verdicts]:
    """The certificate of a run, whose log goes to the folder of results, and what it was made from."""
    lines = judged(request, request.out / log)
    excused = map(excepted, entries_of(request.exceptions))
    verdicts = verdicts_of(lines, excused, request.kind in ENGINES and not request.method)
    return certificate(request, subject, verdicts), verdicts


def written(request: Request, made: Mapping[str, Any], verdicts: Verdicts) -> list[str]:
    """The names of the files: a certificate where all tests were to run."""
    texts = {"summary.md": "\n".join(markdown(made)) + "\n", "junit.xml": junit(verdicts)}
    stopped = request.fail_fast and made["verdict"] not in PASSED
    if request.quick or stopped:
        write(made, request.out / "quick.toml")
    else:
        write(made, request.out / "certificate.toml")
        texts |= {"certificate.html": page(made), "badge.svg": badge(made)}
    for name, text in texts.items():
        (request.out / name).write_text(text, encoding="utf-8")
    return ["quick.toml" if request.quick or stopped else "certificate.toml", *texts]


def check_again(request: Request, path: Path) -> int:
    """Compare the files of the subject, and if they are the same, the verdicts of two more runs.

    One has the examples of the certificate, the other one examples of a new seed.
    """
    there = certificate_module.read(path)
    check_out(request)
    again = certificate_module.repeated(request, path, there)
    if otherwise := certificate_module.of_another_version(there):
        print(printable(otherwise, LONGEST_LINE))
        return 1
    ask(request, again)
    subject = prepared(again)
    if subject.digest != there["subject"]["digest"]:
        said = f"the files of {subject.named} are not those of the certificate ({subject.files}): {subject.digest} now,"
        print(printable(f"{said} {there['subject']['digest']} there; nothing was run", LONGEST_LINE))
        return 1
    found = compared(again, replace(again, seed=request.seed), subject, there)
    for line in "\n".join(found).splitlines():
        print(printable(line, LONGEST_LINE))
    if not found:
        print("the certificate is true: the same files, and the same verdicts in two more runs")
    return int(bool(found))


def compared(again: Request, other: Request, subject: Subject, there: Mapping[str, Any]) -> list[str]:
    """What a run says differently, else what fails in another one."""
    here, _ = run(again, subject, "check.txt")
    found = certificate_module.differences(there, here)
    if not found:
        other = seeded(other)
        print(f"the same with the seed of the certificate; now with --seed {other.seed}", flush=True)
        found = certificate_module.new_failures(there, run(other, subject, "check-new-seed.txt")[0])
    if found and here["device"] != there["device"]:
        found.append(f"made on {there['device']}, checked on {here['device']}")
    return found


def ask(request: Request, again: Request) -> None:
    """Show what a certificate, which may be a stranger's, would run here, and ask.

    Raises:
        SpecError: where the answer is no, or nobody can answer and --yes was not given.
    """
    command = shlex.join(again.command_line).encode("unicode_escape").decode()
    print(f"this certificate runs code on this machine, in {Path.cwd()}:\n  {command}", flush=True)
    if request.yes:
        return
    if not sys.stdin.isatty():
        raise SpecError("check", str(request.check), "runs the command above; if you trust the command, add --yes")
    if input("Run it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SpecError("check", str(request.check), "was not run, because you did not confirm")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
