"""From what became of the tests to verdicts: of each item, of each vector, of the engine."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.verify.texts import families, families_of

__all__ = ["ABSTAINED", "STATES", "Outcome", "Verdicts", "outcomes_of", "verdicts_of"]

# What a test, an item and a vector can be; of several tests the first that occurs is the item's verdict.
ABSTAINED = ("not served", "not promised", "N/A")
"""What a cache refuses, and what a policy says that it does not promise."""
STATES = ("failed", "excepted", *ABSTAINED, "passed", "not offered", "not run")
WORDS = {"failed": "fail", "passed": "pass"}

_VECTOR = re.compile(r"test_vectors\.py::test_the_backend_holds_a_vector_of_a_stage\[(.+)\]")


@dataclass(frozen=True)
class Outcome:
    """A test: what it is about and what became of it."""

    test: str
    items: list[str]
    exceptions: list[str]
    state: str
    examples: int = 0
    reason: str = ""
    input: str = ""
    found: str = ""

    @property
    def vector(self) -> str:
        """The id of the vector that it judges, or nothing."""
        match = _VECTOR.fullmatch(self.test)
        return match[1] if match else ""


@dataclass(frozen=True)
class Verdicts:
    """All that a run says; `name` is the engine's own."""

    name: str
    precision: str
    families: list[str]
    items: dict[str, str]
    vectors: dict[str, str]
    unneeded: list[str]
    outcomes: list[Outcome]
    smallest: dict[str, Outcome] = field(default_factory=dict)
    written_for: str = ""
    """The version of the specification that an engine names in its hello."""

    @property
    def failing(self) -> list[str]:
        """The items that fail, those first that a test about few others fails, and of these the most often failed."""
        times = Counter(item for one in self.outcomes if one.state == "failed" for item in one.items)
        return sorted(self.smallest, key=lambda item: (len(self.smallest[item].items), -times[item], item))

    @property
    def missing(self) -> list[str]:
        """The items of an offered family that no test has decided, or some test of which has not run."""
        skipped = {item for one in self.outcomes if one.state == "not run" for item in one.items}
        return [item for item in self._offered if item in skipped or self.items[item] in ("not run", "not offered")]

    @property
    def unproven(self) -> list[str]:
        """The items of an offered family that are excepted, and of which no test has passed."""
        proven = {item for one in self.outcomes if one.state == "passed" for item in one.items}
        return [item for item in self._offered if self.items[item] == "excepted" and item not in proven]

    @property
    def _offered(self) -> list[str]:
        return sorted(item for item in self.items if not set(self.families).isdisjoint(families_of(item)))

    @property
    def unfailing(self) -> bool:
        """Whether nothing fails, and every item of the offered families has been decided."""
        return bool(self.families) and not self.missing and all(one.state != "failed" for one in self.outcomes)

    @property
    def certified(self) -> bool:
        """Whether, beyond that, each of these items has a test that passes, unless it makes no claim."""
        return self.unfailing and not self.unproven


def outcomes_of(lines: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """The tests that were collected; one in which the process died has failed, and those behind it were not run."""
    tests: dict[str, Any] = {}
    said: dict[str, Mapping[str, Any]] = {}
    began, ended = "", 0
    for line in lines:
        tests |= line.get("collected", {})
        began, ended = line.get("began", began), line.get("ended", ended)
        if "test" in line and said.get(line["test"], {}).get("state") != "failed":
            said[line["test"]] = line
    if began and began not in said:
        death = f"the process ended with {ended} in this test" if ended >= 0 else f"signal {-ended} ended the process"
        said[began] = {"state": "failed", "failure": {"input": "", "found": death}}
    return [_outcome(test, about, said.get(test, {})) for test, about in tests.items()]


def _outcome(test: str, about: Mapping[str, Any], line: Mapping[str, Any]) -> Outcome:
    state, examples = line.get("state", "not run"), line.get("examples", 0)
    if state == "skipped" or (state == "passed" and not examples):
        state = "not run"
    return Outcome(
        test, about["items"], about["exceptions"], state, examples, line.get("reason", ""),
        **(line.get("failure") or {}),
    )


def _verdict(outcomes: Iterable[Outcome]) -> str:
    state = min((one.state for one in outcomes), key=STATES.index, default="not run")
    return WORDS.get(state, state)


def _smallest(outcomes: Iterable[Outcome]) -> Outcome:
    """The failure that says most about its item: about few others, and short."""
    wrong = [one for one in outcomes if one.state == "failed"]
    return min(wrong, key=lambda one: (len(one.items), not one.input, len(one.input) + len(one.found), one.test))


def verdicts_of(lines: list[dict[str, Any]], exceptions: Iterable[str] = (), engine: bool = True) -> Verdicts:
    """What the lines of a run say, which made these exceptions; of an engine, or of a policy or a cache."""
    outcomes = outcomes_of(lines)
    name, offered = next(((line["name"], line["families"]) for line in lines if line.get("families")), ("", []))
    precision = next((line["precision"] for line in lines if "precision" in line), "")
    written_for = next((line["spec"] for line in lines if "spec" in line), "")
    marked = list(dict.fromkeys(item for one in outcomes for item in one.items))
    if engine:
        marked = sorted({*marked, *(item for row in families().values() for item in row)}, key=_place)
    about = {item: [one for one in outcomes if item in one.items] for item in marked}
    items = {item: _verdict(tests) for item, tests in about.items()}
    if not engine:
        decided = [item for item, verdict in items.items() if verdict in WORDS.values()]
        offered = list(dict.fromkeys(family for item in decided for family in families_of(item)))
    needed = {name for one in outcomes if one.state in ("excepted", "failed", "not run") for name in one.exceptions}
    return Verdicts(
        name, precision, offered, items, {one.vector: _verdict([one]) for one in outcomes if one.vector},
        sorted(set(exceptions) - needed), outcomes,
        {item: _smallest(about[item]) for item, verdict in items.items() if verdict == "fail"}, written_for,
    )


def _place(item: str) -> tuple[int, str]:
    """Where an item stands: families in their order, then what is composed of them."""
    known = list(families())
    return min(known.index(name) if name in known else len(known) for name in families_of(item)), item
