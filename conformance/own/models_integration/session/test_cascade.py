"""CAKE's cascade keeps what the reference keeps of the whole prompt, and the cache never outgrows budget and layer."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from conformance.own.models_integration.session.families import build, prompt
from conformance.strategies.numbers import seeds
from models_integration import CustomPolicy, Session
from models_integration.cache.retained_cache import RetainedCache, storage_bytes
from models_integration.cache.scorer_records import join_layers
from models_integration.policies.methods import method_of
from models_integration.session.cascade import Cascade, can_cascade
from reference.policies import cake, diverse, in_blocks, pyramidkv, retain
from reference.policies.layers import is_cascading
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy
from spec.retention import Granularity

WEIGHTS = (0.0, 5e-324, 1e-300, 0.5, 1.0, 1.0, 2.0, 3.0, 1e3, 1e6, 1e300)
"""Preferences: none, equal ones, and such that differ by all that float64 can hold."""


def given_scores(view: LayerView, *constants: object) -> tuple[Any, Any]:
    """Scores and a preference that stand in the place of keys and scaling."""
    return view.k[:, :, 0], np.array([[view.scaling]])


def policy_of(W: int) -> Policy:
    """CAKE on given scores."""
    policy: Any = cake(W)
    return Policy(**vars(policy) | {"scorer": replace(policy.scorer, layer=given_scores)})


@dataclass
class Rows:
    """What a session shows of one layer of a batch."""

    observations: list[Observation]
    columns: int
    copies: int

    @property
    def prompts(self) -> Sequence[int]:
        return range(0, self.copies * len(self.observations), self.copies)

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        return self.observations[row // self.copies]


def check_cascade(
    sizes: Sequence[int], preferences: Sequence[Sequence[float]], W: int, B: int, H: int, copies: int, seed: int,
) -> None:
    """Prompts of these sizes; each layer has a preference for each prompt."""
    rng, columns, L, rows = np.random.default_rng(seed), max(sizes), len(preferences), copies * len(sizes)
    policy, budget = policy_of(W), Budget(count=B)
    scores = [[rng.integers(-2, 3, (H, n, 1)).astype(float) for n in sizes] for _ in preferences]
    views = [
        [LayerView(None, own, None, weight, None) for own, weight in zip(layer, weights, strict=True)]
        for layer, weights in zip(scores, preferences, strict=True)
    ]
    cache = RetainedCache(LlamaConfig(num_hidden_layers=L))
    cascade, tokens = Cascade(method_of(policy, budget), cache, copies), torch.rand(L, 2, rows, H, columns, 3)
    slots = L * (max(min(n, max(B, W)) for n in sizes) + 2)
    for index, layer in enumerate(views):
        cache.update(tokens[index, 0], tokens[index, 1], index)
        shown = [Observation(n, H, None, {index: view}) for n, view in zip(sizes, layer, strict=True)]
        assert cascade.take(index, policy, Rows(shown, columns, copies))  # type: ignore[arg-type]
        held_slots = min(slots, (index + 1) * columns)
        assert storage_bytes(cache.full_layers) == 2 * rows * H * held_slots * 3 * 4
    padding = torch.tensor([columns - n for n in sizes]).repeat_interleave(copies)
    found = join_layers(policy, cascade.read(padding if padding.any() else None)).retentions
    freed = 2 * rows * H * L * columns * 3 * 4 - storage_bytes(cache.full_layers)
    assert cache.bytes_freed == freed
    for row, n in enumerate(sizes):
        whole = Observation(n, L * H, None, {index: layer[row] for index, layer in enumerate(views)})
        expected, _ = retain(policy, budget, whole)
        assert np.array_equal(found[row].offsets, expected.offsets)
        assert np.array_equal(found[row].positions, expected.positions)
        for group in range(L * H):
            (index, head), kept = divmod(group, H), torch.tensor(expected.group(group))
            for at in range(row * copies, (row + 1) * copies):
                stored = cache.full_layers[index]
                assert torch.equal(stored.head_positions(at, head), kept)
                held = torch.cat(stored.held(at, slice(head, head + 1)))
                assert torch.equal(held, tokens[index, :, at, head, kept + columns - n])


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    """One or two prompts of up to 12 tokens, in up to 6 layers."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    weight = st.one_of(st.sampled_from(WEIGHTS), st.floats(0, 1e6))
    weights = st.lists(weight, min_size=len(sizes), max_size=len(sizes))
    return {"sizes": sizes, "preferences": draw(st.lists(weights, min_size=1, max_size=6))}


@pytest.mark.spec("PO-PREFERENCE-BUDGET")
@given(
    drawn=prompts(), W=st.integers(1, 4), B=st.integers(1, 13), H=st.integers(1, 2), copies=st.integers(1, 2),
    seed=seeds,
)
def test_a_cascade_keeps_what_the_reference_keeps(
    drawn: dict[str, Any], W: int, B: int, H: int, copies: int, seed: int,
) -> None:
    """After each layer the slots are counted, in bytes."""
    check_cascade(**drawn, W=W, B=B, H=H, copies=copies, seed=seed)


@pytest.mark.law("as-it-is-described")
def test_other_selectors_and_several_devices_do_not_cascade() -> None:
    here, there = torch.nn.Linear(1, 1, device="cpu"), torch.nn.Linear(1, 1, device="meta")
    one, two = (SimpleNamespace(decoder=torch.nn.ModuleList(parts)) for parts in ([here], [here, there]))
    assert can_cascade(cake(), one)  # type: ignore[arg-type]
    assert not can_cascade(cake(), two)  # type: ignore[arg-type]
    assert not any(map(is_cascading, (in_blocks(cake(), 4), diverse(cake()), pyramidkv())))


@pytest.mark.law("a-cache-like-any-other")
def test_gradients_are_those_of_a_whole_prompt() -> None:
    """Through the keys and values of the pool, to the weights of the first layer."""
    model, policy, found = build("llama", dtype=torch.float64), CustomPolicy(cake(W=4), 0.3), []
    for block in (Session.prompt, lambda session: nullcontext()):
        model.zero_grad()
        with policy(model) as session:
            with block(session):
                model(input_ids=prompt(64))
            model(input_ids=prompt(1), past_key_values=session.cache).logits.square().mean().backward()
        weights = model.base_model.get_submodule("layers.0.self_attn").parameters()
        found.append([own.grad.clone() for own in weights if own.grad is not None])
    assert len(found[0]) >= 4
    for own, other in zip(*found, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def check_cascades() -> None:
    """The same for fixed prompts."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(6, 13, 2).tolist()
        preferences = rng.choice(WEIGHTS[: 3 + seed % 9], (4, 2)).tolist()
        check_cascade(sizes, preferences, 1 + seed % 3, int(rng.integers(4, 9)), 2, 1, seed)
