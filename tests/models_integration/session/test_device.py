"""Sessions on a device: number of values that the host reads in a prompt and in a decode step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerated.torch_device.backend import BACKEND
from conformance.paths import DOCS
from lab.measure.gpu.counts import (
    LAYERS,
    VOCABULARY,
    DeviceTensor,
    HostReads,
    Shapes,
    deep_llama,
    host_reads,
    method_on,
    on_device,
    text,
)
from models_integration import RetainedCache, Session, policy_from_name
from models_integration.cache import device_compaction
from models_integration.cache.device_compaction import Chosen, read_retentions
from models_integration.session.crystal import CrystalMethod
from models_integration.session.device_choice import policy_on_device
from models_integration.session.inputs import device_step
from reference.backend import BACKEND as REFERENCE
from reference.policies.layers import is_layerwise
from reference.policies.names import POLICIES
from spec.errors import SpecError
from spec.retention import Granularity, Retention

L, N = 2, 126
IDS_AND_MASK = 1
"""Number of host reads of a prompt before the first layer."""
ROWS = [row.strip("|").split("|") for row in Path(DOCS, "results/device.md").read_text().splitlines() if "| " in row]
COMMITTED = {name.strip(): [int(count) for count in counts] for name, _, *counts in ROWS if counts[0].strip().isdigit()}


@cache
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return the same model on the host and on the device."""
    return deep_llama(L), on_device(deep_llama(L))


def same(found: Session, expected: Session) -> bool:
    """Return whether two sessions keep the same tokens, store them in the same form, and report the same values."""
    assert found.cache is not None
    assert expected.cache is not None
    pairs = list(zip(found.cache.full_layers, expected.cache.full_layers, strict=True))
    agree = [
        np.array_equal(own.positions, other.positions) and np.array_equal(own.offsets, other.offsets)
        for own, other in zip(found.retentions, expected.retentions, strict=True)
    ]
    stored = [
        type(own) is type(other) and own.stored_length == other.stored_length and own.uniform == other.uniform
        and torch.equal(own.head_positions(row, head), other.head_positions(row, head))
        for own, other in pairs for row in range(own.batch) for head in range(own.heads)
    ]
    reports = [getattr(found, name) == getattr(expected, name) for name in ("bytes_freed", "over_budget", "seen")]
    return all([*agree, *stored, *reports, found.cache.layers_differ == expected.cache.layers_differ])


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("name", POLICIES)
def test_a_session_on_a_device_is_the_session_on_the_host(name: str) -> None:
    """Compare a session on the device with a session on the host.

    A policy that chooses on the device reads all kept positions of a prompt at once. The committed counts of a deeper
    model differ by a whole number of reads for each layer.
    """
    host, device = models()
    method = method_on(name, host)
    actual, reads, session = host_reads(method, device, N)
    on_host = method if isinstance(method, CrystalMethod) else replace(method, engine=REFERENCE)
    with Session(on_host, host) as run, torch.no_grad():
        given: dict[str, Any] = {"input_ids": text(N), "logits_to_keep": 1}
        for logits in actual:
            torch.testing.assert_close(logits, host(**given, past_key_values=run.cache).logits, atol=1e-5, rtol=1e-5)
            given["input_ids"] = text(N)[:, -1:]
    assert same(session, run)
    counts = reads[0], max(reads[1:])
    if name in COMMITTED:
        assert [(count - own) % (LAYERS - L) for count, own in zip(COMMITTED[name], counts, strict=True)] == [0, 0]
    if method.policy.cadence.every is None:
        assert reads[1:] == [0, 0]
    if is_layerwise(method.policy) and policy_on_device(method.policy, BACKEND) is not None:
        assert reads[0] == IDS_AND_MASK + 1


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("budget", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("name", ["snapkv", "adakv", "adakv block", "nestedkv-without-continuum", "pyramidkv", "tova"])
def test_padded_rows_that_are_chosen_on_the_device_are_those_of_the_host(name: str, budget: float) -> None:
    """Compare device and host for two prompts of different lengths, with two rows each, and for a step after them."""
    host, runs = models()[0], []
    ids = torch.cat([text(N), text(N).flip(1)]).repeat_interleave(2, dim=0)
    mask = torch.ones_like(ids)
    mask[2:, :17] = 0
    name, *block = name.split()
    for engine in (BACKEND, REFERENCE):
        constants: dict[str, Any] = {"block": 8} if block else {}
        method = replace(policy_from_name(name, budget, backend="torch", **constants).on(host), engine=engine)
        with Session(method, host) as run, torch.no_grad():
            logits = host(input_ids=ids, attention_mask=mask).logits[:, -1]
            step = host(input_ids=ids[:, -1:], past_key_values=run.cache).logits
        runs.append((run, logits, step))
    (own, *actual), (other, *expected) = runs
    assert same(own, other)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@cache
def large_llama() -> LlamaForCausalLM:
    """Return a model with the shape of a Llama with 8 B parameters, without values."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=16_384,
        ))
    model.train(False)
    return on_device(model)


def first_tokens(row: Chosen, unscored: int, at: Any, ordinal: int, granularity: Granularity) -> Retention:
    """Return a retention with as many tokens as were chosen. The chosen positions have no values."""
    share = len(at) // row.groups
    return Retention(np.tile(np.arange(share), row.groups), share * np.arange(row.groups + 1), row.n, granularity)


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("name", ["streamingllm", "snapkv", "keydiff"])
def test_a_session_of_8_b_parameters_needs_no_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 8 192 tokens and decode one with 32 layers. The host reads the ids and, if scores decide, the positions."""
    monkeypatch.setattr(device_compaction, "_retention", first_tokens)
    prompt, model, counts = torch.zeros(1, 8_192, dtype=torch.int64, device="meta"), large_llama(), []
    with Shapes() as reads, torch.no_grad(), Session(method_on(name, model), model) as run:
        reads.counts.clear()
        for ids in (prompt, prompt[:, :1]):
            output = model(input_ids=DeviceTensor(ids), past_key_values=run.cache, logits_to_keep=1)
            assert output.logits.shape == (1, 1, 128_256)
            counts.append(reads.of_kvspec())
        assert run.cache is not None
        for layer in run.cache.full_layers:
            assert layer.keys is not None
            assert layer.keys.shape == (1, 8, 2_458 + 1, 128)
    assert counts == [1 if name == "streamingllm" else 2, 0]


@pytest.mark.law("refused-before-anything-changes")
def test_a_score_that_is_no_number_is_named() -> None:
    chosen = Chosen(torch.arange(4), torch.tensor([7]), 2, 5)
    with pytest.raises(SpecError, match="layer 1, kept set 1, token 2"):
        read_retentions([[chosen._replace(unscored=torch.tensor([-1]))], [chosen]], Granularity.HEAD)


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
    """Yield cache and model after a prompt was read on the device."""
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
