"""A policy at work on a model: the context manager, and the plain function for a loop of one's own."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.architecture import describe
from models_integration.cache import RetainedCache
from models_integration.capture import observing
from models_integration.generation import Call, guarded_generate
from models_integration.inputs import check_forward, check_prompt, prompt_positions
from models_integration.segments import ONE_FORWARD, OPEN, Segment
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

if TYPE_CHECKING:
    from models_integration.methods import Method

__all__ = ["Prefilled", "Session", "prefill"]

Kept: TypeAlias = CrystalRetention | Retention
"""What was kept of one prompt; with all records if the policy is CrystalCache."""

# Decoders inside a context: a second context on one of them would fight over its cache.
_BUSY: WeakSet[nn.Module] = WeakSet()


class Session:
    """A method on a model, for the time of a `with` block; afterwards, what it did.

    Every prompt that the model reads inside the block is observed, decided and compacted; decode steps go on from
    the compacted cache. The attributes are about the last prompt, or the last batch of them: rows of different lengths
    are padded on their left, with the 2D mask that says so. A prompt is one forward, unless it is read inside
    `with run.prompt():` or in generate's own chunks: its end is where the policy decides.

    Raises:
        SpecError: when made for a model that cannot be compacted.
    """

    def __init__(self, method: "Method", model: PreTrainedModel) -> None:
        if method.policy.granularity is not Granularity.MODEL:
            raise SpecError("policy", method.policy.name, "one kept set for all layers and heads is served so far")
        self.backend = method.backend
        """The backend that decides."""
        self.retention: Kept | tuple[Kept, ...] | None = None
        """What was kept; of a batch, a tuple with one for each prompt. None before a prompt."""
        self.cache: RetainedCache | None = None
        """The compacted cache; it lives on after the block."""
        self.timings: dict[str, float] = {}
        """Seconds of the stages capture, decision and compaction."""
        self.bytes_saved = 0
        """Bytes of keys and values that compaction freed, in all rows."""
        self.over_budget = 0
        """Tokens kept beyond the budget in all prompts, because protection alone exceeds it."""
        self._method = method
        self._model = model
        self._architecture = describe(model)
        self._names = tuple(inspect.signature(self._architecture.decoder.forward).parameters)
        self._call: Call | None = None
        self._grouping = False
        self._cache: RetainedCache | None = None
        self._segment: Segment | None = None
        self._undo: ExitStack | None = None
        self._exit: ExitStack | None = None

    @property
    def kept(self) -> IntVector | None:
        """Kept absolute positions of the last prompt, ascending; None before a prompt.

        Raises:
            SpecError: after a batch.
        """
        if isinstance(self.retention, tuple):
            raise SpecError("kept", f"{len(self.retention)} prompts", "retention has one for each of them")
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
            undo.enter_context(guarded_generate(self._model, self._generating))
            undo.callback(self._drop, "its context ended inside a prompt")
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
        if self._segment is None and isinstance(cache, RetainedCache) and cache.get_seq_length() > 0:
            _check_step(arguments["input_ids"], cache)
            defaults = cache.step_inputs(1, arguments["input_ids"].device)
        else:
            cache, defaults = self._read(cache, arguments)
        segment, self._cache, self._undo = self._segment, cache, ExitStack()
        layers = () if segment is None else segment.layers
        self._undo.enter_context(observing(self._architecture, cache, segment, layers))
        given = {name: value for name, value in arguments.items() if value is not None}
        return (), {**arguments, **defaults, **given, "past_key_values": cache}

    def _read(self, cache: Any, arguments: Mapping[str, Any]) -> tuple[RetainedCache, dict[str, Tensor]]:
        """A prompt starts or goes on; nothing has changed if it is refused."""
        segment, ids = self._segment, arguments["input_ids"]
        if segment is None:
            if cache is not None:
                RetainedCache.check_adoptable(cache)
            until = OPEN if self._grouping else ONE_FORWARD if self._call is None else self._call.until
            columns, known = 0, None
        else:
            if cache is not segment.cache:
                raise SpecError("past_key_values", type(cache).__name__, "must be the cache of the prompt that is open")
            if len(ids) != segment.rows:
                raise SpecError("input_ids", tuple(ids.shape), f"the prompt that is open has {segment.rows} rows")
            until, columns, known = segment.until, cache.get_seq_length(), segment.padding
        padding = check_prompt(
            self._architecture, arguments, columns=columns, padding=known, whole=until == ONE_FORWARD
        )
        if segment is None:
            config = self._architecture.config
            cache = RetainedCache(config) if cache is None else RetainedCache.adopt(cache, config)
            copies = 1 if self._call is None else max(1, len(ids) // self._call.rows)
            segment = self._segment = Segment(self._method, self._architecture, cache, copies, until)
        segment.read(ids, padding)
        if padding is None:
            return cache, {}
        positions = prompt_positions(ids.shape[1], columns, padding).clamp(min=0)
        return cache, {"position_ids": positions.to(ids.device)}

    def _after(self, decoder: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._undo is None:
            return
        if output is None:
            self._abandon()
            return
        self._undo.close()
        self._undo = None
        segment = self._segment
        if segment is not None and segment.cache.get_seq_length() >= segment.until:
            self._finish(segment)

    def _abandon(self) -> None:
        """Close a forward that did not come to its end; some layers have its tokens and others do not."""
        if self._undo is not None:
            self._undo.close()
            self._undo = self._segment = None
            assert self._cache is not None
            self._cache.fail("a forward failed half way")

    def _drop(self, reason: str) -> None:
        """Give up a prompt that did not come to its end."""
        self._abandon()
        if self._segment is not None:
            segment, self._segment = self._segment, None
            segment.cache.fail(reason)

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Group the forwards inside the block into one prompt: nothing is evicted until the block ends.

        Raises:
            SpecError: inside another such block, or outside the context.
        """
        if self._grouping or self._call is not None or self._exit is None or self._architecture.decoder not in _BUSY:
            raise SpecError("prompt()", "a block", "belongs inside the context, and neither in another nor in generate")
        self._grouping = True
        try:
            yield
        except BaseException:
            self._drop("a prompt was left half way")
            raise
        finally:
            self._grouping = False
        self._abandon()
        if self._segment is not None:
            self._finish(self._segment)

    @contextmanager
    def _generating(self, call: Call) -> Iterator[None]:
        if self._grouping:
            raise SpecError("prompt()", "generate", "reads a prompt of its own: not inside the block")
        outer, self._call = self._call, call
        try:
            yield
        finally:
            self._call = outer
            self._drop("a prompt was left half way")

    def _finish(self, segment: Segment) -> None:
        self._segment = None
        try:
            kept, timings = segment.finish()
        except BaseException:
            segment.cache.fail("a policy failed on its prompt")
            raise
        retentions = tuple(one.retention if one.records is None else one.records for one in kept)
        self.retention = retentions if len(retentions) > 1 else retentions[0]
        self.cache, self.timings, self.bytes_saved = segment.cache, timings, segment.bytes_saved
        self.over_budget = sum(one.over_budget for one in kept)


def _check_step(input_ids: Tensor, cache: RetainedCache) -> None:
    if input_ids.shape[1] != 1:
        raise SpecError(
            "input_ids", tuple(input_ids.shape),
            f"a second segment on a cache that has seen {cache.get_seq_length()} tokens (a turn, a chunk of a prompt) "
            "is not served inside the context yet: only single decode steps are",
        )


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
