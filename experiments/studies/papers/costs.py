"""Latency and memory of CrystalCache and of a full cache, with one row for each length."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

import torch
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from experiments.studies.evidence.rules import Rules
from experiments.studies.papers import COSTS
from experiments.studies.report import say
from experiments.studies.results import Row, append_row, load_rows
from experiments.studies.subject import Subject
from experiments.tasks.context import read_prose
from models_integration.cache.retained_cache import RetainedCache, storage_bytes
from models_integration.model.cache_argument import cache_name
from models_integration.policies.methods import CrystalCache
from spec import SPEC_VERSION
from spec.backend import Backend, CrystalStages

__all__ = ["FILE", "PASSES", "TOKENS", "Costs", "clock_of", "timed"]

FILE = "costs.jsonl"
"""Name of the file for rows of costs."""
PASSES, TOKENS = 6, 8
"""Number of prefills per row, and number of tokens decoded after each prefill."""
STAGES = {"coattention": "S1", "trunks": "S2", "impact": "S3", "graph": "S4", "score": "S5", "dissolve": "S6"}
T = TypeVar("T")
Measured = tuple[Mapping[str, float], int]
"""Durations in seconds by name, and bytes of the cache after the last token."""


@dataclass(frozen=True)
class Costs:
    """Part of kind "costs" on a model, with one row for each length of a prompt of running text.

    Attributes:
        rules: rules, of which the lengths and the first budget are used.
        subject: model of the study.
        path: path of the file of rows.
    """

    rules: Rules
    subject: Subject
    path: Path
    failed: ClassVar[bool] = False

    def measure(self, console: Console) -> bool:
        """Measure the lengths that are not stored yet. Return True if the user has stopped the measurement."""
        left = [length for length in self.rules.lengths if self._stored(length) is None]
        say(
            f"{self.rules.title}: model {self.subject.name}; {len(self.rules.lengths)} lengths, {len(left)} not stored"
            f" in {self.path}", console
        )
        try:
            for length in left:
                append_row(self.path, self._about(length) | self.row(length))
        except KeyboardInterrupt:
            return True
        return False

    def rows(self) -> list[Row]:
        """Return the stored rows."""
        return [row for length in self.rules.lengths if (row := self._stored(length)) is not None]

    def row(self, length: int) -> Row:
        """Return seconds and bytes of a prompt."""
        return {"task": COSTS, "metadata": {}, **_measured(self.subject, length, self.rules.budgets[0])}

    def _about(self, length: int) -> Row:
        return {
            "model": self.subject.name, "backend": self.subject.backend, "length": length,
            "budget": self.rules.budgets[0], "device": str(self.subject.model.device), "spec_version": SPEC_VERSION,
        }

    def _stored(self, length: int) -> Row | None:
        about = self._about(length)
        return next((row for row in load_rows(self.path) if about.items() <= row.items()), None)


@torch.no_grad()
def _measured(subject: Subject, length: int, budget: str) -> Row:
    """Measure a prompt of running text and later tokens. A first run, which includes compilation, is not counted."""
    ids = torch.tensor([read_prose(subject.tokenizer).tokens[:length]], device=subject.model.device)
    weights = sum(one.nbytes for one in subject.model.parameters())
    runs = {"full cache": partial(_full, subject, ids), "crystalcache": partial(_crystal, subject, ids, budget)}
    seconds, memory = dict[str, float](), {"weights": weights}
    for name, run in runs.items():
        run()
        seconds |= run()[0]
        peak, (_, cached) = _peak(subject.model.device, run)
        memory |= {f"peak, {name}": weights + peak, f"decode, {name}": weights + cached, f"cache, {name}": cached}
    return {"seconds": seconds, "memory": memory}


def _full(subject: Subject, ids: Tensor) -> Measured:
    cache = DynamicCache(config=subject.model.config.get_text_config(decoder=True))
    seconds, token = _generated(subject.model, ids, cache)
    return {"forward": seconds, "token": token}, storage_bytes(cache.layers)


def _crystal(subject: Subject, ids: Tensor, budget: str) -> Measured:
    stages = dict.fromkeys(STAGES, 0.0)
    engine = CrystalCache(budget, subject.sentence_ends, backend=subject.backend).on(subject.model).engine
    backend = _watched(engine, subject.model.device, stages)
    cache = RetainedCache(subject.model.config.get_text_config(decoder=True))
    with CrystalCache(budget, subject.sentence_ends, backend=backend)(subject.model):
        seconds, token = _generated(subject.model, ids, cache)
    by_stage = {f"{STAGES[name]} {name}": spent for name, spent in stages.items()}
    return {**by_stage, "forward, crystalcache": seconds, "token, crystalcache": token}, storage_bytes(cache.layers)


def _watched(backend: Backend, device: torch.device, seconds: dict[str, float]) -> Backend:
    """Return a backend whose stages add their durations to `seconds`."""
    def watched(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            spent, result = timed(device, partial(getattr(backend.require_crystal(), name), *arguments))
            seconds[name] += spent
            return result

        return run

    stages = SimpleNamespace(**{name: watched(name) for name in seconds})
    return replace(backend, crystal=cast(CrystalStages, stages), prefill=None, decoding=None)


def _generated(model: Any, ids: Tensor, cache: DynamicCache) -> tuple[float, float]:
    """Read a prompt and tokens into a cache. Return the seconds of the prompt and of a later token."""
    forward = partial(model, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1)
    seconds, result = timed(model.device, partial(forward, input_ids=ids))

    def decode() -> None:
        last = result
        for _ in range(TOKENS):
            last = forward(input_ids=last.logits[:, -1:].argmax(-1))

    return seconds, timed(model.device, decode)[0] / TOKENS


def clock_of(device: torch.device) -> str:
    """Return the name of the clock that `timed` uses."""
    return "GPU" if device.type == "cuda" else "processor"


def timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """Return seconds of the device (on a CPU: summed over all cores), and the result of `run`."""
    if device.type != "cuda":
        start, result = time.process_time(), run()
        return time.process_time() - start, result
    torch.cuda.synchronize(device)
    start, result = time.perf_counter(), run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def _peak(device: torch.device, run: Callable[[], T]) -> tuple[int, T]:
    """Return the largest number of additional tensor bytes during `run`, and the result of `run`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before, result = torch.cuda.memory_allocated(device), run()
        return torch.cuda.max_memory_allocated(device) - before, result
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as results:
        result = run()
    events: Any = results.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes), default=0), result
