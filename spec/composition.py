"""Check that the parts of a policy fit: scorers provide properties that budgets, selectors and cadences need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from spec.errors import SpecError
from spec.retention import Granularity

__all__ = [
    "ANY_SETS", "HEAD_SETS", "LAYER_SETS", "MODEL_SETS", "Provided", "Required", "Shares", "Units", "check_parts",
    "provided_by", "required_by", "requires",
]

Part = TypeVar("Part", bound=Callable[..., Any])
# A Policy. Its module imports this one.
Combined: TypeAlias = Any

ANY_SETS = frozenset(Granularity)
HEAD_SETS = frozenset({Granularity.HEAD})
LAYER_SETS = frozenset({Granularity.LAYER})
MODEL_SETS = frozenset({Granularity.MODEL})

Units = Literal["tokens", "chunks", "trunks"]
Shares = Literal["equal", "everything", "layer", "counts", "preferences", "model", "unknown"]


@dataclass(frozen=True)
class Provided:
    """Properties of a scorer, which the scorer declares as `provided`.

    Attributes:
        units: runs of tokens that have one score each.
        sets: parts of the model for which the scorer returns one row of scores.
        unscored: numbers of first and of last tokens whose score is NaN. The protection must include these tokens.
        second: name of the second scores, for a selector with two stages. "" if the scorer has no second scores.
        preferences: True if the scorer returns one weight for each layer.
        preference_constants: names of constants of the scorer that change only these weights.
        signatures: True if the scorer returns token signatures.
        no_steps: reason why the scorer cannot score a decode step. "" if the scorer can.
    """

    units: Units = "tokens"
    sets: frozenset[Granularity] = HEAD_SETS
    unscored: tuple[int, int] = (0, 0)
    second: str = ""
    preferences: bool = False
    preference_constants: frozenset[str] = frozenset()
    signatures: bool = False
    no_steps: str = "reads only the prompt"


@dataclass(frozen=True)
class Required:
    """Requirements of budgets or of a selector, which the part declares with `requires` or as `required`.

    Attributes:
        units: units of the scores that the part accepts.
        sets: granularities for which the part has an effect.
        second: name of the second scores that the part uses, or "".
        preferences: True if the part divides by the preferences of the layers.
        signatures: True if the part compares token signatures.
        window: number of tokens that budgets give each set first, or None. The protection must have the same size.
        shares: what the budgets of a layer depend on. "equal" gives every set the same share, "everything" all tokens.
            "layer" depends on scores of this layer, and "model" on the scores of all layers. "counts" depends on
            numbers of layers, heads and tokens, and "preferences" on the preferences.
        exact: True if sets keep exactly their shares (selector), or if the shares sum to the total (budgets).
        device: True if kvspec can apply the part on the device of the model.
        sequential: True if a selector chooses a token by the tokens that it has chosen before, so that a tie can change
            all later choices.
    """

    units: frozenset[Units] = frozenset({"tokens"})
    sets: frozenset[Granularity] = ANY_SETS
    second: str = ""
    preferences: bool = False
    signatures: bool = False
    window: int | None = None
    shares: Shares = "unknown"
    exact: bool = True
    device: bool = False
    sequential: bool = False


_REQUIRED: dict[Any, Required] = {}
"""Requirements of budgets and selectors that are functions."""


def requires(required: Required) -> Callable[[Part], Part]:
    """Return a decorator that declares what a budgets or selector function needs."""
    def declare(part: Part) -> Part:
        _REQUIRED[part] = required
        return part

    return declare


def provided_by(scorer: object) -> Provided | None:
    """Return what a scorer provides, or None if the scorer does not declare it."""
    provided = getattr(scorer, "provided", None)
    return provided if isinstance(provided, Provided) else None


def required_by(part: Any) -> Required | None:
    """Return what budgets or a selector need, or None if the part does not declare it."""
    required = getattr(part, "required", None)
    if isinstance(required, Required):
        return required
    function = getattr(part, "func", part)
    try:
        return _REQUIRED.get(function)
    except TypeError:  # a user's own part without a hash
        return None


def check_parts(policy: Combined) -> None:
    """Check that the parts of a policy fit together. Parts that declare nothing are not checked.

    Implements: PO-COMPOSE

    Raises:
        SpecError: if two parts do not fit. The message names the part, the reason and a part that fits.
    """
    _check_types(policy)
    for problem in _problems(policy):
        raise SpecError(*problem)


def _check_types(policy: Combined) -> None:
    scorer, least = policy.scorer, policy.least
    if not callable(scorer) or not hasattr(scorer, "needs"):
        raise SpecError("scorer", type(scorer).__name__, "must be a Scorer: a callable with the attribute needs")
    for name in ("budgets", "selector", "protection"):
        if not callable(getattr(policy, name)):
            raise SpecError(name, getattr(policy, name), f"must be callable, such as the {name} of a named policy")
    if not hasattr(policy.protection, "size"):
        raise SpecError("protection", type(policy.protection).__name__, "has no size: pass SinkAndRecent(sink, recent)")
    if not hasattr(policy.cadence, "due"):
        raise SpecError("cadence", policy.cadence, "must be a Cadence, such as Cadence(every=64)")
    if not isinstance(policy.granularity, Granularity):
        raise SpecError("granularity", policy.granularity, "must be Granularity.MODEL, .LAYER or .HEAD")
    if least is not None and least < 0:
        raise SpecError("least", least, "must be at least 0, or None")


Problem = tuple[str, object, str]


def _problems(policy: Combined) -> Iterator[Problem]:
    scorer, selector, budgets = provided_by(policy.scorer), required_by(policy.selector), required_by(policy.budgets)
    if scorer is not None:
        yield from _of_sets(policy, scorer)
        if selector is not None:
            yield from _of_selector(policy, scorer, selector)
        if budgets is not None:
            yield from _of_scores(policy, scorer, budgets)
    if budgets is not None:
        yield from _of_budgets(policy, budgets)
    if policy.cadence.every is not None:
        yield from _of_steps(policy, scorer, budgets)


def _name(part: Any) -> str:
    function = getattr(part, "func", part)
    return getattr(function, "__name__", type(function).__name__)


def _words(kinds: frozenset[Any]) -> str:
    return " or ".join(sorted(kind.value if isinstance(kind, Granularity) else kind for kind in kinds))


def _of_sets(policy: Combined, scorer: Provided) -> Iterator[Problem]:
    """Yield the problem if rows of scores and kept sets differ, or if tokens without a score are not protected."""
    if policy.granularity not in scorer.sets:
        name = policy.granularity.value
        yield "granularity", name, f"does not fit the scores of {policy.name}, which have one row for each " + (
            f"{_words(scorer.sets)}: use this granularity"
        )
    first, last = scorer.unscored
    n = first + last + policy.protection.size + 1
    marks = np.asarray(policy.protection(n))
    if not (marks[:first].all() and marks[n - last :].all()):
        yield "protection", policy.protection, (
            f"must include the first {first} and the last {last} tokens, which have no score in {policy.name}: use"
            f" SinkAndRecent({first}, {last})"
        )


def _of_selector(policy: Combined, scorer: Provided, selector: Required) -> Iterator[Problem]:
    name = _name(policy.selector)
    if scorer.units not in selector.units:
        ways = {"tokens": "top_units", "chunks": "fill_units or top_units", "trunks": "Dissolve or fill_units"}
        fits = ways[scorer.units]
        yield "selector", name, (
            f"selects {_words(selector.units)}, but {policy.name} has scores of {scorer.units}: use {fits}"
        )
    if scorer.second != selector.second:
        fits = {"": "top_units", "output": "two_stages", "sample": "ranges_first"}[scorer.second]
        yield "selector", name, (
            f"uses {selector.second or 'no'} second scores, but the scorer of {policy.name} has"
            f" {scorer.second or 'no'} second scores: use {fits}"
        )
    if scorer.signatures != selector.signatures:
        yield "selector", name, (
            "must be Diverse or TowardMean, which compare the signatures of the scorer" if scorer.signatures else
            f"compares token signatures, which the scorer of {policy.name} does not compute: call diverse(host)"
        )


def _of_scores(policy: Combined, scorer: Provided, budgets: Required) -> Iterator[Problem]:
    name = _name(policy.budgets)
    if scorer.units not in budgets.units:
        yield "budgets", name, (
            f"counts scores of {_words(budgets.units)}, but {policy.name} has scores of {scorer.units}: use even"
        )
    if budgets.preferences and not scorer.preferences:
        yield "budgets", name, (
            f"divides by the preferences of the layers, which the scorer of {policy.name} does not compute: use the"
            " scorer of cake, or the budgets Pyramid"
        )


def _of_budgets(policy: Combined, budgets: Required) -> Iterator[Problem]:
    name, size = _name(policy.budgets), policy.protection.size
    if policy.granularity not in budgets.sets:
        yield "budgets", name, (
            f"has no effect on sets of kept tokens for each {policy.granularity.value}: use even, or a scorer with one"
            f" row for each {_words(budgets.sets)}"
        )
    if budgets.window is not None and (budgets.window < size or budgets.window > max(size, policy.floor)):
        yield "budgets", name, (
            f"gives each set a window of {budgets.window} tokens first, but {policy.name} protects {size} tokens and"
            f" keeps at least {policy.floor}: use the window {size}"
        )


def _of_steps(policy: Combined, scorer: Provided | None, budgets: Required | None) -> Iterator[Problem]:
    """Yield the problem if the policy cannot evict after decode steps."""
    every = policy.cadence.every
    if policy.scorer.needs.hidden:
        yield "cadence", f"every={every}", (
            f"does not fit the scorer of {policy.name}, which uses hidden states, and the cache does not store those of"
            " earlier tokens: leave the cadence out"
        )
    if scorer is not None and scorer.no_steps:
        yield "cadence", f"every={every}", f"does not fit the scorer of {policy.name}, which {scorer.no_steps}"
    if scorer is None and not hasattr(policy.scorer, "step"):
        yield "cadence", f"every={every}", (
            f"needs a scorer with the method step, which the scorer of {policy.name} lacks: leave the cadence out"
        )
    if budgets is not None and budgets.shares != "equal":
        yield "cadence", f"every={every}", (
            f"needs equal shares, but the budgets {_name(policy.budgets)} of {policy.name} are not equal: use even, or"
            " leave the cadence out"
        )
