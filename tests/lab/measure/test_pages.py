"""Tests of published measurements: defects, certificates, the site, the matrix, and comparisons with kvpress."""

import pytest

pytest.importorskip("z3")

import json
import tomllib
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from conformance.paths import ROOT, SPEC
from conformance.verify.outcomes import Outcome
from conformance.verify.subject import digest_of
from lab.measure import matrix
from lab.measure.certificates import __main__ as certificates
from lab.measure.certificates import upstream
from lab.measure.matrix import (
    CONFORMS,
    DIFFERS,
    IMPLEMENTATIONS,
    METHODS,
    PAGE,
    STORE,
    cell_of,
    measured,
    unjudged,
)
from lab.measure.matrix import page as matrix_page
from lab.measure.peers.differences import OURS
from lab.measure.peers.inputs import SMALL, drawn, positions_of
from lab.measure.site import foreign, linked, main, write
from lab.trace import read_tree
from reference import policies
from spec.budget import Budget
from spec.policy import Observation

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
    actual, text = upstream.defects(), upstream.PAGE.read_text(encoding="utf-8")
    assert len({one.title for one in actual}) == len(actual) == text.count("\n### ") >= 10
    for one in actual:
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
    certificate = tomllib.loads((certificates.OUT / f"{name}.toml").read_text(encoding="utf-8"))
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    pytest.importorskip("jsonschema").validate(json.loads(json.dumps(certificate, default=str)), schema)
    subject = certificates.SUBJECTS[name]
    assert certificate["subject"]["named"] == subject.named
    if subject.kind != "command":
        file = f"{subject.named.partition(':')[0]}.py"
        assert certificate["subject"]["digest"] == digest_of({file: subject.folder / file})


def test_the_table_is_of_all_certificates() -> None:
    assert (certificates.OUT / "README.md").read_text(encoding="utf-8") == certificates.page()


def test_an_unknown_name_is_refused() -> None:
    assert certificates.main(["nobody"]) == 2


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder from which the site is built."""
    out = tmp_path_factory.mktemp("site") / "pages"
    write(out)
    return out


@pytest.mark.law("as-it-is-described")
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


@pytest.mark.law("as-it-is-described")
def test_the_navigation_names_pages(pages: Path) -> None:
    def named(entries: list[dict[str, object]]) -> list[str]:
        inner = [value for entry in entries for value in entry.values()]
        return [path for value in inner for path in (named(value) if isinstance(value, list) else [str(value)])]

    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    by_other_tools = {"docs/api.md", "docs/cli.md"}  # nox -s lab -- docs
    assert all((pages / path).is_file() for path in set(named(project["nav"])) - by_other_tools)


@pytest.mark.law("as-it-is-described")
def test_ids_become_links_but_not_in_code_links_or_headings() -> None:
    text = "### CC-A\n\nCC-A, `CC-A` and [CC-A](x.md); CC-B.\n\n```\nCC-A\n```\n"
    assert linked(text, {"CC-A": None}, "items/") == text.replace("CC-A, ", "[CC-A](items/CC-A.md), ")  # type: ignore[dict-item]


@pytest.mark.law("as-it-is-described")
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


def test_keys_are_found_at_their_positions() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 20, 4)).astype(np.float32)
    chosen = np.stack([rng.permutation(20)[:7] for _ in keys])
    some = np.stack([head[at] for head, at in zip(keys, chosen, strict=True)])
    assert positions_of(some, keys).tolist() == chosen.tolist()
    with pytest.raises(ValueError, match="head 1: a key is none"):
        positions_of(np.where(np.arange(3)[:, None, None] == 1, some + 1, some), keys)
    keys[2, 5] = keys[2, 9]
    with pytest.raises(ValueError, match="head 2: 1 of 20 keys"):
        positions_of(some, keys)


@pytest.mark.parametrize("seed", range(8))
def test_our_pyramid_on_one_layer_is_what_the_policy_keeps_there(seed: int) -> None:
    """The budgets part alone, against the whole policy on all layers."""
    inputs, (ours, _) = drawn(seed, 120), OURS["PyramidKV"]
    views, heads = dict.fromkeys(range(SMALL.layers), inputs.view), len(inputs.k)
    B = -(-inputs.kept * inputs.n // 1)
    actual = policies.retain(
        policies.pyramidkv(SMALL.window, SMALL.kernel), Budget(count=int(B)),
        Observation(inputs.n, SMALL.layers * heads, None, views),
    )
    for layer in range(SMALL.layers):
        groups = [actual.group(layer * heads + head).tolist() for head in range(heads)]
        assert ours(replace(inputs, layer=layer), frozenset()) == groups


@pytest.mark.parametrize("press", OURS)
def test_every_reading_gives_kept_sets_on_every_input(press: str) -> None:
    """Check budgets of a pyramid, also if no token is left for the last layer."""
    ours, readings = OURS[press]
    for seed in range(30):
        inputs = drawn(seed, 40)
        for some in [(), *((reading,) for reading in readings), readings]:
            for kept in ours(inputs, frozenset(some)):
                assert kept == sorted(set(kept))
                assert set(kept) <= set(range(inputs.n))


def test_inputs_at_another_ratio_are_the_same_tensors() -> None:
    inputs = drawn(3, 40)
    view, other = inputs.view, inputs.at("0.25")
    assert (other.ratio, other.kept, other.view) == ("0.25", Fraction(3, 4), view)
    assert inputs.ratio != "0.25"


CELLS = json.loads(STORE.read_text(encoding="utf-8"))


@pytest.mark.law("as-it-is-described")
def test_the_page_is_that_of_the_file() -> None:
    assert PAGE.read_text(encoding="utf-8") == matrix_page(CELLS)
    assert list(CELLS) == list(IMPLEMENTATIONS)
    assert all(list(one["cells"]) == list(METHODS) for one in CELLS.values())
    verdicts = [cell["verdict"] for one in CELLS.values() for cell in one["cells"].values()]
    assert sum(verdict in (CONFORMS, DIFFERS) for verdict in verdicts) >= 60


@pytest.mark.law("as-it-is-described")
def test_everything_is_judged() -> None:
    """Each policy, method, backend and example of an engine has a cell in the matrix."""
    assert unjudged(CELLS) == []


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(("added", "words"), [
    ("POLICIES", "policy newcomer: conformance.methods has no method"), ("METHODS", "measure with newcomer=numba"),
    ("METHODS", "method newcomer: no implementation was compared"), ("BUILT_IN", "backend newcomer: is not in"),
    ("IMPLEMENTATIONS", "newcomer: has no cell of knorm"),
])
def test_what_nothing_judges_fails_the_check(
    added: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    known = getattr(matrix, added)
    value = matrix.Implementation(("--command", "newcomer")) if added == "IMPLEMENTATIONS" else None
    monkeypatch.setattr(matrix, added, {**known, "newcomer": value})
    assert matrix.main(["check"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.law("the-proof-has-teeth")
def test_an_example_of_an_engine_must_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples" / "zig").mkdir(parents=True)
    (tmp_path / "examples" / "zig" / "engine.zig").touch()
    monkeypatch.setattr(matrix, "DOCS", tmp_path)
    assert unjudged(CELLS) == ["engine docs/examples/zig: is not in IMPLEMENTATIONS"]


@pytest.mark.law("as-it-is-described")
def test_a_cell_that_is_run_again_is_the_stored_one() -> None:
    assert measured("numpy", ["knorm"]) == {"knorm": CELLS["numpy"]["cells"]["knorm"]}


@pytest.mark.law("as-it-is-described")
def test_a_failure_is_a_cell_with_its_smallest_input_on_the_page() -> None:
    expected = "not knorm with 2 tokens, B = 1: kept set 0 of 1 holds [1] instead of [0]"
    cell = cell_of("knorm", Outcome("test[knorm]", [], [], "failed", found=f"{expected}\nit agrees with nothing"))
    assert cell == {"verdict": "differs", "as": "knorm", "smallest": expected}
    cells = {**CELLS["numpy"]["cells"], "knorm": cell}
    assert f"- numpy, knorm: {expected}" in matrix_page({**CELLS, "numpy": {**CELLS["numpy"], "cells": cells}})
