"""The paper's instruments (3.10, 4.6): where attention goes, what rotation and context do to keys, and patching."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.archive.splice import Chunk, computed, splice, taken
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.rotation import Rotary, frequencies_at, turned
from reference.injection.diagnostics import bands as scaled_bands
from reference.injection.splicing import SINKS
from spec.errors import SpecError

__all__ = [
    "CosineProbe", "attention_entropy", "attention_weights", "bands", "contamination", "key_cosine", "noise",
    "patched", "residuals", "sink_mass", "unrotated",
]


def attention_weights(model: PreTrainedModel, ids: Sequence[int], cache: RetainedCache) -> list[Tensor]:
    """Attention of these tokens in each layer, (heads, tokens, slots), by the model's eager attention.

    The cache has read the tokens afterwards.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([list(ids)], device=model.device), past_key_values=cache, use_cache=True,
                output_attentions=True,
            )
    finally:
        model.set_attn_implementation(before)
    return [layer[0] for layer in output.attentions]


def attention_entropy(weights: Tensor) -> Tensor:
    """H = -sum a log a in nats over the last axis, (..., queries); 0 log 0 is 0."""
    entropy: Tensor = torch.special.entr(weights.double()).sum(-1)
    return entropy


def sink_mass(weights: Tensor, positions: Tensor, sinks: int = SINKS) -> Tensor:
    """The attention on positions below `sinks`, (..., queries); `positions` (slots,) are those behind the slots."""
    return weights.double()[..., positions < sinks].sum(-1)


def unrotated(keys: Tensor, rotary: Rotary, layer: int, positions: Tensor) -> Tensor:
    """Keys (heads, n, d) that were computed at these positions (sets, n), as if every token stood at position 0.

    One set of positions, or one for each head.
    """
    rule = rotary.layers[layer]
    if rule.buffer is None or rule.style is None:
        return keys
    theta = rotary.frequencies[rule.buffer]
    at = positions.to(theta.device, torch.float32)[..., None]
    return turned(keys, -(at * theta.float()).double(), rule.style)


@dataclass(frozen=True)
class CosineProbe:
    """Cosines of archived and fresh keys of one layer, (heads, n): as they are, and with both rotations taken off.

    0 where a head of a compacted chunk stores fewer tokens than another.
    Low raw and high unrotated: the rotation differs. Low in both: the context does.
    """

    raw: Tensor
    unrotated: Tensor


def key_cosine(model: PreTrainedModel, chunk: Chunk, before: Sequence[int]) -> dict[int, CosineProbe]:
    """The probe in each archived layer: the chunk's keys against those of the same tokens read behind `before`."""
    fresh = computed(model, [*before, *chunk.ids], chunk.rotary, hidden=len(before))
    found = {}
    for index, pair in chunk.layers.items():
        slot = chunk.rotary.layers[index].slot
        at = 1 if slot == "values" else 0
        places = chunk.places(index)
        archived, now = pair[at], taken(fresh.layers[index][at][:, len(before) :], places)
        behind = unrotated(now, fresh.rotary, index, places + len(before))
        still = unrotated(archived, chunk.rotary, index, places), behind
        found[index] = CosineProbe(_cosine(archived, now), _cosine(*still))
    return found


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    cosine: Tensor = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)
    return cosine


def contamination(
    model: PreTrainedModel, rotary: Rotary, chunk: Sequence[int], own: Sequence[int], other: Sequence[int],
    query: Sequence[int],
) -> tuple[float, float]:
    """The cross-attention probe: how far an archive made behind `own` leads astray behind `own`, and behind `other`.

    Each is the KL divergence in nats of the token after the query from that of the session read as text, which the
    paper measures as accuracy. The difference is what the chunk's view of other text costs.
    """
    archived = computed(model, [*own, *chunk], rotary, hidden=len(own))
    total = max(len(own), len(other)) + len(chunk) + len(query)
    found = []
    for before in (own, other):
        cache = RetainedCache(model.config.get_text_config(decoder=True))
        _after(model, before, cache)
        splice(cache, [archived], frequencies_at(model, rotary, total))
        spliced = _after(model, query, cache)
        text = _after(model, [*before, *chunk, *query], RetainedCache(model.config.get_text_config(decoder=True)))
        found.append(float((text.exp() * (text - spliced)).sum()))
    return found[0], found[1]


def _after(model: PreTrainedModel, ids: Sequence[int], cache: RetainedCache) -> Tensor:
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([list(ids)], device=model.device), past_key_values=cache, use_cache=True,
        ).logits
    found: Tensor = logits[0, -1].double().log_softmax(-1)
    return found


def residuals(model: PreTrainedModel, ids: Sequence[int]) -> list[Tensor]:
    """The residual stream at the input of each layer, (tokens, width), when the ids are read alone."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append((args[0] if args else options["hidden_states"])[0].detach().clone())

    with ExitStack() as undo:
        for layer in _decoder_layers(model):
            undo.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        with torch.no_grad():
            model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    return seen


@contextmanager
def patched(
    model: PreTrainedModel, states: Sequence[Tensor], places: Sequence[int], layers: Sequence[int],
) -> Iterator[None]:
    """Inside, the residual stream of some places is that of another run, at the input of the given layers.

    Args:
        states: of the other run, as `residuals` gives them: one tensor for each layer.
        places: token indices of each forward; markers of a wrapper in the paper.
        layers: the band.

    Raises:
        SpecError: for a layer that the model does not have.
    """
    modules = _decoder_layers(model)
    if not set(layers) <= set(range(len(modules))):
        raise SpecError("layers", sorted(layers), f"must lie in [0, {len(modules)})")

    def swap(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden = (args[0] if args else options["hidden_states"]).clone()
            hidden[0, list(places)] = states[index][list(places)].to(hidden)
            return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

        return hook

    with ExitStack() as undo:
        for index in layers:
            undo.callback(modules[index].register_forward_pre_hook(swap(index), with_kwargs=True).remove)
        yield


def bands(depth: int, seed: int) -> Mapping[str, tuple[int, ...]]:
    """The layers of each band that the paper patches; `random` has as many as `upper`, drawn once by the seed."""
    found = {name: tuple(range(low, high)) for name, (low, high) in scaled_bands(depth).items()}
    drawn = np.random.default_rng(seed).choice(depth, len(found["upper"]), replace=False)
    return {**found, "random": tuple(sorted(int(layer) for layer in drawn))}


def noise(states: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Gaussian states of the same norm for each token: the paper's noise control."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(state.shape, generator=generator).to(state) for state in states]
    return [
        one * (state.norm(dim=-1, keepdim=True) / one.norm(dim=-1, keepdim=True))
        for one, state in zip(drawn, states, strict=True)
    ]


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    return list(decoder.layers)
