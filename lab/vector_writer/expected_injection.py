"""Expected results of the operations in injection.md and positions.md, from the oracles."""

import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from statistics import NormalDist

from conformance.vectors.files import Json
from lab.oracles import injection, statistics
from lab.vector_writer.brute_force import Operation, direct

SYSTEM = [(True, "<|im_start|>"), (False, "system\nYou are a helpful assistant."), (True, "<|im_end|>"), (False, "\n")]
USER, END = [(True, "<|im_start|>"), (False, "user\n")], [(True, "<|im_end|>")]
# Prefix, suffix and number of hidden parts, from Sections 3.5 and 3.6 and Appendix A of the paper.
FORMS: dict[str, tuple[list[tuple[bool, str]], list[tuple[bool, str]], int]] = {
    "raw": ([], [], 0), "full": (SYSTEM + USER, END, 0), "full_hidden_preamble": (SYSTEM + USER, END, 4),
    "opening": (SYSTEM + USER, [], 0), "closing": ([(False, "user\n")], END, 0), "role": ([(False, "user\n")], [], 0),
    "markers": ([(True, "<|im_start|>"), (False, "\n")], END, 0),
    "markers_phi3": ([(True, "<|end|>")], [(True, "<|end|>")], 0),
    "markers_deepseek": ([(True, "<｜User｜>"), (False, "\n")], [(True, "<｜end▁of▁sentence｜>")], 0),
}
ARMS = {
    "kivi": ("all", 0, 0), "selective_per_head": ("all", 4, 4), "lower_half_per_head": ("lower", 0, 0),
    "upper_half_per_head": ("upper", 0, 0),
}


def single(value: float) -> float:
    """Return the value rounded to float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def scales(i: Json) -> list[list[list[float]]]:
    """Return a scale for each group, at the place of the group."""
    x, scheme = i["x"], i["scheme"]
    heads, tokens, channels = (range(size) for size in (len(x), len(x[0]), len(x[0][0])))

    def one(hs: object, ts: object, cs: object) -> float:
        values = [x[h][t][c] for h in hs for t in ts for c in cs]  # type: ignore[attr-defined]
        return single(injection.scale_of(values, i["bits"]))

    shapes = {
        "per_tensor": lambda: [[[one(heads, tokens, channels)]]],
        "per_head": lambda: [[[one([h], tokens, channels)]] for h in heads],
        "per_channel": lambda: [[[one([h], tokens, [c]) for c in channels]] for h in heads],
        "per_token": lambda: [[[one([h], [t], channels)] for t in tokens] for h in heads],
    }
    return shapes[scheme]()


def turned(interleaved: bool) -> Callable[[Json], Json]:
    def run(i: Json) -> Json:
        still = all(angle == 0 for row in i["angles"] for angle in row)  # complex products lose negative zeros
        return {"turned": i["x"] if still else injection.moved(i["x"], i["angles"], interleaved)}

    return run


def wrapped(i: Json) -> Json:
    prefix, suffix, hidden = FORMS[i["form"]]
    vocabulary = dict(zip(i["texts"], i["ids"], strict=True))
    return injection.wrapped(prefix, i["chunk"], suffix, hidden, vocabulary)


def region(i: Json) -> Json:
    half, first, last = ARMS[i["arm"]]
    layers, tokens = injection.quantised_region(half, first, last, i["layers"], i["tokens"])
    return {"layers": layers, "tokens": tokens}


def fused(i: Json) -> Json:
    order = injection.fused([[str(name) for name in ranking] for ranking in i["rankings"]], i["k"])
    return {"order": [int(name) for name, _ in order], "scores": [score for _, score in order]}


def resampled(result: list[float]) -> Json:
    return {"interval": result[:2], "positive": result[2]}


def cosines(i: Json) -> Json:
    pairs = [
        [injection.cosines(a, b, (p, q), i["inverse_frequencies"], i["style"] == "interleaved")
         for a, b, p, q in zip(one, other, *i["positions"], strict=True)]
        for one, other in zip(i["archived"], i["fresh"], strict=True)
    ]
    return {name: [[pair[which] for pair in head] for head in pairs] for which, name in enumerate(["raw", "unrotated"])}


def fractions(i: Json) -> Json:
    return {"n": i["n"], **{name: Fraction(i[name]) for name in ("discordance", "difference", "alpha")}}


HERE, COUNTED, PLACES = "lab.oracles.injection.", "lab.oracles.statistics.", "lab.oracles.positions."

ROTATION, SPLICING = "injection.rotation.", "injection.splicing."


def of(
    oracle: str, results: Callable[[Json], Json], reference: str = "", gives: Sequence[str] = (),
) -> Operation:
    """Return an operation without parameters."""
    return Operation(oracle, lambda i, p: results(i), (), reference, gives)


OPERATIONS: Mapping[str, Operation] = {
    "IN-SHIFT-ANGLES": direct(HERE + "shift_angles", "angles", ROTATION + "shift_angles"),
    "IN-REBASE-ANGLES": direct(HERE + "rebase_angles", "angles", ROTATION + "rebase_angles"),
    "IN-HALF-SPLIT": of(HERE + "moved", turned(interleaved=False), ROTATION + "turn_half_split", ["turned"]),
    "IN-INTERLEAVED": of(HERE + "moved", turned(interleaved=True), ROTATION + "turn_interleaved", ["turned"]),
    "IN-SCALE": of(HERE + "scale_of", lambda i: {"step": scales(i)}),
    "IN-CODES": of(
        HERE + "code",
        lambda i: {"codes": [
            [[injection.code(value, i["step"][0][0][0], i["bits"]) for value in token] for token in head]
            for head in i["x"]
        ]}, "injection.quantisers.codes", ["codes"],
    ),
    "IN-ARMS": of(HERE + "quantised_region", region),
    "IN-MARKER": of(HERE + "wrapped", lambda i: {"id": i["ids"][i["texts"].index(i["marker"])][0]}),
    "IN-WRAP": of(HERE + "wrapped", wrapped),
    "IN-SLICES": direct(HERE + "cuts", "chunks", "injection.wrappers.slices"),
    "IN-FUSE": of(HERE + "fused", fused),
    "IN-MCNEMAR": of(
        COUNTED + "mcnemar", lambda i: {"p": float(statistics.mcnemar(i["b"], i["c"]))}, "statistics.mcnemar", ["p"],
    ),
    "IN-WILSON": of(
        COUNTED + "wilson",
        lambda i: {"interval": statistics.wilson(
            i["correct"], i["n"], NormalDist().inv_cdf(0.5 + i["confidence"] / 2)
        )}, "statistics.wilson", ["interval"],
    ),
    "IN-BOOTSTRAP": of(COUNTED + "bootstrap", lambda i: resampled(statistics.bootstrap(**i))),
    "IN-CLUSTER-BOOTSTRAP": of(
        COUNTED + "cluster_bootstrap", lambda i: resampled(statistics.cluster_bootstrap(**i)),
    ),
    "IN-PLACES": direct(HERE + "placed", "positions following", SPLICING + "placed"),
    "IN-BASELINES": direct(HERE + "held", "", SPLICING + "held"),
    "POS-KEPT": direct(PLACES + "kept_positions", "positions following", "positions.kept_positions"),
    "POS-RENUMBERED": direct(
        PLACES + "renumbered_positions", "positions following", "positions.renumbered_positions",
    ),
    "POS-BASE": direct(PLACES + "base_of_stream", "base", "positions.base_of_stream"),
    "POS-TURN": direct(PLACES + "turn_keys", "turned", "positions.turn_keys"),
    "IN-LEGOLINK": direct(HERE + "first_tokens", "positions", SPLICING + "first_tokens"),
    "IN-CACHEBLEND": direct(HERE + "most_deviating", "positions", SPLICING + "most_deviating"),
    "IN-ENTROPY": of(
        HERE + "entropy",
        lambda i: {"entropy": [[injection.entropy(query) for query in head] for head in i["weights"]]},
        "injection.diagnostics.entropy", ["entropy"],
    ),
    "IN-SINK-MASS": of(
        HERE + "sink_mass",
        lambda i: {"mass": [
            [injection.sink_mass(query, i["positions"], i["sinks"]) for query in head] for head in i["weights"]
        ]}, "injection.diagnostics.sink_mass", ["mass"],
    ),
    "IN-KEY-COSINE": of(HERE + "cosines", cosines),
    "IN-BANDS": direct(HERE + "bands", "", "injection.diagnostics.bands"),
    "IN-POWER": of(
        COUNTED + "power", lambda i: {"power": float(statistics.power(**fractions(i)))}, "statistics.mcnemar_power",
        ["power"],
    ),
}
