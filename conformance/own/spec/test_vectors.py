"""The files of vectors fit their schema, which refuses what it forbids; every item has a vector."""

import json
from collections import Counter
from pkgutil import resolve_name
from typing import Any

import pytest

from conformance.items import items_of
from conformance.paths import SPEC
from conformance.vectors import files

SCHEMA = json.loads((files.HOME / "schema.json").read_text(encoding="utf-8"))
PAGES = [
    path.read_text(encoding="utf-8")
    for pattern in (
        "crystalcache*.md", "policies.md", "injection.md", "nestedkv.md", "diversity.md", "triattention.md"
    )
    for path in SPEC.glob(pattern)
]


@pytest.fixture(scope="module")
def validator() -> Any:
    return pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("stage", files.stages())
def test_a_file_fits_the_schema(validator: Any, stage: str) -> None:
    validator.validate(files.stored(stage))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["testGroups", 0, "tests", 0, "tcId"], 0),
        (["testGroups", 0, "tests", 0, "flags"], []),
        (["testGroups", 0, "tests", 0, "inputs", "L"], 0.5),
        (["testGroups", 0, "tests", 0, "result"], "acceptable"),
        (["testGroups", 0, "tests", 0, "items"], ["Eq. 4"]),
        (["testGroups", 0, "operation"], "memory"),
        (["testGroups", 1, "tests", 17, "flags"], ["Plain"]),
        (["testGroups", 1, "tests", 17, "expected"], {"tokens": 1}),
        (["notes", "Plain", "bugType"], "BUG"),
    ],
)
def test_the_schema_refuses_what_it_forbids(validator: Any, path: list[str | int], value: object) -> None:
    file = files.stored("budgets")
    where: Any = file
    for step in path[:-1]:
        where = where[step]
    assert path[-1] in where or isinstance(path[-1], int)
    where[path[-1]] = value
    assert not validator.is_valid(file)


def test_every_item_has_a_vector_and_a_flag_has_one_meaning() -> None:
    tests = [test for _, _, test in files.published()]
    assert {item for test in tests for item in test["items"]} == {
        item for page in PAGES for item, _ in items_of(page)
    }
    stored = [files.stored(stage)["notes"] for stage in files.stages()]
    meanings = {(flag, *note.values()) for notes in stored for flag, note in notes.items()}
    assert Counter(flag for flag, *_ in meanings) == Counter({flag for test in tests for flag in test["flags"]})


def test_what_confirmed_a_vector_is_there() -> None:
    """The plain Python that a vector names, or the text of an item."""
    named = {name.strip() for _, _, test in files.published() for name in test["confirmedBy"].split(",")}
    functions = {name for name in named if not name.startswith("the MUST text of ")}
    for name in functions:
        resolve_name(name)
    assert all(name.startswith("conformance.") for name in functions)
