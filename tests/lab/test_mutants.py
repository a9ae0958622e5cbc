"""Each written mutant can be applied, and the worker tries mutants of a module of a few lines."""

import builtins
import dis
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

from conformance.checks.vector_checks import BOUNDED, problems
from conformance.items import known_items
from conformance.methods import brutes
from conformance.paths import ROOT
from conformance.vectors import files
from lab.item_vectors import ITEMS
from lab.mutants import written
from lab.mutants.edits import ORIGINAL, Edit, function_of, replaced
from lab.mutants.worker import Verdict
from lab.mutants.written import MUTANTS, ROWS, read_rows, sized_mutants
from reference.crystalcache import impact
from reference.crystalcache.impact import rarity
from spec.errors import SpecError
from spec.records import CoAttention

BASE_2 = MUTANTS["CC_RARITY_LOGARITHM_TO_BASE_2"]
VECTORS = sorted((ROOT / "spec" / "vectors").glob("*.json"))
RARITY = "reference.crystalcache.impact:rarity"
EDGES = MUTANTS["CC_EDGES_CROSS_EDGES_FIRST"].edit


def globals_of(code: CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from globals_of(inner)


@pytest.mark.parametrize("page", ["README.md", "docs/trust.md", "docs/results/mutants.md"])
def test_a_page_counts_what_there_is(page: str) -> None:
    """Check the numbers of items, vectors and killed mutants. Each exceeds the number on the page by at most 10 %."""
    killed = {line.split()[0] for line in written.KILLED.read_text(encoding="utf-8").splitlines()}
    vectors = sum(json.loads(path.read_text(encoding="utf-8")).get("numberOfTests", 0) for path in VECTORS)
    counts = {"items": len(known_items()), "mutants": len(killed & set(MUTANTS)), "vectors": vectors}
    numbers = re.findall(r"over \**(\d+) (items|mutants|vectors)", (ROOT / page).read_text(encoding="utf-8"))
    assert {word for _, word in numbers} >= ({"mutants"} if page.endswith("mutants.md") else {"items", "mutants"})
    assert [(number, word) for number, word in numbers if not int(number) <= counts[word] <= 1.1 * int(number)] == []


def test_every_edit_applies_and_changes_its_function() -> None:
    """Check edits without running tests: the fragment occurs once, the function compiles, and all its names exist."""
    rows = [mutant for path in sorted(ROWS.glob("*.toml")) for mutant in read_rows(path)]
    assert len(rows) + len(list(sized_mutants())) == len(MUTANTS), "two mutants have one name"
    assert [mutant.name for mutant in rows if not mutant.why.endswith((".", '"', "?"))] == []
    for mutant in MUTANTS.values():
        code, right = mutant.edit.code(), function_of(mutant.edit.of)
        known = {*vars(import_module(right.__module__)), *dir(builtins), ORIGINAL}
        assert code != right.__code__, mutant.name
        assert code.co_freevars == right.__code__.co_freevars, mutant.name
        assert set(globals_of(code)) <= known, mutant.name


UNTOLD = {
    "PO_KVCRUSH_THE_HOST_S_FLOOR_ALONE": "shows with a host that protects nothing",
    "PO_Q_FILTERS_DIRECTIONS_WITHOUT_A_SIGN": "shows when filters are measured, and vectors give filters",
    "PO_Q_FILTERS_THE_MEAN_QUERY": "shows when filters are measured, and vectors give filters",
    "PO_Q_FILTERS_THE_FIRST_HEAD_OF_A_LAYER": "shows in a later turn, if heads store different tokens",
    "PO_EXPECTED_ATTENTION_STATS_THE_FIRST_HEADS": "shows in a later turn, if heads store different tokens",
    "PO_KVZAP_SCORES_WITHOUT_BIAS": "shows in scores and with a threshold: a constant for each head changes no order",
}
"""Readings that no vector of a method can reveal. Tests of decoding reveal errors in steps."""


def detects(group: Any, test: Any) -> bool:
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
                untold |= set() if any(detects(*one) for one in tests[mutant.item]) else {name}
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
    written.accept(dict.fromkeys(digests, Verdict("assertion", test="test_a.py::test_a[b c]")))
    assert written.changed() == []
    written.accept({BASE_2.name: Verdict("survived")})
    assert written.changed() == []
    lines = (tmp_path / "killed.lock").read_text(encoding="utf-8")
    (tmp_path / "killed.lock").write_text(lines.replace(digests[BASE_2.name], "0" * 12), encoding="utf-8")
    assert written.changed() == [mutant for name, mutant in MUTANTS.items() if digests[name] == digests[BASE_2.name]]
    assert BASE_2.digest({BASE_2.item: "1"}) != BASE_2.digest({BASE_2.item: "2"})
    actual = []
    for words, code in (("One.", 1), ("Another.\n\n    More.", 1), ("One.", 2)):
        text = f'    def f() -> int:\n        """{words}"""\n        return {code}\n'
        monkeypatch.setattr(Edit, "function", lambda self, text=text: text)
        actual.append(BASE_2.digest({}))
    assert actual[0] == actual[1] != actual[2]


def test_the_record_names_mutants_that_there_are() -> None:
    lines = [line.split(maxsplit=2) for line in written.KILLED.read_text(encoding="utf-8").splitlines()]
    assert {name for name, *_ in lines} <= set(MUTANTS)
    for _, _, test in lines:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


TOY = '''
def clamp(x, low):
    if low < 0:
        raise ValueError(low)
    return low if x < low else x


def spin(n):
    while n > 0:
        n -= 1
    return 10 // (n + 2)
'''

TESTS = '''
import pytest, toy

def test_clamp():
    assert [toy.clamp(x, 2) for x in (1, 2, 3)] == [2, 2, 3]
    with pytest.raises(ValueError):
        toy.clamp(1, -1)

def test_spin():
    assert toy.spin(3) == 5
'''

OUTCOMES = {
    "x < low -> x <= low": "survived", "x < low -> x > low": "assertion", "low < 0 -> low < -9": "assertion",
    "n -= 1 -> n += 1": "timeout", "n + 2 -> n - 2": "assertion", "n + 2 -> n * 0": "error",
}
TRY_ALL = """
import json, sys; from dataclasses import asdict; from functools import partial; from pathlib import Path
import toy
from lab.mutants import worker
root = Path(sys.argv[1]); worker.LIMITS.update(dev=1.0, ci=1.0)
source = (root / "toy.py").read_text()
trials = [
    worker.Trial(key, lambda test: True, partial(exec, source.replace(*key.split(" -> ")), vars(toy)),
                 lambda test: test.name)
    for key in sys.argv[2:]
]
trials.append(worker.Trial("untested", lambda test: False, lambda: None, lambda test: test.name))
verdicts = worker.run(root, trials, ["test_toy.py"])
print(json.dumps({key: asdict(one) for key, one in verdicts.items()}))
"""


def tried(root: Path, tests: str, *keys: str) -> tuple[str, Any]:
    """Try mutants of the toy module in a separate process. Return its output, and the verdicts.

    Mutants that loop have a short time limit.
    """
    (root / "toy.py").write_text(TOY)
    (root / "test_toy.py").write_text(tests)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, str(root), *keys], cwd=root, env=environment, capture_output=True, text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_outcomes_of_mutants_and_a_test_that_fails_without_a_mutant(tmp_path: Path) -> None:
    """Check that a test that fails without a mutant kills no mutant."""
    _, verdicts = tried(tmp_path, TESTS, *OUTCOMES)
    assert {key: one["outcome"] for key, one in verdicts.items()} == {**OUTCOMES, "untested": "survived"}
    assert verdicts["n + 2 -> n * 0"]["raised"].partition(":")[0] == "ZeroDivisionError"
    assert {one["profile"] for one in verdicts.values() if one["outcome"] != "assertion"} == {"ci"}
    assert verdicts["untested"]["ran"] == 0
    wrong = TESTS.replace("[2, 2, 3]", "[2, 2, 4]")
    output, verdicts = tried(tmp_path, wrong, "x < low -> x > low", "n + 2 -> n - 2")
    assert "judges nothing: test_toy.py::test_clamp" in output
    assert [one["outcome"] for one in verdicts.values()] == ["survived", "assertion", "survived"]
