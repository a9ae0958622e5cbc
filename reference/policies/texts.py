"""Texts of policies: `policy_from_text` makes a policy from its text, and `text_of` writes the text of a policy."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from inspect import unwrap
from typing import Any

from reference.policies.budgets import Above, Pyramid
from reference.policies.cake import Preferred
from reference.policies.composition import (
    DATA,
    DIVERSE,
    DIVERSITY,
    HEADS,
    LAYERS,
    SETS,
    TRANSFORMS,
    WHOLE,
    Constants,
    compose,
    named_policy,
    plain_policy,
    presets_of,
    promises_of_parts,
)
from reference.policies.effects import unused_fields
from reference.policies.grammar import Composition, Words, format_value, parse_composition
from reference.policies.later import FirstAndLater
from reference.policies.named import REGISTERED, NamedPolicy
from reference.policies.parts import (
    Transform,
    apply_transforms,
    equal_parts,
    half_selector,
    plain_selector,
    split_budgets,
    split_transforms,
    with_steps,
)
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_tokens, top_units
from reference.policies.tables import Table
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, SEGMENT_END, Policy

__all__ = ["find_name", "policy_from_text", "text_of"]

NO_DATA: Constants = {}
ALIASES: Mapping[str, tuple[str, ...]] = {
    "sink": ("N_sink",), "recent": ("N_recent", "W"), "excess": ("slack",), "safeguard": ("alpha_s",),
}
"""Constants of makers that have a different name in the parts."""
NOT_CONSTANTS = frozenset({"stages", "choose", "received", "largest", "accepts_tensor", "alpha_s"})
"""Fields of parts that are no constants of the parts. The budgets of NestedKV have alpha_s under the name safeguard."""


def policy_from_text(text: str | Composition, data: Constants = NO_DATA) -> Policy:
    """Return the policy of a text. A policy that equals a named policy has the name of the named policy.

        policy = policy_from_text("snapkv:W=16/layers=pyramid:beta=20/heads=adaptive:safeguard=0.2")

    `data` has the constants without text, and further constants of the policy.

    Implements: PO-COMPOSE

    Raises:
        SpecError: if a name, a value or a constant is unknown, or if parts do not fit. The message has the wrong part.
    """
    composition = parse_composition(text) if isinstance(text, str) else text
    policy = compose(composition, data)
    if not composition.parts and not composition.scorer_only:
        return policy
    policy = replace(policy, name="")
    if (named := find_name(policy, data)) is not None:
        equal = _blocked(*named, data)
        return replace(policy, name=equal.name, promises=equal.promises)
    text = str(_split(policy, {**_data(_gathered(policy, {})), **data}))
    return replace(policy, name=text, promises=promises_of_parts(policy))


def find_name(policy: Policy, data: Constants = NO_DATA) -> tuple[str, dict[str, Any]] | None:
    """Return the named policy and the constants that make an equal policy, apart from name and promises, or None.

    If several named policies are equal, the policy of the same name is returned, or else the shortest name.
    """
    bare, (base, transforms) = replace(policy, name="", promises=NOTHING_PROMISED), split_transforms(policy)
    kinds, given = {kind for kind, _ in transforms}, [_gathered(policy, aliases) for aliases in (ALIASES, {})]
    prefix, result, data = DIVERSE if "diverse" in kinds else "", None, {**_data(given[1]), **data}
    for name, row in _rows():
        if _kind_of_name(name) not in (None, _kind(base.scorer)):
            continue
        for constants in _candidates(given, row, prefix, blocks=row.blocks and not prefix and "block" in kinds):
            try:
                candidate = _blocked(prefix + name, constants, data)
            except (SpecError, TypeError):  # the policy lacks a constant of this name
                continue
            if equal_parts(replace(candidate, name="", promises=NOTHING_PROMISED), bare):
                if candidate.name == policy.name:
                    return prefix + name, constants
                result = result or (prefix + name, constants)
    return result


def _rows() -> list[tuple[str, NamedPolicy]]:
    return sorted(REGISTERED.items(), key=lambda one: (len(one[0]), one[0]))


@cache
def _kind_of_name(name: str) -> tuple[type, object] | None:
    """Return the kind of a named policy's scorer without transforms, or None if the policy needs data."""
    try:
        return _kind(split_transforms(named_policy(name, {}))[0].scorer)
    except (SpecError, TypeError, AttributeError):  # a constant without a default, such as a calibration
        return None


def _kind(scorer: Any) -> tuple[type, object]:
    """Return the type and the function of a scorer. Scorers of different kinds are not equal, whatever their constants.
    """
    score: Any = getattr(scorer, "score", None)
    function = unwrap(getattr(score, "func", score))
    return type(scorer), getattr(function, "__code__", function)


def _candidates(
    gathered: Iterable[Constants], row: NamedPolicy, prefix: str, *, blocks: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the constants of a maker: those of all parts, and those whose names need no translation."""
    keys = row.constants | frozenset(DIVERSITY if prefix else ()) | frozenset(("block",) if blocks else ())
    result = None
    for given in gathered:
        options = {key: given[key] for key in keys & given.keys() - DATA - {"parameters"}}
        if result is None or result.keys() != options.keys():
            yield options
        result = options


def _blocked(name: str, constants: Constants, data: Constants) -> Policy:
    """Return the named policy with constants. The constant `block` makes the policy keep whole blocks."""
    policy = named_policy(name, {**constants, **data})
    blocks = "block" in constants and "block" not in REGISTERED[name.removeprefix(DIVERSE)].constants
    return apply_transforms(policy, [("block", constants)]) if blocks else policy


def _data(given: Constants) -> dict[str, Any]:
    """Return the constants without text among the constants of all parts."""
    constants = {key: given[key] for key in DATA & given.keys()}
    return constants | ({"served": given["calibration"].identity} if "calibration" in given else {})


def _gathered(policy: Policy, aliases: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return constants of all parts by the names that makers use. Constants of the scorer come first."""
    base, transforms = split_transforms(policy)
    result = dict[str, Any]()
    for part in (base.scorer, base.budgets, base.selector, base.protection, base.cadence):
        for name, value in _leaves(part):
            for key in (name, *aliases.get(name, ())):
                result.setdefault(key, value)
    for _, constants in transforms:
        result |= constants
    return result


def _leaves(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each constant inside a part."""
    if isinstance(part, partial):
        items = list(part.keywords.items())
    elif is_dataclass(part) and not isinstance(part, type):
        items = [(entry.name, getattr(part, entry.name)) for entry in fields(part)]
    else:
        return
    for name, value in items:
        if name not in NOT_CONSTANTS:
            yield name, value
            yield from _leaves(value)


def text_of(policy: Policy, data: Constants = NO_DATA) -> str:
    """Return the text from which `policy_from_text` makes an equal policy. Constants without text are left out.

    If parts of a named policy have no text, the text is the name with constants.

    Raises:
        SpecError: if the policy has a part that no text describes, such as a scorer of your own.
    """
    named = find_name(policy, data)
    if named is not None and (named[0] in WHOLE or named != find_name(replace(policy, name=""), data)):
        return _named_text(*named)
    try:
        return str(_split(policy, {**_data(_gathered(policy, {})), **data}))
    except SpecError:
        if named is None:
            raise
        return _named_text(*named)


def _named_text(name: str, constants: Constants) -> str:
    row, block = REGISTERED[name.removeprefix(DIVERSE)], dict[str, tuple[str, Words]]()
    if "block" in constants and "block" not in row.constants:
        block["block"] = (format_value(constants["block"]), {})
    rest = {key: value for key, value in constants.items() if key not in block}
    return str(Composition(name, False, _words(row, rest), block))


def _words(row: NamedPolicy, constants: Constants) -> Words:
    """Return constants as text. Fields of `parameters` are left out if they have the default.

    If fewer constants remain with the fields of a preset, such as `parameters=essay`, the preset is named.
    """
    def beside(defaults: Constants) -> dict[str, str]:
        rest = {key: value for key, value in sorted(constants.items()) if key not in defaults or defaults[key] != value}
        return {key: format_value(value) for key, value in rest.items()}

    presets = presets_of(row) if row.parameters.keys() <= constants.keys() else {}
    named = [{"parameters": name, **beside(of)} for name, of in presets.items()]
    return min([beside(row.parameters), *named], key=len)


def _split(policy: Policy, data: Constants) -> Composition:
    base, transforms = split_transforms(policy)
    of_prompt = base
    if isinstance(base.scorer, FirstAndLater):
        of_prompt = replace(base, scorer=base.scorer.first, cadence=SEGMENT_END)
    name, constants = _home(of_prompt, data)
    plain = plain_policy(named_policy(name, {**constants, **data}))
    parts: dict[str, tuple[str, Words]] = {}
    for part, value in _protection(base, plain):
        parts[part] = (str(value), {})
    if (half := _half(base, plain, transforms)) is not None:
        parts["select"] = (half, {})
    parts |= _budgets(base)
    if isinstance(base.scorer, FirstAndLater):
        second, of_steps = _home(replace(base, scorer=base.scorer.later), _data(data))
        parts["steps"] = (second, _words(REGISTERED[second], of_steps))
    if base.cadence != SEGMENT_END:
        excess = {"excess": str(base.cadence.excess)} if base.cadence.excess != 1 else {}
        parts["every"] = (str(base.cadence.every).lower(), excess)
    if base.granularity is not plain.granularity:
        parts["sets"] = (next(word for word, one in SETS.items() if one is base.granularity), {})
    if base.least != plain.least:
        parts["floor"] = (str(base.least).lower(), {})
    for kind, given in transforms:
        first, defaults = TRANSFORMS[kind]
        rest = {key: format_value(given[key]) for key in defaults if key != first}
        parts[kind] = (format_value(given[first]), rest)
    unused = unused_fields(base)
    effective = {key: value for key, value in constants.items() if key not in unused}
    return Composition(name, True, _words(REGISTERED[name], effective), parts)


def _home(base: Policy, data: Constants) -> tuple[str, dict[str, Any]]:
    """Return the policy that has a scorer, and its constants that the scorer has. A record of queries is left out."""
    given = dict(_leaves(base.selector)) | dict(_leaves(base.scorer))
    scorer_type, function = _kind(base.scorer)
    for change, kind in ((_same, scorer_type), (with_steps, LayerScorer)):
        for name, row in _rows():
            if _kind_of_name(name) not in (None, (kind, function)):
                continue
            options = {key: given[key] for key in row.constants & given.keys() - DATA - {"parameters"}}
            try:
                host, _ = split_transforms(named_policy(name, {**options, **data}))
                if name != "fullcache" and equal_parts(change(host.scorer), base.scorer):
                    return name, options
            except (SpecError, TypeError):  # the scorer lacks a constant of this name
                continue
    raise SpecError("policy", base.name, "has a scorer without a name: only scorers of named policies have a text")


def _same(scorer: Any) -> Any:
    return scorer


def _protection(base: Policy, plain: Policy) -> Iterator[tuple[str, int]]:
    if not isinstance(base.protection, SinkAndRecent) or not isinstance(plain.protection, SinkAndRecent):
        raise SpecError("policy", base.name, "protects tokens that no text describes: only first and last tokens have")
    for part in ("sink", "recent"):
        if (value := getattr(base.protection, part)) != getattr(plain.protection, part):
            yield part, value


def _half(base: Policy, plain: Policy, transforms: list[Transform]) -> str | None:
    """Return the value of the part `select`, or None if the selector is that of the scorer or of a transform."""
    replaced = {kind for kind, _ in transforms} & {"diverse", "critical", "crush", "chunks"}
    if replaced or equal_parts(base.selector, plain.selector):
        return None
    if base.selector is top_tokens and plain.selector is top_units:  # blocks replace one by the other
        return None
    if equal_parts(base.selector, half_selector(plain_selector(plain.selector))):
        return "half"
    raise SpecError("policy", base.name, "has a selector that no text describes")


def _budgets(base: Policy) -> Iterator[tuple[str, tuple[str, Words]]]:
    if isinstance(base.budgets, Above):
        yield "threshold", (format_value(base.budgets.tau), {})
        return
    for part, rules, budget in zip(("layers", "heads"), (LAYERS, HEADS), split_budgets(base.budgets), strict=True):
        matches = [(word, rule) for word, rule in rules.items() if budget is rule.kind or type(budget) is rule.kind]
        if not matches or (isinstance(budget, Pyramid | Preferred | Table) and base.protection.size != budget.W):
            raise SpecError("policy", base.name, "has budgets that no text describes")
        ((word, rule),) = matches
        if word != "even":
            yield part, (word, {key: format_value(getattr(budget, key)) for key in rule.constants})
