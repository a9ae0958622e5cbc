"""Protections: functions that mark which tokens a policy never evicts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec.arrays import Bool, BoolVector
from spec.policy import Policy, Protection
from spec.validate import MOST_TOKENS, check_whole

__all__ = ["InEachPiece", "ProtectedPositions", "SinkAndRecent", "protecting"]


@dataclass(frozen=True)
class SinkAndRecent:
    """Protection of the first and the last tokens: the policy never evicts these tokens.

        kvspec.policy_from_score(score, protection=kvspec.SinkAndRecent(4, 32))

    Attributes:
        sink: number of first tokens (attention sinks) to keep.
        recent: number of last tokens to keep.

    Raises:
        SpecError: if `sink` or `recent` is no whole number, is negative, or exceeds the number of tokens of any prompt.
    """

    sink: int
    recent: int

    def __post_init__(self) -> None:
        for name, value in (("sink", self.sink), ("recent", self.recent)):
            check_whole(name, value, most=MOST_TOKENS)

    @property
    def size(self) -> int:
        return self.sink + self.recent

    def __call__(self, seen: int, /) -> Bool[BoolVector, " n"]:
        position = np.arange(seen)
        protected: BoolVector = (position < self.sink) | (position >= seen - self.recent)
        return protected


@dataclass(frozen=True)
class ProtectedPositions:
    """Protection of all tokens that `other` protects, and of the tokens at `positions` (such as chunk markers)."""

    other: Protection
    positions: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.other.size + len(self.positions)

    def __call__(self, seen: int, /) -> Bool[BoolVector, " n"]:
        protected: BoolVector = self.other(seen).copy()
        protected[[position for position in self.positions if position < seen]] = True
        return protected


@dataclass(frozen=True)
class InEachPiece:
    """Protection of the tokens that `other` protects in each piece of c tokens, as if the piece were a whole prompt.

    Implements: PO-PIECES
    """

    other: Protection
    c: int

    @property
    def size(self) -> int:
        """Return the number of protected tokens of one piece."""
        return self.other.size

    def __call__(self, seen: int, /) -> Bool[BoolVector, " n"]:
        pieces = [self.other(min(self.c, seen - start)) for start in range(0, seen, self.c)]
        protected: BoolVector = np.concatenate([np.zeros(0, np.bool_), *pieces])
        return protected


def protecting(policy: Policy, positions: Sequence[int]) -> Policy:
    """Return the policy with additional protected tokens at the absolute positions `positions`."""
    places = tuple(sorted({int(position) for position in positions}))
    return replace(policy, protection=ProtectedPositions(policy.protection, places))
