"""The simulator: short lives hold, findings are shrunk to scripts that can be run, planted bugs are found."""

import errno
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from conformance.assurance.simulator import __main__ as command
from conformance.assurance.simulator.operations import KINDS, Operation, drawn, read_script, written
from conformance.assurance.simulator.planted import PLANTED
from conformance.assurance.simulator.shrink import finding, shrunk
from conformance.assurance.simulator.states import REFUSALS, STATES, Met
from conformance.items import known_items
from conformance.own.laws import LAWS

pytestmark = pytest.mark.law("eviction-equals-masking")

README = Path(command.__file__).with_name("README.md")


def test_short_lives_hold() -> None:
    met = Met()
    for seed in range(6):
        assert finding(drawn(seed, 24), met) is None, seed
    assert len(+met.counts) > 25


def test_any_part_of_a_script_is_a_script() -> None:
    """Operations are data, and what they are about may be missing."""
    for seed in range(3):
        script = drawn(seed, command.LENGTH)
        assert read_script(written(script)) == script
        rng = Random(seed)
        part = [operation for operation in script if rng.random() < 0.4]
        assert finding(part, Met()) is None


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.parametrize("at", range(8, 20, 2))
def test_a_put_that_fails_leaves_the_chunks_of_others(at: int) -> None:
    script = [
        Operation("put", {"tenant": 1, "text": 2, "fault": None}),
        Operation("put", {"tenant": 0, "text": 0, "fault": ["error", errno.EROFS, at]}),
        Operation("gc", {"fault": None}),
    ]
    assert finding(script, Met()) is None


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_who_is_forgotten_is_not_listed_under_another_name() -> None:
    """An hour's run found it: another tenant's damaged object, which held the forgotten one's bytes, stayed listed."""
    script = [
        Operation("put", {"tenant": 0, "text": 1, "fault": None}),
        Operation("put", {"tenant": 1, "text": 2, "fault": None}),
        Operation("damage", {"which": 0, "how": "other", "at": 0.7}),
        Operation("forget", {"tenant": 1, "fault": None}),
        Operation("gc", {"fault": None}),
    ]
    assert finding(script, Met()) is None


@pytest.mark.law("the-proof-has-teeth")
def test_a_script_is_shrunk_to_what_the_finding_needs() -> None:
    def find(part: Sequence[Operation]) -> str | None:
        kinds = [operation.kind for operation in part]
        both = "put" in kinds and "damage" in kinds[kinds.index("put") :]
        return f"no room in /tmp/{'x' * len(kinds)}: together [1]" if both else None

    script = next(script for seed in range(99) if find(script := drawn(seed, 60)))
    assert [operation.kind for operation in shrunk(script, find)] == ["put", "damage"]


@pytest.mark.law("the-proof-has-teeth")
def test_a_planted_bug_is_found_and_its_script_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    found = command.hunted("unchecked-step", minutes=1)
    assert found is not None
    seed, _, _ = found
    PLANTED["unchecked-step"](monkeypatch)
    monkeypatch.setattr("sys.argv", ["simulate", "--seed", str(seed)])
    assert command.main() == 1
    told, script, *_ = capsys.readouterr().out.split("\n\n")
    assert len(script.splitlines()) == 2
    (tmp_path / "script").write_text(script, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["simulate", "--script", str(tmp_path / "script")])
    assert command.main() == 1
    assert capsys.readouterr().out.startswith(told)


@pytest.mark.law("figures-are-counted-right")
def test_a_state_that_was_never_met_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", "--minutes", "0"])
    assert command.main() == 1
    met = Met()
    assert finding(drawn(0, command.LENGTH), met) is None
    told = capsys.readouterr().out.splitlines()[1:]
    assert told == [f"never met: {state}" for state in met.never()] != []
    for state in (*STATES, *(f"refused: {name}" for name in REFUSALS)):
        met(state)
    assert met.never() == []


@pytest.mark.law("as-it-is-described")
def test_each_state_has_its_item_or_law_and_each_bug_its_row() -> None:
    owners = {*STATES.values(), *(item for item, _ in REFUSALS.values())}
    assert owners <= {*LAWS, *known_items()}
    cells = [line.split("|")[1].strip() for line in README.read_text(encoding="utf-8").splitlines() if "|" in line]
    assert cells[-10:] == [*PLANTED]
    assert {operation.kind for seed in range(40) for operation in drawn(seed, 30)} == {*KINDS, "knobs"}


@pytest.mark.nightly
@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    assert command.hunted(name, minutes=10) is not None
