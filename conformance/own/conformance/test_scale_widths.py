"""On which widths the scale lane has a case on either side, and why not on the others.

An implementation may hold a quantity in a table, a tile or a type of one of these widths. Below, each quantity stands
with the sizes of the lane's cases, the greatest width that they pass, and why none is passed beyond. A size is a case's
own value, so that a case which is taken away shows here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from conformance.own.reference import test_scale_scores as scores
from conformance.own.reference import test_scale_shares as shares
from conformance.own.reference import test_scale_tables as tables
from conformance.strategies.scale_attention import RANKS, Shape
from conformance.strategies.scale_tables import FAR_IDS
from conformance.suite import test_scale_decode as decode
from conformance.suite import test_scale_dissolution as dissolution
from conformance.suite import test_scale_graph as graph
from conformance.suite import test_scale_policies as policies
from conformance.suite import test_scale_prefill as prefill
from conformance.suite import test_scale_s1 as s1
from conformance.suite import test_scale_trunks as trunks

WIDTHS = (16, 32, 64, 128, 256, 1_024, 2**16, 2**24, 2**31, 2**32)
# Sizes of the small lane, which stand below every width.
SMALL = 2


@dataclass(frozen=True)
class Quantity:
    """Something that is counted, its sizes in the lane, and the greatest width that one of them passes."""

    name: str
    sizes: tuple[int, ...]
    passes: int
    reason: str
    """Why no case passes a greater width; empty where all are passed."""

    def __str__(self) -> str:
        return self.name


SHAPES: list[Shape] = [*s1.ADDRESSED, *s1.LADDERED, *(shape for _, shape, _ in prefill.FULL)]


def over(sizes: Iterable[int]) -> tuple[int, ...]:
    return (SMALL, *sizes)


LAYER = "no layer has more; 2 GB hold the queries of no more than a few hundred heads"
S1_TOKENS = (
    "S1 takes n^2 H steps: the reference needs 18 s and 4.4 GB for 32 heads at 4 096; nightly has 32 768 of 8"
)
OFFSETS = "an array of 2^31 offsets or positions is 16 GB; one of 2^24 is 134 MB, and the reference holds a dozen"
HOST = "2^24 trunks with scores, ratios and offsets are 2 GB in the reference"

QUANTITIES = [
    Quantity("S1: query heads", over(s.H for s in SHAPES), 64, LAYER),
    Quantity("S1: KV heads", over(s.H_kv for s in SHAPES), 16, LAYER),
    Quantity("S1: query heads of a KV head", over(s.H // s.H_kv for s in SHAPES), 64, LAYER),
    Quantity("S1: channels", over(s.d for s in SHAPES), 256, "no layer has more than 512"),
    Quantity("S1: tokens", over(s.n for s in SHAPES), 1_024, S1_TOKENS),
    Quantity("S1: tokens of a chunk", over(min(s.n, s.parameters.C) for s in SHAPES), 1_024, S1_TOKENS),
    Quantity("S1: chunks", over(-(-s.n // s.parameters.C) for s in SHAPES), 256, S1_TOKENS),
    Quantity("S1: live keys before a segment", over(s.before for s in SHAPES), 1_024, S1_TOKENS),
    Quantity("S1: k_heads", over(s.parameters.k_heads for s in SHAPES), 64, "so many heads have to be there"),
    Quantity("S1: k_intra", over(s.parameters.k_intra for s in SHAPES), 32, "five times the paper's 8"),
    Quantity("S1: k_cross", over(s.parameters.k_cross for s in SHAPES), 32, "as many sources need as many heads"),
    Quantity("S1: positions", over(s.start + s.n for s in SHAPES), 2**32, ""),
    Quantity("S2: tokens", over([2**24 + 1, *(case.lists.n for case in trunks.CASES)]), 2**24, OFFSETS),
    Quantity("S2: sentences", over([65_537]), 2**16, OFFSETS),
    Quantity("S2: tokens of a sentence", over([200_003, 2**24 + 1]), 2**24, OFFSETS),
    Quantity("S2: T_max", over([65_537, trunks.WHOLE]), 2**24, "2^31 - 1 is the greatest there is"),
    Quantity("S2: edges of an interface", over([25]), 16, "five tokens on either side have 25 pairs"),
    Quantity("S2: positions", over(case.lists.start + case.lists.n for case in trunks.CASES), 2**32, ""),
    Quantity("S3: ids", over([2**62, *FAR_IDS.tolist()]), 2**32, ""),
    Quantity("S3: occurrences, counted", over([65_537]), 2**16, "2^24 tokens: nightly"),
    Quantity("S3: occurrences, given", over(graph.widths().tolist()), 2**32, ""),
    Quantity("S4: trunks", over(case.lists.n // case.largest for case in graph.CASES), 2**16, OFFSETS),
    Quantity("S4: pair keys", over((case.lists.n // case.largest) ** 2 for case in graph.CASES), 2**32, ""),
    Quantity("S4: tokens of a trunk", over([70_000]), 2**16, OFFSETS),
    Quantity("S4: product of two sizes", over([46_341**2, 70_000**2]), 2**32, ""),
    Quantity("S4: neighbours of a trunk", over([70_000]), 2**16, OFFSETS),
    Quantity("S4: edges between two trunks", over([140_000, 32**2 + 1]), 2**16, OFFSETS),
    Quantity("S4: positions", over(case.lists.start + case.lists.n for case in graph.CASES), 2**32, ""),
    Quantity("S5: trunks", over(graph.TRUNKS), 2**16, HOST),
    Quantity("S6: trunks", over(case.m for case in dissolution.CASES), 2**16, HOST),
    Quantity("S6: tied scores", over(dissolution.SIZES), 2**16, HOST),
    Quantity("S6: tied members", over(dissolution.SIZES), 2**16, OFFSETS),
    Quantity("S6: tokens", over([2**24 + 999]), 2**24, OFFSETS),
    Quantity("S6: B", over([2**24 + 1, 2**53 + 1]), 2**32, ""),
    Quantity("S6: N_min", over([65_537, 2**24 + 1, 2**31 - 1]), 2**24, "2^31 - 1 is the greatest there is"),
    Quantity("S6: positions", over(case.start + case.m for case in dissolution.CASES), 2**32, ""),
    Quantity("decode: live members of a trunk", over(decode.SIZES), 2**16, OFFSETS),
    Quantity("decode: trunks", over(decode.SIZES), 2**16, HOST),
    Quantity("decode: hops", over([17, 33, 65, 129, 257, 299]), 256, "the paper's pulse ends after seven hops"),
    Quantity("decode: senders to a trunk", over([65_537]), 2**16, OFFSETS),
    Quantity("decode: pulses to a trunk", over([1_025]), 1_024, "each source is a search of its own in the reference"),
    Quantity("decode: steps", over(decode.STEPS), 2**32, ""),
    Quantity("decode: live tokens", over(m for m, _ in tables.TABLES), 2**16, OFFSETS),
    Quantity("decode: positions", over(case.start + case.n for case in decode.SEGMENTS), 2**32, ""),
    Quantity("diversity: tokens", over([70_000]), 2**16, "in the reference 5 000: it holds all pairs"),
    Quantity("diversity: channels", over([257, 1_025]), 1_024, "a signature is a head's values"),
    Quantity("diversity: tokens kept", over([1_100]), 1_024, "each pick looks at all tokens in the oracle"),
    Quantity("NestedKV: tokens", over(n for _, n, _ in policies.KEYS), 1_024, "12 000 tokens; the oracle walks"),
    Quantity("NestedKV: channels", over(d for _, _, d in policies.KEYS), 256, "no layer has more than 512"),
    Quantity("NestedKV: W", over(p.W for _, p in policies.CASES), 1_024, "no more than the tokens"),
    Quantity("policies: units", over([66_000, *shares.SIZES]), 2**16, OFFSETS),
    Quantity("policies: layers", over([33, 80, 126, 257]), 256, "no model has more than 126"),
    Quantity("policies: protected tokens", over([33, 70_000]), 2**16, OFFSETS),
    Quantity("policies: queries", over([33, 300, 700]), 256, "all pairs of tokens are held for each head"),
    Quantity("policies: pooled entries", over(scores.SIZES), 1_024, "a kernel reads no further than itself"),
    Quantity("policies: kernel", over([17, 33, 65, 129]), 128, "SnapKV's is 5 or 7"),
    Quantity("policies: candidates", over([66_000, *scores.SIZES]), 2**16, OFFSETS),
]


@pytest.mark.parametrize("quantity", QUANTITIES, ids=str)
def test_each_width_has_cases_on_either_side_or_a_reason(quantity: Quantity) -> None:
    passed = [width for width in WIDTHS if any(x <= width for x in quantity.sizes) and max(quantity.sizes) > width]
    assert passed == [width for width in WIDTHS if width <= quantity.passes]
    assert bool(quantity.reason) == (quantity.passes < WIDTHS[-1])


def test_names_are_one_each() -> None:
    assert len({quantity.name for quantity in QUANTITIES}) == len(QUANTITIES)


def test_full_size_cases_are_few() -> None:
    """At most six in CI, of H n up to 131 072; the rest of S1 at n up to 3 000."""
    assert len(prefill.FULL) <= 6
    assert max(shape.H * shape.n for shape in SHAPES) <= 131_072
    assert max(shape.n for shape in [*s1.ADDRESSED, *s1.LADDERED]) <= 3_000
    assert RANKS < 16
