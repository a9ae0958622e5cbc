"""Name of a model's cache argument: `past_key_values`, or `cache` since transformers 5.24."""

import inspect
from collections.abc import Mapping

from torch import nn
from transformers import GenerationMixin

from spec.errors import SpecError

__all__ = ["CACHE", "NAMES", "cache_name", "for_generate", "with_one_cache"]

NAMES = ("past_key_values", "cache")
"""Names of the cache argument. kvspec uses the first name, which every release of transformers accepts."""

CACHE = NAMES["cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""Name that the installed transformers uses in `generate` and in model outputs."""


def cache_name(module: nn.Module) -> str:
    """Return the name of the cache argument of a module's `forward`.

    A `forward` without named arguments (peft, `torch.compile`) passes all arguments to a transformers model. A model
    file written for an older transformers uses the older name.
    """
    stated = [name for name in NAMES if name in inspect.signature(module.forward).parameters]
    return CACHE if CACHE in stated or not stated else stated[0]


def with_one_cache(given: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a forward pass with the cache renamed to `past_key_values`.

    Raises:
        SpecError: if two caches are given. transformers would silently use one of the caches, or only warn.
    """
    arguments = {name: value for name, value in given.items() if name not in NAMES}
    caches = {name: given[name] for name in NAMES if given.get(name) is not None}
    for name, cache in caches.items():
        if arguments.setdefault(NAMES[0], cache) is not cache:
            reason = f"differs from the cache in {NAMES[0]}: pass only one of the two arguments"
            raise SpecError(name, type(cache).__name__, reason)
    return arguments


def for_generate(given: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of `generate` with the cache under the name that the installed transformers prefers.

    Raises:
        SpecError: if two caches are given.
    """
    arguments = with_one_cache(given)
    return {CACHE if name == NAMES[0] else name: value for name, value in arguments.items()}
