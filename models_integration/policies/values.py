"""Values that policies need from a model (RoPE frequencies, output projections) or from a tokenizer."""

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import regex
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture
from models_integration.model.frame import chat, encode
from models_integration.model.isolated_forward import read_tokens, trial_forward
from models_integration.model.layer_kinds import layer_config_value
from models_integration.model.rotation import (
    CHANGING,
    PROBE_START,
    LayerRotary,
    explain_rotation,
    probed,
    rotary_buffers,
    rotary_module,
    scaling_of,
)
from spec.errors import SpecError
from spec.policy import DeviceArray

__all__ = ["output_projections", "read_rotation", "repeat_template", "sentence_ends"]

_PROJECTIONS = ("o_proj", "dense", "out_proj", "wo", "c_proj")
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Python's unicodedata has no Sentence_Terminal. transformers requires regex, too.
_TERMINAL = regex.compile(r"\p{Sentence_Terminal}")
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
"""Requests to repeat the prompt, in the wording of KVzip's code."""

# Name of the buffer with the frequencies, by decoder.
_BUFFERS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def read_rotation(architecture: Architecture) -> dict[str, Any]:
    """Read the frequencies `inv_freq` of the full-attention layers, and the `factor` inside the rotary tables.

    Raises:
        SpecError: if these layers do not share one rotation of whole heads in pairs of halves. Also if the frequencies
            depend on the length.
    """
    name, decoder = architecture.name, architecture.decoder
    if architecture.latent:
        raise SpecError("model", name, "must have a rotary embedding that changes the whole key (not MLA)")
    if decoder not in _BUFFERS:
        _BUFFERS[decoder] = _shared_buffer(architecture)
    inv_freq = decoder.get_buffer(_BUFFERS[decoder]).detach().to("cpu").double().numpy()
    return {"inv_freq": inv_freq, "factor": scaling_of(decoder, _BUFFERS[decoder])}


def _shared_buffer(architecture: Architecture) -> str:
    """Return the name of the buffer with the frequencies by which every full-attention layer rotates keys.

    The model processes a single token at two positions. A single token can attend only to itself, so the keys differ
    only by the rotation.
    """
    name, decoder = architecture.name, architecture.decoder
    frequencies = {key: buffer.detach().clone() for key, buffer in rotary_buffers(decoder)}
    if not frequencies:
        raise SpecError("model", name, "has no rotary frequencies")
    if changing := {rotary_module(decoder, key)[2] for key in frequencies} & set(CHANGING):
        raise SpecError("model", name, f"the rotary frequencies must not change with the length ({changing.pop()})")
    before, after = _probe(architecture)
    kinds = {explain_rotation(*pair, PROBE_START, frequencies) for pair in zip(before, after, strict=True)}
    if LayerRotary() in kinds:
        raise SpecError("model", name, "has a full-attention layer without rotary positions")
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind.buffer is None:
        raise SpecError("model", name, "must have one rotary embedding for all full-attention layers")
    channels, d = 2 * len(frequencies[kind.buffer]), before[0]["keys"].shape[-1]
    if channels != d:
        raise SpecError("model", name, f"must rotate all {d} channels of a head, but rotates {channels}")
    if kind.style != "half_split":
        reason = "must rotate the two halves of a head against each other, but rotates neighbouring channels"
        raise SpecError("model", name, reason)
    return kind.buffer


def _probe(architecture: Architecture) -> list[list[Mapping[str, Tensor]]]:
    """Return the keys and values that the full-attention layers store for a token at position 0 and at PROBE_START."""
    caches = {start: RetainedCache(architecture.config) for start in (0, PROBE_START)}
    with trial_forward(architecture, f"a token at position {PROBE_START}"):
        for start, cache in caches.items():
            read_tokens(architecture, cache, 1, start=start)
    return [
        [probed(cast(Tensor, layer.keys), cast(Tensor, layer.values)) for layer in cache.full_layers]
        for cache in caches.values()
    ]


def output_projections(architecture: Architecture, on_device: bool = False) -> Mapping[int, DeviceArray]:
    """Return W_o (H, d, hidden) of each full-attention layer: the rows of the output projection for each query head.

    Args:
        on_device: if True, return views of the model's weights instead of float64 arrays.

    Raises:
        SpecError: if the output projection is not a linear layer with a known name, or if the weights have no values.
    """
    projections = {}
    for layer in architecture.full_layers:
        module = architecture.attention[layer]
        linear = next((part for name, part in module.named_children() if name in _PROJECTIONS), None)
        if not isinstance(linear, (nn.Linear, Conv1D)):
            raise SpecError("model", type(module).__name__, f"has no output projection {' or '.join(_PROJECTIONS)}")
        H, weight = layer_config_value(architecture.config, "num_attention_heads", layer), linear.weight.detach()
        if type(weight) is not Tensor or weight.dtype not in _PLAIN or weight.is_meta:
            reason = "the output projection is quantised or offloaded: load the model in bfloat16, float16 or float32"
            raise SpecError("model", type(module).__name__, reason)
        rows = weight if isinstance(linear, Conv1D) else weight.T  # the rows of a Conv1D weight (GPT-2) are the inputs
        cut = (rows if on_device else rows.to("cpu", torch.float64)).reshape(H, -1, rows.shape[1])
        projections[layer] = cut if on_device else cut.numpy()
    return projections


def repeat_template(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Make the `template` of KVzip: token ids of two requests to repeat the prompt, and of the start of an answer.

        kvspec.policy_from_name("kvzip", 0.3, template=kvspec.repeat_template(tokenizer))

    If the tokenizer has no chat template, the start of an answer is a newline.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        SpecError: if `tokenizer` is not a tokenizer of transformers, or if its chat template changes the text of a
            message.
    """
    _check_tokenizer(tokenizer)
    answer = "\n" if getattr(tokenizer, "chat_template", None) is None else chat(tokenizer).closing
    return tuple(tuple(encode(tokenizer, text)) for text in (FIRST, LATER, answer))


def sentence_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all tokens that end a sentence, for CrystalCache.

        policy = kvspec.CrystalCache(0.4, kvspec.sentence_ends(tokenizer))

    A token ends a sentence if the text of the token contains a newline or ends in a mark. Marks are the characters with
    the Unicode property Sentence_Terminal (UAX 29). In ASCII these characters are `.`, `!` and `?`. Spaces at the end
    of the text are ignored. Special tokens never end a sentence. Thai text has no marks. A tokenizer of bytes can store
    a mark in several tokens, which end no sentence. `run.sentence_ends` is the number of ends in a text.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        SpecError: if `tokenizer` is not a tokenizer of transformers, or if no token ends a sentence.
    """
    _check_tokenizer(tokenizer)
    special = set(tokenizer.all_special_ids)
    special.update(added for added, token in tokenizer.added_tokens_decoder.items() if token.special)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    ends = frozenset(token_id for token_id in ids if _ends_a_sentence(_text(tokenizer, token_id)))
    if not ends:
        reason = f"must have a token that ends a sentence; none of the {len(ids)} text tokens does"
        raise SpecError("tokenizer", type(tokenizer).__name__, reason)
    return ends


def _check_tokenizer(tokenizer: object) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SpecError("tokenizer", type(tokenizer).__name__, "must be a tokenizer of transformers")


def _text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    # Clean-up would remove spaces before punctuation marks.
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _ends_a_sentence(text: str) -> bool:
    return "\n" in text or _TERMINAL.match(text.strip(" ")[-1:]) is not None
