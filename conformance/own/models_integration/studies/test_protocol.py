"""Claims are confirmatory by the history alone: rules before dev rows, dev rows before confirming ones."""

import pytest

pytest.importorskip("transformers", reason="studies drive transformers models")

import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from conformance.own.models_integration.studies.experiments import answer, commit_all
from conformance.own.models_integration.studies.test_study import RULES, claim, rules_file, study
from conformance.own.models_integration.tasks.test_tasks import ground_of
from models_integration.cli.app import app
from models_integration.pocket import ASSETS, load_pocket_tokenizer
from models_integration.policies.calibration import calibrate
from models_integration.policies.values import repeat_template
from models_integration.studies.evidence.claims import gate
from models_integration.studies.evidence.kept import read_prompt
from models_integration.studies.evidence.measure import measure
from models_integration.studies.evidence.protocol import audit, registered
from models_integration.studies.evidence.rules import load_rules
from models_integration.studies.evidence.run import Cell
from models_integration.studies.evidence.samples import Samples
from models_integration.studies.results import Row, append_row
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import Placement, Sample, draw_sample, place, score
from models_integration.tasks.assembly import decode, encode
from models_integration.tasks.context import read_prose
from models_integration.tasks.in_prose import most_contexts
from models_integration.tasks.needle import part_of
from models_integration.tasks.registry import resolve_task
from reference.policies.describe import list_policies
from reference.policies.names import DIVERSE, NAMES
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")


def change(path: Path) -> None:
    path.write_text(f"{path.read_text(encoding='utf-8')}# changed\n", encoding="utf-8")


@pytest.mark.parametrize(("before", "part", "said"), [
    (change, "confirm", "has uncommitted changes"), (lambda path: None, "all", "must be dev, and confirm"),
    (lambda path: append_row(path.with_name("study.jsonl"), {
        "part": "confirm", "rules": load_rules(path).digest,
    }), "dev", "must not follow the confirming samples"),
])
def test_what_breaks_the_order_is_refused(before: Any, part: str, said: str, tmp_path: Path) -> None:
    before(rules_file(tmp_path))
    refused = study(tmp_path, part)
    assert refused.exit_code != 0
    assert said in str(refused.exception)


def test_a_claim_about_a_control_of_another_granularity_is_refused(tmp_path: Path, one_thread: None) -> None:
    text = RULES.replace('first = "evidence"', 'first = "streamingllm"', 1).replace(
        'second = "streamingllm"', 'second = "random"', 1
    )
    rules_file(tmp_path, text)
    refused = study(tmp_path, "dev")
    assert "must be random-shared for streamingllm" in str(refused.exception)


def test_rows_name_the_commit_of_their_rules(tmp_path: Path) -> None:
    path = rules_file(tmp_path)
    commit = commit_all(tmp_path)
    assert registered(load_rules(path), path) == commit
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(SpecError, match="uncommitted changes"):
        registered(load_rules(path), tmp_path / "elsewhere" / "rules.toml")


def write_rows(path: Path, *rows: Row) -> None:
    path.write_bytes(lzma.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))


def test_the_audit_reads_the_history(tmp_path: Path) -> None:
    """One study for each finding."""
    texts = {name: f"{RULES}# {name}\n" for name in ("named", "old", "same", "forged", "other")}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    row = {name: {"part": "confirm", "rules": digest} for name, digest in digests.items()}
    for name in ("named", "old", "forged", "other"):
        (tmp_path / f"{name}.toml").write_text(texts[name], encoding="utf-8")
    first = commit_all(tmp_path)
    (tmp_path / "same.toml").write_text(texts["same"], encoding="utf-8")
    row["named"]["commit"] = first
    row["other"]["rules"] = "0" * 64
    for name, one in row.items():
        write_rows(tmp_path / f"{name}.jsonl.xz", one)
    row["forged"]["commit"] = second = commit_all(tmp_path)
    (tmp_path / "forged.jsonl.xz").unlink()
    commit_all(tmp_path)
    write_rows(tmp_path / "forged.jsonl.xz", {**row["forged"], "commit": "0" * 40})
    commit_all(tmp_path)
    found = {one.study.removesuffix(".toml"): one for one in audit(tmp_path)}
    assert (found["named"].rules, found["named"].rows) == (first, second)
    assert {name: one.finding for name, one in found.items()} == {
        "named": "rules before rows, by the commit of every row",
        "old": "rules before rows; rows of before 0.4 do not name their commit",
        "same": "exploratory: rules and rows are of one commit",
        "forged": "exploratory: a row names a commit without these rules",
        "other": "exploratory: no commit has the rules of these rows",
    }
    printed = CliRunner().invoke(app, ["study", "--audit", str(tmp_path)])
    assert printed.exit_code == 0
    assert first[:8] in printed.output


def test_a_folder_outside_git_has_no_audit(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="git repository"):
        audit(tmp_path)


def gated(**right: int) -> Samples:
    """Ten dev samples of which so many are answered."""
    budgets = {"fullcache": "1.0", "blind": "0", "evidence": "0.3"}
    return Samples([
        {
            "task": "needle_in_prose", "length": 64, "placement": "after", "context": str(at), "metadata": {},
            "cells": [
                {"policy": name, "budget": budgets[name], "right": float(at < count)} for name, count in right.items()
            ],
        } for at in range(10)
    ])


@pytest.mark.parametrize(("right", "failed"), [
    ({"fullcache": 7, "blind": 0, "evidence": 9}, ""), ({"fullcache": 6, "blind": 0, "evidence": 9}, "fullcache"),
    ({"fullcache": 7, "blind": 1, "evidence": 9}, "blind"), ({"fullcache": 7, "blind": 0, "evidence": 8}, "evidence"),
])
def test_a_task_that_fails_its_controls_on_dev_carries_no_claim(right: dict[str, int], failed: str) -> None:
    said = gate(claim("accuracy"), gated(**right))
    assert said.startswith(f"needle_in_prose at 64: {failed} answers") if failed else said == ""


@pytest.mark.parametrize("value", ["number", "word"])
def test_facts_are_in_three_texts_each_split_before_any_run(value: str) -> None:
    """No window is read twice; the fact is where it is said to be; dev and confirm have different stretches."""
    pocket_tokenizer = load_pocket_tokenizer(ASSETS)
    ground = ground_of(pocket_tokenizer, read_prose(pocket_tokenizer))
    task, contexts, kinds = resolve_task(f'fact(value="{value}")'), set(), dict[str, set[str]]()
    for index in range(60):
        (sample,) = task(ground, 600, index, 5)
        if index % 10 == 0:
            assert task(ground, 600, index, 5) == (sample,)
        (span,) = sample.evidence
        assert sample.expected in pocket_tokenizer.decode(list(sample.context_ids[slice(*span)]))
        assert sample.expected.isdigit() == (value == "number")
        around = sample.context_ids[: span[0]] + sample.context_ids[span[1] :]
        contexts.add(around)
        kinds.setdefault(str(sample.metadata["text"]), set()).add(part_of(sample.context_digest))
    assert len(contexts) == 60
    assert kinds == {kind: {"dev", "confirm"} for kind in ("prose", "records", "code")}
    assert 60 <= most_contexts(ground.prose, 600) <= 5 * ground.prose.windows(600)


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
    """What each cell answers and keeps, from one prompt; one forward pass serves five caches."""
    wanted = [(name, str(B)) for name, B in product(names, BUDGETS) if B in BUDGETS[:1] or not name.startswith(DIVERSE)]
    methods = {name: subject.policy(name, BUDGETS[0]).on(subject.model) for name in names}
    prompt = read_prompt(subject, methods, [str(B) for B in BUDGETS], placement)
    found = dict[Cell, tuple[Row, Kept]]()
    for row, cell in zip(measure(subject, sample, prompt, wanted, 5)["cells"], wanted, strict=True):
        kept = prompt.set_of(*cell, sample)
        found[cell] = row, [kept.group(at).tolist() for at in range(kept.groups)]
    return found


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize(
    ("placement", "task", "diverse"),
    [("after", "needle", (f"{DIVERSE}snapkv", f"{DIVERSE}kvzip")), ("in_prompt", "delayed_association", ()),
     ("paper", "needle", ()), pytest.param("after", "needle", SERVED, marks=pytest.mark.nightly)],
)
def test_a_cell_keeps_and_says_what_a_context_of_its_own_does(
    subject: Subject, placement: str, task: str, diverse: Sequence[str],
) -> None:
    """Bit for bit; slots are counted alike. Cells differ, else the comparison would say nothing."""
    sample = replace(draw_sample(task, subject.tokenizer, LENGTH, 1, 9), max_new_tokens=MOST)
    presented = place(sample, placement)
    names = [*(name for name in SERVED if name in diverse or not name.startswith(DIVERSE)), BREATH]
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
    assert len({str(kept) for _, kept in found.values()}) > len(names) / 2
    assert len({given["answer"] for given, _ in found.values()}) > 2


@pytest.mark.law("parts-equal-the-whole")
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
