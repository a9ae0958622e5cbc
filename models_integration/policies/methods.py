"""Policies with a budget and a backend, as classes and by name."""

from collections.abc import Callable, Collection, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import signature
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models_integration.cache.renumbering import KEPT, check_rule
from models_integration.model.architecture import unwrapped
from models_integration.model.identity import ModelIdentity
from models_integration.policies.calibration import given_calibration, is_published_file, read_published
from models_integration.policies.fastest import default_device_type, fastest
from models_integration.policies.learned import learned_constants
from models_integration.policies.retention_policy import RetentionPolicy
from models_integration.policies.sizes import UNKNOWN, SizedPolicy, is_size
from models_integration.policies.values import repeat_template, sentence_ends
from models_integration.session.crystal import CrystalMethod
from models_integration.session.method import Method, method_of
from reference.backend import BACKEND as REFERENCE
from reference.policies import crystalcache, full_cache, in_blocks, names, streaming_llm
from reference.policies.composition import constant_name, join_constants
from reference.policies.crystalcache import BREATH_PROTECTION
from reference.policies.grammar import parse_call
from reference.policies.kept import warn_small_budget
from reference.policies.names import BACKEND, check_kinds, check_name
from spec.backend import Backend, resolve
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.parameters.crystalcache import BreathProtection, preset
from spec.policy import Policy
from spec.printing import short
from spec.validate import check_penalty, check_sentence_ends, did_you_mean

__all__ = [
    "CrystalCache", "CustomPolicy", "FullCache", "NamedPolicy", "RetentionPolicy", "StreamingLLM", "check_constants",
    "constants_of", "parse_policy", "policy_from_name",
]


@dataclass(frozen=True, init=False)
class CustomPolicy(RetentionPolicy):
    """Policy with a budget, made from a `spec.policy.Policy` without a budget.

        policy = kvspec.CustomPolicy(kvspec.policy_from_score(score), budget=0.3)

    Args:
        policy: policy without a budget, such as the result of `policy_from_score`.
        budget: share of the prompt to keep (0.3 or "30%"), or number of tokens to keep (an int).
        backend: name that reports show for your own code. Code of kvspec is always shown with the name of its backend.
        positions: rotary positions of the kept keys: "kept" (of the text), or "renumbered" (directly before the next
            query). With "renumbered", as in StreamingLLM's paper, streams stay in the range of the model.

    Raises:
        SpecError: if the budget is not a valid fraction or number of tokens, or if positions is unknown.
    """
    method: Method

    def __init__(
        self, policy: Policy, budget: float | int | str | Budget = 0.5, backend: str = "numpy", *,
        positions: str = KEPT,
    ) -> None:
        if not isinstance(policy, Policy):
            reason = "must be a Policy; for a policy of kvspec type kvspec.policy_from_name('snapkv', 0.3)"
            raise SpecError("policy", policy if isinstance(policy, str) else type(policy).__name__, reason)
        method = method_of(policy, parse_budget(budget), replace(REFERENCE, name=backend), positions)
        warn_small_budget(budget, policy)
        self._set_method(method)

    def _set_method(self, method: Method) -> None:
        object.__setattr__(self, "method", method)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method.settings})"

    @property
    def backend(self) -> str:
        """Name of the backend that the policy uses. `run.backend` states which backend computed each stage."""
        return self.method.engine.name

    def on(self, model: PreTrainedModel) -> Method:
        """Return the `method` argument of `decide`, which is the same for every model."""
        return self.method


class CrystalCache(CustomPolicy):
    """CrystalCache policy: keep the trunks (runs of tokens in a sentence) with the best scores.

        policy = kvspec.CrystalCache(budget=0.4, sentence_ends=kvspec.sentence_ends(tokenizer))

    Args:
        budget: share of the prompt to keep (0.3 or "30%"), or number of tokens to keep (an int).
        sentence_ends: ids of the tokens that end a sentence, such as `kvspec.sentence_ends(tokenizer)`.
        parameters: constants of the policy.
        backend: backend that selects the tokens to keep: "auto", a backend name, "module:ATTRIBUTE" or a Backend
            object. "auto" is the backend that a measurement found fastest on the device type of the model.
        decode: if True, also evict during decoding, after every T_breath generated tokens. Default: evict only after
            prompts and later turns.
        stream: if True, process one prompt of unlimited length, and evict after every C tokens. The budget of a stream
            must be a number of tokens.
        breath_protection: tokens that are never evicted during decoding: "sink+recent" or "none". The paper uses
            "none". With "none", the newest tokens can be evicted first.
        positions: rotary positions of the kept keys, "kept" or "renumbered", as in `CustomPolicy`. The paper uses
            "kept".

    Raises:
        SpecError: if the budget, `sentence_ends`, the parameters or the backend is invalid, or if the budget of a
            stream is a fraction.
        BackendUnavailable: if the backend cannot run on this machine.
    """

    _families: tuple[str, ...] | None = None
    """Stage families that the backend also needs, if the backend is "auto"."""

    def __init__(
        self, budget: float | int | str | Budget = 0.5, sentence_ends: Set[int] | None = None,
        parameters: CrystalCacheParameters = PAPER, backend: str | Backend = "auto", *, decode: bool = False,
        stream: bool = False, breath_protection: BreathProtection = BREATH_PROTECTION, positions: str = KEPT,
    ) -> None:
        share = parse_budget(budget)
        check_rule(positions)
        for name, flag in (("decode", decode), ("stream", stream)):
            if not isinstance(flag, bool):
                raise SpecError(name, flag, "must be True or False")
        if sentence_ends is None:
            reason = "is needed: kvspec.sentence_ends(tokenizer) makes the set, or pass tokenizer="
            raise SpecError("sentence_ends", None, reason)
        ends = check_sentence_ends(sentence_ends)
        if not isinstance(parameters, CrystalCacheParameters):
            raise SpecError("parameters", parameters, "must be CrystalCacheParameters")
        if stream and share.count is None:
            raise SpecError("budget", str(share), "a stream has no end: give the budget as a number of tokens")
        parameters = replace(parameters, breath_protection=breath_protection)
        breath = ("breath",) if decode or stream else ()
        auto = isinstance(backend, str) and backend == "auto"
        chosen = fastest("crystalcache", default_device_type(), *breath) if auto else resolve(backend)
        if breath:
            chosen.require_breath()
        policy = crystalcache(ends, parameters, chosen)
        warn_small_budget(budget, policy)
        self._set_method(CrystalMethod(
            policy, share, chosen, decode, positions, sentence_ends=ends, parameters=parameters, stream=stream,
        ))
        object.__setattr__(self, "_families", breath if auto else None)

    def on(self, model: PreTrainedModel) -> Method:
        """Return the `method` argument of `decide`. If the backend is "auto", the device of the model decides."""
        method = self.method
        if self._families is None or not isinstance(method, CrystalMethod):
            return method
        chosen = fastest("crystalcache", unwrapped(model).device.type, *self._families)
        return replace(method, policy=crystalcache(method.sentence_ends, method.parameters, chosen), engine=chosen)


class StreamingLLM(CustomPolicy):
    """StreamingLLM policy: keep the first `N_sink` tokens and the most recent tokens.

        policy = kvspec.StreamingLLM(budget=512, positions="renumbered")     # the positions of the paper

    The paper renumbers the kept tokens. By default, the kept tokens have the positions of the text.

    Args:
        budget: share of the prompt to keep (0.3 or "30%"), or number of tokens to keep (an int).
        N_sink: number of attention sinks, which are the first tokens of the prompt.
        block: number of tokens in a block of a paged cache. If `block` is given, the policy keeps or evicts whole
            blocks. Default: the policy keeps or evicts single tokens.
        positions: rotary positions of the kept keys: "kept" (of the text), or "renumbered" (as in the paper).

    Raises:
        SpecError: if the budget, N_sink, block or positions is invalid.
    """

    def __init__(
        self, budget: float | int | str | Budget = 0.5, N_sink: int = 4, block: int | None = None, *,
        positions: str = KEPT,
    ) -> None:
        policy = streaming_llm(N_sink)
        super().__init__(policy if block is None else in_blocks(policy, block), budget, positions=positions)


class FullCache(CustomPolicy):
    """Policy that evicts nothing. In comparisons, the full cache is the upper bound for the other policies."""

    def __init__(self) -> None:
        super().__init__(full_cache(), 1.0)


_CLASSES: Mapping[str, Callable[..., RetentionPolicy]] = {
    "crystalcache": CrystalCache,
    "streamingllm": StreamingLLM,
    "fullcache": lambda budget: FullCache(),
}
"""Policies that have a separate class, by name."""
POSITIONS = "positions"
"""Name of the constant with the rule of rotary positions. The kept tokens do not depend on the rule."""
_PARAMETERS = frozenset(field.name for field in fields(CrystalCacheParameters)) - {"breath_protection"}
"""Names of the fields of CrystalCacheParameters. The class CrystalCache has `breath_protection` as an argument."""


@dataclass(frozen=True, init=False)
class NamedPolicy(RetentionPolicy):
    """Policy of a paper, with a budget. Use `policy_from_name` to make a policy of any kind from a name.

        kvspec.NamedPolicy("snapkv", 0.25, W=16)
        kvspec.NamedPolicy("snapkv", 0.3, block=16)               # keep whole blocks of 16 tokens
        kvspec.NamedPolicy("diverse-adakv", 0.3, diversity=0.5)   # set-conditioned selection
        kvspec.NamedPolicy("triattention", 0.3, calibration="calibration.npz")     # or TriAttention's stats.pt

    Args:
        name: name of a policy that `kvspec policies` lists, except crystalcache, streamingllm and fullcache.
        budget: share of the prompt to keep (0.3 or "30%"), or number of tokens to keep (an int).
        positions: rotary positions of the kept keys, "kept" or "renumbered", as in `CustomPolicy`.
        constants: constants of the policy as keyword arguments, including `backend`. `describe_policy(name)` lists the
            constants.

    Raises:
        SpecError: if the name, a constant, the calibration file, the budget or positions is invalid.
        BackendUnavailable: if the backend cannot run on this machine, or does not support the policy.
    """

    name: str
    budget: Budget
    constants: Mapping[str, Any]
    positions: str = KEPT
    identity: ModelIdentity | None = None
    unwarned: float | int | str | Budget = field(default=1.0, repr=False, compare=False)
    """Budget as the user gave it, if only the policy on a model can tell whether the budget is too small."""

    def __init__(
        self, name: str, budget: float | int | str | Budget = 0.5, *, positions: str = KEPT, **constants: Any,
    ) -> None:
        check_rule(positions)
        if (name := check_name(name)) in _CLASSES:
            raise SpecError("name", name, "has a separate class; call kvspec.policy_from_name instead")
        constants = check_constants(name, constants, ("budget",))
        if "calibration" in constants_of(name):
            constants["calibration"] = given_calibration(constants.get("calibration"))
        check_penalty(constants.get("diversity", 0.0), "diversity")
        if constants.get(BACKEND) == "auto":
            del constants[BACKEND]
        resolve(constants.get(BACKEND, REFERENCE))
        share, later = parse_budget(budget), bool(names.constants_of_model(name))
        if not later:
            warn_small_budget(budget, names.make_policy(name, constants))
        stored = {"name": name, "budget": share, "constants": constants, "positions": positions}
        for attribute, given in (stored | {"unwarned": budget if later else share}).items():
            object.__setattr__(self, attribute, given)

    def __repr__(self) -> str:
        given = {**self.constants, **({POSITIONS: self.positions} if self.positions != KEPT else {})}
        more = "".join(f", {name}={short(value)}" for name, value in given.items())
        return f"NamedPolicy({self.name!r}, budget={self.budget}{more})"

    def knowing(self, identity: ModelIdentity) -> "NamedPolicy":
        """Return a copy of the policy. The copy compares the calibration with `identity` instead of the model."""
        copied = copy(self)
        object.__setattr__(copied, "identity", identity)
        return copied

    def on(self, model: PreTrainedModel) -> Method:
        """Prepare the policy for a model, and return the `method` argument of `decide`.

        Raises:
            SpecError: if kvspec or the policy does not support the model, or if the calibration belongs to a different
                model.
        """
        given = self.constants.get(BACKEND)
        engine = fastest(self.name, unwrapped(model).device.type) if given is None else resolve(given)
        on_device = engine.accepts_tensor is not None and not names.families_of(self.name)  # KVzip+ runs on the host
        learned = learned_constants(self.name, model, self.identity, on_device)
        if is_published_file(file := self.constants.get("calibration")):
            learned["calibration"] = read_published(file, model, self.identity)
        policy = names.make_policy(self.name, {**self.constants, **learned, BACKEND: engine})
        warn_small_budget(self.unwarned, policy)
        return method_of(policy, self.budget, engine, self.positions)


def policy_from_name(
    name: str, budget: float | int | str | Budget = 0.5, *, tokenizer: Any = None, **constants: Any,
) -> RetentionPolicy:
    """Make a policy from a name, a budget and constants.

        kvspec.policy_from_name("snapkv", budget=0.3)
        kvspec.policy_from_name("crystalcache", 0.3, tokenizer=tokenizer, alpha=0)
        kvspec.policy_from_name("kvzip", 0.3, tokenizer=tokenizer)
        kvspec.policy_from_name("mine:POLICY", 512)
        kvspec.policy_from_name("streamingllm", 512, positions="renumbered")

    Args:
        name: name of a policy that `kvspec policies` lists, `module:ATTRIBUTE` of your own Policy, or the name of an
            entry point in the group `kvspec.policies`. Constants can follow: "snapkv(W=16)". Case, hyphens and
            underscores do not matter: "SnapKV".
        budget: share of the prompt to keep (0.3 or "30%"), number of tokens (an int), or memory of the kept tokens of
            each prompt ("64MiB"). "fullcache" ignores the budget.
        tokenizer: tokenizer of the model, from which kvspec makes the constants `sentence_ends` and `template` if the
            policy needs them. Policies that need neither ignore the tokenizer.
        constants: constants of the policy as keyword arguments. `describe_policy(name)` lists the constants. Every
            policy but "fullcache" also has `positions`: "kept" or "renumbered", as in `CustomPolicy`.

    Raises:
        SpecError: if the name, a constant or the budget is invalid.
        BackendUnavailable: if the backend cannot run on this machine.
    """
    if is_size(budget):
        policy_from_name(name, UNKNOWN, tokenizer=tokenizer, **constants)  # errors are raised before the model is known
        return SizedPolicy(str(budget), partial(policy_from_name, name, tokenizer=tokenizer, **constants))
    text, (name, named) = name, parse_policy(name, "name")
    constants = join_constants(text, named, check_constants(name, constants, ("budget", "tokenizer")))
    constants |= _from_tokenizer(constants_of(name) - constants.keys(), tokenizer)
    if name not in _CLASSES:
        return NamedPolicy(name, budget, **constants)
    if name == "crystalcache":
        changed = {key: constants.pop(key) for key in _PARAMETERS & set(constants)}
        constants["parameters"] = replace(preset(constants.get("parameters", PAPER)), **changed)
    return _CLASSES[name](budget, **constants)


def constants_of(name: str) -> frozenset[str]:
    """Return the names of the constants that `policy_from_name` accepts for a policy.

    Raises:
        SpecError: if the name is unknown.
    """
    if (name := check_name(name)) in _CLASSES:
        parameters = frozenset(signature(_CLASSES[name]).parameters) - {"budget"}
        return parameters | _PARAMETERS if name == "crystalcache" else parameters
    return names.constants_of(name) | {POSITIONS}


def check_constants(name: str, constants: Mapping[str, Any], arguments: Collection[str] = ()) -> dict[str, Any]:
    """Return the constants under their own names. Case and underscores do not matter.

    `window` and `window_size` mean `W`, and `kernel_size` means `kernel`.

    Errors about an unknown constant also name the `arguments` that the caller accepts beside the constants.

    Raises:
        SpecError: if the name is unknown, if the policy does not have a constant, or if a constant is given twice.
    """
    known, named = constants_of(name), dict[str, Any]()
    for constant, value in constants.items():
        canonical = constant_name(constant, known)
        if canonical not in known:
            shown = type(value).__name__ if isinstance(value, PreTrainedTokenizerBase) else value
            reason = f"{name} has the constants {', '.join(sorted(known)) or 'none'}"
            reason += f"; the arguments are {', '.join(arguments)}" if arguments else ""
            raise SpecError(constant, shown, reason + did_you_mean(constant, {*known, *arguments}))
        if canonical in named:
            raise SpecError(constant, value, f"is the constant {canonical}, which is also given: leave out one")
        named[canonical] = value
    check_kinds(name, named)
    return named


_FROM_TOKENIZER: Mapping[str, Callable[[Any], object]] = {"sentence_ends": sentence_ends, "template": repeat_template}
"""Functions that make a constant from a tokenizer, by constant."""


def _from_tokenizer(constants: Set[str], tokenizer: object) -> dict[str, Any]:
    """Return those of the constants that kvspec makes from a tokenizer. Without a tokenizer, the result is {}."""
    if tokenizer is None:
        return {}
    return {constant: make(tokenizer) for constant, make in _FROM_TOKENIZER.items() if constant in constants}


def parse_policy(text: str, argument: str = "policy") -> tuple[str, dict[str, Any]]:
    """Parse a policy name with constants. The values of the constants in parentheses are in TOML syntax.

    Raises:
        SpecError: if the text has a wrong form, the name is unknown, or the policy does not have a constant.
    """
    head, called = parse_call(text, argument)
    name, of_session = names.split_session_constants(head, argument)
    name, named = names.split_name(name, argument)
    return name, join_constants(head, check_constants(name, named | of_session), check_constants(name, called))
