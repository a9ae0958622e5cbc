"""How subtle a saboteur is: on how many of 200 random inputs it does as the reference does.

Most are compared end to end: kept positions, ratios, scores and D of a prefill, to the bit. What no prefill
calls is compared on random inputs of its own item.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from conformance.saboteurs.install import private_reference
from conformance.saboteurs.registry import Saboteur
from conformance.strategies.prompts import random_prompt
from reference.backend import BACKEND
from reference.crystalcache import prefill
from spec.parameters import PAPER, TINY, CrystalCacheParameters

__all__ = ["INPUTS", "agreement", "right_decisions"]

INPUTS = 200
FORMS: tuple[CrystalCacheParameters, ...] = (
    TINY, replace(PAPER, C=16, T_max=8, N_sink=2, W_recent=6), replace(TINY, C=64, T_max=9, N_min=2),
)
BUDGETS: tuple[Any, ...] = (0.3, "50%", 0.28, 0.7, 0.55, 17)

Case = dict[str, Any]


@cache
def prompts() -> list[Case]:
    """Seeded prompts of 10 to 59 tokens whose topics come back; a third with a soft cap, a third unscaled."""
    rng = np.random.default_rng(2024)
    cases = []
    for at in range(INPUTS):
        p = FORMS[at % len(FORMS)]
        found = random_prompt(rng, p, int(rng.integers(10, 60))).arguments
        budget = BUDGETS[int(rng.integers(len(BUDGETS)))]
        cap, scaling = [(None, found["scaling"]), (5.0, found["scaling"]), (None, None)][int(rng.integers(3))]
        cases.append({**found, "budget": budget, "softcap": cap, "scaling": scaling})
    return cases


def memory_inputs() -> list[Case]:
    rng = np.random.default_rng(2024)
    return [
        {"L": int(rng.integers(1, 81)), "H_kv": int(rng.integers(1, 9)), "d": 64 * int(rng.integers(1, 3)),
         "n": int(rng.integers(1, 16384)), "batch": int(rng.choice([1, 1, 2, 4])),
         "b": int(rng.choice([1, 2, 4]))}
        for _ in range(INPUTS)
    ]


def compaction_inputs() -> list[Case]:
    """float32 caches; half of the kept sets are a run, a quarter the first tokens."""
    rng = np.random.default_rng(2024)
    cases = []
    for at in range(INPUTS):
        n = int(rng.integers(4, 20))
        some = np.flatnonzero(rng.random(n) < 0.5)
        first = 0 if at % 4 == 0 else int(rng.integers(0, n // 2))
        R = some if at % 2 else np.arange(first, n)
        cases.append({
            "K": rng.standard_normal((2, n, 3)).astype(np.float32),
            "V": rng.standard_normal((2, n, 4)).astype(np.float32), "R": R,
        })
    return cases


OWN_INPUTS: dict[str, Callable[[], list[Case]]] = {
    "CC-MEMORY": memory_inputs, "CC-COMPACT": compaction_inputs,
}


def outcome(run: Callable[[Case], Any], case: Case) -> bytes:
    """What came out, as bytes; an exception is an outcome too."""
    copied = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in case.items()}
    try:
        return pickle.dumps(run(copied))
    except Exception as error:  # a saboteur may break anywhere
        return type(error).__name__.encode()


def decisions(found: Any) -> list[Any]:
    """What a prefill decided, as lists."""
    return [np.nan_to_num(x, nan=-1.0).tolist() for x in (found.kept, found.ratio, found.scores, found.D)]


@cache
def right_decisions() -> list[bytes]:
    """What the reference decides on every prompt."""
    return [outcome(lambda case: decisions(prefill(backend=BACKEND, **case)), case) for case in prompts()]


def agreement(saboteur: Saboteur) -> int:
    """On how many of the inputs the saboteur agrees with the reference."""
    if saboteur.item.startswith("IN-"):
        return 0  # no prefill calls it, and its inputs are not drawn
    if saboteur.item in OWN_INPUTS:
        cases = OWN_INPUTS[saboteur.item]()
        right = [outcome(lambda case: values(saboteur.original(**case)), case) for case in cases]
        wrong = [outcome(lambda case: values(saboteur.wrong(**case)), case) for case in cases]
    else:
        copy = private_reference(saboteur)
        right = right_decisions()
        run = partial(copy.prefill, backend=copy.backend)
        wrong = [outcome(lambda case: decisions(run(**case)), case) for case in prompts()]
    return sum(a == b for a, b in zip(right, wrong, strict=True))


def values(found: Any) -> Any:
    return [(part.dtype.str, part.tolist()) for part in found] if isinstance(found, tuple) else found
