"""Compaction of layers. The changes of all layers are computed before any layer changes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import Plan
from models_integration.cache.ragged_layer import RaggedLayer
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["Change", "change_of_layer", "check_seen", "kept_by_layer", "sets_agree", "shared_changes"]

Change: TypeAlias = Callable[[], RetainedLayer]
"""Prepared compaction of one layer. A call compacts the layer, and returns the layer that replaces it."""


def check_seen(layer: RetainedLayer, retentions: Sequence[Retention], padding: Tensor | None) -> None:
    """Check that the retention of each row is for the number of tokens that the row has seen."""
    tokens = layer.next_positions(1)[:, 0] if padding is None else layer.get_seq_length() - padding
    for row, retention in enumerate(retentions):
        seen = int(tokens[min(row, len(tokens) - 1)])
        if retention.seen != seen:
            raise SpecError("retention", f"{retention.seen} tokens", f"must cover all {seen} tokens seen by the cache")


def shared_changes(
    layers: Mapping[int, RetainedLayer], retentions: Sequence[Retention], padding: Tensor | None,
) -> dict[int, Change]:
    """Return the changes of all layers to one set of kept tokens per row. Layers with equal positions share a plan."""
    kept = [torch.tensor(retention.positions, dtype=torch.int64, device="cpu") for retention in retentions]
    if padding is None and sets_agree(kept):
        kept = kept[:1]
    changes, plan = dict[int, Change](), None
    for index, layer in layers.items():
        assert isinstance(layer, DenseLayer)
        if plan is None or not plan.fits(layer.rows, layer.stored_length):
            plan = layer.plan(*kept, padding=padding)
        changes[index] = partial(_followed, layer, plan)
    return changes


def change_of_layer(layer: RetainedLayer, kept: list[list[Tensor]], padding: Tensor | None) -> Change:
    """Return the change after which row r and head h store kept[r][h]. If heads agree, the layer stays dense."""
    if isinstance(layer, RaggedLayer):
        return layer.plan_keep(kept)
    assert isinstance(layer, DenseLayer)
    rows = kept * layer.batch if len(kept) == 1 else kept
    if not all(map(sets_agree, rows)):
        return RaggedLayer.plan_split(layer, rows, padding)
    shared = padding is None and layer.rows.shared and sets_agree(heads[0] for heads in rows)
    plan = layer.plan(*(heads[0] for heads in (rows[:1] if shared else rows)), padding=padding)
    return partial(_followed, layer, plan)


def _followed(layer: DenseLayer, plan: Plan) -> DenseLayer:
    layer.follow(plan)
    return layer


def kept_by_layer(
    retention: Retention, full: Sequence[int], chosen: Sequence[int], heads: int,
) -> dict[int, list[Tensor]]:
    """Return the kept positions of all (or the chosen) layers by index of the full-attention layer, then KV head."""
    positions = torch.tensor(retention.positions, dtype=torch.int64, device="cpu")
    sets = list(positions.tensor_split(torch.from_numpy(retention.offsets[1:-1])))
    if retention.granularity is not Granularity.HEAD:
        sets = [positions for positions in sets for _ in range(heads * (1 if retention.groups > 1 else len(full)))]
    if len(sets) == heads * len(chosen):
        full = chosen
    if len(sets) != heads * len(full):
        expected = f"must have a group for each of {len(full)} layers, or for each of their {heads} KV heads"
        raise SpecError("retention", f"{retention.groups} groups", expected)
    return {index: sets[heads * ordinal : heads * (ordinal + 1)] for ordinal, index in enumerate(full)}


def sets_agree(sets: Iterable[Tensor]) -> bool:
    """Return True if all sets of kept tokens are equal."""
    first, *others = sets
    return all(other is first or torch.equal(first, other) for other in others)
