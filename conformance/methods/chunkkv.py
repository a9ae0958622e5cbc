"""ChunkKV by brute force: complete chunks, chosen by the sums of their tokens' scores."""

from conformance.methods.brute import C_CHUNK, SLOW, Brute, Parts, W, newest, plain
from conformance.methods.policies import Layer, Score, accumulated, chunk_selection, last_rows, window
from conformance.oracles.boxes import column_sums
from conformance.strategies.policy_inputs import Inputs, Kept


def members(inputs: Inputs, B: int, W: int, N_reuse: int = 1) -> list[Score]:
    """Return the attention of the last W queries. N_reuse layers use the scores of their first layer."""
    result = []
    for at in range(len(inputs.layers)):
        layer = plain(inputs.layers[at - at % N_reuse])
        past, rows = window(layer, W), last_rows(layer, W)
        received: Score = list(column_sums([q for head in rows for q in head]))[:past]
        result.append([*received, *[None] * (inputs.n - past)])
    return result


def chunkkv(inputs: Inputs, B: int, c: int, W: int, N_reuse: int = 1, totals: str = "sum") -> Kept:
    """Return the kept sets by the attention of the last W queries."""
    return [chunk_selection(row, c, B, totals) for row in members(inputs, B, W, N_reuse)]


def described(inputs: Inputs, B: int, c: int) -> Kept:
    """Return the kept sets by the attention of all queries, without a window."""
    return [chunk_selection(row, c, B) for view in inputs.layers for row in all_members(plain(view))]


def all_members(layer: Layer) -> list[Score]:
    return [list(column_sums(accumulated(layer)))]


BRUTES = [
    Brute("PO-CHUNKKV", "chunkkv", chunkkv, {"c": C_CHUNK, "W": W, "N_reuse": 2}, W, newest,
          published={"c": 10, "W": 32, "N_reuse": 1}, readings={"totals": ("sum", "mean")},  # kvpress uses the mean
          parts=Parts("recent=W", rows=members, chunks=True)),
    Brute("PO-CHUNKKV-DESCRIBED", "chunkkv-described", described, {"c": C_CHUNK}, published={"c": 10},
          parts=Parts("", all_members, chunks=True), longest=SLOW),
]
