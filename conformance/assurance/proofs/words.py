"""Claims that z3 decides, and those about machine words: integers inside int64, and the packed keys of S1's top-k."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import z3
from z3 import And, BitVec, BitVecVal, Extract, Implies, Ints, Or, SignExt

from conformance.assurance.proofs.source import Code, Term

OUTCOMES = {"unsat": "proved", "sat": "refuted"}
TIMEOUT_MS = 20_000
SMALL = (4, 12, 64)  # a counterexample is easier to read where its numbers are small


@dataclass(frozen=True)
class Claim:
    """A statement about the code that implements an item; `true` says what z3 is expected to find."""

    item: str
    name: str
    formula: Term
    true: bool = True


@dataclass(frozen=True)
class Verdict:
    """What came out: "proved", "refuted" or "unknown"."""

    claim: Claim
    outcome: str
    seconds: float
    counterexample: str = ""

    @property
    def surprising(self) -> bool:
        return self.outcome != ("proved" if self.claim.true else "refuted")

    def __str__(self) -> str:
        expected = "" if self.claim.true else "(false) "
        line = f"{self.outcome.upper()} {expected}{self.claim.item}: {self.claim.name} ({self.seconds * 1e3:.0f} ms)"
        return f"{line}\n    counterexample: {self.counterexample}" if self.counterexample else line


def decide(claim: Claim) -> Verdict:
    """Look for values for which the claim fails."""
    started = time.perf_counter()
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT_MS)
    solver.add(z3.Not(claim.formula))
    answer = solver.check()
    outcome = OUTCOMES.get(str(answer), "unknown")
    shown = _readable_model(solver) if answer == z3.sat else ""
    return Verdict(claim, outcome, time.perf_counter() - started, shown)


def _readable_model(solver: z3.Solver) -> str:
    """The first model in a small box of integers, or else the one at hand."""
    model = solver.model()
    for limit in SMALL:
        solver.push()
        solver.add(*(z3.And(-limit <= x, x <= limit) for x in _integers(model)))
        found = solver.check() == z3.sat
        small = solver.model() if found else model
        solver.pop()
        if found:
            return _shown(small)
    return _shown(model)


def _integers(model: z3.ModelRef) -> Iterator[Term]:
    for declared in model.decls():
        if declared.arity() == 0 and declared.range() == z3.IntSort():
            yield declared()


def _shown(model: z3.ModelRef) -> str:
    constants = {str(d): model[d] for d in model.decls() if d.arity() == 0}
    return ", ".join(f"{name} = {constants[name]}" for name in sorted(constants))


NUMBA_CLOSED = "accelerated/numba_cpu/dissolution.py:kept_tokens"
NUMBA_SPLIT = "accelerated/numba_cpu/trunks.py:split"
PACKED = "accelerated/triton_gpu/selection.py:packed"
UNPACKED = "accelerated/triton_gpu/selection.py:write_best"

LONG = 2**63
INDEX = 2**31


def claims(code: Code) -> Iterator[Claim]:
    """Every claim about machine words."""
    yield from closed_forms(code)
    yield from splits(code)
    yield from narrow_words(code)
    yield from packed_keys(code)


def inside_int64(made: Sequence[Term]) -> Term:
    """No value that arithmetic made leaves int64."""
    return And(*(And(x >= -LONG, x < LONG) for x in made))


def closed_forms(code: Code) -> Iterator[Claim]:
    """S6 in int64, for any prompt that memory could hold."""
    size, before, c_0, N_min = Ints("size before c0 N_min")
    made = code.reading(NUMBA_CLOSED, size=size, before=before, c_0=c_0, N_min=N_min).made
    tokens = And(size >= 1, before >= 0, c_0 >= 0, N_min >= 0, N_min < LONG, c_0 < LONG)
    yield Claim("CC-ALLOCATE", "numba's closed form stays inside int64 for sums below 2^63",
                Implies(And(tokens, before + size < LONG), inside_int64(made)))
    yield Claim("CC-ALLOCATE", "numba's closed form stays inside int64 for summands below 2^63",
                Implies(And(tokens, before < LONG, size < LONG), inside_int64(made)), true=False)


def splits(code: Code) -> Iterator[Claim]:
    """Step 3 in int64."""
    size, T_max = Ints("size T_max")
    made: list[Term] = []
    code.part(NUMBA_SPLIT, "pieces =", "small, larger =", made=made, size=size, T_max=T_max)
    words = And(size >= 1, T_max >= 1, size < LONG, T_max < LONG)
    yield Claim("CC-SPLIT", "numba's split stays inside int64 for size + T_max < 2^63",
                Implies(And(words, size + T_max < LONG), inside_int64(made)))
    yield Claim("CC-SPLIT", "numba's split stays inside int64 for every T_max of int64",
                Implies(words, inside_int64(made)), true=False)


def narrow_words(code: Code) -> Iterator[Claim]:
    """What 32-bit words would need; today's code keeps int64."""
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
    """S1's top-k on the GPU: one int64 orders by weight, then by lower index; both come back out of it."""
    def packed(weight: Term, index: Term) -> Term:
        bits = {"weight.to(tl.int32, bitcast=True)": weight}
        return code.returned(PACKED, bits, index=index)

    a, b, i, j = (BitVec(name, 32) for name in ("weight_a", "weight_b", "index_i", "index_j"))
    indices = And(i >= 0, j >= 0)
    positive = And(a >= 0, b >= 0)  # the bits of floats that are not negative, which order as the floats do
    first = Or(a > b, And(a == b, i < j))
    above = packed(a, i) > packed(b, j)
    found = {"found": z3.BoolVal(True)}
    index = code.part(UNPACKED, "store INDEX + at + rank", given=found, top=packed(a, i))
    yield Claim("CC-CROSS", "triton's packed keys order by weight, then by lower index",
                Implies(And(positive, indices), above == first))
    yield Claim("CC-CROSS", "triton's packed keys give the index back",
                Implies(And(positive, indices), index == SignExt(32, i)))
    floats = [z3.fpBVToFP(bits, z3.Float32()) for bits in (a, b)]
    yield Claim("CC-CROSS", "triton's packed keys order negative weights too",
                Implies(And(indices, z3.fpGT(*floats)), above), true=False)
    yield Claim("CC-CROSS", "triton's packed keys give any index back", index == SignExt(32, i), true=False)
