"""Static head budgets: KVzip scores from a calibration on different texts decide which heads keep all tokens."""

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
from spec.composition import HEAD_SETS, Required
from spec.errors import SpecError
from spec.policy import Needs, Policy, Scores
from spec.retention import Granularity

__all__ = ["FullHeads", "head_scores", "kvzip_heads"]


def head_scores(contexts: Sequence[Float64[Matrix, "g _"]]) -> Float64[Vector, " g"]:
    """Take each head's largest KVzip score in each context, and return each head's mean over the contexts.

    Tokens outside all chunks have the score NaN and are ignored.

    Implements: PO-HEAD-SCORES

    Source: KVzip, Section 4.2, and its official code.

    Raises:
        SpecError: if there is no context, or if a context has no token with a score.
    """
    if not contexts or any(np.isnan(rows).all() for rows in contexts):
        raise SpecError("contexts", len(contexts), "each context must have a token that the model repeated")
    scores: Vector = np.mean([np.nanmax(rows, axis=1) for rows in contexts], axis=0)
    return scores


@dataclass(frozen=True)
class FullHeads:
    """Budgets in which the best heads keep all tokens. The total limits the number of these full heads.

    All other heads share the remaining tokens equally.
    """

    scores: Float64[Vector, " heads"]
    window: int
    """Number of first and recent tokens that every head keeps."""

    @property
    def required(self) -> Required:
        return Required(frozenset({"tokens", "chunks"}), HEAD_SETS, window=self.window, shares="counts", device=True)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the number of tokens that each head keeps.

        Implements: PO-FULL-HEADS

        Source: full and streaming heads as in DuoAttention. The exact numbers of tokens are defined by kvspec.

        Raises:
            SpecError: if the number of heads in the cache differs from the number of heads in the calibration.
        """
        groups, n = len(scores.values), int(scores.offsets[-1])
        if len(self.scores) != groups:
            raise SpecError(
                "calibration", len(self.scores),
                f"is the number of head scores, but the cache has {groups} KV heads; run `kvspec calibrate`",
            )
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
    "all tokens in heads that a calibration file selects; the first and recent tokens in the remaining heads",
    model_constants=frozenset({"served"}), diverse=False,
)
def kvzip_heads(calibration: Calibration, served: Identity, N_sink: int = 64, N_recent: int = 256) -> Policy:
    """Return static head budgets: heads with the best KVzip head scores keep all tokens.

    The heads that keep all tokens correspond to the full heads in DuoAttention. All other heads keep first and recent
    tokens, like streaming heads in DuoAttention. In the official KVzip code every token of the context has the score of
    its head, and tokens with scores above a threshold are kept. In the official code a head that is not full keeps no
    token of the context. In the official code the total number of kept tokens can differ from the budget by the tokens
    of one head. Streaming heads in DuoAttention also evict a token at each decode step. In kvspec the cache grows while
    tokens are decoded.

    Implements: PO-KVZIP-HEADS

    Raises:
        SpecError: if the calibration is for a different model or RoPE, if head scores are missing, or if a number is
            negative.
    """
    calibration.check(served)
    if calibration.head_scores is None:
        raise SpecError("calibration", calibration.digest, "has no head scores: `kvspec calibrate` writes them")
    # The scorer reads no tensor. It declares all layers, so that a turn is decided after all layers have stored it.
    scorer = replace(recency, needs=Needs("all", 0, accepts_tensor=lambda _: True), separable=True)
    return Policy(
        "kvzip-heads", scorer, FullHeads(calibration.head_scores.ravel(), N_sink + N_recent), top_units,
        SinkAndRecent(N_sink, N_recent), granularity=Granularity.HEAD,
    )
