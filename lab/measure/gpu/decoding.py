"""Measurements of decoding after a long prompt, and of archived chunks against their text.

All measurements need a model of transformers, because only `models_integration` stores the kept sets of heads, and
chunks.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from accelerated.triton_gpu.device import default_device
from lab.measure.gpu.measure import Report, Table, median_ms, say, synchronize
from lab.measure.gpu.models import Scale, Subject
from models_integration import NamedPolicy, RetainedCache, RetentionPolicy
from models_integration.archive.splice import Chunk, computed, splice
from models_integration.attention.cached_attention import attended_in_runs, variable_length
from models_integration.cache.ragged_layer import HeadLayout
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import Rotary, frequencies_at, recognise

H_KV, G, D = 8, 4, 128


class Heads:
    """Flat keys and values of KV heads whose lengths differ as in Ada-KV, and one query (1, H, 1, d)."""

    def __init__(self, mean: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        share = torch.rand(H_KV, generator=generator) ** 2 + 0.2
        self.lengths = (share / share.sum() * mean * H_KV).int().clamp(min=8).tolist()
        self.keys, self.values, query = (
            torch.randn(rows, D, generator=generator).to(device, dtype) for rows in (*2 * [sum(self.lengths)], H_KV * G)
        )
        self.query = query[None, :, None]
        self.views = list(zip(
            (one[None, None] for one in torch.split(self.keys, self.lengths)),
            (one[None, None] for one in torch.split(self.values, self.lengths)), strict=True,
        ))


def per_head(heads: Heads) -> Tensor:
    """Run one call for each KV head, over a view, without copy and padding."""
    parts = [
        sdpa(heads.query[:, G * head : G * (head + 1)], k, v, enable_gqa=True)
        for head, (k, v) in enumerate(heads.views)
    ]
    return torch.cat(parts, dim=1)


def per_head_rows(heads: Heads) -> Tensor:
    """Run one call for each KV head, with the queries of a group as rows of one head."""
    parts = [
        sdpa(heads.query[:, G * head : G * (head + 1)].transpose(1, 2), k, v)
        for head, (k, v) in enumerate(heads.views)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def padded(heads: Heads) -> Tensor:
    """Run attention once with a mask, over a dense copy in which each head has the length of the longest head.

    The copy is made for each query.
    """
    longest = max(heads.lengths)
    k, v = (heads.query.new_zeros(1, H_KV, longest, D) for _ in range(2))
    mask = heads.query.new_zeros(1, H_KV, 1, longest, dtype=torch.bool)
    for head, ((keys, values), n) in enumerate(zip(heads.views, heads.lengths, strict=True)):
        k[0, head, :n], v[0, head, :n], mask[0, head, 0, :n] = keys[0, 0], values[0, 0], True
    query = heads.query.reshape(1, H_KV, G, D)
    return sdpa(query, k, v, attn_mask=mask).reshape(1, -1, 1, D)


def nested(heads: Heads) -> Tensor:
    """Run attention on torch's jagged nested tensors."""
    offsets = torch.tensor([0, *heads.lengths], device=heads.keys.device).cumsum(0)
    k, v = (
        torch.nested.nested_tensor_from_jagged(one, offsets).unsqueeze(2).transpose(1, 2)
        for one in (heads.keys, heads.values)
    )
    rows = torch.arange(0, H_KV * G + 1, G, device=heads.keys.device)
    query = torch.nested.nested_tensor_from_jagged(heads.query.reshape(-1, D), rows).unsqueeze(2).transpose(1, 2)
    output: Tensor = sdpa(query, k, v)
    return output.transpose(1, 2).values().reshape(1, -1, 1, D)


def in_runs(heads: Heads) -> Tensor:
    """Run the attention of kvspec: the same kernel over runs of each KV head, whose results are merged."""
    layout = HeadLayout(tuple(torch.empty(length, device="cpu") for length in heads.lengths))
    output = attended_in_runs(variable_length(), heads.query, heads.keys, heads.values, layout, None)
    return output.transpose(1, 2)


def whole_heads(heads: Heads) -> Tensor:
    """Run flash attention over sequences of different lengths.

    Each KV head is a sequence, and the queries of its group are the rows.
    """
    from torch.nn.attention.varlen import varlen_attn

    rows, ends = (
        torch.tensor([0, *lengths], device=heads.keys.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (H_KV * [G], heads.lengths)
    )
    query, keys, values = (one.reshape(-1, 1, D) for one in (heads.query, heads.keys, heads.values))
    actual = varlen_attn(query, keys, values, rows, ends, G, max(heads.lengths))
    assert isinstance(actual, Tensor)
    return actual.reshape(1, -1, 1, D)


ROUTES: dict[str, Callable[[Heads], Tensor]] = {
    "per head": per_head, "per head, group as rows": per_head_rows, "padded": padded, "nested": nested,
}
OF_CUDA = {"variable length": whole_heads, "variable length, in runs": in_runs}


BUDGETS = (0.5, 0.25, 0.1)
OF_HEADS = ("adakv", "snapkv", "nestedkv")
ROWS = 8
AT_THE_PROMPT = ("nestedkv", "snapkv", "expected-attention", "keydiff", "knorm")
AT_A_STEP = ("tova", "h2o")
ERROR = {"bfloat16": 2e-2, "float32": 1e-4}


def ragged(report: Report, scale: Scale) -> None:
    """Measure every route of attention over heads of different lengths, after a check against the first route.

    If a route is missing, the report notes the reason.
    """
    device, dtype = default_device(), getattr(torch, scale.dtype)
    routes = ROUTES | (OF_CUDA if device.type == "cuda" else {})
    for mean in scale.ragged:
        say(f"ragged heads, {mean} tokens on average")
        heads = Heads(mean, device, dtype)
        expected = ROUTES["per head"](heads)
        for name, route in routes.items():
            try:
                error = float((route(heads) - expected).abs().max())
            except (RuntimeError, ImportError, NotImplementedError) as missing:
                report.notes.append(f"Ragged heads, {name}: {str(missing).splitlines()[0]}")
                continue
            assert error < ERROR[scale.dtype], f"{name}: {error}"
            took = median_ms(partial(route, heads), 10 * scale.rounds)
            report.add(f"one query over heads of {mean} tokens on average, {name}", took, "ms")


def decoding(report: Report, scale: Scale, subject: Subject) -> None:
    """Measure tokens per second after a long prompt, for the full cache and for policies with sets for each head."""
    _beside_the_full_cache(report, scale, subject, OF_HEADS, 1)


def batched(report: Report, scale: Scale, subject: Subject) -> None:
    """Measure decoding with eight rows, for the full cache and for the policy whose heads differ in length."""
    _beside_the_full_cache(report, scale, subject, OF_HEADS[:1], ROWS)


def _beside_the_full_cache(
    report: Report, scale: Scale, subject: Subject, names: tuple[str, ...], batch: int,
) -> None:
    say(f"decoding behind {scale.behind} tokens, batch {batch}")
    full = tokens_a_second(scale, subject, None, scale.behind, batch)
    rows = [("full cache", "1", f"{full:.1f}", "1.00")]
    try:
        for name in names:
            for budget in BUDGETS:
                say(f"decoding, {name}, {budget}, batch {batch}")
                result = tokens_a_second(scale, subject, NamedPolicy(name, budget), scale.behind, batch)
                rows.append((name, str(budget), f"{result:.1f}", f"{result / full:.2f}"))
    finally:
        columns = ("policy", "budget", "tokens a second", "times the full cache")
        report.tables.append(Table(f"Decoding behind {scale.behind} tokens, batch {batch}", columns, tuple(rows)))


def policies(report: Report, scale: Scale, subject: Subject) -> None:
    """Measure the time that policies add to a prompt of the headline length, and that TOVA and H2O add to a step."""
    ids, rounds = subject.prompt(scale.headline), min(3, scale.rounds)
    bare = median_ms(lambda: subject.forward(ids), rounds)
    report.add(f"prefill with a full cache, n = {len(ids)}", bare, "ms")

    def under(name: str) -> None:
        with NamedPolicy(name, 0.25)(subject.model):
            subject.forward(ids)

    for name in AT_THE_PROMPT:
        say(f"a prompt under {name}")
        report.add(f"what {name} adds to it", 100 * (median_ms(partial(under, name), rounds) / bare - 1), "%")
    step = 1 / tokens_a_second(scale, subject, None, scale.slots)
    for name in AT_A_STEP:
        seconds = 1 / tokens_a_second(scale, subject, NamedPolicy(name, scale.slots), scale.slots)
        report.add(f"what {name} adds to a step at {scale.slots} slots", 100 * (seconds / step - 1), "%")


@torch.no_grad()
def tokens_a_second(scale: Scale, subject: Subject, policy: RetentionPolicy | None, n: int, batch: int = 1) -> float:
    """Return the tokens per second of all rows, after a prompt of n tokens. The first three steps only warm up."""
    if policy is None:
        return _steps(scale, subject.model, _read(subject, n, batch)[CACHE], batch)
    with policy(subject.model) as run:
        _read(subject, n, batch)
        return _steps(scale, subject.model, run.cache, batch)


def _read(subject: Subject, n: int, batch: int) -> Any:
    ids = torch.from_numpy(np.resize(subject.prompt(batch * n), (batch, n))).to(default_device())
    return subject.model(input_ids=ids, use_cache=True, logits_to_keep=1)


def _steps(scale: Scale, model: Any, cache: Any, batch: int) -> float:
    took = []
    for step in range(3 + scale.new_tokens):
        synchronize()
        start = time.perf_counter()
        model(input_ids=torch.full((batch, 1), 3 + step, device=default_device()), **{CACHE: cache})
        synchronize()
        took.append(time.perf_counter() - start)
    return batch * scale.new_tokens / sum(took[3:])


CHUNKS = (1, 3, 5)
QUESTION = 32
"""Number of tokens after the chunks."""


def splices(report: Report, scale: Scale, subject: Subject) -> None:
    """Measure the time to the first token after spliced chunks on the device or the host, and after their text.

    A chunk is the result of one forward pass over only the chunk. Reading the text needs more computation than the
    splice, and gives different keys and values.
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
