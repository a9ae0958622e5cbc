"""Tests that stages raise `SpecError` for arrays that do not fit each other, and no exception of NumPy or Numba."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from conformance.checks.refusals import unchecked
from conformance.strategies.one_change import CALLS, LATER
from spec.backend import resolve
from spec.errors import SpecError
from spec.parameters import TINY
from spec.records import Trunks

Path = tuple[Any, ...]
BACKENDS = ["numpy", *(name for name in ("numba", "torch") if find_spec(name))]
STAGES = [
    pytest.param(op, marks=pytest.mark.spec(calls.item), id=op) for op, calls in CALLS.items()
    if op not in ("breath.inverse_key_norms", "nestedkv.anomaly_score")
]
"""Stages with several arrays. The others check their only array (test_calls.py)."""
UNREAD = {("activation", "positions"), ("activation", "impact"), ("dissolve", "trunks", "impact")}
"""Members of records that a stage does not read, by stage and the end of their path."""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each array and whole number in an argument, except parameters."""
    members: Any = ()
    if isinstance(value, tuple):
        members = enumerate(value)
    elif is_dataclass(value) and not type(value).__name__.endswith("Parameters"):
        members = vars(value).items()
    elif isinstance(value, np.ndarray) or (isinstance(value, int) and not isinstance(value, bool)):
        yield path, value
    for name, member in members:
        yield from leaves(member, (*path, name))


def changed(value: Any, path: Path, new: Any) -> Any:
    """Return an argument with one array or number replaced."""
    if not path:
        return new
    first, *rest = path
    if isinstance(value, tuple):
        members = [changed(one, tuple(rest), new) if at == first else one for at, one in enumerate(value)]
        return type(value)(*members)
    return replace(value, **{first: changed(getattr(value, first), tuple(rest), new)})


def misfits(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield values that no stage can use in place of an array or a whole number."""
    if isinstance(value, int):
        yield from [("negative", -5), ("not whole", 0.5), ("None", None)]
        return
    yield from [("one more axis", value[None]), ("a number", np.float64(3)), ("a list", value.tolist())]
    yield "empty", value[:0]
    if value.dtype.kind == "i":
        yield "floats", value.astype(np.float64)


def far(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield arrays of integers that have a number far outside of any range."""
    for at in (0, -1):
        for number in (10**9, -5):
            array = value.copy()
            array.flat[at] = number
            yield f"{number} at {at}", array


def outcome(op: str, backend: str, argument: str, path: Path, new: Any) -> str:
    """Return "result", or the text of a SpecError. Other exceptions are raised."""
    family, _, name = op.partition(".")
    given = dict(CALLS[op].arguments)
    given[argument] = changed(given[argument], path, new)
    try:
        getattr(getattr(resolve(backend), family), name)(*given.values())
    except SpecError as error:
        return str(error)
    return "result"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", STAGES)
def test_arrays_that_do_not_fit_are_refused(op: str, backend: str) -> None:
    """Check each array and whole number of a valid call. Far integers have a result or a SpecError."""
    for argument, given in CALLS[op].arguments.items():
        for path, value in leaves(given):
            for kind, new in misfits(value):
                if (op.split(".")[1], *(path[-1:] if argument == "live" else (argument, *path))) in UNREAD:
                    continue
                with unchecked():
                    shown = outcome(op, backend, argument, path, new)
                assert " = " in shown, (argument, path, kind)
            if isinstance(value, np.ndarray) and value.dtype.kind == "i":
                for _, new in far(value):
                    with unchecked():
                        outcome(op, backend, argument, path, new)


@pytest.mark.spec("CC-TRUNK-EDGES")
@pytest.mark.parametrize("backend", BACKENDS)
def test_edges_to_tokens_before_the_segment_belong_to_another_stage(backend: str) -> None:
    """Check stage S4 of a prompt, which a caller gives a later segment with edges to earlier tokens."""
    trunks = Trunks(np.array([24, 36, 48]), np.ones(2))
    with pytest.raises(SpecError) as caught:
        resolve(backend).require_crystal().graph(LATER, trunks, TINY)
    assert (caught.value.argument, caught.value.value) == ("cross", 0)
    assert "must lie in [24, 48)" in caught.value.bound
    assert "call breath.segment_graph" in caught.value.bound
