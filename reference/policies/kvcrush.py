"""KVCrush selects most of the kept blocks by score. The other kept blocks represent the evicted blocks."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np

from reference.policies.named import named
from reference.policies.scorers import LayerScorer, check_positive
from reference.policies.selectors import best_blocks, best_tokens, marked, top_tokens, top_units
from reference.policies.snapkv import snapkv
from spec.arrays import Bool, BoolMatrix, BoolVector, Float64, Int64, IntMatrix, IntVector, Matrix
from spec.composition import Required, requires
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, Policy, Scores, Selection
from spec.validate import check_choices

__all__ = ["anchor_distances", "kvcrush", "representatives", "scored_or_representative", "with_representatives"]

ANCHORS = ("alternating", "mean", "zeros", "ones")


def anchor_distances(
    values: Float64[Matrix, "h n"], protected: Bool[BoolVector, " n"], b: int, anchor: str,
) -> Int64[IntVector, " m"]:
    """Return each full block's Hamming distance to the anchor. A block with protected tokens has distance 0.

    For the distance, a token has one bit per head. A token's bit for a head is 1 if the token's score is in the better
    half of the head's scores.

    Implements: PO-REPRESENTATIVES

    Source: KVCrush's official code, steps 1 to 3. The distance of two blocks counts the
    differing bits of all heads of the layer, as KVCrush's pull request to vLLM does.
    """
    h, m = len(values), values.shape[1] // b
    free = ~protected[: m * b].reshape(m, b).any(axis=1)
    tokens = values[:, : m * b].reshape(h, m, b)[:, free].reshape(h, -1)
    better = np.argsort(-tokens, axis=1, kind="stable")[:, : tokens.shape[1] // 2]
    indicators = np.zeros(tokens.shape, dtype=np.bool_)
    np.put_along_axis(indicators, better, True, axis=1)
    bits = indicators.reshape(h, -1, b)
    point = {
        "alternating": np.arange(b) % 2 == 1, "mean": 2 * bits.sum(axis=1, keepdims=True) > bits.shape[1],
        "zeros": np.False_, "ones": np.True_,
    }[anchor]
    distances = np.zeros(m, dtype=np.int64)
    distances[free] = (bits != point).sum(axis=(0, 2))
    return distances


def representatives(
    totals: Float64[Matrix, "g m"], places: Int64[IntVector, " g"], held: Bool[BoolMatrix, "g m"], /,
    distances: Int64[IntMatrix, "g m"], share: Fraction,
) -> Selection:
    """Select a group's protected blocks, the blocks with the best total scores, and representative blocks.

    A group that keeps `places` blocks, p of them protected, has share * (places - p) representatives, rounded down. The
    blocks that are not selected by score are sorted by their distance to the anchor, then split into runs of equal
    length. The first block of each run is a representative.

    Implements: PO-REPRESENTATIVES

    Source: KVCrush's official code, step 4.
    """
    few = np.maximum(0, places - held.sum(axis=1)) * share.numerator // share.denominator
    stays = marked(best_tokens(totals, places - few, held), totals.shape[1])
    for keeps, distance, r in zip(stays, distances, few, strict=True):
        left = np.flatnonzero(~keeps)
        left = left[np.argsort(distance[left], kind="stable")]
        runs = min(int(r), len(left))
        keeps[left[np.arange(runs) * len(left) // max(1, runs)]] = True
    return best_tokens(totals, places, stays)


@requires(Required(exact=False, device=True, sequential=True))
def scored_or_representative(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, b: int, share: Fraction, anchor: str,
) -> Selection:
    """Select blocks with `representatives`. All groups of a layer use the same `anchor_distances`.

    Implements: PO-REPRESENTATIVES
    """
    layers = np.split(scores.values, len(scores.values) // scores.heads)
    distances = np.stack([anchor_distances(layer, protected, b, anchor) for layer in layers])
    choose = partial(representatives, distances=np.repeat(distances, scores.heads, axis=0), share=share)
    return best_blocks(scores.values, budgets, np.broadcast_to(protected, scores.values.shape), b, choose)


def with_representatives(
    host: Policy, block: int = 16, share: Fraction | float = Fraction(1, 4), anchor: str = "alternating",
) -> Policy:
    """Return the host policy with KVCrush's selection of blocks.

    The fraction `share` of the kept blocks without protected tokens are representatives. The host policy must select
    individual tokens by their scores, and evict only at the end of segments.

    Raises:
        SpecError: if `host` breaks a rule above, if block is below 1, if the share is outside [0, 1], or if the anchor
            is unknown.
    """
    chosen = getattr(host.selector, "func", host.selector) in (top_units, top_tokens)
    if not chosen or not isinstance(host.scorer, LayerScorer) or host.cadence.every is not None:
        raise SpecError("host", host.name, "must keep single tokens by their scores alone, at the end of segments")
    if not 0 <= share <= 1:
        raise SpecError("share", share, "must lie in [0, 1]")
    check_choices("anchor", (anchor,), ANCHORS)
    selector = partial(
        scored_or_representative, b=check_positive("block", block), share=Fraction(share), anchor=anchor
    )
    return replace(
        host, name=f"kvcrush({host.name})", scorer=replace(host.scorer, separable=False), selector=selector,
        least=max(host.least or 0, block), promises=NOTHING_PROMISED,
    )


@named(
    "kvcrush", "Jha et al., KVCrush (arXiv 2503.00022)",
    "blocks of tokens with the best SnapKV scores, and some blocks that represent the remaining blocks", diverse=False,
    blocks=False,
)
def kvcrush(
    W: int = 32, kernel: int = 7, block: int = 16, share: Fraction | float = Fraction(1, 4),
    anchor: str = "alternating",
) -> Policy:
    """Return KVCrush: a policy that selects whole blocks by SnapKV's scores, and keeps SnapKV's window.

    OpenVINO GenAI keeps the same blocks in all heads of a layer, by scores summed over the heads. OpenVINO GenAI keeps
    representatives in addition to the budget, but only if the number of evicted blocks is at least the number of
    representatives. The pull request that adds KVCrush to vLLM uses the same representatives for all heads.

    Implements: PO-KVCRUSH

    Raises:
        SpecError: as in `snapkv` and `with_representatives`.
    """
    return replace(with_representatives(snapkv(W, kernel), block, share, anchor), name="kvcrush")
