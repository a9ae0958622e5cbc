"""CrystalCache's edges by hashing (Section 7.3): `python -m conformance.measure.lsh --model smollm2`.

Random hyperplanes hash the queries and keys of each head. A query and a key of one code are a pair of tokens to read.
An edge between chunks is found if its pair is read. Prints the share of pairs, the edges that were found, and how alike
the kept sets with all edges and with those edges are.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from conformance.measure.repeat import recorded
from models_integration.studies.subject import Loading
from models_integration.tasks.prose import read_prose
from reference import crystalcache
from reference.backend import BACKEND
from spec.arrays import BoolMatrix, Cube, IntVector
from spec.backend import CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention


def colliding(q: Cube, k: Cube, bits: int, tables: int, rng: np.random.Generator) -> BoolMatrix:
    """Whether query i (H, n, d) and key j (H_kv, n, d) have one code of `bits` bits in a head and a table, (n, n)."""
    pairs, groups = np.zeros((q.shape[1], k.shape[1]), dtype=bool), len(q) // len(k)
    for head, rows in enumerate(q):
        for planes in rng.standard_normal((tables, q.shape[2], bits)):
            of_q, of_k = ((x @ planes > 0) @ (1 << np.arange(bits)) for x in (rows, k[head // groups]))
            pairs |= of_q[:, None] == of_k
    return np.tril(pairs)


class Hashed(type(BACKEND.require_crystal())):  # type: ignore[misc]
    """The reference without the edges between chunks that hashing does not find; counts both."""

    def __init__(self, bits: int, tables: int) -> None:
        """Of `tables` tables of codes of `bits` bits."""
        self.bits, self.tables, self.pairs, self.found, self.edges = bits, tables, 0.0, 0, 0

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters, *rest: Any,
    ) -> CoAttention:
        """S1, and then the loss of edges."""
        exact = BACKEND.require_crystal().coattention(q, k, positions, parameters, *rest)
        seen = colliding(q, k, self.bits, self.tables, np.random.default_rng(0))
        there = exact.cross >= 0
        lost = there & ~np.take_along_axis(seen, np.where(there, exact.cross, 0), axis=1)
        self.edges, self.found = int(there.sum()), int(there.sum() - lost.sum())
        self.pairs = seen.sum() / np.tril(np.ones_like(seen)).sum()
        return replace(
            exact, cross=np.where(lost, -1, exact.cross), cross_weight=np.where(lost, 0, exact.cross_weight)
        )


def main() -> None:
    """Print a line for each number of bits and tables."""
    parser = argparse.ArgumentParser(prog="python -m conformance.measure.lsh", description=__doc__)
    parser.add_argument("--model", default="pocket", help="model as in `kvspec compare` (default pocket)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of shipped prose (default 4096)")
    parser.add_argument("--budget", default="30%", help="budget of the compared sets (default 30%%)")
    given = parser.parse_args()
    subject = Loading(given.model, dtype="float32").subject()
    ids = np.asarray(read_prose(subject.tokenizer).tokens[: given.tokens])
    view = recorded(subject.model, torch.tensor(ids[None])).layers[0]

    def kept(stages: CrystalStages | None) -> set[int]:
        backend = replace(BACKEND, crystal=stages)
        result = crystalcache.prefill(
            view.q, view.k, ids, subject.sentence_ends, given.budget, PAPER, backend, scaling=view.scaling
        )
        return set(result.retention.kept.tolist())

    exact = kept(BACKEND.crystal)
    print(f"{'bits':>4} {'tables':>6} {'pairs read':>10} {'edges found':>11} {'Jaccard of kept sets':>20}")
    for bits in (4, 8, 12):
        for tables in (1, 4, 16):
            stages = Hashed(bits, tables)
            own = kept(stages)
            alike = len(exact & own) / len(exact | own)
            edges = f"{stages.found} of {stages.edges}"
            print(f"{bits:4} {tables:6} {stages.pairs:10.0%} {edges:>11} {alike:20.2f}", flush=True)


if __name__ == "__main__":
    main()
