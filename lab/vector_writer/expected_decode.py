"""Expected results of the decode operations, from the oracle."""

from collections.abc import Callable, Sequence, Set

from conformance.oracles import decode, pipeline, s1, s4, s6
from conformance.oracles.decode import Model, Trunk
from conformance.vectors.codec import budget_of, csr_of, model_of, pairs_of, results_of
from conformance.vectors.files import Json, Results
from lab.vector_writer.brute_force import Operation, direct, trunk_lists
from spec.parameters import CrystalCacheParameters


def key_norms(i: Json, p: CrystalCacheParameters) -> Results:
    return {"inverse_norms": [decode.inverse_norm(list(keys)) for keys in zip(*i["k"], strict=True)]}


def bare(i: Json) -> Model:
    """Return a model with only members, norms and W."""
    members = trunk_lists(i["offsets"])
    norms = i.get("inverse_norms", [1.0] * i["offsets"][-1])
    return Model(0, trunks=[Trunk(g[0], g, 1.0, 0.0) for g in members], norm=dict(enumerate(norms)))


def activation(i: Json, p: CrystalCacheParameters) -> Results:
    now = bare(i)
    together = decode.active(now, p)
    return {"active": [g.name in together for g in now.trunks]}


def numbers(i: Json) -> list[int]:
    return list(range(len(i["indptr"]) - 1))


def pulses(i: Json, p: CrystalCacheParameters) -> Results:
    arrived = decode.pulses(i["source"], pairs_of(i, numbers(i)), p)
    return {"pulse": [arrived.get(g, 0.0) for g in numbers(i)]}


def resonance(i: Json, p: CrystalCacheParameters) -> Results:
    trunks = [Trunk(g, [g], 1.0, D) for g, D in enumerate(i["D"])]
    now = Model(0, trunks=trunks, W=pairs_of(i, numbers(i)))
    decode.resonance(now, {g for g in numbers(i) if i["active"][g]}, p)
    return {"D": [g.D for g in now.trunks]}


def hebbian(i: Json, p: CrystalCacheParameters) -> Results:
    together = {g for g in numbers(i) if i["active"][g]}
    return csr_of(decode.hebb(pairs_of(i, numbers(i)), together, p), numbers(i))


def segment_graph(i: Json, p: CrystalCacheParameters) -> Results:
    """Return the graph of a segment. Trunks contain all tokens between two bounds, and their sizes are given."""
    m, old = len(i["sizes"]), len(i["indptr"]) - 1
    W = pairs_of(i, numbers(i))
    spans = trunk_lists(i["bounds"])
    for b in range(old, m):
        for a in range(b):
            weights = s4.cross_weights([tuple(edge) for edge in i["edges"]], spans[a], spans[b])
            w = s4.trunk_weight(weights, i["sizes"][a], i["sizes"][b], p.tau_edge)
            if w:
                W[frozenset({a, b})] = w
    return csr_of(W, list(range(m)))


def segment_crystallization(i: Json, p: CrystalCacheParameters) -> Results:
    trunks = [Trunk(g, [g], 1.0, 0.0) for g in range(len(i["degree"]))]
    decode.settle(i["degree"], trunks, trunks[i["old"] :], p)
    return {"D": [g.D for g in trunks[i["old"] :]]}


def changed(change: Callable[[Model, Json, CrystalCacheParameters], object]) -> Callable[..., Results]:
    """Return a function that changes the state of the inputs in place, and returns the new state."""
    def run(i: Json, p: CrystalCacheParameters) -> Results:
        now = model_of(i)
        change(now, i, p)
        return results_of(now)

    return run


def extend(
    now: Model, E: Sequence[s1.Edge], salience: Sequence[float], ids: Sequence[int], norms: Sequence[float],
    ends: Set[int], p: CrystalCacheParameters,
) -> None:
    """Append the segment, and run S5 and S6 with sink and window protected."""
    decode.add_segment(now, E, salience, ids, norms, ends, p)
    decode.evict(now, decode.in_windows(now, p), p)


def start(i: Json, p: CrystalCacheParameters) -> Results:
    """Return the state after the oracle's prefill. W is computed again from the edges of the prefill."""
    n = len(i["token_ids"])
    result = pipeline.prefill(
        i["q"], i["k"], i["token_ids"], set(i["sentence_ends"]), s6.tokens(i["budget"], n), p, i["scaling"], None
    )
    now = Model(budget_of(i["budget"]))
    extend(
        now, s1.edges(result.segment), result.segment.salience, i["token_ids"],
        [decode.inverse_norm(list(keys)) for keys in zip(*i["k"], strict=True)], set(i["sentence_ends"]), p,
    )
    return results_of(now)


def segment(i: Json, p: CrystalCacheParameters) -> Results:
    now = model_of(i)
    stored = [j for g in now.trunks for j in g.members] + list(range(now.seen - len(now.tail), now.seen))
    n = len(i["token_ids"])
    positions = [*stored, *range(now.seen, now.seen + n)]
    result = s1.coattention(i["q"], i["k"], positions, p, i["scaling"], None)
    norms = [decode.inverse_norm(list(keys)) for keys in zip(*i["k"], strict=True)][-n:]
    extend(
        now, s1.edges(result), result.salience, i["token_ids"], norms, set(i["sentence_ends"]), p
    )
    return results_of(now)


def seen_count(i: Json, p: CrystalCacheParameters) -> Results:
    """Return the numbers of seen tokens, counted one by one."""
    everything = [token for token, number in zip(i["ids"], i["counts"], strict=True) for _ in range(number)] + i["new"]
    ids = sorted(set(everything))
    return {"ids": ids, "counts": [everything.count(token) for token in ids],
            "c": [everything.count(token) for token in i["new"]]}


ORACLE = "conformance.oracles.decode."
HERE = "lab.vector_writer.expected_decode."
CC = "crystalcache."

OPERATIONS: dict[str, Operation] = {
    "CC-START": Operation(HERE + "extend", start),
    "CC-LIVE": Operation(ORACLE + "keep", changed(
        lambda now, i, p: decode.keep(now, {i["positions"][slot] for slot in i["slots"]}, i["D_after"])
    )),
    "CC-SEEN-COUNT": Operation(
        HERE + "seen_count", seen_count, reference=CC + "live.count_seen", gives=["ids", "counts", "c"],
    ),
    "CC-TAIL": Operation(
        ORACLE + "append", changed(lambda now, i, p: decode.append(now, i["token_id"], i["inverse_norm"])),
        reference=CC + "tail.append",
    ),
    "CC-TAIL-D": direct(ORACLE + "edgeless_D", "D", CC + "tail.edgeless_D"),
    "CC-CHUNK-TRUNKS": Operation(ORACLE + "join_chunk", changed(lambda now, i, p: decode.join_chunk(
        now, i["token_ids"], i["kept"], i["chunk_inverse_norms"], set(i["sentence_ends"]), p
    ))),
    "CC-TAIL-TRUNKS": Operation(
        ORACLE + "join_tail", changed(lambda now, i, p: decode.join_tail(now, set(i["sentence_ends"]), p)),
        reference=CC + "tail.join_tail",
    ),
    "CC-ETA": direct(ORACLE + "eta", "eta", CC + "activation.normalised_inverse_norms"),
    "CC-PULSE": Operation(ORACLE + "pulses", pulses, reference=CC + "resonance.pulses", gives=["pulse"]),
    "CC-RAISE": Operation(
        ORACLE + "raise_D",
        lambda i, p: {"D": [decode.raise_D(D, pulse, p) for D, pulse in zip(i["D"], i["pulse"], strict=True)]},
        reference=CC + "resonance.raised", gives=["D"],
    ),
    "CC-LIVE-PROTECTED": Operation(
        "conformance.oracles.s6.protected", lambda i, p: {"protected": s6.protected(
            [[i["positions"][slot] for slot in g] for g in trunk_lists(i["offsets"])], i["seen"], p.N_sink, p.W_recent
        )}, reference=CC + "breath.protected_trunks_of", gives=["protected"],
    ),
    "CC-BREATH-PROTECTED": Operation(
        ORACLE + "protected", lambda i, p: {"protected": decode.protected(model_of(i), p)},
        reference=CC + "breath.breath_protection", gives=["protected"],
    ),
    "CC-REEVICT": Operation(
        ORACLE + "evict", changed(lambda now, i, p: decode.evict(now, i["protected"], p)),
        reference=CC + "breath.evict",
    ),
    "CC-BREATH": Operation(
        ORACLE + "breath", lambda i, p: results_of(decode.breath(model_of(i), set(i["sentence_ends"]), p)),
        reference=CC + "breath.breath",
    ),
    "inverse_key_norms": Operation(ORACLE + "inverse_norm", key_norms, ["CC-KEY-NORM"]),
    "decay": Operation(
        ORACLE + "decay",
        lambda i, p: {"D": [decode.decay(D, M, p) for D, M in zip(i["D"], i["trunk_impact"], strict=True)]},
        ["CC-DECAY"],
    ),
    "activation": Operation(ORACLE + "active", activation, ["CC-ACTIVATION"]),
    "resonance": Operation(ORACLE + "resonance", resonance, ["CC-RESONANCE"]),
    "hebbian": Operation(ORACLE + "hebb", hebbian, ["CC-HEBB"]),
    "segment_graph": Operation("conformance.oracles.s4.trunk_weight", segment_graph, ["CC-SEGMENT-GRAPH"]),
    "segment_crystallization": Operation(ORACLE + "settle", segment_crystallization, ["CC-SEGMENT-D"]),
    "decode_step": Operation(
        ORACLE + "decode_step", lambda i, p: results_of(
            decode.decode_step(model_of(i), i["token_id"], i["inverse_norm"], set(i["sentence_ends"]), p)
        ), ["CC-STEP"],
    ),
    "extend": Operation(HERE + "extend", segment, ["CC-SEGMENT"]),
}
