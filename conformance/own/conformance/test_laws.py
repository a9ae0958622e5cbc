"""A test of the integration carries an item or a law, and its failure says the law's sentence."""

from pathlib import Path

import pytest

from conformance.own.conformance.test_plugin import run
from conformance.own.laws import LAWS
from conformance.paths import ROOT

CONFTEST = ROOT / "conformance" / "own" / "models_integration" / "conftest.py"
LAW, OTHER = '@pytest.mark.law("freed-memory")', '@pytest.mark.law("saved-is-what-was")'
ITEM = '@pytest.mark.spec("CC-SCORE")'


def outcome(folder: Path, *marks: str, module: str = "") -> str:
    """What pytest says of one test that fails, below the conftest of the integration's tests."""
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    text = "\n".join(["import pytest", module, *marks, "def test_it():", "    assert False", ""])
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    result = run(folder, "--strict-markers")
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    ("marks", "complaint"),
    [
        ((), "ERROR: test_it.py::test_it: needs the mark spec or law"),
        (("@pytest.mark.nightly",), "ERROR: test_it.py::test_it: needs the mark spec or law"),
        (('@pytest.mark.law("no-such-law")',), "unknown law ('no-such-law',), must be one of eviction-equals-"),
        (('@pytest.mark.law(name="freed-memory")',), "unknown law ()"),
    ],
)
def test_a_test_without_an_item_and_without_a_known_law_is_refused(
    tmp_path: Path, marks: tuple[str, ...], complaint: str,
) -> None:
    said = outcome(tmp_path, *marks)
    assert complaint in said
    assert "1 failed" not in said


@pytest.mark.parametrize(
    ("marks", "module", "named"),
    [
        ((ITEM,), "", ()), ((LAW,), "", ("freed-memory",)), ((LAW, OTHER), "", ("freed-memory", "saved-is-what-was")),
        ((), f"pytestmark = {LAW[1:]}", ("freed-memory",)),
        # What a test carries itself stands before what its module carries.
        ((OTHER,), f"pytestmark = {LAW[1:]}", ("saved-is-what-was",)), ((ITEM,), f"pytestmark = {LAW[1:]}", ()),
    ],
)
def test_a_failure_says_the_sentences_of_its_own_laws(
    tmp_path: Path, marks: tuple[str, ...], module: str, named: tuple[str, ...],
) -> None:
    said = outcome(tmp_path, *marks, module=module)
    assert "1 failed" in said
    assert [name for name in LAWS if f"{name}: {LAWS[name]}" in said] == [name for name in LAWS if name in named]


def test_what_stands_elsewhere_needs_neither(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    outcome(tmp_path / "inside", LAW)
    (tmp_path / "test_elsewhere.py").write_text("def test_elsewhere():\n    pass\n", encoding="utf-8")
    assert "1 failed, 1 passed" in run(tmp_path).stdout


def test_every_law_of_the_table_is_judged_by_some_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in CONFTEST.parent.rglob("test_*.py"))
    assert [name for name in LAWS if f'pytest.mark.law("{name}")' not in tests] == []
