"""Description of a model's decoder, and checks that kvspec supports the model."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from models_integration.model.cache_argument import NAMES
from models_integration.model.layer_kinds import (
    CHUNKED,
    FULL,
    HYBRID,
    INDEXED,
    RECURRENT,
    SHARING,
    SLIDING,
    STORELESS,
    by_layer,
    cache_owners,
    layer_config_value,
    layer_types,
    stated_types,
)
from models_integration.model.seams import attention_of, eager_attention
from reference.crystalcache.observed_layer import observed_layer
from spec.errors import SpecError
from spec.policy import Needs

__all__ = [
    "DECODERS_IN_SESSION", "Architecture", "attention_modules", "check_free", "check_positions", "decoder_inputs",
    "decoder_of", "decoders_of", "describe", "device_of", "position_range", "restored_rotation", "unwrapped",
]

IMPLEMENTATIONS = ("sdpa", "eager")
OURS = "kvspec_"
"""Start of the names of registered attention functions. The config of a model has such a name in a forward pass."""
ELSEWHERE = "is in a forward pass of a different thread: join the thread, or use a lock around each block"
# Names of modules whose output a decoder adds to the embeddings: learned or sinusoidal positions.
POSITION_TABLES = ("wpe", "embed_positions")
_FIXED_SIZE = "nothing to evict: it has no full-attention layer, and windows and recurrent states have a fixed size"
_UNOBSERVED = "its attention cannot be observed: its module has no eager_attention_forward"

# Decoders inside a context. A second context on the same decoder is not allowed.
DECODERS_IN_SESSION: WeakSet[nn.Module] = WeakSet()


class Part(NamedTuple):
    """A module of the decoder."""

    siblings: Mapping[str, nn.Module | None]
    """Current child modules of the module's parent."""
    name: str
    module: nn.Module


@dataclass(frozen=True)
class Architecture:
    """Properties of a decoder."""

    name: str
    """Name of the model's class, for error messages."""
    decoder: nn.Module
    """Module that maps token ids to hidden states. Every forward pass calls this module."""
    config: PretrainedConfig
    """Config that all layers use."""
    attention: Mapping[int, nn.Module]
    """Attention modules, by layer index."""
    full_layers: tuple[int, ...]
    """Indices of the full-attention layers that store keys and values, ascending."""
    owners: Mapping[int, int]
    """Layer whose cache each full-attention layer uses (the layer itself or an earlier layer), by layer index."""
    recurrent: bool
    """True if some layers have a recurrent state."""
    latent: bool
    """True if full-attention layers store one latent for all heads (MLA)."""
    indexed: bool
    """True if an indexer chooses the tokens that a query attends to."""
    takes_positions: bool
    """True if kvspec may pass position ids to the decoder (see `decoder_inputs`)."""
    known_positions: bool
    """True if cached keys contain the positions of the tokens, by rotation or from a table of embeddings."""
    wraps: bool
    """True if the decoder also accepts images or sound, and passes embeddings to a text model."""
    causal: bool
    """True if every attention module is marked as causal. Some unmarked modules are also causal."""
    vocabulary: int
    parts: tuple[Part, ...]
    """Attention modules, and the modules between the decoder and the attention modules."""

    def check_attention(self) -> None:
        """Check that the decoder still has the same attention modules.

        Raises:
            SpecError: if an attention module was replaced.
        """
        for siblings, name, module in self.parts:
            if siblings.get(name) is not module:
                kind = type(module).__name__
                reason = f"the module {name!r} ({kind}) was replaced: replace modules outside `with policy(model)`"
                raise SpecError("model", self.name, reason)

    def watched(self, needs: Needs) -> tuple[int, ...]:
        """Return the indices of the layers whose attention inputs a scorer needs.

        Raises:
            SpecError: if the observed layer does not exist.
        """
        if needs.layers == "observed":
            return (observed_layer(self.full_layers, needs.observed),)
        return self.full_layers if needs.layers == "all" else ()


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the model inside `torch.compile(model)` or inside a peft model. Active adapters stay active.

    Raises:
        SpecError: if `model` is not a transformers model.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        base = getattr(inner, "get_base_model", None)
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            # The module that `torch.compile` returns has no public name for the model (torch 2.13).
            inner = inner._orig_mod
        elif isinstance(inner, nn.Module) and callable(base):
            inner = base()
        else:
            raise SpecError("model", type(model).__name__, "must be a transformers PreTrainedModel")
    return inner


def describe(model: PreTrainedModel) -> Architecture:
    """Return the properties of a model's decoder. The model does not change.

    Raises:
        SpecError: if the cache cannot be compacted, or if the attention cannot be observed. The message has the reason.
    """
    model = unwrapped(model)
    config = model.config.get_text_config(decoder=True)
    decoder = decoder_of(model)
    types = layer_types(config)
    attention = attention_modules(_text_decoder(model))
    reason = (
        _refuse_embeddings(model) or _refuse_config(config)
        or _refuse_alibi(config, decoder) or _refuse_layers(config, types)
        or _refuse_attention(config, decoder, attention, types) or _refuse_implementation(config, attention.values())
    )
    if reason is not None:
        raise SpecError("model", type(model).__name__, reason)
    full = tuple(index for index, kind in enumerate(types) if kind == FULL)
    owners = {index: owner for index, owner in enumerate(cache_owners(config)) if owner in full}
    vocabulary = cast(Tensor, model.get_input_embeddings().weight).shape[0]
    parts = _parts(decoder, set(attention.values()))
    recurrent = any(kind in (*RECURRENT, HYBRID) for kind in stated_types(config))
    latent = any(rank is not None for rank in by_layer(config, "kv_lora_rank"))
    wraps = decoder is not _text_decoder(model)
    known = recurrent or (not wraps and _keeps_positions(decoder))
    indexed = INDEXED in stated_types(config)
    return Architecture(
        type(model).__name__, decoder, config, attention, full, owners, recurrent, latent, indexed,
        "position_ids" in decoder_inputs(decoder), known, wraps,
        all(getattr(module, "is_causal", True) for module in attention.values()), vocabulary, parts,
    )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that maps token ids (and images, if the model accepts images) to hidden states."""
    config = model.config
    wraps = type(config.get_text_config(decoder=True)) is not type(config) and not config.is_encoder_decoder
    return model.base_model if wraps else _text_decoder(model)


def decoders_of(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Return `decoder_of(model)`, and the text model inside, which may receive embeddings."""
    return decoder_of(model), _text_decoder(model)


def _text_decoder(model: PreTrainedModel) -> nn.Module:
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    # In some models this is the name of the last projection.
    return decoder if any(True for _ in decoder.children()) else model.base_model


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes. Weights offloaded by accelerate are on the device "meta" until use.

    Raises:
        SpecError: if the parameters of the module have no values.
    """
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            if getattr(one, "execution_device", None) is not None:
                return torch.device(one.execution_device)
    device = next(module.parameters()).device
    if device.type == "meta":
        raise SpecError("model", type(module).__name__, "has weights without values (device meta): load the weights")
    return device


def check_free(model: PreTrainedModel) -> None:
    """Check that no context is open on the model.

    Raises:
        SpecError: if a context is open, because the context's policy would evict from the text.
    """
    if any(decoder in DECODERS_IN_SESSION for decoder in decoders_of(model)):
        reason = "end that block first, or use a lock around the blocks of all threads and tasks"
        raise SpecError("model", type(model).__name__, f"is already inside `with policy(model)`: {reason}")


def position_range(config: PretrainedConfig) -> int:
    """Return the number of positions of the model, or 0 if the config does not state the number.

    RoPE scaling extends the original range by the factor `factor`.
    """
    text = config.get_text_config(decoder=True)
    stated = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    each = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    reach = [(one.get("original_max_position_embeddings") or stated or 0) * (one.get("factor") or 1) for one in each]
    return int(max([stated or 0, *reach]))


def check_positions(config: PretrainedConfig, argument: str, tokens: int, behind: int = 0) -> None:
    """Check that the model's range of positions includes `tokens` tokens, and `behind` more tokens (question, answer).

    Raises:
        SpecError: if the range is too short. The message contains the largest possible number of tokens.
    """
    most = position_range(config)
    if 0 < most < tokens + behind:
        more = f" and {behind} of question and answer" if behind else ""
        bound = f"tokens{more} are more than the {most} positions of the model; give at most {max(0, most - behind)}"
        raise SpecError(argument, tokens, bound)


def attention_modules(decoder: nn.Module) -> dict[int, nn.Module]:
    """Return the modules of a decoder that attend to stored keys, by layer index."""
    types = layer_types(cast(PretrainedConfig, decoder.config).get_text_config(decoder=True))
    keyless = {index for index, kind in enumerate(types) if kind in (*RECURRENT, *STORELESS)}
    modules: dict[int, nn.Module] = {}
    for name, module in decoder.named_modules():
        index = _layer_index(name, module) if type(module).__name__.endswith(("Attention", "MLA")) else None
        if index is not None:
            # The cross-attention of a layer comes after its self-attention.
            modules.setdefault(index, module)
    return {index: module for index, module in modules.items() if index not in keyless}


def decoder_inputs(decoder: nn.Module) -> set[str]:
    """Return the names of the inputs that kvspec may add to a forward pass.

    RoBERTa and similar models compute position ids that begin after the padding id. Position ids from 0 would be wrong.
    """
    numbers = any(hasattr(part, "create_position_ids_from_input_ids") for part in decoder.modules())
    return set(signature(decoder.forward).parameters) - ({"position_ids"} if numbers else set())


@contextmanager
def restored_rotation(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the rotary embeddings after a forward pass that kvspec itself started.

    Some rotary embeddings change with the length of the text: dynamic NTK and longrope change their frequencies.
    """
    embeddings = [
        module for module in model.modules() if any(name.endswith("inv_freq") for name in module._buffers)
    ]
    # transformers 5.24 registers a new buffer, or copies into the present one, so both are restored.
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in embeddings]
    copies = [
        (buffer, buffer.clone(), _version(buffer)) for _, _, buffers in saved for buffer in buffers.values()
        if buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, copy, version in copies:
                if _version(buffer) != version or (version is None and not torch.equal(buffer, copy)):
                    buffer.copy_(copy)


def _version(buffer: Tensor) -> int | None:
    """Return torch's count of writes to a tensor, without a transfer to the host, or None for an inference tensor."""
    # torch 2.13 has no public name for this count.
    return None if buffer.is_inference() else buffer._version


def _layer_index(name: str, module: nn.Module) -> int | None:
    """Return the layer index of an attention module. Zamba's modules have the index only in their names."""
    index, of_name = getattr(module, "layer_idx", None), re.match(r"layers\.(\d+)\.", name)
    if of_name and hasattr(module, "layer_idx") and index in (None, -1):
        return int(of_name[1])
    return index if isinstance(index, int) else None


def _parts(module: nn.Module, attention: Set[nn.Module]) -> tuple[Part, ...]:
    """Return the attention modules, and the modules between `module` and the attention modules."""
    parts: list[Part] = []
    for name, part in module.named_children():
        inner = () if part in attention else _parts(part, attention)
        if inner or part in attention:
            # `named_children` of torch 2.13 yields children once. This dictionary shows later replacements too.
            parts += [Part(module._modules, name, part), *inner]
    return tuple(parts)


def _refuse_config(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "encoder-decoder models are not served"
    if not hasattr(config, "num_hidden_layers"):
        return "its config has no num_hidden_layers: it contains several models"
    if layers := getattr(config, "cross_attention_layers", None):
        return f"its layers {list(layers)} attend to an image, and store no text"
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None and getattr(config, "num_kv_shared_layers", None):
        return "layers that share one cache need transformers 5.23 or later"
    if set(modes or ()) - {None, "store", "reuse"}:
        return "layers that share one cache are not supported in this form"
    return None


def _refuse_alibi(config: PretrainedConfig, decoder: nn.Module) -> str | None:
    if getattr(config, "alibi", False) or any("alibi" in name for name in dir(type(decoder))):
        return "ALiBi is not served: its bias follows from the distance of slots, which eviction changes"
    if any(hasattr(part, "rel_logits_proj") for part in decoder.modules()):
        return "its attention depends on the distance of slots: it has a bias by that distance"
    return None


def _refuse_embeddings(model: PreTrainedModel) -> str | None:
    if isinstance(getattr(model.get_input_embeddings(), "weight", None), Tensor):
        return None
    return "it reads several codebooks, and policies read one row of token ids"


def _refuse_layers(config: PretrainedConfig, types: list[str]) -> str | None:
    others = Counter(kind for kind in types if kind not in (FULL, SLIDING, CHUNKED, SHARING, *RECURRENT, *STORELESS))
    if others:
        kinds = ", ".join(f"{count} of type {kind!r}" for kind, count in others.items())
        return f"it has {kinds}: kvspec serves full, sliding-window, chunked and recurrent layers"
    if FULL not in types:
        return _FIXED_SIZE
    if config.model_type == "minimax" and config.sliding_window is not None:
        return "its full-attention layers have a window too, whose mask counts slots"
    for name in ("num_attention_heads", "num_key_value_heads"):
        values = {layer_config_value(config, name, index) for index, kind in enumerate(types) if kind == FULL}
        if len(values) > 1:
            return f"its full-attention layers differ in {name}, {sorted(values)}: each must have the same heads"
    return None


def _refuse_attention(
    config: PretrainedConfig, decoder: nn.Module, attention: Mapping[int, nn.Module], types: Sequence[str],
) -> str | None:
    if not attention and getattr(decoder, "_is_stateful", False):
        return _FIXED_SIZE
    if not attention:
        inputs = signature(decoder.forward).parameters
        return _UNOBSERVED if any(name in inputs for name in NAMES) else "nothing to evict: it has no key-value cache"
    if sorted(attention) != [index for index, kind in enumerate(types) if kind not in (*RECURRENT, *STORELESS)]:
        return f"its {config.num_hidden_layers} layers do not have one attention module each"
    if any("cache_offset" in signature(module.forward).parameters for module in attention.values()):
        return "its layers run several times and keep a cache for each time, which is not served"
    if any(hasattr(getattr(module, "indexer", None), "compress_ratio") for module in attention.values()):
        return "its indexer takes positions from slots, which eviction changes"
    if not getattr(config, "is_causal", True):
        return "the attention of the model is not causal"
    return None


def _keeps_positions(decoder: nn.Module) -> bool:
    """Return True if a cached key contains the position of the token, by rotation or from a position embedding."""
    rotated = any(name.endswith("inv_freq") for name, _ in decoder.named_buffers())
    return rotated or any(name in POSITION_TABLES for name, _ in decoder.named_children())


def _refuse_implementation(config: PretrainedConfig, attention: Iterable[nn.Module]) -> str | None:
    implementation = attention_of(config)
    if str(implementation).startswith(OURS):
        return ELSEWHERE
    if implementation not in IMPLEMENTATIONS:
        return f"attn_implementation is {implementation!r}, and must be one of {', '.join(IMPLEMENTATIONS)}"
    if any(eager_attention(module) is None for module in attention):
        return _UNOBSERVED
    return None
