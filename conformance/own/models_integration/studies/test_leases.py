"""Units of work that processes share: each gets one row, whoever is killed, and whatever the clocks say."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from conformance.own.models_integration.studies.lease_workers import PATIENCE, UNITS, work
from conformance.own.processes import started
from models_integration.studies import leases
from models_integration.studies.leases import Leases
from models_integration.studies.results import append_row, load_rows

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")


def unit_of(row: dict[str, object]) -> str:
    return str(row["unit"])


def units_stored(path: Path) -> Counter[str]:
    return Counter(row["unit"] for row in load_rows(path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork server")
def test_killed_workers_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    """Four workers on two machines whose clocks are an hour apart; twice, half of them are killed at work."""
    path = tmp_path / "rows.jsonl"
    living = [started(work, path, hours) for hours in (0, 0, 1, 1)]
    for stored in (10, 25):
        while len(units_stored(path)) < stored:
            time.sleep(0.02)
        for process in (living.pop(0), living.pop(1)):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        living += [started(work, path, hours) for hours in (1, 0)]
    for process in living:
        process.join()
        assert process.exitcode == 0
    assert units_stored(path) == Counter(UNITS)
    assert len({row["pid"] for row in load_rows(path)}) >= 4
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_who_lost_a_unit_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that slept for too long finds its unit taken over."""
    monkeypatch.setattr(leases, "_PATIENCE", 0.1)
    path = tmp_path / "rows.jsonl"
    with Leases(path, unit_of) as slow, Leases(path, unit_of) as other:
        assert slow.take("a")
        assert not other.take("a")
        time.sleep(0.15)
        assert other.take("a")
        assert not slow.add({"unit": "a", "who": "slow"})
        assert other.add({"unit": "a", "who": "other"})
        assert not slow.take("a")
    assert load_rows(path) == [{"unit": "a", "who": "other"}]


def test_a_lease_that_is_touched_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_PATIENCE", 0.3)
    monkeypatch.setattr(leases, "_BEAT", 0.05)
    path = tmp_path / "rows.jsonl"
    with Leases(path, unit_of) as alive, Leases(path, unit_of) as other:
        assert alive.take("a")
        until = time.monotonic() + 4 * PATIENCE / 5
        while time.monotonic() < until:
            assert not other.take("a")
            time.sleep(0.02)


def test_a_row_of_a_holder_that_died_before_it_let_go_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "_PATIENCE", 0.05)
    path = tmp_path / "rows.jsonl"
    died, other = Leases(path, unit_of), Leases(path, unit_of)
    assert died.take("a")
    with other:
        assert not other.take("a")
        time.sleep(0.1)
        append_row(path, {"unit": "a"})
        assert not other.take("a")
        assert list(other.units(["a"], lambda unit: None)) == []
    assert units_stored(path) == Counter(["a"])
