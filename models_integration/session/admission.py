"""Admission of a forward pass: what the forward pass is, and every check of its arguments, before anything changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor, nn

from models_integration.attention.capture import reads_attention
from models_integration.attention.handover import check_readable, check_recurrence
from models_integration.cache.fixed_size_layers import cache_sizes
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache, check_cache
from models_integration.model.architecture import ELSEWHERE, IMPLEMENTATIONS, OURS, Architecture
from models_integration.model.seams import attention_of
from models_integration.session.hooks import Call
from models_integration.session.inputs import (
    OPEN,
    Arguments,
    ForwardSpan,
    check_input_ids,
    check_last,
    device_step,
    first_span,
    later_span,
    step_span,
)
from models_integration.session.method import Method
from models_integration.session.segment import Segment
from models_integration.session.streams import Stream
from spec.errors import SpecError
from spec.policy import Needs

__all__ = [
    "Admitted", "Kind", "Place", "admit", "check_axes", "check_forward", "check_mode", "check_rehearsed",
    "is_text_marker",
]

_EMBEDDINGS = (
    "policies need token ids: pass input_ids to the model. Soft prompts and embeddings from a wrapper are not supported"
)

_BOTH_WAYS = (
    "image tokens can attend to later tokens, but the policy needs causal attention: pass only text, or use keydiff,"
    " knorm, lagkv, nestedkv or streamingllm"
)

# Arguments for text, and the suffix of the names of arguments that are 0 for text tokens and not 0 for image tokens.
_TEXT, _KINDS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values"), "token_type_ids"


class Kind(StrEnum):
    """Kind of a forward pass."""

    PROMPT = "prompt"
    """First tokens of a prompt: the whole prompt, or the first piece."""
    PIECE = "piece"
    """Next tokens of a prompt or turn that has not ended."""
    TURN = "turn"
    """First tokens of a later turn."""
    STEP = "step"
    """One token in each row, after which the policy may evict."""
    READING = "reading"
    """Tokens inside `reading()`, after which nothing is evicted."""


@dataclass(frozen=True)
class Place:
    """Place of a forward pass in a session."""

    architecture: Architecture
    method: Method
    stream: Stream
    call: Call
    """Call of generate that contains the forward pass."""
    block: str
    """Block that is open: `prompt()`, `reading()`, or an empty string."""
    segment: Segment | None
    """Segment that has not ended."""


@dataclass(frozen=True)
class Admitted:
    """Forward pass that passed every check.

    Attributes:
        kind: kind of the forward pass.
        cache: given cache. None before a prompt, if the session makes the cache.
        arguments: arguments that are not None. A decode step on a device has no mask.
        span: tokens of the forward pass.
        wrong: for a decode step on a device, a tensor that is True if an input is wrong. Otherwise None.
    """

    kind: Kind
    cache: Any
    arguments: Arguments
    span: ForwardSpan
    wrong: Tensor | None = None


def admit(place: Place, given: Mapping[str, object]) -> Admitted:
    """Decide what a forward pass is, and check its arguments.

    Args:
        place: place of the forward pass in the session.
        given: arguments of the decoder by name, with the cache as `past_key_values`.

    Raises:
        SpecError: if an argument is not supported, or if the tokens cannot follow the tokens of the cache.
    """
    arguments = check_forward(given, getattr(place.architecture.config, "use_cache", True))
    check_mode(place.architecture, arguments, place.method.policy.scorer.needs)
    cache: Any = arguments.get("past_key_values")
    if isinstance(cache, RetainedCache):
        cache.check_history()
    return admit_tokens(place, arguments)


def admit_tokens(place: Place, arguments: Arguments) -> Admitted:
    """Decide what a forward pass of checked arguments is, and check that its tokens can follow the cache.

    Raises:
        SpecError: if the tokens cannot follow the tokens of the cache.
    """
    cache: Any = arguments.get("past_key_values")
    kind = _kind(place, cache, arguments["input_ids"])
    if place.segment is not None and kind in (Kind.PIECE, Kind.STEP):
        place.segment.check_goes_on(cache, arguments["input_ids"])
    if kind is Kind.STEP:
        return _step(place, cache, arguments)
    return Admitted(kind, cache, arguments, _SPANS[kind](place, cache, arguments))


def _kind(place: Place, cache: object, ids: Tensor) -> Kind:
    seen = cache.get_seq_length() if isinstance(cache, RetainedCache) else 0
    inside = bool(place.block) and seen < place.call.columns  # of a block, but not generated inside the block
    if ids.shape[1] == 1 and seen > 0 and not inside:
        between = place.segment is None and seen + 1 >= place.call.segment_end
        if place.stream.is_step(between):
            return Kind.STEP
    if place.block == "reading()":
        return Kind.READING
    if place.segment is not None:
        return Kind.PIECE
    return Kind.TURN if seen > 0 else Kind.PROMPT


def _step(place: Place, cache: RetainedCache, arguments: Arguments) -> Admitted:
    vocabulary = place.architecture.vocabulary
    if arguments["input_ids"].is_cpu:
        return Admitted(Kind.STEP, cache, arguments, step_span(vocabulary, arguments, cache))
    rest, span, wrong = device_step(vocabulary, arguments, cache)
    return Admitted(Kind.STEP, cache, rest, span, wrong)


def _reading(place: Place, cache: Any, arguments: Arguments) -> ForwardSpan:
    if not isinstance(cache, RetainedCache) or cache.get_seq_length() == 0:
        raise SpecError("past_key_values", "0 tokens", "must contain a prompt inside reading(); pass run.cache")
    span = later_span(place.architecture.vocabulary, arguments, cache, OPEN)
    if span.padded:
        place.method.check_padded_reading()
        check_last(span.is_token)
    return span


def _prompt(place: Place, cache: Any, arguments: Arguments) -> ForwardSpan:
    nothing = torch.ones(len(arguments["input_ids"]), 0, dtype=torch.bool, device="cpu")
    return _first(place, arguments, nothing, _segment_end(place, 0))


def _turn(place: Place, cache: RetainedCache, arguments: Arguments) -> ForwardSpan:
    place.method.check_turn(cache)
    return _later(place, cache, arguments, _segment_end(place, cache.get_seq_length()))


def _piece(place: Place, cache: RetainedCache, arguments: Arguments) -> ForwardSpan:
    segment = place.segment
    assert segment is not None
    if segment.observed.later:
        return _later(place, cache, arguments, segment.segment_end)
    return _first(place, arguments, segment.observed.is_token, segment.segment_end)


_SPANS: Mapping[Kind, Callable[[Place, Any, Arguments], ForwardSpan]] = {
    Kind.PROMPT: _prompt, Kind.PIECE: _piece, Kind.TURN: _turn, Kind.READING: _reading,
}


def _segment_end(place: Place, seen: int) -> int:
    """Return the number of columns after which a segment ends that begins after `seen` columns."""
    return place.stream.segment_end(seen, OPEN if place.block else place.call.segment_end)


def _first(place: Place, arguments: Arguments, before: Tensor, segment_end: int) -> ForwardSpan:
    span = first_span(place.architecture.vocabulary, arguments, before, segment_end)
    check_rehearsed(place.method.policy.scorer.needs, span)
    place.stream.check_span(span)
    return span


def _later(place: Place, cache: RetainedCache, arguments: Arguments, segment_end: int) -> ForwardSpan:
    span = later_span(place.architecture.vocabulary, arguments, cache, segment_end)
    place.stream.check_span(span)
    if span.padded:
        place.method.check_padded(cache)
    return span


def check_mode(architecture: Architecture, arguments: Mapping[str, object], needs: Needs) -> None:
    """Check that the model uses a supported attention and fills a cache, and that the policy supports the inputs.

    Args:
        architecture: description of the model.
        arguments: given arguments of the forward pass.
        needs: tensors that the policy needs.

    Raises:
        SpecError: if a check fails.
    """
    decoder, implementation = architecture.decoder, attention_of(architecture.config)
    if str(implementation).startswith(OURS):
        raise SpecError("model", architecture.name, ELSEWHERE)
    if implementation not in IMPLEMENTATIONS:
        reason = f"must be {' or '.join(IMPLEMENTATIONS)} inside a context: type model.set_attn_implementation('sdpa')"
        raise SpecError("attn_implementation", implementation, reason)
    architecture.check_attention()
    if decoder.training and any(getattr(part, "gradient_checkpointing", False) for part in decoder.modules()):
        reason = "gradient checkpointing disables the cache: call model.eval(), or turn off gradient checkpointing"
        raise SpecError("model", architecture.name, reason)
    cache, config = arguments.get("past_key_values"), architecture.config
    if isinstance(cache, RetainedCache):
        _check_sizes(architecture, cache)
    if isinstance(cache, RetainedCache) and cache.layers_differ:
        asked = arguments.get("output_attentions", getattr(config, "output_attentions", False))
        if asked and any(isinstance(layer, RaggedLayer) for layer in cache.layers):
            reason = "must be False, because the heads store different tokens and have weights of different shapes"
            raise SpecError("output_attentions", True, reason)
        check_readable(architecture, cache)
    check_recurrence(architecture, arguments, cache)
    check_axes(decoder, arguments)
    if architecture.wraps:
        _check_images(architecture, arguments, needs)


def _check_sizes(architecture: Architecture, cache: RetainedCache) -> None:
    """Check that the layers of the cache have the sizes of the model's. transformers uses the layers that fit.

    Raises:
        SpecError: if the cache was made for a model with different layers, heads, widths or windows.
    """
    for name, size in cache_sizes(architecture.config).items():
        if cache.sizes[name] != size:
            reason = f"must be of a model with {name} {size}: pass a cache of this model, or leave out past_key_values"
            raise SpecError("past_key_values", f"{name} {cache.sizes[name]}", reason)


def check_axes(decoder: nn.Module, arguments: Mapping[str, object]) -> None:
    """Check that positions have several axes only if the decoder computes positions on several axes (mRoPE).

    Raises:
        SpecError: if the positions have more axes than the decoder's.
    """
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim > 2 and not hasattr(decoder, "get_rope_index"):
        raise SpecError("position_ids", tuple(positions.shape), "must be (rows, n): the model has one position a token")


def is_text_marker(name: str, value: object) -> bool:
    """Return True if an argument of a multimodal model states that all tokens are text."""
    return isinstance(value, Tensor) and name.endswith(_KINDS) and not bool(value.any())


def _is_given(value: object) -> bool:
    """Return True if an argument contains a tensor. transformers 5.24 passes an empty dict of encodings with text."""
    if isinstance(value, Mapping):
        return any(map(_is_given, value.values()))
    if isinstance(value, (list, tuple)):
        return any(part is not None for part in value)
    return isinstance(value, Tensor)


def _check_images(architecture: Architecture, arguments: Mapping[str, object], needs: Needs) -> None:
    """Check that images, video and sound are passed with a first prompt, to a policy that reads no attention.

    Raises:
        SpecError: if images, video or sound are passed in a different case.
    """
    cache = arguments.get("past_key_values")
    for name, value in arguments.items():
        if name in _TEXT or not _is_given(value) or is_text_marker(name, value):
            continue
        if hasattr(architecture.decoder, "get_rope_index"):
            raise SpecError(name, "given", "images with positions on several axes (mRoPE) are not supported: pass text")
        if reads_attention(needs):
            raise SpecError(name, "given", _BOTH_WAYS)
        if isinstance(cache, RetainedCache) and cache.get_seq_length() > 0:
            raise SpecError(name, "given", "can be passed only with the first prompt: use a new cache")


def check_forward(arguments: Mapping[str, object], default_use_cache: bool) -> Arguments:
    """Check the arguments of a forward pass inside the context, and return the arguments that are not None.

    Raises:
        SpecError: if embeddings replace the ids, or if the ids have a wrong shape or dtype. Also if the cache is
            disabled or is no RetainedCache, or if the attention is not causal.
    """
    if arguments.get("inputs_embeds") is not None:
        raise SpecError("inputs_embeds", "given", _EMBEDDINGS)
    check_input_ids(arguments.get("input_ids"))
    use_cache = arguments.get("use_cache")
    if not (default_use_cache if use_cache is None else use_cache):
        raise SpecError("use_cache", False, "must be True, because eviction needs a cache")
    if (cache := arguments.get("past_key_values")) is not None:
        check_cache(cache)
    if arguments.get("is_causal") is False:
        raise SpecError("is_causal", False, "must be omitted or True: policies evict from causal attention only")
    return cast(Arguments, {name: value for name, value in arguments.items() if value is not None})


def check_rehearsed(needs: Needs, span: ForwardSpan) -> None:
    """Check that the prompts have equally many tokens, if the policy repeats the prompts.

    Raises:
        SpecError: if a prompt has padding. With padding, the chunks of the prompts would have different lengths.
    """
    if needs.rehearsal is not None and span.padded:
        raise SpecError("attention_mask", "zeros", "must be all ones, because the policy repeats the prompts")
