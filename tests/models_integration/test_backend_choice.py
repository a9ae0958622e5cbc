"""Choice of the backend "auto", and the backend that a run reports for each stage."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.measure.gpu.counts import constants, deep_llama, text
from models_integration import CrystalCache, NamedPolicy, policy_from_name
from models_integration.policies import fastest
from reference.backend import BACKEND
from reference.crystalcache import prefill as reference_prefill
from reference.policies.budgets import even
from reference.policies.names import with_twins
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.backend import Backend, NestedKVStages, resolve
from spec.composition import ANY_SETS
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import TINY
from spec.policy import LayerView, Needs, Policy
from tests.models_integration.session.families import ENDS, build, greedy, prompt

pytestmark = pytest.mark.law("as-it-is-described")


def found_as(name: str | Backend) -> Backend:
    """Return the reference under the name of a backend, or raise for numba. The backend torch has only a part."""
    if name == "numba":
        raise BackendUnavailable("no numba here")
    return replace(BACKEND, name=str(name), crystal=None if name == "torch" else BACKEND.crystal)


@pytest.mark.parametrize(
    ("device", "name", "taken"),
    [
        ("cpu", "crystalcache", "numpy"), ("cuda", "crystalcache", "triton"), ("cpu", "tova", "torch"),
        ("cuda", "tova", "torch"), ("cpu", "snapkv", "torch"), ("cuda", "snapkv", "torch"), ("mps", "snapkv", "torch"),
        ("cpu", "diverse-tova", "torch"), ("cuda", "diverse-snapkv", "torch"),
    ],
)
def test_auto_takes_a_backend_that_can_run_and_has_the_stages(
    device: str, name: str, taken: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastest, "resolve", found_as)
    assert fastest.fastest(name, device).name == taken


@pytest.mark.parametrize(
    ("row", "taken"), [({}, "numba"), ({"numba": 0.2, "torch": 0.1}, "torch"), ({"numpy": 0.1, "numba": 0.2}, "numpy")],
)
def test_auto_follows_the_measurement_and_without_a_row_the_code_of_numba(
    row: dict[str, float], taken: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastest, "_measured", lambda: {"cpu": {"h2o": row}})
    assert NamedPolicy("h2o").on(build("llama")).engine.name == taken
    assert fastest.fastest("diverse-h2o-described", "cpu").name == "numba"
    assert fastest.fastest("snapkv", "cpu").name == "torch"


def test_auto_is_the_fastest_measured_backend_of_each_policy() -> None:
    rows = json.loads(Path(fastest.__file__).with_name(fastest.MEASURED).read_text())["cpu"]["added"]
    assert {name: fastest.fastest(name, "cpu").name for name in rows} == {
        name: min(row, key=lambda backend: row[backend]) for name, row in rows.items()
    }


class Shifted(type(BACKEND.crystal)):  # type: ignore[misc]
    """Stages of the reference with a separate attention function."""

    def coattention(self, *args: Any) -> Any:
        """Return the attention of the reference."""
        return BACKEND.require_crystal().coattention(*args)


class Wrong(NestedKVStages):
    """Stages with wrong scores."""

    def anomaly_score(self, *args: Any) -> Any:
        """Return the negative scores of the reference."""
        return -BACKEND.require_nestedkv().anomaly_score(*args)


def test_auto_leaves_a_kernel_out_that_differs_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str | Backend) -> Backend:
        return replace(found_as(name), nestedkv=Wrong()) if name == "triton" else found_as(name)

    monkeypatch.setattr(fastest, "resolve", found)
    with pytest.warns(UserWarning, match=r"'triton': the stage 'nestedkv.anomaly_score' differs from the reference"):
        assert fastest.fastest("crystalcache", "cuda").name == "numpy"
    monkeypatch.setattr(fastest, "resolve", lambda name: Backend("bare"))
    with pytest.raises(BackendUnavailable, match="no backend with the stages of crystalcache"):
        CrystalCache(0.5, ENDS)


def test_auto_does_not_use_torch_for_the_stages_that_failed_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that both backends are left out on a GPU, because they share the stages. On a CPU torch is not checked."""
    def no_result(*args: Any) -> Any:
        raise RuntimeError

    def shared(name: str | Backend) -> Backend:
        return replace(BACKEND, name=str(name), prefill=no_result if name in ("triton", "torch") else None)

    monkeypatch.setattr(fastest, "resolve", shared)
    with pytest.warns(UserWarning, match="the stage 'prefill' differs") as caught:
        assert fastest.fastest("crystalcache", "cuda").name == "numba"
    assert {str(one.message).split("'")[1] for one in caught} == {"triton", "torch"}
    monkeypatch.setattr(fastest, "_order", lambda *_: ["torch"])
    assert fastest.fastest("crystalcache", "cpu").name == "torch"


def test_auto_is_numba_where_there_is_no_cuda_and_the_reference_does_not_know_it() -> None:
    if not torch.cuda.is_available():
        assert CrystalCache(0.5, ENDS).backend == "numba"
    q = np.ones((1, 4, 2))
    with pytest.raises(SpecError, match="backend = 'auto': must be one of numpy"):
        reference_prefill(q, q, np.arange(4), ENDS, backend="auto")


@pytest.mark.law("figures-are-counted-right")
def test_a_run_says_which_backend_decided() -> None:
    model = build("llama")
    with CrystalCache(0.5, ENDS, TINY, backend="numpy")(model) as run:
        greedy(model, prompt(40), 2)
    assert run.backend == "numpy"
    with CrystalCache(0.5, ENDS, TINY, backend=Backend("mine", Shifted()))(model) as run:
        greedy(model, prompt(40), 2)
    assert run.backend == "scores: mine + numpy, selection: numpy"


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(
    ("name", "asked", "ran"),
    [
        ("snapkv", "numba", "numpy"), ("chunkkv", "numba", "numpy"), ("snapkv", "torch", "torch"),
        ("tova", "numba", "numba"), ("nestedkv", "numba", "scores: numba, selection: numpy"),
        ("rkv", "numba", "scores: numba, selection: numpy"),
        ("diverse-snapkv", "torch", "scores: torch, selection: numba"),
        ("kvzip-heads", "numba", "numpy"), ("vatp", "numba", "scores: numba + numpy, selection: numba"),
    ],
)
def test_a_run_states_by_stage_which_backend_ran(name: str, asked: str, ran: str) -> None:
    model = deep_llama(2)
    with policy_from_name(name, 0.5, backend=asked, **constants(name, model))(model) as run:
        assert run.backend == ran
        model(input_ids=text(150))
    assert run.backend == ran


@pytest.mark.law("figures-are-counted-right")
def test_a_later_turn_is_selected_on_the_host() -> None:
    model = deep_llama(2)
    with policy_from_name("snapkv", 0.5, backend="torch")(model) as run:
        model(input_ids=text(150))
        model(input_ids=text(20), past_key_values=run.cache)
    assert run.backend == "scores: torch, selection: numpy"


def snapkv_score(view: LayerView) -> Any:
    """Return the user's scores from a function that has the name of a function of the reference."""
    return -np.arange(len(view.k) * view.k.shape[1], dtype=np.float64).reshape(len(view.k), -1)


def test_a_score_of_the_user_s_own_is_not_replaced_by_a_function_of_equal_name() -> None:
    scorer = LayerScorer(Needs("all", 0), snapkv_score, sets=ANY_SETS)
    policy = Policy("mine", scorer, even, top_units, SinkAndRecent(0, 0))
    assert with_twins(policy, resolve("torch")) is policy
