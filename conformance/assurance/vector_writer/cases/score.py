"""S5: the score."""

import math

from conformance.assurance.vector_writer.case import Case, Group

__all__ = ["GROUPS"]

NAN = math.nan
OPEN = [False, False, False]

GROUPS = [
    Group("CC-NORMALISED-IMPACT", [
        Case(1, "the protected 100 takes no part in the maximum", ["ProtectedNotRead", "LogOnePlus"],
             {"M_bar": [1.0, 3.0, 7.0, 100.0], "protected": [False, False, False, True]}),
        Case(2, "all equal gives 0", ["EmptyResult"], {"M_bar": [2.0, 2.0], "protected": [False, False]},
             exact=("M_tilde",)),
        Case(3, "one unprotected trunk gives 0", ["EmptyResult"],
             {"M_bar": [2.0, 5.0], "protected": [True, False]}, exact=("M_tilde",)),
        Case(4, "no unprotected trunk: NaN throughout, no error", ["NothingUnprotected"],
             {"M_bar": [2.0, 5.0], "protected": [True, True]}, exact=("M_tilde",)),
    ]),
    Group("CC-SCORE", [
        Case(10, "the larger path; NaN where protected", ["Plain", "ProtectedNotRead"],
             {"D": [0.25, 0.75, 0.5], "M_tilde": [0.5, 0.5, NAN]}),
    ]),
    Group("CC-SCORE", [
        Case(11, "alpha = 0: D itself", ["AblationForm"], {"D": [0.25, 0.75, 0.0], "M_tilde": [0.5, 1.0, 1.0]}),
    ], {"alpha": 0.0}),
    Group("CC-SCORE", [
        Case(12, "alpha = 2 lets impact exceed 1", ["Plain"], {"D": [0.5, 1.0], "M_tilde": [0.5, 0.75]}),
    ], {"alpha": 2.0}),
    Group("score", [
        Case(20, "impact wins, D wins, and the least impact is 0", ["Plain"],
             {"D": [0.25, 0.75, 0.125], "impact": [3.0, 3.0, 1.0], "protected": OPEN}),
        Case(21, "a protected trunk has the largest impact", ["ProtectedNotRead"],
             {"D": [0.0, 0.0, 0.0], "impact": [100.0, 1.0, 3.0], "protected": [True, False, False]}),
        Case(22, "every trunk is protected", ["NothingUnprotected"],
             {"D": [0.5, 0.5], "impact": [1.0, 2.0], "protected": [True, True]}, exact=("score",)),
        Case(23, "equal impacts: D alone", ["EmptyResult"],
             {"D": [0.25, 0.75], "impact": [4.0, 4.0], "protected": [False, False]}, exact=("score",)),
    ]),
    Group("score", [
        Case(24, "alpha = 0", ["AblationForm"],
             {"D": [0.25, 0.0, 1.0], "impact": [1.0, 20.0, 2.0], "protected": OPEN}, exact=("score",)),
    ], {"alpha": 0.0}),
]
