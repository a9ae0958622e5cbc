"""Tests that the kept sets of a subject satisfy the equation of a published method."""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from conformance.checks.failing_input import exchanged, note_code
from conformance.checks.refusals import boundary
from conformance.methods.method import Method, asked, method_of, on_engine, rounded, span_of
from conformance.oracles.box import DOUBLE, SINGLE, Undecided
from conformance.oracles.choices import fits, holds
from conformance.plugin import with_rejections
from conformance.policy_suite.sizes import compared_shapes
from conformance.policy_suite.slips import reasons
from conformance.policy_suite.test_promises import DRAWN_SHAPES, LONG, SHORT, TYING, Draw, with_examples
from conformance.strategies.model_shapes import SHAPES, Shape
from conformance.strategies.policy_inputs import Inputs, Kept, in_chunks, until_step
from spec.policy import LayerView, Rehearsal

LONG_SPAN = 100
"""Length of a window from which an input has at most one window. All attention of 300 tokens takes a second."""
ONLY_SIZES = "all differences are of size, so check the budgets before the scores"
Subject = Callable[[Method, Inputs, int], Kept]

DRAWS = st.builds(
    Draw, tokens=st.integers(2, SHORT), times=st.integers(0, 2), more_layers=st.integers(0, 1),
    kv_heads=st.integers(1, 2), group=st.integers(1, 2), budget=st.integers(0, LONG), seed=st.integers(0, 2**32 - 2),
    keys=st.sampled_from(["normal", "normal", "long", "axes", *TYING]),
    values=st.sampled_from(["normal", "normal", "long"]),
    queries=st.sampled_from(["normal", "normal", "few values"]), shape=DRAWN_SHAPES,
)
SMALL = [
    Draw(tokens, 1, tokens % 2, 1 + tokens // 7, 1 + tokens // 5, budget, tokens)
    for tokens in range(2, 14) for budget in [tokens // 2 if tokens % 3 else 2 * LONG // 5]
]
SMALL += [
    Draw(8, 1, 0, 2, 1, 3, 0, "axes"), Draw(3, 1, 0, 2, 1, 1, 0), Draw(9, 1, 0, 3, 1, 200, 1),
    *(Draw(6, 1, 0, 2, 1, 3, seed, values="equal") for seed in (2, 3)),
    *(Draw(12, 1, 0, 2, 2, 6, seed) for seed in (6, 12, 24, 30)),
    *(Draw(12, 1, 0, 2, 3, 6, seed) for seed in (6, 24, 30)), Draw(4, 1, 0, 4, 1, 2, 3), Draw(3, 1, 0, 4, 1, 1, 1),
]
"""Inputs by size, so that the smallest failing input is reported. A third of them has a budget of any size.

The inputs at the end show readings that are hidden otherwise. They have equal scores, equal remainders of three heads,
equal ranks of two partitions, keys without similar keys, expectations over many positions, or attention sinks. In the
last two, FINCH's number of visible keys decides.
"""
SLOW = 2.0**-10
"""Factor that makes rotary frequencies slow. The mean rotation over 512 positions nearly cancels fast frequencies."""


def on_draw(method: Method | str, draw: Draw) -> tuple[Inputs, int]:
    """Return the input of a method, and a budget."""
    method = method_of(method) if isinstance(method, str) else method
    span = span_of(method)
    inputs = draw._replace(times=min(draw.times, 1 + LONG_SPAN // (1 + span))).inputs(span, 1)
    inputs = rounded(method.add_sinks(inputs, draw.seed))
    inputs = replace(inputs, inv_freq=inputs.inv_freq * (1 if draw.seed % 2 else SLOW))
    if method.decodes:
        inputs = replace(inputs, steps=min(draw.seed // 8 % 4, inputs.n - 1))
    if "chunk" in method.constants and draw.seed % 2:
        inputs = in_chunks(inputs, Rehearsal(**{**method.constants, "chunk": 1 + draw.tokens // 2}))
    floor = method.floor(inputs)
    B = floor + draw.budget % (max(1, inputs.n - floor) + 2)
    return inputs, B


@with_examples(SMALL[::-1])
@with_rejections
@given(draw=DRAWS)
def test_the_kept_sets_are_those_of_the_method(
    method: Method, keeps: Subject, precision: str, explained: dict[str, list[str]], scored: set[str], draw: Draw,
) -> None:
    inputs, B = on_draw(method, draw)
    unit = DOUBLE if precision == "float64" else SINGLE
    decoded = f", of which {inputs.steps} are decoded" if inputs.steps else ""
    decoded += ", attention sinks" if inputs.layers[0].sinks is not None else ""
    decoded += ", capped logits" if inputs.layers[0].softcap is not None else ""
    described = f"{inputs.n} tokens{decoded}, B = {B}, layers x KV heads = {len(inputs.layers)} x {inputs.H_kv}"
    with note_code(code("on_draw", method, draw)):
        decided = compared(method, keeps, (inputs, B), unit, explained, scored, described)
    if not decided:
        reject()


def code(function: str, method: Method, draw: Draw | Shape) -> str:
    """Return the code that makes an input again."""
    name = type(draw).__name__
    first = f"from conformance.policy_suite.test_method import {name}, {function}"
    return f"{first}\ninputs, B = {function}({str(method)!r}, {draw!r})"


def on_shape(method: Method | str, shape: Shape) -> tuple[Inputs, int]:
    """Return the input of a method with the sizes of a model, and a budget."""
    method = method_of(method) if isinstance(method, str) else method
    inputs = method.adapted(shape.inputs(), shape.steps)
    floor = method.floor(inputs)
    return inputs, floor + int(shape.share * max(0, inputs.n - floor))


def test_the_kept_sets_are_those_of_the_method_at_sizes_of_models(
    method: Method, keeps: Subject, precision: str, explained: dict[str, list[str]], scored: set[str],
) -> None:
    """Check fixed inputs, the same in every run.

    If rounding decides the kept sets, check the same sizes with the dtype of the precision. In float32, no token of
    these inputs is decoded.
    """
    def judged(shape: Shape) -> bool:
        inputs, B = on_shape(method, shape)
        unit = DOUBLE if precision == shape.dtype == "float64" else SINGLE
        with note_code(code("on_shape", method, shape)):
            return compared(method, keeps, (inputs, B), unit, explained, scored, f"{shape}, B = {B}")

    for shape in compared_shapes(method, settings().max_examples, SHAPES):
        if not judged(shape) and (precision == "float64" or method.decodes):
            judged(shape._replace(dtype=precision))


def compared(
    method: Method, keeps: Subject, given: tuple[Inputs, int], unit: float, explained: dict[str, list[str]],
    scored: set[str], described: str,
) -> bool:
    """Compare the kept sets of the subject with the method. Return False if rounding decides the kept sets.

    Raises:
        AssertionError: if the subject keeps different tokens, or returns different scores.
    """
    if isinstance(keeps, partial) and keeps.func is asked:
        given = on_engine(method, given[0]), given[1]
    layers = copy.deepcopy(given[0].layers)
    with boundary("the subject"):
        kept = keeps(method, *given)
    check_unchanged(layers, given[0].layers)
    try:
        wanted = method.wanted(*given, unit)
    except Undecided:
        return False
    message, advised = difference(kept, wanted, len(given[0].layers)), ""
    if message:
        message = first_step(method, keeps, given, unit) or message
        if str(method) not in explained:
            explained[str(method)] = reasons(partial(keeps, method), method, unit, given)
        advised = "".join(f"\n{reason}" for reason in explained[str(method)])
    elif not (message := other_score(method, kept, wanted, scored)):
        return True
    raise AssertionError(f"not {method} with {described}: {message}{advised}")


def check_unchanged(before: Sequence[LayerView], after: Sequence[LayerView]) -> None:
    """Check that the subject changed no array that it received. In a session, k and v are the cache of the model."""
    for layer, (one, other) in enumerate(zip(before, after, strict=True)):
        for name, array in vars(one).items():
            if isinstance(array, np.ndarray) and not np.array_equal(array, vars(other)[name], equal_nan=True):
                raise AssertionError(
                    f"the subject changed {name} of layer {layer} in place; compute with a copy, because a session "
                    "passes the queries, keys and values of the model"
                )


def first_step(method: Method, keeps: Subject, given: tuple[Inputs, int], unit: float) -> str:
    """Return a description of the first difference, with the decode step, or an empty string without decode steps.

    The step is found by bisection, because an input can have hundreds of steps. Shorter inputs on which the subject
    fails count as equal. They only explain a difference that was found before.
    """
    inputs, B = given

    @cache
    def message(step: int) -> str:
        shorter = until_step(inputs, step)
        try:
            return difference(keeps(method, shorter, B), method.wanted(shorter, B, unit), len(inputs.layers))
        except Exception:  # rounding decides, or the subject raises any error
            return ""

    if not inputs.steps:
        return ""
    step = bisect_left(range(inputs.steps), True, key=lambda at: bool(message(0) or message(at)))
    if not message(step):
        return ""
    return f"{f'after decode step {step} of {inputs.steps}' if step else 'after the prompt'}, {message(step)}"


def difference(kept: Kept, wanted: Kept, layers: int = 1) -> str:
    """Return a description of the first kept set that differs, or an empty string if no kept set differs.

    If all differences are of size, the description has the advice to look at the budgets.
    """
    if len(kept) != len(wanted):
        return f"it has {len(kept)} kept sets, and must have {len(wanted)}"
    g = next((g for g, pair in enumerate(zip(kept, wanted, strict=True)) if not fits(*pair)), None)
    if g is None:
        return ""
    which = f"kept set {g} of {len(kept)}{place_of(g, len(kept), layers)} {exchanged(kept[g], wanted[g])}"
    return f"{which}; {ONLY_SIZES}" if differ_in_size(kept, wanted) else which


def differ_in_size(kept: Kept, wanted: Kept) -> bool:
    """Return True if each kept set that differs is a part of the method's, or contains it: right scores can do this."""
    def cut_or_extended(tokens: Sequence[int], right: Sequence[int]) -> bool:
        free: frozenset[int] = getattr(right, "open", frozenset())
        inside = set(tokens) <= {*right} | free or set(tokens) >= {*right} - free
        return inside and len(set(tokens)) == len(tokens) != len(right)

    return all(fits(*pair) or cut_or_extended(*pair) for pair in zip(kept, wanted, strict=True))


def place_of(g: int, sets: int, layers: int) -> str:
    """Return the layer and the KV head of a kept set, if layers or heads have separate kept sets."""
    if sets == 1 or sets % layers:
        return ""
    layer, head = divmod(g, sets // layers)
    return f" (layer {layer}, KV head {head})" if sets > layers else f" (layer {layer})"


def other_score(method: Method, kept: Kept, wanted: Kept, scored: set[str]) -> str:
    """Return a description of the first score of an engine that is outside the box of the equation.

    Add the method to `scored` if scores were compared.
    """
    for g, (tokens, right) in enumerate(zip(kept, wanted, strict=True)):
        scores, boxes = (getattr(one, "scores", ()) for one in (tokens, right))
        if method.brute.scored and len(scores) and len(boxes):
            scored.add(str(method))
            for token, (x, box) in enumerate(zip(scores, boxes, strict=True)):
                if not holds(box, x):
                    return f"kept set {g} of {len(kept)} has the score {x} instead of {box} for token {token}"
    return ""
