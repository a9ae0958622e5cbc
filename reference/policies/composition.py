"""Composed policies: the parts that a text can name, and the policy of a parsed text."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from inspect import Parameter, signature
from typing import Any

from reference.policies.budgets import Above, Adaptive, Competition, Pyramid, across_layers, even, everything
from reference.policies.cake import Preferred
from reference.policies.effects import check_effects
from reference.policies.grammar import Composition, Words, format_value, parse_value
from reference.policies.later import with_later_scores
from reference.policies.named import REGISTERED, NamedPolicy
from reference.policies.parts import (
    Transform,
    apply_transforms,
    half_selector,
    join_budgets,
    plain_selector,
    split_budgets,
    split_transforms,
    with_steps,
)
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import check_positive
from reference.policies.selectors import top_units
from reference.policies.tables import Table
from spec.composition import provided_by, required_by
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.parameters.crystalcache import PRESETS, preset
from spec.policy import NOTHING_PROMISED, SEGMENT_END, Budgets, Cadence, Policy, Promises
from spec.promises import promises_of
from spec.retention import Granularity

__all__ = [
    "DATA", "DIVERSE", "DIVERSITY", "HEADS", "LAYERS", "PARTS", "SETS", "TRANSFORMS", "WHOLE", "Constants", "compose",
    "constant_name", "constants_from_text", "join_constants", "named_policy", "plain_policy", "presets_of",
    "promises_of_parts", "typed_constants",
]

Constants = Mapping[str, Any]

DIVERSE = "diverse-"
"""Prefix of the name of a policy with set-conditioned selection. The prefix adds the constants in DIVERSITY."""
DATA = frozenset({"W_o", "backend", "calibration", "factor", "inv_freq", "sentence_ends", "served", "template"})
"""Constants without text. They come from the model, the tokenizer, a file or the caller."""
WHOLE = frozenset({"crystalcache"})
"""Policies that accept no parts, because sessions run them as a whole."""
SETS = {"model": Granularity.MODEL, "layer": Granularity.LAYER, "head": Granularity.HEAD}
_WRITTEN = {"window": "W", "window_size": "W", "kernel_size": "kernel"}
"""Names of constants that papers and kvpress use, with the names in kvspec."""
DIVERSITY: Constants = {"diversity": 0.5, "signature": "flat", "rule": "alpha"}


@dataclass(frozen=True)
class _Rule:
    """A rule of budgets: function or class, default constants, and the function that makes the budgets."""

    kind: Any
    constants: Constants
    make: Callable[[Constants, int], Budgets]


def _pyramid(given: Constants, window: int) -> Pyramid:
    return Pyramid(window, check_positive("beta", given["beta"]))


LAYERS: Mapping[str, _Rule] = {
    "even": _Rule(even, {}, lambda given, window: even),
    "full": _Rule(everything, {}, lambda given, window: everything),
    "global": _Rule(across_layers, {}, lambda given, window: across_layers),
    "pyramid": _Rule(Pyramid, {"beta": 20}, _pyramid),
    "preference": _Rule(Preferred, {}, lambda given, window: Preferred(window)),
    "table": _Rule(Table, {"shares": "1"}, lambda given, window: Table(window, given["shares"])),
}
HEADS: Mapping[str, _Rule] = {
    "even": _Rule(even, {}, lambda given, window: even),
    "adaptive": _Rule(Adaptive, {"safeguard": Fraction(1, 5)}, lambda given, window: Adaptive(given["safeguard"])),
    "quota": _Rule(Competition, {"safeguard": Fraction(1, 5)}, lambda given, window: Competition(given["safeguard"])),
}
TRANSFORMS: Mapping[str, tuple[str, Constants]] = {
    "values": ("N_sink", {"N_sink": 4}),
    "critical": ("share", {"share": Fraction(1, 2)}),
    "crush": ("share", {"share": Fraction(1, 4), "block": 16, "anchor": "alternating"}),
    "diverse": ("diversity", DIVERSITY),
    "chunks": ("chunks", {"chunks": 10, "gate": 0}),
    "block": ("block", {"block": 16}),
    "pieces": ("pieces", {"pieces": 1024}),
}
"""Constant that the value of each transform sets, and the constants with defaults. Transforms apply in this order."""
PARTS = (
    "sink", "recent", "select", "layers", "heads", "threshold", "steps", "every", "sets", "floor", *TRANSFORMS,
)
"""Names of the parts, in the order of the text."""
_BUDGETS = ("layers", "heads", "threshold")
_CHANGED_BY = {
    "cadence": ("every", "steps", *_BUDGETS), "budgets": _BUDGETS, "protection": ("sink", "recent", "steps"),
    "selector": ("select", *TRANSFORMS), "granularity": ("sets", "steps"), "least": ("floor",),
    "host": tuple(TRANSFORMS)[::-1], "mode": ("diverse",), "lam": ("diverse",), "scorer": ("every",),
}
"""Parts of the text that can cause an error about an argument, the most likely part first."""


def constants_from_text(row: NamedPolicy, given: Words, more: Constants = {}) -> dict[str, Any]:  # noqa: B006
    """Return the constants of a named policy from text, with the types of the defaults. `more` has further defaults.

    Raises:
        SpecError: if the policy does not have a constant, or if the text is not a value of the constant.
    """
    defaults = {**row.defaults, **more}
    presets, chosen = presets_of(row), dict[str, Any]()
    if presets and (name := given.get("parameters")) is not None:
        preset(name)
        chosen = {key: value for key, value in presets[name].items() if value != row.parameters[key]}
        given = {key: value for key, value in given.items() if key != "parameters"}
    words = dict[str, str]()
    for key, value in given.items():
        if (ours := constant_name(key, defaults)) in words:
            raise SpecError(key, value, f"is the constant {ours}, which is also given: leave out one")
        words[ours] = value
    text_only = {key: value for key, value in defaults.items() if key not in DATA - {"backend"}}
    return chosen | typed_constants(words, text_only)


def constant_name(written: str, known: Collection[str]) -> str:
    """Return kvspec's name of the constant that a paper or kvpress calls `written`, such as W for `window_size`.

    `known` contains the names of the policy's constants. Case and underscores are ignored. If no known constant fits,
    the result is `written`.
    """
    if written in known:
        return written
    ours = _WRITTEN.get(written.lower(), written)
    bare = {one.replace("_", "").lower(): one for one in known}
    return ours if ours in known else bare.get(ours.replace("_", "").lower(), written)


def join_constants(name: str, written: Constants, given: Constants) -> dict[str, Any]:
    """Return the constants that are written in the name of a policy, and those that are given beside the name.

    Raises:
        SpecError: if a constant is both in the name and beside the name.
    """
    for key in sorted(written.keys() & given.keys()):
        raise SpecError(key, given[key], f"is also in {name!r}, with the value {written[key]}: leave out one")
    return {**written, **given}


def presets_of(row: NamedPolicy) -> dict[str, dict[str, Any]]:
    """Return the values of `parameters` that have a name, as fields. The result is {} if the policy has none."""
    given = signature(row.make).parameters.get("parameters")
    if given is None or not isinstance(given.default, CrystalCacheParameters):
        return {}
    return {name: {one.name: getattr(of, one.name) for one in fields(of)} for name, of in PRESETS.items()}


def typed_constants(given: Words, defaults: Constants) -> dict[str, Any]:
    """Return constants from text, each of the type of the default.

    Raises:
        SpecError: if there is no default of this name, or if the text is not a value of the type.
    """
    constants = dict[str, Any]()
    for key, text in given.items():
        like = defaults.get(key, Parameter.empty)
        if like is Parameter.empty or key == "parameters":
            known = ", ".join(sorted(key for key in defaults if key != "parameters")) or "none"
            raise SpecError(key, text, f"is not a constant with text; the constants are {known}")
        try:
            constants[key] = parse_value(text, like)
        except (ValueError, KeyError, ZeroDivisionError):
            raise SpecError(key, text, f"must be a value such as {format_value(like)}") from None
    return constants


def compose(composition: Composition, data: Constants) -> Policy:
    """Return the policy of a parsed text, without its final name. `data` has the constants without text.

    Implements: PO-COMPOSE

    Raises:
        SpecError: if a name, a value or a constant is unknown, or if parts do not fit. The message has the wrong part.
    """
    parts, text, name = composition.parts, str(composition), composition.name
    if name.removeprefix(DIVERSE) not in REGISTERED:
        raise SpecError("policy", text, f"has the unknown name {name!r}: give a name of kvspec.list_policies()")
    if parts and composition.name in WHOLE:
        raise SpecError("policy", text, f"{composition.name} accepts no parts: set constants instead, such as N_sink")
    if unknown := [part for part in parts if part not in PARTS]:
        raise SpecError("policy", text, f"the part {unknown[0]!r} is unknown; the parts are {', '.join(PARTS)}")
    row = REGISTERED[name.removeprefix(DIVERSE)]
    beside = {key: data[key] for key in (row.constants | DIVERSITY.keys()) & data.keys() - DATA}
    try:
        policy = _make_policy(composition, data)
        if parts or composition.scorer_only:
            check_effects(policy, composition, data, beside, _make_policy)
    except SpecError as error:
        raise _pointed(error, composition) from None
    return policy


def _make_policy(composition: Composition, data: Constants) -> Policy:
    host = _host(composition, data)
    return _composed(host, composition, data) if composition.parts else host


def _pointed(error: SpecError, composition: Composition) -> SpecError:
    """Return the error about the text, with the part that causes the error."""
    parts = composition.parts
    causes = [part for part in (*_CHANGED_BY.get(error.argument, ()), error.argument) if part in parts]
    causes += [part for part, (_, constants) in parts.items() if error.argument in constants]
    if not causes:
        return SpecError("policy", str(composition), str(error))
    value, constants = parts[causes[0]]
    shown = Composition(f"{causes[0]}={value}", constants=constants)
    return SpecError("policy", str(composition), f"the part /{shown}: {error.argument} {error.bound}")


def _written(composition: Composition) -> dict[str, Any]:
    """Return the constants that a text gives its named policy."""
    more = DIVERSITY if composition.name.startswith(DIVERSE) else {}
    return constants_from_text(REGISTERED[composition.name.removeprefix(DIVERSE)], composition.constants, more)


def _host(composition: Composition, data: Constants) -> Policy:
    constants = join_constants(str(composition), _written(composition), data)
    policy = named_policy(composition.name, constants)
    return plain_policy(policy) if composition.scorer_only else policy


def named_policy(name: str, constants: Constants) -> Policy:
    """Return the policy with this name. Constants that the policy does not have are ignored."""
    row = REGISTERED[name.removeprefix(DIVERSE)]
    policy = row.policy({key: value for key, value in constants.items() if key in row.constants | row.model_constants})
    if not name.startswith(DIVERSE):
        promises = promises_of(name) if policy.promises == NOTHING_PROMISED else policy.promises
        return replace(policy, promises=promises)
    diversity = {**DIVERSITY, **{key: constants[key] for key in DIVERSITY.keys() & constants.keys()}}
    return apply_transforms(policy, [("diverse", diversity)], constants.get("backend", "numpy"))


def plain_policy(policy: Policy) -> Policy:
    """Return a policy with the same scorer and plain other parts: equal shares, best units, least protection."""
    host, _ = split_transforms(policy)
    provided = provided_by(host.scorer)
    protection = SinkAndRecent(0, 0) if provided is None else SinkAndRecent(*provided.unscored)
    return replace(
        host, name="plain", budgets=even, selector=plain_selector(host.selector), protection=protection,
        cadence=SEGMENT_END, least=0, promises=NOTHING_PROMISED,
    )


def _composed(host: Policy, composition: Composition, data: Constants) -> Policy:
    parts = composition.parts
    base, transforms = split_transforms(host)
    protection = base.protection
    if parts.keys() & {"sink", "recent"}:
        known = protection if isinstance(protection, SinkAndRecent) else SinkAndRecent(protection.size, 0)
        protection = SinkAndRecent(
            _number(parts, "sink", known.sink) or 0, _number(parts, "recent", known.recent) or 0
        )
    later = _later(parts, data)
    cadence = _cadence(parts, base.cadence if later is None or later.cadence.every is None else later.cadence)
    composed = replace(
        base, scorer=_scorer(base.scorer, later, cadence), protection=protection,
        budgets=_budgets(parts, base.budgets, protection.size), selector=_selector(parts, base.selector),
        cadence=cadence, granularity=SETS[_choice(parts, "sets", SETS, base.granularity)],
        least=_number(parts, "floor", base.least), promises=NOTHING_PROMISED,
    )
    return apply_transforms(composed, _transforms(parts, transforms, data), data.get("backend", "numpy"))


def _later(parts: Mapping[str, tuple[str, Words]], data: Constants) -> Policy | None:
    """Return the policy whose scorer scores decode steps and later segments, or None if the text has no part steps."""
    if "steps" not in parts:
        return None
    name, constants = parts["steps"]
    if name not in REGISTERED or name in WHOLE or REGISTERED[name].model_constants:
        reason = "must be the name of a scorer without data of the model, such as keydiff or h2o"
        raise SpecError("steps", name, reason)
    if "backend" in constants:
        raise SpecError("backend", constants["backend"], "belongs to the whole policy: leave it out, and pass backend=")
    known = {key: data[key] for key in DATA & data.keys()}  # further constants are those of the first policy
    return named_policy(name, {**constants_from_text(REGISTERED[name], constants), **known})


def _scorer(scorer: Any, later: Policy | None, cadence: Cadence) -> Any:
    """Return the scorer, for decode steps if the cadence has any."""
    if later is None:
        return scorer if cadence.every is None else with_steps(scorer)
    if cadence.every is None:
        raise SpecError("steps", later.name, "scores decode steps, but the policy has none: add every=64")
    return with_later_scores(scorer, with_steps(split_transforms(later)[0].scorer), later.name)


def _number(parts: Mapping[str, tuple[str, Words]], part: str, known: int | None) -> int | None:
    if part not in parts:
        return known
    value, constants = parts[part]
    typed_constants(constants, {})
    if part in ("floor", "every") and value == "none":
        return None
    return int(typed_constants({part: value}, {part: 64 if part == "every" else 0})[part])


def _choice(parts: Mapping[str, tuple[str, Words]], part: str, known: Constants, default: Any) -> str:
    if part not in parts:
        return next(name for name, one in known.items() if one == default)
    value, constants = parts[part]
    typed_constants(constants, getattr(known.get(value), "constants", {}))
    if value not in known:
        raise SpecError(part, value, f"must be one of {', '.join(known)}")
    return value


def _cadence(parts: Mapping[str, tuple[str, Words]], known: Cadence) -> Cadence:
    if "every" not in parts:
        return known
    value, constants = parts["every"]
    return Cadence(_number({"every": (value, {})}, "every", None), **typed_constants(constants, {"excess": 1}))


def _budgets(parts: Mapping[str, tuple[str, Words]], known: Budgets, window: int) -> Budgets:
    if "threshold" in parts:
        for part in [part for part in ("layers", "heads") if part in parts]:
            reason = "has no effect, because threshold= gives the budget of each set: leave out one of the two parts"
            raise SpecError(part, parts[part][0], reason)
        value, constants = parts["threshold"]
        typed_constants(constants, {})
        return Above(typed_constants({"threshold": value}, {"threshold": 0.5})["threshold"])
    rules = dict(zip(("layers", "heads"), split_budgets(known), strict=True))
    for part, known_rules in (("layers", LAYERS), ("heads", HEADS)):
        if part in parts:
            rule = known_rules[_choice(parts, part, known_rules, None)]
            rules[part] = rule.make({**rule.constants, **typed_constants(parts[part][1], rule.constants)}, window)
    return join_budgets(rules["layers"], rules["heads"], window)


def _selector(parts: Mapping[str, tuple[str, Words]], known: Any) -> Any:
    if "select" not in parts:
        return known
    kinds = {"top": plain_selector, "half": half_selector}
    return kinds[_choice(parts, "select", kinds, None)](plain_selector(known))


def _transforms(
    parts: Mapping[str, tuple[str, Words]], known: list[Transform], data: Constants,
) -> list[Transform]:
    transforms = dict(known)
    for name, (first, defaults) in TRANSFORMS.items():
        if name in parts:
            value, constants = parts[name]
            if first in constants:
                raise SpecError(first, constants[first], f"is also the value {name}={value}: leave out {first}")
            given = {**transforms.get(name, {}), **typed_constants({**constants, first: value}, defaults)}
            transforms[name] = {**defaults, **given}
    if "critical" in transforms and "W_o" not in transforms["critical"]:
        transforms["critical"] = {**transforms["critical"], "W_o": data.get("W_o", {})}
    return [(name, transforms[name]) for name in TRANSFORMS if name in transforms]


def promises_of_parts(policy: Policy) -> Promises:
    """Return the guarantees of a policy that follow from the declarations of its parts. No more is guaranteed.

    Implements: PO-COMPOSE
    """
    scorer, budgets, selector = provided_by(policy.scorer), required_by(policy.budgets), required_by(policy.selector)
    if scorer is None or budgets is None or selector is None:
        return NOTHING_PROMISED
    whole = scorer.units == "chunks" and policy.selector is top_units
    exact = budgets.exact and selector.exact and not whole
    return Promises(
        "yes" if exact else "no", "yes" if policy.protection.size else "N/A",
        "yes" if budgets.exact or budgets.shares == "everything" else "no", row_independence="yes",
    )
