"""Recognition of a model's RoPE from two tiny prefills, and rotation of cached keys to new positions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models_integration.model.architecture import check_free, device_of, restored_rotation
from models_integration.model.cache_argument import cache_name
from models_integration.model.errors import UnknownModel
from spec.errors import SpecError

__all__ = [
    "CHANGING", "PROBE_START", "STYLES", "LayerRotary", "Rotary", "angles_between", "explain_rotation",
    "frequencies_at", "keeps_frequencies", "plain_layers", "prefilled", "probed", "recognise", "rotary_buffers",
    "rotary_module", "scaling_of", "starting_frequencies", "turned",
]


CHANGING = ("dynamic", "longrope")
"""RoPE types whose frequencies change if the session exceeds the original length. Chunks are then re-based."""
# Attributes with frequencies in RoPE types whose frequencies change. `starting_frequencies` compares the values.
ROTATING = ("long_inv_freq", "max_seq_len_cached", "original_inv_freq")


def keeps_frequencies(module: nn.Module, name: str) -> bool:
    """Return True if an attribute of a rotary module with this name has data about frequencies."""
    return hasattr(module, "rope_type") and name.endswith(ROTATING)


def starting_frequencies(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, float]]:
    """Yield name, initial frequencies and factor of each rotary buffer. A long prompt may replace the frequencies."""
    for name, buffer in sorted(rotary_buffers(model)):
        for values in _starts(*rotary_module(model, name), buffer):
            yield name, values, scaling_of(model, name)


def _starts(module: Any, prefix: str, kind: str, buffer: Tensor) -> Iterator[Tensor]:
    """Yield a module's initial frequencies, and the present frequencies if the config does not give them."""
    if not any(word in kind for word in CHANGING):
        yield buffer
        return
    start: Tensor = getattr(module, f"{prefix}original_inv_freq", buffer)
    yield start
    if not start.is_meta:
        computed = [start, *_longer(module, prefix, kind)]
        for held in (buffer, getattr(module, f"{prefix}long_inv_freq", None)):
            if held is not None and not any(_near(held, one) for one in computed[-1 if "dynamic" in kind else 0:]):
                yield held


def _longer(module: Any, prefix: str, kind: str) -> list[Tensor]:
    """Return the frequencies that the config gives for the present length, or [] for the initial frequencies."""
    try:
        if "dynamic" in kind:
            length = int(getattr(module, f"{prefix}max_seq_len_cached", module.max_seq_len_cached))
            if length == module.original_max_seq_len:
                return []
        else:
            stated = module.config.rope_parameters
            length = stated.get(prefix.removesuffix("_"), stated)["original_max_position_embeddings"] + 1
        return [ROPE_INIT_FUNCTIONS[kind](
            module.config, torch.device("cpu"), seq_len=length, layer_type=prefix.removesuffix("_") or None,
        )[0]]
    except Exception:  # the model's code can raise anything
        return []


def _near(held: Tensor, computed: Tensor) -> bool:
    """Return True if `held` equals `computed` up to rounding to float32 on any device and to the dtype of `held`."""
    rounding = 4 * torch.finfo(torch.float32).eps
    low, high = ((computed.cpu().double() * (1 + off)).to(held.dtype) for off in (-rounding, rounding))
    return held.shape == computed.shape and bool(((low <= held.cpu()) & (held.cpu() <= high)).all())


STYLES = ("half_split", "interleaved")
_TOKENS_AT_ONCE = 128
ATTENTION = ("full_attention", "sliding_attention")
PROBE_TOKENS, PROBE_START = 9, 37
# Largest start position of a test prefill.
_FURTHEST = 2**15
# A wrong style, tensor or frequency causes errors of at least 0.9. Rounding in float32: below 1e-5.
PROBE_BOUND = {torch.float32: 2e-3, torch.float64: 2e-3}
# Rounding in bfloat16 grows with depth and width: 0.027 in 32 layers of 2 048 channels, above 0.06 with 4 096 channels.
PROBE_BOUND_HALF = 0.25


@dataclass(frozen=True)
class LayerRotary:
    """RoPE of a cache layer: rotated tensor ("keys", or "values" for MLA latents), style, and buffer of frequencies.

    All three fields are None for a layer without RoPE.
    """

    slot: str | None = None
    style: str | None = None
    buffer: str | None = None


@dataclass(frozen=True)
class Rotary:
    """RoPE of all layers, and the frequencies."""

    layers: tuple[LayerRotary, ...]
    frequencies: Mapping[str, Tensor]
    """Inverse frequencies (pairs,) of each buffer, in the model's dtype."""
    scaling: Mapping[str, float]
    """Factor of cosine and sine for each buffer. The factor is part of the model's identity, not of the rotation."""

    def used(self) -> list[str]:
        """Buffers that at least one layer uses."""
        return sorted({layer.buffer for layer in self.layers if layer.buffer is not None})


def recognise(model: PreTrainedModel) -> Rotary:
    """Return the RoPE of a model, after a test: keys from position 0, rotated to a later start, equal keys from there.

    Raises:
        UnknownModel: if no tensor, style and buffer pass the test in a layer. The message contains the layer.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    others = sorted(set(getattr(config, "layer_types", None) or []) - set(ATTENTION))
    if others:
        raise UnknownModel(f"{name}: layers of type {', '.join(others)} do not store keys and values for each token")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnknownModel(f"{name}: layers that share one cache are not supported")
    originals = _originals(name, config)
    with restored_rotation(model):
        at_zero = _probe(model, 0)
        frequencies = {key: buffer.detach().clone() for key, buffer in rotary_buffers(model)}
        layers = _explained_layers(name, at_zero, _probe(model, PROBE_START), PROBE_START, frequencies)
        if all(layer.slot is None for layer in layers):
            _check_orderless(model, at_zero)
        elif not any(changing in rotary_module(model, key)[2] for key in frequencies for changing in CHANGING):
            # At larger positions, the rounding of angles to float32 would look like a different model.
            past = min(_FURTHEST, 2 * max(originals, default=0))
            if past:
                _explained_layers(name, at_zero, _probe(model, past), past, frequencies)
        scaling = {key: scaling_of(model, key) for key in frequencies}
        return Rotary(tuple(layers), frequencies, scaling)


def _explained_layers(
    name: str, at_zero: Sequence[Mapping[str, Tensor]], later: Sequence[Mapping[str, Tensor]], start: int,
    frequencies: Mapping[str, Tensor],
) -> list[LayerRotary]:
    layers = []
    for index, (before, after) in enumerate(zip(at_zero, later, strict=True)):
        rotation = explain_rotation(before, after, start, frequencies)
        if rotation is None:
            raise UnknownModel(
                f"{name}: in layer {index} no rotation by the frequencies of the model turns the keys at position 0"
                f" into the keys at position {start}"
            )
        layers.append(rotation)
    return layers


def _originals(name: str, config: PretrainedConfig) -> list[int]:
    """Return the lengths above which the config changes the use of positions.

    Raises:
        UnknownModel: if queries are scaled by position, because a rotation of keys cannot reproduce the scaling.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
    if any(one.get("llama_4_scaling_beta") for one in each):
        reason = "the queries are scaled with the position (llama_4_scaling_beta), so chunks cannot be moved"
        raise UnknownModel(f"{name}: {reason}")
    return [int(length) for one in each if (length := one.get("original_max_position_embeddings"))]


def _check_orderless(model: PreTrainedModel, before: Sequence[Mapping[str, Tensor]]) -> None:
    """Check that a model without RoPE ignores positions: token order must not change the first layer's attention.

    Raises:
        UnknownModel: if the order changes the attention, as with ALiBi. Chunks cannot be inserted in such a model.
    """
    first, *others, last = _probe_ids(model)
    swapped = _probe(model, 0, [*others, first, last])
    name, layer = type(model).__name__, min(1, len(before) - 1)
    if layer == 0:
        raise UnknownModel(f"{name}: the only layer has no rotary positions, and may have ALiBi")
    if _error(before[layer]["keys"][..., -1, :], swapped[layer]["keys"][..., -1, :]) >= float(before[layer]["bound"]):
        raise UnknownModel(f"{name}: attention depends on distances (ALiBi), and not on rotated keys: not supported")


def _probe_ids(model: PreTrainedModel) -> list[int]:
    vocabulary = cast(Tensor, model.get_input_embeddings().weight).shape[0]
    return [(7 + 31 * at) % vocabulary for at in range(PROBE_TOKENS)]


def frequencies_at(model: PreTrainedModel, rotary: Rotary, length: int) -> Rotary:
    """Return the RoPE of a session that will have `length` tokens.

    If a session exceeds the first range, longrope replaces its frequencies. Keys archived earlier are then re-based.

    Raises:
        SpecError: if the length exceeds the range of dynamic RoPE. Frequencies then depend on the past.
    """
    live = dict(rotary.frequencies)
    for name in rotary.used():
        module, prefix, kind = rotary_module(model, name)
        if "dynamic" in kind and length > module.config.max_position_embeddings:
            raise SpecError(
                "length", length, f"must not exceed max_position_embeddings, {module.config.max_position_embeddings}:"
                " beyond it, dynamic frequencies depend on the session's past"
            )
        if kind == "longrope":
            options = {"layer_type": prefix.removesuffix("_")} if prefix else {}
            fresh, _ = ROPE_INIT_FUNCTIONS[kind](module.config, live[name].device, seq_len=length, **options)
            live[name] = fresh.to(live[name].dtype)
    return replace(rotary, frequencies=live)


def angles_between(tokens: int, start: int, archived: Tensor, live: Tensor) -> Tensor:
    """Return the angles (tokens, pairs), float64, that rotate positions 0, 1, ... to start, start + 1, ...

    Each product is rounded to float32, like the model's own angles. The result therefore equals the model's result at
    the new position. The exact angle would differ by up to start * 2^-24.
    """
    at = torch.arange(tokens, device=live.device, dtype=torch.float32)[:, None]
    to, back = (at + start) * live.float(), at * archived.float()
    return to.double() - back.double()


def turned(x: Tensor, angles: Tensor, style: str) -> Tensor:
    """Return x (..., tokens, d) with the first 2 * pairs channels rotated, computed in float64 and rounded once."""
    pairs, tokens = angles.shape[-1], x.shape[-2]
    halves = (slice(pairs), slice(pairs, 2 * pairs)) if style == "half_split" else (
        slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    result = x.clone()
    # On a CPU, parts of the tokens stay in the processor's cache, which takes half the time.
    step = _TOKENS_AT_ONCE if x.device.type == "cpu" else max(1, tokens)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        by, a, b = angles[..., part, :], *(x[..., part, half].double() for half in halves)
        cos, sin, moves = by.cos(), by.sin(), by != 0
        for half, given, rotated in ((halves[0], a, (a * cos).sub_(b * sin)), (halves[1], b, (a * sin).add_(b * cos))):
            result[..., part, half] = torch.where(moves, rotated, given).to(x.dtype)
    return result


def prefilled(model: PreTrainedModel, ids: Sequence[int], start: int = 0) -> DynamicCache:
    """Return a plain cache after one forward pass over the ids. Sliding-window layers also store all tokens.

    Raises:
        SpecError: if the model is inside a policy's context, because the policy would evict from the cache.
    """
    check_free(model)
    device = device_of(model)
    tokens = torch.tensor([list(ids)], device=device)
    positions = torch.arange(start, start + len(ids), device=device)[None]
    cache = DynamicCache()
    with torch.no_grad():
        model(
            input_ids=tokens, position_ids=positions, use_cache=True, **{cache_name(model): cache},
            attention_mask=torch.ones_like(tokens),
        )
    return cache


def plain_layers(cache: DynamicCache) -> list[Any]:
    """Return the layers of a cache, with keys and values (rows, heads, stored, d) each."""
    return list(cache.layers)


def _probe(model: PreTrainedModel, start: int, ids: Sequence[int] | None = None) -> list[Mapping[str, Tensor]]:
    try:
        cache = prefilled(model, _probe_ids(model) if ids is None else ids, start)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
        raise UnknownModel(f"{type(model).__name__}: a prefill of {PROBE_TOKENS} tokens failed: {error}") from error
    layers: list[Mapping[str, Tensor]] = []
    for index, layer in enumerate(plain_layers(cache)):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        extra = [part for part in ("indexer_keys", "conv_states") if getattr(layer, part, None) is not None]
        if keys is None or values is None or extra:
            raise UnknownModel(f"{type(model).__name__}: layer {index} keeps {extra or 'no keys and values'}")
        layers.append(probed(keys, values))
    return layers


def probed(keys: Tensor, values: Tensor) -> Mapping[str, Tensor]:
    """Return the tensors of a layer in float64, and the bound of the rounding error."""
    bound = torch.tensor(PROBE_BOUND.get(keys.dtype, PROBE_BOUND_HALF), device="cpu")
    return {"keys": keys.double(), "values": values.double(), "bound": bound}


def explain_rotation(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], start: int, frequencies: Mapping[str, Tensor],
) -> LayerRotary | None:
    """Return the tensor, style and buffer that explain the keys of a layer best, or None.

    In trained models the largest channels often rotate slowly. A rotation can then change the keys by less than the
    bound of half precision. Therefore a layer without RoPE is a layer that no rotation explains better.
    """
    tried: list[tuple[Mapping[str, Tensor], LayerRotary]] = [(before, LayerRotary())]
    for slot in ("keys", "values"):
        x = before[slot]
        for name, f in frequencies.items():
            if 2 * len(f) <= x.shape[-1]:
                angles = angles_between(x.shape[-2], start, f, f)
                tried += [({**before, slot: turned(x, angles, style)}, LayerRotary(slot, style, name))
                          for style in STYLES]
    closest, rotary = min(tried, key=lambda one: _distance(one[0], after))
    within = all(_error(closest[slot], after[slot]) < float(before["bound"]) for slot in ("keys", "values"))
    return rotary if within else None


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the mean squared differences of keys and values, relative to the mean squares of `b`."""
    return sum(
        float((a[slot] - b[slot]).square().mean() / b[slot].square().mean().clamp_min(1e-60))
        for slot in ("keys", "values")
    )


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def rotary_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the present inverse frequencies (pairs,) of the model's rotary buffers."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1:
            yield name, buffer


def rotary_module(model: nn.Module, name: str) -> tuple[Any, str, str]:
    """Return a buffer's rotary module, the layer type at the start of the buffer's name, and the RoPE type."""
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    prefix, kinds = attribute.removesuffix("inv_freq"), getattr(module, "rope_type", "default")
    return module, prefix, kinds[prefix.removesuffix("_")] if isinstance(kinds, dict) else kinds


def scaling_of(model: nn.Module, name: str) -> float:
    """Return the factor of cosine and sine that belongs to a buffer."""
    module, prefix, _ = rotary_module(model, name)
    return float(getattr(module, f"{prefix}attention_scaling", 1.0))
