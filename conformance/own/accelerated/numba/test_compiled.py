"""Machine code on disk is that of the types that are asked for, whichever processes fill the cache at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the Numba backend needs it")

from numba.core.caching import IndexDataCacheFile

from accelerated.numba_cpu.compiled import Files, digest_of
from conformance.paths import ROOT

pytestmark = pytest.mark.law("saved-is-what-was")

HITS_AND_MISSES = """
import numpy as np
from accelerated.numba_cpu.crystallization import crystallization
crystallization(np.ones(3), 1.0, 1e-8)
print(*(sum(each.values()) for each in crystallization.stats[1:]))
"""


def read_after_a_race(kind: type[IndexDataCacheFile], home: Path) -> dict[str, str | None]:
    """Two processes find an empty index; the first one's data reach the disk when the second is done."""
    first, second = (kind(str(home), "f-1.py311", "stamp") for _ in range(2))
    late: list[tuple[str, str]] = []
    first._save_data = lambda name, data: late.append((name, data))
    first.save("integers", "code for integers")
    second._load_index = dict
    second.save("floats", "code for floats")
    for name, data in late:
        kind._save_data(first, name, data)
    later = kind(str(home), "f-1.py311", "stamp")
    return {types: later.load(types) for types in ("integers", "floats")}


def test_processes_that_compile_at_once_never_read_each_other_s_code(tmp_path: Path) -> None:
    assert read_after_a_race(Files, tmp_path) == {"integers": None, "floats": "code for floats"}


def test_numba_s_own_cache_gives_code_for_other_types(tmp_path: Path) -> None:
    """The reason for ours, which may go once this fails."""
    assert read_after_a_race(IndexDataCacheFile, tmp_path)["floats"] == "code for integers"


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_DISABLE_JIT": "0"}
    told = [
        subprocess.run(
            [sys.executable, "-c", HITS_AND_MISSES], check=True, cwd=ROOT, env=environment, capture_output=True,
            text=True,
        ).stdout.split()
        for _ in range(2)
    ]
    (no_hits, misses), (hits, no_misses) = told
    assert (no_hits, no_misses) == ("0", "0")
    assert misses == hits != "0"


def test_code_is_compiled_anew_once_any_source_changes(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    before = digest_of(tmp_path)
    (tmp_path / "two.py").touch()
    assert digest_of(tmp_path) == before
    (tmp_path / "two.py").write_text("x = 2\n", encoding="utf-8")
    assert digest_of(tmp_path) != before
