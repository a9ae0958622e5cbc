"""What the policies' operations must give, from the oracles."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from conformance.assurance.oracles import cake as cake_oracle
from conformance.assurance.oracles import kvzip, weighed
from conformance.assurance.oracles import policies as oracle
from conformance.assurance.oracles.blocks import best_blocks, crushed
from conformance.assurance.oracles.morphkv import morphkv
from conformance.assurance.oracles.vase import uniforms, vase
from conformance.vectors.json_values import Json

__all__ = ["RESULTS"]

Shares = Callable[[list[oracle.Score], int], Sequence[int]]
HALF = Fraction(1, 2)


def layers(i: Json) -> list[oracle.Layer]:
    return [
        {"q": q, "k": k, "v": v, "scaling": i["scaling"]}
        for q, k, v in zip(i["q"], i["k"], i["v"], strict=True)
    ]


def kept(i: Json, score: Callable[[oracle.Layer], list[oracle.Score]], shares: Shares | None = None) -> Json:
    """The best tokens of each kept set, at B tokens each or as a layer shares them."""
    found = []
    for layer in layers(i):
        rows = score(layer)
        each = shares(rows, i["B"]) if shares else [i["B"]] * len(rows)
        found += [oracle.top(row, b) for row, b in zip(rows, each, strict=True)]
    return {"kept": found}


def pyramid(i: Json, score: Callable[[oracle.Layer], list[oracle.Score]]) -> Json:
    all_layers = layers(i)
    n = len(all_layers[0]["k"][0])
    shares = oracle.pyramid_shares(Fraction(i["B"]), i["W"], len(all_layers), n, i["beta"])
    return {"kept": [
        oracle.top(row, b) for layer, b in zip(all_layers, shares, strict=True) for row in score(layer)
    ]}


def windowed(rows: Sequence[oracle.Score], W: int) -> list[oracle.Score]:
    return [[*row[: len(row) - W], *[None] * W] for row in rows]


def window_members(layer: oracle.Layer, W: int) -> oracle.Score:
    past, rows = oracle.window(layer, W), oracle.last_rows(layer, W)
    n = len(layer["k"][0])
    return [*[sum(q[at] for head in rows for q in head) for at in range(past)], *[None] * (n - past)]


def all_members(layer: oracle.Layer) -> oracle.Score:
    return [sum(x for x in column if x is not None) for column in zip(*oracle.accumulated(layer), strict=True)]


def chunks(i: Json, members: Callable[[oracle.Layer], oracle.Score]) -> Json:
    return {"kept": [oracle.chunk_selection(members(layer), i["c"], i["B"]) for layer in layers(i)]}


def blanked(i: Json) -> list[oracle.Score]:
    return [[None if shut else x for x, shut in zip(row, i["protected"], strict=True)] for row in i["values"]]


def competed(i: Json, safeguard: Fraction, shares: Callable[..., list[int]]) -> Json:
    return {"shares": shares(blanked(i), i["B"], safeguard)}


def cake(i: Json) -> Json:
    """Shares by the preferences of the layers."""
    all_layers = layers(i)
    preferences = [cake_oracle.preference(layer, i["W"], i["tau1"], i["tau2"]) for layer in all_layers]
    shares = cake_oracle.preferred_shares(preferences, i["B"], i["W"], len(all_layers[0]["k"][0]))
    return {"kept": [
        oracle.top(row, share) for layer, share in zip(all_layers, shares, strict=True)
        for row in cake_oracle.scores(layer, i["W"], i["kernel"], i["gamma"])
    ]}


def rehearsal(i: Json) -> Json:
    given = [i[name] for name in ("token_ids", "template", "N_sink", "N_recent", "chunk", "overlap")]
    spans, read = kvzip.chunks(*given)
    return {"chunks": spans, "read": read}


def rehearsed(i: Json) -> Json:
    """Shares of all layers together; with W_o as KVzip+ has it."""
    rows = []
    for at, k in enumerate(i["k"]):
        layer: oracle.Layer = {"k": k, "scaling": i["scaling"], "v": i["v"][at] if "v" in i else None, "repeats": [
            {"start": start, "stop": stop, "q": i["repeat_q"][part][at], "k": i["repeat_k"][part][at],
             "norms": i["norms"][part][at] if "norms" in i else None}
            for part, (start, stop) in enumerate(i["chunks"])
        ]}
        rows += kvzip.scores(layer, i["N_sink"], i["W_o"][at] if "W_o" in i else None)
    shares = kvzip.global_shares(rows, i["B"])
    return {"kept": [oracle.top(row, share) for row, share in zip(rows, shares, strict=True)]}


def vatp(i: Json) -> Json:
    """The sinks and the newest half have no score."""
    found = []
    for row in (row for layer in layers(i) for row in weighed.vatp(layer)):
        open_ = range(i["N_sink"], len(row) - i["B"] // 2)
        found.append(oracle.top([x if at in open_ else None for at, x in enumerate(row)], i["B"]))
    return {"kept": found}


def official_pyramid(i: Json) -> Json:
    """The published arithmetic, layer by layer."""
    base = i["capacity"] - i["W"]
    if i["n"] < i["capacity"] or i["n"] < 2 * base:
        return {"shares": [min(i["n"], i["capacity"])] * i["L"]}
    least = base // i["beta"]
    most = 2 * base - least
    if most >= i["n"] - i["W"]:
        most, least = i["n"] - i["W"], 2 * base - (i["n"] - i["W"])
    return {"shares": [i["W"] + most - layer * ((most - least) // (i["L"] - 1)) for layer in range(i["L"])]}


def official_adakv(i: Json) -> Json:
    a = Fraction(i["safeguard"])
    return {"shares": [round(won * (1 - a) + i["base"] * a // 1) for won in i["wins"]]}


def due(i: Json) -> Json:
    return {"due": [
        every is not None and seen % every == 0 and live >= B + excess for every, excess, seen, live, B in i["steps"]
    ]}


def observed(i: Json) -> Json:
    (layer,) = layers(i)
    return {
        "window": oracle.last_rows(layer, i["W"]),
        "accumulated": [
            [sum(column) for column in zip(*rows, strict=True)]
            for rows in oracle.last_rows(layer, len(layer["k"][0]))
        ],
    }


def turned(i: Json) -> Json:
    """Small keys stay; what is protected is so by its position."""
    found = []
    for keys, positions in zip(i["k"], i["positions"], strict=True):
        pinned = [p for p in positions if p < i["sink"] or p >= i["seen"] - i["recent"]]
        others = [(sum(x * x for x in k), p) for k, p in zip(keys, positions, strict=True) if p not in pinned]
        found.append(sorted([*pinned, *(p for _, p in sorted(others)[: i["B"] - len(pinned)])]))
    return {"kept": found}


def read(i: Json) -> Json:
    """What is live grows by the tokens read; each key's sum by what their queries give it."""
    rows, grown = oracle.last_rows({"q": i["q"], "k": i["k"], "scaling": i["scaling"]}, i["tokens"]), []
    G = len(i["q"]) // len(i["k"])
    for g, sums in enumerate(i["sums"]):
        queries = (row for head in rows[g * G : (g + 1) * G] for row in head)
        given = [sum(column) for column in zip(*queries, strict=True)]
        grown.append([old + new for old, new in zip([*sums, *[0.0] * i["tokens"]], given, strict=True)])
    return {"live": [[*own, *range(i["seen"] - i["tokens"], i["seen"])] for own in i["live"]], "sums": grown}


RESULTS: Mapping[str, Callable[[Any], Json]] = {
    "PO-RETAIN": lambda i: kept(i, oracle.knorm),
    "PO-OBSERVED-ATTENTION": observed,
    "PO-POOL": lambda i: {
        "max": oracle.pool(i["row"], i["kernel"], "max"), "average": oracle.pool(i["row"], i["kernel"], "average"),
    },
    "PO-TOP-UNITS": lambda i: {"kept": [oracle.top(row, i["B"]) for row in blanked(i)]},
    "PO-FILL-UNITS": lambda i: {"kept": [oracle.chunk_selection(row, i["c"], i["B"]) for row in blanked(i)]},
    "PO-BEST-BLOCKS": lambda i: {"kept": [best_blocks(row, i["b"], i["B"]) for row in blanked(i)]},
    "PO-BLOCKS": lambda i: {"kept": [
        best_blocks(row, i["b"], max(i["B"], i["b"], i["W"]))
        for layer in layers(i) for row in oracle.snapkv(layer, i["W"], i["kernel"])
    ]},
    "PO-REPRESENTATIVES": lambda i: {
        "kept": crushed(blanked(i), i["b"], i["B"], Fraction(i["share"]), i["anchor"])
    },
    "PO-KVCRUSH": lambda i: {"kept": [
        own for layer in layers(i) for own in crushed(
            oracle.snapkv(layer, i["W"], i["kernel"]), i["b"], max(i["B"], i["b"], i["W"]), Fraction(i["share"]),
            i["anchor"],
        )
    ]},
    "PO-WHOLE-SHARES": lambda i: {"shares": oracle.whole([Fraction(target) for target in i["targets"]])},
    "PO-PYRAMID-BUDGET": lambda i: {
        "shares": oracle.pyramid_shares(Fraction(i["B"]), i["W"], i["L"], i["n"], i["beta"])
    },
    "PO-ADAPTIVE-BUDGET": lambda i: competed(i, Fraction(i["safeguard"]), oracle.adaptive_shares),
    "PO-COMPETITION-BUDGET": lambda i: competed(i, Fraction(i["safeguard"]), oracle.competition_shares),
    "PO-THRESHOLD": lambda i: {
        "shares": [min(i["B"], sum(x is None or x > i["tau"] for x in row)) for row in blanked(i)]
    },
    "PO-PYRAMID-OFFICIAL": official_pyramid,
    "PO-ADAKV-OFFICIAL": official_adakv,
    "PO-STEP": due,
    "PO-TURN": turned,
    "PO-READ": read,
    "PO-STREAMINGLLM": lambda i: {"kept": [
        sorted({*range(min(i["N_sink"], i["n"])), *range(max(0, i["n"] - (i["B"] - i["N_sink"])), i["n"])})
    ]},
    "PO-H2O": lambda i: kept(i, lambda layer: windowed(oracle.accumulated(layer), i["B"] // 2)),
    "PO-H2O-DESCRIBED": lambda i: kept(i, lambda layer: windowed(oracle.accumulated(layer), i["W"])),
    "PO-SNAPKV": lambda i: kept(i, lambda layer: oracle.snapkv(layer, i["W"], i["kernel"])),
    "PO-PYRAMIDKV": lambda i: pyramid(i, lambda layer: oracle.snapkv(layer, i["W"], i["kernel"])),
    "PO-PYRAMIDKV-DESCRIBED": lambda i: pyramid(i, lambda layer: windowed(oracle.accumulated(layer), i["W"])),
    "PO-CHUNKKV": lambda i: chunks(i, lambda layer: window_members(layer, i["W"])),
    "PO-CHUNKKV-DESCRIBED": lambda i: chunks(i, all_members),
    "PO-TOVA": lambda i: kept(i, oracle.tova),
    "PO-KEYDIFF": lambda i: kept(i, oracle.keydiff),
    "PO-KNORM": lambda i: kept(i, oracle.knorm),
    "PO-LAGKV": lambda i: kept(i, lambda layer: oracle.lagkv(layer, i["N_sink"], i["lag"])),
    "PO-EXPECTED-ATTENTION": lambda i: kept(i, lambda layer: oracle.expected_attention(
        layer, i["inv_freq"], 1.0, i["N_sink"], i["N_future"]
    )),
    "PO-ADAKV": lambda i: kept(
        i, lambda layer: oracle.adakv(layer, i["W"], i["kernel"]),
        lambda rows, B: oracle.adaptive_shares(rows, B, Fraction(i["safeguard"])),
    ),
    "PO-RKV": lambda i: kept(i, lambda layer: oracle.rkv(layer, i["W"], i["kernel"], i["lam"])),
    "PO-CAOTE": lambda i: kept(i, oracle.caote),
    "PO-DEFENSIVEKV": lambda i: kept(
        i, lambda layer: oracle.defensive(layer, i["W_o"], i["W"], i["kernel"], i["B"]),
        lambda rows, B: oracle.competition_shares(rows, B, Fraction(0)),
    ),
    "PO-VATP": vatp,
    "PO-TWO-STAGES": lambda i: {"kept": [
        weighed.two_stages(row, second, i["B"], Fraction(i["share"]))
        for row, second in zip(blanked(i), i["second"], strict=True)
    ]},
    "PO-CRITICALKV": lambda i: {"kept": [
        kept for layer in layers(i) for kept in weighed.critical(
            layer, i["W_o"], oracle.snapkv(layer, i["W"], i["kernel"]), [i["B"]] * len(layer["k"])
        )
    ]},
    "PO-REHEARSAL": rehearsal,
    "PO-KVZIP": rehearsed,
    "PO-KVZIP-PLUS": rehearsed,
    "PO-GLOBAL-BUDGET": lambda i: {"shares": kvzip.global_shares(blanked(i), i["B"])},
    "PO-PREFERENCE-BUDGET": lambda i: {
        "shares": cake_oracle.preferred_shares(i["preferences"], i["B"], i["W"], i["n"])
    },
    "PO-MORPHKV": lambda i: kept(i, lambda layer: morphkv(layer, i["W"], i["fusion"])),
    "PO-UNIFORM": lambda i: {"numbers": uniforms(i["seed"], i["group"], i["seen"], i["n"])},
    "PO-VASE": lambda i: {"kept": [
        slots for at, layer in enumerate(layers(i)) for slots in vase(
            layer, at * len(layer["k"]), len(layer["k"][0]), [range(len(layer["k"][0]))] * len(layer["k"]), i["B"],
            i["W"], i["kernel"], i["N_sink"], Fraction(i["share"]), i["seed"],
        )
    ]},
    "PO-CAKE": cake,
    "PO-EPICACHE": lambda i: kept(
        i, oracle.epicache, lambda rows, B: oracle.competition_shares(rows, B, Fraction(0))
    ),
}
