"""A session on a device: the host waits for no value in a decode step, and for as few as stated in a prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from conformance.measure.gpu.counts import VOCABULARY, deep_llama, host_reads, method_on, text
from conformance.measure.gpu.emulated import DeviceTensor, HostReads, on_device
from models_integration import RetainedCache, Session
from models_integration.session.inputs import device_step
from reference.policies.names import POLICIES
from spec.errors import SpecError

L, N = 2, 96


@cache
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same model on the host and on the device."""
    return deep_llama(L), on_device(deep_llama(L))


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("name", POLICIES)
def test_a_session_on_a_device_is_the_session_on_the_host(name: str) -> None:
    host, device = models()
    method = method_on(name, host)
    found, reads, session = host_reads(method, device, N)
    with Session(method, host) as run, torch.no_grad():
        given: dict[str, Any] = {"input_ids": text(N), "logits_to_keep": 1}
        for logits in found:
            torch.testing.assert_close(logits, host(**given, past_key_values=run.cache).logits, atol=1e-5, rtol=1e-5)
            given["input_ids"] = text(N)[:, -1:]
    assert repr(session) == repr(run)
    if method.policy.cadence.every is None:
        assert reads[1:] == [0, 0]


WRONG: dict[str, dict[str, Any]] = {
    "an id past the vocabulary": {"input_ids": torch.tensor([[VOCABULARY]])},
    "a negative id": {"input_ids": torch.tensor([[-1]])},
    "a mask that hides a token": {"attention_mask": (torch.arange(N + 1) > 3).long()[None]},
    "a mask of other numbers": {"attention_mask": torch.full((1, N + 1), 2)},
    "a position before": {"position_ids": torch.tensor([[N - 1]])},
}
RIGHT = {
    "input_ids": torch.tensor([[7]]), "attention_mask": torch.ones(1, N + 1), "position_ids": torch.tensor([[N]]),
}


def on_the_device(given: dict[str, Any]) -> Any:
    return {name: DeviceTensor(tensor) for name, tensor in given.items()}


@contextmanager
def session() -> Iterator[tuple[RetainedCache, LlamaForCausalLM]]:
    """A prompt has been read on the device."""
    host, device = models()
    with HostReads(), torch.no_grad(), Session(method_on("snapkv", host), device) as run:
        device(input_ids=DeviceTensor(text(N)), logits_to_keep=1)
        assert run.cache is not None
        yield run.cache, device


@pytest.mark.law("refused-before-anything-changes")
def test_whether_a_step_is_wrong_is_known_on_the_device() -> None:
    with session() as (cache, _):
        for given in [RIGHT, *WRONG.values()]:
            step, _, wrong = device_step(VOCABULARY, on_the_device(RIGHT | given), cache)
            assert isinstance(wrong, DeviceTensor)
            assert bool(wrong.held) == (given is not RIGHT)
            assert "attention_mask" not in step
        for name in ("attention_mask", "position_ids"):
            with pytest.raises(SpecError, match=rf"{name} = \(1, 3\)"):
                device_step(VOCABULARY, on_the_device(RIGHT | {name: torch.ones(1, 3)}), cache)


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("when", ["next segment", "end"])
def test_a_wrong_step_raises_at_the_next_segment_or_at_the_end(when: str) -> None:
    with pytest.raises(SpecError, match="input_ids = 'a decode step'"), session() as (cache, device):
        device(**on_the_device(RIGHT | WRONG["a mask that hides a token"]), past_key_values=cache)
        if when == "next segment":
            with pytest.raises(SpecError, match="input_ids = 'a decode step'"):
                device(input_ids=DeviceTensor(text(4)), past_key_values=cache)
            assert cache.failure == "a decode step was wrong"
            raise SpecError("input_ids", "a decode step", "was noticed")
    assert cache.failure == "a decode step was wrong"
