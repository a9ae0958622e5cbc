"""Eviction inside transformers' continuous batching: kvspec evicts each prompt from the pages of the pool.

    with PagedSession(policy, model) as run:
        outputs = model.generate_batch(prompts, max_new_tokens=32)
    run.kept["req_0"], run.freed_pages, run.peak_pages
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import ContinuousBatchingConfig, PreTrainedModel

from models_integration.attention.capture import Attended, Watcher, observing
from models_integration.attention.handover import check_handover
from models_integration.cache.retained_cache import RetainedCache
from models_integration.engines.page_pool import Pool, check_manager, check_seams, check_served, pool_of
from models_integration.model.architecture import BUSY, Architecture, check_free, describe
from models_integration.model.layer_kinds import of_layer
from models_integration.model.seams import attention_of, requeued_length
from models_integration.policies.methods import RetentionPolicy
from models_integration.session.method import decide
from models_integration.session.observed import ObservedSegment
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention

__all__ = ["PagedSession"]


def prompt_length(state: Any) -> int:
    """Return the length of a request's prompt, without answer tokens that a requeued request reads again."""
    return requeued_length(state) or len(state.initial_tokens)


class PromptInPages(ObservedSegment):
    """Prompt of one request. The keys and values are in the pool, and the queries are recorded here."""

    def __init__(self, needs: Needs, architecture: Architecture, empty: RetainedCache, state: Any) -> None:
        super().__init__(needs, architecture, empty)
        ids = torch.tensor([state.initial_tokens[: prompt_length(state)]], device="cpu")
        self.read(ids, torch.ones_like(ids, dtype=torch.bool))

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Return the number of sets per layer according to the model's config, because the given cache is empty."""
        if granularity is not Granularity.HEAD:
            return 1
        config, layer = self.architecture.config, self.architecture.full_layers[0]
        heads = of_layer(config, "num_key_value_heads", layer) or of_layer(config, "num_attention_heads", layer)
        return cast(int, heads)


@dataclass(frozen=True)
class Piece:
    """Columns `start` to `stop` of a batch, which contain a part of one request's prompt."""

    state: Any
    observed: PromptInPages | None
    """Prompt of the request, or None if the set of kept tokens is already known."""
    start: int
    stop: int
    ends: bool


@dataclass
class BatchWatcher(Watcher):
    """Watcher that passes to each prompt of a batch the attention inputs of the prompt's tokens."""

    pool: Pool
    pieces: Sequence[Piece] = field(default_factory=tuple)

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """Handle the inputs of a layer's attention. The keys and values are already in the pool."""
        for piece in self.pieces:
            if piece.observed is None or seen.layer not in piece.observed.layers:
                continue
            columns = slice(piece.start, piece.stop)
            keys, values = seen.key[:, :, columns], seen.value[:, :, columns]
            if piece.ends:
                slots = self.pool.slots(piece.state.request_id, piece.observed.columns)
                keys, values = self.pool.stored(seen.layer, slots)
            own = replace(seen, query=seen.query[:, :, columns], key=keys, value=values, lse=None)
            piece.observed.attended(module, own)


@dataclass
class _Progress:
    """Data about a running request. The data is an attribute of the engine's state of the request."""

    observed: PromptInPages | None = None
    evicted: int | None = None
    """Number of tokens seen minus number of stored tokens, or None before the decision about the prompt."""


class PagedSession:
    """Context manager that applies a policy to a model in continuous batching.

    kvspec evicts in every manager that you make inside the block: by `generate_batch`,
    `continuous_batching_context_manager` or `init_continuous_batching`. The engine reads a prompt in chunks. After the
    last chunk the policy selects the tokens, kvspec moves the kept slots together in the pool, and other requests can
    use the freed pages. The kept tokens keep their positions.

    If the pool is full, the engine puts a request back into the queue. The request then reads the prompt again, keeps
    the same tokens as before, and continues the answer. A prompt of one token is kept. If a manager still runs when the
    block ends, kvspec stops the manager. If the block ends with an error, the manager does not finish its requests.

    Args:
        policy: policy that evicts after the prompt. All layers and heads must keep the same number of tokens.
        model: model with full attention in every layer, and with sdpa or eager attention.

    Raises:
        SpecError: if kvspec does not support the model, the policy or the version of transformers. Inside the block,
            the error is raised before a manager with an unsupported configuration runs.
    """

    def __init__(self, policy: RetentionPolicy, model: PreTrainedModel) -> None:
        check_seams()
        self.kept: dict[str, Retention] = {}
        """Set of kept tokens of each request's prompt, by request id. Requests of one answer token have no entry.

        A new manager starts with an empty dictionary. A long-running server should delete entries after reading them.
        """
        self.freed_pages = 0
        """Number of pages that eviction has freed."""
        self.peak_pages = 0
        """Largest number of pages in use at one time."""
        self.peak_requests = 0
        """Largest number of requests with pages at one time."""
        self._model, self._architecture, self._method = model, describe(model), policy.on(model)
        check_served(self._architecture, self._method)
        check_handover(self._architecture, self._method.policy.scorer.needs, Granularity.MODEL)
        self._layers = self._architecture.watched(self._method.policy.scorer.needs)
        self._empty = RetainedCache(self._architecture.config)
        self._managers: list[Any] = []
        self._exit: ExitStack | None = None

    def __enter__(self) -> "PagedSession":
        if self._exit is not None:
            raise SpecError("policy", self._method.policy.name, "a session can be used once; make a new PagedSession")
        check_free(self._model)
        if getattr(self._model, "_cached_continuous_batching_manager", None) is not None:
            raise SpecError(
                "model", self._architecture.name,
                "already has a manager for continuous batching: destroy this manager first",
            )
        self._exit = ExitStack()
        BUSY.add(self._architecture.decoder)
        self._exit.callback(BUSY.discard, self._architecture.decoder)
        own: Any = self._model.init_continuous_batching
        vars(self._model)["init_continuous_batching"] = partial(self._manager, own)
        self._exit.callback(vars(self._model).pop, "init_continuous_batching")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        assert self._exit is not None
        with self._exit:
            for manager in self._managers:
                if manager.is_running():
                    manager.stop(block=True, hard_stop=kind is not None)
            self._model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]

    def _manager(
        self, own: Callable[..., Any], generation_config: Any = None, continuous_batching_config: Any = None,
        **hints: Any,
    ) -> Any:
        """Return the engine's manager, with eviction.

        Raises:
            SpecError: if kvspec does not support the configuration. The model is unchanged.
        """
        config = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        if config is None:
            config = ContinuousBatchingConfig(allow_block_sharing=False)
        implementation = attention_of(self._model.config)
        manager = own(generation_config, config, **hints)
        if manager not in self._managers:
            try:
                check_manager(self._model, manager)
            except SpecError:
                self._model.set_attn_implementation(implementation)
                raise
            self._managers.append(manager)
            self.kept.clear()
            manager._create_batch_processor = partial(self._processor, manager._create_batch_processor)
        return manager

    def _processor(self, own: Callable[[], Any]) -> Any:
        """Return the engine's processor with kvspec's hooks."""
        if self._architecture.decoder not in BUSY:
            raise SpecError("manager", self._architecture.name, "belongs to a session that has ended")
        processor = own()
        if "update_batch" not in vars(processor):
            _Engine(self, processor)
        return processor


class _Engine:
    """Hooks of kvspec on one processor.

    After the decision about a prompt, `position_offset` of the state is the number of stored tokens. Scheduler,
    allocator and indices then work as for a shorter request. Only position ids depend on the number of tokens seen.
    """

    def __init__(self, run: PagedSession, processor: Any) -> None:
        self._run, self._processor, self._pool = run, processor, pool_of(processor.cache)
        self._watcher = BatchWatcher(self._pool)
        ios, scheduler = processor.inputs_and_outputs, processor.scheduler
        ios.prepare_batch_tensors = partial(self._prepare, ios.prepare_batch_tensors)
        scheduler._schedule_request = partial(self._schedule, scheduler._schedule_request)
        processor._generation_step = partial(self._step, processor._generation_step)
        processor.update_batch = partial(self._update, processor.update_batch)

    def _schedule(
        self, own: Callable[..., None], state: Any, request_tokens: list[int], token_budget: int, *others: Any,
    ) -> None:
        """End a piece at the end of the prompt. An answer that is read again is processed after the decision."""
        left = prompt_length(state) - state.position_offset
        if left > 0 and _progress(state).evicted is None:
            token_budget = min(token_budget, left)
        own(state, request_tokens, token_budget, *others)

    def _prepare(self, own: Callable[..., None], requests_in_batch: Sequence[Any], **others: Any) -> None:
        """Set position ids to positions in the text, and record which columns belong to which prompt."""
        shifts, pieces, start = list[int](), list[Piece](), 0
        for each in requests_in_batch:
            state, stop = each.state, start + each.query_length
            progress = _progress(state)
            shifts += [progress.evicted or 0] * each.query_length
            left = prompt_length(state) - state.position_offset
            if progress.evicted is None and left > 0:
                pieces.append(Piece(state, self._observed(state), start, stop, left == each.query_length))
            start = stop
        own(requests_in_batch=requests_in_batch, **others)
        if any(shifts):
            positions = self._processor.inputs_and_outputs.position_ids
            positions[:start] += torch.tensor(shifts, dtype=positions.dtype, device=positions.device)
            if positions.is_cuda:
                torch.cuda.current_stream(positions.device).synchronize()
        self._watcher.pieces = pieces
        self._run.peak_pages = max(self._run.peak_pages, self._pool.pages)
        self._run.peak_requests = max(self._run.peak_requests, self._pool.requests)

    def _observed(self, state: Any) -> PromptInPages | None:
        progress, run = _progress(state), self._run
        if self._known(state) is None and progress.observed is None:
            needs = run._method.policy.scorer.needs
            progress.observed = PromptInPages(needs, run._architecture, run._empty, state)
        return progress.observed

    def _known(self, state: Any) -> Retention | None:
        """Return the decision made before the request was put back into the queue, or None."""
        return self._run.kept.get(state.request_id) if requeued_length(state) else None

    def _step(self, own: Callable[..., None], model: Any) -> None:
        run = self._run
        shown = run._layers and any(piece.observed is not None for piece in self._watcher.pieces)
        with observing(run._architecture, run._empty, self._watcher, run._layers) if shown else nullcontext():
            own(model)

    def _update(self, own: Callable[[], None]) -> None:
        """After each batch, decide about finished prompts, except prompts of finished requests."""
        own()
        active = self._processor.scheduler.active_requests
        for piece in self._watcher.pieces:
            state = piece.state
            if not piece.ends or active.get(state.request_id) is not state:
                continue
            try:
                with torch.no_grad(), torch.cuda.stream(self._processor.inputs_and_outputs.compute_stream):
                    self._compact(state)
            except Exception as error:  # an error of the policy affects only this request
                self._processor._handle_request_error(error, state)
                self._processor.scheduler.finish_request(state.request_id)
        self._watcher.pieces = ()

    def _compact(self, state: Any) -> None:
        progress, run = _progress(state), self._run
        retention = self._known(state)
        if retention is None:
            assert progress.observed is not None
            retention = self._decided(progress.observed)
        progress.observed = None
        run.kept[state.request_id] = retention
        progress.evicted = retention.seen - len(retention.group(0))
        if progress.evicted:
            run.freed_pages += self._pool.compact(state, run._architecture.full_layers, retention)
            state.position_offset -= progress.evicted

    def _decided(self, observed: PromptInPages) -> Retention:
        """Return the tokens of a prompt that the policy keeps.

        Raises:
            SpecError: if the sets of kept tokens have different sizes.
        """
        policy = self._run._method.policy
        if observed.columns == 1:
            return Retention.shared(np.arange(1), 1)
        (retention,) = decide(self._run._method, observed).retentions
        sizes = np.diff(retention.offsets)
        if sizes.min() != sizes.max():
            reason = (
                f"keeps {sizes.min()} to {sizes.max()} tokens; all layers and heads must keep the same number of tokens"
            )
            raise SpecError("policy", policy.name, reason)
        return retention


def _progress(state: Any) -> _Progress:
    """Return the data about a request. A new state has no data."""
    progress: _Progress = vars(state).setdefault("_kvspec", _Progress())
    return progress
