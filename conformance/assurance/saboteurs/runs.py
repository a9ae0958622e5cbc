"""What is run to see how often a saboteur agrees with the reference: prompts, lives, policies, and items alone.

The reference is reached through its modules, where a saboteur that was put into this process stands.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conformance.assurance.item_vectors import items
from conformance.assurance.saboteurs.drawn_inputs import drawn_inputs
from conformance.assurance.strategies import policy_expected as small
from conformance.assurance.strategies import policy_segments as by_turn
from conformance.assurance.strategies import policy_steps as by_step
from conformance.assurance.strategies.policy_cases import CASES
from conformance.strategies.policy_inputs import Inputs, decided, drawn
from conformance.strategies.prompts import random_prompt
from reference import calibration, crystalcache, policies
from reference.backend import BACKEND
from reference.crystalcache import compaction
from reference.policies.protections import SinkAndRecent
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER, TINY, CrystalCacheParameters
from spec.parameters.crystalcache import RarityForm
from spec.policy import Cadence, Policy

__all__ = [
    "Case",
    "alone",
    "caches",
    "calibration_read",
    "compacted",
    "essay_prompts",
    "identities",
    "life",
    "policy_kept",
    "prefilled",
    "prompts",
    "read_kept",
    "seeds",
    "turn_kept",
    "turn_seeds",
]

FORMS: tuple[CrystalCacheParameters, ...] = (
    TINY, replace(PAPER, C=16, T_max=8, N_sink=2, W_recent=6), replace(TINY, C=64, T_max=9, N_min=2),
)
RARITIES: tuple[RarityForm, ...] = ("logarithm", "reciprocal", "exponential")
BUDGETS: tuple[Any, ...] = (0.3, "50%", 0.28, 0.7, 0.55, 17)

Case = dict[str, Any]


def prompts(number: int) -> list[Case]:
    """Seeded prompts of 10 to 59 tokens whose topics come back; a third with a soft cap, a third unscaled."""
    rng = np.random.default_rng(2024)
    cases = []
    for at in range(number):
        p = FORMS[at % len(FORMS)]
        found = random_prompt(rng, p, int(rng.integers(10, 60))).arguments
        budget = BUDGETS[int(rng.integers(len(BUDGETS)))]
        cap, scaling = [(None, found["scaling"]), (5.0, found["scaling"]), (None, None)][int(rng.integers(3))]
        cases.append({**found, "budget": budget, "softcap": cap, "scaling": scaling})
    return cases


def essay_prompts(number: int) -> list[Case]:
    """The same prompts in the essay's forms; each rarity in a third, an adaptive threshold and coverage in half."""
    return [
        {**case, "parameters": replace(
            case["parameters"], heads="mean", impact="unit", trunk_impact="unit", allocation="tiers",
            rarity=RARITIES[at % 3], merge="median" if at % 2 else "fixed", coverage=0.3 if at % 4 < 2 else 0.0,
        )}
        for at, case in enumerate(prompts(number))
    ]


def prefilled(case: Case) -> Any:
    """What a prefill decides."""
    found = crystalcache.prefill(backend=BACKEND, **case)
    return [found.kept, found.ratio, found.scores, found.D]


def life(case: Case) -> Any:
    """The state after a prompt, nine tokens with three breaths, and a turn that reads it."""
    p = replace(case["parameters"], T_breath=3, breath_protection="sink+recent" if len(case["q"][0]) % 2 else "none")
    budget, n = parse_budget(case["budget"]), len(case["token_ids"])
    norms = BACKEND.require_breath().inverse_key_norms(case["k"])
    found = crystalcache.prefill(**{**case, "parameters": p, "backend": BACKEND})
    state = crystalcache.start_state(found, case["token_ids"], norms, budget, p)
    rng = np.random.default_rng(n)
    keys = list(case["k"].transpose(1, 0, 2)) + list(rng.standard_normal((17, 2, 8)).astype(np.float32))
    for token in rng.integers(0, 9, 9).tolist():
        norm = float(BACKEND.require_breath().inverse_key_norms(keys[state.seen][:, None])[0])
        state = crystalcache.decode_step(state, token, norm, case["sentence_ends"], p, BACKEND)
    k = np.stack([keys[i] for i in [*state.stored.tolist(), *range(n + 9, n + 17)]], axis=1)
    q = np.repeat(k[:, -8:], 2, axis=0)
    state = crystalcache.extend(
        state, q, k, rng.integers(0, 9, 8), case["sentence_ends"], p, BACKEND, scaling=case["scaling"]
    )
    return [state.stored, state.step, state.D, state.W.weights, state.counts]


def caches(number: int) -> list[Case]:
    """float32 caches; half of the kept sets are a run, a quarter the first tokens."""
    rng = np.random.default_rng(2024)
    cases = []
    for at in range(number):
        n = int(rng.integers(4, 20))
        some = np.flatnonzero(rng.random(n) < 0.5)
        first = 0 if at % 4 == 0 else int(rng.integers(0, n // 2))
        cases.append({
            "K": rng.standard_normal((2, n, 3)).astype(np.float32),
            "V": rng.standard_normal((2, n, 4)).astype(np.float32), "R": some if at % 2 else np.arange(first, n),
        })
    return cases


def compacted(case: Case) -> Any:
    """Keys and values, of their own type, and whether they are copies."""
    K, V = compaction.compact(**case)
    return [K, V, np.shares_memory(K, case["K"])]


def seeds(number: int) -> list[Case]:
    """Of layers; every budget meets every length and every pinned prompt."""
    return [{"seed": seed, "n": 1 + seed * 7 % 32, "B": 1 + seed % 25} for seed in range(number)]


def policy_kept(names: Sequence[str], steps: Sequence[str], case: Case) -> Any:
    """Kept sets of the named policies, and of those of `steps` while tokens are decoded."""
    inputs, longer = drawn(case["seed"], case["n"]), by_step.long(case["seed"])
    return [
        *(attempt(decided, CASES[name].policy(inputs), inputs, case["B"]) for name in names),
        *(attempt(by_step.decoded, RUNNING[name](longer, case["seed"]), longer, 5) for name in steps),
    ]


def turn_kept(case: Case) -> Any:
    """Kept sets after a later turn: of policies without records at a share of the tokens, and of H2O in its steps."""
    inputs, share = drawn(case["seed"], n=by_turn.SEEN, L=2, heads=(2, 2)), parse_budget(f"{case['B']}0%")
    live, late = by_turn.stored(case["seed"], 4), replace(policies.h2o(), cadence=Cadence(every=3))
    sink = replace(policies.knorm(), protection=SinkAndRecent(1, 0))
    chosen = [sink, *by_turn.POLICIES.values()]
    return [
        *(attempt(by_turn.kept_of, policy, inputs, live, share) for policy in chosen),
        attempt(by_turn.after_records, late, inputs, Budget(count=6)),
    ]


def read_kept(case: Case) -> Any:
    """What H2O holds after a text that is only read, and keeps after the turn behind it."""
    inputs = drawn(case["seed"], n=by_turn.SEEN, L=2, heads=(2, 2))
    return attempt(by_turn.after_reading, policies.h2o(), inputs, Budget(count=case["B"]))


def turn_seeds(number: int) -> list[Case]:
    """Shares from a tenth to nine tenths."""
    return [{"seed": seed, "B": 1 + seed % 9} for seed in range(number)]


# Policies whose decisions go on while tokens are decoded.
RUNNING: Mapping[str, Callable[[Inputs, int], Policy]] = {
    "h2o": lambda inputs, seed: policies.h2o(),
    "vatp": lambda inputs, seed: policies.vatp(small.SINK),
    "morphkv": lambda inputs, seed: policies.morphkv(small.W),
    "vase": lambda inputs, seed: policies.vase(small.W, small.KERNEL, small.N_SINK, small.HALF, seed),
    "triattention": lambda inputs, seed: small.triattention(inputs, "global", 3 * (seed % 3), 1 + seed % 3),
    "diversity": lambda inputs, seed: policies.diverse(
        replace(policies.knorm(), cadence=Cadence(every=1 + seed % 3)), small.LAM
    ),
}


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """A refusal is a decision too."""
    try:
        return run(*arguments)
    except SpecError as error:
        return error.argument


def identities(number: int) -> list[Case]:
    """Half of the calibrations are of the model at hand; half of their statistics fit float32."""
    rng = np.random.default_rng(2024)
    return [
        {"identities": given, "q": rng.integers(-8, 9, (2, 2, 4)) / (1 if at % 2 else 3)}
        for at, given in enumerate(drawn_inputs("TA-CALIBRATION", number))
    ]


def calibration_read(case: Case) -> Any:
    """Whether it is taken for the model's own, and its statistics, written and read."""
    mean, magnitude = case["q"][:1], case["q"][1:, :, :2]
    taken = calibration.Calibration(calibration.Identity("a", np.array([1.0, 0.1])), (0,), mean, magnitude)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "statistics.npz")
        calibration.save_calibration(taken, path)
        read = calibration.load_calibration(path)
    checked = attempt(items.ITEMS["TA-CALIBRATION"], case["identities"], PAPER)
    return [checked, read.mean, read.magnitude]


def alone(item: str, case: Case) -> Any:
    """The item's own function."""
    return attempt(items.ITEMS[item], case, PAPER)
