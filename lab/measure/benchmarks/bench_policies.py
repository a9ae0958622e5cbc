"""Benchmarks of policies against the bare model: random models of 77 to 111 M parameters, in one process.

Run `python -m pytest lab/measure/benchmarks/bench_policies.py -p no:xdist -s`. Both sides run in turn. Each
round compares their processor time on one thread, so that other programs slow down both sides. The result is the
median over the rounds.

For a decode step, the test compares the decision, including the preparation of its inputs. The remaining time of the
step, including its compaction, is printed. For a prefill of models that are not Llamas, the test compares the time in
which the policy records, decides and compacts. The policy does this inside the compared forward pass, so noise affects
both.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from models_integration import CrystalCache, NamedPolicy, RetentionPolicy
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import CACHE
from models_integration.session.method import SteppingMethod
from models_integration.session.segment import Segment
from spec.errors import SpecError

PROMPT, SLOTS = 4_096, 1_024
PREFILL_AT_MOST, STEP_AT_MOST = 0.07, 0.10
PREFILLS, STEPS, WARM = 5, 40, 3

SIZES: dict[str, Any] = {
    "vocab_size": 1_024, "hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 2 * PROMPT,
}
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "hybrid": lambda: Qwen3_5TextConfig(
        **SIZES, intermediate_size=2_048, num_attention_heads=6, num_key_value_heads=2, head_dim=128,
        linear_num_key_heads=6, linear_num_value_heads=6, linear_key_head_dim=128, linear_value_head_dim=128,
    ),
    "sinks": lambda: GptOssConfig(
        **SIZES, intermediate_size=768, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
        num_local_experts=4, num_experts_per_tok=2,
    ),
    "latents": lambda: DeepseekV3Config(
        **SIZES, intermediate_size=2_048, moe_intermediate_size=640, num_attention_heads=12, num_key_value_heads=12,
        q_lora_rank=384, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
}
"""Shapes of Qwen3.5, gpt-oss and DeepSeek V3 with 91, 106 and 111 million parameters."""
POLICIES: dict[str, tuple[float, Callable[[], RetentionPolicy]]] = {
    "CrystalCache": (0.05, lambda: CrystalCache(0.5, frozenset(range(3, 1_000, 20)))),
    "SnapKV": (0.05, lambda: NamedPolicy("snapkv", 0.5)),
    "NestedKV": (0.10, lambda: NamedPolicy("nestedkv", 0.5)),
}
"""Policies, each with the largest share of a prefill that it may add."""

Models = tuple[LlamaForCausalLM, LlamaForCausalLM]


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    """Yield two models with the same weights: 12 layers, 768 wide, 12 heads on 4 KV heads.

    The second model is for the side without a policy.
    """
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=1_024, hidden_size=768, intermediate_size=2_048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=2 * PROMPT,
    )
    model, bare = LlamaForCausalLM(config), LlamaForCausalLM(config)
    bare.load_state_dict(model.state_dict(), assign=True)
    with threadpool_limits(1):
        yield model.train(False), bare.train(False)
    torch.set_num_threads(threads)


def ids_of(tokens: int) -> Tensor:
    return torch.randint(3, 1_000, (1, tokens), generator=torch.Generator().manual_seed(1))


def seconds(run: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def timed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[float]:
    """Return a list that receives the processor time of each later call of a method."""
    function, result = getattr(owner, name), list[float]()

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            result.append(time.process_time() - began)

    monkeypatch.setattr(owner, name, run)
    return result


def surplus(what: str, rounds: list[tuple[float, float]]) -> float:
    """Return the time that the policy adds, as a share of the bare model's time.

    The result is the median over the rounds. It is printed with its quartiles.
    """
    ratios, bare = sorted(ours / bare - 1 for ours, bare in rounds), median(bare for _, bare in rounds)
    print(
        f"\n{what}: {100 * median(ratios):.1f} % (quartiles {100 * ratios[len(ratios) // 4]:.1f} and"
        f" {100 * ratios[3 * len(ratios) // 4]:.1f}) of the bare model's {1e3 * bare:.1f} ms"
    )
    return median(ratios)


@torch.no_grad()
def test_expected_attention_reads_a_prompt(models: Models) -> None:
    ids, (model, bare) = ids_of(PROMPT), models

    def read(which: LlamaForCausalLM) -> None:
        which(input_ids=ids, use_cache=True, logits_to_keep=1)

    def read_under_the_policy() -> None:
        with NamedPolicy("expected-attention", 0.5)(model):
            read(model)

    rounds = [(seconds(read_under_the_policy), seconds(lambda: read(bare))) for _ in range(PREFILLS)]
    assert surplus(f"Expected Attention, a prefill of {PROMPT}", rounds) <= PREFILL_AT_MOST


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_prefill_of_a_shape(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy adds at most its share to a prefill. Policies that cannot serve the shape are skipped."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    automatic: Any = AutoModelForCausalLM
    model: PreTrainedModel = automatic.from_config(SHAPES[shape]()).train(False)
    ids, inside = ids_of(PROMPT), [timed(monkeypatch, Segment, name) for name in ("attended", "finish")]

    def read(tokens: int = PROMPT) -> None:
        model(input_ids=ids[:, :tokens], use_cache=True, logits_to_keep=1)

    def read_under(make: Callable[[], RetentionPolicy], tokens: int = PROMPT) -> None:
        with make()(model):
            for result in inside:
                result.clear()
            read(tokens)

    rounds: dict[str, list[tuple[float, float, float]]] = {}
    for name, (_, make) in POLICIES.items():
        try:
            read_under(make, 2 * SLOTS)  # compiles, for chunks after others too
            rounds[name] = []
        except SpecError as error:
            print(f"\n{name}, {shape}: refused, {error.bound}")
    with threadpool_limits(1):
        for _ in range(PREFILLS):
            bare = seconds(read)
            for name, runs in rounds.items():
                ours = seconds(partial(read_under, POLICIES[name][1]))
                runs.append((ours, ours - sum(map(sum, inside)), bare))
    for name, runs in rounds.items():
        surplus(f"{name}, {shape}, all of a prefill of {PROMPT}", [(ours, bare) for ours, _, bare in runs])
    added = {
        name: surplus(f"{name}, {shape}, its own part of a prefill", [(ours, rest) for ours, rest, _ in runs])
        for name, runs in rounds.items()
    }
    assert [name for name, share in added.items() if share > POLICIES[name][0]] == []


@pytest.mark.parametrize("name", ["tova", "h2o"])
@torch.no_grad()
def test_a_step_of_a_policy(models: Models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy adds at most its share to a decode step.

    The policy keeps its cache at the budget. The other cache is cropped to the same number of slots before each step.
    """
    (model, bare), rounds = models, list[tuple[float, float]]()
    ends, gathers = timed(monkeypatch, SteppingMethod, "after_step"), timed(monkeypatch, RetainedCache, "compact")
    with NamedPolicy(name, SLOTS)(model) as run:
        model(input_ids=ids_of(SLOTS + 1), use_cache=True, logits_to_keep=1)
        whole = DynamicCache(config=bare.config)
        bare(input_ids=ids_of(SLOTS), **{CACHE: whole}, logits_to_keep=1)
        assert run.cache is not None
        for number in range(WARM + STEPS):
            step = {"input_ids": torch.tensor([[3 + number]])}
            ours = seconds(lambda: model(**step, **{CACHE: run.cache}))  # noqa: B023
            rounds.append((ours, seconds(lambda: bare(**step, **{CACHE: whole}))))  # noqa: B023
            whole.crop(-1)
            assert run.cache.mean_length == SLOTS
    decided = [
        (plain + end - gather, plain)
        for (_, plain), end, gather in zip(rounds, ends, gathers[-len(rounds) :], strict=True)
    ]
    surplus(f"{name}, all of a step at {SLOTS} slots", rounds[WARM:])
    assert surplus(f"{name}, the decision of a step at {SLOTS} slots", decided[WARM:]) <= STEP_AT_MOST
