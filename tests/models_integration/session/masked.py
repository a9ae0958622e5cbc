"""Oracle of the law "eviction equals masking": one forward pass over all tokens of a row for every question.

Each query of each full-attention layer and KV head attends to the tokens that were stored when the query was read. The
oracle does not use the storage of a cache. `Masked` decodes from one full cache instead. It is for tests of one prompt
and the tokens that follow.
"""

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from conformance.cache_suite import oracle
from spec.retention import Granularity, Retention

Sets = list[list[list[int]]]
"""Stored positions of one row, by full-attention layer and KV head."""
HeadSets = Mapping[int, Sequence[Sequence[int]]]
"""Kept positions by layer index, one sequence for each KV head."""


def head_sets(kept: Retention, layers: Sequence[int], heads: int) -> dict[int, list[list[int]]]:
    """Return the kept positions of each layer and KV head, at any granularity."""
    each = {Granularity.MODEL: (0, 0), Granularity.LAYER: (1, 0), Granularity.HEAD: (heads, 1)}
    per_layer, apart = each[kept.granularity]
    return {
        layer: [kept.group(at * per_layer + head * apart).tolist() for head in range(heads)]
        for at, layer in enumerate(layers)
    }


@dataclass(frozen=True)
class Row:
    """Tokens of a row, and the positions that each query attended to, (layers, H_kv, n, n)."""

    tokens: tuple[int, ...]
    seen: Tensor

    def read(self, tokens: Iterable[int], stored: Sets | None = None) -> "Row":
        """Return the row after a forward pass over new tokens.

        Each new token attends to the stored positions, to the new tokens before it, and to itself. If the new tokens
        are a chunk that was computed elsewhere, `stored` is None.
        """
        new = tuple(tokens)
        before, n = len(self.tokens), len(new)
        seen = torch.nn.functional.pad(self.seen, (0, n, 0, n))
        seen[:, :, before:, before:] = torch.ones(n, n, dtype=torch.bool).tril()
        for layer, sets in enumerate(stored or ()):
            for head, positions in enumerate(sets):
                seen[layer, head, before:, positions] = True
        return Row(self.tokens + new, seen)

    def cropped(self, n: int) -> "Row":
        """Return the row without the last n tokens."""
        left = len(self.tokens) - n
        return Row(self.tokens[:left], self.seen[:, :, :left, :left])


class Expected(NamedTuple):
    """Result of the masked model for a row: logits (n, vocabulary), and keys and values of all positions."""

    logits: Tensor
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each full-attention layer, each (H_kv, n, d)."""


class MaskedModel:
    """Copy of the model with a mask for each head in full-attention layers, and sliding windows in all other layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model)
        config = model.config
        self.full = oracle.full_layers(model)
        self.heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self._row, self._asked = self.nothing, 0
        self._known: deque[tuple[Row, Expected]] = deque(maxlen=4)
        for module in self._model.modules():
            if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(self._before, with_kwargs=True)

    @property
    def nothing(self) -> Row:
        """Row without tokens."""
        return Row((), torch.zeros(len(self.full), self.heads, 0, 0, dtype=torch.bool))

    def expect(self, row: Row) -> Expected:
        """Return the result of one forward pass over all tokens of the row.

        Each result is needed twice, so the last results are cached.
        """
        for known, expected in self._known:
            if known is row:
                return expected
        self._row, self._asked, cache = row, 0, DynamicCache()
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor([row.tokens]), position_ids=torch.arange(len(row.tokens))[None],
                past_key_values=cache,
            )
        assert self._asked == self._model.config.num_hidden_layers
        layers: list[Any] = [cache.layers[layer] for layer in self.full]
        expected = Expected(output.logits[0], [(layer.keys[0], layer.values[0]) for layer in layers])
        self._known.append((row, expected))
        return expected

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._asked += 1
        index, heads = int(module.layer_idx), self._model.config.num_attention_heads  # type: ignore[arg-type]
        if index in self.full:
            mask = self._row.seen[self.full.index(index)].repeat_interleave(heads // self.heads, dim=0)
        else:
            causal = torch.ones(2 * [len(self._row.tokens)], dtype=torch.bool).tril()
            mask = (causal & causal.tril(-self._model.config.sliding_window).logical_not())[None]
        if self._model.config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        assert "attention_mask" in kwargs
        return args, {**kwargs, "attention_mask": mask[None]}


class Masked(oracle.Masked):
    """Oracle of the suite after one prompt.

    Args:
        model: model whose copy reads the tokens.
        input_ids: the prompt.
        kept: positions of the prompt that each KV head of each layer still attends to, or one set for all heads.
    """

    def __init__(self, model: PreTrainedModel, input_ids: Tensor, kept: HeadSets | Sequence[int]) -> None:
        super().__init__(model)
        self.prompt_logits = self.read(input_ids)
        self.keep([kept[layer] if isinstance(kept, Mapping) else [kept] for layer in self.visible])

    def greedy(self, new: int) -> list[int]:
        """Return greedy tokens: the first from the uncompacted prompt, all later tokens through the mask."""
        token = self.prompt_logits[:, -1:].argmax(-1)
        chosen = [int(token)]
        while len(chosen) < new:
            token = self.read(token)[:, -1:].argmax(-1)
            chosen.append(int(token))
        return chosen
