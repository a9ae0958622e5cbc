# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Kernels of stage S1 in float32: attention weights, column sums and neighbours, streamed over tiles of keys.

An attention weight is a power of two. The exponent is (s - top) unit - log, with the raw logit s. `top` is the largest
raw logit of the row, and `log` is the base-2 logarithm of the row's sum. The kernels subtract `top` before the
multiplication by `unit`. Equal logits therefore have equal weights, with or without fused multiply-add. Large logits
lose no precision.

A stripe is a range of tokens of the segment. `first` is the segment index of the stripe's first token. `rows` is the
number of tokens in the stripe, and n is the number of tokens in the segment. `before` is the number of keys before the
segment, so token i of the segment has the key number before + i. A tile of rows can cover several chunks, because the
start of the chunk is computed for each row. The tile size need not divide the chunk size.
"""

import triton
import triton.language as tl

from accelerated.triton_gpu.selection import best_so_far, load_tile, no_best, packed, weight_of, write_best

__all__ = [
    "active_tiles",
    "chunk_attention",
    "cross_neighbours",
    "intra_neighbours",
    "row_normalise",
    "row_softmax",
    "salience",
]

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # finite even after multiplication by any unit
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
TWO_LOG2_E: tl.constexpr = tl.constexpr(2.8853900817779268)


@triton.jit
def raw_logits(q, k, factor, CAPPED: tl.constexpr):
    """Return raw logits of the tiles (rows, D) and (keys, D): inner products, or if CAPPED tanh of inner products.

    The caller multiplies the raw logits by `unit`. tanh |x| is computed as (1 - e) / (1 + e) with e = exp(-2 |x|),
    which cannot overflow. The absolute error of tanh is a few units of roundoff, within the bound of the specification.
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
    """Return the attention weights of a tile of queries on a tile of keys. Keys that are not `visible` have weight 0.

    The pointers TOP and LOG refer to the rows of one head.
    """
    top = tl.load(TOP + row, mask=live, other=0.0)
    log = tl.load(LOG + row, mask=live, other=0.0)
    s = (raw_logits(q, k, factor, CAPPED) - top[:, None]) * unit - log[:, None]
    return tl.exp2(tl.where(visible, s, float("-inf")))


@triton.jit(do_not_specialize=["first", "rows", "n", "before", "C"])
def row_softmax(
    Q, K, LSE, TOP, LOG, PEAK, lse_head, lse_row, first, rows, n, before, C, tiles, factor, unit, q_head, q_row,
    q_dim, k_head, k_row, k_dim, KNOWN: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, d: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
):
    """Write TOP (H, n), LOG (H, n) and PEAK (H, tiles, rows).

    TOP is the largest raw logit of a row, and LOG the base-2 logarithm of the row's sum. PEAK is the largest raw logit
    of a row in a tile of earlier keys. Earlier keys are the keys before the chunk of the row.

    Implements: CC-ATTENTION

    One program computes PACK query heads of one KV head, and loads each tile of keys once for all PACK heads. If KNOWN
    is true, LSE (H, n) contains the natural logarithm of each row's sum, and the kernel computes only the maxima.
    """
    lane = tl.arange(0, PACK * ROWS)
    top_row = tl.program_id(0) * ROWS
    i = top_row + lane % ROWS
    h = tl.program_id(1) * PACK + lane // ROWS
    live = i < rows
    diagonal = before + first + i
    chunk_start = before + (first + i) // C * C
    q = load_tile(Q + (h.to(tl.int64) * q_head)[:, None], first + i, live, q_row, q_dim, d, D, True)
    keys_of_head = K + tl.cast(tl.program_id(1) * PACK // GROUP, tl.int64) * k_head
    last = tl.minimum(top_row + ROWS, rows) - 1
    # Tiles below `clear` contain only earlier keys of every row, and need no mask.
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
            earlier = tl.where(key[None, :] < chunk_start[:, None], s, float("-inf"))
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
    """Write ACTIVE (row tiles, all_tiles): 1 if a row of the row tile can have an edge to a key of the key tile.

    A row has an edge to a key if the attention weight, averaged over the heads, exceeds tau. No weight in a key tile
    exceeds the weight of the logit PEAK of this tile. A key tile therefore has no edge if the PEAK weights, averaged
    over the heads, are at most `bound` in every row. The averages of one row sum to at most 1 over all tiles, so fewer
    than 1 / tau tiles can be active for a row.
    """
    tile = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # A row has no peak in a tile without earlier keys.
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
    """Write INDEX and WEIGHT (n, TAKE): each row's earlier keys with the largest attention, averaged over heads.

    Implements: CC-ATTENTION, CC-CROSS

    The kernel recomputes only the active tiles. The kernel reads ACTIVE on the device, so the host does not wait.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < n
    chunk_start = before + i // C * C
    last = tl.minimum(tl.program_id(0) * ROWS + ROWS, n) - 1
    cross_stop = before + last // C * C
    best = no_best(ROWS, PLACES)
    for tile in range(tl.cdiv(cross_stop, KEYS)):
        if tl.load(ACTIVE + tl.program_id(0) * all_tiles + tile) != 0:
            key = tile * KEYS + tl.arange(0, KEYS)
            earlier = (key[None, :] < chunk_start[:, None]) & live[:, None]
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
def chunk_attention(
    Q, K, TOP, LOG, A, COLUMN, first, rows, n, before, C, width, share, factor, unit, q_head, q_row, q_dim,
    k_head, k_row, k_dim, H: tl.constexpr, GROUP: tl.constexpr, d: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
):
    """Write attention inside chunks: the mean over heads to A (rows, C), and column sums of each row tile to COLUMN.

    Implements: CC-ATTENTION

    The last axis of COLUMN (row tiles, H, width) begins at the chunk start of the tile's first row. Each program
    stores separate sums and uses no atomic operation, so the order of addition is fixed. Only entries j <= i of A are
    written.
    """
    top_row = tl.program_id(0) * ROWS
    row = first + top_row + tl.arange(0, ROWS)
    live = row < first + rows
    chunk_start = before + row // C * C
    origin = before + (first + top_row) // C * C
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    key = origin + column
    stop = before + first + tl.minimum(top_row + ROWS, rows)
    if origin + tl.program_id(1) * KEYS < stop:
        mine = (key[None, :] >= chunk_start[:, None]) & (key[None, :] <= (before + row)[:, None]) & live[:, None]
        mass = tl.zeros([ROWS, KEYS], tl.float32)
        for h_kv in range(H // GROUP):
            k = load_tile(K + tl.cast(h_kv, tl.int64) * k_head, key, key < stop, k_row, k_dim, d, D, True)
            for h in range(h_kv * GROUP, (h_kv + 1) * GROUP):
                q = load_tile(Q + tl.cast(h, tl.int64) * q_head, row, live, q_row, q_dim, d, D, True)
                p = weights(q, k, TOP + h * n, LOG + h * n, row, live, mine, factor, unit, CAPPED)
                mass += p
                tl.store(COLUMN + (tl.program_id(0) * H + h).to(tl.int64) * width + column, tl.sum(p, 0))
        place = (row - first)[:, None].to(tl.int64) * C + (key[None, :] - chunk_start[:, None])
        tl.store(A + place, mass * share, mask=mine)


@triton.jit(do_not_specialize=["first", "rows", "C"])
def salience(
    COLUMN, SALIENCE, first, rows, C, width, low, high, H: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, TAKE: tl.constexpr,
):
    """Write the salience S of each token: the sum of the token's TAKE largest column sums among the heads, clipped.

    The partial column sums of a head are added in ascending order of the row tiles.

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
    """Divide each row of A by (L2 norm of the row + epsilon), in place.

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
    """Write INDEX and WEIGHT (n, TAKE): each row's tokens of the same chunk with the largest cosines.

    Implements: CC-INTRA

    A is lower triangular, so an inner product of two rows ends at the end of the shorter row. The kernel does a third
    of the work of a dense product. The products use full float32, because tf32 would exceed the certified error bound.
    """
    top_row = tl.program_id(0) * ROWS
    i = top_row + tl.arange(0, ROWS)
    chunk_start = (first + i) // C * C - first
    reach = tl.where(i < rows, i - chunk_start, -1)
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
        near = (chunk_start[:, None] == other[None, :]) & (i[:, None] != j[None, :])
        near = near & (reach >= 0)[:, None] & (other_reach >= 0)[None, :]
        best = best_so_far(cosine, (before + first + j)[None, :], near & (cosine > tau), best, TAKE)
    write_best(best, INDEX, WEIGHT, first + i, i < rows, TAKE)
