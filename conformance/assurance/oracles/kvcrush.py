"""KVCrush by brute force: SnapKV's whole blocks, some of which represent evicted ones."""

from fractions import Fraction

from conformance.assurance.brute import BLOCK, HALF, KERNEL, MODES, Brute, W, newest, plain, seeded
from conformance.assurance.oracles.blocks import crushed
from conformance.assurance.oracles.snapkv import snapkv
from conformance.assurance.vector_writer.case import Case
from conformance.strategies.policy_inputs import Inputs, Kept

__all__ = ["BRUTES"]


def kept(
    inputs: Inputs, B: int, W: int, kernel: int, block: int, share: Fraction, anchor: str = "alternating",
) -> Kept:
    return [
        own for view in inputs.layers
        for own in crushed(snapkv(plain(view), W, kernel), block, max(B, block, W), share, anchor)
    ]


BRUTES = [
    Brute(
        "PO-KVCRUSH", "kvcrush", kept,
        {"W": W, "kernel": KERNEL, "block": BLOCK, "share": HALF}, BLOCK, newest,
        published={"W": 32, "kernel": 7, "block": 16, "share": Fraction(1, 4), "anchor": "alternating"}, vectors=[
            Case(312, "two layers of two heads, a window of two", ["Plain"],
                 {**seeded(28, L=2, n=13), "B": 8, "b": 2, "share": "1/2", "anchor": "alternating", **MODES}),
            Case(313, "a budget below one block is one block", ["Plain"],
                 {**seeded(29, n=11), "B": 2, "b": 3, "share": "1/2", "anchor": "mean", **MODES}),
        ],
    ),
]
