"""Every lemma is proved, every false claim is refuted, and the translator refuses code that it does not understand."""

import inspect
from functools import cache
from importlib import import_module

import pytest

z3 = pytest.importorskip("z3")

from lab.mutants.edits import Edit, replaced  # noqa: E402
from lab.proofs import __main__ as report  # noqa: E402
from lab.proofs.__main__ import EDITS, all_claims, source_claims  # noqa: E402
from lab.proofs.coq.planted import ROWS, Planted, failing_vectors, read_rows  # noqa: E402
from lab.proofs.eviction import STEP  # noqa: E402
from lab.proofs.source import Claim, Code, NotUnderstood, decide  # noqa: E402

# Lemmas about the invariant read no source, so no edit can break them. Each has a false claim as a counterpart.
WITHOUT_SOURCE = {
    "the invariant holds before the loop",
    "at the end the cut is met and overshot by at most max(0, N_min - 1)",
    "what stays at the end is the total, less c0, less the overshoot",
    "closed form: the loop's cut and the prefix sum start together",
    "the branch |g| <= c is redundant: the last branch does the same",
}


ITEMS = (
    "CC-MEMORY", "CC-BUDGET-FORMS", "CC-BUDGET", "CC-PROTECTED", "CC-INTERFACE", "CC-MERGE", "CC-SPLIT",
    "CC-ALLOCATE", "CC-CUT", "CC-KEEP-COUNT", "CC-DISSOLVE", "CC-CROSS",
)

SIZE, CUT = z3.Ints("size cut")


@cache
def claims() -> tuple[Claim, ...]:
    return tuple(all_claims())


@pytest.mark.parametrize("item", [pytest.param(item, marks=pytest.mark.spec(item)) for item in ITEMS])
def test_claims_are_decided_as_expected(item: str) -> None:
    verdicts = [decide(claim) for claim in claims() if claim.item == item]
    assert {verdict.outcome for verdict in verdicts} == {"proved", "refuted"}
    assert [str(verdict) for verdict in verdicts if verdict.surprising] == []


def test_every_claim_belongs_to_an_item_above() -> None:
    assert {claim.item for claim in claims()} == set(ITEMS)


def test_there_are_as_many_false_claims_as_lemmas() -> None:
    lemmas = [claim.name for claim in claims() if claim.true]
    assert len(lemmas) <= sum(not claim.true for claim in claims())
    assert len({claim.name for claim in claims()}) == len(claims())


def test_each_lemma_that_reads_a_source_falls_with_an_edit_of_it() -> None:
    lemmas = {claim.name for claim in claims() if claim.true}
    assert lemmas - {edit.lemma for edits in EDITS.values() for edit in edits} == WITHOUT_SOURCE


def test_an_edit_is_a_surprise() -> None:
    """Check that the proof fails if the code has > instead of >= in Eq. 32."""
    edited = Code({STEP: ("size - c >= N_min", "size - c > N_min")})
    lemmas = [claim for claim in source_claims(edited) if claim.item == "CC-ALLOCATE" and claim.true]
    surprises = [verdict for verdict in map(decide, lemmas) if verdict.surprising]
    assert len(surprises) >= 3
    assert all(verdict.outcome == "refuted" and verdict.counterexample for verdict in surprises)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("return (size, c)", "return sorted([size, c])", "sorted"),
        ("if c <= 0:", "while c <= 0:", "while"),
        ("c <= 0", "unknown <= 0", "unknown"),
        ("c <= 0", "c <= 0.5", "0.5"),
        ("return (size, c)", "pass", "pass"),
        ("no such text", "", "does not stand there once"),
    ],
)
def test_what_the_translator_does_not_understand_is_refused(old: str, new: str, why: str) -> None:
    with pytest.raises(NotUnderstood, match=why):
        Code({STEP: (old, new)}).returned(STEP, size=SIZE, c=CUT, N_min=1)


def planted_in(place: str) -> tuple[Planted, Edit]:
    """Return the row of planted.toml whose error is in this function, and the row as an edit."""
    file, _, name = place.partition(":")
    module = import_module(file.removesuffix(".py").replace("/", "."))
    source = inspect.getsource(getattr(module, name))
    row = next(row for row in read_rows(ROWS) if row.file == file and row.old in source)
    return row, Edit(f"{module.__name__}:{name}", find=row.old, replace=row.new)


@pytest.mark.spec("CC-ALLOCATE", "CC-DISSOLVE", "CC-TRUNKS", "PO-WHOLE-SHARES")
@pytest.mark.parametrize("place", report.NOT_READ)
def test_what_no_lemma_reads_is_seen_by_vectors(place: str) -> None:
    row, edit = planted_in(place)
    assert next(failing_vectors(row.item), "") == ""
    with replaced(edit):
        assert next(failing_vectors(row.item), "") != ""
