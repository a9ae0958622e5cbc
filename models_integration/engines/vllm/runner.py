"""Model runner of vLLM that captures queries, decides which tokens to keep, and moves them into private blocks."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models_integration.engines.vllm import seams
from models_integration.engines.vllm.arguments import Settings, parse_request
from models_integration.engines.vllm.learned import ModelPolicies
from models_integration.engines.vllm.manager import evicting_spec
from models_integration.engines.vllm.pages import Pages
from models_integration.engines.vllm.plan import Compaction, Report, Step
from models_integration.engines.vllm.selection import Decider, complement
from models_integration.engines.vllm.statement import KEY
from spec.errors import SpecError
from spec.printing import printable
from spec.retention import Granularity

__all__ = ["EvictingWorker"]

_REFUSED = 2  # exit code of an engine that cannot start


class _Model:
    """Layers and pages of the model, and the requests with a policy."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.layers = runner, seams.attention_layers(runner)
        self.facts = [seams.layer_facts(layer) for layer in self.layers]
        self.pages = [Pages(layer.kv_cache, layer.attn_backend.get_name()) for layer in self.layers]
        for layer, pages in zip(self.layers, self.pages, strict=True):
            seams.check_layout(layer, pages, runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.settings = Settings.of(runner.vllm_config)
        self.shifts: dict[str, int] = {}  # number of evicted tokens of each request that was evicted
        self.deciders: dict[str, Decider] = {}
        self.reports: dict[str, Report] = {}  # decisions of this step
        self._ends: list[tuple[str, int, int]] = []
        self._pieces: list[tuple[Decider, int, int]] = []
        self._policies = ModelPolicies(runner.get_model(), self.layers)
        for index, layer in enumerate(self.layers):
            seams.watch_queries(layer, partial(self._see, index))

    def _see(self, index: int, query: Tensor) -> None:
        for decider, start, stop in self._pieces:
            if index in decider.watched:
                decider.queries.setdefault(index, []).append(query[start:stop].clone())

    def begin(self, scheduled: Any) -> None:
        """Delete the state of ended requests, reset preempted requests, and compact caches."""
        for request in scheduled.finished_req_ids:
            self.shifts.pop(request, None)
            self.deciders.pop(request, None)
        for request in scheduled.scheduled_cached_reqs.resumed_req_ids:
            self.shifts.pop(request, None)
            if request in self.deciders:
                self.deciders[request].queries.clear()
        step: Step = getattr(scheduled, KEY)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in step.started:
                self._add(new)
        for job in step.jobs:
            self._compact(job)

    def prepare(self, counts: Any) -> None:
        """Subtract the shifts from the prepared batch, and note the queries and decisions of each request."""
        names, batch = self.runner.input_batch.req_ids, self.runner.input_batch
        shifts = np.array([self.shifts.get(name, 0) for name in names])
        if shifts.any():
            seams.shift_lengths(self.runner, shifts, counts)
        self._pieces, self._ends, start = [], [], 0
        for row, (name, count) in enumerate(zip(names, map(int, counts), strict=True)):
            done, decider = int(batch.num_computed_tokens_cpu[row]), self.deciders.get(name)
            if decider is not None:
                self._check(decider, name, done, done + count)
                if (first := decider.first_query(done) - done) < count:
                    self._pieces.append((decider, start + first, start + count))
                self._ends.append((name, done + count, start + count - 1))
            start += count

    def _check(self, decider: Decider, name: str, done: int, end: int) -> None:
        """Check that no token after a decision is processed before the compaction, and that a step ends there."""
        assert not done < decider.n < end, f"a step passes the end of the prompt of {name}"
        if (kept := decider.kept.get(done)) is not None:
            assert self.shifts.get(name) == done - kept.size, f"{name} goes on after {done} tokens without eviction"

    def decide(self) -> None:
        """Make the decisions of this step, after the forward pass."""
        self._pieces = []
        for name, end, at in self._ends:
            decider = self.deciders[name]
            if end < decider.n or (end > decider.n and decider.asked.every is None):
                continue
            try:
                report = self._decided(name, decider, end, self.runner.input_ids.gpu[at])
            except Exception as error:
                # No decision follows. A request that is preempted repeats the decisions before the error.
                decider.observed = sys.maxsize
                decider.queries.clear()
                report = _failed(end, error)
            if report is not None:
                self.reports[name] = report
        self._ends = []

    def _decided(self, name: str, decider: Decider, end: int, token: Tensor) -> Report | None:
        state = self.runner.requests[name]
        slots = end - self.shifts.get(name, 0)
        blocks = self._blocks(state.block_ids[0])
        at = torch.arange(slots, device=blocks.device)
        entry = decider.decide(end, slots, lambda layer: self.pages[layer].read(blocks, at), token)
        if (kept := decider.kept.get(end)) is not None:
            return Report(end, kept.size, entry)
        return Report(end, slots) if end == decider.n or decider.asked.breathes(end - decider.n) else None

    def _blocks(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, device=self.pages[0].keys.device)

    def _compact(self, job: Compaction) -> None:
        decider = self.deciders[job.request_id]
        count, evicted = decider.kept[job.event]
        assert count == job.kept, job
        kept = complement(evicted, count + evicted.shape[1])
        source, target = self._blocks(job.source), self._blocks(job.target)
        new, sets = torch.arange(job.kept, device=source.device), torch.from_numpy(kept).to(source)
        for layer, pages in enumerate(self.pages):
            # Advanced indexing copies, so that a target block can also be a source block.
            keys, values = pages.read(source, self._slots(decider, sets, layer))
            pages.write(target, new, keys, values)
        seams.replace_block_table(self.runner, job.request_id, job.target)
        self.shifts[job.request_id] = job.event - job.kept

    @staticmethod
    def _slots(decider: Decider, sets: Tensor, layer: int) -> Tensor:
        """Return the kept slots of a layer: (k,) for all heads, or (H_kv, k)."""
        granularity = decider.policy.granularity
        if granularity is Granularity.HEAD:
            return sets[layer * decider.heads : (layer + 1) * decider.heads]
        return sets[layer if granularity is Granularity.LAYER else 0]

    def _add(self, new: Any) -> None:
        """Make the decider of a new request. If this fails, the request keeps its full cache."""
        given, ids = (new.sampling_params.extra_args or {}).get(KEY), np.array(new.prompt_token_ids, dtype=np.int64)
        try:
            asked = parse_request(given, self.settings)
            assert asked is not None
            policy = self._policies.policy(asked)
            self.deciders[new.req_id] = Decider(asked, policy, ids, self.facts, self.pages[0].heads)
        except Exception as error:
            self.reports[new.req_id] = _failed(0, error)


def _failed(event: int, error: Exception) -> Report:
    """Return the report about an error. The request continues without evictions, and its statement has the error."""
    if not isinstance(error, SpecError):
        logging.getLogger(__name__).exception("kvspec: a policy has failed")
    return Report(event, -1, error=f"{type(error).__name__}: {error}")


class _Evicting:
    """Methods that override those of vLLM's model runner."""

    kvspec: _Model | None = None
    vllm_config: Any  # attribute of vLLM's model runner

    def get_kv_cache_spec(self) -> Any:
        """Return the cache specs, with evicting specs for full-attention layers."""
        vllm: Any = super()
        specs = vllm.get_kv_cache_spec()
        seams.check_token_bytes(specs, Settings.of(self.vllm_config).token_bytes)
        return {name: evicting_spec(spec) for name, spec in specs.items()}

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Compact, run the model, and decide. Without requests, only the forward pass runs."""
        vllm: Any = super()
        if self.kvspec is None:
            self.kvspec = _Model(self)
        self.kvspec.begin(scheduler_output)
        output = vllm.execute_model(scheduler_output, *args, **kwargs)
        self.kvspec.decide()
        return output

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare the batch with positions of the text, and with lengths and slots of the stored tokens."""
        vllm: Any = super()
        inputs = vllm._prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        assert self.kvspec is not None
        self.kvspec.prepare(num_scheduled_tokens)
        return inputs

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample tokens, and send the decisions of the step to the scheduler."""
        vllm: Any = super()
        with seams.undrawn_chunks(self):
            output = vllm.sample_tokens(*args, **kwargs)
        if self.kvspec is not None and self.kvspec.reports:
            # With asynchronous scheduling, vLLM 0.32 wraps the output, and the scheduler reads only the inner output.
            setattr(getattr(output, "_model_runner_output", output), KEY, self.kvspec.reports)
            self.kvspec.reports = {}
        return output


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Context manager that ends a process of vLLM with one line instead of a traceback, after a ValueError."""
    try:
        yield
    except ValueError as error:
        if parent_process() is None:  # the process of the user
            raise
        print(f"kvspec: {printable(str(error))}", file=sys.stderr, flush=True)
        sys.exit(_REFUSED)


class EvictingWorker(seams.Worker):
    """Worker of vLLM whose model runner evicts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _one_line_errors():
            super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        """Make the model runner of the platform, and give it the methods that evict."""
        seams.check_configuration(self.vllm_config)
        super().init_device()
        kind = type(self.model_runner)
        assert issubclass(kind, seams.GPUModelRunner)
        # vLLM 0.32 has no option for the class of the model runner: `init_device` of the worker constructs it.
        self.model_runner.__class__ = type(f"Evicting{kind.__name__}", (_Evicting, kind), {})

    def determine_available_memory(self) -> int:
        """Return the bytes of the pool, which must store one request of the longest length."""
        with _one_line_errors():
            available: int = super().determine_available_memory()
            seams.check_memory(self.vllm_config, available)
        return available
