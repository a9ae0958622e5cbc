"""The Coq files: named by items, closed, run as an engine, able to fail. Tests that need Coq are skipped without it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.engine.process import Engine
from conformance.items import known_items
from conformance.methods.method import Method, asked
from conformance.policy_suite.test_method import difference
from conformance.strategies.policy_inputs import drawn
from lab.mutants.edits import replaced
from lab.mutants.written import MUTANTS
from lab.proofs.coq import __main__ as command
from lab.proofs.coq import build, inputs, three_way
from lab.proofs.coq import engine as wrapper
from lab.proofs.coq.build import stated, theorems
from lab.proofs.coq.engine import modelled
from lab.proofs.coq.planted import ROWS, detection_of, read_rows
from lab.proofs.coq.vectors import STAGES, written

PROOFS = build.HERE / "proofs"
NEEDED = ("Lists", "Dissolution", "ListFacts", "DissolutionTheorems", "Ranks")
needs_coq = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "Coq is there")


def test_every_theorem_is_about_an_item() -> None:
    assert [one.name for one in theorems(PROOFS, known_items()) if not one.item] == []
    names = [name for _, _, name in stated(PROOFS)]
    assert len(names) == len(set(names)) >= 100


def test_every_file_is_compiled_and_no_proof_is_left_out() -> None:
    sources = [path for folder in ("model", "proofs") for path in (build.HERE / folder).glob("*.v")]
    assert {path.stem for path in sources} == set(build.FILES)
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert build.unsafe(text) == [], path


def test_each_planted_error_is_one_edit_of_an_item_of_the_specification() -> None:
    rows = read_rows(ROWS)
    assert len(rows) >= 45
    assert {row.item for row in rows} <= set(known_items())


def test_every_operation_of_the_vectors_and_of_the_engine_is_asked() -> None:
    """A stage with a different name covers some items."""
    asked = {*inputs.ITEMS, *three_way.STAGES}
    assert STAGES.keys() <= asked
    assert inputs.ITEMS.keys() == wrapper.ITEMS
    assert len(wrapper.MODELLED) == len(three_way.STAGES)


@pytest.mark.spec("PO-WHOLE-SHARES")
def test_the_kernel_is_asked_about_compact_vectors() -> None:
    """Check that a compact vector contains the only tie of remainders."""
    assert "vector_PO_WHOLE_SHARES_502" in dict(written())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model's compiled dissolution and its theorems."""
    home = tmp_path_factory.mktemp("coq") / "compiled"
    build.fresh(home)
    build.compile_all(home, NEEDED)
    return home


THEOREM = "Theorem CC_CUT_odd : False. Proof. exact (odd 0%nat). Qed.\n"
ODD = {
    "axiom": ("Axiom odd : nat -> False.\n" + THEOREM, "odd"),
    "guard": (
        "Unset Guard Checking.\nFixpoint odd (n : nat) : False := odd n.\n" + THEOREM, "odd is assumed to be guarded.",
    ),
    "attribute": (
        "#[bypass_check(guard)] Fixpoint odd (n : nat) : False := odd n.\n" + THEOREM, "odd is assumed to be guarded.",
    ),
    "positivity": (
        "Unset Positivity Checking.\nInductive bad : Prop := B : (bad -> False) -> bad.\n"
        "Definition not (b : bad) : False := match b with B h => h b end.\n"
        "Theorem CC_CUT_odd : False. Proof. exact (not (B not)). Qed.\n", "bad is assumed to be positive.",
    ),
    "universe": (
        "Unset Universe Checking.\nDefinition odd : Type := Type.\nDefinition same : odd := odd.\n"
        "Set Universe Checking.\n"
        "Theorem CC_CUT_odd : exists x : Type, x = same. Proof. exists same. reflexivity. Qed.\n",
        "same relies on an unsafe hierarchy.",
    ),
}


@needs_coq
@pytest.mark.parametrize("kind", ODD)
def test_whatever_a_theorem_assumes_is_seen_by_each_judge(compiled: Path, kind: str) -> None:
    text, words = ODD[kind]
    (compiled / "Odd.v").write_text(text, encoding="utf-8")
    build.run_coq(compiled, "Odd")
    assert words in build.rests_on(compiled, "Odd", ["CC_CUT_odd"])
    assert any("Odd." in line for line in build.checked(compiled, ("Odd",)))
    assert len(build.unsafe(text)) >= 1


@needs_coq
def test_a_type_in_type_of_the_command_line_is_seen(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Definition T : Type := Type.\nTheorem CC_CUT_odd : True. Proof. exact (let x : T := T in I). Qed.\n"
    (compiled / "Odd.v").write_text(text, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(build, "COQC", (*build.COQC, "-type-in-type"))
        build.run_coq(compiled, "Odd")
    assert "CC_CUT_odd relies on an unsafe hierarchy." in build.rests_on(compiled, "Odd", ["CC_CUT_odd"])
    assert any("Odd." in line for line in build.checked(compiled, ("Odd",)))
    assert not {"-type-in-type", "-noinit", "-l", "-load-vernac-source"} & set(build.COQC)


@pytest.mark.parametrize("line", [
    "Admitted.", "  admit.", "Axiom a : False.", "Local Parameter x : nat.",
    "Conjecture c : False.", "Set Positivity  Checking.", "Declare ML Module x.", "Load other.",
])
def test_a_command_that_assumes_is_refused_in_a_source_and_not_in_a_comment(line: str) -> None:
    assert len(build.unsafe(f"Theorem a : True.\n{line}\n")) == 1
    assert build.unsafe(f"(* (* {line} *)\n{line}\n *)\nLemma admitted_least : True.\n") == []


@needs_coq
def test_a_file_without_assumptions_has_no_surprise_and_a_false_theorem_is_refused(compiled: Path) -> None:
    assert list(build.checked(compiled, NEEDED)) == []
    (compiled / "Wrong.v").write_text("Theorem CC_CUT_wrong : 1 = 2.\nProof. reflexivity. Qed.\n", encoding="utf-8")
    with pytest.raises(build.ProofFailure, match="CC_CUT_wrong does not hold"):
        build.run_coq(compiled, "Wrong")


STATED = {
    "CC-BUDGET": "is_the_least", "CC-BUDGET-FORMS": "grammar", "CC-CUT": "is_the_least", "CC-EDGES": "of_a_pair",
    "CC-SENTENCES": "offsets", "CC-MERGE": "rule", "CC-TRUNKS": "one_way", "CC-TRUNK-IMPACT": "of_the_largest",
    "CC-NORMALISED-IMPACT": "formula", "CC-ALLOCATE": "ratio", "CC-KEEP-COUNT": "of_the_ratio",
    "CC-DISSOLVE-D": "cases", "CC-DISSOLVE": "kept", "CC-COMPACT": "decoding_equals_masking",
    "DV-COSINE": "first_to_last", "DV-GREEDY": "is_greedy", "PO-TOP-UNITS": "formula",
    "PO-WHOLE-SHARES": "formula", "PO-PYRAMID-BUDGET": "bounds",
}
"""For each item, the theorem that states all or most of it."""


@pytest.mark.spec(*STATED)
def test_a_theorem_says_what_the_item_says() -> None:
    names = {name for _, _, name in stated(PROOFS)}
    assert {f"{item.replace('-', '_')}_{what}" for item, what in STATED.items()} <= names


@needs_coq
@pytest.mark.spec("DV-GREEDY", "PO-WHOLE-SHARES", "PO-PYRAMID-BUDGET", "CC-BUDGET-FORMS")
@pytest.mark.parametrize(("model", "proofs", "old", "new"), [
    ("Diversity", "DiversityTheorems", "ltb (likeness c) s then s else likeness c", "ltb zero s then s else zero"),
    ("Budgets", "BudgetTheorems", "(remainder (snd x))) fst", "(remainder (snd x))) (fun x => - fst x)"),
    ("Budgets", "BudgetTheorems", "if Qle_bool past base then past else base", "base"),
    pytest.param(
        "Budgets", "GrammarTheorems", "if before + after <=? 0", "if (before <=? 0) || (after <=? 0)",
        marks=pytest.mark.nightly,
    ),
], ids=["the newest kept alone", "higher index on a tie", "B above n", "1.%"])
def test_an_error_in_the_model_refutes_a_theorem(
    compiled: Path, tmp_path: Path, model: str, proofs: str, old: str, new: str,
) -> None:
    home = tmp_path / "wrong"
    shutil.copytree(compiled, home)
    file = home / f"{model}.v"
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")
    build.run_coq(home, model)
    with pytest.raises(build.ProofFailure):
        build.run_coq(home, proofs)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program of the extracted model."""
    home = tmp_path_factory.mktemp("coq") / "engine"
    build.fresh(home)
    build.compile_all(home, build.MODEL[:8])
    return build.compile_engine(home)


@pytest.fixture(scope="module")
def coq(program: Path) -> Iterator[tuple[Engine, three_way.Side]]:
    """Yield the extracted model as a process."""
    process, side = three_way.extracted(program)
    yield process, side
    process.stop()


@needs_coq
@pytest.mark.nightly  # `nox -s coq` runs the suite on the engine in CI
@pytest.mark.spec(*{name for name in (*inputs.ITEMS, "CC-TRUNKS", "CC-DISSOLVE") if name in known_items()})
def test_the_engine_agrees_with_the_reference_and_brute_force(coq: tuple[Engine, three_way.Side]) -> None:
    sides = {"coq": coq[1], "brute force": three_way.independent(), "reference": three_way.in_reference()}
    assert list(three_way.differences(sides, three_way.questions(1, 6))) == []


@needs_coq
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.spec(MUTANTS[name].item)) for name in (
        "CC_ALLOCATE_NEVER_TOO_MANY", "PO_BEST_BLOCKS_THE_OPEN_BLOCK_FOR_NOTHING",
    )
])
def test_a_wrong_reference_stands_alone(coq: tuple[Engine, three_way.Side], name: str) -> None:
    sides = {"coq": coq[1], "brute force": three_way.independent()}
    with replaced(MUTANTS[name].edit):
        sides["reference"] = three_way.in_reference()
        assert next(three_way.differences(sides, three_way.questions(1, 40))).endswith("reference stands alone")


@needs_coq
@pytest.mark.spec("CC-BUDGET-FORMS", "PO-WHOLE-SHARES", "PO-PYRAMID-BUDGET")
@pytest.mark.parametrize(("operation", "inputs", "expected"), [
    ("CC-BUDGET-FORMS", {"budget": "0.5364229131356656", "seen": 1000}, {"tokens": 537}),
    ("CC-BUDGET-FORMS", {"budget": "15", "seen": 1000}, {"tokens": 15}),
    ("CC-BUDGET-FORMS", {"budget": str(2**63 - 1), "seen": 9}, {"tokens": 2**63 - 1}),
    ("CC-BUDGET-FORMS", {"budget": str(2**63), "seen": 9}, None),
    ("PO-WHOLE-SHARES", {"targets": [f"{10**18 + 1}/1000", "999/1000"]}, {"shares": [10**15, 1]}),
    ("PO-PYRAMID-BUDGET", {"B": 10**15, "W": 1, "L": 2, "n": 2**52, "beta": 2}, {
        "shares": [15 * 10**14, 5 * 10**14]}),
])
def test_integers_have_no_largest(coq: tuple[Engine, three_way.Side], operation: str, inputs: dict[str, object],
                                  expected: object) -> None:
    assert coq[1].item(operation, inputs, {}) == expected


@needs_coq
@pytest.mark.spec("PO-STREAMINGLLM")
def test_the_model_keeps_what_streamingllm_keeps(program: Path) -> None:
    engine = Engine(f"{sys.executable} -m lab.proofs.coq.engine {program}", 60.0)
    method = Method("streamingllm")
    try:
        assert engine.hello.families["methods"] == ["streamingllm"]
        for seed in range(8):
            inputs, B = drawn(seed), 4 + seed
            assert difference(asked(engine, method, inputs, B), method.wanted(inputs, B)) == ""
    finally:
        engine.stop()


@needs_coq
def test_the_suite_refuses_a_wrong_engine(program: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(f"#!/bin/sh\n{program} | sed -u 's/\"offsets\":\\[0,/\"offsets\":[1,/'\n", encoding="utf-8")
    wrong.chmod(0o755)
    assert command.judge(wrong, False, "-p", "no:xdist", "-k", "trunks_equal_the_brute_force") == 1


@needs_coq
@pytest.mark.nightly
@pytest.mark.spec("CC-BUDGET-FORMS")
def test_an_error_in_a_twin_is_found_by_comparison(program: Path, tmp_path: Path) -> None:
    """No vector has a budget text of 64 characters."""
    row = next(row for row in read_rows(ROWS) if row.file == "spec/budget.py" and "64" in row.what)
    actual = detection_of(row, program.parent, tmp_path / "twin", 0)
    assert actual.comparison.endswith("reference stands alone")
    assert actual.proof == ""


def test_the_model_is_asked_for_the_papers_forms_alone() -> None:
    paper = {"allocation": "cut", "coverage": "0x0.0p+0"}
    assert modelled({"op": "crystal.dissolve", "arguments": {"parameters": paper}})
    assert not modelled({"op": "crystal.dissolve", "arguments": {"parameters": {**paper, "allocation": "tiers"}}})
    assert not modelled({"op": "crystal.graph", "arguments": {}})
    assert not modelled({"op": ["crystal.graph"], "arguments": {}})
    assert not modelled(None)
