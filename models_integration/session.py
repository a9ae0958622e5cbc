"""A policy at work on a model: the context manager, and the plain function for a loop of one's own."""

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.architecture import describe
from models_integration.cache import RetainedCache, storage_bytes
from models_integration.capture import Recorder, observing
from models_integration.inputs import check_forward, check_generate, check_prompt
from reference.policies import retain
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.policy import Observation
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

if TYPE_CHECKING:
    from models_integration.methods import Method

__all__ = ["Prefilled", "Session", "prefill"]


@dataclass
class _Forward:
    """One forward that is under way."""

    cache: RetainedCache
    undo: ExitStack
    input_ids: Tensor
    recorder: Recorder | None


# Decoders inside a context: a second context on one of them would fight over its cache.
_BUSY: WeakSet[nn.Module] = WeakSet()


class Session:
    """A method on a model, for the time of a `with` block; afterwards, what it did.

    Every prompt that the model reads inside the block is observed, decided and compacted; decode steps go on from
    the compacted cache. The attributes are about the last prompt. A prompt is one forward: its end is where the
    policy decides, so a loop of one's own must not cut it into pieces.

    Raises:
        SpecError: when made for a model that cannot be compacted.
    """

    def __init__(self, method: "Method", model: PreTrainedModel) -> None:
        if method.policy.granularity is not Granularity.MODEL:
            raise SpecError("policy", method.policy.name, "one kept set for all layers and heads is served so far")
        self.backend = method.backend
        """The backend that decides."""
        self.retention: CrystalRetention | Retention | None = None
        """What was kept; with all records if the policy is CrystalCache. None before a prompt."""
        self.cache: RetainedCache | None = None
        """The compacted cache; it lives on after the block."""
        self.timings: dict[str, float] = {}
        """Seconds of the stages capture, decision and compaction."""
        self.bytes_saved = 0
        """Bytes of keys and values that compaction freed."""
        self.over_budget = 0
        """Tokens kept beyond the budget, because protection alone exceeds it."""
        self._method = method
        self._model = model
        self._architecture = describe(model)
        self._names = tuple(inspect.signature(self._architecture.decoder.forward).parameters)
        self._running: _Forward | None = None
        self._exit: ExitStack | None = None

    @property
    def kept(self) -> IntVector | None:
        """Kept absolute positions of the last prompt, ascending; None before a prompt."""
        retention = self.retention.retention if isinstance(self.retention, CrystalRetention) else self.retention
        return None if retention is None else retention.positions

    def __enter__(self) -> "Session":
        decoder = self._architecture.decoder
        if self._exit is not None:
            raise SpecError("policy", self._method.policy.name, "a session runs once; call the policy again")
        if decoder in _BUSY:
            raise SpecError("model", type(self._model).__name__, "is inside a context already: contexts do not nest")
        with ExitStack() as undo:
            _BUSY.add(decoder)
            undo.callback(_BUSY.discard, decoder)
            undo.callback(decoder.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            undo.callback(decoder.register_forward_hook(self._after, always_call=True).remove)
            undo.enter_context(_guarded_generate(self._model))
            undo.callback(self._abandon)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        assert self._exit is not None
        self._exit.close()

    def _before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    ) -> tuple[tuple[()], dict[str, Any]]:
        # A forward that was interrupted, by Ctrl-C for one, has not passed `_after`.
        self._abandon()
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        check_forward(arguments, getattr(self._architecture.config, "use_cache", True))
        cache = arguments.get("past_key_values")
        recorder = None
        if isinstance(cache, RetainedCache) and cache.get_seq_length() > 0:
            _check_step(arguments["input_ids"], cache)
        else:
            if cache is not None:
                RetainedCache.check_adoptable(cache)
            check_prompt(self._architecture, arguments)
            config = self._architecture.config
            cache = RetainedCache(config) if cache is None else RetainedCache.adopt(cache, config)
            recorder = Recorder(self._method.policy.scorer.needs)
        undo = ExitStack()
        undo.enter_context(observing(self._architecture, recorder))
        self._running = _Forward(cache, undo, arguments["input_ids"], recorder)
        return (), {**arguments, "past_key_values": cache}

    def _after(self, decoder: nn.Module, args: tuple[Any, ...], output: object) -> None:
        running, finished = self._running, output is not None
        if running is None:
            return
        if not finished:
            self._abandon()
            return
        self._running = None
        running.undo.close()
        if running.recorder is None:
            return
        try:
            self._decide(running, running.recorder)
        except BaseException:
            running.cache.fail("a policy failed on its prompt")
            raise

    def _abandon(self) -> None:
        """Close a forward that did not come to its end; some layers have its tokens and others do not."""
        if self._running is not None:
            running, self._running = self._running, None
            running.undo.close()
            running.cache.fail("a forward failed half way")

    def _decide(self, running: _Forward, recorder: Recorder) -> None:
        method, cache, seen = self._method, running.cache, running.input_ids.shape[1]
        timings: dict[str, float] = {}
        with _timed(timings, "capture"):
            ids = running.input_ids[0].to("cpu", torch.int64).numpy() if recorder.needs.token_ids else None
            observation = Observation(seen, 1, ids, recorder.views())
            recorder.seen.clear()
        with _timed(timings, "decision"):
            retention, records = retain(method.policy, method.budget, observation)
        before = storage_bytes(cache)
        with _timed(timings, "compaction"):
            cache.compact(retention)
            _wait_for_device(running.input_ids.device)
        self.retention = retention if records is None else records
        self.cache, self.timings, self.bytes_saved = cache, timings, before - storage_bytes(cache)
        B = max(method.policy.floor, method.budget.tokens(seen))
        self.over_budget = max(0, len(retention.positions) - B)


def _check_step(input_ids: Tensor, cache: RetainedCache) -> None:
    if input_ids.shape[1] != 1:
        raise SpecError(
            "input_ids", tuple(input_ids.shape),
            f"a second segment on a cache that has seen {cache.get_seq_length()} tokens (a turn, a chunk of a prompt) "
            "is not served inside the context yet: only single decode steps are",
        )


@contextmanager
def _guarded_generate(model: PreTrainedModel) -> Iterator[None]:
    """Let generate refuse, before it starts, what a single forward cannot know: such as a prompt cut in chunks."""
    generate = getattr(model, "generate", None)
    if generate is None:
        yield
        return
    had = vars(model).get("generate")

    @wraps(generate)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
        check_generate(model, named)
        return generate(*args, **kwargs)

    vars(model)["generate"] = guarded
    try:
        yield
    finally:
        if had is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = had


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[stage] = time.perf_counter() - start


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Prefilled(NamedTuple):
    """A prompt that has been read and compacted."""

    logits: Tensor
    """Of the token after the prompt, (rows, 1, vocabulary)."""
    cache: RetainedCache
    run: Session


def prefill(model: PreTrainedModel, method: "Method", input_ids: Tensor) -> Prefilled:
    """Read a prompt under a policy, for those who run their own loop.

    Go on with `model(input_ids=next_token, past_key_values=cache)`: default position ids and masks are right. With
    generate, pass the prompt again before the new tokens: it leaves out what the cache has seen. The logits come from
    the uncompacted prompt.

    Args:
        model: a causal language model.
        method: such as CrystalCache(...).
        input_ids: one prompt, (1, n).

    Raises:
        SpecError: for a model or a prompt that is not served.
    """
    with torch.no_grad(), method(model) as run:
        output = model(input_ids=input_ids, use_cache=True)
    assert run.cache is not None
    return Prefilled(output.logits[:, -1:], run.cache, run)
