"""Explanations of a failed comparison with a method: the known error with the most similar kept sets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.methods.method import Decide, Method
from conformance.oracles.box import DOUBLE, Undecided
from conformance.policy_suite.explanations import explanations, telling
from conformance.strategies.policy_inputs import Inputs, Kept
from spec.errors import SpecError
from spec.policy import LayerView

CLOSER = 4
"""Factor by which an error must have fewer different tokens than the method to be reported."""


def _interleaved(view: LayerView) -> LayerView:
    """Return the view with query heads in the order in which head h reads KV head h % H_kv."""
    order = np.arange(len(view.q)).reshape(-1, len(view.k)).T.ravel()
    return replace(view, q=view.q[order], sinks=None if view.sinks is None else np.asarray(view.sinks)[order])


SHOWN: Mapping[str, Callable[[LayerView], LayerView]] = {
    "scaling: 1 / sqrt(width) instead of the layer's": lambda view: replace(view, scaling=view.k.shape[-1] ** -0.5),
    "softcap: none instead of the layer's": lambda view: replace(view, softcap=None),
    "attention sinks: left out of the softmax": lambda view: replace(view, sinks=None),
    "query heads: head h reads KV head h % H_kv instead of h // (H / H_kv)": _interleaved,
    "keys: in float16": lambda view: replace(view, k=view.k.astype(np.float16).astype(view.k.dtype)),
}
"""Errors in the inputs of a method, by description, for every method that reads this input."""


def reasons(
    decide: Decide, method: Method, unit: float = DOUBLE, failing: tuple[Inputs, int] | None = None,
) -> list[str]:
    """Return sentences that explain why kept sets differ from the method, or an empty list.

    The sentences name readings or constants with which the subject agrees, otherwise the nearest known error.
    """
    agreeing = explanations(decide, method, unit, failing)
    if agreeing:
        return [f"it agrees with {' and with '.join(agreeing[:3])}: declare that"]
    inputs = [*telling(method), *([failing] if failing else [])]
    answers = [_answered(decide, each, max(B, method.floor(each))) for each, B in inputs]
    distance = _distance(answers, _equation(method, inputs, unit, lambda view: view, {}))
    result = sorted(
        (far, at, message) for at, (message, shown, slips) in enumerate(_errors(method))
        if (far := _distance(answers, _equation(method, inputs, unit, shown, slips))) * CLOSER <= distance
    )
    if not result or not 0 < distance < np.inf:
        return []
    far, _, message = result[0]
    if not far:
        return [f"the step that differs: {message}"]
    return [f"the nearest known error: {message} ({far} tokens differ instead of {distance})"]


def _errors(method: Method) -> Iterator[tuple[str, Callable[[LayerView], LayerView], dict[str, str]]]:
    """Yield each error as a description, a change of a layer's view, and arguments of the brute force."""
    for name, (right, *others) in {**method.brute.slips, "ties": ("lower", "higher")}.items():
        for wrong in others:
            yield f"{name}: {wrong} instead of {right}", lambda view: view, {name: wrong}
    for phrase, shown in SHOWN.items():
        yield phrase, shown, {}


def _equation(
    method: Method, inputs: Sequence[tuple[Inputs, int]], unit: float, shown: Callable[[LayerView], LayerView],
    slips: Mapping[str, str],
) -> list[Kept | None]:
    result: list[Kept | None] = []
    for each, B in inputs:
        other = replace(each, layers=[shown(view) for view in each.layers])
        try:
            result.append(method.wanted(other, max(B, method.floor(each)), unit, **slips))
        except (Undecided, ValueError, ZeroDivisionError):
            result.append(None)
    return result


def _answered(decide: Decide, inputs: Inputs, B: int) -> Kept | None:
    try:
        return decide(inputs, B)
    except (SpecError, ValueError):
        return None


def _distance(answers: Sequence[Kept | None], equation: Sequence[Kept | None]) -> Any:
    """Return the number of tokens that differ over all kept sets, or infinity if no kept sets can be compared."""
    result, compared = 0, 0
    for kept, wanted in zip(answers, equation, strict=True):
        if kept is None or wanted is None or len(kept) != len(wanted):
            continue
        compared += 1
        for tokens, right in zip(kept, wanted, strict=True):
            free: frozenset[int] = getattr(right, "open", frozenset())
            result += len((set(tokens) ^ set(right)) - free) + abs(len(tokens) - len(right))
    return result if compared else np.inf
