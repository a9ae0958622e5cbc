"""Rows of one batch that keep different counts: the layout that padded batches will have, made by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import METHODS, at_once, prompt
from models_integration import RetainedCache, prefill
from models_integration.attention.capture import observing
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.positions import EMPTY, StoredRows
from models_integration.model.architecture import describe

__all__ = ["TwoRows", "two_rows"]


@dataclass(frozen=True)
class TwoRows:
    """Two compacted prompts side by side, and what each says alone about the tokens that follow."""

    model: PreTrainedModel
    cache: RetainedCache
    seen: tuple[int, int]
    following: Tensor
    alone: Tensor

    def together(self, input_ids: Tensor, *, padding: bool) -> Tensor:
        """Logits of both rows in one forward per call; `padding` also passes the 2D mask of the padded batch."""
        columns, q = self.cache.get_seq_length(), input_ids.shape[1]
        grown = columns - max(self.seen)
        positions = torch.stack([torch.arange(seen + grown, seen + grown + q) for seen in self.seen])
        mask = torch.ones(2, columns + q, dtype=torch.int64)
        for row, seen in enumerate(self.seen):
            mask[row, : max(self.seen) - seen] = 0
        options = {"attention_mask": mask} if padding else {}
        with observing(describe(self.model), self.cache):
            return at_once(self.model, input_ids, self.cache, position_ids=positions, **options)


def two_rows(model: PreTrainedModel) -> TwoRows:
    """Left-padded prompts of two lengths, each compacted alone, then laid into one cache."""
    lengths = 61, 44
    prompts = [prompt(n, seed=20 + n) for n in lengths]
    following = torch.cat([prompt(6, seed=31), prompt(6, seed=32)])
    singles = [prefill(model, METHODS["crystalcache"](), ids).cache for ids in prompts]
    cache = RetainedCache(model.config)
    width = max(single.stored_length for single in singles)
    kept = torch.stack([_left(single.stored_positions(), width, 0, EMPTY) for single in singles])
    for layer, *sources in zip(cache.full_layers, *(single.full_layers for single in singles), strict=True):
        keys = torch.cat([_left(source.keys, width, 2, 7.0) for source in sources])
        values = torch.cat([_left(source.values, width, 2, 7.0) for source in sources])
        assert isinstance(layer, DenseLayer)
        layer.restore(keys, values, StoredRows(kept, torch.tensor(lengths)), max(lengths) - width)
    alone = torch.cat([at_once(model, following[row : row + 1], single) for row, single in enumerate(singles)])
    return TwoRows(model, cache, lengths, following, alone)


def _left(tensor: Tensor | None, width: int, axis: int, fill: float) -> Tensor:
    assert tensor is not None
    shape = list(tensor.shape)
    shape[axis] = width - shape[axis]
    return torch.cat([torch.full(shape, fill, dtype=tensor.dtype), tensor], dim=axis)
