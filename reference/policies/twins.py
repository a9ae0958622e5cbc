"""Scores by a backend: a policy whose scorer calls a backend's twin wherever the backend has one."""

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from spec.backend import Backend
from spec.policy import Policy

__all__ = ["with_twins"]


def with_twins(policy: Policy, backend: Backend) -> Policy:
    """The same policy with the backend's scores; the policy itself where the backend has none of its scores."""
    scorer = _with_twins(policy.scorer, backend)
    return policy if scorer is policy.scorer else replace(policy, scorer=scorer)


def _with_twins(part: Any, backend: Backend) -> Any:
    """A function, a partial one, or a scorer with such fields; the part itself where nothing has a twin."""
    if isinstance(part, partial):
        twin = backend.scores.get(part.func.__name__)
        return part if twin is None else partial(twin, *part.args, **part.keywords)
    if not is_dataclass(part) or not hasattr(part, "needs"):
        return backend.scores.get(getattr(part, "__name__", ""), part)
    parts = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {name: twin for name, own in parts.items() if (twin := _with_twins(own, backend)) is not own}
    if changed and "takes" in parts:
        changed["takes"] = backend.takes
    if changed and "needs" in parts:
        changed["needs"] = replace(part.needs, takes=backend.takes)
    again: Any = part
    return replace(again, **changed) if changed else part
