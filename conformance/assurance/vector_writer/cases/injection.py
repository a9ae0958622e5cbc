"""Injection: rotation, codecs, wrappers, fusion and statistics."""

from conformance.assurance.vector_writer.case import Case, Group

__all__ = ["GROUPS"]

QUARTER, TURNS = 1.5707963267948966, [[0.0, 0.75], [-3.0, 40.0]]
X = [[[1.0, 2.0, 3.0, 4.0, 5.0], [-1.0, 0.5, 0.0, 2.0, -7.0]]]
TEXTS = ["<|im_start|>", "<|im_end|>", "<|end|>", "\n", "user\n", "system\nYou are a helpful assistant.", "<|user|>"]
IDS = [[7], [8], [9], [1], [4, 1], [2, 3], [0]]
WORDS = {"texts": TEXTS, "ids": IDS}
OUTLIER = [[[1.0, 100.0, -0.5], [0.25, -90.0, 0.125]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]

GROUPS = [
    Group("IN-SHIFT-ANGLES", [
        Case(1, "every token turns by the same angle", ["Plain", "SameTurn"],
             {"n": 3, "start": 1000, "inverse_frequencies": [1.0, 0.1, 0.0001]}),
        Case(2, "a hidden preamble stands before position 0", ["NegativeStart"],
             {"n": 2, "start": -5, "inverse_frequencies": [1.0, 0.3]}),
        Case(3, "a layer without positions", ["NoPairs"], {"n": 2, "start": 7, "inverse_frequencies": []}),
    ]),
    Group("IN-REBASE-ANGLES", [
        Case(10, "other frequencies: each token has its own angle", ["Plain"],
             {"n": 3, "start": 100, "archived": [1.0, 0.1], "live": [0.5, 0.025]}),
        Case(11, "equal frequencies: one shift", ["SameTurn"],
             {"n": 3, "start": 8, "archived": [1.0, 0.5], "live": [1.0, 0.5]}),
    ]),
    Group("IN-HALF-SPLIT", [
        Case(20, "partial: pairs (0, 2) and (1, 3), channel 4 stays", ["PairsOfTheRotatedPart"],
             {"x": X, "angles": TURNS}),
        Case(21, "an angle of 0 keeps negative zeros", ["ZeroShift"],
             {"x": [[[-0.0, -1.0, 2.0, -0.0]]], "angles": [[0.0, 0.0]]}, exact=("turned",)),
        Case(22, "a quarter turn", ["Plain"], {"x": [[[3.0, 4.0]]], "angles": [[QUARTER]]}),
    ]),
    Group("IN-INTERLEAVED", [
        Case(30, "partial: pairs (0, 1) and (2, 3), channel 4 stays", ["PairsOfTheRotatedPart"],
             {"x": X, "angles": TURNS}),
        Case(31, "an angle of 0 keeps negative zeros", ["ZeroShift"],
             {"x": [[[-0.0, -1.0, 2.0, -0.0]]], "angles": [[0.0, 0.0]]}, exact=("turned",)),
    ]),
    Group("IN-SCALE", [
        Case(40 + at, f"{scheme}: an outlier channel, and a head of zeros", ["ShapeOfTheScale", "ZeroGroup"],
             {"x": OUTLIER, "scheme": scheme, "bits": bits})
        for at, (scheme, bits) in enumerate(
            [("per_tensor", 8), ("per_head", 8), ("per_channel", 8), ("per_token", 8), ("per_token", 4)]
        )
    ]),
    Group("IN-CODES", [
        Case(50, "halves go to the even neighbour", ["HalfToEven"],
             {"x": [[[1.0, 3.0, -1.0, -3.0, 5.0]]], "step": [[[2.0]]], "bits": 8}),
        Case(51, "the range is symmetric", ["SymmetricRange"],
             {"x": [[[-256.0, -255.0, 256.0]]], "step": [[[2.0]]], "bits": 8}),
        Case(52, "four bits", ["SymmetricRange"], {"x": [[[-20.0, 6.6, 20.0]]], "step": [[[1.0]]], "bits": 4}),
    ]),
    Group("IN-ARMS", [
        Case(60 + at, comment, ["HalfOpenRegion"], {"arm": arm, "layers": layers, "tokens": tokens})
        for at, (comment, arm, layers, tokens) in enumerate([
            ("everything", "kivi", 28, 100), ("first and last tokens stay", "selective_per_head", 28, 100),
            ("fewer tokens than stay", "selective_per_head", 4, 6),
            ("fewer than the first four", "selective_per_head", 4, 3),
            ("the lower half", "lower_half_per_head", 28, 10), ("an odd layer is upper", "upper_half_per_head", 5, 10),
            ("an odd layer is not lower", "lower_half_per_head", 5, 10),
        ])
    ]),
    Group("IN-MARKER", [
        Case(70, "one id", ["Plain"], {**WORDS, "marker": "<|im_end|>"}),
        Case(71, "two ids", ["Refused", "OneMarkerId"], {**WORDS, "marker": "user\n"}, refused="marker"),
        Case(72, "the unknown token", ["Refused", "OneMarkerId"], {**WORDS, "marker": "<|user|>"}, refused="marker"),
    ]),
    Group("IN-WRAP", [
        Case(80 + at, f"the form {form}", ["PartsEncodedAlone"], {**WORDS, "form": form, "chunk": [50, 51, 1]})
        for at, form in enumerate(
            ["raw", "full", "full_hidden_preamble", "opening", "closing", "role", "markers", "markers_phi3"]
        )
    ] + [
        Case(90, "an empty chunk", ["Refused"], {**WORDS, "form": "markers", "chunk": []}, refused="chunk"),
        Case(91, "a marker that is not one id", ["Refused", "OneMarkerId"],
             {**WORDS, "form": "full_phi3", "chunk": [50]}, refused="marker"),
    ]),
    Group("IN-SLICES", [
        Case(100, "the last end that fits", ["LastEndThatFits"],
             {"ids": [1, 9, 2, 9, 3, 4, 5, 6, 7], "ends": [9], "size": 4}),
        Case(101, "no ends: slices of the size", ["Plain"], {"ids": [1, 2, 3, 4, 5], "ends": [], "size": 2}),
        Case(102, "the rest stays whole", ["LastEndThatFits"], {"ids": [1, 9, 2], "ends": [9], "size": 3}),
        Case(103, "size 0", ["Refused"], {"ids": [1], "ends": [], "size": 0}, refused="size"),
    ]),
    Group("IN-FUSE", [
        Case(110, "mirrored rankings tie: by name", ["TotalOrder"], {"rankings": [[2, 1, 3], [1, 2]], "k": 60}),
        Case(111, "ranks count from 1, after repeats are removed", ["RanksFromOne"],
             {"rankings": [[5, 5, 4], [4]], "k": 1}),
    ]),
    Group("IN-MCNEMAR", [
        Case(120 + at, comment, ["ExactTwoSided"], {"b": b, "c": c})
        for at, (comment, b, c) in enumerate([
            ("merged pool: 0.0103", 35, 61), ("original pool: 0.108", 14, 25), ("new pool: 0.063", 21, 36),
            ("role name: 0.332", 11, 6), ("no discordant pair", 0, 0), ("as many as against", 3, 3),
            ("wins alone", 0, 6),
        ])
    ] + [Case(130, "a negative count", ["Refused"], {"b": -1, "c": 3}, refused="b")]),
    Group("IN-WILSON", [
        Case(140, "a share", ["Plain"], {"correct": 16, "n": 20, "confidence": 0.95}),
        Case(141, "nothing right", ["StaysInside"], {"correct": 0, "n": 20, "confidence": 0.95}),
        Case(142, "everything right", ["StaysInside"], {"correct": 7, "n": 7, "confidence": 0.9}),
        Case(143, "no trial", ["Refused"], {"correct": 0, "n": 0, "confidence": 0.95}, refused="n"),
        Case(144, "more right than tried", ["Refused"], {"correct": 3, "n": 2, "confidence": 0.95}, refused="correct"),
    ]),
    Group("IN-BOOTSTRAP", [
        Case(150, "outermost means, and the share strictly above 0", ["OutermostResamples"],
             {"differences": [1.0, -1.0, 0.0], "confidence": 0.6,
              "drawn": [[0, 1, 2], [0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 0, 1]]}),
        Case(151, "95 % of four resamples leaves none out", ["OutermostResamples"],
             {"differences": [1.0, 0.0], "confidence": 0.95, "drawn": [[0, 0], [0, 1], [1, 0], [1, 1]]}),
    ]),
    Group("IN-CLUSTER-BOOTSTRAP", [
        Case(160, "a larger cluster weighs more", ["PairsOfDrawnClusters"],
             {"differences": [-1.0, -1.0, 1.0, -1.0], "clusters": [0, 0, 1, 0], "confidence": 0.5,
              "drawn": [[0, 0], [0, 1], [1, 0], [1, 1]]}),
        Case(161, "resamples of one cluster drawn again and again", ["OutermostResamples"],
             {"differences": [0.5, -0.25, 0.125, 0.75, -1.0], "clusters": [2, 0, 0, 1, 2], "confidence": 0.5,
              "drawn": [[0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 1, 2], [2, 1, 0], [1, 2, 2], [0, 2, 0], [1, 0, 1]]}),
        Case(162, "all differences are equal", ["SumOrder"],
             {"differences": [0.1, 0.1, 0.1], "clusters": [0, 1, 1], "confidence": 0.9,
              "drawn": [[0, 0], [0, 1], [1, 1]] * 7}),
    ]),
    Group("IN-PLACES", [
        Case(200, "gaps, and a hidden preamble", ["GapsStay"],
             {"n": 9, "hidden": 2, "start": 100, "kept": [1, 3, 4, 8]}),
        Case(201, "a whole chunk", ["Plain"], {"n": 3, "hidden": 0, "start": 7, "kept": [0, 1, 2]}),
        Case(202, "nothing visible is stored", ["GapsStay"], {"n": 5, "hidden": 2, "start": 0, "kept": [1]}),
        Case(203, "everything is hidden", ["Refused"], {"n": 3, "hidden": 3, "start": 7, "kept": [0]},
             refused="hidden"),
        Case(204, "a place twice", ["Refused"], {"n": 3, "hidden": 0, "start": 7, "kept": [1, 1]}, refused="kept"),
    ]),
    Group("IN-BASELINES", [
        Case(210 + at, f"the arm {arm}", ["ArmsAsTold"],
             {"arm": arm, "session": [1, 2, 3, 4, 5, 6], "prefix": [7, 9], "raw": [[50], [60, 61]],
              "wrapped": [[7, 50, 8], [7, 60, 61, 8]]})
        for at, arm in enumerate(["inject", "inject_raw", "no_shift", "prefix", "global_sink", "full_recompute", "text",
                                  "text_wrapped"])
    ] + [
        Case(220, "an unknown arm", ["Refused"],
             {"arm": "cond2", "session": [1], "prefix": [], "raw": [], "wrapped": []}, refused="arm"),
    ]),
    Group("IN-LEGOLINK", [
        Case(230, "the first of every chunk; a chunk may be shorter", ["EveryChunk"],
             {"start": 10, "lengths": [5, 2, 4], "k": 3}),
        Case(231, "none", ["EmptyResult"], {"start": 10, "lengths": [5, 2], "k": 0}),
        Case(232, "a negative number", ["Refused"], {"start": 10, "lengths": [5], "k": -1}, refused="k"),
    ]),
    Group("IN-CACHEBLEND", [
        Case(240, "of equal deviations the earlier token", ["EarlierOfEqual"],
             {"spliced": [[[2.0, 0.0], [0.0, 1.0], [2.0, 1.0], [0.0, -2.0]]], "fresh": [[[0.0, 0.0]] * 4], "start": 20,
              "r": 0.5}),
        Case(241, "heads add up", ["EarlierOfEqual"],
             {"spliced": [[[1.0], [2.0], [0.0]], [[2.0], [0.0], [0.0]]], "fresh": [[[0.0], [0.0], [0.0]]] * 2,
              "start": 0, "r": 0.4}),
        Case(242, "a share of 0.29 of 100 tokens is 29", ["DecimalShare"],
             {"spliced": [[[float(at)] for at in range(100)]], "fresh": [[[0.0]] * 100], "start": 0, "r": 0.29}),
        Case(243, "more than all", ["Refused"], {"spliced": [[[1.0]]], "fresh": [[[0.0]]], "start": 0, "r": 1.5},
             refused="r"),
    ]),
    Group("IN-ENTROPY", [
        Case(250, "certain attention, halves, and no weight at all", ["ZeroWeight"],
             {"weights": [[[1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.0, 0.25], [0.25, 0.25, 0.25, 0.25]]]}),
        Case(251, "two heads of one query, three keys", ["Plain"],
             {"weights": [[[0.5, 0.375, 0.125]], [[0.0, 0.875, 0.125]]]}),
        Case(252, "one key: nothing is uncertain", ["ZeroWeight"], {"weights": [[[1.0], [1.0]]]}),
    ]),
    Group("IN-SINK-MASS", [
        Case(260, "positions, not slots", ["PositionsNotSlots"],
             {"weights": [[[0.5, 0.125, 0.125, 0.25]]], "positions": [0, 2, 3, 9], "sinks": 4}),
        Case(261, "in the order of the slots", ["Plain"],
             {"weights": [[[0.1, 0.2, 0.3, 0.4]]], "positions": [0, 1, 2, 3], "sinks": 4}),
        Case(262, "no sink is left", ["EmptyResult"],
             {"weights": [[[0.5, 0.5]]], "positions": [7, 9], "sinks": 4}),
    ]),
    Group("IN-KEY-COSINE", [
        Case(270 + at, f"{style}: a shift alone, another key, a zero key", ["RotationOff", "ZeroVector"],
             {"archived": [[[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5]],
              "fresh": [[[2.0, -1.0, 4.0, -3.0, 5.0], [0.0, 1.0, 1.0, 0.0, 2.0], [1.0] * 5]],
              "positions": [[0, 1, 2], [40, 41, 42]], "inverse_frequencies": [1.0, 0.25], "style": style})
        for at, style in enumerate(["half_split", "interleaved"])
    ]),
    Group("IN-BANDS", [
        Case(280 + at, f"{depth} layers", ["NoEmptyBand"], {"depth": depth})
        for at, depth in enumerate([40, 32, 28, 4, 1])
    ] + [Case(290, "no layer", ["Refused"], {"depth": 0}, refused="depth")]),
    Group("IN-POWER", [
        Case(170, "eight pairs", ["Plain"], {"n": 8, "discordance": 0.75, "difference": 0.5, "alpha": 0.25}),
        Case(171, "every pair is discordant and won", ["Plain"],
             {"n": 6, "discordance": 1.0, "difference": 1.0, "alpha": 0.05}),
        Case(172, "a difference beyond the discordance", ["Refused"],
             {"n": 6, "discordance": 0.25, "difference": 0.5, "alpha": 0.05}, refused="difference"),
    ]),
]
