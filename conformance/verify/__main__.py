"""Command line of `python -m conformance.verify`, which `kvspec verify` starts."""

import secrets
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.methods.method import method_of
from conformance.verify import certificate as certificate_module
from conformance.verify.certificate import PASSED, badge, certificate, entries_of, excepted, write
from conformance.verify.outcomes import Verdicts, verdicts_of
from conformance.verify.page import junit, markdown, page, summary
from conformance.verify.request import ENGINES, KINDS, SEEDS, Request, parsed
from conformance.verify.runs import judged, prepared, selected
from conformance.verify.subject import Subject
from spec.errors import BackendUnavailable, SpecError
from spec.files import check_output, check_results, replace_text
from spec.printing import end_of_reader, printable, printable_lines

FILES = ("certificate.toml", "certificate.html", "quick.toml", "summary.md", "junit.xml", "badge.svg", "log.txt")
CHECKS = ("check.txt", "check-new-seed.txt")
"""Files that a run and a check write to the folder `out`."""
LONGEST_LINE = 4000
"""Maximum number of characters of a printed line that an engine or a certificate may have written."""


def main() -> int:
    """Run the command line and return the exit code. An error is printed as one line on stderr."""
    try:
        try:
            request = parsed(sys.argv[1:])
            return check_again(request, request.check) if request.check else judge(request)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        return end_of_reader()
    except (SpecError, BackendUnavailable, OSError, pytest.UsageError) as error:
        return untested(str(error))
    except KeyboardInterrupt:
        print("kvspec: stopped; there is no verdict", file=sys.stderr)
        return 130


def untested(reason: str) -> int:
    """Print the reason why nothing was tested as one line on stderr, and return the exit code."""
    print("kvspec:", printable(reason, LONGEST_LINE), file=sys.stderr)
    return 2


def judge(request: Request) -> int:
    """Run the complete suite, the quick suite or selected tests, print the verdict, and return the exit code.

    Only a complete run writes a certificate.
    """
    subject = prepared(request)
    if request.pytest:
        return selected(request)
    check_out(request)
    request = seeded(request)
    record, verdicts = run(request, subject, "log.txt")
    print(printable_lines("\n".join(summary(record))))
    files = written(request, record, verdicts)
    if "quick.toml" in files:
        stopped = request.fail_fast and record["verdict"] not in PASSED
        way = "run again without --fail-fast" if stopped else "run again without --quick"
        reason = "the run stopped at the first failure" if stopped else "a quick run"
        way += " and --quick" if stopped and request.quick else ""
        print(f"{reason}: this is no certificate; for a certificate, {way}")
    print(f"written to {request.out}: {', '.join(files)}, log.txt")
    return int(record["verdict"] not in PASSED)


def check_out(request: Request) -> None:
    """Check that the files of the run replace no file of the user, and no file that the run reads.

    Raises:
        SpecError: as in `check_subject`, `check_results` and `check_output`.
    """
    names = CHECKS if request.check else FILES
    if not (request.check or request.force):
        check_subject(request)
    check_results("out", request.out, names, force=request.force)
    for name in names:
        check_output("out", request.out / name, [request.exceptions] if request.exceptions else [], force=True)


def check_subject(request: Request) -> None:
    """Check that a run replaces no certificate of a different subject. A damaged certificate is not checked.

    Raises:
        SpecError: if the folder has the certificate of a different subject, or of different methods.
    """
    path = request.out / "certificate.toml"
    try:
        there = certificate_module.read(path)
    except SpecError:
        return
    cleared: dict[str, Any] = dict.fromkeys(KINDS)
    again = certificate_module.repeated(replace(request, **cleared), path, there)
    methods = tuple(str(method_of(text)) for text in request.method)
    same = all(getattr(request, name) == getattr(again, name) for name in ("kind", "named", "model", "positions"))
    if not same or methods != again.method:
        subject = shlex.join([f"--{again.kind}", again.named, *(f"--as={one}" for one in again.method)])
        reason = f"is the certificate of {subject}: choose a different folder, or add --force to replace it"
        raise SpecError("out", str(path), reason)


def seeded(request: Request) -> Request:
    """Return the request with a seed.

    If the request has no seed, draw a new one, so no subject can prepare for the examples.
    """
    return request if request.seed is not None else replace(request, seed=secrets.randbelow(SEEDS))


def run(request: Request, subject: Subject, log: str) -> tuple[dict[str, Any], Verdicts]:
    """Run the tests and return the certificate of the run and its verdicts.

    The log is written to the folder of results.
    """
    lines = judged(request, request.out / log)
    excused = map(excepted, entries_of(request.exceptions))
    verdicts = verdicts_of(lines, excused, request.kind in ENGINES and not request.method)
    return certificate(request, subject, verdicts), verdicts


def written(request: Request, record: Mapping[str, Any], verdicts: Verdicts) -> list[str]:
    """Write the files of a run and return the names of the files. Only a complete run writes a certificate."""
    texts = {"summary.md": "\n".join(markdown(record)) + "\n", "junit.xml": junit(verdicts)}
    stopped = request.fail_fast and record["verdict"] not in PASSED
    if request.quick or stopped:
        write(record, request.out / "quick.toml")
    else:
        write(record, request.out / "certificate.toml")
        texts |= {"certificate.html": page(record), "badge.svg": badge(record)}
    for name, text in texts.items():
        replace_text(request.out / name, text)
    return ["quick.toml" if request.quick or stopped else "certificate.toml", *texts]


def check_again(request: Request, path: Path) -> int:
    """Compare the files of the subject with the certificate.

    If the files are equal, compare the verdicts of two new runs. The first run uses the examples of the certificate.
    The second run uses the examples of a new seed.
    """
    there = certificate_module.read(path)
    check_out(request)
    again = certificate_module.repeated(request, path, there)
    if otherwise := certificate_module.of_another_version(there):
        return untested(otherwise)
    ask(request, again)
    subject = prepared(again)
    if subject.digest != there["subject"]["digest"]:
        differ = f"the files of {subject.named} ({subject.files}) differ from those of the certificate"
        new = shlex.join(replace(again, seed=None).command_line)
        return untested(f"{differ}, so nothing was run; restore the files, or make a new certificate: {new}")
    actual = compared(again, replace(again, seed=request.seed), subject, there)
    for line in "\n".join(actual).splitlines():
        print(printable(line, LONGEST_LINE))
    if not actual:
        print("the certificate is true: the same files, and the same verdicts in two more runs")
    return int(bool(actual))


def compared(again: Request, other: Request, subject: Subject, there: Mapping[str, Any]) -> list[str]:
    """Return the differences between the certificate and two new runs, a line each.

    The second run, with a new seed, starts only if the first run equals the certificate.
    """
    here, _ = run(again, subject, "check.txt")
    result = certificate_module.differences(there, here)
    if not result:
        other = seeded(other)
        print(f"the same with the seed of the certificate; now with --seed {other.seed}", flush=True)
        result = certificate_module.new_failures(there, run(other, subject, "check-new-seed.txt")[0])
    if result and here["device"] != there["device"]:
        result.append(f"made on {there['device']}, checked on {here['device']}")
    return result


def ask(request: Request, again: Request) -> None:
    """Print the command that the certificate would run on this machine, and ask for confirmation.

    The certificate may come from a stranger.

    Raises:
        SpecError: if the answer is no, or if stdin is not a terminal and --yes was not given.
    """
    command = shlex.join(again.command_line).encode("unicode_escape").decode()
    print(f"this certificate runs code on this machine, in {printable(str(Path.cwd()))}:\n  {command}", flush=True)
    if request.yes:
        return
    if not sys.stdin.isatty():
        raise SpecError("check", str(request.check), "runs the command above; if you trust the command, add --yes")
    if input("Run it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SpecError("check", str(request.check), "was not run, because you did not confirm")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
