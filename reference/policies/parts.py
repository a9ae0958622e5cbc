"""Parts of a policy: split a policy into its parts and transforms, join them again, and compare two parts."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from reference.policies.blocks import InBlocks, in_blocks
from reference.policies.budgets import LayersThenHeads, Pyramid, even, everything
from reference.policies.chunks import HeadSums, InChunks, in_chunks
from reference.policies.criticalkv import TwoScores, two_stages, with_critical_selection
from reference.policies.diversity import Diverse, Signed, TowardMean, diverse, toward_mean_values
from reference.policies.kvcrush import scored_or_representative, with_representatives
from reference.policies.pieces import InPieces, PieceScores, in_pieces
from reference.policies.protections import InEachPiece, ProtectedPositions
from reference.policies.rkv import QueryCache
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import best_tokens, recent_half, top_tokens, top_units
from reference.policies.tables import Table
from reference.policies.vatp import ValueWeighted, with_value_norms
from spec.composition import required_by
from spec.errors import SpecError
from spec.policy import Budgets, Policy
from spec.retention import Granularity

__all__ = [
    "Transform", "apply_transforms", "equal_parts", "half_selector", "join_budgets", "plain_selector", "split_budgets",
    "split_transforms", "with_steps",
]

Transform = tuple[str, Mapping[str, Any]]
"""Name of a change of scorer and selector, and its constants."""


def _keywords(part: Any) -> Mapping[str, Any]:
    keywords: Mapping[str, Any] = getattr(part, "keywords", {})
    return keywords


def _function(part: Any) -> Any:
    return getattr(part, "func", part)


def split_transforms(policy: Policy) -> tuple[Policy, list[Transform]]:
    """Return the policy without transforms, and the transforms in the order in which they were applied."""
    transforms: list[Transform] = []
    while (step := _outermost(policy)) is not None:
        policy, transform = step
        transforms.insert(0, transform)
    return policy, transforms


def _outermost(policy: Policy) -> tuple[Policy, Transform] | None:
    selector, scorer, given = policy.selector, policy.scorer, _keywords(policy.selector)
    if isinstance(selector, InPieces) and isinstance(scorer, PieceScores):
        assert isinstance(policy.protection, InEachPiece)
        host = replace(policy, scorer=scorer.host, selector=selector.select, protection=policy.protection.other)
        return host, ("pieces", {"pieces": selector.c})
    if isinstance(selector, InBlocks):
        b = _keywords(selector.choose)["b"]
        return replace(policy, selector=selector.select, least=_least(policy, b)), ("block", {"block": b})
    if isinstance(scorer, HeadSums) and isinstance(selector, InChunks):
        granularity = Granularity.HEAD if scorer.by_head else policy.granularity
        host = replace(policy, scorer=scorer.host, selector=top_units, granularity=granularity)
        return host, ("chunks", {"chunks": selector.c, "gate": selector.gate})
    if isinstance(scorer, Signed) and isinstance(selector, Diverse | TowardMean):
        rule = "alpha" if isinstance(selector, Diverse) else "variant_b"
        constants = {"diversity": selector.lam, "signature": scorer.mode, "rule": rule}
        return replace(policy, scorer=scorer.host, selector=top_units), ("diverse", constants)
    if isinstance(scorer, TwoScores) and _function(selector) is two_stages:
        data = {"share": given["share"], "W_o": scorer.W_o}
        return replace(policy, scorer=scorer.host, selector=top_units), ("critical", data)
    if _function(selector) is scored_or_representative and isinstance(scorer, LayerScorer):
        bare = replace(scorer, separable=True)
        host = replace(policy, scorer=bare, selector=top_units, least=_least(policy, given["b"]))
        return host, ("crush", {"share": given["share"], "block": given["b"], "anchor": given["anchor"]})
    if isinstance(scorer, ValueWeighted) and isinstance(policy.protection, ProtectedPositions):
        sinks = len(policy.protection.positions)
        return replace(policy, scorer=scorer.host, protection=policy.protection.other), ("values", {"N_sink": sinks})
    return None


def _least(policy: Policy, b: int) -> int | None:
    """Return the host's `least` from the `least` of a policy in blocks of b tokens, which is max(host's least, b).

    If `least` is b, the host's `least` is unknown. The result is then 0, which gives the same policy in blocks.
    """
    return 0 if policy.least == b else policy.least


def apply_transforms(policy: Policy, transforms: list[Transform], backend: Any = "numpy") -> Policy:
    """Return the policy with transforms: changes of scorer and selector together.

    Implements: PO-COMPOSE

    Raises:
        SpecError: if a transform does not fit the policy.
    """
    for name, constants in transforms:
        policy = _TRANSFORMS[name](policy, constants, backend)
    return policy


def _diverse(host: Policy, constants: Mapping[str, Any], backend: Any) -> Policy:
    if constants["rule"] == "variant_b":
        return toward_mean_values(host, constants["diversity"], constants["signature"])
    return diverse(host, constants["diversity"], constants["signature"], backend)


_TRANSFORMS: Mapping[str, Callable[[Policy, Mapping[str, Any], Any], Policy]] = {
    "values": lambda host, given, _: with_value_norms(host, given["N_sink"]),
    "critical": lambda host, given, _: with_critical_selection(host, given["W_o"], given["share"]),
    "crush": lambda host, given, _: with_representatives(host, given["block"], given["share"], given["anchor"]),
    "diverse": _diverse,
    "chunks": lambda host, given, _: in_chunks(host, given["chunks"], given["gate"]),
    "block": lambda host, given, _: in_blocks(host, given["block"]),
    "pieces": lambda host, given, _: in_pieces(host, given["pieces"]),
}


def split_budgets(budgets: Budgets) -> tuple[Budgets, Budgets]:
    """Return the rule that divides the total among layers, and the rule that divides a layer's share among heads."""
    if isinstance(budgets, LayersThenHeads):
        return budgets.layers, budgets.heads
    required = required_by(budgets)
    by_layer = required is not None and required.shares == "layer" and required.exact
    return (even, budgets) if by_layer else (budgets, even)


def join_budgets(layers: Budgets, heads: Budgets, window: int) -> Budgets:
    """Return budgets that divide the total among layers, then a layer's share among its heads.

    Implements: PO-COMPOSE

    Raises:
        SpecError: if the rule for layers already divides the total among heads.
    """
    if isinstance(layers, Pyramid | Table):
        layers = replace(layers, W=window)
    if layers is even or heads is even:
        return heads if layers is even else layers
    if layers is everything:
        raise SpecError("layers", "full", "keeps all tokens, so no head can keep more: leave out layers or heads")
    return LayersThenHeads(layers, heads)


def with_steps(scorer: Any) -> Any:
    """Return a scorer that can score decode steps: `QueryCache` for a window of queries, else the given scorer.

    Implements: PO-COMPOSE
    """
    rows = scorer.needs.query_rows
    if type(scorer) is not LayerScorer or scorer.needs.rehearsal is not None or rows is None or rows < 2:
        return scorer
    if scorer.needs.values:
        reason = "uses values and a window of queries, which no record stores: leave every= out"
        raise SpecError("every", type(scorer).__name__, reason)
    return QueryCache(rows, scorer.score, scorer.needs.accepts_tensor)


def plain_selector(selector: Any) -> Any:
    """Return `top_tokens` with the same backend for the selector `recent_half`. Return any other selector unchanged."""
    if _function(selector) is recent_half:
        return partial(top_tokens, **_keywords(selector)) if _keywords(selector) else top_tokens
    return selector


def half_selector(selector: Any) -> Any:
    """Return `recent_half`, which keeps the newest half of the budget, with the backend of the given selector."""
    if _function(selector) not in (top_tokens, top_units):
        raise SpecError("select", "half", "needs scores of single tokens: leave the part out")
    return partial(recent_half, choose=_keywords(selector).get("choose", best_tokens))


def equal_parts(one: Any, two: Any, ignored: Collection[str] = ()) -> bool:
    """Return True if two parts are equal. Functions, partials, dataclasses and arrays are compared by contents.

    `ignored` has names of fields of dataclasses that are not compared.
    """
    if one is two:
        return True
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return bool(np.array_equal(one, two, equal_nan=True))
    if type(one) is not type(two):
        return False
    if hasattr(one, "shape"):  # a tensor of a device
        return bool(one.shape == two.shape and (one == two).all())
    if isinstance(one, partial):
        return equal_parts((one.func, one.args, one.keywords), (two.func, two.args, two.keywords), ignored)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal_parts(one[key], two[key], ignored) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(partial(equal_parts, ignored=ignored), one, two))
    if is_dataclass(one):
        names = [field.name for field in fields(one) if field.name not in ignored]
        return all(equal_parts(getattr(one, name), getattr(two, name), ignored) for name in names)
    if hasattr(one, "__code__"):
        return one.__code__ is two.__code__ and equal_parts(_cells(one), _cells(two), ignored)
    return bool(one == two)


def _cells(function: Any) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
