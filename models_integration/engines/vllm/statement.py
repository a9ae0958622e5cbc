"""Statement about a request: what was asked, which tokens were kept, and a digest of all decisions so far."""

import hashlib
import json
from typing import Any

import numpy as np

from models_integration.engines.vllm.arguments import RequestPolicy
from spec.arrays import IntMatrix, IntVector
from spec.retention import Granularity

__all__ = ["decision", "kept_positions", "statement", "summary"]


def ranges(positions: IntVector) -> list[list[int]]:
    """Return the ranges [first, end) of ascending positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [[int(part[0]), int(part[-1]) + 1] for part in np.split(positions, breaks) if len(part)]


def kept_positions(kept: dict[str, Any]) -> list[list[list[int]]]:
    """Return the kept positions of each layer and KV head from the entry `kept` of a decision."""
    sets = [[at for first, end in one for at in range(first, end)] for one in kept["sets"]]
    return [[sets[one] for one in layer] for layer in kept["set_of"]]


def decision(
    seen: int, live: IntMatrix, granularity: Granularity, layers: int, heads: int, before: str,
) -> dict[str, Any]:
    """Return the entry of a statement about one decision.

    Args:
        seen: number of tokens that the model has processed.
        live: kept positions of each set, (g, k).
        granularity: part of the model that has a separate set.
        layers: number of layers.
        heads: number of KV heads of a layer.
        before: digest of the decision before, or "".
    """
    each = {Granularity.MODEL: (0, 0), Granularity.LAYER: (1, 0), Granularity.HEAD: (heads, 1)}[granularity]
    distinct = dict[tuple[Any, ...], int]()
    index = [distinct.setdefault(tuple(map(tuple, ranges(row))), len(distinct)) for row in live]
    kept = {
        "sets": [[[*part] for part in one] for one in distinct],
        "set_of": [[index[layer * each[0] + head * each[1]] for head in range(heads)] for layer in range(layers)],
    }
    content = json.dumps([before, seen, kept], separators=(",", ":"))
    digest = hashlib.sha256(content.encode("ascii")).hexdigest()
    return {"seen": seen, "kept_tokens": live.shape[1], "digest": digest, "kept": kept}


def summary(one: dict[str, Any]) -> dict[str, Any]:
    """Return a decision without its sets."""
    return {key: value for key, value in one.items() if key != "kept"}


def statement(
    asked: RequestPolicy | None, reason: str | None, decisions: list[dict[str, Any]], evicted: int, seen: int,
) -> dict[str, Any]:
    """Return the statement about a request.

    Args:
        asked: policy of the request, or None.
        reason: why the cache is full, or None.
        decisions: decisions so far: the first, and the last or all.
        evicted: number of tokens that each set lacks.
        seen: number of tokens that the model has processed.
    """
    found: dict[str, Any] = {"policy": "fullcache" if asked is None else asked.name, "positions": "kept", "seen": seen}
    if asked is not None:
        constants = {key: value for key, value in asked.constants.items() if isinstance(value, (int, float, str))}
        found |= {"budget": str(asked.budget), "constants": constants}
    found |= {"evicted_tokens": evicted, "decisions": decisions}
    return found if reason is None else {**found, "reason": reason}
