"""One observed prompt for every cell, compared with a context per cell, generation, and masks on a full cache."""

import itertools
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the study drives transformers models")

from transformers import AutoModelForCausalLM

from conformance.cache_suite.oracle import PositionRule
from experiments.studies.answers import generated, needed
from experiments.studies.evidence.kept import (
    BLIND,
    EVIDENCE,
    FULL,
    RANDOM_HEADS,
    RANDOM_SETS,
    Prompt,
    control_of,
    random_trunks,
    read_prompt,
)
from experiments.studies.evidence.measure import Prediction, measure
from experiments.studies.results import Row
from experiments.studies.subject import Loading, Subject
from experiments.tasks import Placement, Sample, place
from experiments.tasks.context import read_prose
from experiments.tasks.registry import resolve_task
from models_integration import RetainedCache, compact
from models_integration.cache.continuation import Decision
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.model.architecture import describe
from models_integration.pocket import ASSETS
from models_integration.session.verbs import EVERYTHING, observe, read, side_by_side
from reference.policies.retain import retain, retain_each
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention
from tests.experiments.studies.experiments import answer
from tests.experiments.tasks.test_tasks import ground_of
from tests.models_integration.session.families import build, prompt, relative
from tests.models_integration.session.masked import Masked, head_sets
from tests.models_integration.session.test_verbs import same

pytestmark = pytest.mark.law("figures-are-counted-right")

NAMES = (
    "crystalcache", "streamingllm", "snapkv", "adakv", "pyramidkv", "keydiff", "knorm", "expected-attention",
    "nestedkv", "chunkkv", "kvzip(chunk=300)", 'crystalcache(observed_layer=-1, impact="salience")',
    'streamingllm(positions="renumbered")', 'adakv(positions="renumbered")',
)
BUDGETS = ("0.5", "0.3")
DRAWN = (*RANDOM_SETS, RANDOM_HEADS, EVIDENCE)
WANTED = [(FULL, "1.0"), (BLIND, "0"), *((name, at) for at in BUDGETS for name in (*NAMES, *DRAWN))]
LENGTH = 700


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    return Loading(backend="numpy").subject()


@pytest.fixture(scope="module")
def samples(subject: Subject) -> list[Sample]:
    """Return samples with the fact at two depths, among a distractor."""
    ground = ground_of(subject.tokenizer, read_prose(subject.tokenizer))
    return [sample for index in (1, 2) for sample in resolve_task("keys_in_prose_2")(ground, LENGTH, index, 7)]


def on_prompt(subject: Subject, placement: Placement) -> Prompt:
    methods = {name: subject.policy(name, "0.5").on(subject.model) for name in NAMES}
    return read_prompt(subject, methods, BUDGETS, placement)


@pytest.fixture(scope="module", params=["after", "in_prompt"])
def measured(
    request: pytest.FixtureRequest, subject: Subject, samples: list[Sample],
) -> list[tuple[Sample, Placement, Prompt, dict[tuple[str, str], Row]]]:
    """Return each sample, its placement, its prompt, and the rows of its cells."""
    actual = []
    for sample in samples[:2]:  # no test reads more
        prompt = on_prompt(subject, place(sample, request.param))
        cells = measure(subject, sample, prompt, WANTED, 1)["cells"]
        actual.append((sample, prompt.placement, prompt, {(cell["policy"], cell["budget"]): cell for cell in cells}))
    return actual


def held(cache: RetainedCache) -> list[torch.Tensor]:
    """Return positions, keys and values that each layer and head stores, without spare slots."""
    actual = []
    for layer in cache.full_layers:
        actual += [layer.head_positions(0, head) for head in range(layer.heads)]
        flat: Any = layer.segments() if isinstance(layer, RaggedLayer) else [(layer.keys, layer.values)]
        actual += [tensor for pair in flat for tensor in pair]
    return actual


@pytest.mark.law("eviction-equals-masking")
def test_measures_equal_masks_on_a_dense_forward(subject: Subject, measured: Any) -> None:
    """Compare every cell and control with masks. Kept tokens of the evidence are counted one by one."""
    sample, placement, prompt, cells = measured[0]
    context = placement.prompt_ids[: len(placement.prompt_ids) - placement.dropped_slots]
    kept = {name: [prompt.set_of(name, at, sample) for at in BUDGETS] for name in (*NAMES, *DRAWN)}
    gold = torch.tensor(sample.answer_ids)
    seen = Retention.shared(np.arange(len(context)), len(context))
    dense = dense_answer(subject, context, placement, sample, seen)
    gold_places = {at for start, stop in sample.evidence for at in range(start, stop)}
    survived = set()
    for name, at in product(kept, range(len(BUDGETS))):
        row, retention = cells[name, BUDGETS[at]], kept[name][at]
        actual = dense_answer(subject, context, placement, sample, retention, "renumbered" in name)
        assert row["likelihood"] == pytest.approx(float(actual[range(len(gold)), gold].sum()), abs=2e-4), name
        divergence = (dense.exp() * (dense - actual)).sum(dim=-1).mean()
        assert row["divergence"] == pytest.approx(float(divergence), abs=1e-4), name
        counts = [len(gold_places & set(retention.group(group).tolist())) for group in range(retention.groups)]
        assert row["evidence_kept"] == (counts if len(set(counts)) > 1 else counts[0])
        survived.add(np.mean(counts) / len(gold_places))
        if name == "evidence":
            assert set(counts) == {len(gold_places)}
    assert len(survived) > 5
    kept_text, renumbered = cells["adakv", "0.5"], cells['adakv(positions="renumbered")', "0.5"]
    assert kept_text["kept"] == renumbered["kept"]
    if not placement.dropped_slots:  # a question inside the prompt has read the fact before the eviction
        assert abs(kept_text["likelihood"] - renumbered["likelihood"]) > 1e-1
    assert cells[FULL, "1.0"]["likelihood"] == pytest.approx(float(dense[range(len(gold)), gold].sum()), abs=2e-4)
    assert cells[FULL, "1.0"]["divergence"] == 0.0


def dense_answer(
    subject: Subject, context: tuple[int, ...], placement: Placement, sample: Sample, kept: Retention,
    renumbered: bool = False,
) -> torch.Tensor:
    """Return log-probabilities (a, vocabulary) of the answer, from the full cache under a mask for each head."""
    sets = head_sets(kept, describe(subject.model).full_layers, subject.model.config.num_key_value_heads)
    oracle = Masked(subject.model, torch.tensor([context]), sets)
    oracle.rules = dict.fromkeys(oracle.rules, PositionRule(renumbered))
    logits = oracle.read(torch.tensor([[*placement.fed_ids, *sample.answer_ids[:-1]]]))
    return logits[0, -len(sample.answer_ids) :].double().log_softmax(dim=-1)


def test_attention_on_evicted_keys_is_what_eager_attention_returns(subject: Subject, measured: Any) -> None:
    sample, placement, prompt, cells = measured[0]
    context = placement.prompt_ids[: len(placement.prompt_ids) - placement.dropped_slots]
    eager = AutoModelForCausalLM.from_pretrained(ASSETS, attn_implementation="eager", dtype=torch.float32)
    ids = torch.tensor([[*context, *placement.fed_ids, *sample.answer_ids[:-1]]])
    with torch.no_grad():
        attentions = eager(input_ids=ids, output_attentions=True).attentions
    heads = subject.model.config.num_key_value_heads
    for name, at in product(prompt.kept, range(len(BUDGETS))):
        sets, lost = head_sets(prompt.kept[name][at], range(len(attentions)), heads), []
        for layer, weights in enumerate(attentions):
            for head in range(weights.shape[1]):
                positions = sets[layer][head // (weights.shape[1] // heads)]
                evicted = sorted(set(range(len(context))) - set(positions))
                lost.append(weights[0, head, -len(sample.answer_ids) :, evicted].double().sum(dim=-1).mean())
        assert cells[name, BUDGETS[at]]["lost_attention"] == pytest.approx(float(np.mean(lost)), abs=1e-5), name
    assert cells[FULL, "1.0"]["lost_attention"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.law("parts-equal-the-whole")
def test_side_by_side_is_one_by_one(subject: Subject, measured: Any) -> None:
    sample, _, prompt, cells = measured[1]
    together = measure(subject, sample, prompt, WANTED, 5)["cells"]
    for row in together:
        other = cells[row["policy"], row["budget"]]
        for name, value in row.items():
            if isinstance(value, float):
                assert value == pytest.approx(other[name], abs=2e-4), (row["policy"], name)
            else:
                assert value == other[name], (row["policy"], name)


@pytest.mark.law("parts-equal-the-whole")
def test_cells_that_keep_the_same_are_read_once(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the control of the evidence is the random set if there is no evidence."""
    reading = []

    def noted(model: Any, cache: Any, ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        reading.append(len(ids))
        return read(model, cache, ids, *arguments, **options)

    monkeypatch.setattr("experiments.studies.evidence.measure.read", noted)
    ground = ground_of(subject.tokenizer, read_prose(subject.tokenizer))
    (sample,) = resolve_task("prose_continuation")(ground, LENGTH, 0, 7)
    placement = place(sample)
    cells = measure(subject, sample, on_prompt(subject, placement), WANTED, 5)["cells"]
    assert [(cell["policy"], cell["budget"]) for cell in cells[2:]] == [
        (name, budget) for budget in BUDGETS for name in (*NAMES, *DRAWN)
    ]
    by_name = {(cell["policy"], cell["budget"]): cell for cell in cells}
    for budget in BUDGETS:
        assert by_name["evidence", budget] == {**by_name["random", budget], "policy": "evidence"}
    assert sum(reading) == 2 + len(BUDGETS) * (len(NAMES) + len(DRAWN) - 1)


def test_what_a_row_says_is_what_double_precision_says() -> None:
    torch.manual_seed(3)
    logits, other, gold = 9 * torch.randn(7, 500), 9 * torch.randn(7, 500), torch.randint(500, (7,))
    one, full = Prediction(logits, gold), Prediction(other, gold)
    exact, dense = logits.double().log_softmax(dim=-1), other.double().log_softmax(dim=-1)
    assert one.likelihood == pytest.approx(float(exact[range(7), gold].sum()), abs=1e-5)
    assert one.divergence(full) == pytest.approx(float((dense.exp() * (dense - exact)).sum(-1).mean()), abs=1e-5)
    assert one.divergence(one) == 0.0
    assert not one.exact
    assert Prediction(logits, logits.argmax(dim=-1)).exact
    # Greedy decoding takes one of the tied tokens, and only this token counts as exact.
    tied = torch.tensor([[1.0, 3.0, 3.0]])
    assert [Prediction(tied, torch.tensor([at])).exact for at in range(3)] == [at == tied.argmax() for at in range(3)]


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("metric", ["all of them", "first number"])
def test_other_metrics_are_judged_by_what_is_generated(
    subject: Subject, samples: list[Sample], metric: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that only the question without the text is answered separately.

    The full cache shares the steps of the policies.
    """
    judged, rows = list[list[int]](), list[int]()

    def counted(forward: Any, logits: torch.Tensor, *arguments: Any) -> list[list[int]]:
        rows.append(len(logits))
        return generated(forward, logits, *arguments)

    def judge(tokenizer: object, ids: list[int], sample: Sample) -> bool:
        judged.append(ids)
        return True

    monkeypatch.setattr("experiments.studies.evidence.measure.score", judge)
    monkeypatch.setattr("experiments.studies.evidence.measure.generated", counted)
    sample = replace(samples[0], metric=metric)
    placement = place(sample)
    cells = measure(subject, sample, on_prompt(subject, placement), WANTED[: 2 + len(NAMES)], 5)["cells"]
    if metric == "first number":
        assert not judged
        return
    assert all(cell["right"] is True for cell in cells)
    assert sorted(rows) == [1, 2, 3, 5, 5]  # policies that renumber positions have a batch of their own
    by_cell = dict(zip(((cell["policy"], cell["budget"]) for cell in cells), judged, strict=True))
    for name in NAMES:
        policy = subject.policy(name, BUDGETS[0])
        expected = answer(subject.model, policy, placement, 50, subject.stop_ids)[0].token_ids
        assert by_cell[name, BUDGETS[0]] == expected, name
    assert len({tuple(ids) for ids in judged}) > 3


def test_answers_that_have_ended_leave_the_batch() -> None:
    """Check four answers that end after 1, 2, 2 and 6 tokens. Token 0 ends an answer."""
    scripts = [[0], [4, 0], [5, 0], [6, 6, 6, 6, 6, 0]]
    for select in (False, True):
        rows, sizes = [0, 1, 2, 3], list[int]()

        def logits(step: int, rows: list[int] = rows) -> torch.Tensor:
            tokens = [[*scripts[row], *[7] * 9][step] for row in rows]
            return torch.nn.functional.one_hot(torch.tensor(tokens), 9).float()

        def forward(tokens: torch.Tensor, sizes: list[int] = sizes, rows: list[int] = rows) -> torch.Tensor:
            assert len(tokens) == len(rows)
            sizes.append(len(tokens))
            return logits(len(sizes), rows)

        def leave(indices: torch.Tensor, rows: list[int] = rows) -> None:
            rows[:] = [rows[at] for at in indices.tolist()]

        assert generated(forward, logits(0), frozenset({0}), 9, leave if select else None) == scripts
        assert sizes == ([4, 1, 1, 1, 1] if select else [4] * 5)


@pytest.mark.law("the-model-stays-as-it-was")
def test_the_prompt_serves_again_as_it_was(subject: Subject, samples: list[Sample]) -> None:
    prompt = on_prompt(subject, place(samples[0], "in_prompt"))
    first = measure(subject, samples[0], prompt, WANTED, 4)["cells"]
    assert same(tuple(map(str, measure(subject, samples[0], prompt, WANTED, 4)["cells"])), tuple(map(str, first)))


def test_blind_is_the_question_alone(subject: Subject, measured: Any) -> None:
    sample, _, _, cells = measured[0]
    ids = torch.tensor([[*sample.question_ids, *sample.answer_ids[:-1]]])
    with torch.no_grad():
        logits = subject.model(input_ids=ids, use_cache=False).logits[0, -len(sample.answer_ids) :]
    chosen = logits.double().log_softmax(dim=-1)[range(len(sample.answer_ids)), list(sample.answer_ids)]
    assert cells[BLIND, "0"]["likelihood"] == pytest.approx(float(chosen.sum()), abs=1e-4)
    assert cells[BLIND, "0"]["likelihood"] < cells[FULL, "1.0"]["likelihood"]


def test_one_observation_has_what_each_policy_needs() -> None:
    each = [Needs("all", 3), Needs("observed", 0, token_ids=True), Needs("all", 0, hidden=True)]
    assert needed(each) == Needs("all", 3, token_ids=True, hidden=True)
    assert needed(each[:2]) == Needs("all", 3, token_ids=True)


@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize("name", [*NAMES, "defensivekv", "h2o", "tova", "diverse-snapkv"])
def test_several_budgets_are_each_budget_alone(subject: Subject, samples: list[Sample], name: str) -> None:
    observed = observe(subject.model, torch.tensor([place(samples[0]).prompt_ids]), needs=replace(
        EVERYTHING, rehearsal=subject.policy(name, "0.5").on(subject.model).policy.scorer.needs.rehearsal
    ))
    policy = subject.policy(name, "0.5").on(subject.model).policy
    shown = observed.narrowed(policy.scorer.needs).prompt(0, policy.granularity)
    budgets = [parse_budget(budget) for budget in ("0.2", "0.9", "0.5")]
    each = retain_each(policy, budgets, shown)
    for budget, actual in zip(budgets, each, strict=True):
        assert same(actual, retain(policy, budget, shown))
    assert len({len(retention.positions) for retention in each}) == 3


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_rows_that_keep_different_tokens_read_as_each_alone(family: str) -> None:
    """Check models with sliding layers too."""
    model, following = build(family), prompt(9, seed=5)
    full = observe(model, prompt(64)).cache
    kept = [Retention.shared(np.array([0, *range(10 + step, 64, step)]), 64) for step in (2, 3, 5)]
    wide = compact(side_by_side(full, 3), Decision(tuple(kept)))
    together = read(model, wide, following.repeat(3, 1), last=4).logits
    assert together is not None
    for one, row in zip(kept, together, strict=True):
        apart = read(model, compact(full, Decision((one,))), following, last=4).logits
        assert apart is not None
        assert relative(row, apart[0]) < 1e-5
    assert relative(together[0], together[2]) > 1e-2


@pytest.mark.law("refused-before-anything-changes")
def test_other_rows_are_refused(subject: Subject, samples: list[Sample]) -> None:
    cache = on_prompt(subject, place(samples[0])).observed.cache
    with pytest.raises(SpecError, match="must have 1 row, like the cache"):
        read(subject.model, cache, torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(SpecError, match="rows = 0: must be at least 1"):
        side_by_side(cache, 0)
    with pytest.raises(SpecError, match="2 rows"):
        side_by_side(side_by_side(cache, 2), 2)


def test_random_trunks_are_whole_and_know_nothing_of_scores(subject: Subject, samples: list[Sample]) -> None:
    """Check random trunks: all CrystalCache trunks except one are kept whole or not at all.

    Two prompts agree only by chance.
    """
    crystal = subject.policy("crystalcache", "0.5").on(subject.model)
    control = replace(crystal, policy=random_trunks(crystal.policy))
    for sample in samples:
        prompt = read_prompt(subject, {"own": crystal, "control": control}, ["0.5"], place(sample))
        shown = observe(subject.model, torch.tensor([sample.context_ids]), needs=crystal.policy.scorer.needs)
        scores = crystal.policy.scorer(shown.prompt(0, Granularity.MODEL), crystal.policy.protection(LENGTH))
        policy_set, drawn = (set(prompt.kept[name][0].kept.tolist()) for name in ("own", "control"))
        trunks = [set(range(*span)) for span in itertools.pairwise(scores.offsets.tolist())]
        parts = [trunk for trunk in trunks if drawn & trunk not in (set(), trunk)]
        assert len(parts) <= 1
        assert policy_set != drawn
        assert abs(len(drawn) - LENGTH // 2) <= crystal.policy.floor


@pytest.mark.parametrize(("policy", "granularity", "control"), [
    ("crystalcache", "model", "random-trunks"), ("crystalcache(observed_layer=-1)", "model", "random-trunks"),
    ("crystalcache(T_max=1)", "model", "random-shared"), ("streamingllm", "model", "random-shared"),
    ("chunkkv", "layer", "random-layers"), ("snapkv", "layer and KV head", "random"),
    ("kvzip-heads", "layer and KV head", "random-heads"), ("h2o@prompt", "layer and KV head", "random"),
    ("rarity-trunks", "model", "random-trunks"),
])
def test_a_policy_has_the_control_of_its_granularity(policy: str, granularity: str, control: str) -> None:
    assert control_of(policy, granularity) == control
