"""Stage S1: salience and neighbours of each token from the attention of the observed layer (Section 3.2).

Attention is streamed, so no (n, n) array is made. The two large buffers (maxima of tiles, and attention inside chunks)
cover only a stripe of the segment. The size of the buffers therefore does not depend on the segment's length. The host
waits for the device only for checks of values and for the result.
"""

import math
from contextlib import nullcontext
from typing import Any
from warnings import catch_warnings

import numpy as np
import torch
import triton

from accelerated.torch_device.records import Neighbours, to_host
from accelerated.triton_gpu import kernels, launch
from accelerated.triton_gpu.device import (
    INTERPRETED,
    attention_tensors,
    lse_tensor,
    shaped_lse,
    shaped_tensors,
    upload,
)
from accelerated.triton_gpu.launch import FLOAT32, AttentionTiles, Shape
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention
from spec.validate import check_sinks

__all__ = ["coattention", "neighbours", "tiles_of"]

Tensor = torch.Tensor
LONGEST_LIST = 64


class _Segment:
    """Inputs and outputs of one segment on the device, and the arguments that all launches share."""

    def __init__(
        self, q: Tensor, k: Tensor, p: CrystalCacheParameters, scaling: float, softcap: float | None,
        tiles: AttentionTiles, lse: Tensor | None, sinks: Tensor | None,
    ) -> None:
        self.q, self.k, self.p, self.tiles, self.lse, self.sinks = q, k, p, tiles, lse, sinks
        self.heads, self.n, self.d = q.shape
        self.before = k.shape[1] - self.n
        self.C = min(p.C, self.n)
        self.group = self.heads // len(k)
        self.key_tiles = triton.cdiv(self.before + (self.n - 1) // self.C * self.C, tiles.softmax.columns)
        self.unit = (softcap or scaling) * math.log2(math.e)
        self.attention = (scaling / softcap if softcap else 1.0, self.unit, *q.stride(), *k.stride())
        self.widths = {"d": self.d, "D": max(16, triton.next_power_of_2(self.d)), "CAPPED": bool(softcap)}
        self.top, self.log = self.empty(self.heads, self.n), self.empty(self.heads, self.n)
        self.active = self.empty(triton.cdiv(self.n, tiles.cross.rows), self.key_tiles, dtype=torch.int32)
        self.salience = self.empty(self.n)
        self.intra, self.cross = self.lists(p.k_intra), self.lists(p.k_cross)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def lists(self, k: int) -> tuple[Tensor, Tensor]:
        """Return an empty list of neighbours and an empty list of weights for each token."""
        index = torch.full((self.n, k), -1, dtype=torch.int64, device=self.q.device)
        return index, torch.zeros((self.n, k), device=self.q.device)

    def stripes(self, unit: int, floats: int) -> list[tuple[int, int]]:
        """Return each stripe's first token and number of tokens. A token needs `floats` scratch values."""
        stripe = max(1, launch.SCRATCH // (4 * max(1, floats) * unit)) * unit
        return [(first, min(stripe, self.n - first)) for first in range(0, self.n, stripe)]

    def run(self) -> None:
        """Run the kernels in order: row softmax, neighbours in earlier chunks, salience, neighbours in each chunk."""
        for first, rows in self.stripes(self.tiles.cross.rows, self.heads * self.key_tiles):
            self.attend(first, rows)
        if self.key_tiles and self.p.k_cross:
            self.link()
        for first, rows in self.stripes(self.C, self.C):
            self.compare(first, rows)

    def attend(self, first: int, rows: int) -> None:
        """Compute the softmax of each row, and find the tiles of earlier keys to which the row can have an edge."""
        shape, cross, p = self.tiles.softmax, self.tiles.cross, self.p
        # One program computes several heads that share keys: the largest power of two that divides the group.
        pack = min(self.group & -self.group, shape.rows // 4)
        each = shape.rows // pack
        tiles = triton.cdiv(self.before + (first + rows - 1) // self.C * self.C, shape.columns)
        peak = self.empty(self.heads, tiles, rows)
        where = (first, rows, self.n, self.before, self.C, tiles)
        kernels.row_softmax[triton.cdiv(rows, each), self.heads // pack](
            self.q, self.k, *self.given(), self.top, self.log, peak, *where, *self.attention,
            KNOWN=self.lse is not None, GROUP=self.group, PACK=pack, ROWS=each, KEYS=shape.columns,
            **self.widths, **_how(shape),
        )
        if self.sinks is not None:
            log, top = (x[:, first : first + rows] for x in (self.log, self.top))
            torch.logaddexp2(log, self.sinks[:, None] * math.log2(math.e) - top * self.unit, out=log)
        if tiles and p.k_cross:
            bound = self.heads * float(np.float32(p.tau_cross)) * launch.SLACK
            kernels.active_tiles[triton.cdiv(rows, cross.rows), tiles](
                self.top, self.log, peak, self.active, *where, self.key_tiles, self.unit, bound, H=self.heads,
                ROWS=cross.rows, KEYS=cross.columns, **FLOAT32,
            )

    def given(self) -> tuple[Tensor, int, int]:
        """Return the given lse and its strides. If no lse is given, return a tensor that the kernel does not read."""
        return (self.log, 0, 0) if self.lse is None else (self.lse, self.lse.stride(0), self.lse.stride(1))

    def link(self) -> None:
        """Compute the neighbours in earlier chunks from the active tiles."""
        shape, k = self.tiles.cross, self.p.k_cross
        kernels.cross_neighbours[triton.cdiv(self.n, shape.rows),](
            self.q, self.k, self.top, self.log, self.active, *self.cross, self.n, self.before, self.C,
            self.key_tiles, 1.0 / self.heads, float(np.float32(self.p.tau_cross)), *self.attention,
            H=self.heads, GROUP=self.group, ROWS=shape.rows, KEYS=shape.columns,
            PLACES=triton.next_power_of_2(k), TAKE=k, **self.widths, **_how(shape),
        )

    def compare(self, first: int, rows: int) -> None:
        """Compute salience and the neighbours in the same chunk, for a stripe of whole chunks."""
        shape, p, tokens = self.tiles.chunk, self.p, self.tiles.tokens
        spans = triton.cdiv(min(self.C, rows) + shape.rows, shape.columns)
        width = spans * shape.columns
        tiles = triton.cdiv(rows, shape.rows)
        A, column = self.empty(rows, self.C), self.empty(tiles, self.heads, width)
        kernels.chunk_attention[tiles, spans](
            self.q, self.k, self.top, self.log, A, column, first, rows, self.n, self.before, self.C, width,
            1.0 / self.heads, *self.attention, H=self.heads, GROUP=self.group, ROWS=shape.rows,
            KEYS=shape.columns, **self.widths, **_how(shape),
        )
        take = min(p.k_heads, self.heads)
        summed = max(1, take) if p.heads == "mean" else 1
        kernels.salience[triton.cdiv(rows, tokens),](
            column, self.salience, first, rows, self.C, width, float(summed * p.M_min), float(summed * p.M_max),
            H=self.heads, HEADS=triton.next_power_of_2(self.heads), ROWS=shape.rows, TOKENS=tokens, TAKE=take,
            **FLOAT32,
        )
        if summed > 1:
            self.salience[first : first + rows] /= summed
        if p.k_intra:
            self.choose(first, rows, A)

    def choose(self, first: int, rows: int, A: Tensor) -> None:
        """Compute the neighbours in the same chunk."""
        norm, shape, k = self.tiles.normalise, self.tiles.intra, self.p.k_intra
        epsilon = float(self.p.epsilon)
        kernels.row_normalise[triton.cdiv(rows, norm.rows),](
            A, first, rows, self.C, epsilon, ROWS=norm.rows, KEYS=norm.columns, **FLOAT32
        )
        kernels.intra_neighbours[triton.cdiv(rows, shape.rows),](
            A, *self.intra, first, rows, self.before, self.C, float(np.float32(self.p.tau_intra)),
            ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=self.tiles.depth, PLACES=triton.next_power_of_2(k),
            TAKE=k, **_how(shape),
        )


def _how(shape: Shape) -> dict[str, int | bool]:
    return {"num_warps": shape.warps, "num_stages": shape.stages, **FLOAT32}


def coattention(
    q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters, scaling: float,
    softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None,
) -> CoAttention:
    """Return the result of S1, computed in float32 with the tiles of the launch table. Bits are equal in all runs.

    The host waits once. The check of sinks waits a second time.

    Implements: CC-ATTENTION, CC-SALIENCE, CC-MEAN-SALIENCE, CC-ROW-NORM, CC-INTRA, CC-CROSS, CC-COATTENTION

    Raises:
        SpecError: if the kernels do not accept an input.
    """
    result = to_host(*neighbours(q, k, parameters, scaling, softcap, lse, sinks), positions)
    if result is None:
        lse_tensor(lse, attention_tensors(q, k)[0])
        raise AssertionError("q, k and lse are finite, but the device found a value that is not")
    return result


def neighbours(
    q: DeviceArray, k: DeviceArray, parameters: CrystalCacheParameters, scaling: float, softcap: float | None,
    lse: DeviceArray | None, sinks: DeviceArray | None, tiles: AttentionTiles | None = None,
) -> tuple[Neighbours, Tensor]:
    """Return the result of S1 as tensors, and a mask (1,) that is True if q, k and lse are finite.

    Default of `tiles`: the tiles of the launch table.

    Implements: CC-COATTENTION

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype or device of an input.
    """
    on_device = shaped_tensors(q, k)
    given = shaped_lse(lse, on_device[0])
    check_sinks(sinks, q)
    read = [*on_device] if given is None else [*on_device, given]
    largest = torch.stack([torch.linalg.vector_norm(x, ord=float("inf"), dtype=torch.float32) for x in read])
    segment = _attended(*on_device, parameters, scaling, softcap, tiles or tiles_of(on_device[0]), given, sinks)
    (intra, intra_weight), (cross, cross_weight) = segment.intra, segment.cross
    wide = (x.double() for x in (segment.salience, intra_weight, cross_weight))
    salience, intra_weight, cross_weight = wide
    return Neighbours(salience, intra, intra_weight, cross, cross_weight), largest.isfinite().all()[None]


def tiles_of(q: Tensor) -> AttentionTiles:
    """Return the tiles of the launch table for queries (H, n, d)."""
    width = max(16, triton.next_power_of_2(q.shape[2]))
    return launch.attention_tiles(width, q.element_size(), INTERPRETED)


def _attended(
    q: Tensor, k: Tensor, p: CrystalCacheParameters, scaling: float, softcap: float | None, tiles: AttentionTiles,
    lse: Tensor | None, sinks: DeviceArray | None,
) -> _Segment:
    """Run the kernels, and return the segment with its outputs.

    Raises:
        SpecError: if a list of neighbours is too long for the kernels.
    """
    for name in ("k_intra", "k_cross"):
        if getattr(p, name) > LONGEST_LIST:
            raise SpecError(name, getattr(p, name), f"must be at most {LONGEST_LIST} with the backend triton")
    if isinstance(sinks, np.ndarray):
        sinks = upload(sinks, np.float32, q.device)
    beside = None if sinks is None else sinks.to(q.device, torch.float32)
    segment = _Segment(q, k, p, scaling, softcap, tiles, lse, beside)
    # The interpreter computes with NumPy, which would warn of values that are not finite. They raise an error later.
    quiet: Any = catch_warnings(action="ignore", category=RuntimeWarning) if INTERPRETED else nullcontext()
    with torch.cuda.device_of(q), quiet:  # type: ignore[no-untyped-call]
        segment.run()
    return segment
