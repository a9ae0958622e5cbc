"""ChunkKV by brute force: whole chunks by the sums of their tokens."""

from conformance.assurance.brute import C_CHUNK, Brute, W, newest, plain, seeded
from conformance.assurance.oracles.policies import Score, accumulated, chunk_selection, last_rows, window
from conformance.assurance.vector_writer.case import Case
from conformance.strategies.policy_inputs import Inputs, Kept

__all__ = ["BRUTES", "chunkkv", "described"]


def chunkkv(inputs: Inputs, B: int, c: int, W: int, N_reuse: int = 1) -> Kept:
    """By the attention of the last W queries; N_reuse layers have the set of their first."""
    found = []
    for at in range(len(inputs.layers)):
        layer = plain(inputs.layers[at - at % N_reuse])
        past, rows = window(layer, W), last_rows(layer, W)
        members: Score = [sum(q[i] for head in rows for q in head) for i in range(past)]
        found.append(chunk_selection([*members, *[None] * (inputs.n - past)], c, B))
    return found


def described(inputs: Inputs, B: int, c: int) -> Kept:
    """By the attention of all queries, without a window."""
    rows = [accumulated(plain(view)) for view in inputs.layers]
    members = [[sum(r for r in column if r is not None) for column in zip(*layer, strict=True)] for layer in rows]
    return [chunk_selection(layer, c, B) for layer in members]


BRUTES = [
    Brute("PO-CHUNKKV", "chunkkv", chunkkv, {"c": C_CHUNK, "W": W, "N_reuse": 2}, W, newest,
          published={"c": 10, "W": 32, "N_reuse": 1}, vectors=[
        Case(160, "chunks of three before a window of two", ["PartialKeepsBest"],
             {**seeded(6), "B": 6, "c": 3, "W": 2}),
        Case(336, "the third chunk ends at the window", ["PartialKeepsBest"],
             {**seeded(40, n=17), "B": 8, "c": 3, "W": 3}),
        Case(337, "two layers, a last chunk of one", ["PartialKeepsBest"],
             {**seeded(40, n=19, L=2), "B": 9, "c": 4, "W": 2}),
    ]),
    Brute("PO-CHUNKKV-DESCRIBED", "chunkkv-described", described, {"c": C_CHUNK}, published={"c": 10}, vectors=[
        Case(161, "chunks of three", ["PartialKeepsBest"], {**seeded(6), "B": 5, "c": 3}),
        Case(338, "a last chunk of two", ["PartialKeepsBest"], {**seeded(40, n=17), "B": 7, "c": 3}),
        Case(339, "two layers", ["PartialKeepsBest"], {**seeded(40, n=19, L=2), "B": 9, "c": 4}),
    ]),
]
