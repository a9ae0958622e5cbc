"""A small decode state in JSON, which vectors and tests begin from."""

from typing import Any

from conformance.vectors.json_values import Json

__all__ = ["CHAIN", "WAITING", "state"]

CHAIN: Json = {"indptr": [0, 1, 3, 4], "indices": [1, 0, 2, 1], "weights": [0.5, 0.5, 0.25, 0.25]}
# Three tokens in the tail, and what a state that holds them has seen.
WAITING = {"tail_ids": [3, 2, 5], "tail_inverse_norms": [0.5, float("inf"), 1.0], "seen": 14, "step": 3}


def state(**changes: Json) -> dict[str, Any]:
    """Three trunks of which 8 of 11 tokens live, in a chain of edges; nothing in the tail."""
    return {
        "budget": 8, "seen": 11, "step": 0, "positions": [0, 1, 2, 5, 6, 7, 9, 10], "offsets": [0, 3, 6, 8],
        "impact": [4.0, 1.0, 2.0, 3.0, 3.0, 1.0, 0.5, 8.0],
        "inverse_norms": [1.0, 0.25, 0.125, 1.0, 0.5, 0.125, 0.25, 0.25], "trunk_impact": [2.0, 3.0, 4.0],
        "D": [0.5, 0.25, 0.75], **CHAIN, "ids": [2, 3, 7], "counts": [2, 8, 1], "mu": 0.5, "sigma": 0.25,
        "tail_ids": [], "tail_inverse_norms": [], **changes,
    }
