"""The argument by which a model is given its cache: `past_key_values`, and `cache` since transformers 5.24."""

import inspect
from collections.abc import Mapping

from torch import nn
from transformers import GenerationMixin

from spec.errors import SpecError

__all__ = ["CACHE", "NAMES", "cache_name", "for_generate", "with_one_cache"]

NAMES = ("past_key_values", "cache")
"""The first is what this package and its errors call the argument: every transformers so far accepts it."""

CACHE = NAMES["cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
"""The name that the installed transformers has, in its generate and in what its models return."""


def cache_name(module: nn.Module) -> str:
    """The name by which a module's forward takes a cache.

    A forward that does not say (peft, `torch.compile`) hands all that it is given on to a model of transformers; a
    model whose file is older than the installed transformers has the older name.
    """
    stated = [name for name in NAMES if name in inspect.signature(module.forward).parameters]
    return CACHE if CACHE in stated or not stated else stated[0]


def with_one_cache(given: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a forward, whose cache is `past_key_values` by whichever of its names it was given.

    Raises:
        SpecError: for two caches: transformers would read one of them, and say nothing or only warn.
    """
    arguments = {name: value for name, value in given.items() if name not in NAMES}
    caches = {name: given[name] for name in NAMES if given.get(name) is not None}
    for name, cache in caches.items():
        if arguments.setdefault(NAMES[0], cache) is not cache:
            reason = f"is not the cache that {NAMES[0]} names: leave one of the two out"
            raise SpecError(name, type(cache).__name__, reason)
    return arguments


def for_generate(given: Mapping[str, object]) -> dict[str, object]:
    """The arguments of generate, whose cache has the name that the installed transformers does not deprecate.

    Raises:
        SpecError: for two caches.
    """
    arguments = with_one_cache(given)
    return {CACHE if name == NAMES[0] else name: value for name, value in arguments.items()}
