"""Where segments end: with their forwards, or every C tokens of a stream, whose longer forwards are read in pieces."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from models_integration.model.cache_argument import CACHE
from models_integration.session.inputs import Arguments, DecoderOutput, ForwardSpan
from spec.errors import SpecError

__all__ = ["Stream", "WholeForwards"]

_JOINED = ("last_hidden_state", "hidden_states", "router_logits")
"""Fields of a decoder's output, beside the cache, that can be made of those of its pieces."""


class WholeForwards:
    """Every forward is read as it is."""

    endless = False
    """Whether all that is read is one sequence of segments, which the context's end closes."""

    def begin(self) -> None:
        """A forward comes."""

    def is_step(self, between_segments: bool) -> bool:
        """Whether a forward of one token is a decode step: between two segments it is."""
        return between_segments

    def segment_end(self, columns: int, stated: int) -> int:
        """Columns after which a segment ends that begins after `columns`: as the session states it."""
        return stated

    def check_block(self, name: str) -> None:
        """Every block may be opened."""

    def check_beams(self, beams: int) -> None:
        """Any number of beams may be searched."""

    def check_span(self, span: ForwardSpan) -> None:
        """Rows may be padded."""

    def is_too_long(self, span: ForwardSpan) -> bool:
        """Whether the forward must be cut: never."""
        return False

    def ahead(self, decoder: nn.Module, arguments: Arguments, room: int) -> Arguments:
        """Nothing is cut."""
        return arguments

    def joined(self, output: DecoderOutput) -> DecoderOutput | None:
        """None: nothing was cut."""
        return None


class Stream(WholeForwards):
    """Cuts forwards that are longer than what is left of their segment.

    Args:
        C: tokens of a segment.
        decode: whether a forward of one token is a decode step, and not a piece of a segment.
    """

    endless = True

    def __init__(self, C: int, decode: bool) -> None:
        self.C = C
        self._decode = decode
        self._inside = False
        self._outputs: list[Any] = []
        self._as_tuple = False

    def begin(self) -> None:
        """A forward comes: what one before it left behind, because it failed, is forgotten."""
        if not self._inside:
            self._outputs = []

    def is_step(self, between_segments: bool) -> bool:
        """Whether a forward of one token is a decode step: a piece of a longer forward is none."""
        return self._decode and not self._inside and not self._outputs

    def segment_end(self, columns: int, stated: int) -> int:
        """Columns after which a segment ends that begins after `columns`: C more."""
        return columns + self.C

    def check_block(self, name: str) -> None:
        """No block can hold a segment open.

        Raises:
            SpecError: always.
        """
        raise SpecError(name, "a block", "cannot be used in a stream, whose segments end after every C tokens")

    def check_beams(self, beams: int) -> None:
        """Beams are not served.

        Raises:
            SpecError: for more than one.
        """
        if beams > 1:
            raise SpecError(
                "num_beams", beams, "must be 1, because beams would change rows inside a segment of the stream"
            )

    def check_span(self, span: ForwardSpan) -> None:
        """Padding is not served.

        Raises:
            SpecError: for a column without a token.
        """
        if span.padded:
            raise SpecError("attention_mask", "zeros", "must be all ones: a stream does not support padding")

    def is_too_long(self, span: ForwardSpan) -> bool:
        """Whether the forward must be cut."""
        return span.padded_seen + span.is_token.shape[1] > span.segment_end

    def ahead(self, decoder: nn.Module, arguments: Arguments, room: int) -> Arguments:
        """Read all pieces but the last, and return the arguments of that one.

        Args:
            decoder: called once for each piece, with its hooks.
            arguments: of the whole forward.
            room: tokens until the first piece ends; the others have C.

        Raises:
            SpecError: where attention weights are asked for.
        """
        _check_outputs(decoder, arguments)
        arguments, n = arguments.copy(), arguments["input_ids"].shape[1]
        outputs, start, self._inside = [], 0, True
        try:
            while start + room < n:
                output = decoder(**{**_piece(arguments, start, start + room), "return_dict": True})
                outputs.append(output)
                arguments["past_key_values"] = output[CACHE]
                start, room = start + room, self.C
        finally:
            self._inside = False
        self._outputs, self._as_tuple = outputs, not _asked(decoder, arguments, "return_dict", default=True)
        return cast(Arguments, {**_piece(arguments, start, n), "return_dict": True})

    def joined(self, output: DecoderOutput) -> DecoderOutput | None:
        """The outputs of all pieces, of which this is the last, as one; None where nothing was cut."""
        if self._inside or not self._outputs:
            return None
        parts, self._outputs = [*self._outputs, cast(Any, output)], []
        whole: Any = output
        for name in [name for name in whole if name != CACHE]:
            if name not in _JOINED:
                raise SpecError(
                    name, "asked for",
                    "must be left out, because a stream splits a forward pass into pieces and cannot join the outputs",
                )
            whole[name] = _joined(len(whole.last_hidden_state), [part[name] for part in parts])
        return cast(DecoderOutput, whole.to_tuple() if self._as_tuple else whole)


def _asked(decoder: nn.Module, arguments: Arguments, name: str, *, default: bool = False) -> bool:
    """Whether a forward is asked for something, by its arguments or by the decoder's config."""
    given = cast(dict[str, Any], arguments).get(name)
    return bool(getattr(cast(PretrainedConfig, decoder.config), name, default) if given is None else given)


def _check_outputs(decoder: nn.Module, arguments: Arguments) -> None:
    if _asked(decoder, arguments, "output_attentions"):
        reason = (
            "a stream evicts during the forward pass, so the weights have different shapes: pass C tokens at a time"
        )
        raise SpecError("output_attentions", True, reason)


def _joined(rows: int, parts: list[Any]) -> Any:
    """One field of the pieces' outputs: a tensor, or a tuple with one for each layer."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(rows, list(layer)) for layer in zip(*parts, strict=True))
    if parts[0] is None:
        return None
    # A router flattens rows and tokens.
    flat = parts[0].dim() == 2
    whole = torch.cat([part.unflatten(0, (rows, -1)) if flat else part for part in parts], dim=1)
    return whole.flatten(0, 1) if flat else whole


def _piece(arguments: Arguments, start: int, stop: int) -> Arguments:
    """The arguments of tokens start to stop."""
    piece, n = arguments.copy(), arguments["input_ids"].shape[1]
    piece["input_ids"] = arguments["input_ids"][:, start:stop]
    if "attention_mask" in arguments:
        mask = arguments["attention_mask"]
        piece["attention_mask"] = mask[:, : mask.shape[1] - n + stop]
    if "position_ids" in arguments:
        piece["position_ids"] = arguments["position_ids"][:, start:stop]
    return piece
