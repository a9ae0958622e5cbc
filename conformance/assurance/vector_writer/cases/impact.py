"""S3: counts, rarity and encoding impact."""

from conformance.assurance.vector_writer.case import Case, Group

__all__ = ["GROUPS"]

GIVEN = {"S": [20.0, 5.0, 10.0, 0.1], "U": [0.5, 0.25, 0.5, 0.0]}
SALIENCE = {"salience": [2.0, 0.125, 20.0, 1.0], "token_ids": [7, 5, 7, 7]}

GROUPS = [
    Group("CC-COUNT", [
        Case(1, "the token itself counts", ["Plain"], {"token_ids": [7, 5, 7, 7]}),
        Case(2, "ids far apart, in no order", ["TokenIds"], {"token_ids": [128000, 0, 2147483648, 0, 128000, 0]}),
        Case(3, "all different", ["TokenIds"], {"token_ids": [3, 2, 1, 0]}),
    ]),
    Group("CC-RARITY", [
        Case(10, "the paper's 0.591, 0.294 and 0.178", ["LogOnePlus"], {"c": [1, 10, 100]}),
        Case(11, "a large count", ["LogOnePlus"], {"c": [131072]}),
    ]),
    Group("CC-IMPACT", [
        Case(20, "half salience, half rarity, on the scale of M_max; clipped below", ["ClipAtBounds"], GIVEN),
        Case(21, "the stated order of the operations decides the last bit", ["SumOrder"],
             {"S": [0.3, 0.7, 1.1], "U": [0.1, 0.3, 0.7]}),
        Case(22, "clipped above", ["ClipAtBounds"], {"S": [20.0], "U": [1.5]}),
    ]),
    Group("CC-IMPACT", [Case(23, "no Von Restorff: S itself, not half of it", ["AblationForm"], GIVEN)],
          {"impact": "salience"}),
    Group("CC-IMPACT", [Case(24, "uniform: 1, not clipped, not scaled", ["AblationForm"], GIVEN)],
          {"impact": "uniform"}),
    Group("CC-TRUNK-IMPACT", [
        Case(30, "the mean of the three largest, and of one", ["TopThreeOfTrunk"],
             {"M": [1.0, 8.0, 3.0, 4.0, 3.0], "offsets": [0, 4, 5]}),
        Case(31, "two members: their mean", ["TopThreeOfTrunk"], {"M": [1.0, 2.0], "offsets": [0, 2]}),
        Case(32, "in descending order: 0.3 + 0.2 + 0.1", ["SumOrder"], {"M": [0.1, 0.2, 0.3], "offsets": [0, 3]}),
        Case(33, "equal members", ["TieAtBoundary"], {"M": [2.0, 2.0, 2.0, 2.0, 1.0], "offsets": [0, 5]}),
    ]),
    Group("impact", [
        Case(40, "counts, rarity and mixture in one", ["Plain", "TokenIds"], SALIENCE),
        Case(41, "one large id among small ones", ["TokenIds"],
             {"salience": [1.0, 1.0, 1.0], "token_ids": [128000, 1, 128000]}),
    ]),
    Group("impact", [Case(42, "salience alone", ["AblationForm"], SALIENCE, exact=("M",))], {"impact": "salience"}),
    Group("impact", [Case(43, "uniform", ["AblationForm"], SALIENCE, exact=("M",))], {"impact": "uniform"}),
]
