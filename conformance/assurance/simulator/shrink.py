"""Delta debugging (Zeller and Hildebrandt 2002) over a script: operations go, as long as the same finding stays."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.assurance.simulator.operations import Operation
from conformance.assurance.simulator.states import Met
from conformance.assurance.simulator.world import World

__all__ = ["MEMORY", "finding", "shrunk"]

MEMORY = next((folder for folder in ("/dev/shm",) if Path(folder).is_dir()), None)
"""Where a world's folder is made: a disk's fsyncs would be waited for."""
TRIALS = 300


def finding(operations: Sequence[Operation], met: Met) -> str | None:
    """What a script finds, in one line; None where all holds.

    Raises:
        KeyboardInterrupt: the user's.
    """
    with TemporaryDirectory(dir=MEMORY) as folder:
        try:
            with World(Path(folder), met) as world:
                for operation in operations:
                    world.apply(operation)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def kind_of(found: str | None) -> str | None:
    """A finding without its numbers and paths, which change: what a shorter script must still find."""
    return None if found is None else re.sub(r"/\S+|\d", "", found.split("[")[0])[:60]


def shrunk(
    operations: Sequence[Operation], find: Callable[[Sequence[Operation]], str | None] | None = None,
) -> list[Operation]:
    """A script of which no operation can go without losing the finding, or as short as the trials allow."""
    look = find or (lambda part: finding(part, Met()))
    wanted, left, parts, trials = kind_of(look(operations)), list(operations), 2, 0
    while len(left) > 1 and trials < TRIALS:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            rest, trials = left[:start] + left[start + size :], trials + 1
            if kind_of(look(rest)) == wanted:
                left, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), 2 * parts)
    return left
