"""Policy and budget of a request, the settings of a server, and the reason why a policy is not served."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal

from models_integration.cache.renumbering import KEPT
from models_integration.engines.vllm.statement import KEY
from models_integration.policies.foreign import (
    EXTREME,
    check_local_constants,
    check_numbers,
    check_values,
    has_extreme_number,
)
from models_integration.policies.methods import POSITIONS, check_constants, constants_of, parse_policy, policy_from_name
from models_integration.policies.sizes import UNKNOWN, is_size, tokens_of_size
from models_integration.session.crystal import CrystalMethod
from reference.calibration import load_calibration
from reference.policies import names
from reference.policies.budgets import even, everything
from reference.policies.composition import join_constants
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.policy import Policy
from spec.retention import Granularity
from spec.validate import bound_of_names, check_choices, check_sentence_ends, did_you_mean

__all__ = ["RequestPolicy", "Settings", "make", "parse_request"]

_SERVER_ONLY = {"backend": "is chosen by the server", "calibration": "is a file of the server: name it in the default"}
_LONGEST = 65536  # characters of a request's arguments
_LONGEST_VALUE = 4096  # characters of a key or a value, except sentence ends: an error repeats the value
_MOST_KEYS = 64
_ENDS = "sentence_ends"
_KEYS = ("policy", "budget")
_EXAMPLE = '{"policy": "snapkv", "budget": 0.3}'


@dataclass(frozen=True, eq=False)
class RequestPolicy:
    """Policy, budget and options of one request. Objects are compared by identity.

    Attributes:
        constants: constants that the request or the settings name.
        typed: the budget as the user has typed it. A memory is the number of tokens.
        policy: policy whose constants of the model may be placeholders.
        of_server: constants that the server adds: sentence ends of its tokenizer.
    """

    name: str
    constants: Mapping[str, Any]
    budget: Budget
    typed: str
    policy: Policy
    of_server: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the name with its constants, as `parse_policy` reads them, without files, backends and `of_server`."""
        stated = {key: one for key, one in self.constants.items() if key != names.BACKEND}
        plain = {key: sorted(one) if key == _ENDS else one for key, one in stated.items()}
        text = [f"{key}={json.dumps(one)}" for key, one in plain.items() if isinstance(one, int | float | str | list)]
        return f"{self.name}({', '.join(text)})" if text else self.name

    def crystal(self, backend: str) -> CrystalMethod | None:
        """Return CrystalCache with the budget, or None if the policy has no breaths while the answer is generated."""
        constants = {**self.of_server, **self.constants}
        return _crystal(constants, backend, self.budget) if constants.get("decode") else None

    @cached_property
    def breath(self) -> int | None:
        """Number of answer tokens between two breaths of CrystalCache, or None."""
        method = self.crystal("numpy")
        return None if method is None else method.parameters.T_breath

    def breathes(self, tokens: int) -> bool:
        """Return True if a breath follows after `tokens` tokens of the answer."""
        return self.breath is not None and tokens % self.breath == 0

    @property
    def every(self) -> int | None:
        """Number of tokens between two evictions while the answer is generated, or None."""
        return self.breath or self.policy.cadence.every

    @property
    def window(self) -> int | None:
        """Return how many queries at the end of the prompt the policy reads. None means all queries."""
        needs = self.policy.scorer.needs
        return 0 if needs.layers == "none" else needs.query_rows

    @property
    def unserved(self) -> str | None:
        """Return why vLLM's pages cannot hold what the policy keeps, or None."""
        policy = self.policy
        if policy.scorer.needs.rehearsal is not None:
            return f"{self.name} reads each prompt twice, and vLLM reads a prompt once"
        if policy.scorer.needs.hidden:
            return f"{self.name} reads hidden states, and vLLM shows a policy only queries, keys and values"
        if policy.granularity is Granularity.MODEL or policy.budgets in (even, everything):
            return None
        part = "layers" if policy.granularity is Granularity.LAYER else "heads"
        reason = f"{self.name} keeps more tokens in some {part} than in others, and a block of vLLM has equally many"
        for parts in ("heads=even", "layers=even", "layers=even/heads=even"):
            text = f"{self.name}/{parts}"
            with suppress(SpecError):  # a text with other shares has no such form
                if make(text, {**_placeholders(text, self.constants), **self.constants}).budgets is even:
                    return f"{reason}; type {text}"
        return reason


@dataclass(frozen=True)
class Settings:
    """Settings of a server, from `additional_config["kvspec"]`.

    Attributes:
        default: arguments of the requests that name no policy. If None, these requests keep their full cache.
        allow_budget: smallest and largest share that a request may ask for, such as "0.2:1". None: any budget.
        allow_policies: names of the policies that a request may ask for. None: any built-in policy.
        on_unserved: "refuse" answers 400 to a policy that vLLM's pages cannot hold. "full" runs the request with its
            full cache, and states the reason.
        sentence_ends: ids of the tokens that end a sentence, for requests without this constant. `plugin` computes the
            ids from the tokenizer. Empty: transformers cannot read the tokenizer.
        token_bytes: bytes of a token in all layers, for budgets such as "64MiB". `plugin` computes the number.
    """

    default: Mapping[str, Any] | None = None
    allow_budget: str | None = None
    allow_policies: Sequence[str] | None = None
    on_unserved: Literal["refuse", "full"] = "refuse"
    sentence_ends: Collection[int] | None = None
    token_bytes: int | None = None

    def __post_init__(self) -> None:
        check_choices("on_unserved", (self.on_unserved,), ("refuse", "full"))
        if self.allow_policies is not None:
            object.__setattr__(self, "allow_policies", tuple(map(_allowed_name, self.allow_policies)))
        _ = self.bounds  # raises for bad bounds
        if self.sentence_ends:
            object.__setattr__(self, _ENDS, check_sentence_ends(self.sentence_ends))
        if self.default is not None:
            default = _mapping(self.default, "default", _EXAMPLE)
            # A request is compared with the name of the default. Before the start of vLLM, the ends are a placeholder.
            object.__setattr__(self, "default", json.loads(_as_json(_split(default))))
            _served_policy(self.default, self, {0} if self.sentence_ends is None else self.sentence_ends)

    @cached_property
    def bounds(self) -> tuple[Fraction, Fraction] | None:
        """Return the smallest and the largest share that a request may ask for, or None."""
        if self.allow_budget is None:
            return None
        low = high = None
        with suppress(ValueError):  # also if there are not two parts
            # As a bound, 1 is the whole prompt, and not one token.
            parts = ["1.0" if one == "1" else one for one in str(self.allow_budget).split(":")]
            low, high = (parse_budget(one).fraction for one in parts)
        if low is None or high is None or low > high:
            raise SpecError("allow_budget", self.allow_budget, "must be two ascending shares, such as 0.2:1.0")
        return low, high

    @property
    def lacks_sentence_ends(self) -> bool:
        """True if a request can ask for a policy with sentence ends, and they were not computed from the tokenizer."""
        possible = [*self._allowed, *([] if self.default is None else [self.default["policy"]])]
        return self.sentence_ends is None and any(_ENDS in constants_of(name) for name in possible)

    @property
    def _allowed(self) -> Sequence[str]:
        return names.NAMES if self.allow_policies is None else self.allow_policies

    @property
    def unserved(self) -> Mapping[str, str]:
        """Return why allowed policies are not served, by name. A policy with diversity has the reason of its host."""
        ends, reasons = frozenset(self.sentence_ends or ()), dict[str, str | None]()
        for name in self._allowed:
            if not name.startswith(names.DIVERSE) and name != (self.default or {}).get("policy"):
                try:
                    reasons[name] = _parse_policy(_as_json({"policy": name, "budget": 1}), ends).unserved
                except SpecError as error:
                    reasons[name] = f"{name}: {error.argument} {error.bound}"
        return {name: reason for name, reason in reasons.items() if reason}

    @classmethod
    def read(cls, given: Any) -> "Settings":
        """Return the settings in a mapping or in JSON text."""
        given = _mapping(given, f"additional_config[{KEY!r}]", example := f'{{"default": {_EXAMPLE}}}')
        known = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - known):
            keys = ", ".join(sorted(known))
            raise SpecError(f"additional_config[{KEY!r}]", unknown[0], f"must be one of {keys}, as in {example}")
        return cls(**given)

    @classmethod
    def of(cls, config: Any) -> "Settings":
        """Return the settings in a configuration of vLLM."""
        return cls.read((config.additional_config or {}).get(KEY, {}))

    def text(self) -> str:
        """Return the settings as JSON text that `read` accepts."""
        return _as_json({one.name: getattr(self, one.name) for one in fields(self)})


def parse_request(given: Any, settings: Settings) -> RequestPolicy | None:
    """Return the policy of a request: the request's own, or the default of the server. None: the cache stays full.

    Args:
        given: `extra_args["kvspec"]`: a mapping, JSON text, or None. `{"policy": "fullcache"}` asks for no eviction.
        settings: settings of the server.

    Raises:
        SpecError: if a name, a constant or the budget is invalid, or if the server does not allow it.
    """
    if given is None:
        return None if settings.default is None else _served_policy(settings.default, settings, settings.sentence_ends)
    asked, default = _mapping(given, KEY, _EXAMPLE), settings.default or {}
    _check_sizes(asked)
    if has_extreme_number(_as_json({**asked, "budget": None})):
        raise SpecError(KEY, _as_json(asked)[:80], f"{EXTREME}, except the budget")
    if "policy" not in asked and not default:
        hint = next(filter(None, (did_you_mean(str(key), _KEYS) for key in asked)), "")
        reason = f"must have a policy, because the server has no default: send {_EXAMPLE}{hint}"
        raise SpecError(KEY, _as_json(asked)[:80], reason)
    # A name with a colon would import a module of the client's choice.
    if "policy" in asked and not names.is_built_in(asked["policy"]):
        raise SpecError("policy", asked["policy"], _unknown_policy(asked["policy"]))
    named = "policy" in asked
    asked = _split({"policy": default.get("policy"), **asked})
    # The default, which is the server's, may name a backend in its text.
    check_local_constants(asked["policy"] if named else "", asked, _SERVER_ONLY)
    name = asked["policy"]
    if settings.allow_policies is not None and name not in (*settings.allow_policies, "fullcache"):
        raise SpecError("policy", name, f"is not allowed here; allowed are {', '.join(settings.allow_policies)}")
    # The budget of the default, which is the server's, may be outside the bounds of requests.
    bounds = settings.bounds if "budget" in asked or name == "fullcache" else None
    if name == default.get("policy"):
        asked = {**default, **asked}
    policy = _served_policy(asked, settings, settings.sentence_ends)
    share = policy.budget.fraction
    if bounds is not None and (share is None or not bounds[0] <= share <= bounds[1]):
        low, high = map(float, bounds)
        raise SpecError("budget", str(policy.budget), f"must be a share between {low} and {high}")
    return None if name == "fullcache" else policy


def _served_policy(asked: Mapping[str, Any], settings: Settings, ends: Collection[int] | None) -> RequestPolicy:
    """Return the policy of these arguments, which must be served unless the server accepts policies that are not."""
    text = _as_json(asked)
    parse = _stored_policy if len(text) <= _LONGEST_VALUE else _parse_policy
    policy = parse(text, None if ends is None else frozenset(ends), settings.token_bytes)
    if policy.unserved and settings.on_unserved == "refuse":
        raise SpecError("policy", policy.name, policy.unserved)
    return policy


def _check_sizes(asked: Mapping[str, Any]) -> None:
    """Check the number of keys and the lengths of values. All requests wait while a policy is parsed."""
    if len(asked) > _MOST_KEYS:
        raise SpecError(KEY, f"{len(asked)} keys", f"must have at most {_MOST_KEYS} keys")
    for key, value in asked.items():
        ends = str(key).replace("_", "").lower() == _ENDS.replace("_", "")
        many = len(value) if isinstance(value, list) else 0
        size = max(len(str(key)), 0 if ends else many if many > _LONGEST_VALUE else len(_as_json(value)))
        if size > _LONGEST_VALUE:
            raise SpecError(str(key)[:40], f"{size} characters", f"must have at most {_LONGEST_VALUE} characters")


def _unknown_policy(name: object) -> str:
    """Return the error text for a name that is not a built-in policy."""
    if not isinstance(name, str):
        return "must be the name of a built-in policy, such as snapkv"
    similar = bound_of_names(names.home_of(name).partition("(")[0].partition(":")[0], names.NAMES)
    return f"must be a built-in policy, and {similar}"


def _mapping(given: Any, argument: str, example: str) -> dict[str, Any]:
    shown = given[:40] if isinstance(given, str) else type(given).__name__
    if isinstance(given, str):
        if len(given) > _LONGEST:
            raise SpecError(argument, f"{shown}...", f"must have at most {_LONGEST} characters")
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise SpecError(argument, shown, f"must be JSON, such as {example}: {error}") from error
    if not isinstance(given, Mapping):
        raise SpecError(argument, shown, f"must be an object or its JSON text, such as {example}")
    return dict(given)


def _as_json(given: Any) -> str:
    """Return JSON text with sorted keys. A fraction becomes a float, and a set a list."""
    try:
        return json.dumps(given, sort_keys=True, default=lambda x: float(x) if isinstance(x, Fraction) else sorted(x))
    except (TypeError, RecursionError) as error:
        raise SpecError(KEY, type(given).__name__, f"must have values of JSON: {error}") from error


def _split(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the bare name of the policy, and all constants under their own names."""
    written: Any = asked.get("policy")
    name, constants = parse_policy(written, "policy")
    check_numbers(constants)
    given = check_constants(name, {key: value for key, value in asked.items() if key not in _KEYS}, _KEYS)
    constants = join_constants(written, constants, given)
    return {**{key: asked[key] for key in asked.keys() & {"budget"}}, **constants, "policy": name}


def _allowed_name(text: str) -> str:
    name, constants = parse_policy(text, "allow_policies")
    if constants:
        raise SpecError("allow_policies", text, f"must have no constants: type {name}")
    return name


@lru_cache(maxsize=256)
def _stored_policy(text: str, ends: frozenset[int] | None, token_bytes: int | None) -> RequestPolicy:
    """Return the policy of a request with short arguments, which is stored: requests often repeat their arguments."""
    return _parse_policy(text, ends, token_bytes)


def _parse_policy(text: str, ends: frozenset[int] | None, token_bytes: int | None = None) -> RequestPolicy:
    """Return the policy of a request from JSON text. Before the start of vLLM, a memory has no number of tokens."""
    constants = json.loads(text)
    name = constants.pop("policy")
    if name != "fullcache" and constants.get("budget") is None:
        raise SpecError("budget", None, "is needed: a share such as 0.3, or a number of tokens such as 512")
    size = is_size(given := constants.pop("budget", 1.0))
    budget = UNKNOWN if size else parse_budget(given)
    if (rule := constants.pop(POSITIONS, KEPT)) != KEPT:
        raise SpecError(POSITIONS, rule, f"vLLM keeps positions of the text: type {KEPT!r}")
    if constants.pop("stream", False):
        raise SpecError("stream", True, "vLLM evicts after whole prompts: leave stream out")
    check_values(name, constants)
    if _ENDS in constants:
        constants[_ENDS] = check_sentence_ends(constants[_ENDS])
    if "calibration" in names.constants_of(name):
        constants["calibration"] = _calibration(name, constants.get("calibration"))
    of_server = {_ENDS: ends} if _ENDS in constants_of(name) - constants.keys() else {}
    policy = make(name, {**_placeholders(name, constants), **of_server, **constants})
    if size and token_bytes is not None:
        budget = Budget(count=tokens_of_size(given, token_bytes, max(1, policy.floor)))
    typed = given if isinstance(given, str) and not size else str(budget)
    return RequestPolicy(name, constants, budget, typed, policy, of_server)


def make(name: str, constants: Mapping[str, Any]) -> Policy:
    """Return a policy with constants of the request, the server and the model."""
    if name == "crystalcache":
        return _crystal(constants, constants[names.BACKEND], parse_budget(1.0)).policy
    return names.make_policy(name, constants)


def _crystal(constants: Mapping[str, Any], backend: str, budget: Budget) -> CrystalMethod:
    policy: Any = policy_from_name("crystalcache", budget, **{**constants, names.BACKEND: backend})
    method: CrystalMethod = policy.method
    return method


def _placeholders(name: str, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the constants of the model that are only used by scores."""
    wanted = names.constants_of_model(name) | (names.constants_of(name) & {names.BACKEND, "template"})
    # A policy with a template is not served: its error needs no tokenizer.
    values = {"W_o": {}, "inv_freq": (), "factor": 1.0, names.BACKEND: "numpy", "template": ((0,),) * 3}
    if "served" in wanted:
        values["served"] = constants["calibration"].identity
    return {key: values[key] for key in wanted}


def _calibration(name: str, given: Any) -> Any:
    if not isinstance(given, str):
        reason = f"is a file of the server: start `kvspec serve` with --policy '{name}(calibration=\"FILE\")'"
        raise SpecError("calibration", given, reason)
    return load_calibration(given)
