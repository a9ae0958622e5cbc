"""S1 on the device against its goals, on inputs made there, and its share of a whole prefill."""

from functools import partial
from typing import Any

import numpy as np
import torch

from accelerated.triton_gpu import kernels
from accelerated.triton_gpu.backend import BACKEND
from accelerated.triton_gpu.device import default_device
from conformance.measure.benchmarks.data import ARCHETYPES, VOCABULARY, torch_s1, zipf_tokens
from conformance.measure.gpu.measure import Watch, median_ms, peak_bytes, say
from conformance.measure.gpu.models import Scale, Subject
from conformance.measure.gpu.report import Report, Table

Tensor = torch.Tensor
MATCH = 10.0  # what a match adds to a logit


def first_layer(scale: Scale, n: int, kind: str) -> tuple[Tensor, Tensor]:
    """q (H, n, d) and k (H_kv, n, d) after rotation; "mixed" or "peaky" as there, the same statistics."""
    H, H_kv, d, dtype = scale.H, scale.H_kv, scale.d, getattr(torch, scale.dtype)
    torch.manual_seed(n)
    device = default_device()
    q = torch.empty(H, n, d, device=device, dtype=dtype)
    k = torch.empty(H_kv, n, d, device=device, dtype=dtype)
    tokens = torch.from_numpy(zipf_tokens(n, np.random.default_rng(n))).to(device)
    for head in range(H_kv):
        rows, keys = _shared(ARCHETYPES[head % len(ARCHETYPES)] if kind == "mixed" else "diffuse", tokens, d)
        noise, near = (0.5, 0.8) if kind == "mixed" else (2.0, 0.0)
        k[head] = _rotated(keys + noise * torch.randn(n, d, device=device)).to(dtype)
        for query in range(H // H_kv):
            mine = (near + 0.1 * query) * rows + noise * torch.randn(n, d, device=device)
            q[head * (H // H_kv) + query] = _rotated(mine).to(dtype)
    return q, k


def _shared(archetype: str, tokens: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """What the queries and the keys of one head have in common."""
    n, length, device = len(tokens), (MATCH * d**0.5) ** 0.5, tokens.device
    if archetype == "diffuse":
        return torch.zeros(n, d, device=device), torch.zeros(n, d, device=device)
    if archetype == "token":
        table = torch.nn.functional.normalize(torch.randn(VOCABULARY, d, device=device), dim=1)
        rows = length * table[tokens]
        return rows, rows
    v = torch.randn(d, device=device)
    if archetype == "sink":
        v[: d // 4] = v[d // 2 : d // 2 + d // 4] = 0
    rows = (length * v / v.norm()).repeat(n, 1)
    keys = rows.clone()
    if archetype == "sink":
        keys[1:] = 0
    return rows, keys


def _rotated(x: Tensor, base: float = 5e5) -> Tensor:
    n, half = x.shape[0], x.shape[1] // 2
    at = torch.arange(n, device=x.device, dtype=torch.float64)
    angle = at[:, None] * base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    low, high = x[:, :half], x[:, half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)



# Milliseconds by length: what is asked, and what is aimed at.
GOALS = {4096: (1.0, 0.4), 8192: (2.0, 1.0), 16384: (5.0, 3.0), 32768: (15.0, 10.0), 131072: (220.0, 150.0)}


def run_s1(scale: Scale, q: Any, k: Any, lse: Any = None) -> Any:
    """The stage as it is called: checks, kernels, and the records on the host."""
    return BACKEND.require_crystal().coattention(
        q, k, np.arange(q.shape[1]), scale.parameters, scale.d**-0.5, None, lse
    )


def log_sum_exp(q: Any, k: Any) -> Any:
    """What the forward's attention knows of each row, (H, n)."""
    H, n, d = q.shape
    lse = torch.empty(H, n, device=q.device)
    for h in range(H):
        for first in range(0, n, 1024):
            rows = slice(first, min(n, first + 1024))
            S = q[h, rows].float() @ k[h // (H // len(k)), : rows.stop].float().T * d**-0.5
            later = torch.ones_like(S, dtype=torch.bool).triu(first + 1)
            lse[h, rows] = torch.logsumexp(S.masked_fill_(later, -torch.inf), 1)
    return lse


def s1(report: Report, scale: Scale) -> None:
    """Medians by length on both data sets; at the headline the workspace, the kernels, and eager torch."""
    for n in scale.lengths:
        for kind in ("mixed", "peaky"):
            say(f"S1, {kind}, n = {n}")
            run = partial(run_s1, scale, *first_layer(scale, n, kind))
            goal, aim = GOALS.get(n, (None, None)) if kind == "mixed" else (None, None)
            took = median_ms(run, scale.rounds if n <= scale.headline else 3)
            report.add(f"S1, {scale.dtype}, n = {n}, {kind}", took, "ms", goal, aim)
            if n == scale.headline:
                lse = log_sum_exp(*run.args[1:])
                took_less = median_ms(partial(run, lse), scale.rounds)
                report.add(f"the same with the forward's log-sum-exp, n = {n}, {kind}", took_less, "ms")
                _workspace(report, n, kind, run)
                _kernels(report, n, kind, run)
                _against_eager(report, scale, n, kind, took, run)


def _workspace(report: Report, n: int, kind: str, run: Any) -> None:
    memory = peak_bytes(run)
    used = None if memory is None else (memory[1] - memory[0]) / 1e9
    report.add(f"workspace of S1, n = {n}, {kind}", used, "GB", 1.0)


def _kernels(report: Report, n: int, kind: str, run: Any) -> None:
    """Where the time goes; empty where no device runs the kernels."""
    activity = torch.profiler.ProfilerActivity
    on = [activity.CUDA] if default_device().type == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=on) as profile:
        run()
    took = {event.key: event.device_time_total / 1000 for event in profile.key_averages()}
    rows = tuple((name, f"{took[name]:.3f}") for name in kernels.__all__ if name in took)
    report.tables.append(Table(f"Kernels of S1, n = {n}, {kind}", ("kernel", "ms"), rows))


def _against_eager(report: Report, scale: Scale, n: int, kind: str, took: float, run: Any) -> None:
    say(f"eager torch, {kind}, n = {n}")
    q, k = run.args[1:]
    eager = median_ms(lambda: torch_s1(q, k), min(3, scale.rounds))
    report.add(f"S1 in eager torch, n = {n}, {kind}", eager, "ms")
    goal = 8.0 if kind == "mixed" else None
    report.add(f"S1 against eager torch, n = {n}, {kind}", eager / took, "times", goal, at_least=True)


def whole_prefill(report: Report, scale: Scale, subject: Subject) -> None:
    """What S1 is of a prefill of the whole model, and what that prefill takes in memory."""
    ids, watch = subject.prompt(scale.headline), Watch(BACKEND)

    def run() -> None:
        subject.generate(ids, watch.backend, scale, 0)

    say(f"a whole prefill, n = {len(ids)}")
    took = median_ms(run, min(3, scale.rounds))
    watch.seconds.clear()
    memory, bare = peak_bytes(run), peak_bytes(lambda: subject.forward(ids))
    report.add(f"prefill with CrystalCache, n = {len(ids)}", took, "ms")
    report.add("share of S1 in it", 100_000 * watch.seconds["coattention"] / took, "%", 1.5)
    report.add("its peak memory, weights included", None if memory is None else memory[1] / 1e9, "GB", 28.0)
    report.add("peak memory of the prefill with a full cache", None if bare is None else bare[1] / 1e9, "GB")
