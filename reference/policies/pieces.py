"""Policies that evict from each piece of a prompt alone, as if the piece were the whole prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from reference.policies.blocks import InBlocks
from reference.policies.budgets import largest_remainder
from reference.policies.kvcrush import scored_or_representative
from reference.policies.protections import InEachPiece
from reference.policies.scorers import check_positive
from spec.arrays import Bool, BoolVector, Int64, IntVector
from spec.composition import Provided, Required, provided_by, required_by
from spec.errors import SpecError
from spec.policy import LayerView, LayerwiseScorer, Needs, Observation, Policy, Scorer, Scores, Selection, Selector
from spec.retention import Granularity

__all__ = ["InPieces", "PieceScores", "in_pieces", "piece_shares"]


def _pieces(n: int, c: int) -> Iterator[slice]:
    """Yield the slices of runs of c successive tokens. The last run may be shorter."""
    return (slice(start, min(start + c, n)) for start in range(0, n, c))


def piece_shares(b: int, protected: Bool[BoolVector, " n"], c: int) -> Int64[IntVector, " pieces"]:
    """Return the part of a kept set's share b for each piece: its protected tokens, then a proportional part.

    Implements: PO-PIECES
    """
    held = [int(protected[piece].sum()) for piece in _pieces(len(protected), c)]
    free = [len(protected[piece]) - P for piece, P in zip(_pieces(len(protected), c), held, strict=True)]
    rest = min(b - sum(held), sum(free))
    return np.array(held, dtype=np.int64) + largest_remainder([Fraction(rest * f, max(1, sum(free))) for f in free])


@dataclass(frozen=True)
class PieceScores:
    """Scorer that scores each piece of c tokens from the queries, keys and values of the piece alone."""

    host: Scorer
    c: int
    separable: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, query_rows=None if self.host.needs.query_rows != 0 else 0)

    @property
    def provided(self) -> Provided | None:
        """Return what the host's scorer provides. The protection includes the tokens without a score in each piece."""
        host = provided_by(self.host)
        reason = "scores the pieces of a prompt: leave pieces= or the cadence out"
        return None if host is None else replace(host, unscored=(0, 0), no_steps=reason)

    @property
    def layerwise(self) -> bool:
        return isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Return the scores of all tokens, piece by piece.

        Implements: PO-PIECES

        Raises:
            SpecError: at the end of a later segment.
        """
        if observation.positions is not None:
            reason = "evicts from the first prompt only: read later text inside `with run.reading():`"
            raise SpecError("pieces", self.c, reason)
        parts = [self.host(self.shown(observation, piece), protected[piece])
                 for piece in _pieces(len(protected), self.c)]
        return Scores(
            np.concatenate([part.values for part in parts], axis=1), np.arange(len(protected) + 1),
            heads=parts[0].heads, second=_joined([part.second for part in parts]),
            signatures=_joined([part.signatures for part in parts]),
        )

    def shown(self, observation: Observation, piece: slice) -> Observation:
        """Return the observation of one piece: a sequence whose first token has the position of the piece."""
        layers = observation.layers
        if self.host.needs.layers != "none":
            layers = {layer: self._view(view, piece) for layer, view in layers.items()}
        ids = observation.token_ids[piece] if self.host.needs.token_ids and observation.token_ids is not None else None
        positions = np.arange(piece.start, piece.stop)
        return replace(observation, seen=piece.stop, layers=layers, token_ids=ids, positions=positions)

    def _view(self, view: LayerView, piece: slice) -> LayerView:
        needs = self.host.needs
        first = piece.start if needs.query_rows is None else max(piece.start, piece.stop - needs.query_rows)
        return replace(
            view, q=view.q[:, first : piece.stop] if needs.query_rows != 0 else view.q, k=view.k[:, piece],
            v=view.v[:, piece] if needs.values and view.v is not None else view.v, lse=None,
            hidden=view.hidden[piece] if needs.hidden and view.hidden is not None else view.hidden,
        )


@dataclass(frozen=True)
class InPieces:
    """Selector that applies the host's selector to each piece of c tokens, with the piece's part of the share."""

    select: Selector
    c: int

    @property
    def required(self) -> Required:
        return replace(required_by(self.select) or Required(exact=False), device=False)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        """Return the selection: the kept tokens of all pieces.

        Implements: PO-PIECES
        """
        shares = np.stack([piece_shares(int(b), protected, self.c) for b in budgets])
        kept: list[list[IntVector]] = [[] for _ in budgets]
        for at, piece in enumerate(_pieces(len(protected), self.c)):
            part = self.select(_part(scores, piece), shares[:, at], protected[piece])
            for g, positions in enumerate(np.split(part.positions, part.offsets[1:-1])):
                kept[g].append(piece.start + positions)
        groups = [np.concatenate(parts) for parts in kept]
        return Selection(np.concatenate(groups), np.cumsum([0, *map(len, groups)]).astype(np.int64))


def _joined(parts: list[Any]) -> Any:
    """Return arrays of pieces as arrays of the whole prompt, or None if the pieces have none."""
    return None if parts[0] is None else np.concatenate(parts, axis=1)


def _part(scores: Scores, piece: slice) -> Scores:
    second, signatures = scores.second, scores.signatures
    return replace(
        scores, values=scores.values[:, piece], offsets=np.arange(piece.stop - piece.start + 1),
        second=None if second is None else second[:, piece],
        signatures=None if signatures is None else signatures[:, piece],
    )


def in_pieces(host: Policy, c: int) -> Policy:
    """Return the host policy, which evicts from each piece of c tokens of a prompt alone.

        policy = kvspec.policy_from_name("keydiff/pieces=1024", budget=0.5)

    Protection and scores are those of the piece as a whole prompt. The policy evicts from the first prompt only.

    Implements: PO-PIECES

    Raises:
        SpecError: if c is below 1, or if a part of the host does not fit (see PO-PIECES).
    """
    scorer, needs = provided_by(host.scorer), host.scorer.needs
    budgets, select = required_by(host.budgets), getattr(host.selector, "func", host.selector)
    unfit = {
        "must have scores of single tokens: use a scorer of tokens": scorer is None or scorer.units != "tokens",
        "keeps one set for the whole model, which later segments evict again: add sets=layer or use a scorer with one"
        " row for each layer": host.granularity is Granularity.MODEL,
        "lets the model repeat the whole prompt: use a different scorer": needs.rehearsal is not None,
        "has scores that depend on the budget of the whole prompt: use a different scorer": needs.budget,
        "cannot fill the share of a piece with whole blocks: leave block= and crush= out":
            isinstance(select, InBlocks) or select is scored_or_representative,
        "gives the protected tokens of one whole prompt first: use layers=even or layers=global, or protect no tokens":
            budgets is not None and budgets.window is not None and host.protection.size > 0,
    }
    for reason, wrong in unfit.items():
        if wrong:
            raise SpecError("pieces", host.name, reason)
    check_positive("pieces", c)
    return replace(
        host, name=f"pieces({host.name})", scorer=PieceScores(host.scorer, c), selector=InPieces(host.selector, c),
        protection=InEachPiece(host.protection, c),
    )
