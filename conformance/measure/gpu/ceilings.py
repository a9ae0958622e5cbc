# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""What this device can do at most: products, copies and exponentials. S1 consists of the first and the third."""

import torch
import triton
import triton.language as tl

from accelerated.triton_gpu.device import default_device
from conformance.measure.gpu.measure import median_ms
from conformance.measure.gpu.models import Scale
from conformance.measure.gpu.report import Report

LANES, STEPS = 1024, 128


@triton.jit
def powers(X, steps, LANES: tl.constexpr):
    """x becomes 2 ** x - 1, again and again: one exponential and one addition a step, all in registers."""
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    x = tl.load(X + i)
    for _ in range(steps):
        x = tl.exp2(x) - 1.0
    tl.store(X + i, x)


def ceilings(report: Report, scale: Scale) -> None:
    """The three rates, and the floor of S1 at the headline length that follows from them."""
    device, dtype = default_device(), getattr(torch, scale.dtype)
    a, b = (torch.randn(scale.product, scale.product, device=device, dtype=dtype) for _ in range(2))
    product = 2 * scale.product**3 / median_ms(lambda: a @ b, scale.rounds) / 1e9
    report.add(f"product of {scale.product} x {scale.product}, {scale.dtype}", product, "TFLOP/s")
    x = torch.randn(scale.copied, device=device)
    y = torch.empty_like(x)
    moved = 8 * scale.copied / median_ms(lambda: y.copy_(x), scale.rounds) / 1e6
    report.add("copy, read and written", moved, "GB/s")
    z = torch.rand(scale.programs * LANES, device=device)
    exponentials = len(z) * STEPS / median_ms(lambda: powers[(scale.programs,)](z, STEPS, LANES=LANES), scale.rounds)
    report.add("exponentials", exponentials / 1e9, "T/s")
    n = scale.headline
    floor = n * n * scale.H * scale.d / product / 1e9 + n * n * scale.H / 2 / exponentials
    report.add(f"floor of S1 at {n}: its products and its exponentials, one after the other", floor, "ms")
