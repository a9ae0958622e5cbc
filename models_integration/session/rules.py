"""Checks of a session's position rule, and the positions that a forward pass of the model gets."""

from collections.abc import Mapping

from torch import Tensor

from models_integration.cache.retained_cache import RetainedCache
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["check_same_rule", "check_scorer", "rebased"]


def check_scorer(positions: str, policy: Policy) -> None:
    """Check that the scorer of a policy does not remove the rotation of keys, if positions are renumbered.

    Raises:
        SpecError: if the scorer removes the rotation. The scorer reads positions of the text.
    """
    rotations = (policy.scorer, getattr(policy.scorer, "calibration", None))
    if positions == "renumbered" and any(hasattr(one, "inv_freq") for one in rotations):
        reason = f"{policy.name} removes the rotation of keys by positions of the text: type positions='kept'"
        raise SpecError("positions", positions, reason)


def check_same_rule(positions: str, cache: object) -> None:
    """Check that the tokens of a given cache have the position rule of the session.

    Raises:
        SpecError: if the cache has tokens with a different rule.
    """
    if isinstance(cache, RetainedCache) and cache.failure is None and cache.get_seq_length():
        rule = "kept" if cache.numbering is None else "renumbered"
        if rule != positions:
            raise SpecError("past_key_values", f"positions={rule!r}", f"type policy(model, positions={rule!r})")


def rebased(inputs: Mapping[str, object], base: int) -> dict[str, object]:
    """Return the inputs of a forward pass, with the base subtracted from the position ids."""
    positions = inputs.get("position_ids")
    if base and isinstance(positions, Tensor):
        return {**inputs, "position_ids": (positions - base).clamp(min=0)}
    return dict(inputs)
