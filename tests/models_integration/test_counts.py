"""Sessions and commands report the number of kept tokens and the budget, and warn of likely mistakes."""

import json
import re
import warnings
from math import ceil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the sessions drive transformers models")

import torch
from typer.testing import CliRunner

import kvspec
from experiments.studies.report import summary_tables
from kvspec.cli.app import app
from models_integration.pocket import load_pocket
from models_integration.policies.methods import CrystalCache, CustomPolicy, StreamingLLM, policy_from_name
from models_integration.policies.prefill import prefill
from reference.policies import kvcrush, snapkv, vase
from spec.budget import Budget
from spec.records import CrystalRetention
from tests.models_integration.session.families import build, greedy, prompt

pytestmark = pytest.mark.law("figures-are-counted-right")

TWENTY = Budget(count=20)
TEXT = "The river runs past the old mill, and the miller counts sacks. " * 40


@pytest.mark.parametrize(("policy", "kept", "reason"), [
    (CustomPolicy(snapkv(), TWENTY), 32, "snapkv always keeps the last 32 tokens"),
    (CustomPolicy(vase(), TWENTY), 68, "vase always keeps the first 4 and the last 64 tokens"),
    (CustomPolicy(kvcrush(), TWENTY), 36,
     "kvcrush always keeps the last 32 tokens, and does not promise an exact budget"),
])
def test_the_budget_is_the_one_that_was_asked(policy: CustomPolicy, kept: int, reason: str) -> None:
    model = build("llama")
    with policy(model) as run, torch.no_grad():
        model(input_ids=torch.cat([prompt(100, seed=1), prompt(100, seed=2)]))
    sizes = [len(one.group(at)) for one in run.retentions for at in range(one.groups)]
    assert set(sizes) == {kept}
    assert run.over_budget == kept - 20
    assert [str(one) for one in run.kept_tokens] == [f"{kept} of 100 tokens, budget 20: {reason}"] * 2
    assert f"kept='{run.kept_tokens[0]}'" in repr(run)


def test_unequal_sets_count_by_their_mean() -> None:
    model = build("llama")
    with policy_from_name("adakv", 0.3, W=4)(model) as run, torch.no_grad():
        model(input_ids=prompt(60))
    sizes = [len(run.retentions[0].group(at)) for at in range(run.retentions[0].groups)]
    (counts,) = run.kept_tokens
    assert (counts.least, counts.most, counts.mean) == (min(sizes), max(sizes), sum(sizes) / len(sizes))
    assert counts.least < counts.most
    assert run.over_budget == counts.over_budget == max(0, ceil(counts.mean) - 18)
    assert str(counts) == f"{counts.least} to {counts.most} (mean {counts.mean:.1f}) of 60 tokens, budget 18"


def test_crystalcache_says_that_whole_trunks_are_kept(tmp_path: Path) -> None:
    """Check the reason for keeping more than 132 tokens: whole trunks at the border of the window."""
    model, tokenizer = load_pocket()
    (tmp_path / "text.txt").write_text("a b c d " * 90, encoding="utf-8")
    ids = tokenizer("a b c d " * 90, return_tensors="pt").input_ids
    policy = CrystalCache(0.3, kvspec.sentence_ends(tokenizer), backend="numpy")
    run = prefill(model, policy, ids).run
    (retention,), (counts,) = run.retentions, run.kept_tokens
    assert isinstance(retention, CrystalRetention)
    asked = policy.method.budget.tokens(ids.shape[1])
    assert counts.budget == asked
    assert counts.floor == sum(retention.trunks.sizes[retention.protected]) >= 132
    assert run.over_budget == max(0, len(retention.kept) - asked)
    if run.over_budget:
        assert f"whole trunks of the first 4 and the last 128 tokens, here {counts.floor} tokens" in str(counts)
    line = ["keep", str(tmp_path / "text.txt"), "--budget", "0.3", "--backend", "numpy"]
    output = CliRunner().invoke(app, [*line, "--format", "json"])
    shown = json.loads(output.stdout)
    assert (shown["kept"], shown["budget"], shown["over_budget"]) == (len(retention.kept), asked, run.over_budget)
    assert CliRunner().invoke(app, line).stderr == f"kept {counts}\n"


def test_tables_show_what_is_kept_beside_the_budget() -> None:
    row = {
        "policy": "crystalcache", "task": "needle", "length": 1024, "budget_requested": "0.15", "budget": 154,
        "placement": "after", "n": 10, "seed": 42, "control": False, "model": "m@0", "backend": "numpy",
        "spec_version": "0.4.1", "correct": 5, "accuracy": 0.5, "mean_kept": 165.2, "mean_cache": 170.0,
        "peak_cache": 200, "over_budget": 36,
    }
    for width in (120, 60, 34):
        (table,) = summary_tables([row], width)
        assert any(re.search(r"165 of 154", str(cell)) for column in table.columns for cell in column.cells), width


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("name", "budget", "said"), [
    ("snapkv", 30, r"budget=30 is a number of tokens, but snapkv always keeps the last 32 tokens; write budget=0\.3 "),
    ("snapkv", "30", r"budget='30' is a number of tokens"),
    ("kvcrush", 20, r"kvcrush always keeps the last 32 tokens; write budget=0\.2 to keep 20 % of the prompt"),
    ("criticalkv", 30, r"criticalkv always keeps the last 32 tokens"),
    ("streamingllm", 2, r"streamingllm always keeps the first 4 tokens"),
    ("crystalcache", 130, r"crystalcache always keeps the first 4 and the last 128 tokens$"),
    ("snapkv", 1, r"budget=1 keeps one token; write budget=1\.0"),
])
def test_a_number_below_what_is_always_kept_is_warned_of(name: str, budget: int | str, said: str) -> None:
    model, constants = build("llama"), {"sentence_ends": frozenset({130})} if name == "crystalcache" else {}
    with pytest.warns(UserWarning, match=said):
        policy_from_name(name, budget, **constants)(model)


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("budget", [0.01, "1%", 32, Budget(count=3)])
def test_a_fraction_and_a_plain_budget_are_not_warned_of(budget: float | str | Budget) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy_from_name("snapkv", budget)
        StreamingLLM(Budget(count=2))


@pytest.mark.law("as-it-is-described")
def test_a_text_beyond_the_positions_is_warned_of_once() -> None:
    """Check a prompt, steps and a later turn. Up to the last position, there is no warning."""
    model = build("llama")
    model.config.max_position_embeddings = 48
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with StreamingLLM(20)(model), torch.no_grad():
            greedy(model, prompt(40), 9)
    with warnings.catch_warnings(record=True) as caught, StreamingLLM(20)(model) as run:
        warnings.simplefilter("always")
        answer = greedy(model, prompt(40), 20)
        greedy(model, torch.cat([prompt(40), answer, prompt(30)], dim=1), 3, past_key_values=run.cache)
    ours = [str(one.message) for one in caught if "eviction does not renumber" in str(one.message)]
    assert len(ours) == 1
    assert re.match(r"the text has 49 tokens, but LlamaForCausalLM was trained for 48 positions", ours[0])
    assert "rope_parameters" in ours[0]
    model.config.rope_parameters = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
    with warnings.catch_warnings(), StreamingLLM(20)(model), torch.no_grad():
        warnings.simplefilter("error")
        model(input_ids=prompt(100))


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("text", "tokens", "argument"), [("hi", 4096, "TEXT"), (TEXT, 100, "tokens")])
def test_a_text_that_is_too_short_calibrates_nothing(text: str, tokens: int, argument: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    line = ["calibrate", str(tmp_path / "text.txt"), "--tokens", str(tokens), "--out", str(tmp_path / "c.npz")]
    error = CliRunner().invoke(app, line).exception
    assert f"{argument} = " in str(error)
    assert "must be at least 256 tokens, because" in str(error)
    assert not (tmp_path / "c.npz").exists()
