"""All claims, decided one by one and printed."""

from collections.abc import Iterator

from conformance.assurance.proofs import eviction, shapes, words
from conformance.assurance.proofs.claims import Claim, decide
from conformance.assurance.proofs.edits import edited_claims
from conformance.assurance.proofs.source import Code

__all__ = ["all_claims", "main", "source_claims"]


def source_claims(code: Code) -> Iterator[Claim]:
    """Lemmas and false claims about the project's integer decisions, as `code` has them."""
    for part in (shapes, eviction, words):
        yield from part.claims(code)


def all_claims() -> Iterator[Claim]:
    """These, over the sources as they are; then each lemma's false twin."""
    yield from source_claims(Code())
    yield from edited_claims()


def main() -> int:
    """Print each verdict; 1 where a lemma is not proved or a false claim is not refuted."""
    verdicts = []
    for claim in all_claims():
        verdicts.append(decide(claim))
        print(verdicts[-1], flush=True)
    surprises = [verdict for verdict in verdicts if verdict.surprising]
    proved, refuted = (sum(v.claim.true == true and not v.surprising for v in verdicts) for true in (True, False))
    print(f"proofs: {proved} lemmas proved, {refuted} false claims refuted, {len(surprises)} surprises")
    return int(bool(surprises))
