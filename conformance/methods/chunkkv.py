"""ChunkKV by brute force: complete chunks, chosen by the sums of their tokens' scores."""

from conformance.methods.brute import C_CHUNK, Brute, W, newest, plain
from conformance.methods.policies import Score, accumulated, chunk_selection, last_rows, window
from conformance.oracles.boxes import column_sums
from conformance.strategies.policy_inputs import Inputs, Kept


def chunkkv(inputs: Inputs, B: int, c: int, W: int, N_reuse: int = 1, totals: str = "sum") -> Kept:
    """Return the kept sets by the attention of the last W queries.

    N_reuse layers use the kept set of their first layer.
    """
    result = []
    for at in range(len(inputs.layers)):
        layer = plain(inputs.layers[at - at % N_reuse])
        past, rows = window(layer, W), last_rows(layer, W)
        members: Score = list(column_sums([q for head in rows for q in head]))[:past]
        result.append(chunk_selection([*members, *[None] * (inputs.n - past)], c, B, totals))
    return result


def described(inputs: Inputs, B: int, c: int) -> Kept:
    """Return the kept sets by the attention of all queries, without a window."""
    rows = [accumulated(plain(view)) for view in inputs.layers]
    members = [list(column_sums(layer)) for layer in rows]
    return [chunk_selection(layer, c, B) for layer in members]


BRUTES = [
    Brute("PO-CHUNKKV", "chunkkv", chunkkv, {"c": C_CHUNK, "W": W, "N_reuse": 2}, W, newest,
          published={"c": 10, "W": 32, "N_reuse": 1}, readings={"totals": ("sum", "mean")}),  # kvpress uses the mean
    Brute("PO-CHUNKKV-DESCRIBED", "chunkkv-described", described, {"c": C_CHUNK}, published={"c": 10}),
]
