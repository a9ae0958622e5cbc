"""The names of the policies: what makes each, and which of its constants the served model decides."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from reference import policies
from reference.policies.named import REGISTERED, NamedPolicy
from spec.backend import Backend, resolve
from spec.errors import SpecError
from spec.plugins import Plugin, find_plugin
from spec.policy import NOTHING_PROMISED, Policy
from spec.promises import promises_of
from spec.validate import check_choices

__all__ = [
    "BACKEND", "BLOCK", "DIVERSE", "ENTRY_POINTS", "NAMES", "POLICIES", "NamedPolicy", "check_name", "constants_of",
    "constants_of_model", "families_of", "make_policy", "own_policy", "with_twins",
]


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


ENTRY_POINTS = "kvspec.policies"

DIVERSE = "diverse-"
"""Before a name: the same policy under set-conditioned selection, with the constants of _DIVERSITY."""

_DIVERSITY = frozenset({"diversity", "signature", "rule", "backend"})

_RULES = ("alpha", "variant_b")
"""The selector of the paper on set-conditioned diversity, and the one that it rejected."""

BLOCK = "block"
"""A constant of policies that choose single tokens by their scores: whole blocks of so many stay (PO-BLOCKS)."""

BACKEND = "backend"
"""A constant of every published policy: whose scores it calls (`reference.policies.names`)."""

_READERS = frozenset({"constants", "describe", "names"})
"""Modules of the package that read POLICIES."""

_FIRST = ("crystalcache", "streamingllm", "fullcache")


def _found() -> Mapping[str, NamedPolicy]:
    """What the modules of this package name: _FIRST, then by name."""
    for module in iter_modules(policies.__path__):
        if module.name not in _READERS:
            import_module(f"{policies.__name__}.{module.name}")
    return {name: REGISTERED[name] for name in (*_FIRST, *sorted(REGISTERED.keys() - set(_FIRST)))}


POLICIES = _found()
"""EpiCache is not here: its queries are not the prompt's own.

Chunks and trunks have no signature; CriticalKV, KVCrush and VaSE select in two stages; H2O's newest half is not
protection, `diverse-h2o-described` has its sums; the full cache and full heads select nothing.
"""

NAMES = (*POLICIES, *(DIVERSE + name for name, policy in POLICIES.items() if policy.diverse))
"""All names of ours; a user's own policy is `module:ATTRIBUTE`, or an entry point of ENTRY_POINTS."""


def check_name(name: str, argument: str = "name") -> str:
    """A name of a policy, of NAMES or a user's own.

    Raises:
        SpecError: for another name, by `argument`, where those that look like it are named; as `own_policy`.
    """
    if name not in NAMES:
        bare, bracket, _ = name.partition("(")
        if bracket and bare in NAMES:
            call = f"policy_from_name({bare!r}, constant=value)"
            raise SpecError(argument, name, f"must be a name; give constants as arguments, as in {call}")
        own_policy(name, argument)
    return name


def own_policy(name: str, argument: str = "name") -> Plugin:
    """A user's own policy.

    Raises:
        SpecError: for an unknown name, what cannot be loaded, or what is no Policy.
    """
    found = find_plugin(argument, name, ENTRY_POINTS, NAMES)
    if not isinstance(found.value, Policy):
        kind = type(found.value).__name__
        bound = f"must be a Policy, as kvspec.policy_from_score makes one; is a {kind}"
        raise SpecError(argument, name, bound)
    return found


def constants_of(name: str) -> frozenset[str]:
    """The constants that a caller may give for this name; a user's own policy has none.

    Raises:
        SpecError: as `check_name`.
    """
    if check_name(name) not in NAMES:
        return frozenset()
    row = POLICIES[name.removeprefix(DIVERSE)]
    if name.startswith(DIVERSE):
        return row.constants | _DIVERSITY
    return row.constants | ({BLOCK} if row.blocks else set()) | ({BACKEND} if name not in _FIRST else set())


def families_of(name: str) -> tuple[str, ...]:
    """The stage families that a backend must have for this name.

    Raises:
        SpecError: as `check_name`.
    """
    if check_name(name) not in NAMES:
        return ()
    row, diverse = POLICIES[name.removeprefix(DIVERSE)], ("diversity",) * name.startswith(DIVERSE)
    return (*((row.family,) if BACKEND in row.constants else ()), *diverse)


def constants_of_model(name: str) -> frozenset[str]:
    """The constants that the served model decides: `W_o`, `inv_freq` and `factor`, or `served`.

    Raises:
        SpecError: as `check_name`.
    """
    return POLICIES[name.removeprefix(DIVERSE)].of_model if check_name(name) in NAMES else frozenset()


def make_policy(name: str, constants: Mapping[str, Any]) -> Policy:
    """The policy of this name, from the caller's constants and the model's.

    Raises:
        SpecError: as `check_name`; for a value that the policy does not admit.
        BackendUnavailable: when a backend cannot run here, or lacks what the policy needs.
    """
    if name not in NAMES:
        given = own_policy(name).value
        assert isinstance(given, Policy)
        return given
    row = POLICIES[name.removeprefix(DIVERSE)]
    if not name.startswith(DIVERSE):
        outside = constants_of(name) - row.constants
        own = {key: value for key, value in constants.items() if key not in outside}
        policy = row.policy(own)
        if name not in _FIRST:
            policy = with_twins(policy, resolve(constants.get(BACKEND, "numpy")))
        if policy.promises == NOTHING_PROMISED:
            policy = replace(policy, promises=promises_of(name))
        return policies.in_blocks(policy, constants[BLOCK]) if row.blocks and BLOCK in constants else policy
    taken = row.constants | row.of_model
    host = row.policy({key: value for key, value in constants.items() if key in taken})
    lam, mode = constants.get("diversity", 0.5), constants.get("signature", "flat")
    rule = constants.get("rule", _RULES[0])
    check_choices("rule", (rule,), _RULES)
    if rule == "variant_b":
        return policies.toward_mean_values(host, lam, mode)
    return policies.diverse(host, lam, mode, constants.get("backend", "numpy"))
