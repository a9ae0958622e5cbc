"""Archived chunks against their text, and continuous batching with eviction: both need a model of transformers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from accelerated.triton_gpu.device import default_device
from conformance.measure.gpu.measure import median_ms, say
from conformance.measure.gpu.models import Scale, Subject
from conformance.measure.gpu.report import Report, Table
from conformance.measure.paged import Load, served
from models_integration import RetainedCache, StreamingLLM
from models_integration.archive.splice import Chunk, computed, splice
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import Rotary, frequencies_at, recognise

CHUNKS = (1, 3, 5)
QUESTION = 32
"""Tokens behind the chunks."""
SAID = ("seconds", "forwards", "first token p50, p99", "between tokens p50, p99", "most in flight", "freed pages")


def splices(report: Report, scale: Scale, subject: Subject) -> None:
    """Time to the first token behind spliced chunks, which lie on the device or in the host's memory, and their text.

    A chunk is what one forward over it alone gave: reading the text computes more than a splice has, and not the same.
    """
    rotary, n = recognise(subject.model), scale.chunk
    ids = subject.prompt(CHUNKS[-1] * n + QUESTION).tolist()
    with torch.no_grad():
        chunks = [computed(subject.model, ids[n * at : n * (at + 1)], rotary) for at in range(CHUNKS[-1])]
    stored = {"the device": chunks, "the host": [_moved(chunk, "cpu") for chunk in chunks]}
    for count in CHUNKS:
        say(f"first token, {count} chunks")
        text = [*ids[: n * count], *ids[-QUESTION:]]
        bare = median_ms(partial(_first_token, subject, None, text), scale.rounds)
        report.add(f"first token, text of {count} chunks of {n} tokens", bare, "ms")
        for where, there in stored.items():
            took = median_ms(partial(_behind, subject, there[:count], rotary, text), scale.rounds)
            report.add(f"first token, {count} chunks spliced from {where}", took, "ms")
            report.add(f"its text against {count} chunks from {where}", bare / took, "times")


def _moved(chunk: Chunk, device: torch.device | str) -> Chunk:
    layers: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = {
        index: (keys.to(device), values.to(device)) for index, (keys, values) in chunk.layers.items()
    }
    return replace(chunk, layers=layers)


def _behind(subject: Subject, chunks: list[Chunk], rotary: Rotary, text: list[int]) -> None:
    cache = RetainedCache(subject.model.config)
    here = [_moved(chunk, default_device()) for chunk in chunks]
    splice(cache, here, frequencies_at(subject.model, rotary, len(text)))
    _first_token(subject, cache, text[-QUESTION:])


@torch.no_grad()
def _first_token(subject: Subject, cache: RetainedCache | None, ids: list[int]) -> None:
    row = torch.tensor([ids], device=default_device())
    subject.model(input_ids=row, **{CACHE: cache}, use_cache=True, logits_to_keep=1)


def paged(report: Report, scale: Scale, subject: Subject) -> None:
    """The same requests in the same pool, without eviction and with it; StreamingLLM's choice costs next to nothing."""
    load = Load(*scale.load)
    texts = subject.prompt(load.requests * load.tokens).reshape(load.requests, -1).tolist()
    rows = []
    for name, policy in (("no eviction", None), ("streaming-llm, 0.25", StreamingLLM(0.25))):
        say(f"continuous batching, {name}")
        found = served(subject.model, texts, load, policy)
        rows.append((name, *(str(found.get(what, "-")) for what in SAID)))
    each = f"{load.tokens} + {load.new} tokens"
    title = f"Continuous batching of {load.requests} requests of {each}, room for {load.pool}"
    report.tables.append(Table(title, ("policy", *SAID), tuple(rows)))
