"""Maximum rates of the device, the time of S1 compared with its goals, and the time of a complete prefill by stage."""

import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from accelerated.triton_gpu import kernels
from accelerated.triton_gpu.backend import BACKEND
from accelerated.triton_gpu.device import default_device
from lab.measure.first_layer import ARCHETYPES, direction, torch_s1, zipf_tokens
from lab.measure.gpu.measure import Report, Table, Watch, median_ms, peak_bytes, say, synchronize
from lab.measure.gpu.models import Scale, Subject
from spec.backend import resolve

Tensor = torch.Tensor


def first_layer(scale: Scale, n: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return q (H, n, d) and k (H_kv, n, d) after rotation, "mixed" or "peaky".

    The statistics are those of `lab.measure.first_layer`.
    """
    H, H_kv, d, dtype = scale.H, scale.H_kv, scale.d, getattr(torch, scale.dtype)
    torch.manual_seed(n)
    device = default_device()
    q = torch.empty(H, n, d, device=device, dtype=dtype)
    k = torch.empty(H_kv, n, d, device=device, dtype=dtype)
    rng = np.random.default_rng(n)
    tokens = zipf_tokens(n, rng)
    for head in range(H_kv):
        archetype = ARCHETYPES[head % len(ARCHETYPES)] if kind == "mixed" else "diffuse"
        rows, keys = (torch.from_numpy(x).to(device).float() for x in direction(archetype, tokens, d, rng))
        noise, near = (0.5, 0.8) if kind == "mixed" else (2.0, 0.0)
        k[head] = _rotated(keys + noise * torch.randn(n, d, device=device)).to(dtype)
        for query in range(H // H_kv):
            mine = (near + 0.1 * query) * rows + noise * torch.randn(n, d, device=device)
            q[head * (H // H_kv) + query] = _rotated(mine).to(dtype)
    return q, k


def _rotated(x: Tensor, base: float = 5e5) -> Tensor:
    n, half = x.shape[0], x.shape[1] // 2
    at = torch.arange(n, device=x.device, dtype=torch.float64)
    angle = at[:, None] * base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    low, high = x[:, :half], x[:, half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)


# Milliseconds by length: the required time, and the aim.
GOALS = {4096: (1.0, 0.4), 8192: (2.0, 1.0), 16384: (5.0, 3.0), 32768: (15.0, 10.0), 131072: (220.0, 150.0)}


def run_s1(scale: Scale, q: Any, k: Any, lse: Any = None) -> Any:
    """Run the stage as kvspec calls it, with checks, kernels, and the records on the host."""
    return BACKEND.require_crystal().coattention(
        q, k, np.arange(q.shape[1]), scale.parameters, scale.d**-0.5, None, lse
    )


def log_sum_exp(q: Any, k: Any) -> Any:
    """Return the log-sum-exp of each row (H, n), as the attention of a forward pass computes it."""
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
    """Measure medians by length on both data sets.

    At the headline length, also measure workspace, kernels and eager torch.
    """
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
                memory = peak_bytes(run)
                used = None if memory is None else (memory[1] - memory[0]) / 1e9
                report.add(f"workspace of S1, n = {n}, {kind}", used, "GB", 1.0)
                _kernels(report, n, kind, run)
                _against_eager(report, scale, n, kind, took, run)


def _kernels(report: Report, n: int, kind: str, run: Any) -> None:
    """Add a table with the time of each kernel. It is empty if no device runs the kernels."""
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
    """Measure the share of S1 in a prefill of the complete model, and the peak memory of the prefill."""
    ids, watch = subject.prompt(scale.headline), Watch(BACKEND)

    def run() -> None:
        subject.generate(ids, BACKEND, scale, 0)

    say(f"a whole prefill, n = {len(ids)}")
    took = median_ms(run, min(3, scale.rounds))
    subject.generate(ids, watch.backend, scale, 0)
    memory, bare = peak_bytes(run), peak_bytes(lambda: subject.forward(ids))
    report.add(f"prefill with CrystalCache, n = {len(ids)}", took, "ms")
    report.add("share of S1 in it", 100_000 * watch.seconds["coattention"] / took, "%", 1.5)
    report.add("its peak memory, weights included", None if memory is None else memory[1] / 1e9, "GB", 28.0)
    report.add("peak memory of the prefill with a full cache", None if bare is None else bare[1] / 1e9, "GB")


LANES, STEPS = 1024, 128


@triton.jit  # type: ignore[untyped-decorator]
def powers(X, steps, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replace x by 2 ** x - 1 in each step: one exponential and one addition, all in registers."""
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    x = tl.load(X + i)
    for _ in range(steps):
        x = tl.exp2(x) - 1.0
    tl.store(X + i, x)


def ceilings(report: Report, scale: Scale) -> None:
    """Measure the rates of products, copies and exponentials, and compute the floor of S1 at the headline length."""
    device, dtype = default_device(), getattr(torch, scale.dtype)
    a, b = (torch.randn(scale.product, scale.product, device=device, dtype=dtype) for _ in range(2))
    product = 2 * scale.product**3 / median_ms(lambda: a @ b, scale.rounds) / 1e9
    report.add(f"product of {scale.product} x {scale.product}, {scale.dtype}", product, "TFLOP/s")
    x = torch.randn(scale.copied, device=device)
    y = torch.empty_like(x)
    moved = 8 * scale.copied / median_ms(lambda: y.copy_(x), scale.rounds) / 1e6
    report.add("copy, read and written", moved, "GB/s")
    z = torch.rand(scale.programs * LANES, device=device)
    exponentials = len(z) * STEPS / median_ms(lambda: powers[(scale.programs,)](z, STEPS, LANES=LANES), scale.rounds)
    report.add("exponentials", exponentials / 1e9, "T/s")
    n = scale.headline
    floor = n * n * scale.H * scale.d / product / 1e9 + n * n * scale.H / 2 / exponentials
    report.add(f"floor of S1 at {n}: its products and its exponentials, one after the other", floor, "ms")


COLUMNS = ("length", "whose", "Forward", "S_i", "CoAttn", "M_i fin.", "Trunks", "Graph + D", "Evict", "End-to-end")
TOTALS = ("length", "whose", "CC overhead", "Forward + CC", "CC % of (Fwd + CC)", "CC % of end-to-end")
# Table 12 of the paper, in seconds on an H100 NVL: COLUMNS from Forward on, then TOTALS from CC overhead on.
PAPER = {
    4096: ("0.92 0.11 0.24 0.01 0.01 0.01 <0.01 3.34", "0.39 1.30 29.8 11.6"),
    8192: ("2.10 0.45 1.03 0.03 0.02 0.01 <0.01 6.74", "1.55 3.65 42.4 23.0"),
    16384: ("5.19 1.56 4.49 0.05 0.05 0.03 0.01 23.11", "6.18 11.37 54.3 26.7"),
    32768: ("14.67 5.55 19.91 0.11 0.11 0.05 0.02 85.45", "25.74 40.40 63.7 30.1"),
}


def profile(report: Report, scale: Scale, subject: Subject) -> None:
    """Add both tables of the time by stage.

    kvspec computes S_i and CoAttn in one pass, so one column of its rows contains the time of both.
    """
    stages: list[tuple[str, ...]] = []
    totals: list[tuple[str, ...]] = []
    for n in scale.profiled:
        say(f"time by stage, n = {n}")
        forward, took, whole = _measured(scale, subject, n)
        evict = took["score"] + took["dissolve"] + took["compaction"]
        columns = (took["coattention"], took["impact"], took["trunks"], took["graph"], evict)
        overhead = sum(columns) + took.get("capture", 0.0)
        cells = (_s(forward), "in CoAttn", *(_s(x) for x in columns), _s(whole))
        shares = (f"{100 * overhead / (forward + overhead):.2f}", f"{100 * overhead / whole:.2f}")
        first, second = PAPER.get(n, ("- " * 8, "- " * 4))
        stages += [(str(n), "paper", *first.split()), (str(n), "here", *cells)]
        sums = (_s(overhead), _s(forward + overhead), *shares)
        totals += [(str(n), "paper", *second.split()), (str(n), "here", *sums)]
    report.tables += [
        Table("Time by stage, seconds (the paper's Table 12)", COLUMNS, tuple(stages)),
        Table("Overhead, seconds (the paper's Table 12)", TOTALS, tuple(totals)),
    ]
    report.notes.append(
        f"Table 12's columns on {subject.name}: medians of three prefills. Forward is a plain prefill with a full"
        " cache; S1 is one pass, hence one column; M_i fin. is S3, Trunks is S2 with the trunks' impact; Evict is S5,"
        f" S6 and the compaction. End-to-end is one generation of {scale.new_tokens} tokens. The paper's own"
        " columns, printed as they are there, leave 45 s of its End-to-end at 32K unexplained (decoding takes"
        " less than one)."
    )


def _measured(scale: Scale, subject: Subject, n: int) -> tuple[float, dict[str, float], float]:
    """Return the seconds of the forward pass alone, of each stage, and of a complete generation."""
    ids = subject.prompt(n)
    forward = median_ms(lambda: subject.forward(ids), min(3, scale.rounds)) / 1000
    runs = []
    for _ in range(min(3, scale.rounds) + 1):
        watch = Watch(resolve("triton"))
        _, beside = subject.generate(ids, watch.backend, scale, 0)
        runs.append({**beside, **watch.seconds})
    took = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    synchronize()
    start = time.perf_counter()
    subject.generate(ids, resolve("triton"), scale, scale.new_tokens)
    synchronize()
    return forward, took, time.perf_counter() - start


def _s(seconds: float) -> str:
    return f"{seconds:.4f}"
