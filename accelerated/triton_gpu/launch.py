"""Launch table of the kernels, with fixed tile sizes.

Tiles are not tuned at run time, because different tiles give results with different bits. The tiles for compiled
kernels are for Hopper (sm_90). On an H100, 32 tilings were measured with 128 channels of two bytes. The table has the
fastest tiles that spill almost no registers. Heads of 64 channels have the same tiles. The remaining tiles cause no
register spills in the compiler's reports, except for float32 with 256 channels. Four-byte elements need full float32
products, without tensor cores, and therefore small tiles. The interpreter's tiles are small, so that tests with a few
dozen keys use several tiles.
"""

from dataclasses import dataclass

__all__ = [
    "COMPILED", "FLOAT32", "FLOAT64", "INTERPRETED", "LANES", "NORMS", "SCRATCH", "SHARED", "SLACK", "AttentionTiles",
    "Shape", "attention_tiles", "nested_rows", "searched_row",
]


@dataclass(frozen=True)
class Shape:
    """Rows and columns of a kernel's tile, and the launch options of the kernel."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of S1's kernels for one head dimension. The rows of `softmax` include all heads that share a program."""

    softmax: Shape
    cross: Shape
    chunk: Shape
    intra: Shape
    depth: int = 32
    """Number of columns of A that one step of a cosine reads."""
    normalise: Shape = Shape(8, 256)
    tokens: int = 32
    """Number of tokens whose salience one program computes."""


# Keys: padded head dimension, and bytes per element.
COMPILED: dict[tuple[int, int], AttentionTiles] = {
    (64, 2): AttentionTiles(Shape(128, 128, 4), Shape(64, 128, 8), Shape(64, 64, 4, 3), Shape(32, 128, 4), depth=16),
    (128, 2): AttentionTiles(Shape(128, 128, 4), Shape(64, 128, 8), Shape(64, 64, 4, 3), Shape(32, 128, 4), depth=16),
    (256, 2): AttentionTiles(Shape(128, 64, 8), Shape(64, 64, 8), Shape(64, 64, 8), Shape(64, 64, 8)),
    (64, 4): AttentionTiles(Shape(32, 16, 8), Shape(32, 16, 8), Shape(32, 32, 8), Shape(64, 64, 8)),
    (128, 4): AttentionTiles(Shape(32, 16, 8), Shape(16, 16, 8), Shape(16, 16, 8), Shape(64, 64, 8)),
    (256, 4): AttentionTiles(Shape(32, 16, 8), Shape(16, 16, 8), Shape(16, 16, 8), Shape(64, 64, 8)),
}
INTERPRETED = AttentionTiles(
    Shape(32, 16), Shape(32, 16), Shape(32, 32), Shape(32, 32), depth=16, normalise=Shape(32, 32), tokens=32
)

SHARED = 131_584  # bytes of shared memory per program for the row of the table that needs the most
SLACK = 1.0 - 1e-5  # rounding of the bound: a float32 sum over heads and exp2 have a relative error below 1e-6
SCRATCH = 512 * 2**20  # bytes of each of S1's two large buffers; a buffer covers as many whole chunks as fit

LANES = 128  # tokens in one program of NestedKV's last kernel
NORMS = 16  # number of tokens whose key norms one program computes
NESTED = 8192  # number of key channels that one program of NestedKV loads

# Fused multiply-add is part of the certified float32 bound, but each float64 operation must round once.
FLOAT32 = {"enable_fp_fusion": True}
FLOAT64 = {"enable_fp_fusion": False}


def attention_tiles(width: int, bytes_each: int, interpreted: bool) -> AttentionTiles:
    """Return the tiles of S1 for heads that are padded to `width` channels."""
    return INTERPRETED if interpreted else COMPILED[max(width, 64), bytes_each]


def nested_rows(width: int, W: int) -> int:
    """Return the number of tokens in a tile of NestedKV's cosines. At most W tokens keep window sums short."""
    rows = max(1, NESTED // max(width, 64))
    while rows > W:
        rows //= 2
    return rows


def searched_row(interpreted: bool) -> Shape:
    """Return the tile of NestedKV's programs that read a row several times. One step reads `columns` items."""
    return Shape(1, 64) if interpreted else Shape(1, 4096, 16)
