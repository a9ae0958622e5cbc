"""`python -m conformance.verify`, which `kvspec verify` starts."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from conformance.verify import check
from conformance.verify.badge import badge
from conformance.verify.certificate import CERTIFIED, certificate, entries_of, excepted, write
from conformance.verify.page import page
from conformance.verify.preparation import prepared
from conformance.verify.request import ENGINES, Request, parsed
from conformance.verify.runs import judged, selected
from conformance.verify.subject import Subject
from conformance.verify.summary import summary
from conformance.verify.verdicts import verdicts_of
from spec.errors import BackendUnavailable, SpecError

__all__ = ["main"]


def main() -> int:
    """Judge; the exit code. What is refused is one line on stderr."""
    try:
        request = parsed(sys.argv[1:])
        return check_again(request, request.check) if request.check else judge(request)
    except (SpecError, BackendUnavailable, OSError, pytest.UsageError) as error:
        print("kvspec:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvspec: stopped; there is no verdict", file=sys.stderr)
        return 130


def judge(request: Request) -> int:
    """The whole suite with a certificate, the quick one without, or a selection of tests."""
    subject = prepared(request)
    if request.pytest:
        return selected(request)
    made = run(request, subject, "log.txt")
    print("\n".join(summary(made)))
    if request.quick:
        print(f"profile {request.profile}, without full sizes (--quick): this is no certificate")
    else:
        write(made, request.out / "certificate.toml")
        (request.out / "certificate.html").write_text(page(made), encoding="utf-8")
        (request.out / "badge.svg").write_text(badge(made), encoding="utf-8")
    print(f"written to {request.out}: {'log.txt' if request.quick else 'certificate.toml, .html, badge.svg, log.txt'}")
    return int(made["verdict"] != CERTIFIED)


def run(request: Request, subject: Subject, log: str) -> dict[str, Any]:
    """The certificate of a run, whose log goes to the folder of results."""
    with tempfile.TemporaryDirectory() as folder:
        lines = judged(request, request.out / log, Path(folder, "outcomes.jsonl"))
    excused = map(excepted, entries_of(request.exceptions))
    return certificate(request, subject, verdicts_of(lines, excused, request.kind in ENGINES))


def check_again(request: Request, path: Path) -> int:
    """Compare the files of the subject, and if they are the same, the verdicts of another run."""
    there = check.read(path)
    again = check.repeated(request, path, there)
    subject = prepared(again)
    if subject.digest != there["subject"]["digest"]:
        print(f"the files of {subject.named} are not those of the certificate ({subject.files}): {subject.digest} now,"
              f" {there['subject']['digest']} there; nothing was run")
        return 1
    here = run(again, subject, "check.txt")
    found = check.differences(there, here)
    print("\n".join(found) or "the certificate is true: the same files, and the same verdicts in another run")
    if found and here["device"] != there["device"]:
        print(f"made on {there['device']}, checked on {here['device']}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
