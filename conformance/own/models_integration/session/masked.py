"""Eviction equals masking, computed anew for every question: one forward over all that a row has read.

Each query of each full-attention layer and KV head sees what was stored when it was read. Nothing here knows how a
cache stores it. `Masked` decodes from one full cache instead: for tests of one prompt and what follows.
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
    """The kept positions of each layer and KV head, at any granularity."""
    each = {Granularity.MODEL: (0, 0), Granularity.LAYER: (1, 0), Granularity.HEAD: (heads, 1)}
    own, apart = each[kept.granularity]
    return {
        layer: [kept.group(at * own + head * apart).tolist() for head in range(heads)]
        for at, layer in enumerate(layers)
    }


@dataclass(frozen=True)
class Row:
    """What one row has read, and which positions each of its queries saw, (layers, H_kv, n, n)."""

    tokens: tuple[int, ...]
    seen: Tensor

    def read(self, tokens: Iterable[int], stored: Sets | None = None) -> "Row":
        """These come next, in one forward: each sees what is stored, and those before it. Of a chunk that was computed
        elsewhere nothing is stored.
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
        """Without the last n tokens."""
        left = len(self.tokens) - n
        return Row(self.tokens[:left], self.seen[:, :, :left, :left])


class Expected(NamedTuple):
    """What the masked model computes of a row: logits (n, vocabulary), and keys and values of all its positions."""

    logits: Tensor
    layers: list[tuple[Tensor, Tensor]]
    """By full-attention layer, each (H_kv, n, d)."""


class MaskedModel:
    """A copy of the model whose full-attention layers are handed a mask for each head, and the others their window."""

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
        """A row that has read nothing."""
        return Row((), torch.zeros(len(self.full), self.heads, 0, 0, dtype=torch.bool))

    def expect(self, row: Row) -> Expected:
        """One forward over all that the row has read. Rows are asked about twice: the last answers are kept."""
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
    """The suite's oracle after one prompt.

    Args:
        model: A copy of it reads.
        input_ids: the prompt.
        kept: what the KV heads of each layer still see of it, or one set for all.
    """

    def __init__(self, model: PreTrainedModel, input_ids: Tensor, kept: HeadSets | Sequence[int]) -> None:
        super().__init__(model)
        self.prompt_logits = self.read(input_ids)
        self.keep([kept[layer] if isinstance(kept, Mapping) else [kept] for layer in self.visible])

    def greedy(self, new: int) -> list[int]:
        """The first token from the uncompacted prompt, the others through the mask."""
        token = self.prompt_logits[:, -1:].argmax(-1)
        chosen = [int(token)]
        while len(chosen) < new:
            token = self.read(token)[:, -1:].argmax(-1)
            chosen.append(int(token))
        return chosen
