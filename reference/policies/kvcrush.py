"""KVCrush: most blocks by their scores, others that stand for what goes, by how their tokens fare in each head."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np

from reference.policies.named import named
from reference.policies.scorers import LayerScorer, check_positive
from reference.policies.selectors import best_blocks, best_tokens, marked, top_tokens, top_units
from reference.policies.snapkv import snapkv
from spec.arrays import Bool, BoolMatrix, BoolVector, Float64, Int64, IntMatrix, IntVector, Matrix
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, Policy, Scores, Selection
from spec.validate import check_choices

__all__ = ["anchor_distances", "kvcrush", "representatives", "scored_or_representative", "with_representatives"]

ANCHORS = ("alternating", "mean", "zeros", "ones")


def anchor_distances(
    values: Float64[Matrix, "h n"], protected: Bool[BoolVector, " n"], b: int, anchor: str,
) -> Int64[IntVector, " m"]:
    """Bits "in the better half of this head" of a full block's tokens that differ from the anchor's; 0 where protected.

    Implements: PO-REPRESENTATIVES

    Source: KVCrush's official code, steps 1 to 3; over all heads of a layer, as the pull request for vLLM.
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
    """Per group: the held blocks, the best by total; for a share of the places the first of equal runs of the rest.

    Implements: PO-REPRESENTATIVES

    Source: KVCrush's official code, step 4.
    """
    few = np.maximum(0, places - held.sum(axis=1)) * share.numerator // share.denominator
    stays = marked(best_tokens(totals, places - few, held), totals.shape[1])
    for own, distance, r in zip(stays, distances, few, strict=True):
        left = np.flatnonzero(~own)
        left = left[np.argsort(distance[left], kind="stable")]
        runs = min(int(r), len(left))
        own[left[np.arange(runs) * len(left) // max(1, runs)]] = True
    return best_tokens(totals, places, stays)


def scored_or_representative(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, b: int, share: Fraction, anchor: str,
) -> Selection:
    """`best_blocks`, of which `representatives` chooses, by the distances of each set's layer.

    Implements: PO-REPRESENTATIVES
    """
    layers = np.split(scores.values, len(scores.values) // scores.heads)
    distances = np.stack([anchor_distances(layer, protected, b, anchor) for layer in layers])
    choose = partial(representatives, distances=np.repeat(distances, scores.heads, axis=0), share=share)
    return best_blocks(scores.values, budgets, np.broadcast_to(protected, scores.values.shape), b, choose)


def with_representatives(
    host: Policy, block: int = 16, share: Fraction | float = Fraction(1, 4), anchor: str = "alternating",
) -> Policy:
    """A policy that keeps the best tokens at the end of segments: in blocks, a share of them representatives.

    Raises:
        SpecError: for a host of another kind, a block below 1, a share outside [0, 1], or an unknown anchor.
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
        floor=max(host.floor, block), promises=NOTHING_PROMISED,
    )


@named(
    "kvcrush", "Jha et al., KVCrush (arXiv 2503.00022)",
    "SnapKV's whole blocks, some of which represent evicted ones", diverse=False, blocks=False,
)
def kvcrush(
    W: int = 32, kernel: int = 7, block: int = 16, share: Fraction | float = Fraction(1, 4),
    anchor: str = "alternating",
) -> Policy:
    """SnapKV's scores and window, in blocks.

    OpenVINO GenAI keeps one set per layer, by sums over its heads; its representatives come on top of the budget, and
    none where fewer blocks go than they are. The pull request for vLLM gives all heads the same ones.

    Implements: PO-KVCRUSH

    Raises:
        SpecError: as `snapkv` and `with_representatives`.
    """
    return replace(with_representatives(snapkv(W, kernel), block, share, anchor), name="kvcrush")
