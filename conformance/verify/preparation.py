"""What is refused in seconds, before any test is collected; and what is judged."""

import os
import re
from pathlib import Path

from conformance import exceptions
from conformance.items import known_items
from conformance.plugin import known_vectors
from conformance.suite.conftest import INTERPRETERS
from conformance.verify.request import ENGINES, Request
from conformance.verify.runs import SUITE
from conformance.verify.subject import OF_KIND, Subject
from spec.errors import SpecError

__all__ = ["prepared"]


def prepared(request: Request) -> Subject:
    """The subject of a request that can be run.

    Raises:
        SpecError: for a folder, an exceptions file or a subject that is wrong.
        BackendUnavailable: for one that cannot be loaded.
        pytest.UsageError: for an entry of the exceptions file.
    """
    check_out(request.out)
    if request.exceptions is not None:
        check_exceptions(request.exceptions)
    subject = OF_KIND[request.kind](request.named)
    if request.kind in ENGINES and not request.quick and not request.pytest:
        check_compiled()
    return subject


def check_out(folder: Path) -> None:
    """Make the folder of results.

    Raises:
        SpecError: where it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError("out", str(folder), f"cannot be made a folder ({error.strerror}); choose another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError("out", str(folder), "cannot be written; choose another folder")


def check_exceptions(file: Path) -> None:
    """Every entry names what there is; a case of a test is known when the tests are collected.

    Raises:
        pytest.UsageError: for an entry that is wrong.
        SpecError: for one whose test is not in the suite.
    """
    for entry in exceptions.read(file, known_items(), known_vectors()):
        if entry.grain != "test":
            continue
        name, _, test = entry.subject.partition("[")[0].partition("::")
        path = SUITE / name
        if not path.is_file() or not re.search(rf"^def {re.escape(test)}\(", path.read_text("utf-8"), re.MULTILINE):
            raise SpecError("exceptions", entry.subject, f"names no test of the suite (in {file})")


def check_compiled() -> None:
    """Kernels run as they are used.

    Raises:
        SpecError: where a variable has them interpreted: full sizes would take hours.
    """
    for name in INTERPRETERS:
        if os.environ.get(name, "0") not in ("", "0"):
            raise SpecError(name, os.environ[name], "leaves out full sizes, which a certificate needs; add --quick")
