"""Running the study: every question under every arm, one stored row for each conversation."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.measure.studies.archive.pins import Pins
from conformance.measure.studies.archive.plan import CUTS, Asked, Plan, Talk, encoder, key_of, talks_and_pins
from conformance.measure.studies.archive.rules import ARMS, Scene, Shelf
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.library import vocabulary_of
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import recognise
from models_integration.pocket.training.chat import CLOSE, asked_behind, turn
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from spec import SPEC_VERSION

__all__ = ["ROOM", "answered", "run_plan", "scene_of"]

NEW_TOKENS = 40
ROOM = 128
"""Tokens of a question and its answer, at most."""


def scene_of(subject: Subject, shelf: Shelf, talk: Talk, asked: Asked, pins: Mapping[str, Pins]) -> Scene:
    """The chunks that were selected for a question, in the order of the conversation."""
    encode = encoder(subject)
    chunks = {
        cut: tuple(
            talk.chunks[cut][int(name.rpartition(".")[2])] for name in sorted(pins[cut].chosen[key_of(talk, asked)])
        )
        for cut in CUTS
    }
    fillers = tuple(tuple(encode(text)) for text in talk.fillers)
    turns = tuple(tuple(encode(turn("user", text))) for text in talk.talk)
    return Scene(shelf, chunks, fillers, turns, ROOM + sum(map(len, turns)))


def answered(subject: Subject, cache: RetainedCache, asked: Asked) -> str:
    """The greedy answer to a question, behind what the cache holds.

    The reference answer is read with the question in one forward, and taken as far as it is what greedy decoding
    writes; from there on, tokens are decoded one by one.
    """
    model: Any = subject.model
    encode = encoder(subject)
    question, draft = encode(asked_behind(asked.text)), encode(asked.question.answer + CLOSE)
    with layer_masks(model, cache):
        ids = [*question, *draft]
        logits = model(input_ids=torch.tensor([ids]), **{CACHE: cache}, logits_to_keep=len(draft) + 1).logits
        best = logits[0].argmax(-1).tolist()
        taken = next((count for count, token in enumerate(draft) if best[count] != token), len(draft))
        answer = draft[:taken]
        if taken < len(draft):
            cache.crop(taken - len(draft))
            answer.append(best[taken])
        while answer[-1] not in subject.stop_ids and len(answer) < NEW_TOKENS:
            logits = model(input_ids=torch.tensor([answer[-1:]]), **{CACHE: cache}).logits
            answer.append(int(logits[0, -1].argmax()))
    return str(subject.tokenizer.decode(answer))


@torch.no_grad()
def run_plan(subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Each conversation's row, from the results file where it is there already."""
    talks, pins = talks_and_pins(subject, plan)
    digests = {cut: each.digest for cut, each in pins.items()}
    rotary, vocabulary = recognise(subject.model), vocabulary_of(subject.tokenizer)
    for talk in talks:
        identity: Row = {
            "conversation": talk.index, "arms": list(plan.arms), "pins": digests, "model": subject.name,
            "spec_version": SPEC_VERSION,
        }
        row = find_row(load_rows(path), identity)
        if row is None:
            shelf, questions = Shelf(subject.model, rotary, vocabulary), []
            for asked in talk.asked:
                scene = scene_of(subject, shelf, talk, asked, pins)
                selected = f"{talk.index}.{asked.question.turn:02}" in pins["turn"].chosen[key_of(talk, asked)]
                right = {
                    name: int(asked.question.value in answered(subject, ARMS[name].session(scene), asked))
                    for name in plan.arms
                }
                questions.append(
                    {"kind": asked.question.kind, "organic": asked.organic, "selected": selected, "right": right}
                )
                progress(f"{talk.index}: {asked.question.kind}")
            row = {**identity, "questions": questions}
            append_row(path, row)
        else:
            for _ in talk.asked:
                progress(f"{talk.index} (stored)")
        yield row
