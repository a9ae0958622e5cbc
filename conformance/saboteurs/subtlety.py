"""How subtle a saboteur is: on how many of 200 random inputs it does as the reference does.

Most are compared end to end: kept positions, ratios, scores and D of a prefill, to the bit. What no prefill
calls is compared on random inputs of its own item.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import spec
from conformance.policies.cases import CASES, decided, drawn
from conformance.policies.test_decoding import decoded, long
from conformance.saboteurs.install import install, private_reference
from conformance.saboteurs.registry import Saboteur
from conformance.strategies.prompts import random_prompt
from conformance.trace import items_of
from reference import crystalcache
from reference.backend import BACKEND
from reference.crystalcache import prefill
from reference.policies import h2o
from spec.backend import Backend
from spec.budget import parse_budget
from spec.parameters import PAPER, TINY, CrystalCacheParameters
from spec.parameters.crystalcache import RarityForm

__all__ = ["INPUTS", "agreement", "right_decisions"]

INPUTS = 200
FORMS: tuple[CrystalCacheParameters, ...] = (
    TINY, replace(PAPER, C=16, T_max=8, N_sink=2, W_recent=6), replace(TINY, C=64, T_max=9, N_min=2),
)
# What only the forms of spec/crystalcache_essay.md call is compared where they are in use.
ESSAY_ITEMS = (
    "CC-MEAN-SALIENCE", "CC-UNIT-IMPACT", "CC-UNIT-TRUNK-IMPACT", "CC-TIER-COUNT", "CC-TIERS", "CC-RARITY-FORMS",
    "CC-ADAPTIVE-MERGE", "CC-COVERAGE",
)
RARITIES: tuple[RarityForm, ...] = ("logarithm", "reciprocal", "exponential")
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


@cache
def essay_prompts() -> list[Case]:
    """The same prompts in the essay's forms; each rarity in a third, an adaptive threshold and coverage in half."""
    return [
        {**case, "parameters": replace(
            case["parameters"], heads="mean", impact="unit", trunk_impact="unit", allocation="tiers",
            rarity=RARITIES[at % 3], merge="median" if at % 2 else "fixed", coverage=0.3 if at % 4 < 2 else 0.0,
        )}
        for at, case in enumerate(prompts())
    ]


def renewal_inputs() -> list[Case]:
    rng = np.random.default_rng(2024)
    return [
        {"D": rng.random(5), "active": rng.random(5) < 0.8, "renewal": [0.3, 0.5, 0.0][at % 3]} for at in range(INPUTS)
    ]


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


def pyramid_inputs() -> list[Case]:
    """A quarter of the prompts are shorter than twice the capacity."""
    rng = np.random.default_rng(2024)
    return [
        {"capacity": int(rng.integers(9, 300)), "W": 8, "L": int(rng.integers(2, 81)), "n": int(rng.integers(1, 1200))}
        for _ in range(INPUTS)
    ]


def wins_inputs() -> list[Case]:
    rng = np.random.default_rng(2024)
    return [
        {"wins": rng.integers(0, 40, size=int(rng.integers(1, 9))).tolist(), "base": int(rng.integers(1, 40)),
         "safeguard": Fraction(int(rng.integers(0, 11)), 10)}
        for _ in range(INPUTS)
    ]


OWN_INPUTS: dict[str, Callable[[], list[Case]]] = {
    "CC-MEMORY": memory_inputs, "CC-COMPACT": compaction_inputs, "CC-RENEWAL": renewal_inputs,
    "PO-PYRAMID-OFFICIAL": pyramid_inputs, "PO-ADAKV-OFFICIAL": wins_inputs,
}
PARTS_IN_USE = ("snapkv", "pyramidkv", "chunkkv", "adakv", "h2o")


def policy_decisions(item: str) -> list[bytes]:
    """Kept sets of the item's policy, or of policies that use its part; H2O and steps are also decoded."""
    whole = {"DV": "DV-POLICY", "TA": "TA-POLICY"}.get(item[:2], item)
    names = [name for name, case in CASES.items() if case.item == whole] or PARTS_IN_USE
    steps = item in ("PO-H2O", "PO-STEP")

    def run(case: Case) -> Any:
        inputs = drawn(case["seed"])
        kept = [decided(CASES[name].policy(inputs), inputs, case["B"]) for name in names]
        return [kept, decoded(h2o(), long(case["seed"]), 5) if steps else None]

    return [outcome(run, {"seed": seed, "B": 1 + seed % 25}) for seed in range(INPUTS)]


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
def right_decisions(item: str = "") -> list[bytes]:
    """What the reference decides on every prompt, in the forms that hold the item."""
    return [outcome(lambda case: decisions(prefill(backend=BACKEND, **case)), case) for case in prompts_of(item)]


def prompts_of(item: str) -> list[Case]:
    return essay_prompts() if item in ESSAY_ITEMS else prompts()


@cache
def of_decode() -> frozenset[str]:
    """The items of decode, which no prefill calls."""
    page = Path(spec.__file__).with_name("crystalcache_decode.md").read_text(encoding="utf-8")
    return frozenset(name for name, _ in items_of(page))


def life(package: Any, backend: Backend, case: Case) -> list[Any]:
    """The state after a prompt, nine tokens with three breaths, and a turn that reads it."""
    p = replace(case["parameters"], T_breath=3, breath_protection="sink+recent" if len(case["q"][0]) % 2 else "none")
    budget, n = parse_budget(case["budget"]), len(case["token_ids"])
    norms = backend.require_breath().inverse_key_norms(case["k"])
    found = package.prefill(**{**case, "parameters": p, "backend": backend})
    state = package.start_state(found, case["token_ids"], norms, budget, p)
    rng = np.random.default_rng(n)
    keys = list(case["k"].transpose(1, 0, 2)) + list(rng.standard_normal((17, 2, 8)).astype(np.float32))
    for token in rng.integers(0, 9, 9).tolist():
        norm = float(backend.require_breath().inverse_key_norms(keys[state.seen][:, None])[0])
        state = package.decode_step(state, token, norm, case["sentence_ends"], p, backend)
    k = np.stack([keys[i] for i in [*state.stored.tolist(), *range(n + 9, n + 17)]], axis=1)
    q = np.repeat(k[:, -8:], 2, axis=0)
    state = package.extend(
        state, q, k, rng.integers(0, 9, 8), case["sentence_ends"], p, backend, scaling=case["scaling"]
    )
    return [state.stored.tolist(), state.step, state.D.tolist(), state.W.weights.tolist(), state.counts.tolist()]


@cache
def right_lives() -> list[bytes]:
    """What becomes of every prompt in the reference."""
    return [outcome(lambda case: life(crystalcache, BACKEND, case), case) for case in prompts()]


def agreement(saboteur: Saboteur) -> int:
    """On how many of the inputs the saboteur agrees with the reference; a policy's stays in this process."""
    if saboteur.item.startswith("IN-"):
        return 0  # no prefill calls it, and its inputs are not drawn
    if saboteur.item in OWN_INPUTS:
        cases = OWN_INPUTS[saboteur.item]()
        right = [outcome(lambda case: values(saboteur.original(**case)), case) for case in cases]
        wrong = [outcome(lambda case: values(saboteur.wrong(**case)), case) for case in cases]
    elif saboteur.item in of_decode():
        copy = private_reference(saboteur)
        right = right_lives()
        mine = copy.modules["reference.crystalcache"]
        wrong = [outcome(lambda case: life(mine, copy.backend, case), case) for case in prompts()]
    elif saboteur.item.startswith(("PO-", "DV-", "TA-")):
        right = policy_decisions(saboteur.item)
        install(saboteur)
        wrong = policy_decisions(saboteur.item)
    else:
        copy = private_reference(saboteur)
        right = right_decisions(saboteur.item if saboteur.item in ESSAY_ITEMS else "")
        run = partial(copy.prefill, backend=copy.backend)
        wrong = [outcome(lambda case: decisions(run(**case)), case) for case in prompts_of(saboteur.item)]
    return sum(a == b for a, b in zip(right, wrong, strict=True))


def values(found: Any) -> Any:
    parts = found if isinstance(found, tuple) else (found,)
    return [(part.dtype.str, part.tolist()) if isinstance(part, np.ndarray) else part for part in parts]
