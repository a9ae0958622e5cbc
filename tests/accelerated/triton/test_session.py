"""Tests of prefill with tensors, and of a session that passes the q and k of the model to the kernels uncopied."""

# ruff: noqa: E402 - the imports below need what is asked for first

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.accelerated.triton import require_runtime

require_runtime()
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install 'kvspec[models]'", allow_module_level=True)

import torch
from torch import Tensor

from accelerated.triton_gpu.backend import BACKEND
from accelerated.triton_gpu.device import INTERPRETED, accepts_tensor, default_device
from conformance.checks import stage_checks
from conformance.strategies.policy_inputs import drawn
from conformance.strategies.prompts import AttentionInputs, Prompt, random_prompt
from lab.policy_cases import CASES
from models_integration import CrystalCache, RetainedCache, Session
from models_integration.attention import capture as capture_module
from models_integration.session.device_choice import policy_on_device
from reference.crystalcache import prefill
from spec.backend import Backend, resolve
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs
from spec.records import CrystalRetention
from tests.models_integration.session.families import ENDS, at_once, build, prompt
from tests.models_integration.session.sessions import Looking, method_of

pytestmark = pytest.mark.judges("triton")

N = 40


class Spy:
    """Backend that records the arguments of S1, and runs S1 with Triton and all other stages with Numba."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, Any, Any]] = []

    def __getattr__(self, stage: str) -> Any:
        return getattr(resolve("numba").require_crystal(), stage)

    def coattention(self, q: Any, k: Any, positions: Any, p: Any, *rest: Any) -> Any:
        self.given.append((q, k, rest[2]))
        return BACKEND.require_crystal().coattention(q, k, positions, p, *rest)


def read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Session, Spy, list[Tensor], list[int]]:
    """Run a prompt. Return the observation, the queries of the model, and the bytes of all copies to the host."""
    spy, model = Spy(), build("llama", dtype=dtype)
    model.to(default_device())  # type: ignore[arg-type]
    queries: list[Tensor] = []
    copied: list[int] = []
    record, cpu = capture_module.Recorder.record, Tensor.cpu

    def recorded(self: Any, module: Any, layer: Any) -> None:
        queries.append(layer.query)
        record(self, module, layer)

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(self.nbytes)
        return cpu(self, *args, **kwargs)

    monkeypatch.setattr(capture_module.Recorder, "record", recorded)
    monkeypatch.setattr(Tensor, "cpu", noted)
    method = CrystalCache(0.5, ENDS, TINY, backend=Backend("spy", spy, accepts_tensor=accepts_tensor))
    with method(model) as run:
        at_once(model, prompt(N).to(default_device()), RetainedCache(model.config))
    return run, spy, queries, copied


@pytest.mark.spec("CC-PREFILL")
def test_q_and_k_are_never_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that S1 reads the model's own tensors, and that copies to the host are smaller than k."""
    run, spy, (query,), copied = read(torch.float32, monkeypatch)
    ((q, k, lse),) = spy.given
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert q.data_ptr() == query.data_ptr()
    assert lse is None or isinstance(lse, Tensor)
    assert max(copied) < k.nbytes < q.nbytes
    inputs = AttentionInputs(
        q.double().cpu().numpy(), k.double().cpu().numpy(), np.arange(N), TINY, q.shape[2] ** -0.5, None
    )
    judged = Prompt(inputs, prompt(N)[0].numpy(), ENDS, "0.5")
    (actual,) = run.retentions
    assert isinstance(actual, CrystalRetention)
    assert not list(stage_checks.retention(actual, judged, "float32"))
    expected = prefill(**{**judged.arguments, "backend": "numpy"})
    np.testing.assert_array_equal(actual.kept, expected.kept)


@pytest.mark.spec("CC-PREFILL")
def test_what_the_kernels_do_not_take_goes_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check float64, and bfloat16 in cases that the interpreter would compute wrongly."""
    for dtype in (torch.float64, torch.bfloat16) if INTERPRETED else (torch.float64,):
        _, spy, _, _ = read(dtype, monkeypatch)
        ((q, k, _),) = spy.given
        assert isinstance(q, np.ndarray)
        assert isinstance(k, np.ndarray)


@pytest.mark.spec("CC-PREFILL")
def test_half_precision_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, spy, _, _ = read(torch.float16, monkeypatch)
    ((q, k, _),) = spy.given
    assert q.dtype == k.dtype == torch.float16


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize("seed", range(3))
def test_tensors_and_arrays_give_the_same_bits(seed: int) -> None:
    given = random_prompt(np.random.default_rng(seed), TINY, N).arguments
    q, k = (given[name].astype(np.float32) for name in "qk")
    on_device = [torch.from_numpy(x).to(default_device()) for x in (q, k)]
    a = prefill(**{**given, "q": q, "k": k, "backend": "triton"})
    b = prefill(**{**given, "q": on_device[0], "k": on_device[1], "backend": "triton"})
    np.testing.assert_array_equal(a.kept, b.kept)
    np.testing.assert_array_equal(a.scores, b.scores)
    np.testing.assert_array_equal(a.coattention.salience, b.coattention.salience)


@pytest.mark.spec("CC-PREFILL")
def test_tensors_are_refused_by_name() -> None:
    given = random_prompt(np.random.default_rng(0), TINY, N).arguments
    q, k = (torch.from_numpy(given[name].astype(np.float32)).to(default_device()) for name in "qk")
    bad = q.clone()
    bad[0, 3, 1] = float("nan")
    for changed, message in (
        ({"q": q, "k": k, "backend": "numpy"}, "q = 'Tensor': must be a NumPy array, or a tensor that the backend"),
        ({"q": given["q"], "k": k, "backend": "triton"}, "k = 'Tensor': must be a NumPy array"),
        ({"q": q, "k": given["k"], "backend": "triton"}, "k = 'ndarray': must have the type of q, Tensor"),
        ({"q": bad, "k": k, "backend": "triton"}, r"q = nan: must be finite; this value is at \(0, 3, 1\)"),
        ({"q": q.long(), "k": k, "backend": "triton"}, "q = torch.int64: must be floating point"),
        ({"q": q[0], "k": k, "backend": "triton"}, r"q = \(.*\): must be a tensor \(heads, tokens, d\)"),
        ({"q": q[:, :, :-1], "k": k, "backend": "triton"}, "must have the head dimension of q"),
        ({"q": q.double(), "k": k.double(), "backend": "triton"}, "must be float32, float16 or bfloat16"),
    ):
        with pytest.raises(SpecError, match=message):
            prefill(**{**given, **changed})


@pytest.mark.spec("CC-PREFILL")
def test_a_host_scorer_sees_arrays_on_every_device() -> None:
    model = build("llama")
    model.to(default_device())  # type: ignore[arg-type]
    scorer = Looking(Needs("observed", None))
    with method_of(scorer)(model):
        at_once(model, prompt(N).to(default_device()), RetainedCache(model.config))
    (view,) = scorer.shown[0].layers.values()
    assert isinstance(view.q, np.ndarray)


@pytest.mark.parametrize("name", CASES)
def test_policies_select_their_tokens_on_the_device_as_under_torch(name: str) -> None:
    policy, torch_backend = CASES[name].policy(drawn(1)), resolve("torch")
    assert (policy_on_device(policy, BACKEND) is None) == (policy_on_device(policy, torch_backend) is None)
