"""PyramidKV by brute force: SnapKV's scores, or sums of attention, with shares that fall linearly with the layer."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from conformance.methods.brute import KERNEL, SLOW, Brute, Parts, W, newest, plain
from conformance.methods.h2o import described
from conformance.methods.policies import Score, accumulated, pyramid_shares, top
from conformance.methods.snapkv import READINGS, SLIPS, snapkv
from conformance.strategies.policy_inputs import Inputs, Kept


def pyramid(score: Callable[..., list[Score]]) -> Callable[..., Kept]:
    """Return a function that computes kept sets with linear shares of the layers."""
    def kept(inputs: Inputs, B: int, W: int, beta: int, **constants: Any) -> Kept:
        shares = pyramid_shares(Fraction(B), min(W, inputs.n), len(inputs.layers), inputs.n, beta)
        return [
            top(row, share) for view, share in zip(inputs.layers, shares, strict=True)
            for row in score(plain(view), W=W, **constants)
        ]

    return kept


BRUTES = [
    Brute("PO-PYRAMIDKV", "pyramidkv", pyramid(snapkv), {"W": W, "kernel": KERNEL, "beta": 20}, W, newest,
          published={"W": 32, "kernel": 7, "beta": 20}, readings=READINGS, slips=SLIPS,
          parts=Parts("recent=W/layers=pyramid:beta=beta", snapkv)),
    Brute(
        "PO-PYRAMIDKV-DESCRIBED", "pyramidkv-described", pyramid(described),
        {"W": W, "beta": 20}, W, newest, published={"W": 128, "beta": 20},
        parts=Parts("recent=W/layers=pyramid:beta=beta", accumulated, unscored=""), longest=SLOW),
]
