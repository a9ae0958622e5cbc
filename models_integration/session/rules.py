"""Checks of a session's position rule and table of budgets, and the positions that a forward pass of the model gets."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial

from torch import Tensor

from models_integration.cache.renumbering import KEPT, RENUMBERED
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture
from models_integration.model.layer_kinds import layer_config_value
from reference.policies.tables import check_weights
from spec.errors import SpecError
from spec.policy import Policy
from spec.retention import Granularity

__all__ = ["check_same_rule", "check_scorer", "check_table", "rebased"]


def check_scorer(positions: str, policy: Policy) -> None:
    """Check that the scorer of a policy does not remove the rotation of keys, if positions are renumbered.

    Raises:
        SpecError: if the scorer removes the rotation. The scorer reads positions of the text.
    """
    if positions == RENUMBERED and _has_frequencies(policy.scorer):
        reason = f"{policy.name} removes the rotation of keys by positions of the text: type positions='kept'"
        raise SpecError("positions", positions, reason)


def _has_frequencies(part: object) -> bool:
    """Return True if a scorer, or a part of a scorer, has the rotary frequencies of the model."""
    if isinstance(part, partial):
        return any(map(_has_frequencies, (part.func, *part.args, *part.keywords.values())))
    if hasattr(part, "inv_freq"):
        return True
    return is_dataclass(part) and any(_has_frequencies(getattr(part, one.name)) for one in fields(part))


def check_same_rule(positions: str, cache: object) -> None:
    """Check that the tokens of a given cache have the position rule of the session.

    Raises:
        SpecError: if the cache has tokens with a different rule.
    """
    if isinstance(cache, RetainedCache) and cache.failure is None and cache.get_seq_length():
        rule = KEPT if cache.numbering is None else RENUMBERED
        if rule != positions:
            raise SpecError("past_key_values", f"positions={rule!r}", f"make the policy with positions={rule!r}")


def check_table(policy: Policy, architecture: Architecture) -> None:
    """Check that a table of budgets has one weight for each full-attention layer, or one for each kept set.

    If the config does not have the number of KV heads, the prompt is checked instead.

    Raises:
        SpecError: if the number of weights is different.
    """
    L, first = len(architecture.full_layers), architecture.full_layers[0]
    heads = layer_config_value(architecture.config, "num_key_value_heads", first)
    if heads is not None:
        check_weights(policy.budgets, L, L * heads if policy.granularity is Granularity.HEAD else L)


def rebased(inputs: Mapping[str, object], base: int) -> dict[str, object]:
    """Return the inputs of a forward pass, with the base subtracted from the position ids."""
    positions = inputs.get("position_ids")
    if base and isinstance(positions, Tensor):
        return {**inputs, "position_ids": (positions - base).clamp(min=0)}
    return dict(inputs)
