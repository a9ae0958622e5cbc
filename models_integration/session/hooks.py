"""What a context puts on a model: hooks of the decoder, and a generate of its own. Copies of the model have neither."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock, RLock, get_ident
from typing import Any, TypeAlias, cast

from torch import nn
from transformers import PreTrainedModel

from models_integration.attention.capture import untraced
from models_integration.cache.history import calls_of_generate
from models_integration.model.architecture import BUSY, check_free, decoders_of
from models_integration.model.cache_argument import for_generate
from models_integration.session.generate import check_call
from spec.errors import SpecError

__all__ = ["Hold"]

State: TypeAlias = dict[str, Any]


class Hold:
    """Hooks on a model while a block is open, and while a `generate` that was looked up inside the block runs.

    Args:
        model: whose generate refuses what is not served, and makes one thread wait for another.
        decoder: of the model.
        before: called before each forward of the decoder.
        after: called behind each, failed ones too.
        close: called when the hooks are about to go.

    Attributes:
        begun: whether the block has been entered, once.
        is_open: whether it is open now.
    """

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, before: Callable[..., Any], after: Callable[..., Any],
        close: Callable[[], None],
    ) -> None:
        self.begun = self.is_open = False
        self._model, self._decoder, self._before, self._after, self._close = model, decoder, before, after, close
        self._block, self._hooks = ExitStack(), ExitStack()
        self._turn, self._state = RLock(), Lock()
        self._owner, self._caller = 0, 0
        """Threads: of the block, and of the generate that is running; 0: none."""
        self._users = 0
        """The block, if it is open, and calls of generate."""

    def __getstate__(self) -> State:
        """Of a copy: its block is over."""
        return {"begun": True, "is_open": False}

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread's generate is running."""
        return self._caller not in (0, get_ident())

    def enter(self) -> None:
        """Open the block.

        Raises:
            SpecError: for a model inside a context, or one that another thread generates with.
        """
        self._use()
        self.begun, self.is_open, self._owner = True, True, get_ident()
        generate = getattr(self._model, "generate", None)
        if generate is not None:
            self._block.enter_context(replaced(self._model, "generate", self._guarded(generate)))

    def leave(self) -> None:
        """Close the block; a generate that was taken inside it keeps the hooks, or has yet to begin in its thread.

        Raises:
            SpecError: where another thread is in a generate that was not: it goes on without the policy.
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

    def _is_generating(self) -> bool:
        """Whether another thread is in a generate that keeps no hooks."""
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
                BUSY.add(decoder)
                hooks.callback(BUSY.discard, decoder)
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
            configs = (named.get("generation_config"), self._model.generation_config)
            check_call(named, *(getattr(config, "__dict__", {}) for config in configs))
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


@contextmanager
def hooked(decoder: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Call `before` and `after` around each forward of a decoder; `after` also behind one that failed."""
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
    """Give one module an attribute of its own in place of its class's, or of the one that it had."""
    own = vars(module)
    had = {name: own[name]} if name in own else {}

    def before(state: State) -> State:
        return {key: value for key, value in state.items() if key != name} | had

    own[name] = value
    try:
        with _copied_as(module, before):
            yield
    finally:
        del own[name]
        own.update(had)


@contextmanager
def _copied_as(module: nn.Module, change: Callable[[State], State]) -> Iterator[None]:
    """Let what is copied or pickled of a module have the state that `change` makes of the module's."""
    own, getstate = vars(module), cast(Callable[[], State], module.__getstate__)
    had = {"__getstate__": getstate} if "__getstate__" in own else {}

    def state() -> State:
        return change({name: value for name, value in getstate().items() if name != "__getstate__"})

    own["__getstate__"] = state
    try:
        yield
    finally:
        del own["__getstate__"]
        own.update(had)
