"""Renumbered rotary positions of a cache: which keys a forward pass turns, and to which positions.

A cache stores keys as the model computed them. Before a forward pass attends, the keys whose rotary position has
changed since then are turned once, in a copy. The turned keys of a layer are stored until the next eviction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.cache.positions import EMPTY
from models_integration.model.architecture import Architecture
from models_integration.model.errors import UnknownModel
from models_integration.model.rotation import CHANGING, recognise, rotary_buffers, rotary_module, turned
from reference.positions import base_of_stream
from spec.errors import SpecError

__all__ = ["KEPT", "RENUMBERED", "LayerNumbering", "LayerTurn", "Numbering", "TurnedKeys", "check_rule", "numbering_of"]

KEPT, RENUMBERED = "kept", "renumbered"


class LayerTurn(NamedTuple):
    """Rotation of one layer's keys."""

    slot: str
    """Tensor that the model rotates: "keys", or "values" for the latents of MLA."""
    style: str
    """Pairs of channels: "half_split" or "interleaved"."""
    frequencies: Tensor
    """Inverse frequencies, (pairs,)."""


@dataclass(frozen=True)
class Numbering:
    """Renumbered positions of a cache.

    Attributes:
        layers: rotation of each full-attention layer with rotary positions, by index.
        starts: positions of the text, ascending. From starts[i] on, the model computed keys with bases[i].
        bases: numbers that were subtracted from positions of the text, see POS-BASE.
    """

    layers: Mapping[int, LayerTurn]
    starts: tuple[int, ...] = (0,)
    bases: tuple[int, ...] = (0,)

    @property
    def base(self) -> int:
        """Number that the next forward pass subtracts from positions of the text."""
        return self.bases[-1]

    def before(self, seen: int, longest: int, tokens: int, limit: int) -> "Numbering":
        """Return the numbering of a forward pass of `tokens` tokens. If too few positions are free below `limit`, no
        base moves.

        Implements: POS-BASE
        """
        if longest + tokens > limit:
            return self
        base = base_of_stream(seen, self.base, longest, tokens, limit)
        if base == self.base:
            return self
        return replace(self, starts=(*self.starts, seen), bases=(*self.bases, base))

    def computed(self, positions: Tensor) -> Tensor:
        """Return the rotary positions at which the model computed the keys of these positions of the text."""
        at = torch.searchsorted(torch.tensor(self.starts, device="cpu"), positions.contiguous(), right=True) - 1
        return positions - torch.tensor(self.bases, device="cpu")[at.clamp(min=0)]

    def moves(self, stored: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Return computed and assigned rotary positions of the first slots, up to the last slot that changes.

        Implements: POS-RENUMBERED

        Args:
            stored: positions of the text by slot, (rows, stored). EMPTY marks a slot without a token.
            following: position of the text of each row's next token, (rows,).
        """
        is_token = stored != EMPTY
        from_end = is_token.flip(1).cumsum(dim=1).flip(1)
        computed = torch.where(is_token, self.computed(stored.clamp(min=0)), 0)
        assigned = torch.where(is_token, following[:, None] - self.base - from_end, 0)
        moved = (computed != assigned).any(dim=0).nonzero()
        width = int(moved[-1]) + 1 if len(moved) else 0
        return computed[:, :width], assigned[:, :width]

    def moves_of_heads(
        self, stored: Sequence[Tensor], following: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return the computed and the assigned positions of the keys of several heads, and the number for each head.

        Args:
            stored: positions of the text by slot, (1, stored), for each head.
            following: position of the text of each head's next token, (heads,).
        """
        moves = [self.moves(positions, following[at : at + 1]) for at, positions in enumerate(stored)]
        computed, assigned = (torch.cat([one[part][0] for one in moves]) for part in (0, 1))
        return computed, assigned, tuple(one.shape[1] for one, _ in moves)


class LayerNumbering(NamedTuple):
    """Numbering of a cache, with the rotation of one layer."""

    numbering: Numbering
    turn: LayerTurn

    def turned(self, tensor: Tensor, computed: Tensor, assigned: Tensor) -> Tensor:
        """Return keys (..., slots, d) turned once from the computed to the assigned positions, (..., slots).

        Implements: POS-TURN

        Each product is rounded to float32, like the model's own angles. The rotation is computed in float64 and rounded
        once to the dtype of the keys.
        """
        frequencies = self.turn.frequencies.to(tensor.device).float()
        to, back = (at.to(tensor.device).float()[..., None] * frequencies for at in (assigned, computed))
        return turned(tensor, to.double() - back.double(), self.turn.style)


class TurnedKeys(NamedTuple):
    """Keys that a layer has turned, and the state of the layer for which the keys are valid."""

    state: object
    """Object that describes the stored tokens. Each eviction replaces the object."""
    numbering: LayerNumbering
    keys: Tensor | None
    """Turned keys, or None if no key turns."""
    widths: tuple[int, ...] = ()
    """Number of turned slots of each head, if heads store different tokens."""

    def is_valid(self, state: object, numbering: LayerNumbering) -> bool:
        """Return True if the turned keys are those of the state and the numbering, and have no gradients to compute."""
        unchanged = self.state is state and self.numbering.numbering is numbering.numbering
        return unchanged and not torch.is_grad_enabled()


def check_rule(positions: object) -> None:
    """Check the name of a position rule.

    Raises:
        SpecError: if `positions` is not "kept" or "renumbered".
    """
    if not isinstance(positions, str) or positions not in (KEPT, RENUMBERED):
        raise SpecError("positions", positions, 'must be "kept" or "renumbered"')


# Numbering before a prompt, by decoder.
_NUMBERINGS: WeakKeyDictionary[nn.Module, Numbering] = WeakKeyDictionary()


def numbering_of(model: PreTrainedModel, architecture: Architecture) -> Numbering:
    """Return the numbering of a model before a prompt. The rotation is recognised from tiny prefills.

    Raises:
        SpecError: if keys of the model cannot be turned, or the frequencies depend on the length of the text.
    """
    decoder = architecture.decoder
    if decoder not in _NUMBERINGS:
        _NUMBERINGS[decoder] = _recognised(model, architecture)
    return _NUMBERINGS[decoder]


def _recognised(model: PreTrainedModel, architecture: Architecture) -> Numbering:
    name = architecture.name
    for buffer, _ in rotary_buffers(model):
        kind = rotary_module(model, buffer)[2]
        if any(changing in kind for changing in CHANGING):
            reason = f"the rotary frequencies of {name} change with the length ({kind}): type positions='kept'"
            raise SpecError("positions", "renumbered", reason)
    if architecture.indexed:
        raise SpecError("positions", "renumbered", f"{name} has an indexer with keys of its own: type positions='kept'")
    try:
        rotary = recognise(model)
    except UnknownModel as error:
        raise SpecError("positions", "renumbered", f"is not supported ({error}): type positions='kept'") from error
    layers = {}
    for index in architecture.full_layers:
        of = rotary.layers[index]
        if of.slot is not None and of.style is not None and of.buffer is not None:
            layers[index] = LayerTurn(of.slot, of.style, rotary.frequencies[of.buffer])
    if not layers:
        raise SpecError("positions", "renumbered", f"{name} has no rotary positions: type positions='kept'")
    return Numbering(layers)
