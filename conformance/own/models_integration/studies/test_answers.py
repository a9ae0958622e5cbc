"""One prompt that is read once answers every cell: held against a context of its own for each policy and budget."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("transformers", reason="studies drive transformers models")

import numpy as np
import torch

from conformance.own.models_integration.studies.contexts import answer
from models_integration.policies.calibration import calibrate
from models_integration.policies.tokenizer_values import repeat_template
from models_integration.studies.evidence.kept import read_prompt
from models_integration.studies.evidence.measure import measure
from models_integration.studies.evidence.run import Cell
from models_integration.studies.results import Row
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import Placement, Sample, draw_sample, place, score
from models_integration.tasks.assembly import decode, encode
from reference.policies.describe import list_policies
from reference.policies.names import DIVERSE, NAMES

pytestmark = pytest.mark.law("parts-equal-the-whole")

IN_STEPS = [one.name for one in list_policies() if one.decode_time]
SERVED = [name for name in NAMES if not name.startswith(tuple(DIVERSE + name for name in IN_STEPS))]
"""Those that select one by one in each decode step take minutes."""
LENGTH, BUDGETS, MOST = 220, (150, 180), 6
BREATH = "crystalcache(decode=true)"
Kept = Sequence[list[int]]


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    plain = Loading(backend="numpy").subject()
    text = draw_sample("needle", plain.tokenizer, 400, 0, 1).context_ids
    template = repeat_template(plain.tokenizer)
    return replace(plain, calibration=calibrate(plain.model, torch.tensor([text]), template=template))


def told(subject: Subject, sample: Sample, placement: Placement, names: Sequence[str]) -> dict[Cell, tuple[Row, Kept]]:
    """What each cell answers and keeps, from one prompt."""
    wanted = [(name, str(B)) for name, B in product(names, BUDGETS) if B in BUDGETS[:1] or not name.startswith(DIVERSE)]
    methods = {name: subject.policy(name, BUDGETS[0]).on(subject.model) for name in names}
    prompt = read_prompt(subject, methods, [str(B) for B in BUDGETS], placement)
    found = dict[Cell, tuple[Row, Kept]]()
    for row, cell in zip(measure(subject, sample, prompt, wanted, 1)["cells"], wanted, strict=True):
        kept = prompt.set_of(*cell, sample)
        found[cell] = row, [kept.group(at).tolist() for at in range(kept.groups)]
    return found


@pytest.mark.parametrize(
    ("placement", "task"), [("after", "needle"), ("in_prompt", "delayed_association"), ("paper", "needle")]
)
def test_a_cell_keeps_and_says_what_a_context_of_its_own_does(subject: Subject, placement: str, task: str) -> None:
    """Bit for bit; slots are counted alike. Cells differ, else the comparison would say nothing."""
    sample = replace(draw_sample(task, subject.tokenizer, LENGTH, 1, 9), max_new_tokens=MOST)
    presented = place(sample, placement)
    names = [*(name for name in SERVED if placement == "after" or not name.startswith(DIVERSE)), BREATH]
    before, found = len(presented.prompt_ids) - presented.dropped_slots, told(subject, sample, presented, names)
    for (name, B), (given, kept) in found.items():
        expected, sets = answer(subject.model, subject.policy(name, int(B)), presented, MOST, subject.stop_ids)
        assert kept == [[at for at in own if at < before] for own in sets], name
        assert given["answer"] == decode(subject.tokenizer, expected.token_ids), name
        assert given["right"] == score(subject.tokenizer, expected.token_ids, sample)
        assert given["peak_cache"] == expected.peak_cache, name
        assert given["mean_cache"] == pytest.approx(expected.mean_cache), name
        assert given["answer_slots"] == pytest.approx(expected.mean_cache - np.mean(given["kept"])), name
    assert {name for name, _ in found} == set(names)
    assert len({str(kept) for _, kept in found.values()}) > len(SERVED) / 2
    assert len({given["answer"] for given, _ in found.values()}) > 2


@pytest.mark.parametrize("name", ["h2o", "tova", BREATH])
def test_a_policy_that_decides_at_each_token_reads_the_gold_answer_so(subject: Subject, name: str) -> None:
    """Its likelihood is that of the gold answer read token by token in a context of its own."""
    sample = replace(
        draw_sample("needle", subject.tokenizer, LENGTH, 1, 9), answer_ids=encode(subject.tokenizer, " 7492.")
    )
    presented, policy = place(sample), subject.policy(name, 150)
    prompt = read_prompt(subject, {name: policy.on(subject.model)}, ["150"], presented)
    (cell,) = measure(subject, sample, prompt, [(name, "150")], 1)["cells"]
    said, stored = list[torch.Tensor](), list[float]()
    with policy(subject.model), torch.no_grad():
        cache = subject.model(input_ids=torch.tensor([presented.prompt_ids])).past_key_values
        for token in (*presented.fed_ids, *sample.answer_ids[:-1]):
            said.append(subject.model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
            stored.append(cache.mean_length)
    said = said[-len(sample.answer_ids) :]
    likelihood = sum(
        float(one.double().log_softmax(dim=-1)[token]) for one, token in zip(said, sample.answer_ids, strict=True)
    )
    assert cell["likelihood"] == pytest.approx(likelihood, abs=1e-4)
    assert cell["mean_cache"] == pytest.approx(np.mean(stored))
