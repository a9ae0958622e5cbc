"""The Coq files: named by items, closed, run as an engine, able to fail. What needs Coq is skipped without it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.assurance.proofs.coq import __main__ as command
from conformance.assurance.proofs.coq import assumptions, build, three_way
from conformance.assurance.proofs.coq.engine import modelled
from conformance.assurance.proofs.coq.planted import ERRORS
from conformance.assurance.proofs.coq.theorems import stated, theorems
from conformance.assurance.saboteurs import SABOTEURS
from conformance.assurance.saboteurs.install import private_reference
from conformance.engine.process import Engine
from conformance.items import known_items
from reference.policies.selectors import best_blocks
from spec.backend import Backend, resolve

PROOFS = build.HERE / "proofs"
NEEDED = ("Lists", "Dissolution", "ListFacts", "DissolutionTheorems", "Ranks")
needs_coq = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "Coq is there")


def test_every_theorem_is_about_an_item() -> None:
    assert [one.name for one in theorems(PROOFS, known_items()) if not one.item] == []
    names = [name for _, _, name in stated(PROOFS)]
    assert len(names) == len(set(names)) >= 100


def test_a_name_goes_to_the_longest_item(tmp_path: Path) -> None:
    text = "\n  Theorem CC_BUDGET_FORMS_x : True.\nTheorem CC_NONE_y : True.\n"
    (tmp_path / "a.v").write_text(text, encoding="utf-8")
    found = [(one.item, one.line) for one in theorems(tmp_path, ["CC-BUDGET", "CC-BUDGET-FORMS"])]
    assert found == [("CC-BUDGET-FORMS", 2), ("", 3)]


def test_every_file_is_compiled_and_no_proof_is_left_out() -> None:
    sources = [path for folder in ("model", "proofs") for path in (build.HERE / folder).glob("*.v")]
    assert {path.stem for path in sources} == set(build.FILES)
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("Admitted", "Axiom ", "Parameter ", "admit.")), path


def test_each_planted_error_is_one_edit() -> None:
    assert len(ERRORS) >= 10
    for error in ERRORS:
        assert (build.HERE / "model" / f"{error.file}.v").read_text(encoding="utf-8").count(error.old) == 1, error


def test_without_coq_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert command.main([]) == 0
    assert capsys.readouterr().out == f"coq: coqc and ocamlfind not found: {build.INSTALL}\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's dissolution with its theorems."""
    home = tmp_path_factory.mktemp("coq") / "compiled"
    build.fresh(home)
    build.compile_all(home, NEEDED)
    return home


@needs_coq
@pytest.mark.spec("CC-ALLOCATE", "CC-CUT", "CC-PROTECTED", "CC-KEEP-COUNT")
def test_theorems_of_dissolution_rest_on_nothing(compiled: Path) -> None:
    names = [name for path, _, name in stated(PROOFS) if path.stem == "DissolutionTheorems"]
    assert assumptions.rests_on(compiled, "DissolutionTheorems", names) == frozenset()


@needs_coq
def test_an_axiom_is_seen_and_a_false_theorem_refused(compiled: Path) -> None:
    odd = "Axiom odd : 1 = 2.\nTheorem CC_CUT_odd : 1 = 2.\nProof. apply odd. Qed.\n"
    (compiled / "Odd.v").write_text(odd, encoding="utf-8")
    build.run_coq(compiled, "Odd")
    assert assumptions.rests_on(compiled, "Odd", ["CC_CUT_odd"]) == {"odd"}
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
"""The theorem of an item that says all of it, or most."""


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
    ("Budgets", "GrammarTheorems", "if before + after <=? 0", "if (before <=? 0) || (after <=? 0)"),
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
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Backend]]:
    """The extracted model as a process."""
    home = tmp_path_factory.mktemp("coq") / "engine"
    build.fresh(home)
    build.compile_all(home, build.MODEL[:8])
    process, backend = three_way.engine_backend(build.compile_engine(home))
    yield process, backend
    process.stop()


@needs_coq
@pytest.mark.spec("CC-TRUNKS", "CC-DISSOLVE", "PO-TOP-UNITS")
def test_the_engine_agrees_with_the_reference_and_a_wrong_one_is_seen(engine: tuple[Engine, Backend]) -> None:
    backends = {"coq": engine[1], "numpy": resolve("numpy")}
    assert list(three_way.differences(backends, three_way.questions(1, 40))) == []
    backends["reference"] = private_reference(SABOTEURS["CC_ALLOCATE_NEVER_TOO_MANY"]).backend
    assert next(three_way.differences(backends, three_way.questions(1, 40))).endswith("reference stands alone")


@needs_coq
@pytest.mark.spec("PO-BEST-BLOCKS")
def test_blocks_are_those_of_brute_force_and_a_wrong_reference_is_seen(engine: tuple[Engine, Backend]) -> None:
    choosers = three_way.block_choosers(engine[0], best_blocks)
    assert list(three_way.differences(choosers, three_way.block_questions(1, 40))) == []
    wrong = three_way.block_choosers(engine[0], SABOTEURS["PO_BEST_BLOCKS_THE_OPEN_BLOCK_FOR_NOTHING"].wrong)
    assert next(three_way.differences(wrong, three_way.block_questions(1, 40))).endswith("reference stands alone")


def test_the_model_is_asked_for_the_papers_forms_alone() -> None:
    paper = {"allocation": "cut", "coverage": "0x0.0p+0"}
    assert modelled({"op": "crystal.dissolve", "arguments": {"parameters": paper}})
    assert not modelled({"op": "crystal.dissolve", "arguments": {"parameters": {**paper, "allocation": "tiers"}}})
    assert not modelled({"op": "crystal.graph", "arguments": {}})
