"""Expected results of the policies' operations, from the oracles."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from conformance.methods import brutes, episodes, kvzip, weighed
from conformance.methods import cake as cake_oracle
from conformance.methods import policies as oracle
from conformance.methods.brute import Brute, from_vector
from conformance.methods.chunks import chunk_sets
from conformance.methods.expected_attention_stats import gaussian, products_with
from conformance.methods.knorm import knorm
from conformance.methods.method import method_of
from conformance.methods.policies import best_blocks, crushed
from conformance.methods.qfilters import products
from conformance.methods.snapkv import snapkv
from conformance.methods.tables import table_shares
from conformance.methods.vase import uniforms
from conformance.vectors.files import Json

Shares = Callable[[list[oracle.Score], int], Sequence[int]]
HALF = Fraction(1, 2)


def layers(i: Json) -> list[oracle.Layer]:
    return [
        {"q": q, "k": k, "v": v, "scaling": i["scaling"], "softcap": i.get("softcap"), "sinks": sinks}
        for q, k, v, sinks in zip(i["q"], i["k"], i["v"], i.get("sinks", [None] * len(i["q"])), strict=True)
    ]


def kept(i: Json, score: Callable[[oracle.Layer], list[oracle.Score]], shares: Shares | None = None) -> Json:
    """Return the best tokens of each kept set: B tokens each, or the numbers that `shares` returns for a layer."""
    result = []
    for layer in layers(i):
        rows = score(layer)
        each = shares(rows, i["B"]) if shares else [i["B"]] * len(rows)
        result += [oracle.top(row, b) for row, b in zip(rows, each, strict=True)]
    return {"kept": result}


def blanked(i: Json) -> list[oracle.Score]:
    return [[None if shut else x for x, shut in zip(row, i["protected"], strict=True)] for row in i["values"]]


def competed(i: Json, safeguard: Fraction, shares: Callable[..., list[int]]) -> Json:
    return {"shares": shares(blanked(i), i["B"], safeguard)}


def composed(i: Json) -> Json:
    """Return the shares of each layer's heads: the layer's part of the pyramid, divided by Ada-KV's rule."""
    rows, heads = blanked(i), i["heads"]
    L = len(rows) // heads
    layers_ = oracle.pyramid_shares(Fraction(i["B"]), i["W"], L, len(rows[0]), i["beta"])
    return {"shares": [
        share for at, B in enumerate(layers_)
        for share in oracle.adaptive_shares(rows[at * heads : (at + 1) * heads], B, Fraction(i["safeguard"]))
    ]}


def rehearsal(i: Json) -> Json:
    given = [i[name] for name in ("token_ids", "template", "N_sink", "N_recent", "chunk", "overlap")]
    spans, read = kvzip.chunks(*given)
    return {"chunks": spans, "read": read}


def rehearsed(i: Json) -> Json:
    """Return the kept sets of KVzip, with shares over all layers. With W_o, the scores are those of KVzip+."""
    rows = []
    for at, k in enumerate(i["k"]):
        sinks, v = i["sinks"][at] if "sinks" in i else None, i["v"][at] if "v" in i else None
        repeats = [
            {"start": start, "stop": stop, "q": i["repeat_q"][part][at], "k": i["repeat_k"][part][at],
             "norms": i["norms"][part][at] if "norms" in i else None}
            for part, (start, stop) in enumerate(i["chunks"])
        ]
        caps = {"scaling": i["scaling"], "softcap": i.get("softcap")}
        layer: oracle.Layer = {"k": k, **caps, "v": v, "sinks": sinks, "repeats": repeats}
        rows += kvzip.scores(layer, i["N_sink"], i["W_o"][at] if "W_o" in i else None)
    shares = kvzip.global_shares(rows, i["B"])
    return {"kept": [oracle.top(row, share) for row, share in zip(rows, shares, strict=True)]}


def official_pyramid(i: Json) -> Json:
    """Return the shares of the official PyramidKV code, layer by layer."""
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
    """Return the kept sets after a turn. Small keys are kept, and tokens are protected by position."""
    result = []
    for keys, positions in zip(i["k"], i["positions"], strict=True):
        pinned = [p for p in positions if p < i["sink"] or p >= i["seen"] - i["recent"]]
        others = [(sum(x * x for x in k), p) for k, p in zip(keys, positions, strict=True) if p not in pinned]
        result.append(sorted([*pinned, *(p for _, p in sorted(others)[: i["B"] - len(pinned)])]))
    return {"kept": result}


def read(i: Json) -> Json:
    """Return the live positions after tokens were read, and the sums with the weights from the new queries."""
    rows, grown = oracle.last_rows({"q": i["q"], "k": i["k"], "scaling": i["scaling"]}, i["tokens"]), []
    G = len(i["q"]) // len(i["k"])
    for g, sums in enumerate(i["sums"]):
        queries = (row for head in rows[g * G : (g + 1) * G] for row in head)
        given = [sum(column) for column in zip(*queries, strict=True)]
        grown.append([old + new for old, new in zip([*sums, *[0.0] * i["tokens"]], given, strict=True)])
    return {"live": [[*live, *range(i["seen"] - i["tokens"], i["seen"])] for live in i["live"]], "sums": grown}


def of_policy(brute: Brute, i: Json) -> Json:
    """Return the kept sets of a policy at the constants of the vector."""
    given, B, constants = from_vector(i)
    return {"kept": brute.kept(given, B, **constants)}


def in_pieces(i: Json) -> Json:
    """Return the best tokens of each piece. The first and last tokens of each piece are protected."""
    result, n = [], len(i["values"][0])
    pieces = [range(start, min(start + i["c"], n)) for start in range(0, n, i["c"])]
    held = [[at for at in piece if at < piece[0] + i["sink"] or at > piece[-1] - i["recent"]] for piece in pieces]
    free = [len(piece) - len(pinned) for piece, pinned in zip(pieces, held, strict=True)]
    rest = min(i["B"] - sum(map(len, held)), sum(free))
    for row in i["values"]:
        more = oracle.whole([Fraction(rest * x, sum(free) or 1) for x in free])
        kept = [oracle.best([at for at in piece if at not in pinned], row, number, pinned)
                for piece, pinned, number in zip(pieces, held, more, strict=True)]
        result.append([at for part in kept for at in part])
    return {"kept": result}


def scored_later(i: Json) -> Json:
    given, B, _ = from_vector({name: x for name, x in i.items() if name != "text"})
    method = method_of(i["text"])
    return {"kept": method.brute.kept(given, B, **method.constants, **method.readings)}


DIRECT = {
    "PO-PYRAMID-OFFICIAL": ("policies.budgets.pyramidkv_official", "shares"),
    "PO-UNIFORM": ("policies.vase.uniform_numbers", "numbers"),
    "PO-EPISODES": ("policies.episodes.cluster_windows", "labels centroids"),
    "PO-EPISODE-PROMPT": ("policies.episodes.prompt_windows", "windows"),
    "PO-EPISODE-LAYERS": ("policies.episodes.layer_shares", "shares"),
    "PO-EPISODE-TURN": ("policies.episodes.nearest_episode", "episode"),
}
"""Function of the reference that is called with the inputs as keyword arguments, and the names of its results."""

RESULTS: Mapping[str, Callable[[Any], Json]] = {
    **{brute.item: partial(of_policy, brute) for brute in reversed(brutes()) if brute.item.startswith("PO-")},
    "PO-RETAIN": lambda i: kept(i, knorm),
    "PO-OBSERVED-ATTENTION": observed,
    "PO-POOL": lambda i: {
        "max": oracle.pool(i["row"], i["kernel"], "max"), "average": oracle.pool(i["row"], i["kernel"], "average"),
    },
    "PO-TOP-UNITS": lambda i: {"kept": [oracle.top(row, i["B"]) for row in blanked(i)]},
    "PO-FILL-UNITS": lambda i: {"kept": [oracle.chunk_selection(row, i["c"], i["B"]) for row in blanked(i)]},
    "PO-BEST-BLOCKS": lambda i: {"kept": [best_blocks(row, i["b"], i["B"]) for row in blanked(i)]},
    "PO-BLOCKS": lambda i: {"kept": [
        best_blocks(row, i["b"], max(i["B"], i["b"], i["W"]))
        for layer in layers(i) for row in snapkv(layer, i["W"], i["kernel"])
    ]},
    "PO-PIECES": in_pieces,
    "PO-LATER-SCORES": scored_later,
    "PO-CHUNKS": lambda i: {"kept": [chunk_sets(row, i["B"], i["c"], i["gate"]) for row in blanked(i)]},
    "PO-REPRESENTATIVES": lambda i: {
        "kept": crushed(blanked(i), i["b"], i["B"], Fraction(i["share"]), i["anchor"])
    },
    "PO-WHOLE-SHARES": lambda i: {"shares": oracle.whole([Fraction(target) for target in i["targets"]])},
    "PO-TABLE-BUDGET": lambda i: {
        "shares": table_shares(i["shares"], i["B"] * i["L"] * i["heads"], i["W"], i["L"], i["heads"], i["n"]),
    },
    "PO-PYRAMID-BUDGET": lambda i: {
        "shares": oracle.pyramid_shares(Fraction(i["B"]), i["W"], i["L"], i["n"], i["beta"])
    },
    "PO-COMPOSE": composed,
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
    "PO-TWO-STAGES": lambda i: {"kept": [
        weighed.two_stages(row, second, i["B"], Fraction(i["share"]))
        for row, second in zip(blanked(i), i["second"], strict=True)
    ]},
    "PO-REHEARSAL": rehearsal,
    "PO-KVZIP": rehearsed,
    "PO-KVZIP-PLUS": rehearsed,
    "PO-GLOBAL-BUDGET": lambda i: {"shares": kvzip.global_shares(blanked(i), i["B"])},
    "PO-HEAD-SCORES": lambda i: {"head_scores": kvzip.head_means(i["contexts"])},
    "PO-FULL-HEADS": lambda i: {"shares": kvzip.full_heads(i["head_scores"], i["n"], i["B"], i["window"])},
    "PO-KVZIP-HEADS": lambda i: {"kept": kvzip.sinks_and_newest(
        [x for row in i["head_scores"] for x in row], i["n"], i["B"], i["N_sink"], i["N_recent"]
    )},
    "PO-EXPECTED-ATTENTION-STATS": lambda i: {"kept": [
        oracle.top(row, i["B"])
        for k, v, mean, covariance in zip(i["k"], i["v"], i["mean"], i["covariance"], strict=True)
        for row in gaussian(
            k, v, mean, [*map(products_with, covariance)], len(k[0]), i["inv_freq"], 1.0, i["scaling"], i["N_sink"],
            i["N_future"])
    ]},
    "PO-Q-FILTERS": lambda i: {"kept": [
        oracle.top(products(head, direction), i["B"])
        for k, filters in zip(i["k"], i["filters"], strict=True) for head, direction in zip(k, filters, strict=True)
    ]},
    "PO-PREFERENCE-BUDGET": lambda i: {
        "shares": cake_oracle.preferred_shares(i["preferences"], i["B"], i["W"], i["n"])
    },
    "PO-UNIFORM": lambda i: {"numbers": uniforms(i["seed"], i["group"], i["seen"], i["n"])},
    "PO-EPISODES": lambda i: dict(
        zip(("labels", "centroids"), episodes.clusters(i["x"], i["K"], i["seed"]), strict=False)
    ),
    "PO-EPISODE-PROMPT": lambda i: {"windows": episodes.prompts(i["x"], i["labels"], i["centroids"], i["P"])},
    "PO-EPISODE-LAYERS": lambda i: {"shares": episodes.shares(i["similarity"], i["M"], i["power"])},
    "PO-EPISODE-TURN": lambda i: {"episode": episodes.nearest(i["question"], i["centroids"])},
    "PO-EPICACHE": lambda i: kept(
        i, oracle.epicache, lambda rows, B: oracle.competition_shares(rows, B, Fraction(0))
    ),
}
