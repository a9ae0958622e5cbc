"""Ends of segments. Outside streams a forward pass stays whole. A stream splits forward passes after every C tokens."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from models_integration.model.cache_argument import CACHE
from models_integration.session.inputs import Arguments, DecoderOutput, ForwardSpan
from spec.errors import SpecError

__all__ = ["Stream"]

_JOINED = ("last_hidden_state", "hidden_states", "router_logits")
"""Fields of a decoder's output that can be joined from the outputs of pieces."""


class Stream:
    """Ends of the segments of a session. If C is given, all tokens of the context form one stream.

    A stream splits a forward pass into pieces at the ends of segments. The last segment ends with the context.

    Args:
        C: number of tokens of a segment of a stream. If C is None, every forward pass stays whole.
        decode: if True, a forward pass of one token in a stream is a decode step. If False, it belongs to a segment.
    """

    def __init__(self, C: int | None, decode: bool) -> None:
        self.C = C
        self._decode = decode
        self._inside = False
        self._outputs: list[Any] = []
        self._as_tuple = False

    @property
    def endless(self) -> bool:
        """True if all tokens of the context form one stream."""
        return self.C is not None

    def begin(self) -> None:
        """Discard the outputs of an earlier forward pass that failed, before a new forward pass."""
        if not self._inside:
            self._outputs = []

    def is_step(self, between_segments: bool) -> bool:
        """Return True if a forward pass of one token is a decode step. A piece of a longer forward pass is not."""
        if not self.endless:
            return between_segments
        return self._decode and not self._inside and not self._outputs

    def segment_end(self, columns: int, stated: int) -> int:
        """Return the end of a segment that begins after `columns` columns: columns + C.

        Without a stream, this is `stated`, the number that the session gives.
        """
        return stated if self.C is None else columns + self.C

    def check_block(self, name: str) -> None:
        """Check that the block `run.prompt()` or `run.reading()` is not inside a stream.

        Raises:
            SpecError: if it is.
        """
        if self.endless:
            raise SpecError(name, "a block", "cannot be used in a stream, whose segments end after every C tokens")

    def check_beams(self, beams: int) -> None:
        """Check that a stream has at most one beam.

        Raises:
            SpecError: if there are several beams.
        """
        if self.endless and beams > 1:
            raise SpecError(
                "num_beams", beams, "must be 1, because beams would change rows inside a segment of the stream"
            )

    def check_span(self, span: ForwardSpan) -> None:
        """Check that no row of a stream has padding.

        Raises:
            SpecError: if a row has padding.
        """
        if self.endless and span.padded:
            raise SpecError("attention_mask", "zeros", "must be all ones: a stream does not support padding")

    def is_too_long(self, span: ForwardSpan) -> bool:
        """Return True if a stream must split the forward pass, because the tokens do not fit into the segment."""
        return self.endless and span.padded_seen + span.is_token.shape[1] > span.segment_end

    def ahead(self, decoder: nn.Module, arguments: Arguments, size: int) -> Arguments:
        """Process all pieces except the last, and return the arguments of the last piece.

        Args:
            decoder: decoder to call once for each piece, with hooks.
            arguments: arguments of the whole forward pass.
            size: number of tokens of the first piece. Each later piece except the last has C tokens.

        Raises:
            SpecError: if attention weights are requested.
        """
        _check_outputs(decoder, arguments)
        arguments, n = arguments.copy(), arguments["input_ids"].shape[1]
        outputs, start, self._inside = [], 0, True
        assert self.C is not None
        try:
            while start + size < n:
                output = decoder(**{**_piece(arguments, start, start + size), "return_dict": True})
                outputs.append(output)
                arguments["past_key_values"] = output[CACHE]
                start, size = start + size, self.C
        finally:
            self._inside = False
        self._outputs, self._as_tuple = outputs, not _asked(decoder, arguments, "return_dict", default=True)
        return cast(Arguments, {**_piece(arguments, start, n), "return_dict": True})

    def joined(self, output: DecoderOutput) -> DecoderOutput | None:
        """Join the outputs of all pieces. `output` belongs to the last piece. Return None if nothing was split."""
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
    """Return the value of an option of a forward pass, from the arguments or the config of the decoder."""
    given = cast(dict[str, Any], arguments).get(name)
    return bool(getattr(cast(PretrainedConfig, decoder.config), name, default) if given is None else given)


def _check_outputs(decoder: nn.Module, arguments: Arguments) -> None:
    if _asked(decoder, arguments, "output_attentions"):
        reason = (
            "a stream evicts during the forward pass, so the weights have different shapes: pass C tokens at a time"
        )
        raise SpecError("output_attentions", True, reason)


def _joined(rows: int, parts: list[Any]) -> Any:
    """Join one field of the outputs of all pieces. The field is a tensor, or a tuple of one tensor for each layer."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(rows, list(layer)) for layer in zip(*parts, strict=True))
    if parts[0] is None:
        return None
    # The logits of a router have rows and tokens in one dimension.
    flat = parts[0].dim() == 2
    whole = torch.cat([part.unflatten(0, (rows, -1)) if flat else part for part in parts], dim=1)
    return whole.flatten(0, 1) if flat else whole


def _piece(arguments: Arguments, start: int, stop: int) -> Arguments:
    """Return the arguments of a forward pass over the tokens from `start` to `stop` (excluded)."""
    piece, n = arguments.copy(), arguments["input_ids"].shape[1]
    piece["input_ids"] = arguments["input_ids"][:, start:stop]
    if "attention_mask" in arguments:
        mask = arguments["attention_mask"]
        piece["attention_mask"] = mask[:, : mask.shape[1] - n + stop]
    if "position_ids" in arguments:
        piece["position_ids"] = arguments["position_ids"][:, start:stop]
    return piece
