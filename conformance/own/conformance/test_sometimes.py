"""States that a run of the suite must have met: told from calls, counted over processes, and missed where they are."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.assurance.sometimes import plugin, states
from conformance.checks.refusals import refused
from conformance.items import known_items
from conformance.paths import ROOT
from conformance.strategies.trunks import EvictionProblem, record
from reference.backend import BACKEND
from spec.parameters import PAPER
from spec.records import Trunks

FILES = sorted(plugin.SUITE.glob("test_*.py"))
CONFTEST = """
from pathlib import Path
from conformance.assurance.sometimes import plugin, states
plugin.SUITE, states.REFUSALS = Path(__file__).parent, {}
states.STATES = {"crystal.score": {
    f"{n} trunks": ("CC-SCORE", lambda c, n=n: len(c.D) == n) for n in (1, 2, 3)
}}
"""
TEST = """
import numpy as np
from spec.parameters import PAPER
def test_it(stages):
    stages.score(np.ones({n}), np.ones({n}), np.zeros({n}, dtype=bool), PAPER)
"""


def met(call: Callable[[Any], object]) -> set[str]:
    """What a call of a stage meets."""
    counts: Counter[str] = Counter()
    call(plugin.watched(BACKEND, counts))
    return {name.partition(": ")[2] for name in counts}


def test_each_state_belongs_to_an_item_and_a_stage() -> None:
    assert set(plugin.expected().values()) <= set(known_items())
    stages = {*states.STATES, *states.REFUSALS, *states.DERIVED}
    assert all(hasattr(getattr(BACKEND, family), stage) for family, stage in (name.split(".") for name in stages))


@pytest.mark.parametrize(("sizes", "B", "found"), [
    ([5, 5], 8, {"a partial trunk alone", "a remnant of N_min", "a partial trunk with D"}),
    ([4, 5], 7, {"an overshoot of 2"}),
    ([4, 5], 5, {"whole trunks meet B"}),
    ([4, 5], 9, {"as many tokens as B"}),
    ([3, 10, 4], 12, {"a partial trunk behind others", "a partial trunk with D"}),
])
def test_an_eviction_is_told(sizes: list[int], B: int, found: set[str]) -> None:
    """The cases of CC-ALLOCATE."""
    m, n = len(sizes), sum(sizes)
    problem = EvictionProblem(
        np.arange(m) / 8, Trunks(np.cumsum([0, *sizes]), np.ones(m)), np.arange(n) / 8, np.ones(m),
        np.zeros(m, dtype=np.bool_), B, PAPER,
    )
    assert met(lambda backend: problem.run(backend.crystal)) == found


@pytest.mark.parametrize(("T_max", "edge", "found"), [
    (4, (1, 2, 0.9), {"a merge to T_max"}), (3, (1, 2, 0.9), {"T_max refuses a merge"}),
    (4, (1, 2, 0.25), {"an interface below tau"}), (4, (1, 2, PAPER.tau_merge), {"an interface at tau"}),
    (4, (2, 1, 0.9), {"an interface without an edge", "strong edges backwards alone"}),
])
def test_a_merge_is_told(T_max: int, edge: tuple[int, int, float], found: set[str]) -> None:
    """Two sentences of two tokens and one edge."""
    rows: list[list[tuple[int, float]]] = [[] for _ in range(4)]
    rows[edge[0]] = [edge[1:]]
    S1, ends, p = record([1.0] * 4, rows, [[]] * 4, 1, 0), np.array([False, True] * 2), replace(PAPER, T_max=T_max)
    assert met(lambda backend: backend.crystal.trunks(S1, np.ones(4), ends, p)) == found


def test_a_refusal_is_told() -> None:
    def call(backend: Any) -> None:
        with refused("k"):
            backend.breath.inverse_key_norms(np.ones((2, 3)))

    assert met(call) == {"k is refused"}


def asked(*words: str, backend: str = "numpy", profile: str = "dev", **options: object) -> Any:
    """A configuration of pytest, as far as it is read."""
    given = {"--backend": backend, "--kvspec-profile": profile}
    return SimpleNamespace(args=words, option=SimpleNamespace(**options), getoption=given.get)


def test_a_run_of_all_is_whole_and_a_part_is_none() -> None:
    assert plugin.whole(asked("conformance", keyword="", markexpr="", maxfail=0), FILES)
    assert not plugin.whole(asked("conformance"), FILES[1:])
    parts: list[dict[str, Any]] = [
        {"keyword": "cut"}, {"markexpr": "not nightly"}, {"maxfail": 1}, {"lf": True}, {"deselect": ["x"]},
        {"collectonly": True}, {"profile": "few"}, {"backend": "numba"},
    ]
    assert not any(plugin.whole(asked("conformance", **part), FILES) for part in parts)
    assert not plugin.whole(asked("conformance/suite/test_score.py::test_it", "conformance"), FILES)


@pytest.mark.parametrize(("words", "code", "lines"), [
    (["-p", "xdist.plugin", "-n", "2", "--dist", "worksteal"], 1,
     ["2 of 3 were met; least often: crystal.score: 1 trunks (1), crystal.score: 2 trunks (1)",
      "never met: crystal.score: 3 trunks [CC-SCORE]"]),
    (["test_1.py"], 0, []),
    (["-k", "test_it"], 0, []),
])
def test_a_state_that_no_process_met_fails_a_whole_run(
    tmp_path: Path, words: Sequence[str], code: int, lines: Sequence[str],
) -> None:
    """Two tests, in a process each, meet a state each; nothing meets the third. A partial run says nothing."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    for n in (1, 2):
        (tmp_path / f"test_{n}.py").write_text(TEST.format(n=n), encoding="utf-8")
    plugins = [word for name in ("conformance.plugin", plugin.__name__) for word in ("-p", name)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--kvspec-profile", "dev", *words], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True,
        text=True, check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert [line for line in run.stdout.splitlines() if " met" in line] == lines
