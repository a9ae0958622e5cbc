"""Constants and readings of a method that explain different kept sets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import Any

from conformance.methods.method import Decide, Method, rounded, span_of
from conformance.oracles.box import DOUBLE, Undecided
from conformance.oracles.choices import fits
from conformance.strategies.model_shapes import MANY_LAYERS, UNEVEN
from conformance.strategies.policy_inputs import Inputs, Kept, drawn
from spec.errors import SpecError

ALTERNATIVES: Mapping[str, Sequence[Any]] = {
    "W": (8, 16, 32, 64, 128), "kernel": (1, 3, 5, 7, 9, 13), "N_sink": (1, 2, 4, 8, 16, 64), "lam": (0.05, 0.1, 0.5),
    "c": (8, 10, 16, 20), "lag": (64, 128, 256), "beta": (10, 20), "fusion": ("sum", "max"), "block": (8, 16, 32),
    "safeguard": (Fraction(0), Fraction(1, 5), Fraction(1, 2)), "share": (Fraction(1, 4), Fraction(1, 2)),
    "gamma": (0.0, 1.0, 200.0), "N_future": (128, 512), "N_recent": (128, 256),
}
"""Values of constants in published codes. They are tried if the kept sets differ."""


def explanations(
    decide: Decide, method: Method, unit: float = DOUBLE, failing: tuple[Inputs, int] | None = None,
) -> list[str]:
    """Return the methods with other documented values or readings that explain the kept sets.

    One or two values are changed at a time. A method explains the kept sets if it agrees on all of some inputs and on
    the failing input. It must also agree on further inputs, unless rounding decides there.
    """
    values = {name: choices for name, choices in ALTERNATIVES.items() if name in method.constants}
    values |= method.choices
    there = {**method.constants, **{name: choices[0] for name, choices in method.choices.items()}, **method.given}
    single = [(name, value) for name, choices in values.items() for value in choices if value != there[name]]
    inputs = [*telling(method), *([failing] if failing else [])]
    decided_once = cache(lambda index, B: decide(inputs[index][0], B))
    for number in (1, 2):
        result = [
            method.changed(**dict(change)) for change in combinations(single, number)
            if len(dict(change)) == number and _explains(decided_once, method.changed(**dict(change)), inputs, unit)
        ]
        if result:
            return [str(one) for one in result if not _refuted(decide, one, unit)]
    return []


SHARES = (0.1, 0.3, 0.7, 0.9)
"""Shares of the tokens to keep, for which a method that explains some kept sets is checked again."""


def _refuted(decide: Decide, method: Method, unit: float) -> bool:
    """Return True if decisions on further inputs differ from the method. Rounding refutes nothing."""
    sizes = [(method.adapted(shape.inputs(), 0), (shape.share,)) for shape in (MANY_LAYERS, UNEVEN)]
    for inputs, shares in [*((inputs, SHARES) for inputs, _ in telling(method)), *sizes]:
        floor = method.floor(inputs)
        for share in shares:
            B = floor + int(share * max(0, inputs.n - floor))
            with suppress(Undecided, SpecError, ValueError):
                kept, wanted = decide(inputs, B), method.wanted(inputs, B, unit)
                if len(kept) != len(wanted) or not all(map(fits, kept, wanted)):
                    return True
    return False


def telling(method: Method) -> Iterator[tuple[Inputs, int]]:
    """Yield inputs of one layer on which different constants give different kept sets.

    The inputs are short, and some tokens are outside any window.
    """
    span = span_of(method)
    for seed, n in enumerate((span + 14, 2 * span + 22, 4 * span + 30)):
        inputs = rounded(method.add_sinks(drawn(4 * seed + 1, n, 1 + seed % 2, (1 + seed % 2, 2)), 3 * seed))
        yield replace(inputs, steps=seed if method.decodes else 0), (n + span) // 2


def _explains(
    decide: Callable[[int, int], Kept], method: Method, inputs: Sequence[tuple[Inputs, int]], unit: float,
) -> bool:
    """Return True if the method agrees with the decisions, which are of the input with an index."""
    try:
        for index, (each, B) in enumerate(inputs):
            kept = decide(index, B)
            wanted = method.wanted(each, max(B, method.floor(each)), unit)
            if len(kept) != len(wanted) or not all(map(fits, kept, wanted)):
                return False
    except (SpecError, Undecided, ValueError):
        return False
    return True
