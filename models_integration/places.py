"""Where the tokens of a forward stand, and what a cache must be like for them to follow."""

from dataclasses import dataclass

from torch import Tensor

from models_integration.cache import RetainedCache
from spec.errors import SpecError
from spec.policy import Policy
from spec.retention import Granularity

__all__ = ["Place", "check_hidden", "check_known", "check_rows", "check_turn"]


@dataclass(frozen=True)
class Place:
    """Where the tokens of a forward stand: after `columns` others, in a segment that ends `until`."""

    columns: int
    until: int
    shown: Tensor
    """Which columns of the forward hold a token, (rows, n)."""
    defaults: dict[str, Tensor]
    """Inputs that the forward needs, where its caller leaves them out."""


def check_rows(cache: RetainedCache, ids: Tensor) -> None:
    """A forward has as many rows as its cache.

    Raises:
        SpecError: otherwise.
    """
    rows = cache.full_layers[0].batch
    if len(ids) != rows:
        raise SpecError("input_ids", tuple(ids.shape), f"the cache has {rows} rows")


def check_known(cache: RetainedCache) -> None:
    """The states are about all that the cache has seen.

    Raises:
        SpecError: otherwise.
    """
    seen = cache.get_seq_length()
    if not cache.states.know(seen):
        raise SpecError(
            "past_key_values", f"{seen} tokens", "its states do not know all of them: some were read outside the "
            "context, under another policy, or under a backend without decode"
        )


def check_hidden(cache: RetainedCache) -> None:
    """A turn of which a mask hides columns needs a cache without sliding windows, which would count them.

    Raises:
        SpecError: otherwise.
    """
    if len(cache.full_layers) < len(cache.layers):
        raise SpecError(
            "attention_mask", "zeros", "a padded turn is not served beside sliding-window layers: their windows would "
            "count the padding"
        )


def check_turn(policy: Policy, cache: RetainedCache, ids: Tensor) -> None:
    """A later segment keeps one set for the whole model, of a cache that does.

    Raises:
        SpecError: otherwise.
    """
    if policy.granularity is not Granularity.MODEL:
        reason = "keeps sets per layer or head, and reads a turn one token at a time only"
        raise SpecError("input_ids", tuple(ids.shape), f"{policy.name} {reason}")
    if cache.layers_differ:
        raise SpecError("past_key_values", "layers that differ", "take a turn one token at a time only")
