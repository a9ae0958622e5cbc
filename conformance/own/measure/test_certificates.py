"""Issues that can be filed, and certificates of others, are what their files say."""

import json
import tomllib
from pathlib import Path

import pytest

from conformance.measure.certificates import __main__ as certificates
from conformance.measure.certificates import upstream
from conformance.paths import SPEC
from conformance.verify.subject import digest_of

LINES = 15
ISSUE = """\"\"\"It is wrong

Package: numpy 2
Prints: {prints}
Expected: another
thing.
Change: Do it.
\"\"\"

assert False, "two  words"
"""


def test_every_issue_is_whole_and_on_the_page() -> None:
    found = upstream.defects()
    assert len({one.title for one in found}) == len(found) >= 10
    for one in found:
        assert tuple(one.fields) == upstream.FIELDS, one.name
        assert one.name.startswith(f"{one.package}_"), one.name
        assert sum(bool(line.strip()) for line in one.script.splitlines()) <= LINES, one.name
    assert upstream.PAGE.read_text(encoding="utf-8") == upstream.page()


@pytest.mark.parametrize(("prints", "code"), [("AssertionError: two words", 0), ("AssertionError: three", 1)])
def test_an_issue_is_there_as_long_as_it_prints_what_it_says(
    prints: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "FOLDER", tmp_path)
    (tmp_path / "numpy_issue.py").write_text(ISSUE.format(prints=prints), encoding="utf-8")
    (one,) = upstream.defects()
    assert one.fields["Expected"] == "another thing."
    assert upstream.said(one) == "AssertionError: two words"
    assert upstream.main(["numpy"]) == code


def test_an_issue_whose_script_ends_well_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "FOLDER", tmp_path)
    (tmp_path / "numpy_issue.py").write_text(ISSUE.format(prints="").replace("assert False", "assert True"), "utf-8")
    assert upstream.said(upstream.defects()[0]) == ""
    assert upstream.main(["numpy"]) == 1


@pytest.mark.parametrize("name", certificates.SUBJECTS)
def test_a_certificate_is_about_the_files_that_are_here(name: str) -> None:
    made = tomllib.loads((certificates.OUT / f"{name}.toml").read_text(encoding="utf-8"))
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    pytest.importorskip("jsonschema").validate(json.loads(json.dumps(made, default=str)), schema)
    subject = certificates.SUBJECTS[name]
    assert made["subject"]["named"] == subject.named
    if subject.kind != "command":
        file = f"{subject.named.partition(':')[0]}.py"
        assert made["subject"]["digest"] == digest_of({file: subject.folder / file})


def test_the_table_is_of_all_certificates() -> None:
    assert (certificates.OUT / "README.md").read_text(encoding="utf-8") == certificates.page()


def test_an_unknown_name_is_refused() -> None:
    assert certificates.main(["nobody"]) == 2
