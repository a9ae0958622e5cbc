"""MorphKV: wrong readings of the recent queries."""

from typing import Any

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of
from conformance.assurance.saboteurs.size_inputs import view
from reference.policies.attention import observed_attention
from reference.policies.morphkv import morphkv_score
from reference.policies.scorers import with_window

__all__: list[str] = []


@instead_of(morphkv_score, "PO-MORPHKV")
def the_other_fusion(shown: Any, W: int, fusion: str) -> Any:
    """Sum and maximum change places."""
    return morphkv_score(shown, W, "max" if fusion == "sum" else "sum")


@instead_of(morphkv_score, "PO-MORPHKV")
def the_newest_query_alone(shown: Any, W: int, fusion: str) -> Any:
    """The last query scores all keys before the window."""
    A = observed_attention(shown, 1)
    n = A.shape[2]
    past = A[:, 0, : n - min(W, shown.q.shape[1])]
    return with_window(past.reshape(len(shown.k), -1, past.shape[1]).mean(axis=1), n)


@instead_of(morphkv_score, "PO-MORPHKV")
def best_query_head(shown: Any, W: int, fusion: str) -> Any:
    """A group asks as its best query head does."""
    A = observed_attention(shown, W)
    past = A[:, :, : A.shape[2] - A.shape[1]]
    fused = past.sum(axis=1) if fusion == "sum" else past.max(axis=1)
    return with_window(fused.reshape(len(shown.k), -1, fused.shape[1]).max(axis=1), A.shape[2])


@beyond("windows of 32", morphkv_score, "PO-MORPHKV", lambda: (view(90), 40, "sum"))
def recent_queries_up_to_32(shown: Any, W: int, fusion: str) -> Array:
    """The newest 32 queries score; the window's other tokens are kept."""
    scores = morphkv_score(shown, min(W, 32), fusion)
    scores[:, max(0, scores.shape[1] - W) :] = float("nan")
    return scores
