"""Statement of which backend computes the scores of a policy, and which backend selects the kept tokens."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from models_integration.session.device_choice import policy_on_device
from models_integration.session.method import Method
from reference.policies.layers import is_cascading, is_layerwise
from spec.backend import Backend, CrystalStages, DiversityStages, NestedKVStages, PolicyStages, owner_of
from spec.policy import Policy

__all__ = ["describe_stages", "owners", "scores_owner"]

SELECTION = "dissolve"
"""Stage of CrystalCache that selects tokens. All other stages compute scores."""


def describe_stages(method: Method, on_device: bool | None = None) -> str:
    """Return the name of the backend that computes all stages, or a text with the backend of each stage.

    An example of such a text is `scores: torch, selection: numba`. The text follows from the modules of the functions
    that the policy calls, not from the name of the requested backend. Two names at a stage are joined by " + ".

    Args:
        method: policy prepared for a model.
        on_device: True if the kept tokens were selected on the device of the layers. Default: as for a first prompt of
            one forward pass.
    """
    policy, engine = method.policy, method.engine
    twin = policy_on_device(policy, engine)
    if on_device is None:
        on_device = is_cascading(policy) or (is_layerwise(policy) and twin is not None)
    scores = scores_owner(twin or policy if on_device else policy, engine)
    # The pool of CAKE's layers ranks tokens with PyTorch under every backend (session/cascade.py).
    chosen = {owner_of(engine.tensors.get("top_units", torch.argsort), "torch")} if on_device else owners(
        policy.selector, engine
    )
    selection = " + ".join(sorted(chosen))
    return scores if scores == selection else f"scores: {scores}, selection: {selection}"


def scores_owner(policy: Policy, engine: Backend) -> str:
    """Return the names of the backends that compute the scores of a policy, joined by " + "."""
    return " + ".join(sorted(owners(policy.scorer, engine, scores=True)))


def owners(part: Any, engine: Backend, *, scores: bool = False) -> set[str]:
    """Return the names of the backends whose code a scorer or a selector calls.

    Functions of the reference that only call functions of a different backend are left out.

    Args:
        part: scorer, selector or function.
        engine: backend of the policy. Code outside kvspec has the name of this backend.
        scores: True for a scorer. Of CrystalCache's stages, a scorer calls all but the stage that selects tokens.
    """
    if isinstance(part, partial):
        return _inner([*part.args, *part.keywords.values()], engine, scores) or owners(part.func, engine)
    if isinstance(part, CrystalStages):
        names = [name for name in dir(CrystalStages) if not name.startswith("_")]
        stages = [name for name in names if (name != SELECTION) is scores]
        return {owner_of(getattr(part, name), engine.name) for name in stages}
    if isinstance(part, DiversityStages | NestedKVStages | PolicyStages):
        return {owner_of(type(part), engine.name)}
    if is_dataclass(part) and not isinstance(part, type):
        given = [getattr(part, field.name) for field in fields(part) if field.name not in ("needs", "accepts_tensor")]
        return _inner(given, engine, scores) or {owner_of(type(part), engine.name)}
    return {owner_of(part, engine.name)}


def _inner(parts: Iterable[Any], engine: Backend, scores: bool) -> set[str]:
    """Return the owners of all arguments that are functions or objects with code."""
    code = [part for part in parts if _is_code(part)]
    return {name for part in code for name in owners(part, engine, scores=scores)}


def _is_code(part: Any) -> bool:
    stages = isinstance(part, CrystalStages | DiversityStages | NestedKVStages | PolicyStages)
    return stages or callable(part) or (is_dataclass(part) and hasattr(part, "needs"))
