"""Tests of the run over model families: families that pass, unsupported families, and any third outcome."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="families are transformers models")

from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from experiments.studies.results import load_rows
from kvspec.cli.app import app
from lab.measure import families as run
from lab.measure import family_models as models
from lab.measure.families import COLUMNS, POLICIES, Outcome, outcomes
from lab.measure.family_models import Family, families
from lab.pages import BLOCK
from models_integration import RetainedCache, StreamingLLM
from models_integration.pocket import load_pocket_tokenizer
from spec.errors import SpecError

KNOWN = {family.name: family for family in families()}
looped = pytest.mark.skipif("dory" not in KNOWN, reason="Dory is in transformers since 5.24")
REFUSED = {
    "gpt_neo": "no eager_attention_forward", "rwkv": "nothing to evict", "openai-gpt": "no key-value cache",
    "bloom": "ALiBi", "mpt": "ALiBi", "dory": "run several times",
    "mamba2": "nothing to evict", "musicgen": "several codebooks",
    "mllama": r"layers \[1, 3\] attend to an image",
}


def test_every_name_of_transformers_has_a_family() -> None:
    assert len(KNOWN) > 150
    assert {family.model_class for family in KNOWN.values()} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


# Gemma 4 has other widths and KV heads in its full-attention layers than in those that slide. `nightly` has all.
@pytest.mark.parametrize("name", ["gemma4_text", "gpt_bigcode", "gemma3"])
def test_a_family_that_holds(name: str) -> None:
    actual = list(outcomes(KNOWN[name]))
    assert [one.verdict for one in actual] == ["holds"] * len(COLUMNS), actual
    assert all(one.policy == "save" or 0 < one.worst <= run.BOUND for one in actual)


@pytest.mark.parametrize(("name", "refused"), [
    ("bart", {"padded batch": "numbers padding positions"}),
    ("deepseek_v2", {"per head": "one latent for all heads"}),
    ("deepseek_v32", {
        **dict.fromkeys(("reads attention", "per layer", "decode"), "an indexer of"), "per head": "one latent",
    }),
])
@pytest.mark.filterwarnings("ignore")
def test_a_family_that_holds_in_some_columns(name: str, refused: dict[str, str]) -> None:
    for one in outcomes(KNOWN[name]):
        words = refused.get(one.policy)
        assert one.verdict == ("holds" if words is None else "refused"), one
        assert words is None or words in one.detail


@pytest.mark.parametrize("name", [name if name != "dory" else pytest.param(name, marks=looped) for name in REFUSED])
@pytest.mark.filterwarnings("ignore")
def test_a_family_is_refused_for_what_it_is(name: str) -> None:
    for column, one in zip(COLUMNS, outcomes(KNOWN[name]), strict=True):
        assert (one.policy, one.verdict) == (column, "refused"), one
        assert re.search(REFUSED[name], one.detail)


SAVED = (
    "gpt2", "gpt_oss", "qwen3_5", "qwen3_next", "gemma3_text", "deepseek_v2", "nemotron_h", "granitemoehybrid", "lfm2",
    "falcon_h1",
)


@pytest.mark.law("saved-is-what-was")
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.filterwarnings("ignore")
def test_compare_loads_a_saved_checkpoint_and_evicts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_pocket_tokenizer()
    for entry, value in (("vocab_size", len(tokenizer)), ("max_position_embeddings", 512)):
        monkeypatch.setitem(models.TINY, entry, value)
    KNOWN[name].build().save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / name)
    asked = ["--policies", "streamingllm", "--budgets", "64", "--length", "200", "--samples", "1", "--tasks", "needle"]
    ran = CliRunner().invoke(
        app, ["compare", "--model", str(tmp_path / name), *asked, "--no-controls", "--out", str(tmp_path)],
    )
    assert ran.exit_code == 0, ran.output
    (row,) = load_rows(tmp_path / "study.jsonl")
    assert [cell["kept"] for cell in row["cells"]] == [64]


def test_full_layers_of_other_heads_are_refused() -> None:
    model = KNOWN["gemma4_text"].build()
    model.config.per_layer_config = {layer: {"num_key_value_heads": heads} for layer, heads in ((1, 1), (3, 2))}
    with pytest.raises(SpecError, match=r"full-attention layers differ in num_key_value_heads, \[1, 2\]"):
        StreamingLLM(0.4)(model)


def test_what_cannot_be_built_is_said() -> None:
    (one, *_) = outcomes(Family("llama", "NoSuchModel"))
    assert one.verdict == "not built"
    assert "NoSuchModel" in one.detail


def other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant an error: the oracle receives a kept set with a different sink."""
    kept = run._kept
    monkeypatch.setattr(run, "_kept", lambda *given: [[[0, 2, *group[2:]] for group in sets] for sets in kept(*given)])


def broken_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error in the forward pass of three tokens, after the session has started."""
    stock = RetainedCache.update

    def update(cache: RetainedCache, keys: Tensor, *others: Any, **options: Any) -> Any:
        if keys.shape[2] > 3:
            raise IndexError("in a forward")
        return stock(cache, keys, *others, **options)

    monkeypatch.setattr(RetainedCache, "update", update)


def late_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def compact(*_: Any, **__: Any) -> None:
        raise SpecError("model", "late", "the prompt has been read")

    monkeypatch.setattr(RetainedCache, "compact", compact)


def raw_error_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    def door(*_: Any) -> None:
        raise KeyError("layer")

    monkeypatch.setattr(StreamingLLM, "__call__", door)


def everything_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.POLICIES, "model", lambda: StreamingLLM(1.0))


@pytest.mark.parametrize(("wrong", "words"), [
    (other_positions, "is off by"), (broken_update, "IndexError: in a forward"), (late_refusal, "SpecError: model"),
    (raw_error_at_the_door, "KeyError at entry"), (everything_kept, "this says nothing"),
])
def test_a_third_outcome_ends_in_an_exit_of_1(
    wrong: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in list(POLICIES)[1:]:
        monkeypatch.delitem(run.POLICIES, name)
    monkeypatch.setattr(run, "PARTS", {})
    monkeypatch.setattr(run, "COLUMNS", ("model",))
    with monkeypatch.context() as change:
        wrong(change)
        assert run.main(["llama", "--out", str(tmp_path)]) == 1
        assert words in capsys.readouterr().err
        assert words in (tmp_path / "families.md").read_text(encoding="utf-8")
    assert run.main(["llama", "--out", str(tmp_path)]) == 0
    assert "llama | holds" in (tmp_path / "families.md").read_text(encoding="utf-8")


def test_the_page_says_what_becomes_of_each_family() -> None:
    verdicts = {"a": "holds", "b": "refused", "c": "not built"}
    actual = [Outcome(family, column, verdict, "why: so", 1e-7) for family, verdict in verdicts.items()
             for column in COLUMNS]
    actual += [Outcome("d", column, "holds" if column != "turn" else "refused", "other") for column in COLUMNS]
    tables = run.tables(actual)
    for name, expected in {
        "every": "```text\na\n```\n", "some": "| d | + | + | + | + | - | + | + | + |", "refused": "| why | b | no |",
        "parts": "| other | d | no |", "unbuilt": "Not built: c.\n", "versions": "| 4 | 1 | 1 | 1 |",
    }.items():
        assert expected in tables[name]
    assert {mark[2] for mark in BLOCK.finditer(run.PAGE.read_text(encoding="utf-8"))} == tables.keys()
