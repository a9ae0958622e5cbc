"""lm-evaluation-harness under a policy, compared with `hf` and a masked full cache (`nox -s lab -- extra lm-eval`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the harness drives transformers models")
pytest.importorskip("lm_eval", reason="lm-evaluation-harness: nox -s lab -- extra lm-eval runs this")

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks.ruler.common_utils import process_results, process_results_part

from conformance.tolerances import MASKED_LOGITS, MASKED_VISIBLE
from experiments.studies.harness import PolicyLM, command
from experiments.tasks import draw_sample
from experiments.tasks.metrics import judge
from models_integration import StreamingLLM
from models_integration.pocket import ASSETS, load_pocket_tokenizer
from spec.errors import SpecError
from tests.experiments.tasks.test_loaders import THREE, TWO_OF_THREE

pytestmark = [pytest.mark.law("eviction-equals-masking"), pytest.mark.filterwarnings("ignore")]

DOCS, LENGTH, MARK = 3, 400, " Question:"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{context}}}}{{{{question}}}}"
output_type: {kind}
doc_to_target: "{{{{{target}}}}}"
{more}
metadata: {{version: 1}}
"""
KINDS = {
    "said": ("generate_until", 'generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}\n'
             "metric_list: [{metric: exact_match}]\n"
             'filter_list: [{name: number, filter: [{function: regex, regex_pattern: "([0-9]+)"},'
             " {function: take_first}]}]"),
    "chosen": ("multiple_choice", "doc_to_choice: choices\nmetric_list: [{metric: acc}, {metric: acc_norm}]"),
    "rolled": ("loglikelihood_rolling", "metric_list: [{metric: word_perplexity}]"),
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> TaskManager:
    """Return tasks of lm-eval with facts that the pocket model can find."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    tokenizer, data = load_pocket_tokenizer(), tmp_path / "data.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for index in range(DOCS):
            sample = draw_sample("needle", tokenizer, LENGTH, index, 0)
            context, question = (tokenizer.decode(list(ids), skip_special_tokens=True)
                                 for ids in (sample.context_ids, sample.question_ids))
            choices = [sample.expected, str(int(sample.expected) + 1)]
            row = {"context": context, "question": question, "answer": choices[0], "choices": choices, "label": 0}
            file.write(json.dumps(row) + "\n")
    for name, (kind, more) in KINDS.items():
        target = "label" if name == "chosen" else "answer"
        text = TASK.format(name=name, data=data, kind=kind, more=more, target=target)
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def model(**given: Any) -> PolicyLM:
    return PolicyLM("pocket", device="cpu", **given)


def evaluated(lm: Any, tasks: TaskManager, *names: str, **given: Any) -> Mapping[str, Any]:
    actual: Mapping[str, Any] = simple_evaluate(
        model=lm, tasks=list(names or ("said", "chosen")), task_manager=tasks, bootstrap_iters=0, **given,
    )
    return actual


def responses(actual: Mapping[str, Any], task: str) -> list[Any]:
    return [sample["resps"] for sample in actual["samples"][task]]


@pytest.mark.parametrize(("policy", "mark"), [("fullcache", ""), ("snapkv", MARK), ("h2o@prompt", MARK)])
def test_a_full_budget_gives_lm_eval_s_own_results(policy: str, mark: str, tasks: TaskManager) -> None:
    plain = evaluated(HFLM(str(ASSETS), device="cpu"), tasks)
    ours = evaluated(model(policy=policy, budget="1.0", question_from=mark), tasks)
    assert ours["results"] == plain["results"]
    assert responses(ours, "said") == responses(plain, "said")
    for one, other in zip(responses(ours, "chosen"), responses(plain, "chosen"), strict=True):
        for ((value, greedy),), ((wanted, also),) in zip(one, other, strict=True):
            assert greedy == also
            assert value == pytest.approx(wanted, rel=MASKED_LOGITS)
    about = ours["config"]["kvspec"]
    assert (about["policy"], about["budget"], about["question_from"]) == (policy, "1.0", mark)
    assert about["tokens_kept"] == about["tokens_read"] > 3 * DOCS * 0.9 * LENGTH


@pytest.mark.usefixtures("tasks")
def test_continuations_are_scored_as_behind_a_mask(tmp_path: Path) -> None:
    """Check scores after eviction: 4 sinks and the newest tokens of the context are kept, then the question is read."""
    lm = model(policy="streamingllm", budget=150, question_from=MARK)
    doc = json.loads((tmp_path / "data.jsonl").read_text(encoding="utf-8").splitlines()[0])
    request = SimpleNamespace(args=(doc["context"] + doc["question"], f" {doc['answer']}"), task_name="t")
    ((value, _),) = lm.loglikelihood([request], disable_tqdm=True)
    context, more = lm._encode_pair(*request.args)
    split = len(lm.tok_encode(doc["context"]))
    ids = torch.tensor([[*context, *more]])
    n = ids.shape[1]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen[split:, 4 : split - 146] = False
    with torch.no_grad():
        logits = lm.model(ids, attention_mask=seen[None, None]).logits[0, len(context) - 1 : -1]
        plain = lm.model(ids).logits[0, len(context) - 1 : -1]
    wanted, unmasked = (
        float(one.log_softmax(-1)[torch.arange(len(more)), more].sum()) for one in (logits, plain)
    )
    assert value == pytest.approx(wanted, rel=MASKED_LOGITS)
    assert abs(value - unmasked) > MASKED_VISIBLE * abs(unmasked)
    about = lm.get_model_info()["kvspec"]
    assert (about["contexts"], about["tokens_read"], about["tokens_kept"]) == (1, split, 150)


@pytest.mark.usefixtures("tasks")
def test_renumbered_positions_are_those_of_a_session(tmp_path: Path) -> None:
    """The likelihood is that of a session, and differs from the likelihood with positions of the text."""
    doc = json.loads((tmp_path / "data.jsonl").read_text(encoding="utf-8").splitlines()[0])
    request = SimpleNamespace(args=(doc["context"] + doc["question"], f" {doc['answer']}"), task_name="t")
    values = []
    for policy in ("streamingllm", 'streamingllm(positions="renumbered")'):
        lm = model(policy=policy, budget=150, question_from=MARK)
        ((value, _),) = lm.loglikelihood([request], disable_tqdm=True)
        assert lm.get_model_info()["kvspec"]["policy"] == policy
        values.append(value)
    context, more = lm._encode_pair(*request.args)
    split = len(lm.tok_encode(doc["context"]))
    with torch.no_grad(), StreamingLLM(150, positions="renumbered")(lm.model) as run:
        lm.model(torch.tensor([context[:split]]))
        with run.reading():
            logits = lm.model(torch.tensor([[*context[split:], *more]]), past_key_values=run.cache).logits[0]
    expected = logits[-len(more) - 1 : -1].log_softmax(-1)[torch.arange(len(more)), more]
    assert values[1] == pytest.approx(float(expected.sum()), rel=MASKED_LOGITS)
    assert abs(values[0] - values[1]) > MASKED_VISIBLE * abs(values[1])


def test_what_is_said_follows_from_what_is_kept(tasks: TaskManager) -> None:
    """Check that a window loses facts.

    A policy that evicts during decoding does so here. With a budget for all tokens it loses no fact.
    """
    plain = evaluated(HFLM(str(ASSETS), device="cpu"), tasks, "said")
    window = evaluated(model(policy="streamingllm", budget=140, question_from=MARK), tasks, "said")
    assert plain["results"]["said"]["exact_match,number"] == 1
    assert window["results"]["said"]["exact_match,number"] < 1
    in_steps = evaluated(model(policy="h2o", budget="1.0", question_from=MARK), tasks, "said")
    assert responses(in_steps, "said") == responses(plain, "said")


@pytest.mark.law("an-identity-tells-apart")
def test_lm_eval_s_response_cache_is_taken_where_its_name_knows_the_policy(tasks: TaskManager, tmp_path: Path) -> None:
    one, other = (model(policy="streamingllm", budget=budget, question_from=MARK) for budget in (140, 200))
    with pytest.raises(SpecError, match=f"its name, as in answers-{one.key}"):
        evaluated(one, tasks, use_cache=str(tmp_path / "answers"))
    path = str(tmp_path / f"answers-{one.key}")
    first = evaluated(one, tasks, use_cache=path)
    again = model(policy="streamingllm", budget=140, question_from=MARK)
    second = evaluated(again, tasks, use_cache=path)
    assert second["results"] == first["results"]
    assert again.get_model_info()["kvspec"]["contexts"] == 0
    with pytest.raises(SpecError, match="use_cache"):
        evaluated(other, tasks, use_cache=path)


@pytest.mark.law("refused-before-anything-changes")
def test_what_is_not_served_is_refused_by_name(tasks: TaskManager) -> None:
    with pytest.raises(SpecError, match="'rolled': ask for loglikelihood_rolling") as caught:
        evaluated(model(), tasks, "rolled")
    assert caught.value.argument == "tasks"
    with pytest.raises(SpecError, match="give h2o@prompt"):
        evaluated(model(policy="h2o", budget="0.9"), tasks, "chosen")
    with pytest.raises(SpecError, match="must occur in every prompt of said"):
        evaluated(model(question_from="Frage:"), tasks, "said")
    with pytest.raises(SpecError, match="must occur in every prompt of chosen"):
        evaluated(model(question_from={"said": MARK}), tasks)
    for given in ({"batch_size": 2}, {"policy": "snapkw"}, {"budget": "2.0"}):
        with pytest.raises(SpecError) as caught:
            model(**given)
        assert caught.value.argument in given


@pytest.mark.law("as-it-is-described")
def test_the_command_is_lm_eval_s_with_our_model(
    tasks: TaskManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    command([
        "run", "--model_args", f"pretrained=pocket,policy=snapkv,budget=0.5,question_from={MARK}", "--tasks",
        "said", "--include_path", str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path / "out"),
    ])
    assert "exact_match" in capsys.readouterr().out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    about = json.loads(file.read_text(encoding="utf-8"))["config"]["kvspec"]
    assert (about["policy"], about["budget"], about["contexts"]) == ("snapkv", "0.5", DOCS)


@pytest.mark.law("figures-are-counted-right")
def test_lm_eval_counts_ruler_s_answers_as_our_dialect_of_it() -> None:
    doc = {"max_length": 4096, "outputs": list(THREE)}
    theirs = process_results_part(doc, [TWO_OF_THREE])["4096"], process_results(doc, [TWO_OF_THREE])["4096"]
    assert theirs == (judge("string_match_all", TWO_OF_THREE, THREE),) * 2 == (2 / 3, 2 / 3)
    assert judge("string_match_part", TWO_OF_THREE, THREE) == 1.0
