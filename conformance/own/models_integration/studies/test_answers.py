"""One prompt that is read once answers every cell: held against a context of its own for each policy and budget."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("transformers", reason="studies drive transformers models")

import torch

from conformance.own.models_integration.studies.contexts import answer
from models_integration.cache.continuation import Decision
from models_integration.cache.retained_cache import RetainedCache
from models_integration.policies.calibration import calibrate
from models_integration.policies.template import repeat_template
from models_integration.session.verbs import compact
from models_integration.studies.answers import Answer, Key, answers
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import Placement, draw_sample, place
from reference.policies.describe import list_policies
from reference.policies.names import DIVERSE, NAMES

pytestmark = pytest.mark.law("parts-equal-the-whole")

IN_STEPS = [one.name for one in list_policies() if one.decode_time]
SERVED = [name for name in NAMES if not name.startswith(tuple(DIVERSE + name for name in IN_STEPS))]
"""Those that select one by one in each decode step take minutes."""
LENGTH, BUDGETS, MOST = 220, (150, 180), 6
Kept = Sequence[list[int]]


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    plain = Loading(backend="numpy").subject()
    text = draw_sample("needle", plain.tokenizer, 400, 0, 1).context_ids
    template = repeat_template(plain.tokenizer)
    return replace(plain, calibration=calibrate(plain.model, torch.tensor([text]), template=template))


def told(subject: Subject, placement: Placement, names: Sequence[str]) -> dict[Key, tuple[Answer, Kept]]:
    """What each cell answers and keeps, from one prompt."""
    wanted = [(name, B) for name, B in product(names, BUDGETS) if B in BUDGETS[:1] or not name.startswith(DIVERSE)]
    cells = {Key(*cell): subject.policy(*cell).on(subject.model) for cell in wanted}
    decided: list[Kept] = []

    def noting(cache: RetainedCache, decision: Decision) -> RetainedCache:
        (kept,) = decision.retentions
        decided.append([kept.group(at).tolist() for at in range(kept.groups)])
        return compact(cache, decision)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models_integration.studies.answers.compact", noting)
        return {key: (given, decided[-1]) for key, given in answers(subject, placement, cells, MOST)}


@pytest.mark.parametrize(
    ("placement", "task"), [("after", "needle"), ("in_prompt", "delayed_association"), ("paper", "needle")]
)
def test_a_cell_keeps_and_says_what_a_context_of_its_own_does(subject: Subject, placement: str, task: str) -> None:
    """Bit for bit; slots are counted alike. Cells differ, else the comparison would say nothing."""
    presented = place(draw_sample(task, subject.tokenizer, LENGTH, 1, 9), placement)
    names = [name for name in SERVED if placement == "after" or not name.startswith(DIVERSE)]
    before, found = len(presented.prompt_ids) - presented.dropped_slots, told(subject, presented, names)
    for (name, B, _), (given, kept) in found.items():
        expected, sets = answer(subject.model, subject.policy(name, B), presented, MOST, subject.stop_ids)
        assert kept == [[at for at in own if at < before] for own in sets], name
        assert given.token_ids == expected.token_ids, name
        assert (given.kept, given.peak_cache) == (expected.kept, expected.peak_cache), name
        assert given.mean_cache == pytest.approx(expected.mean_cache), name
    assert {name for name, *_ in found} == set(names)
    assert len({str(kept) for _, kept in found.values()}) > len(names)
    assert len({str(given.token_ids) for given, _ in found.values()}) > 2
