"""spec/implementing.md agrees with code and vectors: parameters, bounds, inputs, families and public functions."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks.vector_checks import BOUNDED
from conformance.paths import ROOT, SPEC
from conformance.vectors.subject import STAGES
from lab.implementer_tables import DATA, EXPORTS, PAGE, PAGES, exports, for_programs, operations
from lab.implementer_tables import FAMILIES as PROTOCOLS
from lab.pages import BLOCK, fill
from lab.trace import read_tree, stage_items
from lab.vector_writer.expected import OPERATIONS
from spec import backend as protocols
from spec.errors import SpecError
from spec.parameters import ESSAY, NESTEDKV, PAPER, TINY, CrystalCacheParameters, NestedKVParameters

TEXT = PAGE.read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table whose header begins with `heading`."""
    below = TEXT[TEXT.index(f"\n| {heading} |") :].strip().split("\n\n")[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_code_and_the_vectors(page: Path) -> None:
    """Check the tables. After a change of a parameter, bound, operation or input of a vector, run the module again."""
    text, tables = page.read_text(encoding="utf-8"), PAGES[page]
    assert fill(text, lambda name: tables[name]()) == text
    assert {mark[2] for mark in BLOCK.finditer(text)} == tables.keys()


def test_the_makers_of_policies_are_exported() -> None:
    assert exports() == EXPORTS.read_text(encoding="utf-8")


def test_programs_read_the_same() -> None:
    """Check that the JSON is up to date, has the paper's parameters, and has a bound for each bounded result."""
    assert DATA.read_text(encoding="utf-8") == for_programs()
    held = json.loads(for_programs())
    paper = {name: row["PAPER"] for name, row in held["parameters"]["crystalcache"].items()}
    assert CrystalCacheParameters(**paper) == PAPER
    for operation, tests in operations().items():
        named = {name.strip("?") for name in held["operations"][operation]["inputs"]}
        inputs = named | held["state"].keys() if "*state*" in named else named
        assert all(set(test["inputs"]) <= inputs for test in tests)
        assert bounded().get(operation, set()) <= held["operations"][operation]["bounds"].keys()


@pytest.mark.spec("CC-PREFILL")
def test_table_14_is_read_from_the_page_alone() -> None:
    """Parse the table without kvspec's code. The page must give the three profiles."""
    table = [line for line in rows("Parameter | PAPER") if line]
    assert [row[0].strip("`") for row in table] == [field.name for field in fields(CrystalCacheParameters)]
    for column, profile in enumerate((PAPER, ESSAY, TINY), 1):
        given = {row[0].strip("`"): value_of(row[column]) for row in table}
        assert CrystalCacheParameters(**given) == profile


def value_of(cell: str) -> Any:
    if cell.startswith("`"):
        return cell.strip('`"')
    return int(cell) if cell.isdecimal() else float(cell)


@pytest.mark.spec("NK-SCORE")
def test_the_values_of_nestedkv_are_on_the_page() -> None:
    for name, value, *_ in rows("Parameter | Value"):
        assert value == str(getattr(NESTEDKV, name.strip("`"))).strip("()")


@pytest.mark.parametrize(
    ("field", "value"),
    [("w0", None), ("w0", (1.0, 1.0)), ("w0", (1.0, 1.0, "1")), ("beta", "3"), ("beta", True), ("p", None),
     ("alpha_s", float("nan")), ("W", 2.0)],
)
def test_a_value_of_another_kind_is_refused(field: str, value: object) -> None:
    """Check that a record of parameters checks its fields."""
    with pytest.raises(SpecError) as caught:
        NestedKVParameters(**{field: value})  # type: ignore[arg-type]
    assert caught.value.argument == field


def bounded() -> Mapping[str, set[str]]:
    """Return the bounded results of each operation, from the vectors."""
    return {
        operation: actual for operation, tests in operations().items()
        if (actual := {name for test in tests for name in test.get("bounded", [])})
    }


def test_every_bounded_result_has_a_bound() -> None:
    """Check that each result with a tolerance has a bound, and that each bound belongs to an existing result."""
    for operation, results in bounded().items():
        assert results <= set(BOUNDED[operation].results), operation
    for operation, bound in BOUNDED.items():
        names = {name for test in operations()[operation] for name in test["expected"]}
        assert len(set(bound.results)) == len(bound.results), operation
        assert set(bound.results) <= names, operation


FORMULAS: Sequence[tuple[str, Callable[..., float], Callable[..., Mapping[str, float]]]] = [
    ("inverse_key_norms", lambda d, H, r: tolerances.key_norm_error(H, d), lambda d, H, r: {"d": d, "H_kv": H}),
    ("decay", lambda d, H, r: tolerances.decay_radius(np.array([0.3 * d]))[0], lambda d, H, r: {"x": 0.3 * d}),
    ("IN-HALF-SPLIT", lambda d, H, r: tolerances.turn_radius(np.array([3.0 * d, 4.0 * d]))[0],
     lambda d, H, r: {"x": 5.0 * d}),
    ("IN-KEY-COSINE", lambda d, H, r: tolerances.key_cosine_error(d), lambda d, H, r: {"d": d}),
    ("IN-WILSON", lambda d, H, r: tolerances.interval_radius(1), lambda d, H, r: {}),
    ("IN-BOOTSTRAP", lambda d, H, r: tolerances.interval_radius(r * d), lambda d, H, r: {"r": r, "n": d}),
    ("CC-ROW-NORM", lambda d, H, r: 2 * tolerances.gamma(d + 9, "float64"), lambda d, H, r: {"Q": d}),
    ("CC-SALIENCE", lambda d, H, r: tolerances.salience_radius(np.ones((H, d, d)), [0.0] * d, r, 0.1, "float64")[0],
     lambda d, H, r: {"Q": d, "k_heads": r, "x": d * min(r, H)}),
    ("CC-MEAN-SALIENCE",
     lambda d, H, r: tolerances.salience_radius(np.ones((H, d, d)), [0.0] * d, r, 0.1, "float64", "mean")[0],
     lambda d, H, r: {"Q": d, "k_heads": r, "x": d}),
    ("TA-SCORE", lambda d, H, r: tolerances.SCORE_UNITS * 2.0**-53 * d, lambda d, H, r: {"x": d}),
]


@pytest.mark.parametrize(("operation", "judged_by", "names"), FORMULAS, ids=[formula[0] for formula in FORMULAS])
def test_a_formula_is_what_the_suite_computes(
    operation: str, judged_by: Callable[..., float], names: Callable[..., Mapping[str, float]],
) -> None:
    """A space between two factors means multiplication."""
    (says,) = BOUNDED[operation].says.values()
    (formula,) = re.findall(r"`(.+?)`", says)[:1]
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula).replace("^", "**")
    known = {"u": 2.0**-53, "gamma": lambda k: tolerances.gamma(k, "float64")}
    for d, H, r in ((4, 1, 1), (64, 8, 3), (9, 2, 3)):
        stated = eval(code, {**known, **names(d, H, r)})
        assert tolerances.scores_agree([stated], [judged_by(d, H, r)])


def families() -> Mapping[tuple[str, str], list[str]]:
    return {(family, stage.strip("`")): items.split(", ") for family, stage, items in rows("Family | Stage")}


def test_every_stage_of_the_protocols_has_its_row() -> None:
    stages = {
        (family, name) for family, protocol in PROTOCOLS.items() for name in vars(protocol)
        if callable(getattr(protocol, name)) and not name.startswith("_")
    }
    assert families().keys() == stages
    assert PROTOCOLS.keys() == set(protocols.FAMILIES)


def test_the_rows_hold_the_items_that_a_backend_must_serve() -> None:
    """Compare the rows with the items of the Numba functions, because Numba has every family.

    The trace requires these items.
    """
    functions = read_tree(ROOT).functions
    numba = {item for item, places in functions.items() if any("numba_cpu" in place for place in places)}
    assert {item for items in families().values() for item in items} == numba == stage_items(TEXT)


@pytest.mark.parametrize("stage", STAGES)
def test_the_vectors_of_a_stage_check_items_of_its_row(stage: str) -> None:
    """A vector may check fewer items, or the entry points that the stage composes (prefill, decode_step, extend)."""
    listed = [items for (_, name), items in families().items() if name == stage]
    if stage not in ("prefill", "decode_step", "extend"):
        assert set(OPERATIONS[stage].items) <= {item for items in listed for item in items}
        assert listed


def test_optional_forms_say_who_must_serve_them() -> None:
    """Check the essay's page: every item of a row names its family and stage in its MUST text."""
    page = (SPEC / "crystalcache_essay.md").read_text(encoding="utf-8")
    for at, end in pairwise([*[m.start() for m in re.finditer(r"^### ", page, re.MULTILINE)], len(page)]):
        item, must = page[at + 4 :].split("\n")[0], page[at:end].partition("**Rationale**")[0]
        served = {(family, stage) for (family, stage), items in families().items() if item in items}
        if item != "CC-TIER-COUNT":  # CC-TIER-COUNT is a part of CC-TIERS.
            assert {(f, s) for f, s in PROTOCOLS_STAGES if f"`{s}` of every" in must and f"`{f}`" in must} == served


PROTOCOLS_STAGES = [
    (family, name) for family, protocol in PROTOCOLS.items() for name in vars(protocol) if not name.startswith("_")
]


def test_the_stages_that_refuse_are_those_that_the_page_names() -> None:
    """Check that the page names exactly the stages whose protocol has `Raises`. The suite tests their errors."""
    (named,) = re.findall(r"Four stages are called without a door.*?\.\s", TEXT.replace("\n", " "))
    raising = {
        name for protocol in PROTOCOLS.values() for name, stage in vars(protocol).items()
        if "Raises:" in (getattr(stage, "__doc__", "") or "")
    }
    assert raising == set(re.findall(r"`(\w+)`", named))
    assert len(raising) == 4
