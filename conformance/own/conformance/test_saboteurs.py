"""The saboteurs' own machinery; what they say of the suite is `python -m conformance.assurance.saboteurs`."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from conformance.assurance import saboteurs
from conformance.assurance.saboteurs.drawn_inputs import DRAWN
from conformance.assurance.saboteurs.install import private_reference
from conformance.assurance.saboteurs.registry import REGISTRY, instead_of
from conformance.assurance.saboteurs.subtlety import INPUTS, outcomes, subject_of
from conformance.assurance.saboteurs.verdict import modules_of
from conformance.items import known_items
from conformance.paths import ROOT
from conformance.plugin import CI_EXAMPLES
from reference.crystalcache import impact
from spec.backend import resolve
from spec.parameters import PAPER

BASE_2 = "CC_RARITY_LOGARITHM_TO_BASE_2"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_item_has_at_least_two() -> None:
    number = Counter(saboteur.item for saboteur in REGISTRY.values())
    assert number.keys() <= known_items()
    assert {item for item in known_items() if item.startswith("CC-") and number[item] < 2} == set()


def test_each_says_what_it_gets_wrong() -> None:
    assert all(saboteur.reading.endswith(('.', '"', "?")) for saboteur in REGISTRY.values())
    assert len({saboteur.reading for saboteur in REGISTRY.values()}) == len(REGISTRY) >= 60


def test_each_is_a_backend_by_name() -> None:
    """Some of them: each is a reference of its own, which takes a while to import."""
    for name in list(REGISTRY)[::150]:
        assert resolve(f"conformance.assurance.saboteurs:{name}").require_crystal()
        assert resolve(f"conformance.assurance.saboteurs:{name}").name == name


def test_no_other_name_is_a_backend() -> None:
    with pytest.raises(AttributeError, match="no saboteur 'CC_NONE'"):
        vars(saboteurs)["__getattr__"]("CC_NONE")


def test_a_name_is_declared_once() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        instead_of(impact.rarity, "CC-RARITY")(REGISTRY[BASE_2].wrong)


def test_the_copy_is_wrong_and_the_reference_is_not() -> None:
    """Neither modules nor results of the real reference change."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "reference"}
    copy = private_reference(REGISTRY[BASE_2])
    S, ids = np.full(3, 1.0), np.array([4, 4, 4])
    right, wrong = (resolve(b).require_crystal().impact(S, ids, PAPER) for b in ("numpy", copy.backend))
    assert round(float(right[0]), 3) == round(0.5 + 10 / (1 + np.log(4)), 3)
    assert round(float(wrong[0]), 3) == round(0.5 + 10 / (1 + np.log2(4)), 3)
    assert impact.rarity is REGISTRY[BASE_2].original
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert all(copy.modules[name] is not module for name, module in modules.items() if name in copy.modules)


def test_every_item_has_tests_beside_its_example() -> None:
    assert all(len(modules_of(saboteur.item)) > 2 for saboteur in REGISTRY.values())


def test_every_item_has_inputs_that_show_its_work() -> None:
    assert all(subject_of(saboteur.item).name for saboteur in REGISTRY.values())


@pytest.mark.parametrize("item", DRAWN)
def test_drawn_inputs_are_what_the_item_takes(item: str) -> None:
    """The reference has an answer or a refusal for each, and not one for all."""
    found = outcomes(subject_of(item))
    assert len(found) == INPUTS
    assert len(set(found)) > 1
    assert not [text for text in found if text.isidentifier()], "an exception that is no refusal"


@pytest.mark.nightly
def test_trials_begin_before_any_test_is_imported() -> None:
    """Settings of a test are made when its module is imported: from then on no profile could change them."""
    code = """
import sys
from conformance.assurance.saboteurs import __main__, verdict
verdict.warm()
print([name for name in sys.modules if name.startswith("conformance.") and ".test_" in name])
"""
    assert run("-c", code).stdout.strip() == "[]"


@pytest.mark.nightly
def test_a_saboteur_is_killed_by_its_item() -> None:
    result = run("-m", "conformance.assurance.saboteurs", "-k", "CC_MEMORY_ONE_SEQUENCE", "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 of 1 killed" in result.stdout
    assert "test_memory_is_linear_in_the_batch" in result.stdout


def test_the_reference_survives_the_same_tests() -> None:
    """Under the profile ci."""
    code = """
from hypothesis import settings
from conformance.assurance.saboteurs.verdict import judge
print(judge("", "CC-MEMORY"))
print(settings.default.max_examples, "examples, the same each time:", settings.default.derandomize)
"""
    said = run("-c", code).stdout
    assert "outcome='survived'" in said
    assert f"{CI_EXAMPLES} examples, the same each time: True" in said


def test_an_unknown_saboteur_is_refused() -> None:
    result = run("-m", "pytest", "-p", "conformance.assurance.saboteurs.plugin", "--saboteur", "CC_NONE", "conformance")
    assert "--saboteur CC_NONE: unknown" in result.stderr
