"""The items of decode on the reference."""

from collections.abc import Mapping
from functools import partial

from conformance.vectors.arrays import Item, flags, floats, integers, named
from conformance.vectors.json_values import Json
from conformance.vectors.subject_decode import DECODE_STAGES, ends_of, fields_of, state_of, table_of, weights_of
from reference.backend import BACKEND
from reference.crystalcache import activation, breath, live, prefill, resonance, tail
from spec.budget import parse_budget
from spec.parameters import CrystalCacheParameters

__all__ = ["DECODE_BY_ITEM", "DECODE_ITEMS"]


def start(i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    q, k, ids = floats(i["q"]), floats(i["k"]), integers(i["token_ids"])
    found = prefill(q, k, ids, frozenset(i["sentence_ends"]), i["budget"], p, scaling=i["scaling"])
    budget = parse_budget(i["budget"])
    return fields_of(live.start_state(found, ids, activation.inverse_key_norms(k), budget, p))


DECODE_ITEMS: dict[str, Item] = {
    "CC-START": start,
    "CC-LIVE": lambda i, p: fields_of(live.keep(state_of(i), integers(i["slots"]), floats(i["D_after"]))),
    "CC-SEEN-COUNT": lambda i, p: named(
        ["ids", "counts", "c"], live.count_seen(integers(i["ids"]), integers(i["counts"]), integers(i["new"]))
    ),
    "CC-TAIL": lambda i, p: fields_of(tail.append(state_of(i), i["token_id"], i["inverse_norm"])),
    "CC-TAIL-D": lambda i, p: {"D": tail.edgeless_D(i["mu"], i["sigma"], p)},
    "CC-TAIL-TRUNKS": lambda i, p: fields_of(tail.join_tail(state_of(i), ends_of(i), p, BACKEND)),
    "CC-CHUNK-TRUNKS": lambda i, p: fields_of(tail.join_chunk(
        state_of(i), integers(i["token_ids"]), integers(i["kept"]), floats(i["chunk_inverse_norms"]), ends_of(i), p,
        BACKEND,
    )),
    "CC-ETA": lambda i, p: {"eta": activation.normalised_inverse_norms(floats(i["inverse_norms"]))},
    "CC-PULSE": lambda i, p: {"pulse": resonance.pulses(i["source"], weights_of(i), p)},
    "CC-RAISE": lambda i, p: {"D": resonance.raised(floats(i["D"]), floats(i["pulse"]), p.alpha_res)},
    "CC-LIVE-PROTECTED": lambda i, p: {
        "protected": breath.protected_trunks_of(table_of(i), i["seen"], p.N_sink, p.W_recent)
    },
    "CC-BREATH-PROTECTED": lambda i, p: {"protected": breath.breath_protection(state_of(i), p)},
    "CC-REEVICT": lambda i, p: fields_of(breath.evict(state_of(i), flags(i["protected"]), p, BACKEND)),
    "CC-BREATH": lambda i, p: fields_of(breath.breath(state_of(i), ends_of(i), p, BACKEND)),
}

_BY_STAGE = {
    "CC-KEY-NORM": "inverse_key_norms", "CC-DECAY": "decay", "CC-ACTIVATION": "activation",
    "CC-RESONANCE": "resonance", "CC-HEBB": "hebbian", "CC-SEGMENT-GRAPH": "segment_graph",
    "CC-SEGMENT-D": "segment_crystallization", "CC-STEP": "decode_step", "CC-SEGMENT": "extend",
}
# Every item on the reference, those that are a stage's too.
DECODE_BY_ITEM: dict[str, Item] = {
    **DECODE_ITEMS,
    **{item: partial(DECODE_STAGES[stage], BACKEND) for item, stage in _BY_STAGE.items()},
}
