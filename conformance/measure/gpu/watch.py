"""A backend whose stages are timed as they run, and that remembers what S1 was given and found."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from conformance.measure.gpu.measure import synchronize
from spec.backend import Backend, CrystalStages
from spec.records import CoAttention

__all__ = ["Watch"]


class Watch:
    """Stands before a backend's stages; `backend` is what to hand on."""

    def __init__(self, backend: Backend) -> None:
        self._stages = backend.require_crystal()
        self.backend = replace(backend, crystal=cast(CrystalStages, self))
        self.seconds: dict[str, float] = defaultdict(float)
        self.given: tuple[Any, ...] = ()
        """The arguments of the last S1."""
        self.found: CoAttention | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        stage = getattr(self._stages, name)

        def timed(*arguments: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            result = stage(*arguments)
            synchronize()
            self.seconds[name] += time.perf_counter() - start
            if name == "coattention":
                self.given, self.found = arguments, result
            return result

        return timed
