"""Controls with a different impact of trunks: each formula, and that only the order of the trunks changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.studies.evidence.kept import RANDOMS
from experiments.studies.evidence.trunk_forms import NEIGHBOURS, TRUNK_FORMS, local_salience, shuffled_in_runs
from experiments.studies.subject import Loading, Subject
from models_integration.session.verbs import observe
from reference.crystalcache.impact import rarity, token_counts
from spec.parameters import PAPER
from spec.policy import Scores
from spec.retention import Granularity

pytestmark = pytest.mark.law("as-it-is-described")

IDS = [3 + (7 * at * at) % 41 for at in range(400)]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Loading("pocket").subject()


@pytest.fixture(scope="module")
def scores(subject: Subject) -> dict[str, Scores]:
    result = {}
    for name, form in TRUNK_FORMS.items():
        method = subject.policy(form.base, "0.5").on(subject.model)
        for title, policy in ((name, form.of(method.policy, name)), (form.base, method.policy)):
            observed = observe(subject.model, torch.tensor([IDS]), needs=policy.scorer.needs)
            shown = observed.prompt(0, Granularity.MODEL)
            result[title] = policy.scorer(shown, policy.protection(len(IDS)))
    return result


def test_local_salience_divides_by_the_mean_of_the_neighbours() -> None:
    S = np.random.default_rng(0).random(200) + 0.1
    for i, value in enumerate(local_salience(S)):
        near = [S[j] for j in range(200) if 0 < abs(i - j) <= NEIGHBOURS // 2]
        np.testing.assert_allclose(value, S[i] / np.mean(near), rtol=1e-12)


def test_local_salience_does_not_depend_on_the_level_of_the_text() -> None:
    """Equal tokens have the local salience 1, whatever the slope from the start to the end is."""
    np.testing.assert_allclose(local_salience(np.full(300, 7.0)), 1.0, rtol=1e-12)
    falling = np.linspace(20.0, 1.0, 2000)
    assert np.ptp(local_salience(falling)[NEIGHBOURS:-NEIGHBOURS]) < 0.01


def test_shuffled_values_stay_in_their_run() -> None:
    values = np.arange(3.0 * NEIGHBOURS + 5)
    shuffled = shuffled_in_runs(values, np.random.default_rng(1))
    assert not np.array_equal(shuffled, values)
    for first in range(0, len(values), NEIGHBOURS):
        run = slice(first, first + NEIGHBOURS)
        np.testing.assert_array_equal(np.sort(shuffled[run]), values[run])


@pytest.mark.parametrize("name", TRUNK_FORMS)
def test_a_form_changes_the_order_of_the_same_trunks(name: str, scores: dict[str, Scores]) -> None:
    form, base = scores[name], scores[TRUNK_FORMS[name].base]
    np.testing.assert_array_equal(form.offsets, base.offsets)
    np.testing.assert_array_equal(np.isnan(form.values), np.isnan(base.values))
    free = ~np.isnan(base.values[0])
    assert not np.array_equal(np.argsort(form.values[0][free]), np.argsort(base.values[0][free]))
    assert name in RANDOMS


def test_each_form_has_the_impact_of_its_name(scores: dict[str, Scores]) -> None:
    U = rarity(token_counts(np.array(IDS)))
    base = scores[TRUNK_FORMS["local-trunks"].base]
    assert base.carry is not None
    S = base.carry.coattention.salience  # type: ignore[attr-defined]
    L = np.clip(local_salience(S), PAPER.M_min, PAPER.M_max)
    expected = {
        "local-trunks": np.clip(0.5 * L + 0.5 * PAPER.M_max * U, PAPER.M_min, PAPER.M_max),
        "local-salience-trunks": local_salience(S), "rarity-trunks": U,
    }
    for name, M in expected.items():
        members = scores[name].members
        assert members is not None
        np.testing.assert_allclose(members[0], M, atol=2e-9)
    shuffled = scores["shuffled-trunks"].members
    assert shuffled is not None
    assert 0 < np.mean(np.isclose(shuffled[0], expected["local-trunks"])) < 0.5


def test_ties_of_rarity_are_broken_by_the_prompt_alone(subject: Subject) -> None:
    form = TRUNK_FORMS["rarity-trunks"]
    policy = form.of(subject.policy(form.base, "0.5").on(subject.model).policy, "rarity-trunks")
    members = []
    for ids in (IDS, IDS, IDS[::-1]):
        observed = observe(subject.model, torch.tensor([ids]), needs=policy.scorer.needs)
        result = replace(policy).scorer(observed.prompt(0, Granularity.MODEL), policy.protection(len(ids)))
        assert result.members is not None
        members.append(result.members[0])
    np.testing.assert_array_equal(members[0], members[1])
    assert not np.array_equal(members[0], members[2][::-1])
    assert len(np.unique(members[0])) == len(IDS)
