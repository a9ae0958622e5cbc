"""Oracle of eviction: a model with a full cache of transformers, whose attention masks the evicted tokens.

The oracle shares no code with the cache under test. A copy of the model writes to a plain DynamicCache. The attention
function of the oracle adds a mask by layer and KV head to the mask of the model, for any family. For caches that
renumber, the attention function also rotates the keys to their renumbered positions.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["Masked", "PositionRule", "UnknownRotation", "check_rotation", "frequencies", "full_layers"]

Sets = Sequence[Sequence[Sequence[int]]]
"""Visible positions by full-attention layer, one set or one for each KV head."""
Snapshot = tuple[DynamicCache, int, dict[int, Tensor]]
"""Cache, number of tokens and visible tokens by layer, from `Masked.snapshot`."""

# Visible positions of each attention module of a copy, (sets, seen).
_VISIBLE: dict[nn.Module, Tensor] = {}
# Rotary frequencies and position rule of each module that renumbers.
_RENUMBERED: dict[nn.Module, tuple[Tensor, "PositionRule"]] = {}
# Number of calls of each module in the forward pass.
_CALLS: dict[nn.Module, int] = {}


# These layers store all tokens, some also a state, or the keys of an indexer.
_WHOLE = ("full_attention", "hybrid", "indexed_attention")


def full_layers(model: PreTrainedModel) -> list[int]:
    """Return the indices of the layers that store all tokens, according to the configuration."""
    return sorted({*_stores(model).values()})


def _stores(model: PreTrainedModel) -> dict[int, int]:
    """Return the layer that stores the tokens of each layer that attends to all tokens.

    This is the same layer, or the last layer that stores tokens.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = [index for index, kind in enumerate(kinds) if kind in _WHOLE]
    storing = [index for index in full if index < len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)]
    return {index: index if index in storing else storing[-1] for index in full}


class UnknownRotation(ValueError):
    """A model whose positions the oracle cannot renumber."""


class PositionRule(NamedTuple):
    """Positions of the keys of a layer. The default, for all layers, is the positions of the text."""

    renumbered: bool = False
    """True if kept tokens are renumbered: their positions end directly before the next token."""
    exceptions: range = range(0)
    """Positions of the text whose keys have the different rule, which is an error of a cache."""
    from_zero: bool = False
    """True if the excepted keys are counted from 0, and the positions of the next tokens by the different rule."""

    def positions(self, at: Tensor, visible: Tensor) -> Tensor:
        """Return the positions of keys at the positions `at` of the text, (sets, live), from the visible tokens.

        Only differences of positions matter, so the next tokens keep the positions of the text under both rules.
        """
        evicted = len(at) - visible.sum(dim=1, keepdim=True)
        text, numbered = at.expand_as(visible), visible.long().cumsum(dim=1) - 1 + evicted
        regular, other = (numbered, text) if self.renumbered else (text, numbered)
        if self.from_zero:
            other = other + evicted if self.renumbered else other - evicted
        return torch.where((at >= self.exceptions.start) & (at < self.exceptions.stop), other, regular)


class Masked:
    """Copy of a model with a full cache, whose full-attention layers attend only to the visible tokens.

    Args:
        model: the model. It is copied.
        renumbered: True if kept tokens are renumbered, so that they end directly before the next token.
        padding: number of padding columns on the left of the prompt.

    Attributes:
        rules: position rule of each layer that attends to all tokens.
    """

    def __init__(self, model: PreTrainedModel, renumbered: bool = False, padding: int = 0) -> None:
        self.model, self.padding = copy.deepcopy(model), padding
        config = self.model.config.get_text_config(decoder=True)
        self.stores = _stores(model)
        self.rules = dict.fromkeys(self.stores, PositionRule(renumbered))
        self.modules: dict[int, nn.Module] = {}
        named = [pair for pair in self.model.named_modules() if type(pair[1]).__name__.endswith(("Attention", "MLA"))]
        # Modules of an encoder have no layer index. In a layer, attention to an encoder comes after self-attention.
        for layer_of in (_index_of, _placed):
            for name, module in named:
                if (index := layer_of(name, module)) in self.stores:
                    self.modules.setdefault(index, module)
        for module in self.modules.values():
            # The indexer chooses tokens before the attention function runs (transformers 5.24): a hook limits its mask.
            if getattr(module, "indexer", None) is not None:
                module.register_forward_pre_hook(_hidden_from_the_indexer, with_kwargs=True)
        self.reset()
        # Configs of transformers 5.24 have no public property for the name of the attention.
        self.model.set_attn_implementation(_registered(config._attn_implementation))

    def reset(self) -> None:
        """Clear the cache, and the shift of the positions of later tokens."""
        self.shift = 0
        cache_class = vars(sys.modules[type(self.model).__module__]).get("MiniMaxCache")
        config = self.model.config.get_text_config(decoder=True)
        self.cache, self.seen = DynamicCache(config=config) if cache_class is None else cache_class(), 0
        self.visible = {layer: torch.zeros(1, 0, dtype=torch.bool) for layer in full_layers(self.model)}

    def snapshot(self) -> Snapshot:
        """Return a copy of the cache, for `restore`."""
        return copy.deepcopy(self.cache), self.seen, dict(self.visible)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue after the tokens of a snapshot, without a shift of the positions of later tokens."""
        self.shift = 0
        cache, self.seen, visible = snapshot
        self.cache, self.visible = copy.deepcopy(cache), dict(visible)

    def read(self, ids: Tensor, last: int = 0, **images: Tensor) -> Tensor:
        """Read the next tokens (1, q), and images if given. Return the logits.

        With `last`, return only the logits of the last tokens, if the model supports this. All logits of a large
        vocabulary need much memory.

        Raises:
            RuntimeError: if a full-attention layer did not call the attention of the oracle.
        """
        given = _given(self.model, self.cache)
        if last and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            given["logits_to_keep"] = last
        if _accepts_positions(self.model):
            # Without positions, some families count from 0 in each forward pass.
            positions = torch.arange(self.seen, self.seen + ids.shape[1])[None] - self.padding - self.shift
            given["position_ids"] = positions.clamp(min=0)
        self.seen += ids.shape[1]
        if self.padding:
            given["attention_mask"] = (torch.arange(self.seen) >= self.padding).long()[None]
        for layer, visible in self.visible.items():
            self.visible[layer] = torch.nn.functional.pad(visible, (0, ids.shape[1]), value=True)
        for layer, module in self.modules.items():
            _VISIBLE[module] = self.visible[self.stores[layer]]
            if self.rules[layer] != PositionRule():
                _RENUMBERED[module] = frequencies(self.model), self.rules[layer]
        try:
            with torch.no_grad():
                logits = self.model(input_ids=ids, use_cache=True, **given, **images).logits
            if any(not _CALLS.get(module) for module in self.modules.values()):
                raise RuntimeError("the oracle's mask did not reach every full-attention layer")
        finally:
            _VISIBLE.clear()
            _RENUMBERED.clear()
            _CALLS.clear()
        assert isinstance(logits, Tensor)
        return logits

    @property
    def heads(self) -> dict[int, int]:
        """Number of stored KV heads of each full-attention layer."""
        return {layer: int(cast(Any, self.cache.layers[layer]).keys.shape[1]) for layer in self.visible}

    def keep(self, sets: Sets) -> None:
        """Make only these positions of the tokens read so far visible in the full-attention layers."""
        for layer, layer_sets in zip(self.visible, sets, strict=True):
            visible = torch.zeros(len(layer_sets), self.seen, dtype=torch.bool)
            for head, positions in enumerate(layer_sets):
                visible[head, : self.padding] = True  # The attention mask hides the padding.
                visible[head, [self.padding + position for position in positions]] = True
            self.visible[layer] = visible


def _index_of(name: str, module: Any) -> int:
    """Return the layer index of a module, or -1 if the module has none."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else -1


def _placed(name: str, module: Any) -> int:
    """Return the layer index in the name of a module, or -1 if the module is in no layer."""
    where = [int(part) for part in name.split(".") if part.isdigit()]
    return where[0] if where and hasattr(module, "layer_idx") else -1


def _given(model: PreTrainedModel, cache: DynamicCache) -> dict[str, Any]:
    """Return the cache as a keyword argument of the model, which is named `cache` since transformers 5.24."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def _registered(stock: str) -> str:
    """Register the attention of the oracle around the attention `stock`, and return its name."""
    name = f"masked_{stock}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _masking(stock))
        # transformers 5.24 makes no mask for a name without a mask function, and the results would be wrong.
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    return name


def _masking(stock: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any,
    ) -> Any:
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        function = ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)
        if (indices := options.pop("indices", None)) is not None and attention_mask is not None:
            chosen = torch.zeros(attention_mask.shape, dtype=torch.bool).scatter(-1, indices.long()[:, None], True)
            attention_mask = _limited(attention_mask, chosen)
        if module in _VISIBLE:
            _CALLS[module] = _CALLS.get(module, 0) + 1
            attention_mask = _with(attention_mask, _VISIBLE[module], query, key)
            if module in _RENUMBERED:
                key = _moved(key, _VISIBLE[module], *_RENUMBERED[module]).to(query.dtype)
        return function(module, query, key, value, attention_mask, **options)

    return attention


def frequencies(model: nn.Module) -> Tensor:
    """Return the rotary frequencies of full-attention layers. Frequency i of f rotates the channels i and i + f.

    Raises:
        UnknownRotation: if the model has no rotary frequencies.
    """
    for module in model.modules():
        for name in ("full_attention_inv_freq", "inv_freq"):
            if isinstance(result := getattr(module, name, None), Tensor):
                return result
    raise UnknownRotation("the judge finds no rotary frequencies in this model: it cannot renumber positions")


def check_rotation(model: PreTrainedModel) -> None:
    """Check that the keys of a text at later positions are the rotated keys of the text at position 0.

    Raises:
        UnknownRotation: if the model rotates its keys differently.
    """
    config, ids, later = model.config.get_text_config(decoder=True), torch.arange(3, 9)[None], 5
    keys = []
    for first in (0, later):
        cache, positions = DynamicCache(config=config), torch.arange(first, first + ids.shape[1])[None]
        with torch.no_grad():
            model(input_ids=ids, position_ids=positions, use_cache=True, **_given(model, cache))
        keys.append(cast(Any, cache.layers[full_layers(model)[0]]).keys)
    turned = _turned(keys[0], torch.full(keys[0].shape[1:3], float(later)), frequencies(model))
    if float((turned - keys[1]).abs().max()) > 1e-3 * float(keys[1].abs().max()):
        raise UnknownRotation("the judge does not know how this model rotates its keys: it cannot renumber positions")


def _moved(key: Tensor, visible: Tensor, frequency: Tensor, rule: PositionRule) -> Tensor:
    """Return keys (1, H_kv, live, d) rotated to the positions of a rule. `visible` is (1 or H_kv, live)."""
    at = torch.arange(visible.shape[1])
    return _turned(key, (rule.positions(at, visible) - at).expand(key.shape[1], -1), frequency)


def _turned(x: Tensor, by: Tensor, frequency: Tensor) -> Tensor:
    """Return vectors (1, heads, n, d) rotated by `by` positions (heads, n).

    Channels without a frequency are not changed.
    """
    half = len(frequency)
    angle = by[None, :, :, None] * frequency
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _with(mask: Tensor | None, visible: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask of the model, (1, 1 or H, q, live), restricted to the visible tokens."""
    H, q, live = query.shape[1], query.shape[2], key.shape[2]
    if bool(visible.all()):
        return mask
    if mask is None:
        assert q == 1, "a model of several queries behind others has a mask"
        mask = torch.ones(1, 1, 1, live, dtype=torch.bool)
    return _limited(mask[..., :live], visible.repeat_interleave(H // len(visible), dim=0)[None, :, None])


def _limited(mask: Tensor, shown: Tensor) -> Tensor:
    """Return a boolean or additive mask that hides all columns for which `shown` is False."""
    return mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, torch.finfo(mask.dtype).min)


def _hidden_from_the_indexer(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Restrict the mask of a layer with an indexer, so that the indexer cannot choose tokens that are not visible.

    Such layers have one set for all heads.
    """
    if module in _VISIBLE:
        options = {**options, "attention_mask": _limited(options["attention_mask"], _VISIBLE[module][None, :, None])}
    return args, options


def _accepts_positions(model: Any) -> bool:
    """Return True if a model or its decoder accepts position ids.

    Return False if the model computes positions from the id of the padding token.
    """
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules()):
        return False
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters or not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return "position_ids" in parameters
    return "position_ids" in inspect.signature(model.get_decoder().forward).parameters
