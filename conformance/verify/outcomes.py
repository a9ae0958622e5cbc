"""Verdicts of tests, items and vectors, and the texts of the rows of a certificate."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from conformance.checks.promises import PROPERTIES
from conformance.items import items_of
from conformance.methods.method import METHOD_ITEMS
from conformance.methods.method import METHODS as COMPARED
from conformance.paths import SPEC

COMPOSED = "compositions"
"""Family of items that belong to no stage family.

Compositions are the same code for every engine and call the stages of the engine.
"""

METHODS, PROMISES = "methods", "promises"
"""Family of the items of published methods, and family of the properties of a policy."""
EVICTION = "say behind a compacted cache what the model says where the evicted tokens are masked."

SERVER = {
    "server: size": "keep no more tokens than the budget.",
    "server: masking": "answer as the model with the full cache answers if the evicted tokens are masked.",
    "server: eviction": "answer otherwise than the model with the full cache.",
    "server: policy": "keep the tokens that the stated policy keeps.",
    "server: commitment": "fix the kept set before the first answer token that depends on the set.",
}
"""Requirements for a server, from spec/witness.md."""

_ROW = re.compile(r"^\| (\w+) \| `\w+` \| ((?:[A-Z]+-[A-Z0-9-]+(?:, )?)+) \|$", re.MULTILINE)
_FORMULA = re.compile(r"\*\*Formula\*\*(.*?)\n\n", re.DOTALL)
_MUST = re.compile(r"\*\*MUST\*\*(.*?)(?=\n\*\*|\Z)", re.DOTALL)
_SENTENCES = re.compile(r"(?<=[.;:])\s+(?=[A-Z`])")
_LONGEST = 240
_REFUSAL = re.compile(r"refus|SpecError")
_NOT_REFUSED = re.compile(r"refus|DID NOT RAISE")
"""Patterns for sentences that demand an error, and for tests of errors by name or failure text."""


@cache
def families() -> dict[str, list[str]]:
    """Return the items of each stage family, from the table in spec/implementing.md."""
    result: dict[str, list[str]] = {}
    for family, names in _ROW.findall((SPEC / "implementing.md").read_text(encoding="utf-8")):
        items = result.setdefault(family, [])
        items += [name for name in names.split(", ") if name not in items]
    return result


@cache
def _places() -> dict[str, int]:
    return {item: at for at, item in enumerate(dict.fromkeys(item for row in families().values() for item in row))}


def place(item: str) -> tuple[int, str]:
    """Return a sort key for items: the order of the table of stages, then all other items by name."""
    return _places().get(item, len(_places())), item


def families_of(item: str) -> list[str]:
    """Return the families of an item.

    These are the stage families that contain the item. The family of a property is `promises`. The row `server: size`
    belongs to the family before the colon. All other items belong to `methods` or `compositions`.
    """
    if item in PROPERTIES:
        return [PROMISES]
    family, of_a_cache, _ = item.partition(": ")
    if of_a_cache:
        return [family]
    published = item in METHOD_ITEMS and item != COMPARED["crystalcache"].item  # CrystalCache is composed of stages
    return [name for name, items in families().items() if item in items] or [METHODS if published else COMPOSED]


@cache
def _texts() -> dict[str, str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(SPEC.glob("*.md"))]
    return {name: text for page in pages for name, text in items_of(page)}


def formula(item: str) -> str:
    """Return the equation of an item on one line, or "" if the item has none."""
    match = _FORMULA.search(_texts().get(item, ""))
    return " ".join(match[1].split()) if match else ""


def must(item: str, row: Mapping[str, Any] | None = None) -> str:
    """Return the requirement of a row on one line.

    For an item, these are its first sentences. If a test of an error fails, these are the sentences that demand an
    error.
    """
    if item in PROPERTIES or ": " in item:
        return PROPERTIES[item].says if item in PROPERTIES else SERVER.get(item, EVICTION)
    result = [_SENTENCES.split(" ".join(text.split())) for text in _MUST.findall(_texts().get(item, ""))]
    if not result:
        return ""
    if row and _NOT_REFUSED.search(f"{row.get('test')} {row.get('found')}"):
        refusals = [sentence for sentences in result for sentence in sentences if _REFUSAL.search(sentence)]
        result = [refusals, *result] if refusals else result
    text = " ".join(result[0][:2])
    return text if len(text) <= _LONGEST else result[0][0][:_LONGEST]


# States of tests, items and vectors. The state of an item is the first of STATES that one of its tests has.
ABSTAINED = ("not served", "not promised", "N/A")
"""States of rows without a verdict.

The cache does not support the input, or the policy does not promise the property.
"""
STATES = ("failed", "excepted", *ABSTAINED, "passed", "not offered", "not run")
WORDS = {"failed": "fail", "passed": "pass"}

_VECTOR = re.compile(r"test_vectors\.py::test_the_backend_holds_a_vector_of_a_stage\[(.+)\]")


@dataclass(frozen=True)
class Outcome:
    """Result of one test, with the items of the test."""

    test: str
    items: list[str]
    exceptions: list[str]
    state: str
    examples: int = 0
    reason: str = ""
    input: str = ""
    found: str = ""
    answer_tokens: int = 0
    """Number of answer tokens of a server that the test covers."""

    @property
    def vector(self) -> str:
        """Return the id of the vector that the test compares, or ""."""
        match = _VECTOR.fullmatch(self.test)
        return match[1] if match else ""


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of a run. `name` is the name that the engine reports."""

    name: str
    precision: str
    families: list[str]
    items: dict[str, str]
    vectors: dict[str, str]
    unneeded: list[str]
    outcomes: list[Outcome]
    smallest: dict[str, Outcome] = field(default_factory=dict)
    scored: list[str] = field(default_factory=list)
    """Methods whose scores were compared in addition to the kept sets."""
    at_once: int = 0
    """Maximum number of requests that a server ran at the same time."""
    written_for: str = ""
    """Version of the specification that an engine reports in its hello message."""

    @property
    def failing(self) -> list[str]:
        """Return the failing items, the most specific failures first.

        Items are sorted by the number of items that their smallest failing test covers, then by the number of failing
        tests, descending. Items with the same failing tests keep the order in which the test names the items.
        """
        times = Counter(item for one in self.outcomes if one.state == "failed" for item in one.items)
        few = {item: (len(one.items), -times[item], one.items.index(item), item) for item, one in self.smallest.items()}
        return sorted(few, key=few.__getitem__)

    @property
    def missing(self) -> list[str]:
        """Return the items of the offered families without a verdict, or with a test that did not run.

        Failing items are left out. A method has several tests, and `--fail-fast` runs no test after a failure.
        """
        skipped = {item for one in self.outcomes if one.state == "not run" for item in one.items} - {*self.smallest}
        return [item for item in self._offered if item in skipped or self.items[item] in ("not run", "not offered")]

    @property
    def unproven(self) -> list[str]:
        """Return the items of the offered families that are excepted and have no passed test."""
        proven = {item for one in self.outcomes if one.state == "passed" for item in one.items}
        return [item for item in self._offered if self.items[item] == "excepted" and item not in proven]

    @property
    def _offered(self) -> list[str]:
        return sorted(item for item in self.items if not set(self.families).isdisjoint(families_of(item)))

    @property
    def unfailing(self) -> bool:
        """Return True if no test fails and every item of the offered families has a verdict."""
        return bool(self.families) and not self.missing and all(one.state != "failed" for one in self.outcomes)

    @property
    def certified(self) -> bool:
        """Return True if the run is `unfailing` and no excepted item lacks a passed test."""
        return self.unfailing and not self.unproven


def outcomes_of(lines: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """Return the outcomes of all collected tests.

    If the process ended during a test, this test has failed. The later tests did not run.
    """
    tests: dict[str, Any] = {}
    notes: dict[str, Mapping[str, Any]] = {}
    began, ended = "", 0
    for line in lines:
        tests |= line.get("collected", {})
        began, ended = line.get("began", began), line.get("ended", ended)
        if "test" in line and notes.get(line["test"], {}).get("state") != "failed":
            notes[line["test"]] = line
    if began and began not in notes:
        death = f"the process ended with {ended} in this test" if ended >= 0 else f"signal {-ended} ended the process"
        notes[began] = {"state": "failed", "failure": {"input": "", "found": death}}
    return [_outcome(test, about, notes.get(test, {})) for test, about in tests.items()]


def _outcome(test: str, about: Mapping[str, Any], line: Mapping[str, Any]) -> Outcome:
    state, examples = line.get("state", "not run"), line.get("examples", 0)
    if state == "skipped" or (state == "passed" and not examples):
        state = "not run"
    return Outcome(
        test, about["items"], about["exceptions"], state, examples, line.get("reason", ""),
        answer_tokens=line.get("answer_tokens", 0), **(line.get("failure") or {}),
    )


def _verdict(outcomes: Iterable[Outcome]) -> str:
    state = min((one.state for one in outcomes), key=STATES.index, default="not run")
    return WORDS.get(state, state)


def _smallest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the failure that describes its item best: the test of the fewest items, then the shortest text."""
    wrong = [one for one in outcomes if one.state == "failed"]
    return min(wrong, key=lambda one: (len(one.items), not one.input, len(one.input) + len(one.found), one.test))


def verdicts_of(lines: list[dict[str, Any]], exceptions: Iterable[str] = (), engine: bool = True) -> Verdicts:
    """Return the verdicts of a run from its lines.

    Args:
        lines: lines that the recorder wrote.
        exceptions: subjects of the exceptions file.
        engine: True for an engine, False for a policy, cache or server.
    """
    outcomes = outcomes_of(lines)
    name, offered = next(((line["name"], line["families"]) for line in lines if line.get("families")), ("", []))
    precision = next((line["precision"] for line in lines if "precision" in line), "")
    written_for = next((line["spec"] for line in lines if "spec" in line), "")
    marked = list(dict.fromkeys(item for one in outcomes for item in one.items))
    if engine:
        marked = sorted({*marked, *(item for row in families().values() for item in row)}, key=place)
    about = {item: [one for one in outcomes if item in one.items] for item in marked}
    items = {item: _verdict(tests) for item, tests in about.items()}
    if not engine:
        decided = [item for item, verdict in items.items() if verdict in WORDS.values()]
        offered = list(dict.fromkeys(family for item in decided for family in families_of(item)))
    needed = {name for one in outcomes if one.state in ("excepted", "failed", "not run") for name in one.exceptions}
    return Verdicts(
        name, precision, offered, items, {one.vector: _verdict([one]) for one in outcomes if one.vector},
        sorted(set(exceptions) - needed), outcomes,
        {item: _smallest(about[item]) for item, verdict in items.items() if verdict == "fail"},
        sorted({method for line in lines for method in line.get("scored", ())}),
        max((line.get("at_once", 0) for line in lines), default=0), written_for,
    )


def so_far(lines: Iterable[Mapping[str, Any]]) -> tuple[int, dict[str, str], dict[str, list[str]]]:
    """Return the number of tests, the failing items with the failure, and the other decided items by verdict.

    The run was stopped: the last test that began has no result. An item without a failure is decided by all its tests.
    """
    lines = [line for line in lines if "began" not in line]
    ran, outcomes = {line["test"] for line in lines if "test" in line}, outcomes_of(lines)
    failing, decided = dict[str, str](), dict[str, list[str]]()
    for item in dict.fromkeys(item for one in outcomes for item in one.items):
        tests = [one for one in outcomes if item in one.items]
        if any(one.state == "failed" for one in tests):
            failing[item] = _smallest(tests).found
        elif ran.issuperset(one.test for one in tests) and (verdict := _verdict(tests)) != "not run":
            decided.setdefault(verdict, []).append(item)
    return len(outcomes), failing, decided
