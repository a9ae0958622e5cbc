"""Errors planted in the model are found by a theorem that no longer holds or by a vector; those in the reference by the
three-way comparison."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.assurance.proofs.coq.assumptions import OVER_THE_REALS
from conformance.assurance.proofs.coq.build import (
    FILES,
    MODEL,
    ProofFailure,
    affected,
    compile_all,
    compile_engine,
    fresh,
)
from conformance.assurance.proofs.coq.three_way import (
    block_choosers,
    block_questions,
    differences,
    engine_backend,
    questions,
)
from conformance.assurance.proofs.coq.vectors import check_vectors
from conformance.assurance.saboteurs import SABOTEURS
from conformance.assurance.saboteurs.install import private_reference
from spec.backend import resolve

__all__ = ["ERRORS", "INTEGERS", "Planted", "found_by", "planted"]


@dataclass(frozen=True)
class Planted:
    """An error: what it is, the file of the model, and the text that becomes another."""

    what: str
    file: str
    old: str
    new: str


INTEGERS = tuple(name for name in FILES if name not in ("Attention", *OVER_THE_REALS))
"""The files that are not about the reals."""
TWINS = frozenset({
    "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNKS", "CC-TRUNK-IMPACT",
    "CC-ALLOCATE", "CC-DISSOLVE", "CC-DISSOLVE-D", "PO-BEST-BLOCKS",
})
"""Items whose every saboteur shows in a stage. A wrong CC-CUT need not: the kept set may be the same."""
INVISIBLE = frozenset({"CC_DISSOLVE_PROTECTED_FIRST"})
"""The stage sorts the positions that it is given."""
QUESTIONS = 1000
NOTHING = "nothing"

ERRORS = (
    Planted("the last chunk is lost", "Trunks", "(n + C - 1) / C", "n / C"),
    Planted("six tokens of the running trunk", "Trunks", "stop - 5", "stop - 6"),
    Planted("the smaller pieces first", "Trunks",
            "repeat (size / k + 1) (Z.to_nat (size mod k)) ++ repeat (size / k) (Z.to_nat (k - size mod k))",
            "repeat (size / k) (Z.to_nat (k - size mod k)) ++ repeat (size / k + 1) (Z.to_nat (size mod k))"),
    Planted("a merge at tau itself", "Trunks",
            "ltb zero (minus (total weights) (times tau_merge (of_Z (count weights))))",
            "negb (ltb (minus (total weights) (times tau_merge (of_Z (count weights)))) zero)"),
    Planted("a merge must stay below T_max", "Trunks", "size + next <=? T_max", "size + next <? T_max"),
    Planted("edges against their direction count", "Trunks",
            "map snd (filter (fun edge => fst edge =? second) (near first))",
            "map snd (filter (fun edge => fst edge =? first) (near second))"),
    Planted("four members in the impact", "Trunks", "take 3", "take 4"),
    Planted("one token too many is recent", "Dissolution", "n - W_recent <? stop", "n - W_recent <=? stop"),
    Planted("the cut is not held to T_alive", "Dissolution",
            "Z.min (Z.max 0 (T_alive - (B - B_prot))) T_alive", "Z.max 0 (T_alive - (B - B_prot))"),
    Planted("N_min may be exceeded only", "Dissolution", "N_min <=? size - c", "N_min <? size - c"),
    Planted("a remnant below N_min stays whole", "Dissolution", "else (0, c - size).", "else (size, c - size)."),
    Planted("the higher score goes first", "Dissolution", "ltb (score g) (score h)", "ltb (score h) (score g)"),
    Planted("the weaker members stay", "Dissolution", "ltb (snd j) (snd i)", "ltb (snd i) (snd j)"),
    Planted("protected trunks go", "Dissolution", "(g, size g)) safe_ones", "(g, 0)) safe_ones"),
    Planted("D is not weakened", "Dissolution", "times (ratio g k) (strength g)", "strength g"),
    Planted("the higher index first on a tie", "Lists", "place x <=? place y", "place y <=? place x"),
    Planted("the fraction is rounded down", "Budgets", "=> Qceiling (", "=> Qfloor ("),
    Planted("the smaller remainder is served first", "Budgets",
            "ltb (remainder (snd y)) (remainder (snd x))", "ltb (remainder (snd x)) (remainder (snd y))"),
    Planted("the first layer is not held to the past", "Budgets", "(2 * base - past)%Q else line", "line else line"),
    Planted("units behind one that does not fit", "Selection",
            "(room - width u) rest else []", "(room - width u) rest else while_they_fit room rest"),
    Planted("a unit without a score comes first", "Selection", "| None, _ => false", "| None, _ => true"),
    Planted("the open block goes", "Blocks", " ++ range (count tokens - open_tokens) (count tokens)", ""),
    Planted("the open block takes no place", "Blocks", "(B - open_tokens) / b", "(B - 0 * open_tokens) / b"),
    Planted("the share is rounded up to blocks", "Blocks", "(B - open_tokens) / b", "(B - open_tokens + b - 1) / b"),
    Planted("a protected token keeps no other", "Blocks", "existsb snd block", "forallb snd block"),
    Planted("a token without a score is left out of the sum", "Blocks", "| _, _ => None end", "| _, _ => sum end"),
    Planted("the worse path decides", "Score", "greatest D (", "least D ("),
    Planted("likeness may be negative", "Diversity", "likeness := zero", "likeness := minus zero (of_Z 2)"),
    Planted("the lower gain first", "Diversity", "ltb (gain d) (gain c)", "ltb (gain c) (gain d)"),
    Planted("a kept token may be chosen again", "Diversity", "negb (place c =? i)", "true"),
    Planted("new tokens are numbered by slots", "Compaction", "(numbered seen new)", "(numbered (count cache) new)"),
)


def _refused(check: Callable[[], object]) -> str:
    """The statement that Coq refuses while a check runs; empty where it refuses none."""
    try:
        check()
    except ProofFailure as failure:
        return failure.statement
    return ""


def found_by(error: Planted, compiled: Path, home: Path) -> tuple[str, str]:
    """The first theorem and the first vector that Coq refuses once the error stands in a copy of what is compiled."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(compiled, home)
    file = home / f"{error.file}.v"
    text = file.read_text(encoding="utf-8")
    assert text.count(error.old) == 1, error
    file.write_text(text.replace(error.old, error.new), encoding="utf-8")
    files = affected(home, error.file, INTEGERS)
    compile_all(home, tuple(name for name in files if name in MODEL))
    theorem = _refused(lambda: compile_all(home, tuple(name for name in files if name not in MODEL)))
    return theorem, _refused(lambda: check_vectors(home))


def _in_the_model(compiled: Path, folder: Path) -> Iterator[str]:
    print("| file | error in the model | theorem | vector |\n| --- | --- | --- | --- |")
    for error in ERRORS:
        found = found_by(error, compiled, folder / "planted")
        cells = " | ".join(f"`{statement}`" if statement else NOTHING for statement in found)
        print(f"| {error.file}.v | {error.what} | {cells} |", flush=True)
        if not any(found):
            yield error.what


def _in_the_reference(compiled: Path) -> Iterator[str]:
    """The saboteurs of the model: extracted model, numba (brute force for blocks) and the wrong reference are asked."""
    engine, model = engine_backend(compile_engine(compiled))
    print("\n| item | error in the reference | found by |\n| --- | --- | --- |")
    for saboteur in SABOTEURS.values():
        if saboteur.item not in TWINS or saboteur.beyond or saboteur.name in INVISIBLE:
            continue
        wrong = private_reference(saboteur)
        if saboteur.item == "PO-BEST-BLOCKS":
            choosers = block_choosers(engine, wrong.modules["reference.policies.selectors"].best_blocks)
            found = next(differences(choosers, block_questions(1, QUESTIONS)), NOTHING)
        else:
            backends = {"coq": model, "numba": resolve("numba"), "reference": wrong.backend}
            found = next(differences(backends, questions(1, QUESTIONS)), NOTHING)
        print(f"| {saboteur.item} | {saboteur.reading} | {found} |", flush=True)
        if not found.endswith(": reference stands alone"):
            yield saboteur.name
    engine.stop()


def planted() -> int:
    """Print two tables; 1 where an error was not found."""
    with TemporaryDirectory() as folder:
        compiled = Path(folder) / "compiled"
        fresh(compiled)
        compile_all(compiled, INTEGERS)
        lost = [*_in_the_model(compiled, Path(folder)), *_in_the_reference(compiled)]
    print(f"coq: {', '.join(lost) or 'none'} of the planted errors not found")
    return int(bool(lost))
