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
ISSUE = """## numpy 2

### It is wrong

```py
\"\"\"
Package: numpy 2
Prints: {prints}
Expected: another
thing.
Change: Do it.
\"\"\"

assert {holds}, "two  words"
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(upstream, "PAGE", tmp_path / "upstream.md")
    return upstream.PAGE


def test_every_issue_is_whole() -> None:
    found, text = upstream.defects(), upstream.PAGE.read_text(encoding="utf-8")
    assert len({one.title for one in found}) == len(found) == text.count("\n### ") >= 10
    for one in found:
        assert tuple(one.fields) == upstream.FIELDS, one.title
        section = text[: text.index(f"### {one.title}\n")].rpartition("\n## ")[2]
        assert section.startswith(f"{one.fields['Package']}\n"), one.title
        assert sum(bool(line.strip()) for line in one.script.splitlines()) <= LINES, one.title


@pytest.mark.parametrize(("prints", "code"), [("AssertionError: two words", 0), ("AssertionError: three", 1)])
def test_an_issue_is_there_as_long_as_it_prints_what_it_says(prints: str, code: int, page: Path) -> None:
    page.write_text(ISSUE.format(prints=prints, holds=False), encoding="utf-8")
    (one,) = upstream.defects()
    assert one.fields["Expected"] == "another thing."
    assert upstream.said(one) == "AssertionError: two words"
    assert upstream.main(["numpy"]) == code


def test_an_issue_whose_script_ends_well_is_gone(page: Path) -> None:
    page.write_text(ISSUE.format(prints="", holds=True), encoding="utf-8")
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
