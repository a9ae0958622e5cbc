"""ChunkKV keeps or evicts whole chunks of consecutive tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reference.policies.attention import observed_attention, received_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import Received, check_positive, stacked, with_window
from reference.policies.selectors import fill_units
from spec.arrays import BoolVector, Float64, Int64, IntVector, Matrix, Vector
from spec.backend import Backend, resolve
from spec.composition import LAYER_SETS, Provided
from spec.policy import LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["Chunks", "chunk_offsets", "chunk_scores", "chunkkv", "chunkkv_described"]


def chunk_offsets(past: int, n: int, c: int) -> Int64[IntVector, " m_and_one"]:
    """Return the offsets of chunks of c tokens from position 0 to `past`, and of one unit with all later tokens.

    The last chunk before `past` may have fewer than c tokens.

    Implements: PO-CHUNKKV
    """
    return np.array([*range(0, past, c), *([past] if past < n else []), n], dtype=np.int64)


def chunk_scores(members: Float64[Vector, " n"], offsets: Int64[IntVector, " m_and_one"]) -> Float64[Vector, " m"]:
    """Return the score of each chunk: the sum of the scores of its tokens.

    Implements: PO-CHUNKKV

    Source: Algorithm 1 of ChunkKV, and Eq. 6 of CrystalCache.
    """
    total: Vector = np.add.reduceat(members, offsets[:-1])
    return total


@dataclass(frozen=True)
class Chunks:
    """Scorer of chunks. All layers in a run of N_reuse consecutive layers use the scores of the run's first layer."""

    needs: Needs
    members: Callable[[LayerView], Matrix]
    c: int
    W: int
    N_reuse: int

    @property
    def separable(self) -> bool:
        """Return True if no layer reuses the scores of a different layer, that is, if N_reuse is 1."""
        return self.N_reuse == 1

    layerwise = separable

    @property
    def provided(self) -> Provided:
        return Provided("chunks", LAYER_SETS, (0, self.W))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Return the scores of each layer's chunks and tokens.

        Implements: PO-CHUNKKV
        """
        rows = [self.members(view) for view in observation.layers.values()]
        members = stacked(observation, [rows[layer - layer % self.N_reuse] for layer in range(len(rows))]).values
        n = members.shape[1]
        offsets = chunk_offsets(max(0, n - self.W), n, self.c)
        return Scores(np.array([chunk_scores(row, offsets) for row in members]), offsets, members)


def window_members(view: LayerView, W: int) -> Float64[Matrix, "one n"]:
    """Return the attention of the last W queries on each key, summed over these queries and all heads of the layer."""
    A = observed_attention(view, W)
    return with_window(A[:, :, : A.shape[2] - A.shape[1]].sum(axis=(0, 1))[None], A.shape[2])


def all_members(view: LayerView, received: Received = received_attention) -> Float64[Matrix, "one n"]:
    """Return the attention of all queries on each key, summed over the queries and all heads of the layer."""
    total: Matrix = received(view.q, view.k, view.scaling, view.softcap, view.sinks).sum(axis=0, keepdims=True)
    return total


@named(
    "chunkkv", "Liu et al., ChunkKV (arXiv 2502.00299)",
    "chunks of tokens with the largest sums of attention from the last queries", diverse=False, blocks=False,
)
def chunkkv(c: int = 10, W: int = 32, N_reuse: int = 1) -> Policy:
    """Return ChunkKV: each layer keeps the last W tokens and the chunks with the largest sums of attention.

    The budget B includes the window. If the last selected chunk does not fit into B, the policy keeps only the best
    tokens of this chunk. Chunks begin at position 0 and end before the window. If the last chunk is shorter than c
    tokens, the chunk's sum is not corrected for the length.

    The paper keeps only whole chunks. With N_reuse > 1 the policy uses the paper's layer-wise index reuse. kvpress has
    a version of ChunkKV by the paper's author, with c = 20 and without index reuse. The kvpress version averages the
    token scores of a chunk, and counts the budget in chunks.

    Raises:
        SpecError: if c, W or N_reuse is not positive.
    """
    check_positive("N_reuse", N_reuse)
    W = check_positive("W", W)
    scorer = Chunks(Needs("all", W), partial(window_members, W=W), check_positive("c", c), W, N_reuse)
    return Policy(
        "chunkkv", scorer, even, fill_units, SinkAndRecent(0, W), granularity=Granularity.LAYER
    )


@named(
    "chunkkv-described", "Lin, CrystalCache, Eq. 6",
    "chunks of tokens with the largest sums of attention from all queries", diverse=False, blocks=False,
)
def chunkkv_described(c: int = 10, backend: str | Backend = "numpy") -> Policy:
    """Return ChunkKV as described in the CrystalCache paper (Eq. 6): scores from all queries' attention, and no window.

    The scores are summed over the heads of a layer. If the last selected chunk does not fit into the budget, the policy
    keeps only the best tokens of this chunk.

    Implements: PO-CHUNKKV-DESCRIBED

    Raises:
        SpecError: if c is not positive, or if the backend is unknown.
        BackendUnavailable: as in `h2o`.
    """
    engine = resolve(backend)
    members = partial(all_members, received=engine.require_policies().received_attention)
    scorer = Chunks(Needs("all", None, accepts_tensor=engine.accepts_tensor), members, check_positive("c", c), 0, 1)
    return replace(
        chunkkv(c), name="chunkkv-described", scorer=scorer, protection=SinkAndRecent(0, 0)
    )
