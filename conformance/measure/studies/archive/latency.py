"""Time to the first token: archived chunks in memory, archived chunks on the disk, and their text."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from conformance.measure.studies.archive.baselines import Case, inject, read, text_wrapped
from conformance.measure.studies.archive.plan import Talk
from conformance.measure.studies.archive.rules import Scene, Shelf
from conformance.measure.studies.archive.run import ROOM
from models_integration.archive.library import Library, vocabulary_of
from models_integration.archive.store import Archive
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import recognise
from models_integration.pocket.training.chat import asked_behind
from models_integration.studies.subject import Subject

__all__ = ["COUNTS", "latencies"]

COUNTS = (1, 3, 12, 48)
FORM, TENANT = "full", "study"


@torch.no_grad()
def latencies(
    subject: Subject, talks: Sequence[Talk], rounds: int, counts: Sequence[int], progress: Callable[[str], None],
) -> str:
    """Medians over rounds, in each of which all three are timed, of chunks in the form `full`.

    A round reads the session anew, and ends with the logits behind the question. From the disk, chunks are read from
    the page cache, proved by their digests, and turned.
    """
    rotary, vocabulary = recognise(subject.model), vocabulary_of(subject.tokenizer)
    shelf = Shelf(subject.model, rotary, vocabulary)
    chunks = [ids for talk in talks for ids in talk.chunks["turn"]]
    question = list(vocabulary.encode(asked_behind(talks[0].asked[0].text)))
    lines = [
        "| chunks | tokens | memory, ms | disk, ms | text, ms | text / memory | text / disk |", "|" + " --- |" * 7,
    ]
    with TemporaryDirectory() as folder, Archive(Path(folder)) as archive:
        library = Library(archive, subject.model, vocabulary, TENANT, subject.identity)
        for count in counts:
            chosen = tuple(chunks[number % len(chunks)] for number in range(count))
            keys = [library.put(list(ids), FORM) for ids in chosen]
            case = Scene(shelf, {"turn": chosen}, (), (), ROOM).case(FORM)
            makers = (partial(inject, case), partial(_from_disk, case, library, keys), partial(text_wrapped, case))
            spent: list[list[float]] = [[], [], []]
            for _ in range(rounds):
                for seconds, make in zip(spent, makers, strict=True):
                    seconds.append(_first_token(subject.model, make, question))
                progress(f"first token, {count} chunks")
            memory, disk, text = (1e3 * median(seconds) for seconds in spent)
            tokens = sum(len(chunk.visible) for chunk in case.wrapped)
            lines.append(
                f"| {count} | {tokens} | {memory:.1f} | {disk:.1f} | {text:.1f} | {text / memory:.2f} |"
                f" {text / disk:.2f} |"
            )
    return "\n".join(lines)


def _from_disk(case: Case, library: Library, keys: Sequence[str]) -> RetainedCache:
    return library.inject(read(case, case.session), keys, case.room).cache


def _first_token(model: Any, make: Callable[[], RetainedCache], question: Sequence[int]) -> float:
    began = perf_counter()
    model(input_ids=torch.tensor([list(question)]), **{CACHE: make()}, logits_to_keep=1)
    return perf_counter() - began
