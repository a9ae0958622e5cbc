# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels of S1, float32: attention, its columns and its edges, streamed over tiles of keys.

A weight is 2 ** ((s - top) unit - log): s is a raw logit, `top` its row's largest and `log` the logarithm of
the row's sum. The difference comes first, so that equal logits have equal weights, contracted or not, and
large ones lose nothing. `first` is the segment index of a stripe's first token and `rows` its number of
tokens, of n; `before` keys precede the segment's own, so token i of the segment is key before + i. A tile of
rows may cover several chunks: each row knows where its own chunk starts, so no size divides another.
"""

import triton
import triton.language as tl

from accelerated.triton_gpu.selection import best_so_far, load_tile, no_best, packed, weight_of, write_best

__all__ = [
    "active_tiles", "cross_neighbours", "intra_neighbours", "own_chunk", "row_normalise", "row_softmax",
    "salience",
]

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # times any unit it is still finite
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
TWO_LOG2_E: tl.constexpr = tl.constexpr(2.8853900817779268)


@triton.jit
def raw_logits(q, k, factor, CAPPED: tl.constexpr):
    """Logits of two tiles (rows, D) and (keys, D), without `unit`: products, or what the soft cap multiplies.

    The hyperbolic tangent of |x| is (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow; its
    absolute error is a few units of roundoff, as the specification's bound asks.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        s = s * factor
        e = tl.exp2(tl.abs(s) * -TWO_LOG2_E)
        t = (1.0 - e) / (1.0 + e)
        s = tl.where(s < 0, -t, t)
    return s


@triton.jit
def weights(q, k, TOP, LOG, row, live, visible, factor, unit, CAPPED: tl.constexpr):
    """Attention weights of two tiles, 0 where a key is not visible; TOP and LOG are those of the head."""
    top = tl.load(TOP + row, mask=live, other=0.0)
    log = tl.load(LOG + row, mask=live, other=0.0)
    s = (raw_logits(q, k, factor, CAPPED) - top[:, None]) * unit - log[:, None]
    return tl.exp2(tl.where(visible, s, float("-inf")))


@triton.jit(do_not_specialize=["first", "rows", "n", "before", "C"])
def row_softmax(
    Q, K, LSE, lse_head, lse_row, TOP, LOG, PEAK, first, rows, n, before, C, tiles, factor, unit, q_head, q_row,
    q_dim, k_head, k_row, k_dim, KNOWN: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, d: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
):
    """Each row's TOP and LOG (H, n), and its peak on each tile of earlier keys, PEAK (H, tiles, rows).

    Implements: CC-ATTENTION

    PACK heads of one KV head share a program, and so each tile of keys that it loads. Where the natural logarithm
    of a row's sum is KNOWN, as LSE (H, n), only maxima are left to find.
    """
    lane = tl.arange(0, PACK * ROWS)
    top_row = tl.program_id(0) * ROWS
    i = top_row + lane % ROWS
    h = tl.program_id(1) * PACK + lane // ROWS
    live = i < rows
    diagonal = before + first + i
    own = before + (first + i) // C * C
    q = load_tile(Q + (h.to(tl.int64) * q_head)[:, None], first + i, live, q_row, q_dim, d, D, True)
    keys_of_head = K + tl.cast(tl.program_id(1) * PACK // GROUP, tl.int64) * k_head
    last = tl.minimum(top_row + ROWS, rows) - 1
    # Tiles below `clear` are earlier keys of every row, and need no mask.
    clear = (before + (first + top_row) // C * C) // KEYS * KEYS
    cross_stop = before + (first + last) // C * C
    peak = tl.full([PACK * ROWS], LOWEST, tl.float32)
    total = tl.zeros([PACK * ROWS], tl.float32)
    peaks = PEAK + h.to(tl.int64) * tiles * rows + i
    for start in range(0, clear, KEYS):
        key = start + tl.arange(0, KEYS)
        k = load_tile(keys_of_head, key, live, k_row, k_dim, d, D, False)
        s = raw_logits(q, k, factor, CAPPED)
        top = tl.max(s, 1)
        tl.store(peaks + (start // KEYS) * rows, top, mask=live)
        new = tl.maximum(peak, top)
        if not KNOWN:
            total = total * tl.exp2((peak - new) * unit) + tl.sum(tl.exp2((s - new[:, None]) * unit), 1)
        peak = new
    for start in range(clear, before + first + last + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        k = load_tile(keys_of_head, key, key <= before + first + last, k_row, k_dim, d, D, True)
        s = raw_logits(q, k, factor, CAPPED)
        s = tl.where(key[None, :] <= diagonal[:, None], s, float("-inf"))
        if start < cross_stop:
            earlier = tl.where(key[None, :] < own[:, None], s, float("-inf"))
            tl.store(peaks + (start // KEYS) * rows, tl.max(earlier, 1), mask=live)
        new = tl.maximum(peak, tl.max(s, 1))
        if not KNOWN:
            total = total * tl.exp2((peak - new) * unit) + tl.sum(tl.exp2((s - new[:, None]) * unit), 1)
        peak = new
    if KNOWN:
        at = h.to(tl.int64) * lse_head + (first + i).to(tl.int64) * lse_row
        log = tl.load(LSE + at, mask=live, other=0.0) * LOG2_E - peak * unit
    else:
        log = tl.log2(total)
    tl.store(TOP + h * n + first + i, peak, mask=live)
    tl.store(LOG + h * n + first + i, log, mask=live)


@triton.jit(do_not_specialize=["first", "rows", "n", "before", "C"])
def active_tiles(
    TOP, LOG, PEAK, ACTIVE, first, rows, n, before, C, tiles, all_tiles, unit, bound, H: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """ACTIVE (row tiles, all_tiles): whether a row of the tile can have a head-mean weight above tau in it.

    No weight of a tile of keys exceeds that of its peak, so a tile in which the head mean of the peaks'
    weights is at or below the bound for every row holds no edge. These means sum to at most 1 over a row's
    tiles: fewer than 1 / tau of them can be active.
    """
    tile = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Of a tile without earlier keys a row has no peak.
    open_rows = (i < rows) & (tile * KEYS < before + (first + i) // C * C)
    most = tl.zeros([ROWS], tl.float32)
    if tl.max(open_rows.to(tl.int32), 0) > 0:
        for h in range(H):
            at = (h * tiles + tile).to(tl.int64) * rows + i
            peak = tl.load(PEAK + at, mask=open_rows, other=float("-inf"))
            top = tl.load(TOP + h * n + first + i, mask=open_rows, other=0.0)
            log = tl.load(LOG + h * n + first + i, mask=open_rows, other=0.0)
            most += tl.exp2(tl.minimum((peak - top) * unit - log, 0.0))
    row_tile = (first + tl.program_id(0) * ROWS) // ROWS
    tl.store(ACTIVE + row_tile * all_tiles + tile, tl.max((open_rows & (most > bound)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n", "before", "C"])
def cross_neighbours(
    Q, K, TOP, LOG, ACTIVE, INDEX, WEIGHT, n, before, C, all_tiles, share, tau, factor, unit, q_head, q_row,
    q_dim, k_head, k_row, k_dim, H: tl.constexpr, GROUP: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr, TAKE: tl.constexpr, CAPPED: tl.constexpr,
):
    """The strongest sources of each row in earlier chunks, by head-mean attention: INDEX, WEIGHT (n, TAKE).

    Implements: CC-ATTENTION, CC-CROSS

    Only active tiles are computed again; which they are is read here, so the host never waits for it.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    own = before + i // C * C
    last = tl.minimum(tl.program_id(0) * ROWS + ROWS, n) - 1
    cross_stop = before + last // C * C
    best = no_best(ROWS, PLACES)
    for tile in range(tl.cdiv(cross_stop, KEYS)):
        if tl.load(ACTIVE + tl.program_id(0) * all_tiles + tile) != 0:
            key = tile * KEYS + tl.arange(0, KEYS)
            earlier = (key[None, :] < own[:, None]) & live[:, None]
            mass = tl.zeros([ROWS, KEYS], tl.float32)
            for h_kv in range(H // GROUP):
                keys_of_head = K + tl.cast(h_kv, tl.int64) * k_head
                k = load_tile(keys_of_head, key, key < cross_stop, k_row, k_dim, d, D, True)
                for h in range(h_kv * GROUP, (h_kv + 1) * GROUP):
                    q = load_tile(Q + tl.cast(h, tl.int64) * q_head, i, live, q_row, q_dim, d, D, True)
                    mass += weights(q, k, TOP + h * n, LOG + h * n, i, live, earlier, factor, unit, CAPPED)
            weight = mass * share
            best = best_so_far(weight, key[None, :], earlier & (weight > tau), best, TAKE)
    write_best(best, INDEX, WEIGHT, i, live, TAKE)


@triton.jit(do_not_specialize=["first", "rows", "n", "before", "C"])
def own_chunk(
    Q, K, TOP, LOG, A, COLUMN, first, rows, n, before, C, width, share, factor, unit, q_head, q_row, q_dim,
    k_head, k_row, k_dim, H: tl.constexpr, GROUP: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
):
    """Attention on the chunk's own keys: its head mean A (rows, C), and each row tile's part of the columns.

    Implements: CC-ATTENTION

    COLUMN (row tiles, H, width) counts its last axis from the chunk start of the tile's first row. Each
    program stores sums of its own: no atomic, so the order of addition never changes. A holds j <= i only.
    """
    top_row = tl.program_id(0) * ROWS
    row = first + top_row + tl.arange(0, ROWS)
    live = row < first + rows
    own = before + row // C * C
    origin = before + (first + top_row) // C * C
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    key = origin + column
    stop = before + first + tl.minimum(top_row + ROWS, rows)
    if origin + tl.program_id(1) * KEYS < stop:
        mine = (key[None, :] >= own[:, None]) & (key[None, :] <= (before + row)[:, None]) & live[:, None]
        mass = tl.zeros([ROWS, KEYS], tl.float32)
        for h_kv in range(H // GROUP):
            k = load_tile(K + tl.cast(h_kv, tl.int64) * k_head, key, key < stop, k_row, k_dim, d, D, True)
            for h in range(h_kv * GROUP, (h_kv + 1) * GROUP):
                q = load_tile(Q + tl.cast(h, tl.int64) * q_head, row, live, q_row, q_dim, d, D, True)
                p = weights(q, k, TOP + h * n, LOG + h * n, row, live, mine, factor, unit, CAPPED)
                mass += p
                tl.store(COLUMN + (tl.program_id(0) * H + h).to(tl.int64) * width + column, tl.sum(p, 0))
        place = (row - first)[:, None].to(tl.int64) * C + (key[None, :] - own[:, None])
        tl.store(A + place, mass * share, mask=mine)


@triton.jit(do_not_specialize=["first", "rows", "C"])
def salience(
    COLUMN, SALIENCE, first, rows, C, width, low, high, H: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TAKE: tl.constexpr,
):
    """S: partial column sums added by ascending row tile, the best TAKE heads of each token added, clipped.

    Implements: CC-SALIENCE
    """
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = i < rows
    h = tl.arange(0, HEADS)
    chunk_stop = tl.minimum(((first + i) // C + 1) * C - first, rows)
    h_column = tl.zeros([HEADS, TOKENS], tl.float32)
    last = tl.minimum(tl.program_id(0) * TOKENS + TOKENS, rows) - 1
    last_stop = tl.minimum(((first + last) // C + 1) * C - first, rows)
    for tile in range(tl.program_id(0) * TOKENS // ROWS, tl.cdiv(last_stop, ROWS)):
        origin = (first + tile * ROWS) // C * C - first
        reached = live & (tile * ROWS + ROWS > i) & (tile * ROWS < chunk_stop)
        at = (tile * H + h)[:, None].to(tl.int64) * width + (i - origin)[None, :]
        h_column += tl.load(COLUMN + at, mask=reached[None, :] & (h < H)[:, None], other=0.0)
    keys = packed(h_column, h[:, None])
    S = tl.zeros([TOKENS], tl.float32)
    for _ in tl.static_range(TAKE):
        top = tl.max(keys, 0)
        keys = tl.where(keys == top[None, :], -1, keys)
        S += weight_of(top)
    tl.store(SALIENCE + first + i, tl.minimum(tl.maximum(S, low), high), mask=live)


@triton.jit(do_not_specialize=["first", "rows", "C"])
def row_normalise(A, first, rows, C, epsilon, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Rows of A at unit length, in place; epsilon is added outside the norm.

    Implements: CC-ROW-NORM
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    reach = tl.where(i < rows, (first + i) % C, -1)
    square = tl.zeros([ROWS], tl.float32)
    for start in range(0, tl.max(reach, 0) + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        mine = j[None, :] <= reach[:, None]
        a = tl.load(A + i[:, None].to(tl.int64) * C + j[None, :], mask=mine, other=0.0)
        square += tl.sum(a * a, 1)
    norm = tl.sqrt_rn(square) + epsilon
    for start in range(0, tl.max(reach, 0) + 1, KEYS):
        j = start + tl.arange(0, KEYS)
        mine = j[None, :] <= reach[:, None]
        at = A + i[:, None].to(tl.int64) * C + j[None, :]
        tl.store(at, tl.load(at, mask=mine, other=0.0) / norm[:, None], mask=mine)


@triton.jit(do_not_specialize=["first", "rows", "before", "C"])
def intra_neighbours(
    A, INDEX, WEIGHT, first, rows, before, C, tau, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PLACES: tl.constexpr, TAKE: tl.constexpr,
):
    """The most similar tokens of each row's chunk, by cosine: INDEX, WEIGHT (n, TAKE).

    Implements: CC-INTRA

    A is lower triangular, so the inner product of two rows ends with the shorter one: a third of the dense
    work. It runs in full float32, since tf32 would leave the certified bound.
    """
    top_row = tl.program_id(0) * ROWS
    i = top_row + tl.arange(0, ROWS)
    own = (first + i) // C * C - first
    reach = tl.where(i < rows, i - own, -1)
    last = tl.minimum(top_row + ROWS, rows) - 1
    last_stop = tl.minimum(((first + last) // C + 1) * C - first, rows)
    best = no_best(ROWS, PLACES)
    for start in range((first + top_row) // C * C - first, last_stop, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other = (first + j) // C * C - first
        other_reach = tl.where(j < rows, j - other, -1)
        cosine = tl.zeros([ROWS, COLUMNS], tl.float32)
        for c in range(0, tl.minimum(tl.max(reach, 0), tl.max(other_reach, 0)) + 1, DEPTH):
            at = c + tl.arange(0, DEPTH)[None, :]
            x = tl.load(A + i[:, None].to(tl.int64) * C + at, mask=at <= reach[:, None], other=0.0)
            y = tl.load(A + j[:, None].to(tl.int64) * C + at, mask=at <= other_reach[:, None], other=0.0)
            cosine = tl.dot(x, tl.trans(y), cosine, input_precision="ieee")
        near = (own[:, None] == other[None, :]) & (i[:, None] != j[None, :])
        near = near & (reach >= 0)[:, None] & (other_reach >= 0)[None, :]
        best = best_so_far(cosine, (before + first + j)[None, :], near & (cosine > tau), best, TAKE)
    write_best(best, INDEX, WEIGHT, first + i, i < rows, TAKE)
