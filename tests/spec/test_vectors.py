"""Tests that the vectors match their schema and the reference. Any reader gets the same arrays from compact values."""

import copy
import json
import random
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from conformance.checks.vector_checks import BOUNDED, cases, problems
from conformance.items import items_of
from conformance.methods import brutes
from conformance.methods.brute import Brute, from_vector
from conformance.paths import SPEC
from conformance.strategies.numbers import Numbers
from conformance.vectors import files
from conformance.vectors.codec import expanded, mismatches, summary
from conformance.vectors.files import decoded
from conformance.vectors.subject import STAGES
from lab.item_vectors import ITEMS
from lab.vector_writer.expected import OPERATIONS
from lab.vector_writer.expected_large import generate, unsure
from spec.parameters import CrystalCacheParameters

SCHEMA = json.loads((files.HOME / "schema.json").read_text(encoding="utf-8"))
PAGES = [
    path.read_text(encoding="utf-8")
    for pattern in (
        "crystalcache*.md", "policies.md", "injection.md", "nestedkv.md", "diversity.md", "triattention.md",
        "positions.md", "composition.md",
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
    """Check the Python functions that vectors name, and the texts of items."""
    named = {name.strip() for _, _, test in files.published() for name in test["confirmedBy"].split(",")}
    functions = {name for name in named if not name.startswith("the MUST text of ")}
    for name in functions:
        resolve_name(name)
    assert all(name.startswith(("conformance.", "lab.")) for name in functions)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("group", "test"), cases(ITEMS))
def test_the_reference_holds_a_vector_of_an_item(group: Any, test: Any) -> None:
    assert problems(group, test, ITEMS[group["operation"]], BOUNDED, "float64") == []


def test_every_operation_has_vectors() -> None:
    """Check that no operation is missing because its file of vectors is missing."""
    assert {group["operation"] for _, group, _ in files.published()} == ITEMS.keys() | STAGES.keys()


PAGE = (files.HOME / "README.md").read_text(encoding="utf-8")
READER = Path(__file__).with_name("compact_values.js")
LARGE = {(stage, test["tcId"]): test for stage, _, test in files.published() if "made" in test}
SEEDS = [0, 1, 2**64 - 1]


def word(seed: int, t: int) -> int:
    """Return a word of the page's generator in plain integers, with the constants of the page."""
    first, second, step = (int(x, 16) for x in re.findall(r"\* (0x[0-9A-F]{16})", PAGE))
    z = seed + t * step & 2**64 - 1
    z = (z ^ z >> 30) * first & 2**64 - 1
    z = (z ^ z >> 27) * second & 2**64 - 1
    return z ^ z >> 31


def digest(words: list[int]) -> str:
    return f"{sum(word(x, t) for t, x in enumerate(words, 1)) % 2**64:016x}"


def test_the_page_shows_the_first_words() -> None:
    """Check a row for each seed. For seed 0, published implementations of SplitMix64 give the same words."""
    rows = re.findall(r"^\| (\d) \| ([0-9a-f ]+(?: \| [0-9a-f]{16}){3}) \|$", PAGE, re.MULTILINE)
    assert [int(seed) for seed, _ in rows] == [0, 1]
    for seed, cells in rows:
        assert [int(cell, 16) for cell in cells.split(" | ")] == [word(int(seed), t) for t in range(1, 5)]
    assert word(0, 1) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_those_of_the_page(seed: int) -> None:
    w = [word(seed, t) for t in range(1, 301)]
    assert Numbers(seed).words(300).tolist() == w
    assert Numbers(seed).integers(-3, 7, 300).tolist() == [x % 10 - 3 for x in w]
    assert Numbers(seed).integers(-(2**63), 2**63 - 1, 300).tolist() == [x % (2**64 - 1) - 2**63 for x in w]
    assert Numbers(seed).fractions(300).tolist() == [(x >> 11) / 2**53 for x in w]
    assert Numbers(seed).permutation(300).tolist() == sorted(range(300), key=lambda at: w[at])
    short = Numbers(seed).fractions(300, 24)
    assert short.tolist() == [(x >> 40) / 2**24 for x in w] == short.astype(np.float32).tolist()


def test_the_examples_of_the_page() -> None:
    assert f"gives {', '.join(str(word(0, t) % 10 - 3) for t in range(1, 5))};" in PAGE
    for bits in (53, 24):
        assert ", ".join(((word(0, t) >> 64 - bits) / 2**bits).hex() for t in (1, 2)) in PAGE
    order = sorted(range(8), key=lambda at: word(1, at + 1))
    assert f"seed 1 gives {', '.join(map(str, order))}." in PAGE
    for words, given in (([1, 2, 3], "1, 2, 3 have"), ([0x3FE << 52, 0x7FF8 << 48], "0.5, NaN have"),
                         ([2**19, 2**63], "with 20 bits\n")):
        assert digest(words) in PAGE[PAGE.index(given) : PAGE.index(given) + 60]


def test_another_language_makes_the_same_inputs() -> None:
    """Compare with the reader in JavaScript, which was written from the page."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    paths = {str(files.path_of(stage)): stage for stage in files.stages()}
    printed = subprocess.run([node, str(READER), *paths], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
    assert {(paths[path], tcId): arrays for path, tcId, arrays in lines} == {
        name: test["made"] for name, test in LARGE.items()
    }


@pytest.mark.parametrize(
    "name", [name for name, test in LARGE.items() if {"intra", "cross", "offsets"} & test["inputs"].keys()], ids=str
)
def test_inputs_are_valid(name: tuple[str, int]) -> None:
    """Check inputs like those of S1: no token twice, no token as its own neighbour, falling weights.

    Offsets end at the ends of the lists.
    """
    inputs = expanded(decoded(LARGE[name]["inputs"]))
    for side in {"intra", "cross"} & inputs.keys():
        index, weight = np.array(inputs[side]), np.array(inputs[f"{side}_weight"])
        positions = np.arange(len(index))[:, None] + inputs["start"]
        assert not (index == positions).any()
        placed = np.sort(index, axis=1)
        assert not ((placed[:, 1:] == placed[:, :-1]) & (placed[:, 1:] >= 0)).any()
        assert ((weight > 0) == (index >= 0)).all()
        assert (np.diff(weight, axis=1) <= 0).all()
        assert ((index < positions + (side == "intra") * len(index)) | (index < 0)).all()
    if "offsets" in inputs:
        tokens = next(len(inputs[side]) for side in ("intra", "impact", "inverse_norms") if side in inputs)
        assert inputs["offsets"][-1] - inputs["offsets"][0] == tokens


def test_every_form_is_used_and_on_the_page() -> None:
    forms = set(re.findall(r'"form": "(\w+)"', json.dumps([test["inputs"] for test in LARGE.values()])))
    # The header of the table is included.
    assert {"form", *forms} == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_forms_by_hand() -> None:
    def of(form: str, **members: Any) -> Any:
        return expanded({"x": {"form": form, **members}})["x"]

    ones = {"form": "runs", "of": [[1, 3]]}
    assert of("runs", of=[[[4, 5], 2], [[6, 7], 1]]) == [[4, 5], [4, 5], [6, 7]]
    assert of("sums", start="9007199254740993", of=ones) == [2**53 + 1 + at for at in range(4)]
    assert of("joined", axis=1, of=[[ones, ones], [[7], [8]]]) == [[1, 1, 1, 7], [1, 1, 1, 8]]
    assert of("signs", bits=3, scale=2.0, of=[6, 1]) == [[-2.0, 2.0, 2.0], [2.0, -2.0, -2.0]]
    picked = [word(5, t) % 3 for t in range(1, 5)]
    assert of("choice", seed=5, shape=[2, 2], of=[9, 8, 7]) == [[9 - x for x in picked[at : at + 2]] for at in (0, 2)]


@pytest.mark.parametrize("earlier", [False, True])
def test_neighbours_by_hand(earlier: bool) -> None:
    steps, n, C = [1, -1, -4, 6, -7], 11, 4
    inputs: dict[str, Any] = {
        "lists": {"form": "neighbours", "seed": 3, "shape": [n, 2], "steps": steps, "C": C, "start": 50,
                  "earlier": earlier},
        "weights": {"form": "falling", "seed": 4, "along": "lists", "bits": 5},
    }
    actual = expanded(inputs)
    for i in range(n):
        first = word(3, i + 1) % 5
        tried = [i + (steps + steps)[first + at] for at in range(5)]
        right = [50 + j for j in tried if 0 <= j < n and (j // C < i // C if earlier else j // C == i // C)][:2]
        assert actual["lists"][i] == right + [-1] * (2 - len(right))
        drawn = sorted(((word(4, 2 * i + at) >> 59) / 32 for at in (1, 2)), reverse=True)
        assert actual["weights"][i] == drawn[: len(right)] + [0.0] * (2 - len(right))


def test_a_summary_shows_where_a_result_differs() -> None:
    values = np.arange(5_000)
    want = summary(values)
    assert want["block"] * 16 >= 5_000 > want["block"] * 8
    assert want["digests"][2] == digest(values[2 * want["block"] : 3 * want["block"]].tolist())
    assert not list(mismatches("kept", values.tolist(), want))
    for wrong in (2_100, 4_999):
        other = values.copy()
        other[wrong] += 1
        (problem,) = mismatches("kept", other.tolist(), want)
        at = wrong // want["block"] * want["block"]
        assert f"kept differs between its values {at} and {at + want['block']}" in problem
    swapped = values.copy()
    swapped[[7, 8]] = swapped[[8, 7]]
    assert list(mismatches("kept", swapped.tolist(), want))
    assert "of shape [4999]" in " ".join(mismatches("kept", values[:-1].tolist(), want))
    assert list(mismatches("kept", values.astype(np.float64).tolist(), want)) == ["kept is of float64, not of int64"]


@pytest.mark.parametrize("bits", [None, 20])
def test_a_digest_reads_every_bit_or_the_grid(bits: int | None) -> None:
    values = np.array([0.1, np.nan, 0.0, 3.0])
    want = summary(values, bits)
    nearly = values.copy()
    nearly[0] = np.nextafter(0.1, 1)
    assert bool(list(mismatches("M", nearly, want))) == (bits is None)
    for at, wrong in ((0, 0.1 + 2.0**-20), (1, 0.0), (2, np.nan), (3, -3.0)):
        other = values.copy()
        other[at] = wrong
        assert list(mismatches("M", other, want))


def test_a_value_at_a_step_is_unsure() -> None:
    half = 0.25 + 2.0**-21
    values = [half, half + 2.0**-41, half + 2.0**-38, 0.25, np.nan, 64 + 2.0**-21 + 2.0**-35]
    assert unsure(values, 20) == 3


@pytest.mark.parametrize("name", [name for name, test in LARGE.items() if "bounded" in test], ids=str)
def test_bounded_results_are_summaries_on_a_grid(name: tuple[str, int]) -> None:
    test = LARGE[name]
    assert {x for x in test["expected"] if "bits" in str(test["expected"][x])} == set(test["bounded"])


def changed(value: Any) -> Any:
    """Return each number times 1 + x with |x| <= 2^-17. Equal rows stay equal."""
    if isinstance(value[0], list):
        return [changed(row) for row in value]
    x = random.Random(repr(value))
    return [number * (1 + 2.0**-17 * x.uniform(-1, 1)) for number in value]


@pytest.mark.nightly
@pytest.mark.parametrize("item", sorted({group["operation"] for _, group, test in files.published() if "made" in test}
                                        & {brute.item for brute in brutes()} - {"PO-KNORM", "PO-VASE"}))
def test_kept_sets_do_not_depend_on_rounding(item: str) -> None:
    """Two methods are excluded, because their norms and ranges tie exactly between different rows."""
    tests = [test for _, group, test in files.published() if group["operation"] == item and "made" in test]
    for test in (test for test in tests if test["result"] == "valid"):
        inputs = expanded(decoded(test["inputs"]))
        given = {name: changed(x) if name in test["made"] or name.startswith("repeat") else x
                 for name, x in inputs.items()}
        kept = OPERATIONS[item].results(given, CrystalCacheParameters())["kept"]
        assert kept == test["expected"]["kept"], test["tcId"]


READINGS = [
    (brute, {name: other}) for brute in brutes() if brute.item.startswith("PO-")
    for name, (_, *others) in brute.readings.items() for other in others
    if (brute.name, name) != ("vatp", "decode")  # no vector has decode steps of VATP
]


@pytest.mark.parametrize(("brute", "reading"), READINGS, ids=[f"{one.name}-{reading}" for one, reading in READINGS])
def test_a_vector_tells_each_published_reading(brute: Brute, reading: dict[str, str]) -> None:
    """Check that each reading that `kvspec verify --as` accepts by name keeps different tokens."""
    tests = [test for _, group, test in files.published() if group["operation"] == brute.item]
    given = [(from_vector(expanded(decoded(test["inputs"]))), test["expected"].get("kept")) for test in tests]
    assert any(brute.kept(inputs, B, **constants, **reading) != kept for (inputs, B, constants), kept in given)


def test_made_is_the_digest_of_what_is_given() -> None:
    inputs = {"x": {"form": "choice", "seed": 7, "shape": [3], "of": [False, True, "18"]}, "B": 5}
    assert generate({**inputs, "x": {**inputs["x"], "of": [4, -1, "18"]}}) == {  # type: ignore[dict-item]
        "x": [[3], digest([[4, 2**64 - 1, 18][word(7, t) % 3] for t in (1, 2, 3)])]
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["inputs", "D", "form"], "noise"),
        (["inputs", "D", "low"], 1),
        (["inputs", "D", "bits"], 0.5),
        (["made", "D"], [[600]]),
        (["expected", "kept", "digests", 0], "12"),
        (["expected", "kept", "length"], 3),
    ],
)
def test_the_schema_knows_compact_values(path: list[str | int], value: object) -> None:
    schema = json.loads((files.HOME / "schema.json").read_text(encoding="utf-8"))
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    file = files.stored("dissolution")
    file["testGroups"] = [{
        **copy.deepcopy(file["testGroups"][0]), "tests": [copy.deepcopy(LARGE["dissolution", 501])],
    }]
    assert validator.is_valid(file)
    where = file["testGroups"][0]["tests"][0]
    for step in path[:-1]:
        where = where[step]
    where[path[-1]] = value
    assert not validator.is_valid(file)
