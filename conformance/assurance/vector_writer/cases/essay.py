"""The essay's forms, and the extensions beyond the paper."""

from typing import Any

from conformance.assurance.vector_writer.case import Case, Group
from conformance.assurance.vector_writer.cases.coattention import attending
from conformance.assurance.vector_writer.cases.dissolution import eviction, sizes
from conformance.assurance.vector_writer.cases.prefill import EVEN, IDS, even, prompt
from conformance.assurance.vector_writer.cases.trunks import linked, text

__all__ = ["GROUPS"]

TWO_HEADS = {"own": [[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]]}
FOUR_HEADS = {"own": [[[1.0]], [[0.5]], [[0.25]], [[0.75]]]}
UNIT = {"impact": "unit"}
TIERS: dict[str, Any] = {"allocation": "tiers"}
SMALL_ESSAY = {
    **EVEN, "heads": "mean", "impact": "unit", "trunk_impact": "unit", "s": 2.0, "M_min": 0.0, "M_max": 8.0, **TIERS,
}
SALIENCE = {"salience": [4.0, 2.0, 0.0, 4.0], "token_ids": [7, 5, 7, 7]}
TEN = [9] * 10
RANKED = [g / 16 for g in range(10)]
TWO_GONE = {"kept": [8, 9, 10, 11], "offsets": [0, 4, 8, 12], "ratio": [0.0, 0.0, 1.0], "D": [0.5, 0.25, 0.5]}
THREE_INTERFACES = [(1, 2, 0.5), (3, 4, 0.75), (5, 6, 0.25)]

GROUPS = [
    Group("CC-MEAN-SALIENCE", [
        Case(1, "two heads: the mean of both", ["MeanOfHeads"], TWO_HEADS),
        Case(2, "the best three of four heads", ["MeanOfHeads"], FOUR_HEADS, exact=("S",)),
    ], {"M_min": 0.0}),
    Group("CC-MEAN-SALIENCE", [Case(3, "no head is asked for: the lower clip", ["EmptyResult"], TWO_HEADS)],
          {"k_heads": 0}),
    Group("coattention", [
        Case(4, "two heads on one key each", ["MeanOfHeads"], attending([[0], [0], [2]], [[0], [1], [0]]),
             items=("CC-MEAN-SALIENCE",)),
    ], {"C": 8, "k_intra": 0, "k_cross": 0, "M_min": 0.0, "heads": "mean"}),
    Group("CC-UNIT-IMPACT", [
        Case(10, "shares of the largest, and rarity", ["ShareOfLargest"],
             {"S": [4.0, 2.0, 0.0], "U": [0.5, 0.25, 0.5]}),
        Case(11, "nobody is attended: rarity alone", ["EmptyResult"], {"S": [0.0, 0.0], "U": [0.5, 0.25]}),
        Case(12, "a quotient that rounds, then its half", ["SumOrder"], {"S": [0.3, 0.7], "U": [0.1, 0.3]}),
    ], UNIT),
    Group("impact", [Case(13, "counts, rarity and shares in one", ["ShareOfLargest"], SALIENCE,
                          items=("CC-UNIT-IMPACT",))], UNIT),
    Group("CC-UNIT-TRUNK-IMPACT", [
        Case(20, "the least is 0, the greatest almost 1", ["UnitInterval"], {"M_bar": [2.0, 4.0, 3.0]}),
        Case(21, "all equal gives 0", ["EmptyResult"], {"M_bar": [2.0, 2.0]}),
        Case(22, "one trunk", ["EmptyResult"], {"M_bar": [3.0]}),
    ]),
    Group("trunks", [
        Case(23, "trunk impact on [0, 1]", ["UnitInterval"], text("-.-.", linked(4), [1.0, 2.0, 5.0, 3.0]),
             items=("CC-UNIT-TRUNK-IMPACT",)),
    ], {"trunk_impact": "unit"}),
    Group("CC-TIER-COUNT", [
        Case(30, "ten trunks of nine: 5 of 9 at ratio 1/2", ["HalfUp"], {"sizes": TEN, "t": 0}),
        Case(31, "three up: the middle meets the end", ["TierAtEnd"], {"sizes": TEN, "t": 4}),
        Case(32, "eight down: nothing is left", ["TierAtEnd"], {"sizes": TEN, "t": -7}),
        Case(33, "one middle trunk keeps 0.8", ["TierAtEnd"], {"sizes": [9, 9], "t": 0}),
        Case(34, "two of two: N_min, but no more than there are", ["RemnantTwo"], {"sizes": [2, 2, 2, 2], "t": 0}),
        Case(35, "a half that floats miss: rank 167 of 178 middle trunks", ["HalfUp"],
             {"sizes": [59] * 445, "t": 0}),
    ]),
    Group("CC-TIERS", [
        Case(40, "45 of 90: the excess of 5 is one remnant", ["TierShift"], sizes(*TEN, c_0=45)),
        Case(41, "47 of 90: two would remain, so five go", ["TierShift", "RemnantTwo"], sizes(*TEN, c_0=43)),
        Case(42, "nothing to cut", ["EmptyResult"], sizes(*TEN, c_0=0)),
        Case(43, "everything goes", ["CutEqualsTotal"], sizes(*TEN, c_0=90)),
        Case(44, "one trunk", ["TierAtEnd"], sizes(9, c_0=3)),
        Case(45, "sizes differ", ["TierShift"], sizes(1, 12, 3, 7, 20, 2, 5, c_0=21)),
        Case(46, "a budget that is met", ["TierShift"], sizes(*TEN, c_0=40)),
    ]),
    Group("dissolve", [
        Case(50, "ten trunks for 45 tokens", ["TierShift", "PartialKeepsBest"],
             eviction(TEN, RANKED, 45, [float(i % 9) for i in range(90)]), items=("CC-TIER-COUNT", "CC-TIERS")),
        Case(51, "equal scores: the later trunk has the better rank", ["TieAtBoundary"],
             eviction([4, 4, 4], [0.5] * 3, 8), items=("CC-TIERS",)),
        Case(52, "protected trunks stay outside", ["ProtectedNotRead"],
             eviction([3, 9, 9, 3], [0.0, 0.25, 0.5, 0.0], 15, protected=[True, False, False, True]),
             items=("CC-TIERS",)),
    ], TIERS),
    Group("CC-RENEWAL", [
        Case(60, "half of what is lacking, where active", ["ActiveOnly"],
             {"D": [0.5, 0.5, 1.0, 0.0], "active": [True, False, True, True], "renewal": 0.5}),
        Case(61, "the essay's rate", ["SumOrder"], {"D": [0.3, 0.7], "active": [True, True], "renewal": 0.3}),
        Case(62, "renewal 0 is the paper", ["Plain"], {"D": [0.3, 0.1], "active": [True, False], "renewal": 0.0}),
    ]),
    Group("CC-RARITY-FORMS", [Case(70, "one more than the count", ["RarityShape"], {"c": [1, 2, 10, 100]})],
          {"rarity": "reciprocal"}),
    Group("CC-RARITY-FORMS", [Case(71, "a power of e", ["RarityShape"], {"c": [1, 2, 10, 100]})],
          {"rarity": "exponential"}),
    Group("impact", [Case(72, "the mixture of salience and 1 / (1 + c)", ["RarityShape"], SALIENCE,
                          items=("CC-RARITY-FORMS",))], {"rarity": "reciprocal"}),
    Group("impact", [Case(73, "the mixture of salience and exp(-c)", ["RarityShape"], SALIENCE,
                          items=("CC-RARITY-FORMS",))], {"rarity": "exponential"}),
    Group("CC-ADAPTIVE-MERGE", [
        Case(80, "the middle of three strengths", ["LowerMedian"],
             {"sentences": [0, 2, 4, 6, 8], "edges": [list(edge) for edge in THREE_INTERFACES]}),
        Case(81, "the lower of two", ["LowerMedian"],
             {"sentences": [0, 2, 4, 6], "edges": [list(edge) for edge in THREE_INTERFACES[:2]]}),
        Case(82, "no edge: 0", ["EmptyResult"], {"sentences": [0, 2, 4], "edges": []}),
        Case(83, "one sentence: tau_merge", ["EmptyResult"], {"sentences": [0, 8], "edges": []}),
        Case(84, "a mean above itself by rounding", ["MultipliedOut"],
             {"sentences": [0, 3, 6], "edges": [[0, 3, 0.4], [1, 3, 0.5], [2, 3, 0.9]]}),
    ]),
    Group("trunks", [
        Case(85, "only the strongest of three interfaces merges", ["LowerMedian"],
             text("-.-.-.-.", linked(8, THREE_INTERFACES)), items=("CC-ADAPTIVE-MERGE",)),
        Case(86, "weights below every fixed threshold", ["LowerMedian"],
             text("-.-.-.-.", linked(8, cross=[(a, b, w / 16) for a, b, w in THREE_INTERFACES])),
             items=("CC-ADAPTIVE-MERGE",)),
    ], {"merge": "median"}),
    Group("CC-COVERAGE", [
        Case(90, "two in the middle of two halves", ["EvenlySpaced"],
             {**TWO_GONE, "protected": [False, False, True], "B": 8}),
        Case(91, "more room than evicted tokens", ["EvenlySpaced"],
             {**TWO_GONE, "protected": [False, False, False], "B": 11}),
        Case(92, "everything fits: no reserve", ["EmptyResult"],
             {**TWO_GONE, "protected": [False, False, False], "B": 12}),
        Case(93, "the protected trunk takes all of B", ["ProtectedAboveBudget"],
             {**TWO_GONE, "protected": [False, False, True], "B": 3}),
    ], {"coverage": 0.5}),
    Group("CC-COVERAGE", [
        Case(94, "0.29 of 100 tokens are 29, in decimals", ["DecimalFraction"],
             {"kept": [], "offsets": [0, 200], "ratio": [0.0], "D": [0.5], "protected": [False], "B": 100}),
    ], {"coverage": 0.29}),
    Group("dissolve", [
        Case(95, "coverage beside a partial trunk", ["EvenlySpaced", "RemnantThree"],
             eviction([6, 6, 6, 6], [0.125, 0.25, 0.5, 0.75], 14), items=("CC-COVERAGE",)),
    ], {"coverage": 0.25}),
    Group("prefill", [
        Case(100, "the essay's forms together", ["Plain"], prompt(even(12), IDS, [9], 0.6),
             items=("CC-UNIT-IMPACT", "CC-UNIT-TRUNK-IMPACT", "CC-TIERS")),
        Case(101, "and with coverage", ["EvenlySpaced"], prompt(even(24), IDS * 2, [9], 0.5), items=("CC-COVERAGE",)),
    ], {**SMALL_ESSAY, "coverage": 0.25}),
]
