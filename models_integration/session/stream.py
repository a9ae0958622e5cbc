"""A stream: what a model reads, however long its forwards are, in pieces that end where segments end."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Stream"]


class Stream:
    """Cuts forwards that are longer than what is left of their segment.

    Args:
        C: tokens of a segment.
    """

    def __init__(self, C: int) -> None:
        self.C = C
        self._inside = False
        self._hidden: list[Tensor] = []

    @property
    def cutting(self) -> bool:
        """Whether the forward at hand is a piece of a longer one."""
        return self._inside or bool(self._hidden)

    def begin(self) -> None:
        """A forward comes: what one before it left behind, because it failed, is forgotten."""
        if not self._inside:
            self._hidden = []

    def ahead(self, decoder: nn.Module, arguments: Mapping[str, Any], room: int) -> dict[str, Any]:
        """Read all pieces but the last, and return the arguments of that one.

        Args:
            decoder: called once for each piece, with its hooks.
            arguments: of the whole forward.
            room: tokens until the first piece ends; the others have C.
        """
        arguments, n = dict(arguments), arguments["input_ids"].shape[1]
        hidden, start, self._inside = [], 0, True
        try:
            while start + room < n:
                output = decoder(**{**_piece(arguments, start, start + room), "return_dict": True})
                hidden.append(output.last_hidden_state)
                arguments["past_key_values"] = output.past_key_values
                start, room = start + room, self.C
        finally:
            self._inside = False
        self._hidden = hidden
        return _piece(arguments, start, n)

    def joined(self, output: Any) -> Any:
        """The output of the last piece, with the hidden states of all; None where nothing was cut."""
        if self._inside or not self._hidden:
            return None
        hidden, self._hidden = torch.cat([*self._hidden, output[0]], dim=1), []
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output


def _piece(arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The arguments of tokens start to stop."""
    n = arguments["input_ids"].shape[1]
    piece = {**arguments, "input_ids": arguments["input_ids"][:, start:stop]}
    if "attention_mask" in arguments:
        mask = arguments["attention_mask"]
        piece["attention_mask"] = mask[:, : mask.shape[1] - n + stop]
    if "position_ids" in arguments:
        piece["position_ids"] = arguments["position_ids"][:, start:stop]
    return piece
