"""Each written mutant can be applied, and its trials are well defined. lab.mutants runs the tests."""

import builtins
import dis
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.checks.refusals import refused
from conformance.checks.vector_checks import BOUNDED, problems
from conformance.items import known_items
from conformance.methods import brutes
from conformance.paths import ROOT
from conformance.strategies.trunks import EvictionProblem, record
from conformance.vectors import files
from lab import mutants, sometimes
from lab.item_vectors import ITEMS
from lab.mutants import written
from lab.mutants.edits import ORIGINAL, Edit, function_of, replaced
from lab.mutants.results import Result
from lab.mutants.written import MUTANTS, ROWS, read_rows, sized_mutants
from reference.backend import BACKEND
from reference.crystalcache import impact
from reference.crystalcache.impact import rarity
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.records import CoAttention, Trunks

BASE_2 = MUTANTS["CC_RARITY_LOGARITHM_TO_BASE_2"]
VECTORS = sorted((ROOT / "spec" / "vectors").glob("*.json"))
RARITY = "reference.crystalcache.impact:rarity"
EDGES = MUTANTS["CC_EDGES_CROSS_EDGES_FIRST"].edit


def globals_of(code: CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_of(inner)


@pytest.mark.parametrize("page", ["README.md", "docs/trust.md"])
def test_a_page_counts_what_there_is(page: str) -> None:
    """Check the numbers of items, vectors and killed mutants. Each exceeds the number on the page by at most 10 %."""
    killed = {line.split()[0] for line in written.KILLED.read_text(encoding="utf-8").splitlines()}
    vectors = sum(json.loads(path.read_text(encoding="utf-8")).get("numberOfTests", 0) for path in VECTORS)
    counts = {"items": len(known_items()), "mutants": len(killed & set(MUTANTS)), "vectors": vectors}
    said = re.findall(r"over \**(\d+) (items|mutants|vectors)", (ROOT / page).read_text(encoding="utf-8"))
    assert {word for _, word in said} >= {"items", "mutants"}
    assert [(number, word) for number, word in said if not int(number) <= counts[word] <= 1.1 * int(number)] == []


def test_every_edit_applies_and_changes_its_function() -> None:
    """Check edits without running tests: the fragment occurs once, the function compiles, and all its names exist."""
    for mutant in MUTANTS.values():
        code, right = mutant.edit.code(), function_of(mutant.edit.of)
        known = {*vars(import_module(right.__module__)), *dir(builtins), ORIGINAL}
        assert code != right.__code__, mutant.name
        assert code.co_freevars == right.__code__.co_freevars, mutant.name
        assert set(globals_of(code)) <= known, mutant.name


def test_every_item_has_two_and_each_says_what_it_gets_wrong() -> None:
    rows = [mutant for path in sorted(ROWS.glob("*.toml")) for mutant in read_rows(path)]
    number = Counter(mutant.item for mutant in rows if not mutant.beyond)
    assert len(rows) + len(list(sized_mutants())) == len(MUTANTS)
    assert {mutant.item for mutant in MUTANTS.values()} == known_items()
    assert {item for item in known_items() if number[item] < 2} == set()
    assert all(mutant.why.endswith((".", '"', "?")) for mutant in rows)


UNTOLD = {
    "PO_KVCRUSH_THE_HOST_S_FLOOR_ALONE": "shows with a host that protects nothing",
    "PO_KVZIP_LOGITS_OF_A_REPEAT_WITHOUT_A_CAP": "a vector has no soft cap",
}
"""Readings that no vector of a method can reveal. Tests of decoding reveal errors in steps."""


def tells(group: Any, test: Any) -> bool:
    try:
        return bool(problems(group, test, ITEMS[group["operation"]], BOUNDED, "float64"))
    except Exception:
        return True


@pytest.mark.filterwarnings("ignore")
def test_a_vector_tells_each_rejected_reading_of_a_method() -> None:
    methods = {brute.item for brute in brutes() if brute.item.startswith("PO-")}
    tests: dict[str, list[Any]] = {}
    for _, group, test in files.published():
        tests.setdefault(group["operation"], []).append((group, test))
    untold = set()
    for name, mutant in MUTANTS.items():
        if mutant.item in methods and not mutant.beyond and not mutant.edit.of.endswith((".step", ".keep")):
            with replaced(mutant.edit):
                untold |= set() if any(tells(*one) for one in tests[mutant.item]) else {name}
    assert untold == UNTOLD.keys()


def test_a_mutant_is_in_force_inside_the_block_alone() -> None:
    c, right = np.array([3]), 1 / (1 + np.log(4))
    with replaced(BASE_2.edit):
        assert rarity(c) == impact.rarity(c) == 1 / 3
        assert vars(impact)[ORIGINAL](c) == right
    assert rarity(c) == right
    assert ORIGINAL not in vars(impact)


def test_a_method_is_replaced_too() -> None:
    near, far, weight = np.array([[1], [0]]), np.array([[-1], [0]]), np.full((2, 1), 0.5)
    record = CoAttention(0, np.ones(2), near, weight, far, weight)
    with replaced(EDGES):
        assert record.edges().second.tolist() == [1, 1, 0]
    assert record.edges().second.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("edit", "why"), [
    (Edit(RARITY, find="no such text", replace="0"), "not 0 times"),
    (Edit(RARITY, find="c", replace="0"), "must occur once in .*rarity, not [0-9]+ times"),
    (Edit("reference.crystalcache.impact:gone", body="return 0"), "must name a function"),
])
def test_an_edit_that_does_not_fit_is_refused(edit: Edit, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        edit.code()


@pytest.mark.parametrize(("old", "new", "why"), [
    ("why = ", "reason = ", "must be some of"), ("body = ", "colour = ", "must be some of"),
    ('body = "return 0"\n', "", "must have one of"), ("body = ", 'start = "c = c"\nbody = ', "must have one of"),
])
def test_a_row_of_another_form_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    row = f'[[mutant]]\nitem = "CC-RARITY"\nname = "a"\nof = "{RARITY}"\nwhy = "W."\nbody = "return 0"\n'
    (tmp_path / "a.toml").write_text(row, encoding="utf-8")
    assert [mutant.name for mutant in read_rows(tmp_path / "a.toml")] == ["CC_RARITY_A"]
    (tmp_path / "a.toml").write_text(row.replace(old, new), encoding="utf-8")
    with pytest.raises(SpecError, match=why):
        read_rows(tmp_path / "a.toml")


def test_what_was_accepted_is_tried_again_when_its_function_or_item_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written, "KILLED", tmp_path / "killed.lock")
    (tmp_path / "killed.lock").write_text("GONE 0 test_gone\n", encoding="utf-8")
    digests = written.digests()
    assert len(written.changed()) == len(MUTANTS)
    written.accept({
        name: Result(name, digest, "assertion", "dev", "test_a.py::test_a[b c]", "", 1, 0.1)
        for name, digest in digests.items()
    })
    assert written.changed() == []
    survived = Result(BASE_2.name, digests[BASE_2.name], "survived", "ci", "", "", 1, 0.1)
    written.accept({BASE_2.name: survived})
    assert written.changed() == []
    lines = (tmp_path / "killed.lock").read_text(encoding="utf-8")
    (tmp_path / "killed.lock").write_text(lines.replace(digests[BASE_2.name], "0" * 12), encoding="utf-8")
    assert written.changed() == [mutant for name, mutant in MUTANTS.items() if digests[name] == digests[BASE_2.name]]
    assert BASE_2.digest({BASE_2.item: "1"}) != BASE_2.digest({BASE_2.item: "2"})
    found = []
    for words, code in (("One.", 1), ("Another.\n\n    More.", 1), ("One.", 2)):
        text = f'    def f() -> int:\n        """{words}"""\n        return {code}\n'
        monkeypatch.setattr(Edit, "function", lambda self, text=text: text)
        found.append(BASE_2.digest({}))
    assert found[0] == found[1] != found[2]


def test_the_record_names_mutants_that_there_are() -> None:
    lines = [line.split(maxsplit=2) for line in written.KILLED.read_text(encoding="utf-8").splitlines()]
    assert {name for name, *_ in lines} <= set(MUTANTS)


@pytest.mark.nightly
def test_a_mutant_is_killed_by_its_item(tmp_path: Path) -> None:
    command = ["-m", "lab.mutants", "--folder", str(tmp_path), "-k", "CC_MEMORY_ONE_SEQUENCE"]
    found = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "mutants: 1 of 1 killed by an assertion of their item" in found.stdout, found.stdout + found.stderr


def test_an_unknown_mutant_is_refused() -> None:
    config: Any = SimpleNamespace(getoption=lambda name: "CC_NONE")
    with pytest.raises(pytest.UsageError, match="--mutant CC_NONE: unknown"):
        mutants.pytest_collection_modifyitems(config, [])


FILES = sorted(sometimes.SUITE.glob("test_*.py"))
CONFTEST = """
from pathlib import Path
from lab import sometimes
sometimes.SUITE, sometimes.REFUSALS = Path(__file__).parent, {}
sometimes.STATES = {"crystal.score": {
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
    """Return the states that a call of a stage meets."""
    counts: Counter[str] = Counter()
    call(sometimes.watched(BACKEND, counts))
    return {name.partition(": ")[2] for name in counts}


def test_each_state_belongs_to_an_item_and_a_stage() -> None:
    assert set(sometimes.expected().values()) <= set(known_items())
    stages = {*sometimes.STATES, *sometimes.REFUSALS, *sometimes.DERIVED}
    assert all(hasattr(getattr(BACKEND, family), stage) for family, stage in (name.split(".") for name in stages))


@pytest.mark.parametrize(("sizes", "B", "found"), [
    ([5, 5], 8, {"a partial trunk alone", "a remnant of N_min", "a partial trunk with D"}),
    ([4, 5], 7, {"an overshoot of 2"}),
    ([4, 5], 5, {"whole trunks meet B"}),
    ([4, 5], 9, {"as many tokens as B"}),
    ([3, 10, 4], 12, {"a partial trunk behind others", "a partial trunk with D"}),
])
def test_an_eviction_is_told(sizes: list[int], B: int, found: set[str]) -> None:
    """Check the cases of CC-ALLOCATE."""
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
    """Check two sentences of two tokens and one edge."""
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
    """Return the part of a pytest configuration that is read."""
    given = {"--backend": backend, "--kvspec-profile": profile}
    return SimpleNamespace(args=words, option=SimpleNamespace(**options), getoption=given.get)


def test_a_run_of_all_is_whole_and_a_part_is_none() -> None:
    assert sometimes.whole(asked("conformance", keyword="", markexpr="", maxfail=0), FILES)
    assert not sometimes.whole(asked("conformance"), FILES[1:])
    parts: list[dict[str, Any]] = [
        {"keyword": "cut"}, {"markexpr": "not nightly"}, {"maxfail": 1}, {"lf": True}, {"deselect": ["x"]},
        {"collectonly": True}, {"profile": "few"}, {"backend": "numba"},
    ]
    assert not any(sometimes.whole(asked("conformance", **part), FILES) for part in parts)
    assert not sometimes.whole(asked("conformance/suite/test_score.py::test_it", "conformance"), FILES)


@pytest.mark.parametrize(("words", "code", "lines"), [
    (["-p", "xdist.plugin", "-n", "2", "--dist", "worksteal"], 1,
     ["2 of 3 were met; least often: crystal.score: 1 trunks (1), crystal.score: 2 trunks (1)",
      "never met: crystal.score: 3 trunks [CC-SCORE]"]),
    (["test_1.py"], 0, []),
])
def test_a_state_that_no_process_met_fails_a_whole_run(
    tmp_path: Path, words: Sequence[str], code: int, lines: Sequence[str],
) -> None:
    """Run two tests in separate processes, each of which meets a state. No test meets the third state.

    A partial run makes no claim.
    """
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    for n in (1, 2):
        (tmp_path / f"test_{n}.py").write_text(TEST.format(n=n), encoding="utf-8")
    plugins = [word for name in ("conformance.plugin", sometimes.__name__) for word in ("-p", name)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--kvspec-profile", "dev", *words], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True,
        text=True, check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert [line for line in run.stdout.splitlines() if " met" in line] == lines
