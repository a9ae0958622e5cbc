"""Run policies on `transformers` models: process the prompt, select tokens, evict the other tokens, and generate.

    policy = CrystalCache(budget=0.5, sentence_ends=sentence_ends(tokenizer))
    with policy(model) as run:
        output = model.generate(**inputs, max_new_tokens=200)
    run.retentions, run.timings, run.bytes_freed

Importing `models_integration` imports neither torch nor transformers, because Python imports each class or function on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models_integration.cache.continuation import Decision
    from models_integration.cache.retained_cache import RetainedCache
    from models_integration.cache.snapshot import load_cache, save_cache
    from models_integration.policies.calibration import calibrate
    from models_integration.policies.epicache import Episodes, layer_similarities, prefill_episodes
    from models_integration.policies.methods import (
        CrystalCache,
        CustomPolicy,
        FullCache,
        NamedPolicy,
        RetentionPolicy,
        StreamingLLM,
        policy_from_name,
    )
    from models_integration.policies.prefill import Prefilled, prefill
    from models_integration.policies.values import repeat_template, sentence_ends
    from models_integration.session.method import decide
    from models_integration.session.observed import ObservedSegment
    from models_integration.session.session import Session
    from models_integration.session.verbs import compact, observe

__all__ = [
    "CrystalCache", "CustomPolicy", "Decision", "Episodes", "FullCache", "NamedPolicy", "ObservedSegment", "Prefilled",
    "RetainedCache", "RetentionPolicy", "Session", "StreamingLLM", "calibrate", "compact", "decide",
    "layer_similarities", "load_cache", "observe", "policy_from_name", "prefill", "prefill_episodes", "repeat_template",
    "save_cache", "sentence_ends",
]

_HOME = {
    "CrystalCache": "policies.methods", "CustomPolicy": "policies.methods", "FullCache": "policies.methods",
    "RetentionPolicy": "policies.methods", "StreamingLLM": "policies.methods", "Decision": "cache.continuation",
    "ObservedSegment": "session.observed", "decide": "session.method", "compact": "session.verbs",
    "observe": "session.verbs", "Prefilled": "policies.prefill", "prefill": "policies.prefill",
    "NamedPolicy": "policies.methods", "policy_from_name": "policies.methods",
    "calibrate": "policies.calibration", "Session": "session.session",
    "Episodes": "policies.epicache", "layer_similarities": "policies.epicache",
    "prefill_episodes": "policies.epicache",
    "RetainedCache": "cache.retained_cache", "load_cache": "cache.snapshot", "save_cache": "cache.snapshot",
    "sentence_ends": "policies.values", "repeat_template": "policies.values",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
