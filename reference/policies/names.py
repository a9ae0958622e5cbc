"""The table of named policies. Each name has a function that makes the policy, and a set of constants."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from reference import policies
from reference.policies.composition import DIVERSE, DIVERSITY, WHOLE, constants_from_text, typed_constants
from reference.policies.grammar import Composition, is_composition, parse_composition
from reference.policies.named import REGISTERED, NamedPolicy
from reference.policies.texts import policy_from_text
from spec.backend import Backend, owner_of, resolve
from spec.errors import SpecError
from spec.plugins import Plugin, find_plugin
from spec.policy import NOTHING_PROMISED, Policy
from spec.promises import promises_of
from spec.validate import check_choices

__all__ = [
    "AT_PROMPT",
    "BACKEND",
    "BLOCK",
    "DIVERSE",
    "ENTRY_POINTS",
    "LEFT_OUT",
    "NAMES",
    "OF_SESSION",
    "POLICIES",
    "TEXTS_OF_PRESSES",
    "NamedPolicy",
    "check_kinds",
    "check_name",
    "constants_of",
    "constants_of_model",
    "families_of",
    "home_of",
    "is_built_in",
    "make_policy",
    "split_name",
    "split_session_constants",
    "user_policy",
    "with_twins",
]


def with_twins(policy: Policy, backend: Backend) -> Policy:
    """Return the policy with its score functions replaced by the backend's functions of equal name.

    Functions that the backend lacks are not replaced, and no function from a user's own module is replaced.
    """
    scorer = _with_twins(policy.scorer, backend)
    return policy if scorer is policy.scorer else replace(policy, scorer=scorer)


def _with_twins(part: Any, backend: Backend) -> Any:
    """Return `part`, a function or a scorer, with its functions replaced by the backend's functions of equal name."""
    if isinstance(part, partial):
        twin = _with_twins(part.func, backend)
        return part if twin is part.func else partial(twin, *part.args, **part.keywords)
    if not is_dataclass(part) or not hasattr(part, "needs"):
        function: Any = part
        return backend.scores.get(function.__name__, part) if hasattr(part, "__name__") and owner_of(function) else part
    parts = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {name: twin for name, inner in parts.items() if (twin := _with_twins(inner, backend)) is not inner}
    if changed and "accepts_tensor" in parts:
        changed["accepts_tensor"] = backend.accepts_tensor
    if changed and "needs" in parts:
        changed["needs"] = replace(part.needs, accepts_tensor=backend.accepts_tensor)
    again: Any = part
    return replace(again, **changed) if changed else part


ENTRY_POINTS = "kvspec.policies"


_DIVERSITY = frozenset({*DIVERSITY, "backend"})

_RULES = ("alpha", "variant_b")
"""Selectors of the paper Set-Conditioned Diversity: the proposed selector, and a rejected variant."""

BLOCK = "block"
"""Name of the block-size constant. If this constant is set, a token-level policy keeps whole blocks (PO-BLOCKS)."""

BACKEND = "backend"
"""Name of the constant that selects the backend for the scores of a policy."""

OF_SESSION: Mapping[str, Any] = {"positions": "kept", BACKEND: "auto", "decode": False, "stream": False}
"""Constants of sessions, which a text can set, with defaults. Only crystalcache has `decode` and `stream`."""

AT_PROMPT = "@prompt"
"""Suffix of a policy's name in studies. With the suffix, a decode-time policy evicts only at the end of the prompt."""

_READERS = frozenset({"constants", "describe", "names"})
"""Modules of the package that are not searched for policies, because they import POLICIES."""

_FIRST = ("crystalcache", "streamingllm", "fullcache")


def _registered() -> Mapping[str, NamedPolicy]:
    """Return the named policies of all modules of this package: the policies in _FIRST, then all others by name."""
    for module in iter_modules(policies.__path__):
        if module.name not in _READERS:
            import_module(f"{policies.__name__}.{module.name}")
    return {name: REGISTERED[name] for name in (*_FIRST, *sorted(REGISTERED.keys() - set(_FIRST)))}


POLICIES = _registered()
"""All named policies. EpiCache is not in this table, because EpiCache needs queries of a patched prompt.

A policy lacks a `diverse-` variant if it keeps chunks or trunks, because only tokens have a signature. CriticalKV,
KVCrush and VaSE lack a `diverse-` variant because these policies select in two stages. H2O lacks a `diverse-` variant
because the newest half of H2O's budget is not a protection (use `diverse-h2o-described`). `fullcache` and `kvzip-heads`
lack a `diverse-` variant because these policies do not score tokens.
"""

NAMES = (*POLICIES, *(DIVERSE + name for name, policy in POLICIES.items() if policy.diverse))
"""All built-in names. The name of a user's own policy is `module:ATTRIBUTE` or an entry point in ENTRY_POINTS."""


_WRITTEN = {
    "full": "fullcache", "1d": "triattention", "1ddiv": "diverse-triattention", "qfilter": "q-filters",
    "cap": "capkv", "cur": "curdkv", "leveragescore": "leverage", "noncausalattn": "noncausal",
}
"""Further names that papers and kvpress use, as `_bare` returns them."""

_EVERY_TOKEN = "keeps every token, so it evicts nothing; to compare it, type 'fullcache'"
_UNREAD = "is not specified, because we have read neither the formula of the paper nor the official code"
_TRAINED = "is not specified, because we have not read the trained network that it needs"
_CHANGES = "changes keys or values, and positions of kept tokens do not describe that"
_RECOMPUTES = "recomputes inserted tokens, and evicts none"
_DECODES = "; another policy that evicts while the model reasons: type"
_LEARNED = "; another policy with a trained network: type 'kvzap(calibration=\"FILE\")'"
_BY_ATTENTION = "; another policy that keeps the tokens with the most attention: type"
LEFT_OUT: Mapping[str, str] = {
    "scissorhands":
        "is not specified: the paper, the official code and the ports are three different rules; type 'h2o'",
    "epicache": "is not a named policy, because it needs the utterances of a dialogue: call kvspec.prefill_episodes",
    **dict.fromkeys(("think", "kivi", "kvquant", "xkv", "quest", "nsa", "dsa"), _EVERY_TOKEN),
    "headkv": "is snapkv with one weight for each layer and KV head: type 'snapkv/layers=table:shares=3_2_1_4'",
    "qstats": "is a second calibration: `kvspec calibrate` your traces, then type 'triattention(calibration=\"FILE\")'",
    "schedule": "is a list of budgets, one for each decision: call reference.policies.scheduled",
    "variantb": "is a rule of diverse policies: type 'diverse-triattention:rule=variant_b(calibration=\"FILE\")'",
    "rocketkv": "evicts as snapkv, and then selects tokens for each query; for the eviction, type 'snapkv'",
    "lava": f"{_UNREAD}; another policy whose layers and heads share one budget by scores: type 'cake/heads=adaptive'",
    "gkv": f"{_UNREAD}{_DECODES} 'rkv'",
    "lazyeviction": f"{_UNREAD}{_DECODES} 'h2o/every=64'",
    **dict.fromkeys(("kvpop", "kvp"), f"{_TRAINED}{_LEARNED}"),
    "restorekv": f"{_TRAINED}; the policy that it adds trained tokens to: type 'kvzip'",
    **dict.fromkeys(("d2o", "cam", "kvmerger", "merging"), f"{_CHANGES}{_BY_ATTENTION} 'h2o'"),
    "razorattention": f"{_CHANGES}; full and streaming heads: type 'kvzip-heads(calibration=\"FILE\")'",
    "attentionmatching": f"{_CHANGES}{_BY_ATTENTION} 'h2o/every=none'",
    "kvcompose": f"{_CHANGES}; another policy whose layers share one budget by scores: type 'snapkv/layers=global'",
    "kvgrad": "needs gradients of the model, which no part of a policy uses; the policy that it changes: type 'kvzip'",
    "cacheblend": f"{_RECOMPUTES}; to compare it with injection, type 'kvspec paper injection --part cacheblend'",
    "legolink": f"{_RECOMPUTES}; for its positions, call reference.injection.splicing.first_tokens",
}
"""Methods that have no name, with the reasons of "What is not specified" in spec/policies.md, and what to type."""


TEXTS_OF_PRESSES: Mapping[str, str] = {
    "duoattention": "kvzip-heads", "observedattention": "score=h2o", "random": "random-tokens",
    "dms": "knorm/threshold=-8.0/recent=128", "chunk": "keydiff/pieces=1024", "decoding": "keydiff/every=64",
    "compressionratiodecoding": "keydiff/every=64", "prefilldecoding": "snapkv/steps=keydiff/every=64",
    "entropygatedchunkkv": "snapkv/chunks=10:gate=4", "perlayercompression": "knorm/layers=table:shares=3_2_1",
    "lukv": "expected-attention/recent=1/layers=table:shares=3_2_1_4",
}
"""Methods of kvpress that are a policy with further settings here, as `_bare` returns them, with the text to type."""
_GUIDE = "docs/guide/kvpress.md"


def _bare(name: str) -> str:
    """Return a name in lower case without hyphens, underscores, spaces, and kvpress's suffix `Press`."""
    return re.sub(r"[-_ ]", "", name).lower().removesuffix("press")


_CANONICAL = {_bare(name): name for name in NAMES} | _WRITTEN


def is_built_in(name: object) -> bool:
    """Return True if a name or a text means a policy of kvspec. In contrast to `check_name`, no module is imported.

    Raises:
        SpecError: if a text has a wrong form.
    """
    return isinstance(name, str) and _bare(home_of(name.partition("(")[0])) in _CANONICAL


def check_name(name: str, argument: str = "name") -> str:
    """Return the name of a built-in policy or of a user's own policy.

    Case, hyphens and underscores of built-in names do not matter: `SnapKV`, `Ada-KV` and `AdaKVPress` are accepted.

    Raises:
        SpecError: if the name is unknown, or for a reason that `user_policy` lists. The message contains `argument` and
            names similar to `name`. For a method that kvspec leaves out, the message has the reason.
    """
    if not isinstance(name, str):
        kind = f"{type(name).__module__.split('.')[0]}.{type(name).__name__}"
        remedy = "for a Policy object type kvspec.CustomPolicy(policy, 0.3)" if isinstance(name, Policy) else (
            "the name comes first: policy_from_name('snapkv', 0.3)"
        )
        raise SpecError(argument, name if isinstance(name, (int, float)) else kind, f"must be text; {remedy}")
    _check_suffix(name, argument)
    if is_composition(name):
        return str(_composition(name, argument))
    # `module:ATTRIBUTE` names no entry point, and a search for entry points opens a file of each installed package.
    if name in NAMES or (":" not in name and name in entry_points(group=ENTRY_POINTS).names):
        return name
    if (known := _CANONICAL.get(_bare(name))) is not None:
        return known
    if (reason := LEFT_OUT.get(_bare(name))) is not None:
        raise SpecError(argument, name, reason)
    if (text := TEXTS_OF_PRESSES.get(_bare(name))) is not None:
        raise SpecError(argument, name, f"is a text in kvspec, and {_GUIDE} explains the differences: type {text!r}")
    if name.lower().endswith("press") and ":" not in name:
        reason = f"has no policy of this name, and {_GUIDE} has the way or the reason"
        raise SpecError(argument, name, f"{reason}; for a policy of your own, call kvspec.policy_from_score")
    bare, bracket, _ = name.partition("(")
    if bracket and _bare(bare) in _CANONICAL:
        call = f"policy_from_name({_CANONICAL[_bare(bare)]!r}, constant=value)"
        raise SpecError(argument, name, f"must be a name; pass constants as arguments, such as {call}")
    user_policy(name, argument)
    return name


def _check_suffix(name: str, argument: str) -> None:
    """Check that a name does not end in AT_PROMPT. The error has the text of a policy that evicts as in a study."""
    if name.endswith(AT_PROMPT) and is_built_in(policy := name.removesuffix(AT_PROMPT)):
        rest = re.sub("/every=[^/]*", "", policy)
        text = rest if home_of(policy) in WHOLE else f"{rest}/every=none"
        raise SpecError(argument, name, f"is a name only in kvspec compare, rules files and lm-eval: type {text}")


def _composition(text: str, argument: str = "name") -> Composition:
    """Parse the text of a policy, and check the name and the constants of the policy in the text.

    Raises:
        SpecError: if the text is invalid, or if the name is not that of a built-in policy.
    """
    composition = parse_composition(text, argument)
    name = check_name(composition.name, argument)
    if name not in NAMES:
        raise SpecError(argument, text, f"changes parts of {name}, but only policies of kvspec have parts with names")
    constants_from_text(POLICIES[name.removeprefix(DIVERSE)], composition.constants, _defaults(name))
    return replace(composition, name=name)


def _defaults(name: str) -> Mapping[str, Any]:
    """Return defaults of the constants that a name adds to the constants of the maker function."""
    return {**(DIVERSITY if name.startswith(DIVERSE) else {})} | ({} if name in _FIRST else {BACKEND: "numpy"})


def split_name(name: str, argument: str = "name") -> tuple[str, dict[str, Any]]:
    """Return the name and the constants of a text without parts, such as `snapkv:W=16`. Other names have no constants.

    Raises:
        SpecError: as in `check_name`.
    """
    if (name := check_name(name, argument)) in NAMES or not is_composition(name):
        return name, {}
    composition = _composition(name, argument)
    if composition.parts or composition.scorer_only:
        return name, {}
    row = POLICIES[composition.name.removeprefix(DIVERSE)]
    return composition.name, constants_from_text(row, composition.constants, _defaults(composition.name))


def split_session_constants(name: str, argument: str = "name") -> tuple[str, dict[str, Any]]:
    """Return a text without the constants in OF_SESSION, and these constants.

    Raises:
        SpecError: if the text has a wrong form, or if a constant has a wrong type.
    """
    if not isinstance(name, str) or not is_composition(name):
        return name, {}
    _check_suffix(name, argument)
    whole = parse_composition(name, argument)
    given = {key: text for key, text in whole.constants.items() if key in OF_SESSION}
    rest = {key: text for key, text in whole.constants.items() if key not in given}
    return str(replace(whole, constants=rest)), typed_constants(given, OF_SESSION)


def home_of(name: str) -> str:
    """Return the named policy that a text changes. The result for a name is the name."""
    return _split_parts(name)[0]


def user_policy(name: str, argument: str = "name") -> Plugin:
    """Load a user's own policy by name.

    Raises:
        SpecError: if the name is unknown, if loading fails, or if the object is not a Policy.
    """
    plugin = find_plugin(argument, name, ENTRY_POINTS, NAMES)
    if not isinstance(plugin.value, Policy):
        kind = type(plugin.value).__name__
        bound = f"must be a Policy, such as kvspec.policy_from_score returns; the type is {kind}"
        raise SpecError(argument, name, bound)
    return plugin


def constants_of(name: str) -> frozenset[str]:
    """Return the constants that a caller can set for the policy `name`. A user's own policy has no constants.

    Raises:
        SpecError: as in `check_name`.
    """
    if is_composition(name := check_name(name)):
        composition = _composition(name)
        return constants_of(composition.name) - frozenset(composition.constants) - {BLOCK} | {BACKEND}
    if name not in NAMES:
        return frozenset()
    row = POLICIES[name.removeprefix(DIVERSE)]
    if name.startswith(DIVERSE):
        return row.constants | _DIVERSITY
    return row.constants | ({BLOCK} if row.blocks else set()) | ({BACKEND} if name not in _FIRST else set())


def check_kinds(name: str, constants: Mapping[str, Any]) -> None:
    """Check that constants have the kinds of their defaults. Your own policy has no constants.

    Raises:
        SpecError: if a constant has a different kind, such as text in place of a number.
    """
    home = home_of(name)
    if home in NAMES:
        more = DIVERSITY if home.startswith(DIVERSE) else {}
        POLICIES[home.removeprefix(DIVERSE)].check_kinds(constants, more)


def families_of(name: str) -> tuple[str, ...]:
    """Return the stage families that a backend must have for the policy `name`.

    Raises:
        SpecError: as in `check_name`.
    """
    name, parts = _split_parts(check_name(name))
    if name not in NAMES:
        return ()
    row, diverse = POLICIES[name.removeprefix(DIVERSE)], name.startswith(DIVERSE) or "diverse" in parts
    return (*((row.family,) if BACKEND in row.constants else ()), *(("diversity",) if diverse else ()))


def constants_of_model(name: str) -> frozenset[str]:
    """Return the names of the constants that kvspec reads from the model: `W_o`, `inv_freq`, `factor`, `served`.

    Raises:
        SpecError: as in `check_name`.
    """
    name, parts = _split_parts(check_name(name))
    constants = POLICIES[name.removeprefix(DIVERSE)].model_constants if name in NAMES else frozenset[str]()
    return constants | {"W_o"} if "critical" in parts else constants


def _split_parts(name: str) -> tuple[str, frozenset[str]]:
    """Return the named policy that a text changes, and the names of the changed parts."""
    if not is_composition(name):
        return name, frozenset()
    composition = parse_composition(name)
    return composition.name, frozenset(composition.parts)


def make_policy(name: str, constants: Mapping[str, Any]) -> Policy:
    """Make the policy `name` with constants from the caller and from the model.

    Raises:
        SpecError: as in `check_name`, and if a constant's value is invalid for the policy.
        BackendUnavailable: if the backend cannot run here, or lacks a stage family that the policy needs.
    """
    if is_composition(name := check_name(name)):
        composed = policy_from_text(_composition(name), constants)
        return with_twins(composed, resolve(constants.get(BACKEND, "numpy")))
    if name not in NAMES:
        given = user_policy(name).value
        assert isinstance(given, Policy)
        return given
    row = POLICIES[name.removeprefix(DIVERSE)]
    if not name.startswith(DIVERSE):
        outside = constants_of(name) - row.constants
        arguments = {key: value for key, value in constants.items() if key not in outside}
        policy = row.policy(arguments)
        if name not in _FIRST:
            policy = with_twins(policy, resolve(constants.get(BACKEND, "numpy")))
        if policy.promises == NOTHING_PROMISED:
            policy = replace(policy, promises=promises_of(name))
        return policies.in_blocks(policy, constants[BLOCK]) if row.blocks and BLOCK in constants else policy
    taken = row.constants | row.model_constants
    host = row.policy({key: value for key, value in constants.items() if key in taken})
    engine = resolve(constants.get(BACKEND, "numpy"))
    lam, mode = constants.get("diversity", 0.5), constants.get("signature", "flat")
    rule = constants.get("rule", _RULES[0])
    check_choices("rule", (rule,), _RULES)
    toward_mean = rule == "variant_b"
    policy = policies.toward_mean_values(host, lam, mode) if toward_mean else policies.diverse(host, lam, mode, engine)
    return with_twins(policy, engine)
