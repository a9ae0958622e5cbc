"""Prompts in blocks: the policy evicts after each block, and each block equals the masked model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration import CrystalCache, CustomPolicy, RetainedCache, RetentionPolicy, prefill
from models_integration.cache.renumbering import RENUMBERED
from models_integration.model.cache_argument import cache_name
from models_integration.pocket import load_pocket
from models_integration.policies.methods import policy_from_name
from reference.policies import policy_from_score
from spec.errors import SpecError
from tests.models_integration.session.families import ENDS, METHODS, build, prompt, relative, step_by_step
from tests.models_integration.session.masked import MaskedModel
from tests.models_integration.session.sessions import TOLERANCE, live_sets

pytestmark = pytest.mark.law("eviction-equals-masking")

B, BLOCK, N = 20, 16, 85
Seen = list[tuple[Tensor, dict[int, list[list[int]]]]]
"""Logits of each block, and the stored sets after the block."""


def recorded(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[Any, Seen]:
    """Return the result of a function, and the logits and stored sets of each forward pass."""
    seen: Seen = []

    def after(_: object, args: object, output: Any) -> None:
        cache: RetainedCache = output.past_key_values
        seen.append((output.logits[0], dict(live_sets(cache))))  # type: ignore[arg-type]

    hook = model.register_forward_hook(after)
    try:
        return run(), seen
    finally:
        hook.remove()


@pytest.mark.parametrize("text", [
    "streamingllm", "snapkv:W=4", "keydiff", "lagkv:lag=8", "adakv:W=4", "h2o", "snapkv:W=4/every=3", "morphkv:W=4",
    "snapkv:W=4/layers=pyramid:beta=4/heads=adaptive", "curdkv:window=4", "crystalcache",
])
def test_each_block_equals_the_masked_model(text: str) -> None:
    model = build("llama")
    backend = {} if text == "streamingllm" else {"backend": "numpy"}
    policy = METHODS[text]() if text == "crystalcache" else policy_from_name(text, B, **backend)
    (logits, cache, run), seen = recorded(model, lambda: prefill(model, policy, prompt(N), BLOCK))
    oracle, ids = MaskedModel(model), prompt(N)[0].tolist()
    row, at, stored = oracle.nothing, 0, None
    for found, after in seen:
        row = row.read(ids[at : at + len(found)], stored)
        at, stored = at + len(found), list(after.values())
        assert relative(found, oracle.expect(row).logits[-len(found) :]) < TOLERANCE
    assert [len(found) for found, _ in seen] == [BLOCK] * 5 + [N % BLOCK]
    assert at == run.seen == N
    assert torch.equal(logits[0], seen[-1][0][-1:])
    assert run.stored < N / 2
    with policy(model), torch.no_grad():
        row = row.read([7], stored)
        found = step_by_step(model, torch.tensor([[7]]), cache)[0]
    assert relative(found, oracle.expect(row).logits[-1:]) < TOLERANCE


def test_a_last_block_of_one_token_belongs_to_the_block_before() -> None:
    model = build("llama")
    _, seen = recorded(model, lambda: prefill(model, policy_from_name("keydiff", B), prompt(33), BLOCK))
    assert [len(found) for found, _ in seen] == [16, 17]
    assert {len(own) for sets in seen[-1][1].values() for own in sets} == {B}


@pytest.mark.parametrize("positions", ["kept", RENUMBERED])
def test_one_block_is_the_whole_prompt(positions: str) -> None:
    model = build("llama")
    policy = policy_from_name("streamingllm", B, positions=positions)
    whole, parts = prefill(model, policy, prompt(N)), prefill(model, policy, prompt(N), N)
    assert torch.equal(whole.logits, parts.logits)
    assert live_sets(whole.cache) == live_sets(parts.cache)


REFUSED: list[tuple[Callable[[], RetentionPolicy], Any, str]] = [
    (lambda: policy_from_name("chunkkv", B, N_reuse=2, W=4), BLOCK, "policy = 'chunkkv': evicts from one whole prompt"),
    (lambda: CustomPolicy(policy_from_score(lambda _: np.zeros((4, N))), B), BLOCK, "evicts from one whole prompt"),
    (lambda: policy_from_name("kvzip", B, template=((5,), (8,), (10,))), BLOCK, "evicts from one whole prompt only"),
    (lambda: CrystalCache(200, ENDS, stream=True), BLOCK, "a stream has blocks of 1024 tokens"),
    (lambda: policy_from_name("keydiff", B), 1, "block = 1: must be a number of tokens, at least 2"),
    (lambda: policy_from_name("keydiff", B), 0.5, "block = 0.5: must be a number of tokens"),
]


def test_a_prompt_without_tokens_is_refused_as_without_blocks() -> None:
    for block in (None, BLOCK):
        with pytest.raises(SpecError, match="must not be empty"):
            prefill(build("llama"), policy_from_name("keydiff", B), prompt(0), block)


@pytest.mark.parametrize(("make", "block", "shown"), REFUSED)
def test_blocks_are_refused_before_the_model_reads(
    make: Callable[[], RetentionPolicy], block: Any, shown: str,
) -> None:
    model = build("llama")
    calls: list[object] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
    with pytest.raises(SpecError, match=shown):
        prefill(model, make(), prompt(N), block)
    hook.remove()
    assert not calls


@pytest.mark.parametrize(("n", "budget", "block"), [
    (2048, 256, 128), pytest.param(32_768, 1024, 512, marks=pytest.mark.nightly),
])
@pytest.mark.filterwarnings("ignore:the text has")
def test_the_cache_never_stores_more_than_the_budget_and_one_block(n: int, budget: int, block: int) -> None:
    model, _ = load_pocket()
    stored: list[int] = []

    def before(module: Any, args: object, kwargs: dict[str, Any]) -> None:
        layer = kwargs[cache_name(module)].layers[module.layer_idx]
        held = [len(layer.head_positions(0, head)) for head in range(layer.heads)] if layer.get_seq_length() else [0]
        stored.append(max(held) + kwargs["hidden_states"].shape[1])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
    ids = torch.randint(5, 100, (1, n), generator=torch.Generator().manual_seed(0))
    run = prefill(model, policy_from_name("keydiff", budget), ids, block).run
    assert len(stored) == n // block * len(model.model.layers)
    assert max(stored) == budget + block
    assert run.stored == budget
