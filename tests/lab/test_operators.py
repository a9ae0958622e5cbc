"""Mutants from operators, on a module of a few lines. The numbers are in docs/results/mutants.md."""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.paths import ROOT
from lab.mutants.items import read_code
from lab.mutants.operators import signatures
from lab.mutants.results import LIST, Result, append, explanations, problems, read, table
from lab.mutants.sites import Mutant, compiled, digest, mutants_of, mutants_of_tree, sample

SOURCE = '''"""A docstring with 1 < 2."""

import math

__all__ = ["clamp", "spin"]

Pairs = dict[str, int]


def clamp(x: int, low: int) -> int:
    """At least low.

    Implements: CC-MEMORY
    """
    if low < 0:
        raise ValueError(f"low = {low}: must not be below {0}")
    if x < low:
        return low
    return helper(x)


def helper(x: int) -> int:
    return math.floor(x)


def spin(n: int) -> int:
    """Implements: CC-BUDGET"""
    while n > 0:
        n -= 1
    return 10 // (n + 2)


def untested(n: int) -> int:
    """Implements: CC-CUT"""
    return n + 1
'''

TESTS = '''
import pytest
from reference.toy import clamp, spin

@pytest.mark.spec("CC-MEMORY")
def test_clamp():
    assert [clamp(x, 2) for x in (1, 2, 3)] == [2, 2, 3]
    with pytest.raises(ValueError):
        clamp(1, -1)

@pytest.mark.spec("CC-BUDGET")
def test_spin():
    assert spin(3) == 5
'''


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for folder in ("reference", "conformance", "spec"):
        (root / folder).mkdir()
    (root / "spec" / "toy.md").write_text("### CC-MEMORY\n\n### CC-BUDGET\n\n### CC-CUT\n")
    (root / "reference" / "__init__.py").write_text("")
    (root / "reference" / "toy.py").write_text(SOURCE)
    (root / "conformance" / "test_toy.py").write_text(TESTS)
    return root


TRIED = (
    "[comparison: x < low -> x <= low]", "[comparison: x < low -> x > low]", "[deletion: if low < 0: -> pass]",
    "[arithmetic: n -= 1 -> n += 1]", "[arithmetic: n + 2 -> n - 2]", "[arithmetic: n + 1 -> n - 1]",
    "return 10 // (n + 2) [constant: 2 -> 0]",
)


def toy(source: str = SOURCE) -> list[Mutant]:
    return mutants_of("reference/toy.py", source, signatures(iter([ast.parse(source)])))


def try_all(tree: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Try all mutants in a process whose `reference` is the toy module. Mutants that loop have a short time limit."""
    code = (
        "import sys; from pathlib import Path\n"
        "from lab.mutants import items, results, sites, worker\n"
        "root, folder = map(Path, sys.argv[1:]); worker.LIMITS.update(dev=1.0, ci=1.0)\n"
        f"mutants = [m for m in sites.mutants_of_tree(root) if m.key.endswith({TRIED})]\n"
        "trials = items.trials(root, mutants, items.read_code(root))\n"
        "results.run(root, trials, ['conformance/test_toy.py'], folder)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]), "NUMBA_DISABLE_JIT": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, str(tree), str(folder)], cwd=tree, env=environment, capture_output=True, text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def verdicts(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    folder = tmp_path_factory.mktemp("verdicts")
    done = try_all(tree, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, stored(tree, folder)


def stored(tree: Path, folder: Path) -> dict[str, Result]:
    """Return the verdicts for the current text of the tree."""
    text = digest((tree / "reference/toy.py").read_text())
    return read(folder, {mutant.key: text for mutant in mutants_of_tree(tree)})


def outcome(found: dict[str, Result], change: str) -> str:
    (result,) = (result for key, result in found.items() if key.endswith(f"[{change}]"))
    return result.outcome


def test_what_is_mutated_and_what_is_not() -> None:
    changed = {(mutant.operator, mutant.before, mutant.after) for mutant in toy()}
    assert ("comparison", "x < low", "x <= low") in changed
    assert ("comparison", "x < low", "x > low") in changed
    assert ("arithmetic", "n -= 1", "n += 1") in changed
    assert ("operands", "10 // (n + 2)", "(n + 2) // 10") in changed
    assert ("unwrapped", "math.floor(x)", "x") in changed
    assert ("opposite", "math.floor(x)", "math.ceil(x)") in changed
    assert ("returned input", "return low", "return x") in changed
    assert ("deletion", "if low < 0:", "pass") in changed
    assert {after for op, before, after in changed if op == "constant" and before == "2"} == {"3", "1", "0", "4"}
    lines = SOURCE.splitlines()
    untouched = {i for i, line in enumerate(lines, 1) if line.startswith(('"""', "import", "__all__", "Pairs"))
                 or "raise" in line or "Implements" in line}
    assert not untouched & {mutant.line for mutant in toy()}


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("np.argsort(-x, kind='stable')", ("keyword", "np.argsort(-x, kind='quicksort')")),
        ("np.argsort(-x, kind='stable')", ("unary", "x")),
        ("np.searchsorted(a, v, side='right')", ("keyword", "np.searchsorted(a, v, side='left')")),
        ("np.bincount(x, minlength=m)", ("keyword", "np.bincount(x)")),
        ("x.sum(axis=1, keepdims=True)", ("axis", "0")),
        ("x.sum(axis=1, keepdims=True)", ("boolean", "False")),
        ("np.zeros(3, dtype=np.int64)", ("dtype", "np.int32")),
        ("np.where(c, a, b)", ("arguments", "np.where(c, b, a)")),
        ("x[a:b]", ("slice", ":b")), ("x[a:b]", ("slice", "a:b - 1")), ("x[::-1]", ("slice", ":")),
        ("a and not b", ("and-or", "a or not b")), ("a and not b", ("unary", "b")),
        ("max(a, b)", ("opposite", "min(a, b)")),
    ],
)
def test_each_kind_of_change(source: str, change: tuple[str, str]) -> None:
    found = {(mutant.operator, mutant.after) for mutant in toy(f"def f(x):\n    y = {source}\n    return y\n")}
    assert change in found


def test_arguments_of_one_type_are_swapped() -> None:
    source = "def f(a: int, b: int, c: str) -> None: ...\n\n\ndef g(): f(1, 2, 'c')\n"
    assert [m.after for m in toy(source) if m.operator == "arguments"] == ["f(2, 1, 'c')"]


def test_every_mutant_has_a_key_of_its_own_that_outlives_moved_lines() -> None:
    mutants = toy()
    moved = toy("# a line\n" + SOURCE)
    assert len({mutant.key for mutant in mutants}) == len({mutant.id for mutant in mutants}) == len(mutants)
    assert [mutant.key for mutant in moved] == [mutant.key for mutant in mutants]
    assert [mutant.line for mutant in moved] == [mutant.line + 1 for mutant in mutants]
    assert mutants[0].id.startswith("reference/toy.py:15:")


def test_every_mutant_is_another_program() -> None:
    known = signatures(iter([ast.parse(SOURCE)]))
    original = compile(SOURCE, "reference/toy.py", "exec")
    assert all(compiled(mutant, SOURCE, known) != original for mutant in toy())


def test_the_tree_has_many_with_keys_of_their_own() -> None:
    every = mutants_of_tree(ROOT)
    assert len({mutant.key for mutant in every}) == len(every) > 1500


def test_the_sample_is_seeded_stratified_and_has_a_floor() -> None:
    first = toy()
    second = [replace(mutant, path="reference/other.py") for mutant in first]
    chosen = sample(first + second, 30, seed=1)
    assert chosen == sample(second + first[::-1], 30, seed=1) != sample(first + second, 30, seed=2)
    assert len(chosen) == 30
    assert {mutant.path for mutant in chosen} == {"reference/toy.py", "reference/other.py"}
    floor = sample(first + second, 1, seed=3)
    assert sorted(mutant.function for mutant in floor) == sorted(2 * ["clamp", "helper", "spin", "untested"])
    assert set(sample(first, 15, seed=1)) <= set(chosen)  # A second module does not change the choice.


@pytest.mark.nightly
def test_judges_are_the_tests_of_the_item(tree: Path) -> None:
    judges = read_code(tree)
    found = {mutant.function: judges.of(mutant) for mutant in mutants_of_tree(tree)}
    assert found["clamp"].items == found["helper"].items == {"CC-MEMORY"}
    assert found["spin"].items == {"CC-BUDGET"}
    assert found["spin"].backend == "numpy"


@pytest.mark.nightly
def test_judges_of_the_project() -> None:
    """Check helpers by their callers, stages by their parts, and parts of a policy by their importers."""
    judges = read_code(ROOT)
    found = {(mutant.path, mutant.function): judges.of(mutant) for mutant in mutants_of_tree(ROOT)}
    assert found["reference/crystalcache/coattention.py", "_positions_of"].items == {"CC-COATTENTION"}
    assert found["reference/crystalcache/coattention.py", "strongest"].items >= {"CC-INTRA", "CC-CROSS"}
    assert "PO-SNAPKV" in found["reference/policies/snapkv.py", "snapkv"].items
    assert found["accelerated/numba_cpu/kernels.py", "exp2"].items >= {"CC-ATTENTION", "CC-SALIENCE"}
    assert found["accelerated/numba_cpu/kernels.py", "exp2"].backend == "numba"
    assert found["reference/backend.py", "_CrystalStages.score"].items == {"CC-SCORE", "CC-NORMALISED-IMPACT"}
    assert "tests/reference/test_policies.py" in found["reference/policies/tova.py", "tova"].files


@pytest.mark.nightly
def test_what_no_item_and_no_test_stands_above_is_not_judged(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    new = 'def f(x):\n    """Implements: CC-NEW"""\n    return x + 1\n'
    (tmp_path / "tree" / "reference" / "new.py").write_text(new)
    judges, mutants = read_code(tmp_path / "tree"), mutants_of_tree(tmp_path / "tree")
    assert {judges.reach(mutant) for mutant in mutants if mutant.path.endswith("toy.py")} == {True}
    assert {judges.reach(mutant) for mutant in mutants if mutant.path.endswith("new.py")} == {False}


@pytest.mark.nightly
def test_killed_survived_and_timed_out_are_told_apart(verdicts: tuple[Path, dict[str, Result]]) -> None:
    _, found = verdicts
    assert len(found) == len(TRIED)
    assert outcome(found, "comparison: x < low -> x <= low") == "survived"
    assert outcome(found, "comparison: x < low -> x > low") == "assertion"
    assert outcome(found, "deletion: if low < 0: -> pass") == "assertion"
    assert outcome(found, "arithmetic: n -= 1 -> n += 1") == "timeout"
    assert outcome(found, "arithmetic: n + 2 -> n - 2") == "assertion"
    (divided,) = (result for key, result in found.items() if key.endswith("[constant: 2 -> 0]"))
    assert (divided.outcome, divided.raised.partition(":")[0]) == ("error", "ZeroDivisionError")
    assert all(result.profile == "ci" for result in found.values() if result.outcome == "survived")


@pytest.mark.nightly
def test_no_test_is_no_kill(verdicts: tuple[Path, dict[str, Result]]) -> None:
    mine = [result for key, result in verdicts[1].items() if "::untested:" in key]
    assert {(result.outcome, result.ran) for result in mine} == {("survived", 0)}


@pytest.mark.nightly
def test_a_run_goes_on_where_it_stopped(
    tree: Path, verdicts: tuple[Path, dict[str, Result]], tmp_path: Path,
) -> None:
    """Check that a truncated line is tried again, and that complete lines are not."""
    lines = (verdicts[0] / "results.jsonl").read_text().splitlines()
    killed = [line for line in lines if '"assertion"' in line]
    others = [line for line in lines if '"assertion"' not in line]
    (tmp_path / "results.jsonl").write_text("\n".join([*others, *killed[1:], killed[0][:20]]) + "\n")
    done = try_all(tree, tmp_path)
    assert f"{len(TRIED)} mutants, {len(TRIED) - 1} tried before, 1 to try" in done.stdout
    assert {key: result.outcome for key, result in stored(tree, tmp_path).items()} == {
        key: result.outcome for key, result in verdicts[1].items()
    }


@pytest.mark.nightly
def test_a_verdict_holds_for_one_text_of_a_module(tmp_path: Path) -> None:
    result = Result("key", digest(SOURCE), "survived", "ci", "", "", 3, 0.5)
    append(tmp_path, replace(result, key="old", digest=digest("x = 1\n")))
    append(tmp_path, result)
    append(tmp_path, replace(result, outcome="assertion"))
    known = {"old": digest(SOURCE), "key": digest(SOURCE)}
    assert read(tmp_path, known) == {"key": replace(result, outcome="assertion")}
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["old", "key", "key"]


@pytest.mark.nightly
def test_what_fails_unmutated_kills_nothing(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    (tmp_path / "tree" / "conformance" / "test_toy.py").write_text(TESTS.replace("[2, 2, 3]", "[2, 2, 4]"))
    done = try_all(tmp_path / "tree", tmp_path / "verdicts")
    assert "judges nothing: conformance/test_toy.py::test_clamp" in done.stdout.replace("\n", "")
    found = stored(tmp_path / "tree", tmp_path / "verdicts")
    assert outcome(found, "comparison: x < low -> x > low") == "survived"
    assert outcome(found, "arithmetic: n + 2 -> n - 2") == "assertion"


ENTRY = '[[survivor]]\nmutant = "{}"\nkind = "equivalent"\nwhy = "Because."\n'


def test_a_survivor_needs_a_reason_and_a_reason_a_survivor() -> None:
    a, b, c = toy()[:3]
    results = {a.key: Result(a.key, "", "survived", "ci", "", "", 1, 0.0),
               b.key: Result(b.key, "", "error", "dev", "t", "IndexError: x", 1, 0.0)}
    explained = explanations(f"[[survivor]]\nmutant = '''{a.key}'''\nkind = 'equivalent'\nwhy = 'Because.'\n")
    assert problems([a, b], [a, b, c], results, explained) == []
    assert problems([a, b, c], [a, b, c], results, explained) == [f"untried: {c.key}"]
    assert problems([a, b], [a, b, c], results, {})[0].startswith(f"survived, unexplained: {a.key}")
    assert problems([b], [b, c], results, explained) == [f"explained, but no mutant: {a.key}"]
    killed = {**results, a.key: replace(results[b.key], key=a.key)}
    assert problems([a, b], [a, b], killed, explained) == [f"explained, but killed: {a.key}"]
    text = table([a, b], [a, b, c], results, explained)
    assert "| **all** | 3 | 2 | 1 | 0 | 1 | 0 | 50.0 | 9.5 to 90.5 |" in text
    assert "IndexError 1" in text
    assert f"- `{a.key}`: equivalent. Because." in text


@pytest.mark.parametrize("entry", [ENTRY.replace("equivalent", "lucky"), ENTRY.replace("Because.", " "), 2 * ENTRY])
def test_the_list_has_one_form(entry: str) -> None:
    with pytest.raises(ValueError, match=r"why|twice"):
        explanations(entry)


def test_the_committed_list_can_be_read() -> None:
    assert all(entry.why for entry in explanations(LIST.read_text(encoding="utf-8")).values())


def test_the_reference_is_not_imported_before_its_arrays_are_checked() -> None:
    """jaxtyping's hook checks only modules that are imported after it."""
    code = "import lab.mutants.__main__, sys; sys.exit('reference' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
