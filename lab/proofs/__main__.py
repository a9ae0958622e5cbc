"""Check all claims, each with a false twin: `python -m lab.proofs`.

The twin is the same lemma over a source with one edit, which z3 must refute.
"""

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lab.proofs import eviction, shapes
from lab.proofs.source import Claim, Code, decide


class Edit(NamedTuple):
    """Edit of the function at `place` from `old` to `new`, after which the lemma of this name must be refuted."""

    lemma: str
    place: str
    old: str
    new: str


PARTS = {"shapes": shapes, "eviction": eviction}
ROWS = tomllib.loads(Path(__file__).with_name("edits.toml").read_text(encoding="utf-8"))
EDITS = {part: [Edit(*row) for row in rows] for part, rows in ROWS.items()}


def edited_claims() -> Iterator[Claim]:
    """Yield the lemma of each edit, over the edited source."""
    for part, edits in EDITS.items():
        for edit in edits:
            code = Code({edit.place: (edit.old, edit.new)})
            lemma = next(claim for claim in PARTS[part].claims(code) if claim.name == edit.lemma)
            yield replace(lemma, name=f"{edit.lemma}, with `{edit.new}` for `{edit.old}`", true=False)


NOT_READ = {
    "reference/crystalcache/dissolution.py:allocate": "the loop that hands N_min and the cut to each step",
    "reference/crystalcache/dissolution.py:carried_out": "the order of trunks by score, and its ties",
    "reference/crystalcache/dissolution.py:strongest_members": "the order of members by impact, and its ties",
    "reference/crystalcache/trunks.py:merge_sentences": "the pass over sentences",
    "reference/policies/budgets.py:largest_remainder": "the order of remainders, and its ties",
}
"""Loops and sorts of integer decisions, which no lemma covers. Vectors, properties and the model in Coq check them."""


def source_claims(code: Code) -> Iterator[Claim]:
    """Yield the lemmas and false claims about the integer decisions in `code`."""
    for part in PARTS.values():
        yield from part.claims(code)


def all_claims() -> Iterator[Claim]:
    """Yield the claims about the unedited sources, then the false twin of each lemma."""
    yield from source_claims(Code())
    yield from edited_claims()


def main() -> int:
    """Print each verdict. Return 1 if a lemma is not proved or a false claim is not refuted."""
    verdicts = []
    for claim in all_claims():
        verdicts.append(decide(claim))
        print(verdicts[-1], flush=True)
    surprises = [verdict for verdict in verdicts if verdict.surprising]
    proved, refuted = (sum(v.claim.true == true and not v.surprising for v in verdicts) for true in (True, False))
    print("not read by any lemma, left to vectors, properties and the model in Coq:")
    print("\n".join(f"    {place}: {what}" for place, what in NOT_READ.items()))
    print(f"proofs: {proved} lemmas proved, {refuted} false claims refuted, {len(surprises)} surprises")
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main())
