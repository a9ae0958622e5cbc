"""What nox runs: each backend's process collects all that judges it, and `quick` the tests of what changed."""

from pathlib import Path

import pytest

pytest.importorskip("nox")

import noxfile
from conformance.assurance.quick import changed_files, judging
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
    judges_of = {item.path for item in request.session.items if judges(item, backend)}
    assert [str(path) for path in judges_of if not any(path.is_relative_to(home) for home in given)] == []


def test_each_path_that_a_process_is_given_is_there() -> None:
    given = [path for paths in GIVEN.values() for path in paths]
    assert [path for path in (*given, *noxfile.LATER_STAGES) if not Path(ROOT, path).exists()] == []


def test_what_changed_decides_what_the_quick_session_runs() -> None:
    of_stage = judging({"reference/crystalcache/dissolution.py"})
    assert {"conformance/suite/test_dissolution.py", "conformance/own/reference/test_stages.py"} <= set(of_stage)
    assert len(of_stage) < 20
    assert judging({"conformance/own/spec/test_vectors.py", "README.md"}) == ["conformance/own/spec/test_vectors.py"]


def test_what_is_no_commit_is_named() -> None:
    with pytest.raises(SystemExit, match="nonsense"):
        changed_files("nonsense")
