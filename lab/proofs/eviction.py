"""Claims about stage S6 in integers: Eq. 30 to 33, the loop and its closed forms, nesting and idempotence."""

from collections.abc import Iterator

import z3
from z3 import And, If, Implies, Ints, Or, Real, ToReal

from lab.proofs.source import Claim, Code, Term, largest

STEP = "reference/crystalcache/dissolution.py:allocate_step"
KEEP_COUNT = "reference/crystalcache/dissolution.py:keep_count"
CUT = "reference/crystalcache/protection.py:cut"
OVER = "spec/records.py:CrystalRetention.over_budget"
NUMBA_CLOSED = "accelerated/numba_cpu/dissolution.py:kept_tokens"
NUMBA_DISSOLVE = "accelerated/numba_cpu/dissolution.py:dissolve"

# State of the loop of Eq. 32: size g of the current trunk, the part c of the cut c0 that is left, and tokens so far.
c, g, c0, N_min = Ints("c g c0 N_min")
evicted, kept, rest, partial, before = Ints("evicted kept rest partial before")
slack = largest(0, N_min - 1)


def claims(code: Code) -> Iterator[Claim]:
    """Yield all claims about S6."""
    yield from loop(code)
    yield from closed_forms(code)
    yield from cuts(code)
    yield from keep_counts(code)
    yield from budgets_nest(code)


def invariant(c: Term, evicted: Term, kept: Term, rest: Term, partial: Term) -> Term:
    """Return the invariant that holds before each trunk. `rest` counts the tokens of the trunks not visited yet."""
    return And(
        rest >= 0, kept >= 0, evicted >= 0, c0 >= 0, N_min >= 0, c + evicted == c0, c >= -slack, c <= rest,
        Implies(c > 0, kept == 0), partial >= 0, partial <= 1, Implies(partial == 1, c == 0),
    )


def step(code: Code, size: Term = g, left: Term = c, least: Term = N_min) -> tuple[Term, Term]:
    """Return the number of kept tokens, and the cut that is left after one trunk."""
    stays, after = code.returned(STEP, size=size, c=left, N_min=least)
    return stays, after


NOW = invariant(c, evicted, kept, rest, partial)
A_TRUNK = And(NOW, g >= 1, g <= rest)
AT_EXIT = And(NOW, Or(rest == 0, c <= 0))


def loop(code: Code) -> Iterator[Claim]:
    """Yield claims about the loop of Eq. 32, by induction over the trunks."""
    item = "CC-ALLOCATE"
    stays, after = step(code)
    is_partial = And(stays > 0, stays < g)
    zero = z3.IntVal(0)
    base = And(c0 >= 0, N_min >= 0, rest >= c0)
    yield Claim(item, "the invariant holds before the loop", Implies(base, invariant(c0, zero, zero, rest, zero)))
    then = invariant(after, evicted + g - stays, kept + stays, rest - g, partial + If(is_partial, 1, 0))
    yield Claim(item, "one trunk preserves the invariant", Implies(A_TRUNK, then))
    yield Claim(item, "between 0 and all tokens of a trunk stay", Implies(A_TRUNK, And(stays >= 0, stays <= g)))
    whole = Or(stays == 0, stays == g)
    yield Claim(item, "a partial trunk keeps at least N_min",
                Implies(A_TRUNK, Or(whole, And(stays >= N_min, stays >= 1, after == 0))))
    yield Claim(item, "it overshoots exactly where 1 to N_min - 1 tokens would remain",
                Implies(And(A_TRUNK, c > 0), (after < 0) == And(g - c >= 1, g - c < N_min)))
    yield Claim(item, "at the end the cut is met and overshot by at most max(0, N_min - 1)",
                Implies(AT_EXIT, And(c <= 0, -c <= slack)))
    total = evicted + kept + rest
    yield Claim(item, "what stays at the end is the total, less c0, less the overshoot",
                Implies(And(NOW, rest == 0), kept == total - c0 - (-c)))
    yield Claim(item, "after the stop nothing changes, so the loop may break",
                Implies(c <= 0, And(stays == g, after == c)))
    yield Claim(item, "N_min = 0 and N_min = 1 are one rule",
                Implies(g >= 1, And(*(a == b for a, b in zip(step(code, least=0), step(code, least=1), strict=True)))))
    yield Claim(item, "N_min of at least the size leaves no partial trunk",
                Implies(And(g >= 1, N_min >= g), whole))
    yield Claim(item, "the overshoot is at most 1", Implies(And(A_TRUNK, c > 0), after >= -1), true=False)
    yield Claim(item, "there is no overshoot", Implies(And(A_TRUNK, c > 0), after >= 0), true=False)
    yield Claim(item, "a trunk keeps 0 or at least N_min = 3",
                Implies(And(A_TRUNK, c >= 0, N_min == 3), Or(stays == 0, stays >= 3)), true=False)
    yield Claim(item, "the overshoot is bounded by N_min - 1 for N_min = 0 too",
                Implies(AT_EXIT, -c <= N_min - 1), true=False)
    free = And(c0 >= 0, N_min >= 0, c + evicted == c0, c >= -slack, rest == 0)
    yield Claim(item, "the cut is met without c0 <= sum", Implies(free, c <= 0), true=False)
    yield Claim(item, "what stays at the end is the total less c0",
                Implies(And(NOW, rest == 0), kept == total - c0), true=False)
    shorter = Code({STEP: ("size <= c", "c < c")})
    yield Claim(item, "the branch |g| <= c is redundant: the last branch does the same", Implies(
        And(g >= 1, N_min >= 0), And(*(a == b for a, b in zip(step(code), step(shorter), strict=True)))
    ))


def closed_forms(code: Code) -> Iterator[Claim]:
    """Yield claims that the closed form of Eq. 32 and 33 with a prefix sum equals the loop, by induction."""
    def linked(c: Term, before: Term) -> Term:
        return Or(And(c > 0, c == c0 - before), And(c <= 0, before >= c0))

    item = "CC-ALLOCATE"
    stays, after = step(code)
    yield Claim(item, "closed form: the loop's cut and the prefix sum start together",
                Implies(c0 >= 0, linked(c0, z3.IntVal(0))))
    here = And(linked(c, before), g >= 1)
    counted = And(here, before >= 0, c0 >= 0, N_min >= 0)
    yield Claim(item, "closed form: they stay together", Implies(here, linked(after, before + g)))
    closed, inclusive = (
        code.returned(NUMBA_CLOSED, size=g, before=ahead, c_0=c0, N_min=N_min) for ahead in (before, before + g)
    )
    yield Claim(item, "closed form of numba: the same tokens as the loop, for every N_min",
                Implies(here, closed == stays))
    yield Claim(item, "closed form of numba on the inclusive prefix sum",
                Implies(counted, inclusive == stays), true=False)


def cuts(code: Code) -> Iterator[Claim]:
    """Yield claims about Eq. 31, and about its effect on the number of kept tokens."""
    item = "CC-CUT"
    T, P, B, over, total = Ints("T_alive B_prot B overshoot kept_total")
    counts = And(T >= 0, P >= 0, B >= 0)

    def cut(alive: Term) -> Term:
        given = {"int(sizes[protected].sum())": P, "int(sizes[~protected].sum())": alive}
        return code.returned(CUT, given, B=B)

    cut_0 = cut(T)
    yield Claim(item, "c0 lies in [0, T_alive], as CC-ALLOCATE asks", Implies(counts, And(cut_0 >= 0, cut_0 <= T)))
    yield Claim(item, "c0 is max(0, n - B), held to T_alive",
                Implies(counts, cut_0 == If(largest(0, T + P - B) < T, largest(0, T + P - B), T)))
    yield Claim(item, "protected trunks above B: everything else goes", Implies(And(counts, P >= B), cut_0 == T))
    numba = code.part(NUMBA_DISSOLVE, "B_avail =", "c_0 =", given={"offsets[m] - offsets[0]": T + P}, B=B, T_alive=T)
    yield Claim(item, "numba's cut is the same", Implies(counts, numba == cut_0))
    done = And(counts, N_min >= 0, over >= 0, over <= slack, total == T - cut_0 - over, total >= 0)
    yield Claim(item, "|R| is n, or B_prot, or lies in [B - max(0, N_min - 1), B]",
                Implies(And(done, Implies(cut_0 == 0, over == 0)), If(
                    T + P <= B, P + total == T + P,
                    If(P > B, P + total <= P, And(P + total >= B - slack, P + total <= B)),
                )))
    yield Claim("CC-DISSOLVE", "a second eviction to the same B cuts nothing",
                Implies(done, cut(total) == 0))
    again, after = step(code, left=z3.IntVal(0))
    yield Claim("CC-DISSOLVE", "a cut of nothing changes nothing", Implies(g >= 1, And(again == g, after == 0)))
    beyond = code.returned(OVER, {"len(self.kept)": P + total, "self.budget": B})
    yield Claim("CC-DISSOLVE", "the result is over budget by what the protected trunks exceed B",
                Implies(done, beyond == largest(0, P - B)))
    yield Claim(item, "what stays fits B", Implies(done, P + total <= B), true=False)
    yield Claim(item, "what stays is exactly B where n > B >= B_prot",
                Implies(And(done, T + P > B, B >= P), P + total == B), true=False)


def keep_counts(code: Code) -> Iterator[Claim]:
    """Yield claims about Eq. 33 over rational numbers, and about the effect of rounding errors in r |g|."""
    item = "CC-KEEP-COUNT"
    x, r = Real("r_times_size"), Real("r")
    count = code.returned(KEEP_COUNT, {"r * size": x}, size=g, N_min=N_min)
    of_ratio = code.returned(KEEP_COUNT, {"r * size": r * ToReal(g)}, size=g, N_min=N_min)
    is_partial = And(c >= 1, c < g, g - c >= N_min)
    from_loop = And(is_partial, r * ToReal(g) == ToReal(g - c))
    yield Claim(item, "with r = (|g| - c) / |g| it is |g| - c", Implies(from_loop, of_ratio == g - c))
    error = x - ToReal(g - c)
    half = z3.RealVal("1/2")
    yield Claim(item, "an error below 1/2 in r |g| does not matter",
                Implies(And(is_partial, error < half, error > -half), count == g - c))
    yield Claim(item, "it lies in [min(N_min, |g|), |g|]",
                Implies(g >= 1, And(count <= g, count >= If(N_min < g, N_min, g))))
    yield Claim(item, "an error of exactly 1/2 does not matter",
                Implies(And(is_partial, error == half), count == g - c), true=False)
    some = And(g >= 1, x >= 0, x <= ToReal(g))
    yield Claim(item, "it is at least N_min", Implies(some, count >= N_min), true=False)
    yield Claim(item, "it rounds a half up",
                Implies(And(g >= 9, N_min == 3, x == ToReal(c) + half, c >= 3, c < g), count == c + 1), true=False)


def budgets_nest(code: Code) -> Iterator[Claim]:
    """Yield claims that a larger budget never evicts a token that a smaller budget keeps."""
    item = "CC-DISSOLVE"
    lower, upper, more = Ints("c0_lower c0_upper N_min_more")

    def stays(cut: Term, least: Term = N_min) -> Term:
        return code.returned(NUMBA_CLOSED, size=g, before=before, c_0=cut, N_min=least)

    trunk = And(g >= 1, before >= 0, N_min >= 0)
    ordered = And(trunk, lower >= 0, lower <= upper)
    yield Claim(item, "budgets nest: a smaller cut keeps no fewer tokens of any trunk",
                Implies(ordered, stays(lower) >= stays(upper)))
    yield Claim(item, "a larger N_min keeps no more tokens of any trunk",
                Implies(And(trunk, c0 >= 0, more >= N_min), stays(c0, more) <= stays(c0)))
    yield Claim(item, "a smaller cut keeps more",
                Implies(And(ordered, lower < upper), stays(lower) > stays(upper)), true=False)
    yield Claim(item, "one token more to cut costs at most one token",
                Implies(ordered, stays(lower) - stays(lower + 1) <= 1), true=False)
