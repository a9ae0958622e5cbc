"""Errors planted in the model: each is found by a theorem that no longer holds, or by a vector in the kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.assurance.proofs.coq.build import FILES, ProofFailure, compile_all, fresh
from conformance.assurance.proofs.coq.vectors import check_vectors

__all__ = ["ERRORS", "Planted", "found_by", "planted"]


@dataclass(frozen=True)
class Planted:
    """An error: what it is, the file of the model, and the text that becomes another."""

    what: str
    file: str
    old: str
    new: str


ERRORS = (
    Planted("the last chunk is lost", "Trunks", "(n + C - 1) / C", "n / C"),
    Planted("six tokens of the running trunk", "Trunks", "stop - 5", "stop - 6"),
    Planted("the smaller pieces first", "Trunks",
            "repeat (size / k + 1) (Z.to_nat (size mod k)) ++ repeat (size / k) (Z.to_nat (k - size mod k))",
            "repeat (size / k) (Z.to_nat (k - size mod k)) ++ repeat (size / k + 1) (Z.to_nat (size mod k))"),
    Planted("a merge at tau itself", "Trunks", "ltb zero (minus (total weights) (times tau_merge (of_Z (count weights))))",
            "negb (ltb (minus (total weights) (times tau_merge (of_Z (count weights)))) zero)"),
    Planted("a merge must stay below T_max", "Trunks", "size + next <=? T_max", "size + next <? T_max"),
    Planted("edges against their direction count", "Trunks", "(near first))\n", "(near first ++ near second))\n"),
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
            "while_they_fit (room - width u) rest else []", "while_they_fit (room - width u) rest else while_they_fit room rest"),
    Planted("a unit without a score comes first", "Selection", "| None, _ => false", "| None, _ => true"),
    Planted("the worse path decides", "Score", "greatest D (", "least D ("),
    Planted("new tokens are numbered by slots", "Compaction", "(numbered seen new)", "(numbered (count cache) new)"),
)


def found_by(error: Planted, home: Path) -> str:
    """The theorem that fails once the error is planted, or the vector; empty where neither does."""
    fresh(home, {f"{error.file}.v": (error.old, error.new)})
    try:
        compile_all(home, tuple(name for name in FILES if name not in ("Attention", "Masking", "RealCounterexamples")))
        check_vectors(home)
    except ProofFailure as failure:
        return failure.statement
    return ""


def _rows() -> Iterator[tuple[Planted, str]]:
    with TemporaryDirectory() as folder:
        for error in ERRORS:
            yield error, found_by(error, Path(folder) / "coq")


def planted() -> int:
    """Print a table; 1 where an error was not found."""
    lost = 0
    print("| file | error | found by |\n| --- | --- | --- |")
    for error, statement in _rows():
        lost += not statement
        print(f"| {error.file}.v | {error.what} | {f'`{statement}`' if statement else 'nothing'} |", flush=True)
    print(f"coq: {len(ERRORS) - lost} of {len(ERRORS)} planted errors found")
    return int(lost > 0)
