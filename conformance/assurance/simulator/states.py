"""What a good run must have met, each state with the item or law that it belongs to; and what a finding is.

Nothing is counted in the code under test: the world sees how an operation ended, and says so.
"""

import re
from collections import Counter

from spec.errors import SpecError

__all__ = ["REFUSALS", "STATES", "Met", "Violation", "must"]

MASKING, REFUSED, UNUSABLE = "eviction-equals-masking", "refused-before-anything-changes", "unusable-after-a-failure"
SAVED, LIKE_ANY, THERE = "saved-is-what-was", "a-cache-like-any-other", "promised-is-there-forgotten-is-not"
PROVES, BLOCK = "an-object-proves-itself", "a-splice-equals-a-block-mask"

STATES: dict[str, str] = {
    "a prompt in one forward": MASKING,
    "a prompt in pieces": "parts-equal-the-whole",
    "a padded prompt": "parts-equal-the-whole",
    "a turn in one forward": "PO-TURN",
    "a turn in pieces": "PO-TURN",
    "a padded turn": "PO-TURN",
    "a segment that evicts": "CC-COMPACT",
    "a segment that evicts nothing": "CC-COMPACT",
    "the budget holds": "CC-BUDGET",
    "more is protected than the budget has": "CC-BUDGET",
    "one set for the whole model": "CC-COMPACT",
    "layers that differ, whose heads agree": MASKING,
    "heads of one length": MASKING,
    "heads of different lengths": MASKING,
    "a step that evicts": MASKING,
    "a step that lets the cache grow": MASKING,
    "tokens are read, and nothing is decided": "PO-READ",
    "tokens are read outside the context": LIKE_ANY,
    "rows agree": LIKE_ANY,
    "rows differ": LIKE_ANY,
    "a crop behind which the states are kept": LIKE_ANY,
    "a crop behind which the states are forgotten": LIKE_ANY,
    "a cache is saved and loaded": SAVED,
    "a cache is not saved: the disk fails": SAVED,
    "a cache goes on beside its copy": LIKE_ANY,
    "a cache goes on beside its compaction": LIKE_ANY,
    "a compaction by hand is done": "CC-COMPACT",
    "a compaction by hand is refused": REFUSED,
    "a compaction by hand is tripped": UNUSABLE,
    "a chunk behind which the states go on": BLOCK,
    "a chunk behind which the states are forgotten": BLOCK,
    "refused, and nothing has changed": REFUSED,
    **{f"a wrong {how} is refused": REFUSED for how in (
        "width", "positions", "hole", "ids", "rows", "use_cache", "embeds",
    )},
    **{f"a cache that cannot be used any more: {why}": UNUSABLE for why in (
        "a forward failed half way", "a policy failed on its prompt", "a decode step failed",
        "a compaction failed half way", "a prompt was left half way", "reading() failed",
    )},
    "a chunk is put": THERE,
    "a chunk is put again": THERE,
    "a chunk is put over a damaged one": PROVES,
    "a chunk is not put: the disk is full": THERE,
    "a chunk is not put: a call fails": THERE,
    "a chunk is put although a call did half": THERE,
    "a chunk is read": PROVES,
    "a damaged chunk is a miss": PROVES,
    "a forgotten chunk is a miss": THERE,
    "the archive opens on a full disk": THERE,
    "the archive does not open: a call fails": THERE,
    "everything is verified": THERE,
    "everything is verified beside a damaged object": PROVES,
    "everything is verified on a disk that fails": PROVES,
    "a tenant is forgotten": THERE,
    "a tenant is forgotten on a full disk": THERE,
    "a tenant is forgotten beside what was put away": THERE,
    "a tenant is not wholly forgotten: a call fails": THERE,
    "the least recently used go": THERE,
    "gc frees nothing": THERE,
}

REFUSALS: dict[str, tuple[str, str]] = {
    "a padded turn where a policy decides in steps or by layer": ("PO-TURN", "a padded turn is served where"),
    "scores that compare layers, in a turn": ("PO-TURN", "it serves one segment"),
    "one set for the model on layers that differ": ("PO-TURN", "keeps one set for the whole model"),
    "one set for a layer on heads that differ": ("PO-TURN", "keeps one set for a whole layer"),
    "records of another policy": ("PO-READ", "goes on from its own prompt only"),
    "records that have not seen all": ("PO-READ", "has not seen the last tokens"),
    "states that do not know all": (REFUSED, "its states do not know all of them"),
    "a prompt of one token": (REFUSED, "one query is a decode step"),
    "a block in a stream": (REFUSED, "a stream's segments end every C tokens"),
    "padding in a stream": (REFUSED, "the rows of a stream start together"),
    "rows that differ, outside the context": (REFUSED, r"rows that differ\W+can be read"),
    "layers that differ, outside the context": (REFUSED, "can be read inside the context manager only"),
    "records of single tokens, saved": (SAVED, "keeps records of single tokens"),
    "a crop into what rows keep": (LIKE_ANY, "can give back"),
    "a token that is not stored": (REFUSED, "must be among the"),
    "a splice into several rows": (BLOCK, "must hold one row"),
}
"""The item or law, and words of the reason."""


class Violation(AssertionError):
    """What must hold does not."""


def must(holds: bool, otherwise: str) -> None:
    """
    Raises:
        Violation: unless it holds.
    """
    if not holds:
        raise Violation(otherwise)


class Met:
    """Counts of states."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, state: str) -> None:
        self.counts[state] += 1

    def refusal(self, error: SpecError) -> None:
        """A refusal, by its reason."""
        for name, (_, words) in REFUSALS.items():
            if re.search(words, str(error)):
                self(f"refused: {name}")
                return

    def never(self) -> list[str]:
        """States that no life has met."""
        return [name for name in [*STATES, *(f"refused: {name}" for name in REFUSALS)] if not self.counts[name]]
