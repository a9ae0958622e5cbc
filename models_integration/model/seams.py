"""Private or undocumented names of transformers. A new release can change them, so no other module uses them."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, cast

from torch import nn
from transformers import GenerationMixin, PretrainedConfig

__all__ = [
    "ATTENTION", "EXPERTS", "LOCALS", "VERSIONS", "attention_of", "calls_of_generate", "choose_attention",
    "eager_attention", "replace_attention",
]

VERSIONS = ">=5.21,<5.25"
"""Versions of transformers that have all names. pyproject.toml states the same range."""

ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"
"""Fields of a config that contain the names of the functions for attention and for experts."""

LOCALS = ("assistant_model", "generation_config", "generation_mode", "input_ids", "kwargs", "model_kwargs", "self")
"""Local variables of `generate` that kvspec reads."""

# The code object is the same for every name, class or bound method by which `generate` is called.
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def attention_of(config: PretrainedConfig) -> str:
    """Return the name of the attention function in a config."""
    # Configs of transformers 5.24 have no public property for the name.
    return cast(str, config._attn_implementation)


def choose_attention(config: PretrainedConfig, name: str) -> None:
    """Store the name of an attention function in a config and in its sub-configs."""
    # `model.set_attn_implementation` needs a model. The identity of a model changes only copies of configs.
    config._attn_implementation = name


def replace_attention(config: PretrainedConfig, name: str) -> None:
    """Store the name of an attention function in a config, but not in its sub-configs."""
    # The setter of `_attn_implementation` writes to sub-configs too (transformers 5.21 to 5.24).
    config._attn_implementation_internal = name


def eager_attention(module: nn.Module) -> Callable[..., Any] | None:
    """Return the eager attention of the modelling file of a module, or None if the file has none.

    Each modelling file has a separate eager attention, which applies the model's soft cap.
    """
    # transformers 5.24 registers no function for "eager": each modelling file passes its own as the default.
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def calls_of_generate(frame: FrameType | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of a thread's running calls of `generate` that have chosen a mode, innermost first.

    Args:
        frame: innermost frame of the thread. None means the current thread.
    """
    # transformers 5.24 passes no generation config to `forward`, and has no hook around `generate`. Forward passes
    # therefore look in the frames. `generation_mode` is set after the checks of `generate`, and before a forward pass.
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if frame.f_code is _GENERATE and frame.f_locals.get("generation_mode") is not None:
            yield frame.f_locals
        frame = frame.f_back
