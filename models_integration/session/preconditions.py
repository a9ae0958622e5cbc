"""Where the tokens of a forward stand, and what a cache must be like for them to follow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.scorer_records import Decoding
from spec.errors import SpecError
from spec.policy import Policy, SeparableScorer
from spec.retention import Granularity

if TYPE_CHECKING:
    from models_integration.session.segment import Segment

__all__ = ["Place", "check_goes_on", "check_hidden", "check_known", "check_records", "check_rows", "check_turn"]


@dataclass(frozen=True)
class Place:
    """Where the tokens of a forward stand: after `columns` others, in a segment that ends `until`."""

    columns: int
    until: int
    shown: Tensor
    """Which columns of the forward hold a token, (rows, n)."""
    defaults: dict[str, Tensor]
    """Inputs that the forward needs, where its caller leaves them out."""


def check_goes_on(segment: "Segment", cache: Any, ids: Tensor) -> None:
    """The next piece of a segment that is open.

    Raises:
        SpecError: for another cache, or another number of rows.
    """
    if cache is not segment.cache:
        raise SpecError("past_key_values", type(cache).__name__, "must be the cache of the prompt that is open")
    if len(ids) != segment.rows:
        raise SpecError("input_ids", tuple(ids.shape), f"the prompt that is open has {segment.rows} rows")


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


def check_hidden(policy: Policy, cache: RetainedCache) -> None:
    """A turn of which a mask hides columns needs one kept set for the whole model, and no sliding windows.

    Raises:
        SpecError: otherwise.
    """
    if len(cache.full_layers) < len(cache.layers):
        raise SpecError(
            "attention_mask", "zeros", "a padded turn is not served beside sliding-window layers: their windows would "
            "count the padding"
        )
    if policy.granularity is not Granularity.MODEL or policy.cadence.every is not None or cache.layers_differ:
        raise SpecError(
            "attention_mask", "zeros", "a padded turn is served where the policy keeps one set for the whole model, and"
            " decides at the ends of segments"
        )


def check_records(policy: Policy, cache: RetainedCache) -> Decoding:
    """The records are this policy's, and about all that the cache stores.

    Raises:
        SpecError: otherwise.
    """
    decoding, name = cache.decoding, policy.name
    if decoding is None or decoding.policy != name:
        raise SpecError("past_key_values", "tokens without records", f"{name} goes on from its own prompt only")
    stored = [len(cache.full_layers[0].head_positions(row, 0)) for row in range(len(decoding.rows))]
    if stored != [running.live.shape[1] for running in decoding.rows]:
        raise SpecError("past_key_values", "tokens without records", f"{name} has not seen the last tokens of it")
    return decoding


def check_turn(policy: Policy, cache: RetainedCache) -> None:
    """A later segment can be decided over what the kept sets store.

    Raises:
        SpecError: where layers or heads store other tokens than the policy's kept sets, or its scores compare tokens
            that no longer stand side by side.
    """
    if policy.cadence.every is not None:
        check_records(policy, cache)
    elif cache.layers_differ:
        scorer = policy.scorer
        if policy.granularity is Granularity.MODEL:
            raise SpecError("past_key_values", "layers that differ", f"{policy.name} keeps one set for the whole model")
        if policy.granularity is Granularity.LAYER and any(map(_heads_differ, cache.full_layers)):
            raise SpecError("past_key_values", "heads that differ", f"{policy.name} keeps one set for a whole layer")
        if not (isinstance(scorer, SeparableScorer) and scorer.separable):
            reason = "compares layers or heads token by token, which store other tokens by now: it serves one segment"
            raise SpecError("policy", policy.name, reason)


def _heads_differ(layer: RetainedLayer) -> bool:
    sets = [[layer.head_positions(row, head).tolist() for head in range(layer.heads)] for row in range(layer.batch)]
    return isinstance(layer, RaggedLayer) and any(own != heads[0] for heads in sets for own in heads)
