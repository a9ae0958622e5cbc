"""`kvspec paper injection`: numbers counted from the rows, contents of sessions, patched residuals, LoCoMo."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="papers are run on transformers models")

from typer.testing import CliRunner

from experiments.studies.answers import next_token
from experiments.studies.papers.injection import ASYMMETRIC, PATCHES, TEMPLATES, Scene, Session
from experiments.studies.papers.injection_tables import filled_lines, tables_of
from experiments.studies.papers.probes import draw_talk, read_locomo
from experiments.studies.subject import Loading
from kvspec.cli.app import app
from lab.measure.evidence_rows import rows_of
from models_integration.archive.blend import blend
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.rotation import plain_layers, prefilled
from spec.errors import SpecError
from tests.models_integration.session.families import relative

pytestmark = pytest.mark.law("figures-are-counted-right")


def test_the_study_of_injection_counts_its_rows_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspec.cli.paper_injection.QUICK_QUESTIONS", 2)
    asked = ["paper", "injection", "--quick", "--backend", "numpy", "--out", str(tmp_path)]
    for part in ("cacheblend", "figure-3", "figure-4", "table-2", "table-7a", "table-10"):
        done = CliRunner().invoke(app, [*asked, "--model", "chat", "--part", part], env={"COLUMNS": "300"})
        assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "injection.jsonl").read_text("utf-8").splitlines()]
    assert len({(row["question"], row["session"]) for row in rows}) == len(rows) == 2 * (3 + 4 + 4 + 4 + 8)
    assert {row["talk"] for row in rows} <= {row["talk"] for row in rows_of("paper-injection")}
    assert f"{2} answers stored" in done.output  # This is the short wrapper of table 7a.
    right = [row["right"] for row in rows if row["session"] == '{"wrapper": "short"}']
    line = pd.read_csv(tmp_path / "tables.csv").set_index("arm").loc["pc_bf16"]
    assert (line["n"], line["r@1 or F1 [95 %]"][:5]) == (2, f"{fmean(right):.3f}")
    done = CliRunner().invoke(app, [*asked, "--model", "chat", "--part", "figure-4", "--dry-run"])
    for words in ("2 questions in 2 sessions each", "prompt tokens", "memory: weights", "processor hours"):
        assert words in done.output
    for options, words in (
        (("--model", "pocket"), "have the tokens <|im_start|>"), (("--model", "chat", "--part", "table-3"), "part"),
        (("--workers", "2"), "needs --workers 1"),
    ):
        with pytest.raises(SpecError, match=re.escape(words)):
            raise CliRunner().invoke(app, [*asked, *options]).exception or AssertionError


def test_injection_is_compared_question_by_question() -> None:
    """The published discordant counts of Table 1c give the published difference and p."""
    (table,) = (one for one in tables_of(TEMPLATES["markers"]) if one.name == "table-1c")
    hurt, helped, both = 35, 61, 192
    outcomes = [(True, False)] * hurt + [(False, True)] * helped + [(True, True)] * both
    outcomes += [(False, False)] * (467 - len(outcomes))
    rows = {
        session.name: [{"right": pair[at], "seconds": 1.0} for pair in outcomes]
        for at, session in enumerate(table.arms.values())
    }
    first, second = filled_lines(table, rows)
    assert (first[1][:5], second[1][:5]) == ("0.486", "0.542")
    assert (second[2], second[4], second[6]) == ("+0.056", "0.0103", "35 / 61")
    assert second[8:] == ["0.542", "+0.056"]


def test_half_of_the_layers_and_codecs_change_what_they_say(one_thread: None) -> None:
    """Upper and lower half together are the wrapped chunk.

    Layer 0 of the upper half has the values of the raw tokens.
    """
    scene = Scene(Loading("chat", "numpy").subject(), draw_talk(0))
    ids = (5, 6, 7)
    full, upper, lower, coarse = (
        scene.chunk_of(ids, Session("short", half=half, codec=codec)).layers
        for half, codec in (("", "none"), ("upper", "none"), ("lower", "none"), ("", ASYMMETRIC))
    )
    raw = scene.chunk_of(ids, Session()).layers
    for index, pair in full.items():
        kept, changed = (upper, lower) if index >= len(full) // 2 else (lower, upper)
        for at, tensor in enumerate(pair):
            assert torch.equal(kept[index][at], tensor)
            step = (tensor.max() - tensor.min()) / 255
            assert 0 < (coarse[index][at] - tensor).abs().max() <= 0.51 * step
        assert torch.equal(changed[index][1][:, 2:5], raw[index][1])
        assert torch.equal(changed[index][1][:, :2], pair[1][:, :2])


def test_patched_markers_have_their_residuals_in_the_band_and_nothing_elsewhere(one_thread: None) -> None:
    """Keys and values of a marker follow only from its residual: those of the wrapped chunk, or zero without bias."""
    scene = Scene(Loading("chat", "numpy").subject(), draw_talk(0))
    ids = (5, 6, 7)
    whole = scene.chunk_of(ids, Session("short"))
    depth, at, inner = len(whole.layers), list(whole.markers), [2, 3, 4]
    bands = {"early": {0}, "mid": {depth // 4}, "upper": {depth // 2}, "all": set(range(depth))}
    for patch in PATCHES:
        created, kept = scene.chunk_of(ids, Session("short", patch=patch)), set[int]()
        for index, pair in created.layers.items():
            for wanted, tensor in zip(whole.layers[index], pair, strict=True):
                if torch.equal(tensor[:, at], wanted[:, at]):
                    kept.add(index)
                elif patch != "noise":
                    assert not tensor[:, at].any()
        assert bands.get(patch, set()) <= kept
        assert len(kept) == depth if patch == "all" else len(kept) < depth
        same = [
            torch.equal(pair[1][:, inner], whole.layers[index][1][:, inner]) for index, pair in created.layers.items()
        ]
        assert all(same) is (patch == "all")


def test_probes_are_those_of_one_forward_over_the_text(one_thread: None) -> None:
    """Compare the attention of a session with eager attention over the whole text without a cache.

    Keys are moved to their positions in the text. If both keys are rotated to the same position, their cosine is
    independent of the rotation.
    """
    scene = Scene(Loading("chat", "numpy").subject(), draw_talk(0))
    model, session = scene.subject.model, Session("short", text=True, probe=True)
    actual, (cache, ids, _) = scene.measure(session), scene._opened(session)
    before, question = scene.session_ids(session), scene._question()
    assert cache.get_seq_length() == len(before)
    assert scene.tokens(session) == len(before) + len(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        forward = model(torch.tensor([before + ids]), output_attentions=True, use_cache=True)
    chunks, start = [scene.chunk_of(one, session) for one in scene._chosen(session)], len(before)
    for layer, weights in enumerate(forward.attentions):
        rows = weights[0, :, -len(question) :].double()
        assert actual["entropy"][layer] == pytest.approx(float(torch.special.entr(rows).sum(-1).mean()), rel=1e-4)
        assert actual["sinks"][layer] == pytest.approx(float(rows[..., :4].sum(-1).mean()), rel=1e-4)
        same, still, at = list[Tensor](), list[Tensor](), start
        for chunk in chunks:
            inner = slice(chunk.markers[0] + 2, chunk.markers[-1])  # after the marker and the line end
            there = forward.past_key_values.layers[layer].keys[0][:, at : at + len(chunk.ids)][:, inner].double()
            moved = plain_layers(prefilled(model, chunk.ids, at))[layer].keys[0][:, inner].double()
            same.append(torch.cosine_similarity(chunk.layers[layer][0][:, inner].double(), there, -1))
            still.append(torch.cosine_similarity(moved, there, -1))
            at += len(chunk.ids)
        assert actual["cosine"][layer] == pytest.approx(float(torch.cat(same, 1).mean()), abs=1e-5)
        assert actual["unrotated"][layer] == pytest.approx(float(torch.cat(still, 1).mean()), abs=1e-5)
    assert actual["unrotated"][0] == pytest.approx(1)
    (table,) = (one for one in tables_of(scene.template) if one.name == "figure-4")
    whole, first, *_ = filled_lines(table, {arm.name: [actual, actual] for arm in table.arms.values()})
    for line, name, figure in ((whole, "all", fmean(actual["cosine"])), (first, "0", actual["cosine"][0])):
        assert line[:3] == ["baseline", name, f"{figure:.3f} [{figure:.3f}, {figure:.3f}]"]


def test_a_session_holds_its_prompt_the_wrapper_s_opening_or_four_tokens(one_thread: None) -> None:
    scene = Scene(Loading("chat", "numpy").subject(), draw_talk(0))
    default, prefix, sinks = (str(scene.subject.tokenizer.decode(scene.session_ids(Session(before=one)))) for one in (
        "", "prefix", "sinks"
    ))
    template = scene.template.system.format("You are a helpful assistant.")
    assert (default, prefix) == (f"<bos>{template}", f"<bos>{template}{template}<|im_start|>user\n")
    assert default.startswith(sinks)


LOCOMO = [
    {
        "conversation": {
            "speaker_a": "Ann", "session_1_date_time": "1 May", "session_1": [{"speaker": "Ann", "text": "I paint."}],
            "session_2_date_time": "2 May", "session_2": [{"speaker": "Bob", "text": "I run."}],
        },
        "qa": [
            {"question": "Who paints?", "answer": "Ann", "category": 4},
            {"question": "Who flies?", "adversarial_answer": "Bob", "category": 5},
            {"question": "When?", "answer": 2, "category": 2},
            {"question": "Why?", "answer": "Ann; she paints", "category": 3},
        ],
    },
    {"conversation": {"session_1_date_time": "3 May", "session_1": [{"speaker": "Eve", "text": "Hi."}]},
     "qa": [{"question": "Who?", "answer": "Eve", "category": 1}]},
]


def test_locomo_s_questions_are_read_and_counted_by_f1(one_thread: None, tmp_path: Path) -> None:
    (file := tmp_path / "locomo10.json").write_text(json.dumps(LOCOMO))
    talks = read_locomo(file)
    assert [(talk.question, talk.value, talk.metric) for talk in talks] == [
        ("Who paints?", "Ann", "locomo_f1"), ("Who?", "Eve", "locomo_f1 of parts"), ("When?", "2", "locomo_f1"),
        ("Why?", "Ann", "locomo_f1"),
    ]
    assert talks[2].turns == ["(1 May) Ann: I paint.", "(2 May) Bob: I run."]
    asked = ["paper", "injection", "--quick", "--backend", "numpy", "--model", "chat", "--part", "locomo"]
    done = CliRunner().invoke(app, [*asked, "--file", str(file), "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "injection.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 2 * 4
    line = pd.read_csv(tmp_path / "tables.csv").set_index("arm").loc["per_chunk"]
    figure = fmean(row["f1"] for row in rows if row["session"] == '{"wrapper": "short"}')
    assert (line["n"], line["r@1 or F1 [95 %]"][:5]) == (4, f"{figure:.3f}")
    done = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "none")], env={"COLUMNS": "300"})
    assert "not run: give --file locomo10.json" in done.output
    file.write_text("[3]")
    with pytest.raises(SpecError, match=re.escape("locomo10.json")):
        read_locomo(file)


@pytest.mark.spec("IN-CACHEBLEND")
@pytest.mark.parametrize(("r", "attn"), [(0.0, "auto"), (0.3, "auto"), (0.3, "eager"), (1.0, "auto")])
def test_recomputed_tokens_attend_to_stored_keys_of_all_other_tokens(r: float, attn: str, one_thread: None) -> None:
    """Compare all recomputed tokens with a prompt as text, and the first one with a token read after stored tokens."""
    scene, session = Scene(Loading("chat", "numpy", attn=attn).subject(), draw_talk(0)), Session("full")
    model, ids = scene.subject.model, [*scene.session_ids(session)]
    cache, _, _ = scene._opened(session)
    start, before = len(ids), [(layer.keys.clone(), layer.values.clone()) for layer in plain_layers(cache)]
    ids += [token for one in scene._chosen(session) for token in scene.chunk_of(one, session).visible]
    chosen = blend(model, cache, ids, start, r)
    fresh = plain_layers(prefilled(model, ids))
    deviation = ((before[1][0] - fresh[1].keys)[0, :, start:].double() ** 2).sum((0, 2))
    assert chosen == sorted((start + deviation.argsort(descending=True))[: int(r * len(deviation))].tolist())
    others = sorted(set(range(len(ids))) - set(chosen))
    for layer, pair in zip(plain_layers(cache), before, strict=True):
        for new, old in zip((layer.keys, layer.values), pair, strict=True):
            assert torch.equal(new[:, :, others], old[:, :, others])
    if chosen:
        first, read = chosen[0], RetainedCache(model.config)
        for index, pair in enumerate(before):
            read.update(*(x[:, :, :first] for x in pair), index)
        next_token(model, read, ids[first : first + 1])
        for layer, alone in zip(plain_layers(cache), plain_layers(read), strict=True):
            assert relative(layer.keys[0, :, first], alone.keys[0, :, first]) < 1e-5
            assert relative(layer.values[0, :, first], alone.values[0, :, first]) < 1e-5
    if r == 1.0:
        for layer, text in zip(plain_layers(cache), fresh, strict=True):
            assert relative(layer.keys, text.keys) < 1e-5
    assert scene.measure(replace(session, blend=r)).keys() == {"answer", "right", "f1", "seconds"}
    with pytest.raises(SpecError, match="must store all"):
        blend(model, cache, ids[:-1], start, r)
