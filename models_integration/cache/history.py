"""Token ids that a cache has seen, and the check that a call of `generate` passes the same ids again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from models_integration.model.cache_argument import CACHE, NAMES
from models_integration.model.seams import calls_of_generate
from spec.errors import SpecError

__all__ = ["ReadIds", "call_into", "columns_of", "empty_cache_of"]

UNKNOWN = -1
"""Id of a token whose real id is unknown, because the token was read outside a context, from a file or an archive."""

def call_into(cache: object) -> Mapping[str, Any] | None:
    """Return the innermost call of `generate` if the call uses this cache, otherwise None."""
    call = next(calls_of_generate(), None)
    return call if call is not None and call["model_kwargs"].get(CACHE) is cache else None


def empty_cache_of(call: Mapping[str, Any]) -> object:
    """Return the cache that a call of `generate` made itself. If the caller passed a cache, return None."""
    passed = any(call["kwargs"].get(name) is not None for name in NAMES)
    return None if passed else call["model_kwargs"].get(CACHE)


def columns_of(call: Mapping[str, Any]) -> int:
    """Return the number of columns of the text passed to `generate`, including columns that the cache has seen."""
    # The ids may contain only the new tokens. The mask covers all tokens.
    mask = call["kwargs"].get("attention_mask")
    ids: Tensor = call["input_ids"]
    return mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else ids.shape[1]


@dataclass(frozen=True)
class ReadIds:
    """Ids of the first columns that a cache has seen, (rows, columns). Ids of later columns are unknown."""

    ids: Tensor = torch.empty(1, 0, dtype=torch.int64)

    def extended(self, start: int, ids: Tensor) -> "ReadIds":
        """Return the ids with `ids` (rows, n) inserted from column `start` on."""
        ids = ids.detach().to(torch.int64)
        known = pad(self.ids[:, :start].to(ids.device), (0, max(0, start - self.ids.shape[1])), value=UNKNOWN)
        return ReadIds(torch.cat([known.expand(len(ids), -1), ids], dim=1))

    def first(self, columns: int) -> "ReadIds":
        """Return the ids of at most the first `columns` columns."""
        return ReadIds(self.ids[:, :columns])

    def select(self, rows: Tensor) -> "ReadIds":
        """Return the ids of the rows of the batch with these indices."""
        return ReadIds(self.ids[rows.to(self.ids.device)]) if self.ids.shape[1] else self

    def check_call(self, call: Mapping[str, Any], is_token: Tensor) -> None:
        """Check that the text passed to a call of `generate` begins with the tokens that the cache has seen.

        Args:
            call: local variables of a call that has just begun to read.
            is_token: mask of the columns seen, True for tokens, (rows, columns) or (1, columns).

        Raises:
            SpecError: if the text differs, or has no more tokens than the cache.
        """
        seen = is_token.shape[1]
        if columns_of(call) < seen:
            reason = f"must begin with the {seen} tokens seen by the cache: pass the whole text and the new tokens"
            raise SpecError("input_ids", f"{columns_of(call)} tokens", reason)
        self._check_text(call, is_token)
        if columns_of(call) == seen:
            reason = "are all in the cache, and generate needs a token to read: type cache.crop(-1) before generate"
            raise SpecError("input_ids", f"{seen} tokens", reason)

    def _check_text(self, call: Mapping[str, Any], is_token: Tensor) -> None:
        given, seen = cast(Tensor, call["input_ids"]), is_token.shape[1]
        if columns_of(call) != given.shape[1] or len(given) < len(self.ids):
            return  # only new tokens, or rows that the cache rejects
        text, columns = given.detach().to("cpu"), min(seen, self.ids.shape[1])
        known = self.ids[:, :columns].to("cpu").expand(len(text), -1)
        differs = (text[:, :columns] != known) & (known != UNKNOWN) & is_token[:, :columns]
        if bool(differs.any()):
            row, at = (int(index) for index in differs.nonzero()[0])
            raise SpecError(
                "input_ids", int(text[row, at]), f"is token {at} of the text, but the cache has seen the token "
                f"{int(known[row, at])}: type cache.crop({at - seen}), pass the same text, or leave out past_key_values"
            )
