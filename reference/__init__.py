"""The executable specification: a readable NumPy function in float64 for each item of the specification.

The package `reference` needs only NumPy and jaxtyping.

    import reference
    reference.crystalcache.prefill(q, k, token_ids, sentence_ends, budget=0.5)

`reference` imports a submodule when the submodule is first used.
"""

try:
    from spec import SPEC_VERSION
except ImportError as error:  # a different distribution may have installed a package named spec
    import importlib.util

    _other = importlib.util.find_spec("spec")
    raise ImportError(
        "kvspec needs its own package 'spec', and found another one at "
        f"{_other.origin if _other else 'no path'}; install kvspec into a virtual environment of its own"
    ) from error

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference import crystalcache, diversity, injection, nestedkv, policies, statistics, triattention

__all__ = [
    "SPEC_VERSION", "crystalcache", "diversity", "injection", "nestedkv", "policies", "statistics", "triattention",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
