"""CurDKV keeps tokens whose keys and values have a large share of the squared norms around them."""

from functools import partial

import numpy as np

from reference.policies.attention import wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, check_positive
from reference.policies.selectors import top_units
from spec.arrays import Cube, Float64, Matrix
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["curdkv", "curdkv_score", "leverage_shares"]


def leverage_shares(x: Float64[Cube, "H n d"], window: int) -> Float64[Matrix, "H n"]:
    """Return each token's share of the squared norms of its window. The share is 0 if the whole window is 0.

    Windows are runs of `window` tokens from the first token on. The last window may be shorter.

    Implements: PO-CURDKV

    Source: CurDKV, Section 4, with the windows of kvpress.
    """
    H, n, _ = x.shape
    squares = np.zeros((H, -(-n // window) * window))
    squares[:, :n] = (x * x).sum(axis=2)
    of_window = squares.reshape(H, -1, window)
    total = np.broadcast_to(of_window.sum(axis=2, keepdims=True), of_window.shape)
    shares = np.divide(of_window, total, out=np.zeros_like(of_window), where=total > 0)
    rows: Matrix = shares.reshape(H, -1)[:, :n]
    return rows


def curdkv_score(view: LayerView, window: int) -> Float64[Matrix, "H_kv n"]:
    """Return the share of each token's key in its window, times the share of the token's value.

    Implements: PO-CURDKV

    Source: CurDKV, Section 4.

    Raises:
        SpecError: if the values were not captured.
    """
    if view.v is None:
        raise SpecError("v", None, "is needed, because CurDKV uses the values")
    return leverage_shares(wide(view.k), window) * leverage_shares(wide(view.v), window)


@named(
    "curdkv", "Sengupta et al., CurDKV (arXiv 2509.15038)",
    "the first tokens, and tokens whose keys and values have large norms among the tokens around them",
)
def curdkv(N_sink: int = 4, window: int = 16) -> Policy:
    """Return CurDKV, a policy that keeps the sinks and the tokens with the highest products of leverage shares.

    The defaults are those of kvpress. The paper computes the norms of random projections of keys and values, and does
    not divide by the sum of a window. With kvpress, sinks have the score 1, and a window of zeros gives NaN.

    Raises:
        SpecError: if N_sink is negative, or if window is not positive.
    """
    score = partial(curdkv_score, window=check_positive("window", window))
    return Policy(
        "curdkv", LayerScorer(Needs("all", query_rows=0, values=True), score), even, top_units,
        SinkAndRecent(N_sink, 0), granularity=Granularity.HEAD,
    )
