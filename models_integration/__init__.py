"""Retention policies on `transformers` models: observe the prompt, decide, compact the cache, keep generating.

    policy = CrystalCache(budget=0.5, sentence_ends=sentence_ends(tokenizer))
    with policy(model) as run:
        output = model.generate(**inputs, max_new_tokens=200)
    run.retention, run.timings, run.bytes_saved

Names are loaded when they are first used, so that importing this package imports neither torch nor transformers.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models_integration.cache import RetainedCache
    from models_integration.calibration import calibrate
    from models_integration.methods import CrystalCache, FullCache, Method, StreamingLLM
    from models_integration.published import Published
    from models_integration.sentence_ends import sentence_ends
    from models_integration.session import Prefilled, Session, prefill
    from models_integration.snapshot import load_cache, save_cache

__all__ = [
    "CrystalCache", "FullCache", "Method", "Prefilled", "Published", "RetainedCache", "Session", "StreamingLLM",
    "calibrate", "load_cache", "prefill", "save_cache", "sentence_ends",
]

_HOME = {
    "CrystalCache": "methods", "FullCache": "methods", "Method": "methods", "StreamingLLM": "methods",
    "Prefilled": "session", "Session": "session", "prefill": "session",
    "Published": "published", "load_cache": "snapshot", "save_cache": "snapshot",
    "RetainedCache": "cache", "calibrate": "calibration", "sentence_ends": "sentence_ends",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `sentence_ends` the function: importing the submodule of that name would bind the submodule over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
