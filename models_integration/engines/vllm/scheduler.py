"""Scheduler of vLLM that ends a step at each decision, exchanges blocks, and states what was kept."""

from typing import Any

from models_integration.engines.vllm import seams
from models_integration.engines.vllm.arguments import RequestPolicy, Settings, parse_request
from models_integration.engines.vllm.manager import EvictingManager
from models_integration.engines.vllm.plan import Compaction, Plan, Report, Step
from models_integration.engines.vllm.statement import KEY
from reference.policies import names
from spec.errors import BackendUnavailable, SpecError

__all__ = ["EvictingAsyncScheduler", "EvictingScheduler"]


def _refusal(request: Any, asked: RequestPolicy) -> str | None:
    """Return why a request keeps its full cache, or None."""
    if request.prompt_token_ids is None or getattr(request, "mm_features", None):
        return "the prompt has embeddings or images, and policies read token ids"
    if getattr(request, "resumable", False):
        return "a session with streamed input has no end of the prompt"
    if getattr(request, "lora_request", None) is not None and "W_o" in names.constants_of_model(asked.name):
        return f"{asked.name} reads weights of the model, and the request has an adapter"
    if request.num_prompt_tokens < 2 and asked.policy.cadence.every is None:
        return "the prompt has one token"
    return asked.unserved


class _Evicting:
    """Methods that override those of vLLM's schedulers."""

    requests: dict[str, Any]  # these four are attributes of vLLM's scheduler
    running: list[Any]
    kv_cache_manager: Any
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seams.check_configuration(self.vllm_config)
        self._manager = seams.only_manager(self, EvictingManager)
        self._plans: dict[str, Plan] = {}
        self._manager.plans = self._plans
        self._settings = Settings.of(self.vllm_config)
        self._held: set[str] = set()

    @property
    def _vllm(self) -> Any:
        """Return vLLM's own methods."""
        return super()

    def add_request(self, request: Any) -> None:
        """Add a request, with a plan if it has a policy."""
        if request.request_id not in self.requests:
            # Messages for the statement of the request (`Statement.take`), until they are sent with an output.
            request.kvspec = self._add_plan(request)
        self._vllm.add_request(request)

    def _add_plan(self, request: Any) -> dict[str, Any]:
        given = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
        try:
            asked = parse_request(given, self._settings)
            reason = "no policy was asked for" if given is None else "the request asks for fullcache"
        except (SpecError, BackendUnavailable) as error:  # the front end has checked the arguments before
            asked, reason = None, str(error)
        if asked is None:
            return {"policy": "fullcache", "budget": "1.0", "reason": reason}
        news = {"policy": str(asked), "budget": asked.typed}
        if (refusal := _refusal(request, asked)) is not None:
            return {**news, "reason": refusal}
        self._plans[request.request_id] = Plan(asked, request.num_prompt_tokens)
        return news

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._plans.pop(request.request_id, None)
        return self._vllm._free_request(request, *args, **kwargs)

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        """Use a cached prefix up to the window whose queries the policy reads."""
        # vLLM 0.32 schedules a waiting request from the end of this prefix on.
        blocks, tokens, *others = self._vllm._get_local_prefix_cache_hit(request)
        plan, size = self._plans.get(request.request_id), self._manager.block_size
        if plan is not None and tokens > (most := plan.reusable_blocks(size)) * size:
            kept = tuple(list(group[:most]) for group in blocks.blocks)
            blocks, tokens = self.kv_cache_manager.create_kv_cache_blocks(kept), most * size
        return blocks, tokens, *others

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """End a step at each decision. A held request gets no tokens."""
        # vLLM 0.32 calls this method for running and for waiting requests, before it allocates their blocks.
        tokens: int = self._vllm._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        plan = self._plans.get(request.request_id)
        if request.request_id in self._held:
            return 0
        return tokens if plan is None or tokens <= 0 else plan.limit(num_computed_tokens, tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Compact the requests with a decision, pause the requests that wait for one, and schedule a step."""
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
        in_flight = (getattr(request, "num_in_flight_tokens", 0) for request in running)
        if full and len(self._held) == len(running) and not any(in_flight):
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
        job: Compaction | None = self._manager.compact(request.request_id, report.event, report.kept)
        if job is not None:
            news: dict[str, Any] = request.kvspec
            news["freed_blocks"] = news.get("freed_blocks", 0) + len(job.source) - len(job.target)
        return job

    def _preempt_last(self) -> None:
        """Preempt the last running request, because all requests wait for blocks and none of them frees blocks."""
        request = self.running.pop()
        self._held.discard(request.request_id)
        seams.preempt(self, request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Receive the decisions of the worker, and send the messages about each request with its output."""
        requests = self.requests.copy()  # vLLM deletes the requests that end
        for name, report in getattr(model_runner_output, KEY, {}).items():
            if name in self._plans:
                self._note(requests[name], self._plans[name], report)
        for name in scheduler_output.num_scheduled_tokens.keys() & self._plans.keys():
            plan = self._plans[name]
            plan.observed = max(plan.observed, requests[name].num_computed_tokens)
        outputs_by_client = self._vllm.update_from_output(scheduler_output, model_runner_output)
        for one in (one for outputs in outputs_by_client.values() for one in outputs.outputs):
            request = requests[one.request_id]
            if request.kvspec:
                one.kv_transfer_params = {**(one.kv_transfer_params or {}), KEY: request.kvspec}
                request.kvspec = {}
        return outputs_by_client

    def _note(self, request: Any, plan: Plan, report: Report) -> None:
        """Store a decision, and add it to the messages of the request, or the reason why there is none."""
        plan.report = report
        if report.error is not None:
            request.kvspec["failed"], plan.failed = report.error, report.event
        elif report.eviction is not None:
            request.kvspec.setdefault("evictions", []).append(report.eviction)
        elif report.kept == plan.slots(report.event):
            request.kvspec["reason"] = plan.full_reason(report.event)


class EvictingScheduler(_Evicting, seams.Scheduler):
    """Scheduler that evicts tokens."""


class EvictingAsyncScheduler(_Evicting, seams.AsyncScheduler):
    """Scheduler that evicts tokens and schedules a step before the results of the step before are known."""
