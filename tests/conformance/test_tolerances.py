"""Tolerances are defined in one file, and the comparator accepts exactly the results of correct backends."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.oracles import s1, s6
from conformance.paths import ROOT
from conformance.strategies.prompts import Prompt, random_prompt
from conformance.tolerances import BOUNDS, Interval, list_is_realisable
from reference.crystalcache import prefill
from spec.backend import Backend
from spec.parameters import TINY
from spec.records import CrystalRetention
from tests.conformance.float32 import WRONG, float32_backend

SUITE = ROOT / "conformance"
PACKAGES = ("conformance", "tests", "lab")
# The words are composed here. Otherwise this file would find itself.
FORBIDDEN = {
    "tolerances.py": re.compile("|".join([r"\brt" + "ol=", r"\bat" + "ol=", "app" + r"rox\(", "all" + r"close\("])),
    "plugin.py": re.compile("@" + r"settings\("),
}
# These tests compare float32 logits of whole models, and metrics and numbers with values that were computed by hand.
OTHER = ("tests/models_integration/session", "tests/experiments", "tests/lab/measure/test_streams.py")


def files() -> list[Path]:
    every = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in every if not path.relative_to(ROOT).as_posix().startswith(OTHER)]


@pytest.mark.parametrize("home", FORBIDDEN)
def test_tolerances_and_settings_have_one_home(home: str) -> None:
    actual = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files() if path.name != home
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORBIDDEN[home].search(line)
    ]
    assert actual == []


@pytest.mark.parametrize("key", BOUNDS)
def test_each_bound_has_its_reason_and_its_use(key: tuple[str, str]) -> None:
    item, precision = key
    sources = "".join(path.read_text(encoding="utf-8") for path in files())
    assert precision == "float64"
    assert len(BOUNDS[key].reason.split()) > 5
    assert f'close("{item}"' in sources or f'relative("{item}"' in sources


POLICY_BUILDERS = ("brute.py", "method.py")
"""Files that make a policy of the reference for a comparison."""
# Boxes of large inputs are computed in rows: `box` creates their tags, the remaining modules of boxes their numbers.
# The method `crystalcache` is checked with the oracles of full sizes, which take arrays. `caote` creates a row of
# zeros. `compactor` and `capkv` take leverages from an orthogonal factor. `expected_attention_stats` takes mean squares
# along each key.
WITH_ARRAYS = {*(SUITE / "oracles" / "scale").glob("*.py"), *map(SUITE.joinpath, (
    "oracles/box.py", "oracles/box_rows.py", "oracles/boxes.py", "oracles/box_attention.py",
    "methods/crystalcache.py", "methods/caote.py", "methods/compactor.py", "methods/capkv.py",
    "methods/expected_attention_stats.py",
    "strategies/numbers.py", "checks/scale_checks.py", "vectors/codec.py",
)), ROOT / "lab/vector_writer/expected_large.py"}
IN_PLAIN_PYTHON = {
    SUITE / "vectors/files.py", ROOT / "lab/vector_writer/brute_force.py", *(SUITE / "oracles").glob("*.py"),
    *(SUITE / "methods").glob("*.py"), *(ROOT / "lab/oracles").glob("*.py"),
    *(ROOT / "lab/vector_writer").glob("expected*.py"),
}


def test_oracles_share_nothing_with_what_they_judge() -> None:
    for path in WITH_ARRAYS | IN_PLAIN_PYTHON:
        imports = re.findall(r"^\s*(?:from|import) ([a-z_]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        arrays = set() if path in WITH_ARRAYS else {"numpy"}
        judged = {"reference", "accelerated", "models_integration", "scipy", "numba", "torch"} | arrays
        assert path.name in POLICY_BUILDERS or not judged & set(imports), path


CASES = 100
ABSTENTION_CASES = 500
SMALL = replace(TINY, C=16, T_max=4, W_recent=4)


def random_prompts(seed: int, count: int) -> list[Prompt]:
    """Return prompts of 48 tokens with about 15 trunks, some of which are evicted."""
    rng = np.random.default_rng(seed)
    return [random_prompt(rng, SMALL, 48) for _ in range(count)]


@cache
def problems() -> list[Prompt]:
    return random_prompts(20261, CASES)


@cache
def reference() -> list[CrystalRetention]:
    return [prefill(**prompt.arguments) for prompt in problems()]


def run(backend: Backend) -> list[CrystalRetention]:
    return [prefill(**prompt.arguments, backend=backend) for prompt in problems()]


def rejected(actual: list[CrystalRetention], precision: str) -> int:
    pairs = zip(actual, problems(), strict=True)
    return sum(next(stage_checks.retention(result, prompt, precision), None) is not None for result, prompt in pairs)


def test_the_reference_is_accepted_in_float64() -> None:
    assert rejected(reference(), "float64") == 0


def test_a_float32_backend_is_accepted() -> None:
    assert rejected(run(float32_backend()), "float32") == 0


def test_the_comparator_rarely_abstains() -> None:
    """Check that below 1 % of kept sets differ from the reference and still pass because of near ties."""
    abstained = 0
    for prompt in random_prompts(6, ABSTENTION_CASES):
        actual = prefill(**prompt.arguments, backend=float32_backend())
        if actual.kept.tolist() != prefill(**prompt.arguments).kept.tolist():
            assert not list(stage_checks.retention(actual, prompt, "float32"))
            abstained += 1
    assert abstained < ABSTENTION_CASES / 100


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_float32_backend_is_rejected(fault: str) -> None:
    """Check that more than 99 % of the cases are rejected."""
    assert rejected(run(float32_backend(WRONG[fault])), "float32") > CASES * 0.99


def swapped(actual: CrystalRetention, rng: np.random.Generator) -> CrystalRetention:
    """Replace one kept position by an evicted position."""
    n = actual.seen
    evicted = np.setdiff1d(np.arange(n), actual.kept)
    changed = actual.kept.copy()
    changed[rng.integers(len(changed))] = rng.choice(evicted)
    return replace(actual, positions=np.sort(changed))


def test_a_kept_set_with_one_swap_is_rejected() -> None:
    """Check that all such sets are rejected, because the records do not lead to them."""
    rng = np.random.default_rng(3)
    assert rejected([swapped(actual, rng) for actual in reference()], "float32") == CASES


def forged(actual: CrystalRetention, rng: np.random.Generator) -> CrystalRetention | None:
    """Swap two trunks, with forged scores that lead to the swap. Return None if the scores are within the radius."""
    alive = np.flatnonzero(~actual.protected)
    gone, kept = alive[actual.ratio[alive] == 0], alive[actual.ratio[alive] == 1]
    if not len(gone) or not len(kept):
        return None
    a, b = rng.choice(gone), rng.choice(kept)
    ell = [float(actual.trunks.impact[g]) for g in alive]
    if abs(actual.scores[a] - actual.scores[b]) <= tolerances.normalised_radius(ell, SMALL.epsilon):
        return None
    scores = actual.scores.copy()
    scores[[a, b]] = scores[[b, a]]
    return with_scores(actual, scores)


def with_scores(actual: CrystalRetention, scores: np.ndarray[Any, Any]) -> CrystalRetention:
    lists = stage_checks.trunk_lists(actual.trunks)
    given = {g: x for g, x in enumerate(scores.tolist()) if not actual.protected[g]}
    result = s6.dissolve(
        lists, given, actual.impact.tolist(), actual.graph.D.tolist(), actual.protected.tolist(), actual.budget,
        SMALL.N_min,
    )
    return replace(
        actual, scores=scores, ratio=np.array([float(r) for r in result.ratio]), D=np.array(result.D),
        positions=np.array(result.kept), offsets=np.array([0, len(result.kept)]),
    )


def test_a_swap_with_forged_scores_outside_the_radius_is_rejected() -> None:
    """Check that at least 99 % are rejected by the check of the scores, although all earlier checks pass."""
    rng = np.random.default_rng(4)
    pairs = [(forged(actual, rng), prompt) for actual, prompt in zip(reference(), problems(), strict=True)]
    usable = [(actual, prompt) for actual, prompt in pairs if actual is not None]
    caught = sum(next(stage_checks.retention(actual, prompt, "float32"), None) is not None for actual, prompt in usable)
    assert len(usable) > CASES * 0.8
    assert caught >= len(usable) * 0.99


def test_the_box_holds_what_float32_computes_and_is_narrow() -> None:
    """Check that the box contains every float32 result, and is narrower than 1e-3 of the value, so that it decides."""
    for prompt in problems()[:30]:
        inputs = prompt.inputs
        error = tolerances.attention_error(inputs.q, inputs.k, inputs.scaling, inputs.softcap, "float32")
        assert (error > 0).all()
        assert error.max() < 1e-3
        assert tolerances.attention_error(inputs.q, inputs.k, inputs.scaling, inputs.softcap, "float64").max() < 1e-11


def boxes(*centres: float, radius: float) -> dict[int, Interval]:
    return {j: Interval.around(x, radius) for j, x in enumerate(centres)}


@pytest.mark.parametrize(
    ("chosen", "accepted"),
    [([0, 1], True), ([1, 0], False), ([0, 2], False), ([0], False), ([0, 1, 2], False), ([0, 0], False),
     ([0, 9], False)],
)
def test_a_decided_list_is_demanded(chosen: list[int], accepted: bool) -> None:
    """Weights .9, .8 and .7 cannot cross, so the top 2 above .3 can only be [0, 1]."""
    assert list_is_realisable(chosen, boxes(0.9, 0.8, 0.7, radius=0.01), 2, 0.3) is accepted


@pytest.mark.parametrize(
    ("chosen", "accepted"), [([0, 1], True), ([0, 2], True), ([1, 0], False), ([1, 2], False), ([0], False)],
)
def test_a_near_tie_is_left_open_where_it_is_one(chosen: list[int], accepted: bool) -> None:
    """Check weights with an error of .01: .8 and .79 may change places, and .9 is always first."""
    assert list_is_realisable(chosen, boxes(0.9, 0.8, 0.79, radius=0.01), 2, 0.3) is accepted


@pytest.mark.parametrize(("chosen", "accepted"), [([0], True), ([], True), ([1], False), ([0, 1], False)])
def test_a_weight_near_the_threshold_may_fall_either_way(chosen: list[int], accepted: bool) -> None:
    assert list_is_realisable(chosen, boxes(0.3, 0.2, radius=0.01), 2, 0.3) is accepted


def test_an_exact_tie_goes_to_the_lower_index() -> None:
    """Check that equal keys leave exactly one list if the radius is 0."""
    tied = boxes(0.5, 0.5, 0.5, radius=0.0)
    assert list_is_realisable([0, 1], tied, 2, 0.3)
    assert not list_is_realisable([1, 0], tied, 2, 0.3)
    assert not list_is_realisable([0, 2], tied, 2, 0.3)


def test_the_realisable_lists_are_those_of_some_weights_in_the_boxes() -> None:
    """Check that every choice by random weights inside the boxes is accepted."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        box = boxes(*(rng.integers(2, 9, 5) / 10), radius=0.06)
        weights = {j: float(rng.uniform(b.low, b.high)) for j, b in box.items()}
        chosen = [j for j, _ in s1.strongest(weights, 3, 0.4)]
        assert list_is_realisable(chosen, box, 3, 0.4)
