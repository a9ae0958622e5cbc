"""Confirmatory claims follow from the history: rules before dev rows, and dev rows before confirming rows."""

import pytest

pytest.importorskip("transformers", reason="studies drive transformers models")

import hashlib
import json
import lzma
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from conformance.paths import ROOT
from conformance.strategies.policy_inputs import random_gates
from experiments.studies.evidence.audit import KNOWN, audit
from experiments.studies.evidence.claims import gate
from experiments.studies.evidence.kept import read_prompt
from experiments.studies.evidence.measure import measure
from experiments.studies.evidence.protocol import commits_with_rules, registered
from experiments.studies.evidence.rules import COMPUTED, Claim, Rules, Stage, load_rules
from experiments.studies.evidence.run import Cell
from experiments.studies.evidence.samples import Samples
from experiments.studies.results import Row, append_row
from experiments.studies.subject import Loading, Subject
from experiments.tasks import Placement, Sample, draw_sample, place, score
from experiments.tasks.context import Ground, read_prose
from experiments.tasks.in_prose import most_contexts
from experiments.tasks.needle import part_of
from experiments.tasks.registry import resolve_task
from kvspec.cli.app import app
from models_integration.model.frame import decode, encode
from models_integration.pocket import ASSETS, load_pocket_tokenizer
from models_integration.policies.calibration import calibrate
from models_integration.policies.values import repeat_template
from reference.calibration import Networks
from reference.policies.describe import list_policies
from reference.policies.names import DIVERSE, NAMES
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from tests.experiments.studies.experiments import answer, commit_all
from tests.experiments.studies.test_study import RULES, claim, rules_file, study
from tests.experiments.tasks.test_tasks import ground_of

pytestmark = pytest.mark.law("as-it-is-described")


def change(path: Path) -> None:
    path.write_text(f"{path.read_text(encoding='utf-8')}# changed\n", encoding="utf-8")


@pytest.mark.parametrize(("before", "part", "message"), [
    (change, "confirm", "has uncommitted changes"), (lambda path: None, "all", "must be dev, and confirm"),
    (lambda path: append_row(path.with_name("study.jsonl"), {
        "part": "confirm", "rules": load_rules(path).digest,
    }), "dev", "must not follow the confirming samples"),
])
def test_what_breaks_the_order_is_refused(before: Any, part: str, message: str, tmp_path: Path) -> None:
    before(rules_file(tmp_path))
    refused = study(tmp_path, part)
    assert refused.exit_code != 0
    assert message in str(refused.exception)


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
    changed = path.with_name("changed.toml")
    changed.write_bytes(path.read_bytes())
    for uncommitted in (tmp_path / "elsewhere" / "rules.toml", changed):
        with pytest.raises(SpecError, match="uncommitted changes"):
            registered(load_rules(path), uncommitted)
    path.write_bytes(path.read_bytes() + b"# one more line\n")
    with pytest.raises(SpecError, match="uncommitted changes"):
        registered(load_rules(path), path)


def write_rows(path: Path, *rows: Row) -> None:
    path.write_bytes(lzma.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))


def test_the_audit_reads_the_history(tmp_path: Path) -> None:
    """Check one study for each finding."""
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
    actual = {one.study.removesuffix(".toml"): one for one in audit(tmp_path)}
    assert (actual["named"].rules, actual["named"].rows) == (first, second)
    assert {name: one.finding for name, one in actual.items()} == {
        "named": "rules before rows, by the commit of every row",
        "old": "rules before rows; rows of before 0.4 do not name their commit",
        "same": "exploratory: rules and rows are of one commit",
        "forged": "exploratory: a row names a commit without these rules",
        "other": "exploratory: no commit has the rules of these rows",
    }
    assert {name for name, one in actual.items() if one.failures} == {"forged"}
    assert actual["forged"].failures == ("false commit: a row names a commit without these rules",)
    printed = CliRunner().invoke(app, ["study", "--audit", str(tmp_path)])
    assert printed.exit_code == 1
    assert first[:8] in printed.output
    (tmp_path / KNOWN).write_text(f"forged = {list(actual['forged'].failures)}\n", encoding="utf-8")
    assert CliRunner().invoke(app, ["study", "--audit", str(tmp_path)]).exit_code == 0
    text = actual["forged"].failures[0]
    for wrong, words in ((f'"{text}"', "must be a list of texts in quotes"), ("3", "a list"), ("[", "TOML file")):
        (tmp_path / KNOWN).write_text(f"forged = {wrong}\n", encoding="utf-8")
        with pytest.raises(SpecError, match=f"{words}.*{KNOWN}|{KNOWN}.*{words}"):
            audit(tmp_path)


def test_a_commit_must_be_an_ancestor_with_the_rules(tmp_path: Path) -> None:
    """Any text once passed as a commit."""
    path = rules_file(tmp_path)
    before = commit_all(tmp_path)
    path.write_text(f"{RULES}# changed\n", encoding="utf-8")
    after = commit_all(tmp_path)
    rules = load_rules(path)
    digest = hashlib.sha256(RULES.encode()).hexdigest()
    commits = (before, after, "0" * 40, "any text", "", "HEAD", None)
    named = [{"rules": rules.digest, "commit": commit} for commit in commits]
    assert commits_with_rules(rules, named) == {after}
    assert commits_with_rules(rules, [{"rules": digest, "commit": before}]) == {before}
    assert commits_with_rules(replace(rules, source=""), named) == frozenset()
    subprocess.run(["git", "reset", "-q", "--hard", before], cwd=tmp_path, check=True)
    assert commits_with_rules(load_rules(path), named) == frozenset()  # The commit `after` is no ancestor any more.


SIGNER = """#!/bin/sh
touch {ran}
[ "$1" = --status-fd=2 ] && cat > {ran}
echo '[GNUPG:] SIG_CREATED D 1 8 00 0 0' >&2
printf -- '-----BEGIN PGP SIGNATURE-----\\n\\nx\\n-----END PGP SIGNATURE-----\\n'
"""


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("config", [
    {"log.showSignature": "true"}, {"core.fsmonitor": "{signer}"}, {"filter.any.clean": "{signer}"},
    {"filter.any.process": "{signer}"}, {"diff.any.textconv": "{signer}"}, {"diff.external": "{signer}"},
    {"core.hooksPath": "{folder}/hooks"},
    {"core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
     "remote.origin.url": "{folder}", "remote.origin.uploadpack": "{signer}"},
])
def test_git_runs_no_program_that_a_repository_names(config: dict[str, str], tmp_path: Path) -> None:
    """Check a signed commit, a row whose commit the repository lacks, and files that git must compare again."""
    folder, ran, signer = tmp_path / "studies", tmp_path / "ran", tmp_path / "signer"
    folder.mkdir()
    signer.write_text(SIGNER.format(ran=ran), encoding="utf-8")
    signer.chmod(0o700)

    def configure(**values: str) -> None:
        for name, value in values.items():
            subprocess.run(["git", "config", name, value], cwd=folder, check=True)

    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    configure(**{"gpg.program": str(signer), "commit.gpgSign": "true"})
    path = rules_file(folder)
    write_rows(path.with_suffix(".jsonl.xz"), {"part": "confirm", "rules": "0" * 64, "commit": "1" * 40})
    commit_all(folder)
    assert ran.exists()  # The program signed the commits.
    ran.unlink()
    configure(**{name: value.format(signer=signer, folder=folder) for name, value in config.items()})
    (folder / ".git" / "info" / "attributes").write_text("* filter=any diff=any\n", encoding="utf-8")
    (folder / "hooks").mkdir()
    (folder / "hooks" / "post-index-change").symlink_to(signer)
    os.utime(path, (0, 0))  # the index no longer knows whether the file is unchanged
    (one,) = audit(folder)
    assert one.finding == "exploratory: no commit has the rules of these rows"
    assert registered(load_rules(path), path) == one.rows
    assert not ran.exists()


def planted(folder: Path, rows: list[Row]) -> tuple[str, ...]:
    """Return the defects of a study whose rules were committed before its rows."""
    path = rules_file(folder, RULES.replace("[study]", CLAIM, 1))
    commit, digest = commit_all(folder), load_rules(path).digest
    write_rows(path.with_suffix(".jsonl.xz"), *({**row, "rules": digest, "commit": commit} for row in rows))
    commit_all(folder)
    (actual,) = audit(folder)
    assert actual.finding == "rules before rows, by the commit of every row"
    return actual.failures


CLAIM = '''[[claim]]
name = "one over two"
first = "evidence"
second = "streamingllm"
budget = "0.3"
placement = "after"
tasks = ["needle_in_prose"]
measure = "kept"
difference = 0.1

[study]'''


def kept_rows(first: list[tuple[float, int]], groups: tuple[str, str]) -> list[Row]:
    """Return a dev row, and ten confirming rows for each depth. `evidence` keeps the given number of four tokens."""
    rows = [(0.5, 2, "dev", groups[0]), *((depth, kept, "confirm", groups[1]) for depth, kept in first * 10)]
    return [
        {
            "part": part, "task": "needle_in_prose", "length": 64, "placement": "after", "index": at, "question": 0,
            "context": f"{part}{at}", "sample": str(at), "metadata": {"depth": depth, "group": f"{group}{at % 5}"},
            "evidence_tokens": 4, "cells": [
                {"policy": "evidence", "budget": "0.3", "right": None, "kept": 20, "evidence_kept": kept},
                {"policy": "streamingllm", "budget": "0.3", "right": None, "kept": 20, "evidence_kept": 2},
            ],
        } for at, (depth, kept, part, group) in enumerate(rows)
    ]


@pytest.mark.parametrize(("kept", "groups", "failures"), [
    (1, ("a", "b"), ("pooled claim: one over two; opposite signs by place (start +0.50, middle -0.25)",)),
    (3, ("a", "a"), ("shared text: 4 of 20 confirming samples share text with dev samples",)), (3, ("a", "b"), ()),
])
def test_the_audit_reads_the_rows(
    kept: int, groups: tuple[str, str], failures: tuple[str, ...], tmp_path: Path,
) -> None:
    assert planted(tmp_path, kept_rows([(0.0, 4), (0.5, kept)], groups)) == failures


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize(("old", "new", "word"), [
    ('policies = ["', 'policies = ["planted:CODE", "', "policies"),
    ('policies = ["', 'policies = ["planted:CODE@prompt", "', "policies"),
    ('"prose_continuation"]', '"planted:CODE"]', "tasks"),
])
def test_the_audit_imports_no_module_that_a_rules_file_names(
    old: str, new: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    path = rules_file(tmp_path, RULES.replace(old, new, 1))
    write_rows(path.with_suffix(".jsonl.xz"), {"part": "confirm", "rules": "0" * 64})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=rf"{word} = 'planted:CODE.*no other code: move the file out .*in {path}"):
        audit(tmp_path)


def test_a_folder_outside_git_has_no_audit(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="git repository"):
        audit(tmp_path)


def gated(**right: int) -> Samples:
    """Return ten dev samples, of which each policy answers the given number."""
    budgets = {"fullcache": "1.0", "blind": "0", "evidence": "0.3"}
    return Samples([
        {
            "task": "needle_in_prose", "length": 64, "placement": "after", "context": str(at), "metadata": {},
            "cells": [
                {"policy": name, "budget": budgets[name], "right": float(at < count)} for name, count in right.items()
            ],
        } for at in range(10)
    ])


def test_the_gate_holds_per_template() -> None:
    """A template that the full cache cannot answer is excluded, and does not lower the accuracy of its task."""
    rows = [
        {**row, "metadata": {"template": name}, "cells": [{**row["cells"][0], "right": float(name == "easy")}]}
        for name in ("easy", "easy", "easy", "hard") for row in gated(fullcache=10).rows
    ]
    counted = Samples(rows).able().rows
    assert len(counted) == 30
    assert {row["metadata"]["template"] for row in counted} == {"easy"}


@pytest.mark.parametrize(("right", "failed"), [
    ({"fullcache": 7, "blind": 0, "evidence": 9}, ""), ({"fullcache": 6, "blind": 0, "evidence": 9}, "fullcache"),
    ({"fullcache": 7, "blind": 1, "evidence": 9}, "blind"), ({"fullcache": 7, "blind": 0, "evidence": 8}, "evidence"),
])
def test_a_task_that_fails_its_controls_on_dev_carries_no_claim(right: dict[str, int], failed: str) -> None:
    message = gate(claim("accuracy"), gated(**right))
    assert message.startswith(f"needle_in_prose at 64: {failed} answers") if failed else message == ""


@pytest.fixture(scope="module")
def ground() -> Ground:
    tokenizer = load_pocket_tokenizer(ASSETS)
    return ground_of(tokenizer, read_prose(tokenizer))


@pytest.mark.parametrize(("length", "index", "digest"), [
    (600, 2, "cef07c0c93080ec2"), (600, 52, "9c40d7e4f0ffed14"), (2048, 4, "eb9e9733fda5a198"),
])
def test_windows_of_code_are_those_of_the_committed_studies_on_every_python(
    length: int, index: int, digest: str, ground: Ground,
) -> None:
    """The digests were computed when the text was still read from the library of Python 3.11.7 itself."""
    (sample,) = resolve_task("fact")(ground, length, index, 5)
    assert (sample.metadata["text"], sample.context_digest[:16]) == ("code", digest)


@pytest.mark.parametrize("value", ["number", "word"])
def test_facts_are_in_three_texts_each_split_before_any_run(value: str, ground: Ground) -> None:
    """No window is read twice, and the fact is at its stated position. Dev and confirm have different parts of a text.
    """
    task, contexts, kinds = resolve_task(f'fact(value="{value}")'), set(), dict[str, set[str]]()
    for index in range(60):
        (sample,) = task(ground, 600, index, 5)
        if index % 10 == 0:
            assert task(ground, 600, index, 5) == (sample,)
        (span,) = sample.evidence
        assert sample.expected in decode(ground.tokenizer, list(sample.context_ids[slice(*span)]))
        assert sample.expected.isdigit() == (value == "number")
        around = sample.context_ids[: span[0]] + sample.context_ids[span[1] :]
        contexts.add(around)
        kinds.setdefault(str(sample.metadata["text"]), set()).add(part_of(sample.context_digest))
    assert len(contexts) == 60
    assert kinds == {kind: {"dev", "confirm"} for kind in ("prose", "records", "code")}
    assert 60 <= most_contexts(ground.prose, 600) <= 5 * ground.prose.windows(600)


IN_STEPS = [one.name for one in list_policies() if one.decode_time]
SERVED = [name for name in NAMES if not name.startswith(tuple(DIVERSE + name for name in IN_STEPS))]
"""Policies that the tests run. Policies that select one by one in each decode step would take minutes."""
LENGTH, BUDGETS, MOST = 220, (150, 180), 6
BREATH = "crystalcache(decode=true)"
Kept = Sequence[list[int]]


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    plain = Loading(backend="numpy").subject()
    text = draw_sample("needle", plain.tokenizer, 400, 0, 1).context_ids
    template = repeat_template(plain.tokenizer)
    taken = calibrate(plain.model, torch.tensor([text]), template=template, covariance=True)
    heads, width = plain.model.config.num_key_value_heads, plain.model.config.hidden_size
    rng, layers = np.random.default_rng(0), len(taken.layers)
    networks = Networks(rng.standard_normal((layers, heads, width)), rng.standard_normal((layers, heads)))
    gates = random_gates(layers, heads, width, taken.mean.shape[1] // heads)
    return replace(plain, calibration=replace(taken, networks=networks, gates=gates))


def cell_rows(
    subject: Subject, sample: Sample, placement: Placement, names: Sequence[str],
) -> dict[Cell, tuple[Row, Kept]]:
    """Return the row and the kept sets of each cell, from one prompt. One forward pass reads five caches."""
    wanted = [(name, str(B)) for name, B in product(names, BUDGETS) if B in BUDGETS[:1] or not name.startswith(DIVERSE)]
    methods = {name: subject.policy(name, Budget(count=BUDGETS[0])).on(subject.model) for name in names}
    prompt = read_prompt(subject, methods, [str(B) for B in BUDGETS], placement)
    actual = dict[Cell, tuple[Row, Kept]]()
    for row, cell in zip(measure(subject, sample, prompt, wanted, 5)["cells"], wanted, strict=True):
        kept = prompt.set_of(*cell, sample)
        actual[cell] = row, [kept.group(at).tolist() for at in range(kept.groups)]
    return actual


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize(
    ("placement", "task", "diverse", "part"),
    [("after", "needle", (f"{DIVERSE}snapkv", f"{DIVERSE}kvzip"), 0), ("in_prompt", "delayed_association", (), None),
     ("paper", "needle", (), 2), pytest.param("after", "needle", SERVED, None, marks=pytest.mark.nightly),
     pytest.param("paper", "needle", (), None, marks=pytest.mark.nightly)],
)
def test_a_cell_keeps_and_says_what_a_context_of_its_own_does(
    subject: Subject, placement: str, task: str, diverse: Sequence[str], part: int | None,
) -> None:
    """Compare bit for bit, including the number of slots. Cells differ, so that the comparison is meaningful.

    By day, each policy meets one placement, and two of three policies meet one of the other placements.
    """
    sample = replace(draw_sample(task, subject.tokenizer, LENGTH, 1, 9), max_new_tokens=MOST)
    presented = place(sample, placement)
    plain = [name for name in SERVED if not name.startswith(DIVERSE)]
    names = [*plain[part::3 if part is not None else 1], *(name for name in SERVED if name in diverse), BREATH]
    before, actual = len(presented.prompt_ids) - presented.dropped_slots, cell_rows(subject, sample, presented, names)
    for (name, B), (given, kept) in actual.items():
        expected, sets = answer(subject.model, subject.policy(name, parse_budget(B)), presented, MOST, subject.stop_ids)
        assert kept == [[at for at in positions if at < before] for positions in sets], name
        assert given["answer"] == decode(subject.tokenizer, expected.token_ids), name
        assert given["right"] == score(subject.tokenizer, expected.token_ids, sample)
        assert given["peak_cache"] == expected.peak_cache, name
        assert given["mean_cache"] == pytest.approx(expected.mean_cache), name
        assert given["answer_slots"] == pytest.approx(expected.mean_cache - np.mean(given["kept"])), name
    assert {name for name, _ in actual} == set(names)
    assert len({str(kept) for _, kept in actual.values()}) > len(names) / 2
    assert len({given["answer"] for given, _ in actual.values()}) > 2


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("name", ["h2o", "tova", BREATH])
def test_a_policy_that_decides_at_each_token_reads_the_gold_answer_so(subject: Subject, name: str) -> None:
    """Compare the likelihood with a gold answer that is read token by token in a separate context."""
    sample = replace(
        draw_sample("needle", subject.tokenizer, LENGTH, 1, 9), answer_ids=encode(subject.tokenizer, " 7492.")
    )
    presented, policy = place(sample), subject.policy(name, 150)
    prompt = read_prompt(subject, {name: policy.on(subject.model)}, ["150"], presented)
    (cell,) = measure(subject, sample, prompt, [(name, "150")], 1)["cells"]
    logits, stored = list[torch.Tensor](), list[float]()
    with policy(subject.model), torch.no_grad():
        cache = subject.model(input_ids=torch.tensor([presented.prompt_ids])).past_key_values
        for token in (*presented.fed_ids, *sample.answer_ids[:-1]):
            logits.append(subject.model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
            stored.append(cache.mean_length)
    logits = logits[-len(sample.answer_ids) :]
    likelihood = sum(
        float(one.double().log_softmax(dim=-1)[token]) for one, token in zip(logits, sample.answer_ids, strict=True)
    )
    assert cell["likelihood"] == pytest.approx(likelihood, abs=1e-4)
    assert cell["mean_cache"] == pytest.approx(np.mean(stored))


@pytest.mark.law("as-it-is-described")
def test_the_guide_lists_every_key_of_a_rules_file() -> None:
    text = (ROOT / "docs/guide/compare.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\[+\w+\]+)` \| (.+?) \| .+ \| (.+?) \|$", text, re.MULTILINE)
    listed = {(table, key, default == "required") for table, keys, default in rows for key in re.findall(r"\w+", keys)}
    assert listed == {
        (table, one.name, one.default is MISSING) for table, kind in
        {"[study]": Rules, "[[claim]]": Claim, "[[stage]]": Stage}.items()
        for one in fields(kind) if kind is not Rules or one.name not in COMPUTED
    }
