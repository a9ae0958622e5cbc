"""The processes of `nox -s conformance` for one backend collect all that judges it."""

from pathlib import Path

import pytest

pytest.importorskip("nox")

import noxfile
from conformance.paths import ROOT
from conformance.plugin import judges

GIVEN = {
    "numba": noxfile.OF_NUMBA,
    # Lives are of decode, which Triton leaves to Numba.
    "triton": [*noxfile.OF_TRITON, noxfile.SAVED_LIVES],
}


@pytest.mark.parametrize("backend", GIVEN)
def test_what_judges_a_backend_is_given_to_its_process(request: pytest.FixtureRequest, backend: str) -> None:
    """Of the tests that this run has collected; all of them, where it was given no files."""
    given = [ROOT / path for path in GIVEN[backend]]
    judging = {item.path for item in request.session.items if judges(item, backend)}
    assert [str(path) for path in judging if not any(path.is_relative_to(home) for home in given)] == []


def test_each_path_that_a_process_is_given_is_there() -> None:
    given = [path for paths in GIVEN.values() for path in paths]
    assert [path for path in (*given, *noxfile.LATER_STAGES) if not Path(ROOT, path).exists()] == []
