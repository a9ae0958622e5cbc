# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""NestedKV's score a*. The kernels read the keys twice, first for the means and then for the cosines.

Cosines are computed in float32. A window sum is a difference of sums over at most three windows, not over the whole
prompt. All computation after the cosines is in float64 and reads 12 bytes per token and head.
"""

import math

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.numba_cpu.nestedkv import in_range
from accelerated.torch_device.nestedkv import nestedkv_score as score_by_torch
from accelerated.triton_gpu.device import INTERPRETED, WIDEST_HEAD, download, key_tensor, upload
from accelerated.triton_gpu.launch import FLOAT32, FLOAT64, LANES, nested_rows, searched_row
from spec.arrays import Matrix
from spec.backend import NestedKVStages
from spec.errors import SpecError
from spec.parameters import NestedKVParameters
from spec.policy import DeviceArray, LayerView

__all__ = ["anomaly_score", "nestedkv_score"]

NEGLIGIBLE: tl.constexpr = tl.constexpr(2.0**-16)
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(80.0)
LOW: tl.constexpr = tl.constexpr(0)
HIGH: tl.constexpr = tl.constexpr(1)
GAP: tl.constexpr = tl.constexpr(2)


@triton.jit
def keys_of(K, head, i, live, k_head, k_row, k_dim, d, D: tl.constexpr):
    """Return keys (ROWS, D) of a head in float32. A row is zero if `live` is false for this row."""
    channel = tl.arange(0, D)
    at = K + head.to(tl.int64) * k_head + i[:, None].to(tl.int64) * k_row + channel[None, :] * k_dim
    return tl.load(at, mask=live[:, None] & (channel < d)[None, :], other=0.0).to(tl.float32)


@triton.jit
def unit_rows(K, INVERSE, head, i, live, n, k_head, k_row, k_dim, d, D: tl.constexpr):
    """Return keys (ROWS, D) scaled to length 1. A row is zero if `live` is false for this row."""
    inverse = tl.load(INVERSE + head.to(tl.int64) * n + i, mask=live, other=0.0)
    return keys_of(K, head, i, live, k_head, k_row, k_dim, d, D) * inverse[:, None]


@triton.jit
def measured(
    K, INVERSE, BLOCK, n, d, b, blocks, k_head, k_row, k_dim, ROWS: tl.constexpr, D: tl.constexpr,
):
    """Write inverse key norms (0 for a zero key) to INVERSE (H, n), and sums of unit keys to BLOCK (H, blocks, d).

    Implements: NK-UNIT-KEYS, NK-EPISODIC
    """
    block, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    last = tl.minimum((block + 1) * b, n)
    for start in range(block * b, last, ROWS):
        i = start + tl.arange(0, ROWS)
        live = i < last
        k = keys_of(K, head, i, live, k_head, k_row, k_dim, d, D)
        # A key is divided by its largest channel, so that no square overflows or vanishes.
        most = tl.max(tl.abs(k), 1)
        present = most >= SMALLEST
        scaled = k / tl.where(present, most, 1.0)[:, None]
        length = tl.sqrt(tl.sum(scaled * scaled, 1))
        inverse = tl.where(present, 1.0 / (tl.where(present, length, 1.0) * tl.where(present, most, 1.0)), 0.0)
        tl.store(INVERSE + head.to(tl.int64) * n + i, inverse, mask=live)
        total += tl.sum(k * inverse[:, None], 0)
    tl.store(BLOCK + (head * blocks + block).to(tl.int64) * d + channel, total, mask=channel < d)


@triton.jit
def stable_direction(BLOCK, STABLE, n, d, blocks, D: tl.constexpr):
    """Write mu_s, scaled to length 1, to STABLE (H, d). mu_s is computed in float64. A negligible mu_s becomes zero.

    Implements: NK-STABLE
    """
    head = tl.program_id(0)
    channel = tl.arange(0, D)
    total = tl.zeros([D], tl.float64)
    for block in range(blocks):
        at = BLOCK + (head * blocks + block).to(tl.int64) * d + channel
        total += tl.load(at, mask=channel < d, other=0.0).to(tl.float64)
    length = tl.sqrt(tl.sum(total * total, 0))
    present = length > tl.cast(n, tl.float64) * NEGLIGIBLE
    scaled = tl.where(present, total / tl.where(present, length, 1.0), 0.0)
    tl.store(STABLE + head * d + channel, scaled.to(tl.float32), mask=channel < d)


@triton.jit
def cosine(unit, memory, terms):
    """Return the cosine of each unit key with a memory (a sum of `terms` unit keys), or 0 for a negligible memory."""
    length = tl.sqrt(tl.sum(memory * memory, 1))
    present = length > terms.to(tl.float32) * NEGLIGIBLE
    return tl.where(present, tl.sum(unit * memory, 1) / tl.where(present, length, 1.0), 0.0)


@triton.jit
def anomalies(
    K, INVERSE, BLOCK, STABLE, ANOMALY, n, d, b, blocks, width, heads, k_head, k_row, k_dim, ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Write negative cosines with the three memories to ANOMALY (3, H, n). A program computes ROWS tokens of a head.

    The window sum of a token starts from the sum of the `width` keys before the tile. Keys that enter the window are
    then added, and keys that leave the window are subtracted.

    Implements: NK-CURRENT, NK-ANOMALY
    """
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    channel = tl.arange(0, D)
    lane = tl.arange(0, ROWS)
    i = first + lane
    live = i < n
    unit = unit_rows(K, INVERSE, head, i, live, n, k_head, k_row, k_dim, d, D)
    out = ANOMALY + head.to(tl.int64) * n + i
    scale = tl.cast(heads, tl.int64) * n
    stable = tl.load(STABLE + head * d + channel, mask=channel < d, other=0.0)
    tl.store(out, -tl.sum(unit * stable[None, :], 1), mask=live)
    block = i // b
    at = BLOCK + (head * blocks + block)[:, None].to(tl.int64) * d + channel[None, :]
    episodic = tl.load(at, mask=live[:, None] & (channel < d)[None, :], other=0.0)
    tl.store(out + scale, -cosine(unit, episodic, tl.minimum(b, tl.maximum(n - block * b, 1))), mask=live)
    before = tl.zeros([D], tl.float32)
    for start in range(0, width, ROWS):
        j = first - width + start + lane
        earlier = unit_rows(K, INVERSE, head, j, (j >= 0) & (j < first), n, k_head, k_row, k_dim, d, D)
        before += tl.sum(earlier, 0)
    leaving = unit_rows(K, INVERSE, head, i - width, live & (i >= width), n, k_head, k_row, k_dim, d, D)
    window = before[None, :] + tl.cumsum(unit - leaving, 0)
    tl.store(out + 2 * scale, -cosine(unit, window, tl.minimum(i + 1, width)), mask=live)


@triton.jit
def ordered(x):
    """Return int32 sort keys that have the same order as the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the float that belongs to a sort key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def reaching(ANOMALY, row, n, key_a, key_b, SCAN: tl.constexpr):
    """Return how many values of a row have a sort key >= `key_a`, and how many have a sort key >= `key_b`."""
    a, b = row * 0, row * 0
    for start in range(0, n, SCAN):
        i = start + tl.arange(0, SCAN)
        x = tl.load(ANOMALY + row.to(tl.int64) * n + i, mask=i < n, other=0.0)
        key = ordered(x)
        a += tl.sum(((key >= key_a) & (i < n)).to(tl.int32), 0)
        b += tl.sum(((key >= key_b) & (i < n)).to(tl.int32), 0)
    return a, b


@triton.jit
def at_ranks(ANOMALY, row, n, rank_a, rank_b, SCAN: tl.constexpr):
    """Return the sort keys of the rank_a-th and rank_b-th largest value. Each step finds one bit, the sign first."""
    a, b = reaching(ANOMALY, row, n, row * 0, row * 0, SCAN)
    key_a = tl.where(a >= rank_a, 0, -2147483648)
    key_b = tl.where(b >= rank_b, 0, -2147483648)
    for place in range(31):
        higher_a, higher_b = key_a | (1 << (30 - place)), key_b | (1 << (30 - place))
        a, b = reaching(ANOMALY, row, n, higher_a, higher_b, SCAN)
        key_a = tl.where(a >= rank_a, higher_a, key_a)
        key_b = tl.where(b >= rank_b, higher_b, key_b)
    return key_a, key_b


@triton.jit
def extremes(ANOMALY, RANGES, n, m, SCAN: tl.constexpr):
    """Write RANGES (3 H, 3): minimum, maximum and Delta of each anomaly row. Delta is 0 if the range is negligible.

    Implements: NK-GAP
    """
    row = tl.program_id(0)
    top, bottom = at_ranks(ANOMALY, row, n, m, n - m + 1, SCAN)
    low = tl.zeros([], tl.float64) + float("inf")
    high = -low
    over, under = row * 0, row * 0
    above, below = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for start in range(0, n, SCAN):
        i = start + tl.arange(0, SCAN)
        live = i < n
        x = tl.load(ANOMALY + row.to(tl.int64) * n + i, mask=live, other=0.0)
        key, wide = ordered(x), x.to(tl.float64)
        low = tl.minimum(low, tl.min(tl.where(live, wide, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(live, wide, float("-inf")), 0))
        above += tl.sum(tl.where(live & (key > top), wide, 0.0), 0)
        below += tl.sum(tl.where(live & (key < bottom), wide, 0.0), 0)
        over += tl.sum((live & (key > top)).to(tl.int32), 0)
        under += tl.sum((live & (key < bottom)).to(tl.int32), 0)
    above += (m - over).to(tl.float64) * value_of(top).to(tl.float64)
    below += (m - under).to(tl.float64) * value_of(bottom).to(tl.float64)
    spread = high - low
    present = spread > NEGLIGIBLE
    delta = (above - below) / tl.cast(m, tl.float64) / tl.where(present, spread, 1.0)
    tl.store(RANGES + row * 3 + LOW, low)
    tl.store(RANGES + row * 3 + HIGH, high)
    tl.store(RANGES + row * 3 + GAP, tl.where(present, delta, 0.0))


@triton.jit
def normalised(x, low, high):
    """Return the values after min-max normalisation to [0, 1], or zeros if the range is negligible.

    Implements: NK-MIN-MAX
    """
    spread = high - low
    present = spread > NEGLIGIBLE
    return tl.where(present, (x - low) / tl.where(present, spread, 1.0), 0.0)


@triton.jit
def reading(ANOMALY, RANGES, row, i, live, n):
    """Return the normalised anomalies of several tokens for one memory."""
    x = tl.load(ANOMALY + row.to(tl.int64) * n + i, mask=live, other=0.0).to(tl.float64)
    return normalised(x, tl.load(RANGES + row * 3 + LOW), tl.load(RANGES + row * 3 + HIGH))


@triton.jit
def deviation(a, b, c):
    """Return the population standard deviation of three anomalies."""
    mean = (a + b + c) / 3.0
    return tl.sqrt(((a - mean) * (a - mean) + (b - mean) * (b - mean) + (c - mean) * (c - mean)) / 3.0)


@triton.jit
def surprises(ANOMALY, RANGES, SURPRISE, n, heads, SCAN: tl.constexpr):
    """Write SURPRISE (H, 3): minimum, maximum and mean of each head's deviations. Each program handles one head.

    Implements: NK-SURPRISE
    """
    head = tl.program_id(0)
    low = tl.zeros([], tl.float64) + float("inf")
    high = -low
    total = tl.zeros([], tl.float64)
    for start in range(0, n, SCAN):
        i = start + tl.arange(0, SCAN)
        live = i < n
        s = deviation(
            reading(ANOMALY, RANGES, head, i, live, n), reading(ANOMALY, RANGES, heads + head, i, live, n),
            reading(ANOMALY, RANGES, 2 * heads + head, i, live, n),
        )
        low = tl.minimum(low, tl.min(tl.where(live, s, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(live, s, float("-inf")), 0))
        total += tl.sum(tl.where(live, s, 0.0), 0)
    tl.store(SURPRISE + head * 3 + LOW, low)
    tl.store(SURPRISE + head * 3 + HIGH, high)
    tl.store(SURPRISE + head * 3 + GAP, total / tl.cast(n, tl.float64))


@triton.jit
def routed(ANOMALY, RANGES, SURPRISE, NUMBERS, SCORE, n, heads, LANES: tl.constexpr):
    """Write SCORE (H, n), the scores a*. NUMBERS contains the three prior weights, beta, tau and kappa.

    Implements: NK-BLEND, NK-ROUTE, NK-SCORE
    """
    i, head = tl.program_id(0) * LANES + tl.arange(0, LANES), tl.program_id(1)
    live = i < n
    a = reading(ANOMALY, RANGES, head, i, live, n)
    b = reading(ANOMALY, RANGES, heads + head, i, live, n)
    c = reading(ANOMALY, RANGES, 2 * heads + head, i, live, n)
    beta, tau, kappa = tl.load(NUMBERS + 3), tl.load(NUMBERS + 4), tl.load(NUMBERS + 5)
    gain_a = beta * tl.load(RANGES + head * 3 + GAP)
    gain_b = beta * tl.load(RANGES + (heads + head) * 3 + GAP)
    gain_c = beta * tl.load(RANGES + (2 * heads + head) * 3 + GAP)
    beyond = tl.maximum(tl.maximum(tl.maximum(gain_a, gain_b), gain_c) - LARGEST_EXPONENT, 0.0)
    w_a = tl.load(NUMBERS) * tl.exp(gain_a - beyond)
    w_b = tl.load(NUMBERS + 1) * tl.exp(gain_b - beyond)
    w_c = tl.load(NUMBERS + 2) * tl.exp(gain_c - beyond)
    blended = (w_a * a + w_b * b + w_c * c) / (w_a + w_b + w_c)
    low, high = tl.load(SURPRISE + head * 3 + LOW), tl.load(SURPRISE + head * 3 + HIGH)
    s = normalised(deviation(a, b, c), low, high)
    s = tl.maximum(s - normalised(tl.load(SURPRISE + head * 3 + GAP), low, high), 0.0)
    alpha = 1.0 / (1.0 + tl.exp(tl.minimum(-kappa * (s - tau), LARGEST_EXPONENT)))
    best = (1.0 - alpha) * blended + alpha * tl.maximum(tl.maximum(a, b), c)
    tl.store(SCORE + head.to(tl.int64) * n + i, best, mask=live)


def anomaly_score(k: DeviceArray, parameters: NestedKVParameters) -> Matrix:
    """Return the score a* (H_kv, n) of keys (H_kv, n, d), computed on the device of the keys.

    Raises:
        SpecError: if the kernels do not accept the type, shape, dtype, device or a value, or if a key is zero.
    """
    keys = key_tensor(k)
    if keys.dtype == torch.float64:
        keys = upload(in_range(np.asarray(k)), np.float32, keys.device)
    score, inverse = _scores(keys, parameters)
    if not bool(inverse.all()):
        head, token = (int(x) for x in torch.nonzero(inverse == 0)[0])
        raise SpecError("k", 0.0, f"a zero key has no direction: KV head {head}, token {token}")
    best: Matrix = download(score, np.float64)
    return best


def nestedkv_score(view: LayerView, stages: NestedKVStages, parameters: NestedKVParameters) -> torch.Tensor:
    """Return the score a* of a layer as a tensor on the device. The scores of a head with a zero key are NaN."""
    if view.k.shape[2] > WIDEST_HEAD:
        return score_by_torch(view, stages, parameters)
    score, inverse = _scores(view.k, parameters)
    return score.masked_fill_(~(inverse > 0).all(dim=1, keepdim=True), torch.nan)


def _scores(keys: torch.Tensor, p: NestedKVParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Return score a* and inverse norm of each key, (H, n): 0 for a zero key, NaN for a key that is not finite."""
    H, n, d = keys.shape
    b = min(max(n // p.blocks, p.b_min), p.b_max)
    D, blocks = triton.next_power_of_2(d), triton.cdiv(n, b)
    shape = {"ROWS": nested_rows(D, p.W), "D": D, "num_warps": 8, **FLOAT32}
    inverse = torch.empty(H, n, dtype=torch.float32, device=keys.device)
    sums = torch.empty(H, blocks, d, dtype=torch.float32, device=keys.device)
    stable = torch.empty(H, d, dtype=torch.float32, device=keys.device)
    result = torch.empty(3, H, n, dtype=torch.float32, device=keys.device)
    ranges = torch.empty(3 * H, 3, dtype=torch.float64, device=keys.device)
    surprise = torch.empty(H, 3, dtype=torch.float64, device=keys.device)
    score = torch.empty(H, n, dtype=torch.float64, device=keys.device)
    numbers = upload(np.array([*p.w0, p.beta, p.tau, p.kappa]), np.float64, keys.device)
    m = max(1, math.floor(p.p * n))
    with torch.cuda.device_of(keys):
        measured[(blocks, H)](keys, inverse, sums, n, d, b, blocks, *keys.stride(), **shape)
        stable_direction[(H,)](sums, stable, n, d, blocks, D=D, **FLOAT64)
        anomalies[(triton.cdiv(n, shape["ROWS"]), H)](
            keys, inverse, sums, stable, result, n, d, b, blocks, p.W, H, *keys.stride(), **shape
        )
        row = searched_row(INTERPRETED)
        scan = {"SCAN": row.columns, "num_warps": row.warps, **FLOAT64}
        extremes[(3 * H,)](result, ranges, n, m, **scan)
        surprises[(H,)](result, ranges, surprise, n, H, **scan)
        routed[(triton.cdiv(n, LANES), H)](result, ranges, surprise, numbers, score, n, H, LANES=LANES, **FLOAT64)
    return score, inverse
