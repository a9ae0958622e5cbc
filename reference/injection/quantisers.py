"""Quantisation of archived keys and values: symmetric integers with float32 scales.

The name of a scheme, such as "per_head", states which elements share one scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spec.arrays import Cube, Float64, Int64, IntCube
from spec.errors import SpecError

__all__ = ["ARMS", "SCHEMES", "Arm", "codes", "decoded", "quantised_region", "scale"]

# For each scheme, the axes of (heads, tokens, channels) along which all elements share one scale. The paper calls
# "per_head" per-channel, but the scales of Appendix E have the shape [1, H, 1, 1]: one scale for each head.
SCHEMES: dict[str, tuple[int, ...]] = {
    "per_tensor": (0, 1, 2),
    "per_head": (1, 2),
    "per_channel": (1,),
    "per_token": (2,),
}

SMALLEST_SCALE = 2.0**-126
"""Scale of a group that contains only zeros: the smallest normal float32."""


def scale(x: Float64[Cube, "heads n d"], axes: tuple[int, ...], bits: int) -> Float64[Cube, "h t c"]:
    """Return the quantisation step of each group, rounded to float32 and stored as float64.

    The axes listed in `axes` have length 1 in the result.

    Implements: IN-SCALE

    Source: Section 3.13 and Appendix E. The appendix divides by zero if a group contains only zeros.
    """
    largest = np.abs(x).max(axis=axes, keepdims=True, initial=0.0) / (2 ** (bits - 1) - 1)
    step: Cube = np.maximum(largest, SMALLEST_SCALE).astype(np.float32).astype(np.float64)
    return step


def codes(x: Float64[Cube, "heads n d"], step: Float64[Cube, "h t c"], bits: int) -> Int64[IntCube, "heads n d"]:
    """Return x / step, rounded to the nearest integer (halves to even) and clipped to the symmetric range.

    Implements: IN-CODES

    Source: Section 3.13 and Appendix E, with the range [-127, 127] for 8 bits. The range of the appendix begins at
    -128, so it is not symmetric.
    """
    highest = 2 ** (bits - 1) - 1
    return np.clip(np.rint(x / step), -highest, highest).astype(np.int64)


def decoded(code: Int64[IntCube, "heads n d"], step: Float64[Cube, "h t c"]) -> Float64[Cube, "heads n d"]:
    """Return the dequantised values code * step. Source: Appendix E, last line."""
    return code * step


@dataclass(frozen=True)
class Arm:
    """A quantisation experiment: the tensors, layers and tokens that are quantised.

    `keys` and `values` are names of schemes. With the scheme None, a tensor is not quantised. The first `first` tokens
    and the last `last` tokens are not quantised. `half` selects the quantised layers: all layers, the lower half, or
    the upper half.
    """

    keys: str | None
    values: str | None
    first: int = 0
    last: int = 0
    half: str = "all"


# The arms of the paper's Table 10, named after their schemes, and arms that the table lacks.
ARMS: Mapping[str, Arm] = {
    "none": Arm(None, None),
    "per_tensor": Arm("per_tensor", "per_tensor"),
    "per_head": Arm("per_head", "per_head"),
    "per_channel": Arm("per_channel", "per_channel"),
    "per_token": Arm("per_token", "per_token"),
    "keys_per_head": Arm("per_head", None),
    "values_per_head": Arm(None, "per_head"),
    "kivi": Arm("per_channel", "per_token"),
    "selective_per_head": Arm("per_head", "per_head", first=4, last=4),
    "lower_half_per_head": Arm("per_head", "per_head", half="lower"),
    "upper_half_per_head": Arm("per_head", "per_head", half="upper"),
}


def quantised_region(arm: Arm, layers: int, n: int) -> tuple[range, range]:
    """Return the quantised layers and tokens. If the number of layers is odd, the middle layer is in the upper half.

    Implements: IN-ARMS

    Source: Section 3.13, Table 10.

    Raises:
        SpecError: if `half` is not "all", "lower" or "upper".
    """
    halves = {"all": range(layers), "lower": range(layers // 2), "upper": range(layers // 2, layers)}
    if arm.half not in halves:
        raise SpecError("half", arm.half, f"must be one of {', '.join(halves)}")
    low = min(arm.first, n)
    return halves[arm.half], range(low, max(low, n - arm.last))
