"""Published methods as `--as` names them: kept sets by brute force in boxes.

`snapkv(W=16, pooling="average")` gives constants and readings by name. `snapkv:W=16/layers=pyramid` is the text of a
policy, and its parts are combined by the oracle of compositions. A reading is a choice on which published codes
differ. `Brute.readings` lists the readings of a method. All of them have the reading `ties`. Methods that read
attention have the reading `sinks`.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import numpy as np

from conformance.engine.methods import DECODED, FAMILY, arguments_of, method_ops
from conformance.engine.process import Engine, ask_method, backend_of
from conformance.methods import brutes
from conformance.methods.brute import Brute
from conformance.methods.composed import composed_brute
from conformance.methods.composed_text import fields_of_parameters
from conformance.methods.crystalcache import BRUTE as CRYSTALCACHE
from conformance.oracles.box import DOUBLE, rounding
from conformance.oracles.choices import Answer
from conformance.strategies.policy_inputs import (
    Inputs,
    Kept,
    decided,
    drawn,
    in_chunks,
    model_constants,
    observation,
    with_sinks,
    without_sinks,
)
from reference.policies.grammar import Composition, format_value, is_composition, parse_composition, parse_value
from reference.policies.names import (
    BACKEND,
    POLICIES,
    check_name,
    constants_of,
    constants_of_model,
    home_of,
    make_policy,
    with_twins,
)
from spec.backend import resolve
from spec.errors import SpecError
from spec.policy import Policy, Rehearsal

Decide = Callable[[Inputs, int], Kept]
METHODS: Mapping[str, Brute] = {one.name: one for one in (*brutes(), CRYSTALCACHE)}
METHOD_ITEMS = frozenset(one.item for one in METHODS.values())
TIES = {"ties": ("lower", "any")}
"""Choice between two equal scores: the lower position is kept, or either of them."""
SINKS = {"sinks": ("softmax", "none")}
"""Attention sinks of a model such as gpt-oss in the softmax: counted, or not. Without sinks, no input has any."""
MODEL_CHUNK = 150
"""Number of tokens of a repeated chunk of an input of a model's size."""
EXTENTS = {"W": 1, "W_recent": 1, "N_sink": 1, "N_recent": 1, "lag": 3, "c": 1, "block": 1}
"""Constants that are a number of tokens, each with the multiple of it that an input needs to show a difference."""


@dataclass(frozen=True)
class Method:
    """A method with constants and readings. `given` contains the values that differ from the published values."""

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def brute(self) -> Brute:
        return composed_brute(self.name) if is_composition(self.name) else METHODS[self.name]

    @property
    def home(self) -> str:
        """Return the named policy that the text of a policy changes. For a name, this is the name."""
        return home_of(self.name)

    @property
    def text(self) -> str:
        """Return the name or the text of the policy, with the constants that differ from the published values."""
        composition = parse_composition(self.name)
        options = {name: format_value(value) for name, value in self.given.items() if name not in self.choices}
        return str(replace(composition, constants=options))

    @property
    def decodes(self) -> bool:
        """Return True if the kept sets after decode steps are compared."""
        return self.name in DECODED or self.brute.decoded

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens of an input that the brute force evaluates in seconds."""
        return self.brute.longest

    @property
    def item(self) -> str:
        """Return the item of the specification that defines the method."""
        return self.brute.item

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Return the constants of the brute force.

        A constant without a published value depends on the model, and has the value of the tests.
        """
        known = {name: value for name, value in self.brute.published.items() if value is not None}
        result = {name: {**self.brute.small, **known, **self.given}[name] for name in self.brute.small}
        if changed := {name: self.given[name] for name in _fields(self.brute) & self.given.keys()}:
            result["parameters"] = replace(result["parameters"], **changed)
        return result

    @property
    def readings(self) -> dict[str, Any]:
        """Return the readings of the method, without `ties` and `sinks`."""
        return {name: self.given.get(name, choices[0]) for name, choices in self.brute.readings.items()}

    @property
    def choices(self) -> dict[str, Sequence[str]]:
        """Return the values of each reading, the default first."""
        return {**self.brute.readings, **TIES, **(SINKS if self._reads_attention else {})}

    @property
    def _reads_attention(self) -> bool:
        return self.name == CRYSTALCACHE.name or "sinks" in method_ops()[f"{FAMILY}.{self.home}"].arguments

    def add_sinks(self, inputs: Inputs, seed: int) -> Inputs:
        """Add sinks for a third of the seeds, if the method reads sinks."""
        reads = self._reads_attention and self.given.get("sinks") != "none"
        return with_sinks(inputs, seed) if reads else inputs

    @property
    def decides_in_turns(self) -> bool:
        """Return True if a later turn has all inputs of the method, and the method has no records."""
        policy = self.reference(drawn(0))
        needs = policy.scorer.needs
        known = needs.query_rows is not None or self.brute.turns
        return known and needs.rehearsal is None and policy.cadence.every is None

    def adapted(self, inputs: Inputs, steps: int = 2) -> Inputs:
        """Return the inputs of a model, reduced or extended to the inputs that this method reads.

        These are sinks, repeated chunks and decoded tokens.
        """
        if not self._reads_attention or self.given.get("sinks") == "none":
            inputs = without_sinks(inputs)
        if "chunk" in self.constants:
            inputs = in_chunks(inputs, Rehearsal(**{**self.constants, "chunk": MODEL_CHUNK}))
        exact = inputs.layers[0].k.dtype == np.float64  # In float32, rounding would decide a step and all later steps.
        return replace(inputs, steps=steps if self.decodes and exact else 0)

    def __str__(self) -> str:
        """Return the method as `--as` accepts it: every constant, and the given readings."""
        options = {name: value for name, value in self.constants.items() if name not in ("template", "parameters")}
        if is_composition(self.name):
            words = {name: format_value(value) for name, value in {**options, **self.given}.items()}
            return str(replace(parse_composition(self.name), constants=words))
        constants = ", ".join(f"{name}={_text(value)}" for name, value in {**options, **self.given}.items())
        return f"{self.name}({constants})" if constants else self.name

    def reference(self, inputs: Inputs) -> Policy:
        """Return the policy of the reference with these constants."""
        if is_composition(self.name):
            return make_policy(self.text, model_constants(self.name, inputs))
        return self.brute.policy(inputs, self.constants)

    def floor(self, inputs: Inputs) -> int:
        """Return the smallest budget of the method."""
        policy = self.reference(inputs)
        return max(1, policy.floor, int(policy.protection(inputs.n).sum()))

    def wanted(self, inputs: Inputs, B: int, unit: float = DOUBLE, **slips: str) -> Kept:
        """Return the kept sets that the equation allows for an arithmetic with this unit. `slips` selects known errors.

        Raises:
            Undecided: if rounding decides a choice on which the last choice depends.
        """
        with rounding(unit, slips.pop("ties", self.given.get("ties", "lower"))):
            inputs = without_sinks(inputs) if self.given.get("sinks") == "none" else inputs
            return self.brute.kept(inputs, B, **self.constants, **self.readings, **slips)

    def changed(self, **given: Any) -> "Method":
        """Return the method with different constants or readings."""
        return Method(self.name, {**self.given, **given})


def _fields(brute: Brute) -> set[str]:
    """Return the names of the fields of `parameters`, if the method has parameters."""
    return {one.name for one in fields(brute.small["parameters"])} if "parameters" in brute.small else set()


def _text(value: Any) -> str:
    return json.dumps(str(value) if isinstance(value, Fraction) else value)


def on_engine(method: Method, inputs: Inputs) -> Inputs:
    """Return the inputs as an engine can receive them: all tokens are of the prompt if the operation has no steps."""
    return inputs if method.name in DECODED else replace(inputs, steps=0)


def asked(engine: Engine, method: Method, inputs: Inputs, B: int) -> Kept:
    """Return the kept sets of an engine, with scores if the engine returns scores.

    Raises:
        SpecError, EngineFailure: as `ask_method`.
    """
    inputs = on_engine(method, inputs)
    if method.name == CRYSTALCACHE.name:  # The stages of CrystalCache are operations, but CrystalCache is not.
        return _by_stages(engine, method, inputs, B)
    policy = method.reference(inputs)
    values = {**model_constants(method.name, inputs), **method.constants, "steps": inputs.steps}
    result = ask_method(engine, method.name, arguments_of(method.name, observation(policy, inputs), B, values))
    kept = [Answer(part.tolist()) for part in np.split(result.positions, result.offsets[1:-1])]
    for answer, scores in zip(kept, () if result.scores is None else result.scores.tolist(), strict=False):
        answer.scores = scores
    return list(kept)


def _by_stages(engine: Engine, method: Method, inputs: Inputs, B: int) -> Kept:
    """Return the kept sets of CrystalCache with the stages of an engine.

    Raises:
        SpecError: if the engine does not offer the stages.
    """
    stages = backend_of(engine)
    if stages.crystal is None:
        reason = f"is not offered by the engine {engine.hello.name}, which has no stages of family crystal"
        raise SpecError("as", method.name, reason)
    constants = {**model_constants(method.name, inputs), **method.constants, BACKEND: stages}
    return decided(make_policy(method.name, constants), inputs, B)


@cache
def has_separate_code(backend: str, method: str) -> bool:
    """Return True if a backend has a separate stage or score for a method.

    Otherwise the reference would be tested again.
    """
    result, row = resolve(backend), POLICIES[method]
    if backend == "numpy" or (BACKEND in row.constants and getattr(result, row.family) is not None):
        return True
    policy = METHODS[method].policy(drawn(1))
    return with_twins(policy, result) is not policy


def check_separate_code(backend: str, method: str) -> None:
    """Check that a backend has separate code for a method.

    Raises:
        SpecError: with the methods that the backend offers, if the backend has none.
    """
    if not has_separate_code(backend, method):
        offered = ", ".join(name for name in METHODS if has_separate_code(backend, name)) or "none"
        raise SpecError("as", method, f"is not offered by backend {backend}; the backend offers {offered}")


def on_backend(backend: str, method: Method, inputs: Inputs, B: int) -> Kept:
    """Return the kept sets of the reference's policy with the scores of a backend.

    Raises:
        SpecError: as `check_separate_code`.
    """
    check_separate_code(backend, method.home)
    if is_composition(method.name):
        return decided(make_policy(method.text, {**model_constants(method.name, inputs), BACKEND: backend}), inputs, B)
    constants = {**model_constants(method.name, inputs), **method.constants, BACKEND: backend}
    known = constants_of(method.name) | constants_of_model(method.name) | {"parameters"}
    chosen = {name: value for name, value in constants.items() if name in known}
    return decided(make_policy(method.name, chosen), inputs, B)


def method_of(text: str) -> Method:
    """Return the method of a text such as `snapkv(W=16)` or `snapkv:W=16/layers=pyramid`.

    Raises:
        SpecError: if a name, constant, reading or part is unknown, a value has the wrong type, or parts do not fit.
    """
    if is_composition(text):
        return _composed(parse_composition(text, "as"))
    name, bracket, rest = text.partition("(")
    if name not in METHODS:
        check_name(name, "as")
        raise SpecError("as", name, f"is not a method that kvspec can compare with; choose one of {', '.join(METHODS)}")
    try:
        values = tomllib.loads(f"x = {{{rest[:-1]}}}")["x"]
        assert not bracket or rest.endswith(")")
    except (ValueError, RecursionError, AssertionError) as error:
        raise SpecError("as", text, 'must be a method, such as snapkv or snapkv(W=16, kernel=5)') from error
    return Method(name, {key: _value(METHODS[name], key, value) for key, value in values.items()})


def _composed(parsed: Composition) -> Method:
    """Return the method of a text with parts or constants. Readings of the scorer are given like constants."""
    name = check_name(parsed.name, "as")
    brute = METHODS.get(name)
    if brute is None or (brute.parts is None and (parsed.parts or parsed.scorer_only)):
        offered = ", ".join(name for name, one in METHODS.items() if one.parts is not None)
        reason = f"changes parts of {name}, which no oracle computes; choose one of {offered}"
        raise SpecError("as", str(parsed), reason)
    plain = not parsed.parts and not parsed.scorer_only
    bare = name if plain else str(replace(parsed, name=name, constants={}))
    defaults = Method(bare).constants
    like = {**brute.published, **defaults, **fields_of_parameters(defaults)}
    try:
        options = {key: parse_value(value, like.get(key, "")) for key, value in parsed.constants.items()}
    except (ValueError, KeyError, ZeroDivisionError):
        raise SpecError("as", str(parsed), f"has a constant of the wrong type; the defaults are {like}") from None
    result = Method(bare, {key: _value(Method(bare).brute, key, value) for key, value in options.items()})
    result.reference(drawn(0))
    return result


def _value(brute: Brute, name: str, value: Any) -> Any:
    readings = Method(brute.name).choices
    constants = (brute.small.keys() | _fields(brute)) - {"template", "parameters"}
    if name in readings and value not in readings[name]:
        raise SpecError(name, value, f"must be one of {', '.join(map(str, readings[name]))}")
    if name not in readings and name not in constants:
        known = ", ".join(sorted({*constants, *readings}))
        raise SpecError("as", name, f"is not a constant or reading of {brute.name}; choose one of {known}")
    there = brute.published.get(name, brute.small.get(name))
    with suppress(ValueError):
        return Fraction(str(value)) if isinstance(there, Fraction) else value
    raise SpecError(name, value, "must be a fraction, such as 0.2 or '1/5'")


def span_of(method: Method) -> int:
    """Return the number of tokens that the method's constants cover.

    This is the longest window or block, sinks and recent tokens together, or three partitions.
    """
    there = {**fields_of_parameters(method.constants), **method.constants}
    there |= {name: max(value, there.get(name, 0)) for name, value in method.brute.lengths.items()}
    for recent in {"N_recent", "W_recent"} & there.keys():
        there[recent] += there.get("N_sink", 0)
    return max([0, *(times * int(there[name]) for name, times in EXTENTS.items() if name in there)])


def rounded(inputs: Inputs) -> Inputs:
    """Return the inputs rounded to float32."""
    def near(x: Any) -> Any:
        return np.asarray(x).astype(np.float32).astype(np.float64)

    layers = [
        replace(view, q=near(view.q), k=near(view.k), v=near(view.v),
                sinks=None if view.sinks is None else near(view.sinks)) for view in inputs.layers
    ]
    return replace(inputs, layers=layers, W_o=[near(W_o) for W_o in inputs.W_o])
