"""The pages of the site show every item with all that bears its id, and need no network."""

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("z3")

from conformance.assurance.trace import read_tree
from conformance.measure.site.__main__ import foreign, main, write
from conformance.measure.site.item_pages import linked
from conformance.paths import ROOT

pytestmark = pytest.mark.law("as-it-is-described")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which the site is built."""
    out = tmp_path_factory.mktemp("site") / "pages"
    write(out)
    return out


def test_a_page_of_each_item_shows_what_the_trace_finds(pages: Path) -> None:
    trace = read_tree(ROOT)
    assert {path.stem for path in (pages / "spec/items").glob("*.md")} == {*trace.items, "README"}
    for item in trace.items:
        text = (pages / "spec/items" / f"{item}.md").read_text(encoding="utf-8")
        for place in trace.functions[item]:
            path, _, name = place.rpartition(":")
            assert f"`{path}`: `{name}`" in text
            assert f"def {name}" in text or f"class {name}" in text
        for place in trace.tests[item]:
            assert f"in `{place.rpartition(':')[0]}`" in text
        checks = text.partition("### Mutants")[2]
        readings = [line for line in checks.partition("###")[0].splitlines() if line.startswith("- ")]
        assert sum("(wrong beyond " not in line for line in readings) == len(trace.mutants[item])
        assert checks.partition("### Vectors")[2].count(",") == len(trace.vectors[item])


def test_the_navigation_names_pages(pages: Path) -> None:
    def named(entries: list[dict[str, object]]) -> list[str]:
        inner = [value for entry in entries for value in entry.values()]
        return [path for value in inner for path in (named(value) if isinstance(value, list) else [str(value)])]

    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    by_other_tools = {"docs/api.md", "docs/cli.md"}  # nox -s lab -- docs
    assert all((pages / path).is_file() for path in set(named(project["nav"])) - by_other_tools)


def test_ids_become_links_but_not_in_code_links_or_headings() -> None:
    text = "### CC-A\n\nCC-A, `CC-A` and [CC-A](x.md); CC-B.\n\n```\nCC-A\n```\n"
    assert linked(text, {"CC-A": None}, "items/") == text.replace("CC-A, ", "[CC-A](items/CC-A.md), ")  # type: ignore[dict-item]


@pytest.mark.law("the-proof-has-teeth")
def test_a_page_that_fetches_is_found(tmp_path: Path) -> None:
    page = tmp_path / "spec" / "page.html"
    page.parent.mkdir()
    page.write_text('<a href="https://example.org">a link</a><script src="./own.js"></script>', encoding="utf-8")
    assert main(["check", str(tmp_path)]) == 0
    page.write_text('<script async src="https://example.org/x.js"></script><link rel="x" href="http://e.org/x.css">',
                    encoding="utf-8")
    assert list(foreign(tmp_path)) == [
        "spec/page.html fetches https://example.org/x.js", "spec/page.html fetches http://e.org/x.css",
    ]
    assert main(["check", str(tmp_path)]) == 1
