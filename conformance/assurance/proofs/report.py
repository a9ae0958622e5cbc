"""All claims, each with its false twin: the same lemma over a source with one edit, which z3 must refute."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from conformance.assurance.proofs import eviction, shapes, words
from conformance.assurance.proofs.claims import Claim, decide
from conformance.assurance.proofs.eviction import (
    CUT,
    KEEP_COUNT,
    NUMBA_CLOSED,
    NUMBA_DISSOLVE,
    OVER,
    STEP,
    TRITON_ALLOCATE,
    TRITON_CLOSED,
)
from conformance.assurance.proofs.shapes import (
    BYTES,
    EFFECTIVE,
    INTERFACE,
    MERGES,
    NUMBA_BUILD,
    NUMBA_INTERFACE,
    NUMBA_SPLIT,
    PROTECTED,
    SPLIT,
    TOKENS,
    TRITON_SPLIT,
)
from conformance.assurance.proofs.source import Code
from conformance.assurance.proofs.words import PACKED, UNPACKED


class Edit(NamedTuple):
    """`old` becomes `new` in the function at `place`, and the lemma of this name falls."""

    lemma: str
    place: str
    old: str
    new: str


SHAPE_EDITS = [
    Edit("bytes add over tokens", BYTES, "d * n", "d * (n + 1)"),
    Edit("a fraction asks for 1 to n tokens", TOKENS, "fraction * seen)", "fraction * seen) - 1"),
    Edit("and for the fewest that are no less than beta n", TOKENS, "math.ceil", "round"),
    Edit("a larger fraction asks for no fewer tokens", TOKENS, "self.fraction * seen", "-self.fraction * seen"),
    Edit("a count asks for itself", TOKENS, "return self.count", "return min(self.count, seen)"),
    Edit("B is the budget or the floor, whichever is larger", EFFECTIVE, "N_sink + W_recent", "N_sink"),
    Edit("a smaller budget gives no larger B", EFFECTIVE, "W_recent, budget", "W_recent, -budget"),
    Edit("without sink and window B is the budget alone", EFFECTIVE, "max", "min"),
    Edit("a trunk is protected iff a member lies in the sink or the window", PROTECTED, "stops > n", "stops >= n"),
    Edit("protection reaches at most T_max - 1 tokens beyond either side", PROTECTED, "starts < N_sink",
         "starts < N_sink + 1"),
    Edit("with N_sink = W_recent = 0 nothing is protected", PROTECTED, "starts < N_sink", "starts <= N_sink"),
    Edit("each side of the interface lies inside its trunk or sentence", INTERFACE,
         "max(current[0], current[1] - WINDOW)", "current[1] - WINDOW"),
    Edit("each side holds min(5, size) tokens", INTERFACE, "sentence[0] + WINDOW", "sentence[0] + WINDOW + 1"),
    Edit("numba walks over the same window", NUMBA_INTERFACE, "stop - WINDOW", "stop - WINDOW + 1"),
    Edit("a merged trunk holds at most T_max tokens", MERGES, "parameters.T_max", "parameters.T_max + 1"),
    Edit("a strong interface merges up to T_max, inclusive", MERGES, "next_size <=", "next_size <"),
    Edit("numba merges where the reference does", NUMBA_BUILD, "i + 1 - start <=", "i - start <="),
    Edit("pieces are ceil(size / T_max)", SPLIT, "-(-size // T_max)", "size // T_max"),
    Edit("larger pieces come first and hold one token more", SPLIT,
         "[small + 1] * larger + [small] * (pieces - larger)", "[small] * (pieces - larger) + [small + 1] * larger"),
    Edit("sizes add up, for any number of pieces", SPLIT, "[small + 1] *", "[small] *"),
    Edit("each piece holds 1 to T_max tokens", SPLIT, "[small + 1] *", "[small + 2] *"),
    Edit("a piece of a split trunk holds at least (T_max + 1) // 2 tokens", SPLIT, "[small] *", "[small - 1] *"),
    Edit("a trunk of at most T_max tokens is one piece", SPLIT, "pieces - larger", "pieces + 1 - larger"),
    Edit("numba makes as many pieces", NUMBA_SPLIT, "size + T_max - 1", "size + T_max"),
    Edit("triton makes as many pieces", TRITON_SPLIT, "size + T_max - 1", "size"),
    Edit("numba's piece has the same size", NUMBA_SPLIT, "piece < larger", "piece <= larger"),
    Edit("triton's boundaries lie that far apart", TRITON_SPLIT, "tl.minimum(larger, piece)", "larger"),
]

EVICTION_EDITS = [
    Edit("one trunk preserves the invariant", STEP, "return (size - c, 0)", "return (size, 0)"),
    Edit("between 0 and all tokens of a trunk stay", STEP, "return (size - c, 0)", "return (size + c, 0)"),
    Edit("a partial trunk keeps at least N_min", STEP, "size - c >= N_min", "size - c > 0"),
    Edit("it overshoots exactly where 1 to N_min - 1 tokens would remain", STEP, "c >= N_min", "c > N_min"),
    Edit("after the stop nothing changes, so the loop may break", STEP, "return (size, c)", "return (size, 0)"),
    Edit("N_min = 0 and N_min = 1 are one rule", STEP, "c >= N_min", "c > N_min"),
    Edit("N_min of at least the size leaves no partial trunk", STEP, "size - c >= N_min", "size >= N_min"),
    Edit("closed form: they stay together", STEP, "return (size - c, 0)", "return (size - c, 1)"),
    Edit("closed form of numba: the same tokens as the loop, for every N_min", NUMBA_CLOSED, "max(N_min, 1)", "N_min"),
    Edit("closed form of triton: the same tokens as the loop, for every N_min", TRITON_CLOSED, "rest >= tl",
         "rest > tl"),
    Edit("c0 lies in [0, T_alive], as CC-ALLOCATE asks", CUT, "max(0, T_alive - B_avail)", "T_alive - B_avail"),
    Edit("c0 is max(0, n - B), held to T_alive", CUT, "B_avail = B - B_prot", "B_avail = B + B_prot"),
    Edit("protected trunks above B: everything else goes", CUT, "max(0, T_alive - B_avail)", "T_alive - B"),
    Edit("numba's cut is the same", NUMBA_DISSOLVE, "max(0, T_alive - B_avail)", "T_alive - B_avail"),
    Edit("triton's cut is the same", TRITON_ALLOCATE, "tl.minimum(tl.maximum(T_alive - B_avail, 0), T_alive)",
         "tl.maximum(T_alive - B_avail, 0)"),
    Edit("|R| is n, or B_prot, or lies in [B - max(0, N_min - 1), B]", CUT, "T_alive - B_avail)",
         "T_alive - B_avail - 1)"),
    Edit("a second eviction to the same B cuts nothing", CUT, "max(0, ", "max(1, "),
    Edit("a cut of nothing changes nothing", STEP, "c <= 0", "c < 0"),
    Edit("the result is over budget by what the protected trunks exceed B", OVER,
         "max(0, len(self.kept) - self.budget)", "len(self.kept) - self.budget"),
    Edit("with r = (|g| - c) / |g| it is |g| - c", KEEP_COUNT, "round(r * size)", "round(r * size) + 1"),
    Edit("an error below 1/2 in r |g| does not matter", KEEP_COUNT, "round(r * size)", "math.ceil(r * size)"),
    Edit("it lies in [min(N_min, |g|), |g|]", KEEP_COUNT, "min(size, max(N_min, round(r * size)))",
         "max(N_min, round(r * size))"),
    Edit("budgets nest: a smaller cut keeps no fewer tokens of any trunk", NUMBA_CLOSED, "before >= c_0",
         "before <= c_0"),
    Edit("a larger N_min keeps no more tokens of any trunk", NUMBA_CLOSED, "rest >= max", "rest <= max"),
]

WORD_EDITS = [
    Edit("numba's closed form stays inside int64 for sums below 2^63", NUMBA_CLOSED, "size - c_0", "size + c_0"),
    Edit("triton's closed form stays inside int64 for sums below 2^63", TRITON_CLOSED, "size - c_0", "size + c_0"),
    Edit("numba's split stays inside int64 for size + T_max < 2^63", NUMBA_SPLIT, "T_max - 1", "T_max + 1"),
    Edit("triton's split stays inside int64 for size + T_max < 2^63", TRITON_SPLIT, "T_max - 1", "T_max + 1"),
    Edit("numba's closed form in int32 is exact for prefix sums below 2^31: a wrap cancels", NUMBA_CLOSED,
         "before >= c_0", "before + size >= c_0 + size"),
    Edit("triton's closed form in int32 is exact for prefix sums below 2^31: a wrap cancels", TRITON_CLOSED,
         "before >= c_0", "before + size >= c_0 + size"),
    Edit("triton's packed keys order by weight, then by lower index", PACKED, "index ^ LAST", "index"),
    Edit("triton's packed keys give the index back", UNPACKED, "top & LAST ^ LAST", "top & LAST"),
]

EDITS = [*SHAPE_EDITS, *EVICTION_EDITS, *WORD_EDITS]


def edited_claims() -> Iterator[Claim]:
    """The lemma of each edit, over the edited source."""
    for part, edits in ((shapes, SHAPE_EDITS), (eviction, EVICTION_EDITS), (words, WORD_EDITS)):
        for edit in edits:
            code = Code({edit.place: (edit.old, edit.new)})
            lemma = next(claim for claim in part.claims(code) if claim.name == edit.lemma)
            yield replace(lemma, name=f"{edit.lemma}, with `{edit.new}` for `{edit.old}`", true=False)


NOT_READ = {
    "reference/crystalcache/dissolution.py:allocate": "the loop that hands N_min and the cut to each step",
    "reference/crystalcache/dissolution.py:carried_out": "the order of trunks by score, and its ties",
    "reference/crystalcache/dissolution.py:strongest_members": "the order of members by impact, and its ties",
    "reference/crystalcache/trunks.py:merge_sentences": "the pass over sentences",
    "reference/policies/budgets.py:largest_remainder": "the order of remainders, and its ties",
}
"""Loops and sorts of integer decisions, which no lemma reads: vectors, properties and the model in Coq judge them."""


def source_claims(code: Code) -> Iterator[Claim]:
    """Lemmas and false claims about the project's integer decisions, as `code` has them."""
    for part in (shapes, eviction, words):
        yield from part.claims(code)


def all_claims() -> Iterator[Claim]:
    """These, over the sources as they are; then each lemma's false twin."""
    yield from source_claims(Code())
    yield from edited_claims()


def main() -> int:
    """Print each verdict; 1 where a lemma is not proved or a false claim is not refuted."""
    verdicts = []
    for claim in all_claims():
        verdicts.append(decide(claim))
        print(verdicts[-1], flush=True)
    surprises = [verdict for verdict in verdicts if verdict.surprising]
    proved, refuted = (sum(v.claim.true == true and not v.surprising for v in verdicts) for true in (True, False))
    print("not read by any lemma, left to vectors, properties and the model in Coq:")
    print("\n".join(f"    {place}: {what}" for place, what in NOT_READ.items()))
    print(f"proofs: {proved} lemmas proved, {refuted} false claims refuted, {len(surprises)} surprises")
    return int(bool(surprises))
