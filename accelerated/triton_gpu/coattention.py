"""Stage S1: salience and neighbours of each token from the attention of the observed layer (Section 3.2).

Attention is streamed, so no (n, n) array is made. The two large buffers (maxima of tiles, and attention inside chunks)
cover only a stripe of the segment. The size of the buffers therefore does not depend on the segment's length. The host
waits for the device only for checks of values and for the result.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple
from warnings import catch_warnings

import numpy as np
import torch
from triton import cdiv, next_power_of_2

from accelerated.torch_device.records import Neighbours, to_host
from accelerated.triton_gpu import kernels, launch
from accelerated.triton_gpu.device import INTERPRETED, refuse, shaped_lse, shaped_tensors, single_sinks
from accelerated.triton_gpu.launch import FLOAT32, AttentionTiles, Shape
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention
from spec.validate import check_positions, check_sinks

__all__ = ["coattention", "neighbours"]

Tensor = torch.Tensor
LONGEST_LIST = 64
RESULTS = ("salience", "intra", "intra_weight", "cross", "cross_weight")


class _Launch(NamedTuple):
    """Kernel, grid, names of the tensors, numbers and constants of one launch."""

    kernel: str
    grid: tuple[int, ...]
    tensors: tuple[str, ...]
    numbers: tuple[int | float, ...]
    constants: Mapping[str, Any]


class _Plan:
    """Launches of S1 and sizes of its tensors, for one shape of the inputs. A plan contains no tensors."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], lse: tuple[int, ...] | None,
        p: CrystalCacheParameters, scaling: float, softcap: float | None, tiles: AttentionTiles, scratch: int,
        slack: float,
    ) -> None:
        self.p, self.tiles, self.lse, self.scratch, self.slack = p, tiles, lse, scratch, slack
        self.heads, self.n, self.d, H_kv, live, _ = shape
        self.before = live - self.n
        self.C = min(p.C, self.n)
        self.group = self.heads // H_kv
        self.key_tiles = cdiv(self.before + (self.n - 1) // self.C * self.C, tiles.softmax.columns)
        self.unit = (softcap or scaling) * math.log2(math.e)
        self.attention = (scaling / softcap if softcap else 1.0, self.unit, *strides)
        self.widths = {"d": self.d, "D": max(16, next_power_of_2(self.d)), "CAPPED": bool(softcap)}
        self.linked = bool(self.key_tiles and p.k_cross)
        self.summed = max(1, min(p.k_heads, self.heads)) if p.heads == "mean" else 1
        active, rows = (cdiv(self.n, tiles.cross.rows), self.key_tiles), (self.heads, self.n)
        self.sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "top": (rows, torch.float32), "log": (rows, torch.float32), "active": (active, torch.int32),
            "salience": ((self.n,), torch.float32),
            "intra": ((self.n, p.k_intra), torch.int64), "intra_weight": ((self.n, p.k_intra), torch.float32),
            "cross": ((self.n, p.k_cross), torch.int64), "cross_weight": ((self.n, p.k_cross), torch.float32),
        }
        stripes = self.stripes(tiles.cross.rows, self.heads * self.key_tiles)
        self.attend = [(*self.softmax(*stripe), slice(stripe[0], sum(stripe))) for stripe in stripes]
        self.rest = [self.link()] if self.linked else []
        for stripe in self.stripes(self.C, self.C):
            self.rest += self.compare(*stripe)

    def stripes(self, unit: int, floats: int) -> list[tuple[int, int]]:
        """Return each stripe's first token and number of tokens. A token needs `floats` scratch values."""
        stripe = max(1, self.scratch // (4 * max(1, floats) * unit)) * unit
        return [(first, min(stripe, self.n - first)) for first in range(0, self.n, stripe)]

    def buffer(self, name: str, *shape: int) -> str:
        """Make the buffer large enough for this shape, and return the name of the buffer."""
        (before,), dtype = self.sizes.get(name, ((0,), torch.float32))
        self.sizes[name] = (max(before, math.prod(shape)),), dtype
        return name

    def softmax(self, first: int, rows: int) -> tuple[_Launch, _Launch | None]:
        """Compute the softmax of each row, and find the tiles of earlier keys to which the row can have an edge."""
        shape, cross, p = self.tiles.softmax, self.tiles.cross, self.p
        # One program computes several heads that share keys: the largest power of two that divides the group.
        pack = min(self.group & -self.group, shape.rows // 4)
        each = shape.rows // pack
        tiles = cdiv(self.before + (first + rows - 1) // self.C * self.C, shape.columns)
        peak = self.buffer("peak", self.heads, tiles, rows)
        where = (first, rows, self.n, self.before, self.C, tiles)
        softmax = _Launch(
            "row_softmax", (cdiv(rows, each), self.heads // pack), ("q", "k", "lse", "top", "log", peak),
            (*(self.lse or (0, 0)), *where, *self.attention),
            {"KNOWN": self.lse is not None, "GROUP": self.group, "PACK": pack, "ROWS": each, "KEYS": shape.columns,
             **self.widths, **_how(shape)},
        )
        if not (tiles and p.k_cross):
            return softmax, None
        bound = self.heads * float(np.float32(p.tau_cross)) * self.slack
        return softmax, _Launch(
            "active_tiles", (cdiv(rows, cross.rows), tiles), ("top", "log", peak, "active"),
            (*where, self.key_tiles, self.unit, bound),
            {"H": self.heads, "ROWS": cross.rows, "KEYS": cross.columns, **FLOAT32},
        )

    def link(self) -> _Launch:
        """Compute the neighbours in earlier chunks from the active tiles."""
        shape, k = self.tiles.cross, self.p.k_cross
        return _Launch(
            "cross_neighbours", (cdiv(self.n, shape.rows),),
            ("q", "k", "top", "log", "active", "cross", "cross_weight"),
            (self.n, self.before, self.C, self.key_tiles, 1.0 / self.heads, float(np.float32(self.p.tau_cross)),
             *self.attention),
            {"H": self.heads, "GROUP": self.group, "ROWS": shape.rows, "KEYS": shape.columns,
             "PLACES": next_power_of_2(k), "TAKE": k, **self.widths, **_how(shape)},
        )

    def compare(self, first: int, rows: int) -> Iterator[_Launch]:
        """Compute salience and the neighbours in the same chunk, for a stripe of whole chunks."""
        shape, p, tokens = self.tiles.chunk, self.p, self.tiles.tokens
        spans = cdiv(min(self.C, rows) + shape.rows, shape.columns)
        width, tiles = spans * shape.columns, cdiv(rows, shape.rows)
        A, column = self.buffer("A", rows, self.C), self.buffer("column", tiles, self.heads, width)
        yield _Launch(
            "chunk_attention", (tiles, spans), ("q", "k", "top", "log", A, column),
            (first, rows, self.n, self.before, self.C, width, 1.0 / self.heads, *self.attention),
            {"H": self.heads, "GROUP": self.group, "ROWS": shape.rows, "KEYS": shape.columns, **self.widths,
             **_how(shape)},
        )
        yield _Launch(
            "salience", (cdiv(rows, tokens),), (column, "salience"),
            (first, rows, self.C, width, float(self.summed * p.M_min), float(self.summed * p.M_max)),
            {"H": self.heads, "HEADS": next_power_of_2(self.heads), "ROWS": shape.rows, "TOKENS": tokens,
             "TAKE": min(p.k_heads, self.heads), **FLOAT32},
        )
        if p.k_intra:
            yield from self.choose(first, rows, A)

    def choose(self, first: int, rows: int, A: str) -> Iterator[_Launch]:
        """Compute the neighbours in the same chunk."""
        norm, shape, k = self.tiles.normalise, self.tiles.intra, self.p.k_intra
        yield _Launch(
            "row_normalise", (cdiv(rows, norm.rows),), (A,), (first, rows, self.C, float(self.p.epsilon)),
            {"ROWS": norm.rows, "KEYS": norm.columns, **FLOAT32},
        )
        yield _Launch(
            "intra_neighbours", (cdiv(rows, shape.rows),), (A, "intra", "intra_weight"),
            (first, rows, self.before, self.C, float(np.float32(self.p.tau_intra))),
            {"ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": self.tiles.depth, "PLACES": next_power_of_2(k),
             "TAKE": k, **_how(shape)},
        )

    def run(self, q: Tensor, k: Tensor, lse: Tensor | None, sinks: Tensor | None) -> dict[str, Tensor]:
        """Run the kernels in order, and return the results by name."""
        given = {name: torch.empty(shape, dtype=dtype, device=q.device) for name, (shape, dtype) in self.sizes.items()}
        if not self.linked:
            given["cross"].fill_(-1)
            given["cross_weight"].zero_()
        given |= {"q": q, "k": k, "lse": given["log"] if lse is None else lse}  # a kernel reads only a given lse
        for softmax, active, rows in self.attend:
            _launch(softmax, given)
            if sinks is not None:
                log, top = (given[name][:, rows] for name in ("log", "top"))
                torch.logaddexp2(log, sinks[:, None] * math.log2(math.e) - top * self.unit, out=log)
            if active is not None:
                _launch(active, given)
        for one in self.rest:
            _launch(one, given)
        if self.summed > 1:
            given["salience"] /= self.summed
        return given


_plan = lru_cache(maxsize=256)(_Plan)


def _launch(one: _Launch, given: Mapping[str, Tensor]) -> None:
    getattr(kernels, one.kernel)[one.grid](*[given[name] for name in one.tensors], *one.numbers, **one.constants)


def _how(shape: Shape) -> dict[str, int | bool]:
    return {"num_warps": shape.warps, "num_stages": shape.stages, **FLOAT32}


def coattention(
    q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> CoAttention:
    """Return the result of S1, computed in float32 with the tiles of the launch table. Bits are equal in all runs.

    The host waits once.

    Implements: CC-ATTENTION, CC-SALIENCE, CC-MEAN-SALIENCE, CC-ROW-NORM, CC-INTRA, CC-CROSS, CC-COATTENTION

    Raises:
        SpecError: if the kernels do not accept an input.
    """
    if len(getattr(k, "shape", ())) == 3:  # `neighbours` refuses all other keys
        check_positions(positions, k.shape[1])
    result = to_host(*neighbours(q, k, parameters, scaling, softcap, lse, sinks), positions)
    if result is None:
        refuse(q, k, lse, sinks)
        raise AssertionError("all values are finite, but the device found a value that is not")
    return result


def neighbours(
    q: DeviceArray, k: DeviceArray, parameters: CrystalCacheParameters, scaling: float, softcap: float | None,
    lse: DeviceArray | None = None, sinks: DeviceArray | None = None, tiles: AttentionTiles | None = None,
) -> tuple[Neighbours, Tensor]:
    """Return the result of S1 as tensors, and a mask (1,) that is True if q, k, lse and sinks are finite.

    Default of `tiles`: the tiles of the launch table.

    Implements: CC-COATTENTION

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype or device of an input.
    """
    on_device = shaped_tensors(q, k)
    given = shaped_lse(lse, on_device[0])
    check_sinks(sinks, q, read=False)
    beside = single_sinks(sinks, on_device[0].device)
    read = [*on_device, *(x for x in (given, beside) if x is not None)]
    largest = torch.stack([torch.linalg.vector_norm(x, ord=float("inf"), dtype=torch.float32) for x in read])
    size = next_power_of_2(q.shape[2]), on_device[0].element_size()
    tiles = tiles or launch.attention_tiles(*size, INTERPRETED)
    result = _attended(*on_device, parameters, scaling, softcap, tiles, given, beside)
    S, intra, intra_weight, cross, cross_weight = (result[name] for name in RESULTS)
    finite = (largest < math.inf).all()[None]  # false for NaN too; `isfinite` is four operators
    return Neighbours(S.double(), intra, intra_weight.double(), cross, cross_weight.double()), finite


def _attended(
    q: Tensor, k: Tensor, p: CrystalCacheParameters, scaling: float, softcap: float | None, tiles: AttentionTiles,
    lse: Tensor | None, sinks: Tensor | None,
) -> dict[str, Tensor]:
    """Run the kernels, and return the results by name. Calls with equal shapes and parameters share a plan.

    Raises:
        SpecError: if a list of neighbours is too long for the kernels.
    """
    for name in ("k_intra", "k_cross"):
        if getattr(p, name) > LONGEST_LIST:
            raise SpecError(name, getattr(p, name), f"must be at most {LONGEST_LIST} with the backend triton")
    plan = _plan(
        (*q.shape, *k.shape), (*q.stride(), *k.stride()), None if lse is None else lse.stride(), p, scaling, softcap,
        tiles, launch.SCRATCH, launch.SLACK,
    )
    # The interpreter computes with NumPy, which would warn of values that are not finite. They raise an error later.
    quiet: Any = catch_warnings(action="ignore", category=RuntimeWarning) if INTERPRETED else nullcontext()
    with torch.cuda.device_of(q), quiet:  # type: ignore[no-untyped-call]
        return plan.run(q, k, lse, sinks)
