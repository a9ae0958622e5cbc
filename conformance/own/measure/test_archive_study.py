"""The study of archived chunks: its questions, its arms, its answers, and tables that count right."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("bm25s")
pytest.importorskip("transformers", reason="the study drives a model")

import torch

from conformance.measure.studies.archive.__main__ import main
from conformance.measure.studies.archive.baselines import read
from conformance.measure.studies.archive.latency import latencies
from conformance.measure.studies.archive.pins import OtherPins
from conformance.measure.studies.archive.plan import SELECTED, SLICE, Plan, Talk, talks_and_pins
from conformance.measure.studies.archive.report import (
    Outcomes,
    compared,
    detectable,
    interaction,
    markdown,
    outcomes,
    penalised,
)
from conformance.measure.studies.archive.rules import ARMS, Scene, Shelf
from conformance.measure.studies.archive.run import answered, run_plan, scene_of
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.library import vocabulary_of
from models_integration.model.rotation import plain_layers, recognise
from models_integration.pocket.training.chat import CLOSE, asked_behind
from models_integration.pocket.training.facts import is_held_out_value
from models_integration.pocket.training.talk import KINDS
from models_integration.studies.results import Row
from models_integration.studies.subject import Loading, Subject
from reference.statistics import mcnemar_power
from spec.errors import SpecError

FEW = Plan(2, ("text", "text, full", "raw", "full", "A", "B", "C", "D"), first=200_000)


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    return Loading("chat", "numpy").subject()


@pytest.fixture(scope="module")
def talks(subject: Subject) -> list[Talk]:
    return talks_and_pins(subject, FEW)[0]


@pytest.fixture(scope="module")
def scene(subject: Subject) -> Scene:
    return first_scene(subject)


def first_scene(subject: Subject) -> Scene:
    talks, pins = talks_and_pins(subject, FEW)
    shelf = Shelf(subject.model, recognise(subject.model), vocabulary_of(subject.tokenizer))
    return scene_of(subject, shelf, talks[0], talks[0].asked[0], pins)


def test_a_value_is_unique_to_the_true_turn(subject: Subject, talks: list[Talk]) -> None:
    assert talks == talks_and_pins(subject, FEW)[0]
    for talk in talks:
        texts = [subject.tokenizer.decode(list(ids)) for ids in talk.chunks["turn"]]
        assert len(texts) == 18
        assert [asked.question.kind for asked in talk.asked] == list(KINDS)
        for asked in talk.asked:
            question = asked.question
            assert [at for at, text in enumerate(texts) if question.value in text] == [question.turn]
            assert is_held_out_value(int(question.value))
            assert asked.text.endswith(question.text)
            assert asked.organic == (asked.text != question.text)
            assert question.answer.endswith(f"is {question.value}.")


def test_kinds_are_what_they_say(subject: Subject) -> None:
    """An update's stale turn comes before, in the same words; a topic's turn opens with its subject."""
    talks, _ = talks_and_pins(subject, Plan(12, ("text",), first=200_000))
    for talk in talks:
        texts = [str(subject.tokenizer.decode(list(ids))) for ids in talk.chunks["turn"]]
        _, topic, update, chain = (asked.question for asked in talk.asked)
        stated = update.answer.removesuffix(f"{update.value}.")
        assert [at for at, text in enumerate(texts) if stated in text][-1] == update.turn
        assert sum(stated in text for text in texts) == 2
        opening = texts[topic.turn].partition(".")[0]
        assert opening.endswith(topic.answer.partition(" for ")[2].partition(" is ")[0])
        assert "Its " in texts[topic.turn]
        partner, _, end = chain.answer.partition(". ")
        assert sum(partner + "." in text for text in texts) == sum(end in text for text in texts) == 1


def test_cuts_are_the_same_tokens(talks: list[Talk], subject: Subject) -> None:
    for talk in talks:
        stream = [token for ids in talk.chunks["turn"] for token in ids]
        for cut in ("arbitrary", "sentence"):
            assert [token for ids in talk.chunks[cut] for token in ids] == stream
            assert max(map(len, talk.chunks[cut])) <= SLICE
        assert {len(ids) for ids in talk.chunks["arbitrary"][:-1]} == {SLICE}
        assert all(ids[-1] in subject.sentence_ends for ids in talk.chunks["sentence"][:-1])


def test_selections_are_pinned(subject: Subject) -> None:
    talks, pins = talks_and_pins(subject, FEW)
    assert pins == talks_and_pins(subject, FEW)[1]
    assert len({each.digest for each in pins.values()}) == 3
    for cut, each in pins.items():
        assert {len(set(names)) for names in each.chosen.values()} == {SELECTED}
        names = {f"{talk.index}.{at:02}" for talk in talks for at in range(len(talk.chunks[cut]))}
        assert {name for chosen in each.chosen.values() for name in chosen} <= names


def test_every_arm_holds_the_chunks_behind_the_session(scene: Scene) -> None:
    """Sessions of all arms see the tokens that they say; only layer-split ones store less of them."""
    raw = sum(map(len, scene.chunks["turn"]))
    full = sum(len(scene.shelf.chunk(ids, "full")[0].ids) for ids in scene.chunks["turn"])
    session = len(scene.case().session)
    with torch.no_grad():
        for name, arm in ARMS.items():
            cache = arm.session(scene)
            seen = cache.get_seq_length()
            if name in ("text", "raw"):
                assert seen == session + raw
            elif name in ("full", "text, full", "no_shift", "per_head, 4 bits", "upper half wrapped"):
                assert seen == session + full
            elif arm.family in ("fillers", "drift"):
                assert seen > session + (raw if name.endswith("raw") else full) - 1
            stored = [len(layer.stored_positions()[0]) for layer in cache.full_layers]
            assert name.endswith("alone") == (min(stored) < seen), name
            assert max(stored) == seen


def test_half_wrapped_layers_are_the_wrapped_and_the_raw_ones(scene: Scene) -> None:
    """Layers of the wrapped half equal those of `full`; the first layer never depends on a wrapper."""
    with torch.no_grad():
        full, upper, lower = (plain_layers(ARMS[name].session(scene)) for name in (
            "full", "upper half wrapped", "lower half wrapped",
        ))
    half = len(full) // 2
    for index, layer in enumerate(full):
        same, other = (upper, lower) if index >= half else (lower, upper)
        assert torch.equal(same[index].keys, layer.keys)
        assert torch.equal(same[index].values, layer.values)
        distance = float((other[index].values - layer.values).norm() / layer.values.norm())
        assert (distance < 1e-5) == (index == 0)


@pytest.mark.parametrize("name", ["text, full", "full", "upper half alone", "12 turns: raw"])
def test_the_answer_is_that_of_decoding_token_by_token(
    name: str, subject: Subject, scene: Scene, talks: list[Talk],
) -> None:
    asked = talks[0].asked[0]
    model = subject.model
    with torch.no_grad():
        found = answered(subject, ARMS[name].session(scene), asked)
        cache = ARMS[name].session(scene)
        ids: list[int] = subject.tokenizer(asked_behind(asked.text), add_special_tokens=False).input_ids
        answer: list[int] = []
        with layer_masks(model, cache):
            while CLOSE not in subject.tokenizer.decode(answer) and len(answer) < 40:
                logits = model(input_ids=torch.tensor([ids]), past_key_values=cache).logits
                ids = [int(logits[0, -1].argmax())]
                answer += ids
    assert found == subject.tokenizer.decode(answer)


def test_text_answers_with_the_true_chunk_and_not_without_it(subject: Subject, scene: Scene, talks: list[Talk]) -> None:
    asked = talks[0].asked[0]
    with torch.no_grad():
        assert asked.question.value in answered(subject, ARMS["text, full"].session(scene), asked)
        assert asked.question.value not in answered(subject, read(scene.case(), scene.case().session), asked)


def row(index: int, right: dict[str, list[int]], pins: str = "p") -> Row:
    questions = [
        {"kind": kind, "organic": at == 0, "selected": True, "right": {arm: each[at] for arm, each in right.items()}}
        for at, kind in enumerate(KINDS)
    ]
    return {"conversation": index, "arms": list(right), "pins": {"turn": pins}, "questions": questions}


ROWS = [row(0, {"raw": [1, 0, 0, 1], "full": [1, 1, 1, 0]}), row(1, {"raw": [0, 0, 0, 0], "full": [0, 1, 1, 1]})]


def test_pairs_are_counted() -> None:
    found = compared(outcomes(ROWS), "full", "raw")
    assert (found.lost, found.won, found.mean) == (1, 5, 0.5)
    assert found.p == 14 / 64
    # Two conversations: both of the first (+1 of 4), both of the second (+3 of 4), or one of each.
    assert (found.clustered.low, found.clustered.high) == (0.25, 0.75)


def test_different_pins_are_not_compared() -> None:
    with pytest.raises(OtherPins):
        outcomes([ROWS[0], row(1, {"raw": [0] * 4, "full": [0] * 4}, pins="q")])


def test_a_penalty_takes_synthetic_answers_from_every_arm() -> None:
    ones = np.ones(100)
    found = Outcomes(
        {"raw": ones, "full": ones}, np.arange(100), ["plain"] * 100, np.arange(100) < 40, np.ones(100, dtype=bool),
    )
    after = penalised(found, 0.1)
    assert after.right["raw"].sum() == 94
    assert np.array_equal(after.right["raw"], after.right["full"])
    assert after.right["raw"][:40].all()


def test_the_interaction_is_the_difference_of_differences() -> None:
    cells = {"A": [0, 0, 0, 0], "B": [1, 0, 0, 0], "C": [1, 1, 0, 0], "D": [1, 1, 1, 1]}
    mean, interval = interaction(outcomes([row(0, cells)]))
    assert mean == interval.low == interval.high == 0.25


def test_a_detectable_difference_has_the_power() -> None:
    least = detectable(100, 0.2)
    assert least is not None
    assert mcnemar_power(100, 0.2, least) >= 0.8 > mcnemar_power(100, 0.2, least - 2e-3)
    assert detectable(20, 0.1) is None


def test_unknown_arms_and_empty_studies_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^arm = "):
        Plan(1, ("nobody",))
    with pytest.raises(SpecError, match=r"^conversations = "):
        Plan(0)


def test_a_second_run_goes_on_from_what_is_stored(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    told: list[str] = []
    rows = list(run_plan(subject, FEW, path, told.append))
    assert len(told) == 8
    before = path.read_bytes()
    assert list(run_plan(subject, FEW, path, told.append)) == rows
    assert path.read_bytes() == before
    tables = markdown(rows)
    for part in ("primary", "Interaction", "synthetic, penalty 0.075", "smallest difference at power 0.8"):
        assert part in tables


def test_the_first_token_is_timed(subject: Subject, talks: list[Talk]) -> None:
    lines = latencies(subject, talks, 1, (1, 3), lambda what: None).splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["1", "3"]


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--queries", "4", "--arms", "text;raw;full", "--rounds", "0", "--out", str(tmp_path)])
    assert "n = 4 questions of 1 conversations" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        "archive-study.jsonl", "archive-study.md", *(f"archive-study-pins-{cut}.json" for cut in (
            "turn", "arbitrary", "sentence",
        )),
    }
    with pytest.raises(SpecError):
        main(["--queries", "6"])
