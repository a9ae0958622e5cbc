"""Policy and budget of a request, the settings of a server, and the reason why a policy is not served."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal

from reference.calibration import load_calibration
from reference.policies import names
from reference.policies.budgets import even, everything
from spec.budget import Budget, parse_budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters.crystalcache import preset
from spec.policy import Policy
from spec.retention import Granularity
from spec.validate import check_choices, check_sentence_ends

__all__ = ["KEY", "RequestPolicy", "Settings", "make", "parse_request"]

KEY = "kvspec"
"""Key of kvspec's arguments in `SamplingParams.extra_args`, in `vllm_xargs` and in `additional_config`."""
_SERVER_ONLY = {"backend": "is chosen by the server", "calibration": "is a file of the server: name it in the default"}
_LONGEST = 65536  # characters of a request's arguments
_LARGE = re.compile(r"(?<![.\d])\d{7}|\de\+")
"""Number of a million or more in JSON text. A request with such a window once took the memory of the server."""


@dataclass(frozen=True, eq=False)
class RequestPolicy:
    """Policy, budget and options of one request. Objects are compared by identity.

    Attributes:
        name: name of the policy.
        constants: constants of the policy, without the constants of the model.
        budget: budget of the prompt and of each later decision.
        typed: the budget as the user has typed it.
        policy: policy whose constants of the model may be placeholders. The scheduler uses only the cadence, the
            granularity, the floor and the needs.
    """

    name: str
    constants: Mapping[str, Any]
    budget: Budget
    typed: str
    policy: Policy

    def __str__(self) -> str:
        """Return the name with constants, as `parse_policy` reads them, without constants that are files or sets."""
        shown = [f"{key}={json.dumps(one)}" for key, one in self.constants.items()
                 if isinstance(one, int | float | str)]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    @property
    def decodes(self) -> bool:
        """Return True if the policy also evicts tokens while the answer is generated."""
        return self.policy.cadence.every is not None

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
        if policy.granularity is not Granularity.MODEL and policy.budgets not in (even, everything):
            part = "layers" if policy.granularity is Granularity.LAYER else "heads"
            equal = self._with_equal_counts()
            return (
                f"{self.name} keeps more tokens in some {part} than in others, and a block of vLLM has equally many"
                f"{'' if equal is None else f'; type {equal}'}"
            )
        return None

    def _with_equal_counts(self) -> str | None:
        """Return the shortest text of the policy with equal shares. None if the name is a text with other shares."""
        for parts in ("heads=even", "layers=even", "layers=even/heads=even"):
            text = f"{self.name}/{parts}"
            with suppress(SpecError):
                if make(text, self.constants, _placeholders(text, self.constants)).budgets is even:
                    return text
        return None


@dataclass(frozen=True)
class Settings:
    """Settings of a server, from `additional_config["kvspec"]`.

    Attributes:
        default: policy of the requests that name none, in the form of a request's arguments. If None, these requests
            keep their full cache.
        allow_budget: smallest and largest share that a request may ask for, such as "0.2:1". If None, a request may
            have any budget.
        allow_policies: names of the policies that a request may ask for. If None, a request may name any built-in
            policy.
        on_unserved: "refuse" answers 400 to a policy that vLLM's pages cannot hold. "full" runs the request with its
            full cache, and states the reason.
    """

    default: Mapping[str, Any] | None = None
    allow_budget: str | None = None
    allow_policies: Sequence[str] | None = None
    on_unserved: Literal["refuse", "full"] = "refuse"

    def __post_init__(self) -> None:
        check_choices("on_unserved", (self.on_unserved,), ("refuse", "full"))
        if self.allow_policies is not None:
            allowed = tuple(names.check_name(name, "allow_policies") for name in self.allow_policies)
            object.__setattr__(self, "allow_policies", allowed)
        if self.bounds is not None and self.bounds[0] > self.bounds[1]:
            raise SpecError("allow_budget", self.allow_budget, "must be two ascending shares, such as 0.2:1.0")
        if self.default is not None:
            # A request is compared with the name of the default.
            written: Any = self.default.get("policy")
            named = {**self.default, "policy": names.check_name(written, "policy")}
            object.__setattr__(self, "default", named)
            _served_policy(named, self)

    @cached_property
    def bounds(self) -> tuple[Fraction, Fraction] | None:
        """Return the smallest and the largest share that a request may ask for, or None."""
        if self.allow_budget is None:
            return None
        low, _, high = str(self.allow_budget).partition(":")
        # As a bound, 1 is the whole prompt, and not one token.
        shares = [parse_budget("1.0" if one == "1" else one, "allow_budget").fraction for one in (low, high)]
        if shares[0] is None or shares[1] is None:
            raise SpecError("allow_budget", self.allow_budget, "must be two shares, such as 0.2:1.0")
        return shares[0], shares[1]

    @classmethod
    def read(cls, given: Any) -> "Settings":
        """Return the settings in a mapping or in JSON text.

        Raises:
            SpecError: if a key or a value is invalid.
        """
        given = _mapping(given, f"additional_config[{KEY!r}]")
        known = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise SpecError(f"additional_config[{KEY!r}]", unknown[0], f"must be one of {', '.join(sorted(known))}")
        return cls(**given)

    def text(self) -> str:
        """Return the settings as JSON text that `read` accepts."""
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self)})


def parse_request(given: Any, settings: Settings) -> RequestPolicy | None:
    """Return the policy of a request: the request's own, or the default of the server. None: the cache stays full.

    Args:
        given: `extra_args["kvspec"]`: a mapping, JSON text, or None. `{"policy": "fullcache"}` asks for no eviction.
        settings: settings of the server.

    Raises:
        SpecError: if a name, a constant or the budget is invalid, or if the server does not allow it.
    """
    if given is None:
        return None if settings.default is None else _served_policy(settings.default, settings)
    asked, default = _mapping(given, KEY), settings.default or {}
    for key, reason in _SERVER_ONLY.items():
        if key in asked:
            raise SpecError(key, asked[key], reason)
    if _LARGE.search(json.dumps({**asked, "budget": None}, default=str)):
        raise SpecError(KEY, asked, "must have no number of a million or more, except the budget")
    name = asked.get("policy", default.get("policy"))
    home = names.home_of(name) if isinstance(name, str) else name
    if home not in names.NAMES:  # a name with a colon would import a module of the client's choice
        raise SpecError("policy", name, f"must be a built-in policy: {', '.join(names.NAMES)}")
    name = names.check_name(str(name), "policy")
    if settings.allow_policies is not None and name not in (*settings.allow_policies, "fullcache"):
        raise SpecError("policy", name, f"is not allowed here; allowed are {', '.join(settings.allow_policies)}")
    if name == default.get("policy"):
        asked = {**default, **asked}
    policy = _served_policy({**asked, "policy": name}, settings)
    share, bounds = policy.budget.fraction, settings.bounds
    if bounds is not None and (share is None or not bounds[0] <= share <= bounds[1]):
        low, high = map(float, bounds)
        raise SpecError("budget", str(policy.budget), f"must be a share between {low} and {high}")
    return None if name == "fullcache" else policy


def _served_policy(asked: Mapping[str, Any], settings: Settings) -> RequestPolicy:
    """Return the policy of these arguments.

    Raises:
        SpecError: if a name, a constant or the budget is invalid, or if the policy is not served and the server refuses
            such policies.
    """
    policy = _parse_policy(json.dumps(asked, sort_keys=True, default=list))
    if policy.unserved and settings.on_unserved == "refuse":
        raise SpecError("policy", policy.name, policy.unserved)
    return policy


def _mapping(given: Any, argument: str) -> dict[str, Any]:
    if isinstance(given, str):
        if len(given) > _LONGEST:
            raise SpecError(argument, f"{given[:40]}...", f"must have at most {_LONGEST} characters")
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise SpecError(argument, given[:40], f"must be JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise SpecError(argument, given, "must be an object with the keys policy and budget")
    return dict(given)


@lru_cache(maxsize=256)
def _parse_policy(text: str) -> RequestPolicy:
    """Return the policy of a request from JSON text. Requests often repeat their arguments, so results are stored."""
    asked = json.loads(text)
    name = names.check_name(asked.pop("policy", None))
    if name != "fullcache" and "budget" not in asked:
        raise SpecError("budget", None, "is needed: a share such as 0.3, or a number of tokens such as 512")
    budget = parse_budget(given := asked.pop("budget", 1.0))
    typed = given if isinstance(given, str) else str(budget)
    if asked.pop("positions", "kept") != "kept":
        raise SpecError("positions", json.loads(text)["positions"], "vLLM keeps positions of the text: type 'kept'")
    for constant in asked:
        if constant not in (known := names.constants_of(name)):
            raise SpecError(constant, asked[constant], f"{name} has the constants {', '.join(sorted(known)) or 'none'}")
    if "sentence_ends" in asked:
        asked["sentence_ends"] = check_sentence_ends(asked["sentence_ends"])
    if "calibration" in names.constants_of(name):
        asked["calibration"] = _calibration(asked.get("calibration"))
    return RequestPolicy(name, asked, budget, typed, make(name, asked, _placeholders(name, asked)))


def make(name: str, constants: Mapping[str, Any], learned: Mapping[str, Any]) -> Policy:
    """Return a policy with constants of the request and of the model.

    Raises:
        SpecError: if a constant is missing or invalid.
    """
    if name == "crystalcache" and "parameters" in constants:
        constants = {**constants, "parameters": preset(constants["parameters"])}
    try:
        return names.make_policy(name, {**learned, **constants})
    except (SpecError, BackendUnavailable):
        raise
    except Exception as error:  # an argument is missing, or the policy does not compute with a value of its type
        raise SpecError("constants", constants, f"{name}: {error}") from error


def _placeholders(name: str, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the constants of the model that are only used by scores."""
    wanted = names.constants_of_model(name)
    values: dict[str, Any] = {"W_o": {}, "inv_freq": (), "factor": 1.0}
    if "served" in wanted:
        values["served"] = constants["calibration"].identity
    if "template" in names.constants_of(name):  # A policy with a template is not served: its error needs no tokenizer.
        values["template"], wanted = ((0,),) * 3, wanted | {"template"}
    return {key: values[key] for key in wanted}


def _calibration(given: Any) -> Any:
    if given is None:
        reason = "is a file of the server: start `kvspec serve` with --policy 'NAME(calibration=\"FILE\")'"
        raise SpecError("calibration", None, reason)
    return load_calibration(given)
