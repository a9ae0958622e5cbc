"""Numba's `njit` with a disk cache that several processes can write at the same time."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

__all__ = ["Files", "compiled", "digest_of"]

Function = TypeVar("Function", bound=Callable[..., Any])


def digest_of(folder: Path) -> str:
    """Return a hash of all source files in a folder. A compiled function can contain code of several modules."""
    sources = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"\0".join(b"\0".join([x.name.encode(), x.read_bytes()]) for x in sources)).hexdigest()


SOURCES = digest_of(Path(__file__).parent)


class Files(IndexDataCacheFile):  # type: ignore[misc]  # Numba is untyped
    """Cache files (an index and data files). The number of a data file is a hash of the contents.

    Numba's standard cache numbers data files in sequence. Two processes that compile one function for different types
    can write to the same data file. A later process then runs code for the wrong types without an error (Numba issue
    4807).
    """

    def save(self, key: object, data: object) -> None:
        """Write the data, then the index. Numba compiles again if another process adds an entry meanwhile."""
        name = self._data_name(int.from_bytes(hashlib.sha256(self._dump(data)).digest()[:8], "big"))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


# numba 0.68 has no public way to give a function a different cache: `njit(cache=True)` always makes a FunctionCache.
class _Cache(FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = Files(self._cache_path, self._impl.filename_base, SOURCES)


def compiled(**options: Any) -> Callable[[Function], Function]:
    """Return the decorator `njit(cache=True)` with these options. NUMBA_DISABLE_JIT=1 leaves functions unchanged."""
    def decorate(function: Function) -> Function:
        created: Any = njit(**options)(function)
        if created is not function:
            created._cache = _Cache(function)
        result: Function = created
        return result

    return decorate
