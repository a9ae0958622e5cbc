"""Scheduler of vLLM that ends a step at each decision, exchanges blocks, and states what was kept."""

import time
from typing import Any

from models_integration.engines.vllm.arguments import KEY, RequestPolicy, Settings, parse_request
from models_integration.engines.vllm.manager import EvictingManager
from models_integration.engines.vllm.plan import Compaction, Plan, Report, Step
from models_integration.engines.vllm.seams import AsyncScheduler, Scheduler, check_configuration, only_manager
from models_integration.engines.vllm.statement import statement, summary
from spec.errors import BackendUnavailable, SpecError

__all__ = ["EvictingAsyncScheduler", "EvictingScheduler"]


class _Requests:
    """Policies, decisions and reasons of all requests, for the statements."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.asked: dict[str, RequestPolicy] = {}
        self.reasons: dict[str, str] = {}
        self.decisions: dict[str, list[dict[str, Any]]] = {}
        self.stored: dict[str, tuple[int, int]] = {}
        """Number of tokens processed, and number of evicted tokens, of each request."""
        self.freed: set[str] = set()
        """Requests that have ended. Their last output may follow."""

    def plan(self, request: Any) -> Plan | None:
        """Return the plan of a new request, or None if the request keeps its full cache."""
        name, parameters = request.request_id, request.sampling_params
        given = (getattr(parameters, "extra_args", None) or {}).get(KEY)
        try:
            asked = parse_request(given, self.settings)
        except (SpecError, BackendUnavailable) as error:  # the front end has checked the arguments before
            self.reasons[name] = str(error)
            return None
        if asked is None:
            self.reasons[name] = "no policy was asked for"
            return None
        self.asked[name] = asked
        reason = asked.unserved
        if request.prompt_token_ids is None or getattr(request, "mm_features", None):
            reason = "the prompt has embeddings or images, and policies read token ids"
        elif getattr(request, "resumable", False):
            reason = "a session with streamed input has no end of the prompt"
        elif request.num_prompt_tokens < 2 and not asked.decodes:
            reason = "the prompt has one token"
        if reason is None:
            return Plan(asked, request.num_prompt_tokens)
        self.reasons[name] = reason
        return None

    def note(self, name: str, report: Report) -> None:
        """Record a decision, or the reason why there is none."""
        found = self.decisions.setdefault(name, [])
        if report.error is not None:
            self.reasons[name] = report.error
        elif report.decision is not None:
            one = report.decision
            if not found or self.asked[name].record:
                found.append(one)
            else:
                found[1:] = [summary(one)]

    def stated(self, name: str, last: bool) -> dict[str, Any]:
        """Return the statement of a request. Before the last output, the sets are represented by their digest."""
        seen, evicted = self.stored.get(name, (0, 0))
        decisions = self.decisions.get(name, [])
        reason = self.reasons.get(name)
        if reason is None and not evicted:
            if not decisions:
                reason = "the request ended before its decision"
            elif decisions[-1]["kept_tokens"] == decisions[-1]["seen"]:
                reason = "the budget keeps all tokens"
            else:
                reason = "no token was processed after the decision"
        return statement(self.asked.get(name), reason, decisions if last else [*map(summary, decisions)], evicted, seen)

    def forget(self) -> None:
        """Delete the data of requests that have ended."""
        for name in self.freed:
            for table in (self.asked, self.reasons, self.decisions, self.stored):
                table.pop(name, None)
        self.freed.clear()


class _Evicting:
    """Methods that override those of vLLM's schedulers.

    Attributes:
        evicted: number of compactions so far.
        freed_blocks: number of blocks that compactions have returned to the pool.
    """

    # Attributes of vLLM's scheduler.
    requests: dict[str, Any]
    running: list[Any]
    kv_cache_manager: Any
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_configuration(self.vllm_config)
        self._manager = only_manager(self, EvictingManager)
        self._plans: dict[str, Plan] = {}
        self._manager.plans = self._plans
        self._requests = _Requests(Settings.read((self.vllm_config.additional_config or {}).get(KEY, {})))
        self._held: set[str] = set()
        self._updating = False
        self.evicted = self.freed_blocks = 0

    @property
    def _vllm(self) -> Any:
        """Return vLLM's own methods."""
        return super()

    def add_request(self, request: Any) -> None:
        """Add a request, with a plan if it has a policy."""
        if request.request_id not in self.requests:
            plan = self._requests.plan(request)
            if plan is not None:
                self._plans[request.request_id] = plan
        self._vllm.add_request(request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._store(request)
        self._requests.freed.add(request.request_id)
        found = self._vllm._free_request(request, *args, **kwargs)
        self._plans.pop(request.request_id, None)
        if not self._updating:  # no output follows
            self._requests.forget()
        return found

    def _store(self, request: Any) -> None:
        plan = self._plans.get(request.request_id)
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        before = self._requests.stored.get(request.request_id, (0, 0))
        self._requests.stored[request.request_id] = max(before, (computed, 0 if plan is None else plan.shift))

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        """Use a cached prefix up to the window whose queries the policy reads."""
        blocks, tokens, *others = self._vllm._get_local_prefix_cache_hit(request)
        plan, size = self._plans.get(request.request_id), self._manager.block_size
        if plan is not None and tokens > (most := plan.reusable_blocks(size)) * size:
            kept = tuple(list(group[:most]) for group in blocks.blocks)
            blocks, tokens = self.kv_cache_manager.create_kv_cache_blocks(kept), most * size
        return blocks, tokens, *others

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """End a step at each decision. A held request gets no tokens."""
        tokens: int = self._vllm._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        plan = self._plans.get(request.request_id)
        if request.request_id in self._held:
            return 0
        return tokens if plan is None or tokens <= 0 else plan.limit(num_computed_tokens, tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Compact the requests whose decision is known, hold those whose decision is not, then schedule a step."""
        jobs, full, running = list[Compaction](), False, list(self.running)
        self._held.clear()
        for request in running:
            plan = self._plans.get(request.request_id)
            seen = request.num_computed_tokens
            if plan is None or plan.done == seen or not plan.is_event(seen):
                continue
            if plan.report is None or plan.report.event != seen:
                self._held.add(request.request_id)
            elif (job := self._compact(request, plan, plan.report)) is not None:
                jobs.append(job)
            elif plan.done != seen:
                self._held.add(request.request_id)
                full = True
        if full and len(self._held) == len(running) and not any(map(_in_flight, running)):
            self._preempt_last()
        output = self._vllm.schedule(*args, **kwargs)
        # A request that this very step has preempted starts again, without its job.
        left = tuple(job for job in jobs if self._plans[job.request_id].done == job.event)
        started = tuple(new.req_id for new in output.scheduled_new_reqs if new.req_id in self._plans)
        output.kvspec = Step(started, left)
        return output

    def _compact(self, request: Any, plan: Plan, report: Report) -> Compaction | None:
        if report.kept == plan.slots(report.event):
            plan.carry_out(report.event, report.kept)
            return None
        pool = self.kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        job: Compaction | None = self._manager.compact(request.request_id, report.event, report.kept)
        if job is not None:
            self.evicted += 1
            self.freed_blocks += pool.get_num_free_blocks() - before
            self._store(request)
        return job

    def _preempt_last(self) -> None:
        """Preempt the last running request: every request waits for blocks, and no other request frees any."""
        request = self.running.pop()
        self._held.discard(request.request_id)
        self._preempt_request(request, time.monotonic())

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._store(request)
        self._vllm._preempt_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take the decisions of the worker, and add a statement to each output."""
        for name, report in getattr(model_runner_output, KEY, {}).items():
            self._note(name, report)
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and name in self._plans:
                plan = self._plans[name]
                plan.observed = max(plan.observed, request.num_computed_tokens)
        self._updating = True
        found = self._vllm.update_from_output(scheduler_output, model_runner_output)
        self._updating = False
        for outputs in found.values():
            for one in outputs.outputs:
                self._state(one)
        self._requests.forget()
        return found

    def _note(self, name: str, report: Report) -> None:
        plan = self._plans.get(name)
        if plan is None:
            return
        self._requests.note(name, report)
        if report.error is None:
            plan.report = report
        elif plan.shift:
            plan.failed = True
        else:
            del self._plans[name]

    def _state(self, one: Any) -> None:
        request = self.requests.get(one.request_id)
        if request is not None:
            self._store(request)
        parameters = getattr(request, "sampling_params", None)
        # The front end finds stop strings itself, so each output of such a request may be the last.
        last = request is None or one.finish_reason is not None or bool(getattr(parameters, "stop", None))
        stated = {KEY: self._requests.stated(one.request_id, last)}
        one.kv_transfer_params = {**(one.kv_transfer_params or {}), **stated}


def _in_flight(request: Any) -> bool:
    return bool(getattr(request, "num_in_flight_tokens", 0))


class EvictingScheduler(_Evicting, Scheduler):
    """Scheduler that evicts tokens."""


class EvictingAsyncScheduler(_Evicting, AsyncScheduler):
    """Scheduler that evicts tokens and schedules a step before the results of the step before are known."""
