"""The token ids that a cache has read, and whether a call of generate passes the same ones again."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationMixin

from models_integration.model.cache_argument import CACHE
from spec.errors import SpecError

__all__ = ["ReadIds", "call_into", "calls_of_generate", "columns_of"]

UNKNOWN = -1
"""Stands for a token that was read where nobody saw its id: outside a context, from a file, from an archive."""

# One code object, by whatever name, from whatever class or bound method generate is called.
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def calls_of_generate(frame: FrameType | None = None) -> Iterator[Mapping[str, Any]]:
    """Local variables of the calls of generate that a thread is in and that have chosen a mode, innermost first.

    Args:
        frame: the innermost of the thread; None: of this one.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if frame.f_code is _GENERATE and frame.f_locals.get("generation_mode") is not None:
            yield frame.f_locals
        frame = frame.f_back


def call_into(cache: object) -> Mapping[str, Any] | None:
    """The innermost call of generate, if this is its cache."""
    call = next(calls_of_generate(), None)
    return call if call is not None and call["model_kwargs"].get(CACHE) is cache else None


def columns_of(call: Mapping[str, Any]) -> int:
    """Columns of the text that a call of generate goes on from, those included that its cache has read."""
    # The ids may be the new ones alone; the mask is about all.
    mask = call["kwargs"].get("attention_mask")
    ids: Tensor = call["input_ids"]
    return mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else ids.shape[1]


@dataclass(frozen=True)
class ReadIds:
    """Ids of the columns that a cache has read, (rows, columns); none are known of those behind them."""

    ids: Tensor = torch.empty(1, 0, dtype=torch.int64)

    def extended(self, start: int, ids: Tensor) -> "ReadIds":
        """With these ids (rows, n) from column `start` on."""
        ids = ids.detach().to(torch.int64)
        known = pad(self.ids[:, :start].to(ids.device), (0, max(0, start - self.ids.shape[1])), value=UNKNOWN)
        return ReadIds(torch.cat([known.expand(len(ids), -1), ids], dim=1))

    def first(self, columns: int) -> "ReadIds":
        """Of so many columns at most."""
        return ReadIds(self.ids[:, :columns])

    def select(self, rows: Tensor) -> "ReadIds":
        """The same of other rows of the batch, by index."""
        return ReadIds(self.ids[rows.to(self.ids.device)]) if self.ids.shape[1] else self

    def check_call(self, call: Mapping[str, Any], is_token: Tensor) -> None:
        """The text that a call of generate is about to go on from starts with what the cache has read.

        Args:
            call: one that has just begun to read.
            is_token: which columns that the cache has read hold a token, (rows, columns), or one row for all.

        Raises:
            SpecError: where the text is no longer than that, or differs.
        """
        given, seen = cast(Tensor, call["input_ids"]), is_token.shape[1]
        if columns_of(call) <= seen:
            reason = f"the cache has read {seen} already: pass the whole text again, then the new tokens"
            raise SpecError("input_ids", f"{columns_of(call)} tokens", reason)
        if columns_of(call) != given.shape[1] or len(given) < len(self.ids):
            return  # new tokens alone, or rows that the cache refuses
        text, columns = given.detach().to("cpu"), min(seen, self.ids.shape[1])
        known = self.ids[:, :columns].to("cpu").expand(len(text), -1)
        differs = (text[:, :columns] != known) & (known != UNKNOWN) & is_token[:, :columns]
        if bool(differs.any()):
            row, at = (int(index) for index in differs.nonzero()[0])
            raise SpecError(
                "input_ids", int(text[row, at]), f"is token {at} of the text, but the cache has read "
                f"{int(known[row, at])}: pass the text as it was read, or leave out past_key_values"
            )
