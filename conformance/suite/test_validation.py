"""Bad input: each refused by the name of its argument, before anything changes."""

import math
import pickle
from typing import Any

import numpy as np
import pytest

from conformance.checks.refusals import refused, unchecked
from reference.crystalcache import prefill
from spec.backend import Backend
from spec.parameters import TINY

N = 6


def good() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((4, N, 4)), "k": rng.standard_normal((2, N, 4)), "token_ids": np.arange(N),
        "sentence_ends": frozenset({2}), "budget": 0.5, "parameters": TINY,
    }


def with_value(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    changed = array.copy()
    changed.flat[5] = value
    return changed


def ones(*shape: int, dtype: type = np.float64) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    *[("budget", f"budget {value!r}", {"budget": value})
      for value in (0.0, 0, -3, 1.5, math.nan, math.inf, "half", True, None)],
    *[(name, f"{name} holds {value}", {name: with_value(good()[name], value)})
      for name in ("q", "k") for value in (math.nan, math.inf, -math.inf)],
    ("token_ids", "negative id", {"token_ids": np.array([0, 1, -1, 2, 3, 4])}),
    ("token_ids", "fewer ids than keys", {"token_ids": np.arange(N - 1)}),
    ("token_ids", "more ids than keys", {"token_ids": np.arange(N + 1)}),
    ("token_ids", "ids are floats", {"token_ids": np.arange(float(N))}),
    ("token_ids", "ids are bools", {"token_ids": np.ones(N, np.bool_)}),
    ("token_ids", "ids in a batch", {"token_ids": np.arange(N)[None]}),
    ("k", "k longer than q and ids", {"k": ones(2, N + 2, 4)}),
    ("k", "fewer queries than keys and ids", {"k": ones(2, N + 1, 4), "token_ids": np.arange(N + 1)}),
    ("q", "more queries than keys", {"q": ones(4, N + 1, 4)}),
    ("q", "n = 0", {"q": ones(4, 0, 4), "k": ones(2, 0, 4), "token_ids": np.arange(0)}),
    ("token_ids", "n = 1", {"q": ones(4, 1, 4), "k": ones(2, 1, 4), "token_ids": np.arange(1)}),
    ("q", "heads that do not divide", {"q": ones(3, N, 4)}),
    ("q", "fewer heads than k", {"q": ones(1, N, 4)}),
    ("k", "another head dimension", {"k": ones(2, N, 5)}),
    ("q", "no head dimension", {"q": ones(4, N, 0), "k": ones(2, N, 0)}),
    ("q", "no head", {"q": ones(0, N, 4)}),
    ("k", "no KV head", {"k": ones(0, N, 4)}),
    ("q", "a batch axis", {"q": ones(1, 4, N, 4)}),
    ("k", "a matrix", {"k": ones(N, 4)}),
    ("q", "integers", {"q": ones(4, N, 4, dtype=np.int64)}),
    ("k", "complex numbers", {"k": ones(2, N, 4, dtype=np.complex128)}),
    ("q", "a list", {"q": [[[1.0]]]}),
    ("q", "nothing", {"q": None}),
    ("sentence_ends", "no sentence ends", {"sentence_ends": frozenset()}),
    ("sentence_ends", "None", {"sentence_ends": None}),
    ("sentence_ends", "text", {"sentence_ends": ".!?"}),
    ("sentence_ends", "words", {"sentence_ends": {"."}}),
    ("sentence_ends", "a negative end", {"sentence_ends": {-1}}),
    ("sentence_ends", "a bool", {"sentence_ends": {True}}),
    ("scaling", "scaling 0", {"scaling": 0.0}),
    ("scaling", "scaling NaN", {"scaling": math.nan}),
    ("softcap", "softcap -1", {"softcap": -1.0}),
    ("softcap", "softcap infinite", {"softcap": math.inf}),
    ("backend", "an unknown backend", {"backend": "nampy"}),
]


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize(("argument", "change"), [bad[::2] for bad in BAD], ids=[bad[1] for bad in BAD])
def test_bad_input_is_refused_by_name(backend: Backend, argument: str, change: dict[str, Any]) -> None:
    """A SpecError MUST name the argument, what came and the bound; inputs stay as they were."""
    arguments = {**good(), "backend": backend, **change}
    before = pickle.dumps({name: value for name, value in arguments.items() if name != "backend"})
    with unchecked(), refused(argument, arguments.get(argument)):
        prefill(**arguments)
    assert pickle.dumps({name: value for name, value in arguments.items() if name != "backend"}) == before


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize(
    ("argument", "change"),
    [("q", {"q": with_value(good()["q"], math.nan)}), ("k", {"k": with_value(good()["k"], math.inf)}),
     ("q", {"q": ones(3, N, 4)}), ("k", {"k": ones(2, N, 5)}), ("q", {"q": ones(4, N + 1, 4)})],
)
def test_the_first_stage_refuses_bad_tensors_itself(backend: Backend, argument: str, change: dict[str, Any]) -> None:
    """A stage is a door of its own: a policy calls it without `prefill`."""
    arguments = {**good(), **change}
    with unchecked(), refused(argument, arguments[argument]):
        backend.require_crystal().coattention(arguments["q"], arguments["k"], np.arange(N), TINY, 0.5, None)


@pytest.mark.spec("CC-PREFILL")
def test_good_input_is_accepted(backend: Backend) -> None:
    """The base of the cases above is no bad input itself."""
    assert len(prefill(**good(), backend=backend).kept) >= 5
