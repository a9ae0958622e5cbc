"""Claims about integers outside the eviction loop: budgets, protection, interfaces, the size limit of merges, splits.

Further claims are about machine words: integers inside int64, and the packed keys of the top-k of S1.
"""

from collections.abc import Iterator, Sequence

import z3
from z3 import And, BitVec, BitVecVal, Bool, Exists, Extract, If, Implies, Int, Ints, Or, Real, SignExt, ToReal

from lab.proofs.source import Claim, Code, Term, largest, least

TOKENS = "spec/budget.py:Budget.tokens"
EFFECTIVE = "reference/crystalcache/protection.py:effective_budget"
PROTECTED = "reference/crystalcache/protection.py:protected_trunks"
INTERFACE = "reference/crystalcache/trunks.py:interface"
MERGES = "reference/crystalcache/trunks.py:merges"
SPLIT = "reference/crystalcache/trunks.py:split_sizes"
BYTES = "reference/memory.py:kv_bytes"
NUMBA_INTERFACE = "accelerated/numba_cpu/trunks.py:interface_sum"
NUMBA_BUILD = "accelerated/numba_cpu/trunks.py:build"
NUMBA_SPLIT = "accelerated/numba_cpu/trunks.py:split"
NUMBA_CLOSED = "accelerated/numba_cpu/dissolution.py:kept_tokens"
PACKED = "accelerated/triton_gpu/selection.py:packed"
UNPACKED = "accelerated/triton_gpu/selection.py:write_best"

LONG = 2**63
INDEX = 2**31

n, B, start, stop, end, T_max = Ints("n B start stop end T_max")


def claims(code: Code) -> Iterator[Claim]:
    """Yield all claims of this module."""
    yield from memory(code)
    yield from budgets(code)
    yield from protection(code)
    yield from windows(code)
    yield from merging(code)
    yield from splitting(code)
    yield from splitting_elsewhere(code)
    yield from closed_forms(code)
    yield from splits(code)
    yield from narrow_words(code)
    yield from packed_keys(code)


def memory(code: Code) -> Iterator[Claim]:
    """Yield claims about Eq. 1 and 4."""
    L, H_kv, d, batch, b, more = Ints("L H_kv d batch b more")

    def size(tokens: Term) -> Term:
        return code.returned(BYTES, L=L, H_kv=H_kv, d=d, n=tokens, batch=batch, b=b)

    counts = And(*(x >= 1 for x in (L, H_kv, d, n, batch, b, more)))
    yield Claim("CC-MEMORY", "bytes add over tokens", Implies(counts, size(n + more) == size(n) + size(more)))
    yield Claim("CC-MEMORY", "bytes count keys alone", Implies(counts, size(n) == L * H_kv * d * n * batch * b),
                true=False)


def budgets(code: Code) -> Iterator[Claim]:
    """Yield claims about Eq. 30 and the two forms of a budget."""
    forms, item = "CC-BUDGET-FORMS", "CC-BUDGET"
    beta, larger = Real("beta"), Real("beta_larger")

    def share(fraction: Term) -> Term:
        given = {"self.fraction is not None": True, "self.fraction": fraction}
        return code.returned(TOKENS, given, seen=n)

    asked = And(beta > 0, beta <= 1, n >= 1)
    yield Claim(forms, "a fraction asks for 1 to n tokens", Implies(asked, And(share(beta) >= 1, share(beta) <= n)))
    exact = beta * ToReal(n)
    yield Claim(forms, "and for the fewest that are no less than beta n",
                Implies(asked, And(ToReal(share(beta)) >= exact, ToReal(share(beta) - 1) < exact)))
    yield Claim(forms, "a larger fraction asks for no fewer tokens",
                Implies(And(asked, beta <= larger), share(beta) <= share(larger)))
    counted = code.returned(TOKENS, {
        "self.fraction is not None": False, "self.count is not None": True, "self.count": B,
    }, seen=n)
    yield Claim(forms, "a count asks for itself", counted == B)
    yield Claim(forms, "a fraction asks for at most beta n", Implies(asked, ToReal(share(beta)) <= exact),
                true=False)
    yield Claim(forms, "a count is at most n", Implies(And(B >= 1, n >= 1), counted <= n), true=False)
    sink, recent, tokens, fewer = Ints("N_sink W_recent tokens tokens_fewer")

    def effective(tokens: Term) -> Term:
        return code.returned(EFFECTIVE, {"budget.tokens(n)": tokens}, N_sink=sink, W_recent=recent)

    counts = And(sink >= 0, recent >= 0, tokens >= 1)
    yield Claim(item, "B is the budget or the floor, whichever is larger",
                Implies(counts, effective(tokens) == largest(tokens, sink + recent)))
    yield Claim(item, "a smaller budget gives no larger B",
                Implies(And(counts, fewer <= tokens), effective(fewer) <= effective(tokens)))
    yield Claim(item, "without sink and window B is the budget alone",
                Implies(And(counts, sink + recent == 0), effective(tokens) == tokens))
    yield Claim(item, "B is at most n", Implies(And(counts, tokens <= n), effective(tokens) <= n), true=False)
    yield Claim(item, "B is the larger of sink and window, if that exceeds the budget",
                Implies(counts, effective(tokens) == largest(tokens, sink, recent)), true=False)


def protection(code: Code) -> Iterator[Claim]:
    """Yield claims that whole trunks are protected if they overlap the sink or the window."""
    item = "CC-PROTECTED"
    sink, recent, i = Ints("N_sink W_recent i")
    given = {"(offsets[:-1], offsets[1:])": (start, stop)}
    guarded = code.returned(PROTECTED, given, n=n, N_sink=sink, W_recent=recent)
    trunk = And(start >= 0, start < stop, stop <= n, sink >= 0, recent >= 0)
    member = And(start <= i, i < stop, Or(i < sink, i >= n - recent))
    yield Claim(item, "a trunk is protected iff a member lies in the sink or the window",
                Implies(trunk, guarded == Exists([i], member)))
    small = And(trunk, stop - start <= T_max, T_max >= 1)
    yield Claim(item, "protection reaches at most T_max - 1 tokens beyond either side",
                Implies(And(small, guarded), Or(stop <= sink + T_max - 1, start >= n - recent - (T_max - 1))))
    yield Claim(item, "with N_sink = W_recent = 0 nothing is protected",
                Implies(And(trunk, sink == 0, recent == 0), z3.Not(guarded)))
    yield Claim(item, "protection reaches no further than the sink and the window",
                Implies(And(small, guarded), Or(stop <= sink, start >= n - recent)), true=False)


def windows(code: Code) -> Iterator[Claim]:
    """Yield claims about Eq. 16, and about numba's loops over the same tokens."""
    item = "CC-INTERFACE"
    left, right = code.returned(INTERFACE, current=(start, stop), sentence=(stop, end))
    sides = And(start >= 0, start < stop, stop < end)
    yield Claim(item, "each side of the interface lies inside its trunk or sentence",
                Implies(sides, And(start <= left[0], left[1] == stop, right[0] == stop, right[1] <= end)))
    yield Claim(item, "each side holds min(5, size) tokens",
                Implies(sides, And(left[1] - left[0] == least(5, stop - start),
                                   right[1] - right[0] == least(5, end - stop))))
    rows = code.part(NUMBA_INTERFACE, "for a", start=start, stop=stop)
    columns = code.part(NUMBA_INTERFACE, "for b", stop=stop, next_stop=end)
    yield Claim(item, "numba walks over the same window",
                And(*(x == y for x, y in zip(rows + columns, left + right, strict=True))))
    yield Claim(item, "a side holds 5 tokens", Implies(sides, left[1] - left[0] == 5), true=False)


def merging(code: Code) -> Iterator[Claim]:
    """Yield claims about the size limit of Eq. 19. The strength of the interface is any truth value here."""
    item = "CC-MERGE"
    size, following, i = Ints("size next_size i")
    strength = Bool("strong")
    given = {
        "parameters.T_max": T_max,
        "left_to_right_sum(weights) - parameters.tau_merge * len(weights) > 0": strength,
    }
    joins = code.returned(MERGES, given, size=size, next_size=following)
    yield Claim(item, "a merged trunk holds at most T_max tokens", Implies(joins, size + following <= T_max))
    yield Claim(item, "a strong interface merges up to T_max, inclusive",
                Implies(And(strength, size + following == T_max), joins))
    call = "strong(start, stop, i + 1, intra, intra_weight, cross, cross_weight, tau_merge)"
    numba = code.part(NUMBA_BUILD, "joined =", given={call: strength}, start=start, stop=stop, i=i, T_max=T_max)
    there = z3.substitute(joins, (size, stop - start), (following, i + 1 - stop))
    yield Claim(item, "numba merges where the reference does", Implies(And(start < stop, i >= stop), numba == there))
    yield Claim(item, "a strong interface always merges",
                Implies(And(strength, size >= 1, following >= 1), joins), true=False)


trunk_size = Int("size")
A_TRUNK = And(trunk_size >= 1, T_max >= 1)
piece_count = Int("pieces")


def splitting(code: Code) -> Iterator[Claim]:
    """Yield claims that step 3 makes as few pieces as fit, of sizes that differ by at most 1."""
    item = "CC-SPLIT"
    larger, smaller = code.returned(SPLIT, size=trunk_size, T_max=T_max)
    pieces = larger.count + smaller.count
    yield Claim(item, "pieces are ceil(size / T_max)",
                Implies(A_TRUNK, And((pieces - 1) * T_max < trunk_size, trunk_size <= pieces * T_max)))
    # From here on the number of pieces is a variable that fits this lemma, so that the solver divides only once.
    large, small = code.returned(SPLIT, {"-(-size // T_max)": piece_count}, size=trunk_size)
    few = And(A_TRUNK, piece_count >= 1, (piece_count - 1) * T_max < trunk_size, trunk_size <= piece_count * T_max)
    yield Claim(item, "larger pieces come first and hold one token more",
                Implies(few, And(large.value == small.value + 1, large.count >= 0, small.count >= 1)))
    total = large.value * large.count + small.value * small.count
    yield Claim(item, "sizes add up, for any number of pieces",
                Implies(And(trunk_size >= 1, piece_count >= 1), total == trunk_size))
    top = If(large.count > 0, large.value, small.value)
    yield Claim(item, "each piece holds 1 to T_max tokens", Implies(few, And(small.value >= 1, top <= T_max)))
    yield Claim(item, "a piece of a split trunk holds at least (T_max + 1) // 2 tokens",
                Implies(And(few, trunk_size > T_max), small.value >= (T_max + 1) / 2))
    yield Claim(item, "a trunk of at most T_max tokens is one piece",
                Implies(And(few, trunk_size <= T_max), large.count + small.count == 1))
    yield Claim(item, "a piece of a split trunk holds more than T_max / 2 tokens",
                Implies(And(few, trunk_size > T_max), 2 * small.value > T_max), true=False)
    yield Claim(item, "all pieces are equal", Implies(few, large.count == 0), true=False)


def splitting_elsewhere(code: Code) -> Iterator[Claim]:
    """Yield claims about the pieces that numba makes."""
    item = "CC-SPLIT"
    piece = Int("piece")
    larger, smaller = code.returned(SPLIT, {"-(-size // T_max)": piece_count}, size=trunk_size)
    whole = code.returned(SPLIT, size=trunk_size, T_max=T_max)
    of_piece = If(piece < larger.count, larger.value, smaller.value)
    inside = And(trunk_size >= 1, piece_count >= 1, piece >= 0, piece < piece_count)
    number = code.part(NUMBA_SPLIT, "pieces =", size=trunk_size, T_max=T_max)
    yield Claim(item, "numba makes as many pieces", Implies(A_TRUNK, number == whole[0].count + whole[1].count))
    numba = code.part(NUMBA_SPLIT, "small, larger =", "start +=", size=trunk_size, pieces=piece_count, piece=piece)
    yield Claim(item, "numba's piece has the same size", Implies(inside, numba == of_piece))


def inside_int64(terms: Sequence[Term]) -> Term:
    """Return the claim that no value that arithmetic produced leaves int64."""
    return And(*(And(x >= -LONG, x < LONG) for x in terms))


def closed_forms(code: Code) -> Iterator[Claim]:
    """Yield claims about S6 in int64, for any prompt that fits in memory."""
    size, before, c_0, N_min = Ints("size before c0 N_min")
    term = code.reading(NUMBA_CLOSED, size=size, before=before, c_0=c_0, N_min=N_min).terms
    tokens = And(size >= 1, before >= 0, c_0 >= 0, N_min >= 0, N_min < LONG, c_0 < LONG)
    yield Claim("CC-ALLOCATE", "numba's closed form stays inside int64 for sums below 2^63",
                Implies(And(tokens, before + size < LONG), inside_int64(term)))
    yield Claim("CC-ALLOCATE", "numba's closed form stays inside int64 for summands below 2^63",
                Implies(And(tokens, before < LONG, size < LONG), inside_int64(term)), true=False)


def splits(code: Code) -> Iterator[Claim]:
    """Yield claims about step 3 in int64."""
    size, T_max = Ints("size T_max")
    term: list[Term] = []
    code.part(NUMBA_SPLIT, "pieces =", "small, larger =", terms=term, size=size, T_max=T_max)
    words = And(size >= 1, T_max >= 1, size < LONG, T_max < LONG)
    yield Claim("CC-SPLIT", "numba's split stays inside int64 for size + T_max < 2^63",
                Implies(And(words, size + T_max < LONG), inside_int64(term)))
    yield Claim("CC-SPLIT", "numba's split stays inside int64 for every T_max of int64",
                Implies(words, inside_int64(term)), true=False)


def narrow_words(code: Code) -> Iterator[Claim]:
    """Yield claims about 32-bit words. The current code uses int64."""
    wide = [BitVec(name, 64) for name in ("size", "before", "c0", "N_min")]
    narrow = [Extract(31, 0, word) for word in wide]
    top = BitVecVal(INDEX - 1, 64)
    sizes = And(wide[0] >= 1, *(And(word >= 0, word <= top) for word in (wide[0], wide[2], wide[3])))
    sums = And(sizes, wide[1] >= 0, wide[1] <= top)
    names = ("size", "before", "c_0", "N_min")
    in_32, in_64 = (
        code.returned(NUMBA_CLOSED, **dict(zip(names, words, strict=True))) for words in (narrow, wide)
    )
    same = SignExt(32, in_32) == in_64
    yield Claim("CC-ALLOCATE", "numba's closed form in int32 is exact for prefix sums below 2^31: a wrap cancels",
                Implies(sums, same))
    yield Claim("CC-ALLOCATE", "numba's closed form in int32 is exact for prefix sums below 2^32",
                Implies(And(sizes, wide[1] >= 0, wide[1] <= 2 * top), same), true=False)


def packed_keys(code: Code) -> Iterator[Claim]:
    """Yield claims about the top-k of S1 on the GPU.

    One int64 orders by weight, then by lower index. Weight and index can be read from it.
    """
    def packed(weight: Term, index: Term) -> Term:
        bits = {"weight.to(tl.int32, bitcast=True)": weight}
        return code.returned(PACKED, bits, index=index)

    a, b, i, j = (BitVec(name, 32) for name in ("weight_a", "weight_b", "index_i", "index_j"))
    indices = And(i >= 0, j >= 0)
    positive = And(a >= 0, b >= 0)  # bits of nonnegative floats have the same order as the floats
    first = Or(a > b, And(a == b, i < j))
    above = packed(a, i) > packed(b, j)
    filled = {"result": z3.BoolVal(True)}
    index = code.part(UNPACKED, "store INDEX + at + rank", given=filled, top=packed(a, i))
    yield Claim("CC-CROSS", "triton's packed keys order by weight, then by lower index",
                Implies(And(positive, indices), above == first))
    yield Claim("CC-CROSS", "triton's packed keys give the index back",
                Implies(And(positive, indices), index == SignExt(32, i)))
    floats = [z3.fpBVToFP(bits, z3.Float32()) for bits in (a, b)]
    yield Claim("CC-CROSS", "triton's packed keys order negative weights too",
                Implies(And(indices, z3.fpGT(*floats)), above), true=False)
    yield Claim("CC-CROSS", "triton's packed keys give any index back", index == SignExt(32, i), true=False)
