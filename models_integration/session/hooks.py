"""Hooks of the decoder, and calls of `generate`: a replaced method, checks, and data for each forward pass.

Copies of the model have neither the hooks nor the replaced method.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Lock, RLock, get_ident
from typing import Any, NoReturn, TypeAlias, cast
from warnings import warn
from weakref import WeakMethod

from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import untraced
from models_integration.cache.history import columns_of, empty_cache_of
from models_integration.cache.retained_cache import check_cache
from models_integration.model.architecture import DECODERS_IN_SESSION, check_free, decoders_of
from models_integration.model.cache_argument import for_generate, with_one_cache
from models_integration.model.seams import calls_of_generate
from models_integration.session.inputs import ONE_FORWARD
from spec.errors import SpecError

__all__ = ["NO_CALL", "Call", "Hold", "call_under_way", "check_call", "weakly"]

State: TypeAlias = dict[str, Any]

# Arguments of generate that are not supported, each with the reason.
_GENERATE = {
    "inputs_embeds": "pass input_ids: policies read the tokens",
    "cache_implementation": "must be left out: static, offloaded and quantised caches cannot be compacted",
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
        "must be left out: assisted decoding removes tokens from the cache, which is not supported",
    ),
}
_TOGETHER = "is in a forward pass of a different thread: join the thread, or use a lock around each call of the model"
_BATCHING = "init_continuous_batching"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


@dataclass(frozen=True)
class Call:
    """One call of generate. The defaults describe a forward pass outside generate, in which no row repeats a prompt."""

    rows: int = sys.maxsize
    """Number of given prompts. generate repeats each prompt for beams and returned sequences."""
    columns: int = sys.maxsize
    """Number of columns of the input, including columns that the cache has seen. Later tokens are generated."""
    chunk: int | None = None
    """Number of tokens in each forward pass over the input. None: the input is processed in one forward pass."""
    beams: int = 1
    config: object = None
    """Copy of the generation config that belongs to the call. The copy identifies the call."""
    empty_cache: object = None
    """Cache that generate made for the call, because the caller passed none. The session uses a cache of its own."""

    @property
    def segment_end(self) -> int:
        """Number of columns that the cache has seen after the last chunk. Without chunks, ONE_FORWARD."""
        return ONE_FORWARD if self.chunk is None or self.columns <= self.chunk else self.columns


NO_CALL = Call()


def call_under_way(decoder: nn.Module, last: Call) -> Call:
    """Return the call of generate that contains the present forward pass of a decoder. Outside generate, NO_CALL.

    Args:
        decoder: decoder of the model. A model that shares the decoder may have started generate.
        last: result of this function at the previous forward pass of the decoder.

    Raises:
        SpecError: if the call uses the cache in a way that is not supported. Raised at the first forward pass.
    """
    for call in calls_of_generate():
        if decoder in decoders_of(call["self"]):
            return last if call["generation_config"] is last.config else _begun(call)
    return NO_CALL


def _begun(call: Mapping[str, Any]) -> Call:
    config, mode = call["generation_config"], call["generation_mode"].value
    check_call({"assistant_model": call["assistant_model"]}, vars(config))
    if mode not in _MODES:
        raise SpecError("generate", mode, f"is not supported inside `with policy(model)`: use {' or '.join(_MODES)}")
    if getattr(config, "is_assistant", False):
        raise SpecError("assistant_model", "this model", _GENERATE["assistant_model"])
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    rows = len(call["input_ids"]) // copies
    return Call(rows, columns_of(call), config.prefill_chunk_size, config.num_beams or 1, config, empty_cache_of(call))


def check_call(*stated: Mapping[str, object]) -> None:
    """Check that generate uses the cache only in supported ways.

    Args:
        stated: values by argument name, highest priority first: arguments, their generation config, the model's config.

    Raises:
        SpecError: if an argument is not supported. The error names the argument.
    """
    def effective(name: str) -> Any:
        return next((value for each in stated if (value := each.get(name)) is not None), None)

    for name, reason in _GENERATE.items():
        value = effective(name)
        # Configs of Gemma on the hub contain "hybrid", which `generate` ignores as a default (transformers 5.24).
        if value is not None and value is not False and str(value) not in ("dynamic", "dynamic_full", "hybrid"):
            shown = value if isinstance(value, (int, str)) else type(value).__name__
            raise SpecError(name, shown, reason)
    guidance = effective("guidance_scale")
    if guidance not in (None, 1):
        raise SpecError("guidance_scale", guidance, "must be None or 1, because guidance needs a second cache")
    if effective("use_cache") is False:
        raise SpecError("use_cache", False, "must be True, because eviction needs a cache")
    if effective("prefill_chunk_size") is not None and effective("token_healing"):
        raise SpecError(
            "token_healing", True,
            "cannot be used with prefill_chunk_size, because token healing changes the prompt: leave out one",
        )


def _check_inputs(*given: object) -> None:
    """Check that the tokens of a prompt are a tensor.

    Raises:
        SpecError: if the tokens are text, a list, or the result of a tokenizer.
    """
    for inputs in given:
        if inputs is not None and not isinstance(inputs, Tensor):
            shown = inputs if isinstance(inputs, str) else type(inputs).__name__
            reason = "must be a tensor: type model.generate(**tokenizer(text, return_tensors='pt'))"
            raise SpecError("inputs", shown, reason)


def _refuse_batching(*_: object, **__: object) -> NoReturn:
    reason = "is not supported inside `with policy(model)`: type model.generate"
    raise SpecError("generate_batch", "continuous batching", reason)


class Hold:
    """Hooks on a model while a block is open, or while a `generate` that was looked up inside the block runs.

    Args:
        model: model whose generate is replaced. The new generate checks arguments, and runs in one thread at a time.
        decoder: decoder of the model.
        before: function to call before each forward pass of the decoder.
        after: function to call after each forward pass of the decoder, including failed forward passes.
        close: function to call before the hooks are removed.

    Attributes:
        begun: True if the block has been entered. A block can be entered once.
        is_open: True if the block is open now.
    """

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, before: Callable[..., Any], after: Callable[..., Any],
        close: Callable[[], None],
    ) -> None:
        self.begun = self.is_open = False
        self._model, self._decoder, self._before, self._after, self._close = model, decoder, before, after, close
        self._block, self._hooks = ExitStack(), ExitStack()
        self._turn, self._state, self._claims = RLock(), Lock(), Lock()
        self._owner, self._caller, self._reader = 0, 0, 0
        """Ids of the thread of the block, of the thread that runs generate, and of the thread of the last forward pass.

        0 means no thread.
        """
        self._users = 0
        """Number of users of the hooks: running calls of generate, plus 1 if the block is open."""

    def __getstate__(self) -> State:
        """Return the state of a copy. The block of a copy is closed and cannot be entered."""
        return {"begun": True, "is_open": False}

    @property
    def is_claimed(self) -> bool:
        """True if the last forward pass that `claim` admitted is of this thread."""
        return self._reader == get_ident()

    def claim(self, name: str) -> None:
        """Check, at the start of a forward pass, that no different thread uses the model. Then record this thread.

        Args:
            name: name of the model, for the error message.

        Raises:
            SpecError: if a different thread runs generate, or is in a forward pass.
        """
        with self._claims:
            if self._caller not in (0, get_ident()):
                reason = "another thread runs generate on the model with a policy: join the thread first"
                raise SpecError("model", name, reason)
            if not self.is_claimed and self._is_reading(self._reader):
                raise SpecError("model", name, _TOGETHER)
            self._reader = get_ident()

    def _is_reading(self, thread: int) -> bool:
        """Return True if a thread is in a forward pass of the decoder. A forward pass that Ctrl-C ended is none."""
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_locals.get("self") is self._decoder:
                return True
            frame = frame.f_back
        return False

    def enter(self) -> None:
        """Open the block.

        Raises:
            SpecError: if the model is already inside a context, or if a different thread runs generate on the model.
        """
        self._use()
        self.begun, self.is_open, self._owner = True, True, get_ident()
        # transformers 5.24 has no hook around `generate`, so the method of this object is replaced.
        generate = getattr(self._model, "generate", None)
        if generate is not None:
            self._block.enter_context(replaced(self._model, "generate", self._guarded(generate)))
        # `generate_batch` calls this method, and would report an error of a forward pass only after a minute.
        if hasattr(self._model, _BATCHING):
            self._block.enter_context(replaced(self._model, _BATCHING, _refuse_batching))

    def leave(self) -> None:
        """Close the block. The hooks stay while a `generate` that was looked up inside the block runs.

        Raises:
            SpecError: if a different thread runs a `generate` that was looked up outside the block. This `generate`
                continues without the policy.
        """
        self._block.close()
        self.is_open = False
        lost = self._is_generating()
        self._release()
        if lost:
            reason = (
                "join the thread of generate before the block ends, and pass the model that generates to the policy"
            )
            raise SpecError("generate", "still running", reason)

    def abandon(self) -> None:
        """Remove the hooks of a session that was entered by hand, never left, and is no longer referenced, and warn."""
        if self.is_open:
            self._block.close()
            self.is_open = False
            self._release()
            warn(
                f"nothing holds the session of this {type(self._model).__name__}, so the model evicts nothing from now "
                "on: write `with policy(model) as run:`", RuntimeWarning, stacklevel=2,
            )

    def _is_generating(self) -> bool:
        """Return True if a different thread runs a `generate` that was looked up outside the block."""
        known = get_ident(), self._caller
        others = (frame for thread, frame in sys._current_frames().items() if thread not in known)
        return any(self._decoder in decoders_of(call["self"]) for one in others for call in calls_of_generate(one))

    def _use(self) -> None:
        with self._state:
            if not self._users:
                self._place()
            self._users += 1

    def _place(self) -> None:
        check_free(self._model)
        if self._is_generating():
            reason = "another thread runs generate on the model: join the thread first"
            raise SpecError("model", type(self._model).__name__, reason)
        with ExitStack() as hooks:
            for decoder in decoders_of(self._model):
                DECODERS_IN_SESSION.add(decoder)
                hooks.callback(DECODERS_IN_SESSION.discard, decoder)
            hooks.enter_context(hooked(self._decoder, self._before, self._after))
            hooks.callback(self._close)
            self._hooks = hooks.pop_all()

    def _release(self) -> None:
        with self._state:
            self._users -= 1
            if not self._users:
                self._hooks.close()

    def _guarded(self, generate: Callable[..., object]) -> Callable[..., object]:
        @wraps(generate)
        def guarded(*args: object, **kwargs: object) -> object:
            named = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
            _check_inputs(named.get("inputs"), named.get("input_ids"))
            configs = (named.get("generation_config"), self._model.generation_config)
            check_call(named, *(getattr(config, "__dict__", {}) for config in configs))
            if (cache := with_one_cache(named).get("past_key_values")) is not None:
                check_cache(cache)
            if not self.is_open and get_ident() == self._owner:
                reason = "the `with` block of this function has ended: call model.generate, which uses no policy"
                raise SpecError("generate", "taken inside a context", reason)
            with self._turn:
                return self._call(generate, *args, **for_generate(kwargs))

        return guarded

    def _call(self, generate: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._use()
        outer, self._caller = self._caller, get_ident()
        try:
            return generate(*args, **kwargs)
        finally:
            self._caller = outer
            self._release()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method while the object exists, and does nothing afterwards."""
    known = WeakMethod(method)

    def call(*args: object, **kwargs: object) -> object:
        bound = known()
        return None if bound is None else bound(*args, **kwargs)

    return call


@contextmanager
def hooked(decoder: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Call `before` before, and `after` after, each forward pass of a decoder, even if the forward pass fails."""
    # `always_call` also calls the hook after a forward pass that raises (torch 2.6 to 2.13).
    handles = (
        decoder.register_forward_pre_hook(untraced(before), with_kwargs=True),
        decoder.register_forward_hook(untraced(after), always_call=True),
    )
    ours = {handle.id for handle in handles}

    def without(state: State) -> State:
        return {
            name: type(value)((key, hook) for key, hook in value.items() if key not in ours)
            if isinstance(value, dict) and ours & value.keys() else value
            for name, value in state.items()
        }

    try:
        with _copied_as(decoder, without):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set an attribute of one module during the block. Afterwards the module has the former attribute again."""
    attributes = vars(module)
    had = {name: attributes[name]} if name in attributes else {}

    def before(state: State) -> State:
        return {key: value for key, value in state.items() if key != name} | had

    attributes[name] = value
    try:
        with _copied_as(module, before):
            yield
    finally:
        del attributes[name]
        attributes.update(had)


@contextmanager
def _copied_as(module: nn.Module, change: Callable[[State], State]) -> Iterator[None]:
    """Context manager: inside the block, copies and pickles of the module have `change(state)` instead of `state`."""
    # `copy.deepcopy` and `pickle` call the `__getstate__` of the object, also if its dictionary has it (Python 3.11).
    attributes, getstate = vars(module), cast(Callable[[], State], module.__getstate__)
    had = {"__getstate__": getstate} if "__getstate__" in attributes else {}

    def state() -> State:
        return change({name: value for name, value in getstate().items() if name != "__getstate__"})

    attributes["__getstate__"] = state
    try:
        yield
    finally:
        del attributes["__getstate__"]
        attributes.update(had)
