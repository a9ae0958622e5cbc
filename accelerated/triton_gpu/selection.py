# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Running top k of each row while a kernel streams over the columns, and loading of tiles of a strided matrix."""

import triton
import triton.language as tl

__all__ = ["best_so_far", "load_tile", "no_best", "packed", "weight_of", "write_best"]

# A sort key is one int64: the upper half has the bits of the weight, the lower half the complement of the index. Bits
# of positive floats have the order of the floats, so the maximum has the largest weight and, at a tie, the lowest
# index. No two keys are equal, so one comparison removes the maximum. tl.topk is a thousand times slower in the
# interpreter.
LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
REMOVED: tl.constexpr = tl.constexpr(-(2**62))


@triton.jit
def packed(weight, index):
    """Return an int64 sort key for each pair of a positive float32 weight and an index."""
    return (weight.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)


@triton.jit
def weight_of(key):
    """Return the weight from which a sort key was made."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def no_best(ROWS: tl.constexpr, PLACES: tl.constexpr):
    """Return empty lists (ROWS, PLACES). Free places have different negative numbers, so the smallest is unique."""
    return tl.zeros([ROWS, PLACES], tl.int64) - 1 - tl.arange(0, PLACES)[None, :].to(tl.int64)


@triton.jit
def best_so_far(weight, index, admitted, best, TAKE: tl.constexpr):
    """Merge the weights (rows, columns) of a tile into the lists. Only weights with `admitted` true are merged."""
    keys = tl.where(admitted, packed(weight, index), REMOVED)
    if tl.max(tl.max(keys, 1), 0) > REMOVED:
        best = merge_best(keys, best, TAKE)
    return best


@triton.jit
def merge_best(keys, best, TAKE: tl.constexpr):
    """Insert the TAKE largest sort keys of each row into the row's list. Each inserted key replaces the smallest."""
    for _ in tl.static_range(TAKE):
        top = tl.max(keys, 1)
        keys = tl.where(keys == top[:, None], REMOVED, keys)
        worst = tl.min(best, 1)
        best = tl.where((best == worst[:, None]) & (top > worst)[:, None], top[:, None], best)
    return best


@triton.jit
def write_best(best, INDEX, WEIGHT, row, live, TAKE: tl.constexpr):
    """Store the lists in INDEX and WEIGHT (rows, TAKE), largest weight first. Free places have index -1, weight 0."""
    at = row.to(tl.int64) * TAKE
    for rank in tl.static_range(TAKE):
        top = tl.max(best, 1)
        best = tl.where(best == top[:, None], REMOVED, best)
        result = top >= 0
        tl.store(INDEX + at + rank, tl.where(result, (top & LAST) ^ LAST, -1), mask=live)
        tl.store(WEIGHT + at + rank, tl.where(result, weight_of(top), 0.0), mask=live)


@triton.jit
def load_tile(
    X, row, live, row_stride, dim_stride, d: tl.constexpr, D: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Load rows of a strided matrix, zero-padded from d to D channels. If GUARDED, rows with false `live` are zero."""
    dim = tl.arange(0, D)
    at = X + row[:, None].to(tl.int64) * row_stride + dim[None, :].to(tl.int64) * dim_stride
    if GUARDED:
        tile = tl.load(at, mask=live[:, None] & (dim < d)[None, :], other=0.0)
    elif d < D:
        tile = tl.load(at, mask=(dim < d)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile
