"""KVCrush by brute force: complete blocks by SnapKV's scores.

Some blocks are kept as representatives of evicted blocks.
"""

from fractions import Fraction

from conformance.methods.brute import BLOCK, HALF, KERNEL, SLOW, Brute, Parts, W, newest, plain
from conformance.methods.policies import crushed
from conformance.methods.snapkv import snapkv
from conformance.strategies.policy_inputs import Inputs, Kept


def kept(
    inputs: Inputs, B: int, W: int, kernel: int, block: int, share: Fraction, anchor: str = "alternating",
) -> Kept:
    return [
        tokens for view in inputs.layers
        for tokens in crushed(snapkv(plain(view), W, kernel), block, max(B, block, W), share, anchor)
    ]


BRUTES = [
    Brute(
        "PO-KVCRUSH", "kvcrush", kept,
        {"W": W, "kernel": KERNEL, "block": BLOCK, "share": HALF}, BLOCK, newest,
        published={"W": 32, "kernel": 7, "block": 16, "share": Fraction(1, 4), "anchor": "alternating"},
        longest=SLOW, parts=Parts("recent=W/crush=share:block=block:anchor=anchor", snapkv)),
]
