"""Static head budgets: KVzip's scores, taken once over other texts, say which heads keep all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.budgets import spread
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import recency
from reference.policies.selectors import top_units
from spec.arrays import Float64, Int64, IntVector, Matrix, Vector
from spec.errors import SpecError
from spec.policy import Needs, Policy, Scores
from spec.retention import Granularity

__all__ = ["FullHeads", "head_scores", "kvzip_heads"]


def head_scores(contexts: Sequence[Float64[Matrix, "g _"]]) -> Float64[Vector, " g"]:
    """Each head's largest KVzip score of a context's tokens; the mean over contexts. NaN marks what no chunk holds.

    Implements: PO-HEAD-SCORES

    Source: KVzip, Section 4.2; its official code.

    Raises:
        SpecError: without a context, or for one that has no token with a score.
    """
    if not contexts or any(np.isnan(rows).all() for rows in contexts):
        raise SpecError("contexts", len(contexts), "must each hold a token that was rehearsed")
    scores: Vector = np.mean([np.nanmax(rows, axis=1) for rows in contexts], axis=0)
    return scores


@dataclass(frozen=True)
class FullHeads:
    """As many of the best heads as the total affords keep all tokens; the others share the rest, windows and all."""

    scores: Float64[Vector, " heads"]
    window: int
    """Tokens that every head keeps: sinks and recent ones."""

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Each group's share.

        Implements: PO-FULL-HEADS

        Source: DuoAttention's full and streaming heads; the arithmetic is this specification's.

        Raises:
            SpecError: for another number of heads than was calibrated.
        """
        groups, n = len(scores.values), int(scores.offsets[-1])
        if len(self.scores) != groups:
            raise SpecError("calibration", len(self.scores), f"has so many head scores, and the cache {groups} heads")
        window = min(self.window, n)
        free = min(total, groups * n) - groups * window
        full = groups if n == window else free // (n - window)
        shares = np.full(groups, n, dtype=np.int64)
        streaming = np.sort(np.argsort(-self.scores, kind="stable")[full:])
        if len(streaming):
            shares[streaming] = spread(free - full * (n - window) + len(streaming) * window, len(streaming))
        return shares


@named(
    "kvzip-heads", "Kim et al., KVzip (arXiv 2505.23416); DuoAttention",
    "every token in the heads that a calibration names, first and recent tokens in the others",
    of_model=frozenset({"served"}), diverse=False,
)
def kvzip_heads(calibration: Calibration, served: Identity, N_sink: int = 64, N_recent: int = 256) -> Policy:
    """Full heads by KVzip's head scores; of the others sinks and recent tokens, as in DuoAttention.

    The official code gives each head's score to all tokens of the context and keeps what exceeds a threshold: a head
    that is not full keeps nothing of the context, and the total is missed by up to a head. DuoAttention's streaming
    heads let go of a token in each step too; here the cache grows while tokens are decoded.

    Implements: PO-KVZIP-HEADS

    Raises:
        SpecError: for a calibration of another model or rotation, or without head scores; for numbers below 0.
    """
    calibration.check(served)
    if calibration.head_scores is None:
        raise SpecError("calibration", calibration.digest, "has no head scores: `kvspec calibrate` writes them")
    # Of the layers it looks at nothing, but a turn is decided when all of them have stored it.
    scorer = replace(recency, needs=Needs("all", 0, takes=lambda _: True), separable=True)
    return Policy(
        "kvzip-heads", scorer, FullHeads(calibration.head_scores.ravel(), N_sink + N_recent), top_units,
        SinkAndRecent(N_sink, N_recent), granularity=Granularity.HEAD, floor=N_sink + N_recent,
    )
