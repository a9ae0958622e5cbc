"""Tiny random models of the families that the integration supports."""


from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from models_integration import CrystalCache, FullCache, RetainedCache, RetentionPolicy, StreamingLLM
from models_integration.cache.continuation import CrystalStates
from spec.parameters import TINY

VOCABULARY = 131
WHOLE = ("llama", "gemma3")
"""Families that every test runs with every value outside the nightly profile.

One has full attention in every layer. One has sliding windows in some layers.
"""
WINDOW = 16
ENDS = frozenset(range(3, VOCABULARY, 9))

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_GQA = {**_SIZES, "num_key_value_heads": 2}
SMALL: dict[str, Any] = {
    **_GQA, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256,
}
_ALTERNATING = {
    "sliding_window": WINDOW, "head_dim": 12, "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
}


def tiny(name: str, **fields: Any) -> Any:
    """Return a model of transformers by the name of its class. The ending ForCausalLM may be omitted."""
    torch.manual_seed(0)
    kind = getattr(transformers, name if name.endswith(("Model", "Generation", "LM")) else f"{name}ForCausalLM")
    return kind(kind.config_class(**fields))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(tiny, "Llama", **_GQA),
    "mistral": partial(tiny, "Mistral", **_GQA, sliding_window=None),
    "qwen2": partial(tiny, "Qwen2", **_GQA),
    "qwen3": partial(tiny, "Qwen3", **_GQA, head_dim=12),
    "phi3": partial(tiny, "Phi3", **_GQA, sliding_window=None),
    "olmo2": partial(tiny, "Olmo2", **_GQA),
    "gpt_neox": partial(tiny, "GPTNeoX", **_SIZES, rotary_pct=0.5),
    "gemma2": partial(tiny, "Gemma2", **{**_GQA, **_ALTERNATING}),
    "gemma3": partial(tiny, "Gemma3", **{**_GQA, **_ALTERNATING}),
    "gpt2": partial(tiny, "GPT2LMHeadModel", **_SIZES),
}
SLIDING = ("gemma2", "gemma3")
TABLES = ("gpt2",)  # The positions of this family are a table that is added to the embeddings.

METHODS: dict[str, Callable[[], RetentionPolicy]] = {
    "crystalcache": lambda: CrystalCache(0.5, ENDS, TINY, backend="numpy"),
    "streamingllm": lambda: StreamingLLM(0.4, N_sink=2),
    "fullcache": FullCache,
}


def prepared(name: str, **fields: Any) -> PreTrainedModel:
    """Return a tiny model with the weights of `prepare`."""
    return prepare(tiny(name, **fields))


def build(family: str, *, attention: str | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model. The weights are so large that attention is not uniform.

    The model never stops generating early.
    """
    return prepare(FAMILIES[family](), attention=attention, dtype=dtype)


def prepare(
    model: PreTrainedModel, *, attention: str | None = None, dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * (1.2 / parameter.shape[1] ** 0.5))
        elif name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        elif name.endswith("sinks"):  # Each head has a different sink, as large as the head's logits.
            parameter.data.copy_(torch.arange(len(parameter)) - 1.0)
    if attention is not None:
        model.set_attn_implementation(attention)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    model.train(False)
    model.to(dtype)  # type: ignore[arg-type]  # wrapped by transformers in a way that mypy misreads
    return model


def prompt(n: int, seed: int = 3) -> Tensor:
    """Return random ids (1, n) without special tokens."""
    return torch.randint(3, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(seed))


def states_of(cache: RetainedCache) -> CrystalStates:
    """Return the states that CrystalCache keeps for the rows of a cache."""
    states = cache.continuation
    assert isinstance(states, CrystalStates)
    return states


def tensors(cache: RetainedCache) -> list[Tensor]:
    """Return the keys and values of every layer."""
    layers: list[Any] = cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference divided by the largest absolute expected value."""
    return float((actual - expected).abs().max() / expected.abs().max())


def greedy(model: PreTrainedModel, input_ids: Tensor, new: int, **options: Any) -> Tensor:
    """Return the ids that generate adds, (rows, new)."""
    output = model.generate(  # type: ignore[operator]  # generation methods come from a mixin without types
        input_ids=input_ids, max_new_tokens=new, **{"do_sample": False, **options}
    )
    assert isinstance(output, Tensor)
    return output[:, input_ids.shape[1] :]


def step_by_step(model: PreTrainedModel, input_ids: Tensor, cache: DynamicCache | None) -> Tensor:
    """Return the logits of tokens that are read one at a time, with default positions and masks."""
    with torch.no_grad():
        steps = [model(input_ids=token, past_key_values=cache).logits for token in torch.split(input_ids, 1, dim=1)]
    return torch.cat(steps, dim=1)


def at_once(model: PreTrainedModel, input_ids: Tensor, cache: DynamicCache | None, **options: Any) -> Tensor:
    """Return the logits of tokens that are read in one forward pass."""
    with torch.no_grad():
        logits = model(input_ids=input_ids, past_key_values=cache, **options).logits
    assert isinstance(logits, Tensor)
    return logits


def crossed(
    name: str, values: Iterable[object], *, always: Iterable[object] = (), whole: Sequence[str] = WHOLE,
) -> pytest.MarkDecorator:
    """Parametrize a test with `family` and `name`. The nightly profile runs every pair.

    Args:
        name: name of the second parameter.
        values: values of the second parameter.
        always: values that every family runs in every profile. If empty, each family runs one value, and the families
            take different values.
        whole: families that run every value in every profile.
    """
    others, met = list(values), list(always)
    parameters = []
    for at, family in enumerate(FAMILIES):
        by_day = met or [others[at % len(others)]]
        for value in others:
            marks = () if family in whole or value in by_day else pytest.mark.nightly
            parameters.append(pytest.param(family, value, marks=marks, id=f"{family}-{value}"))
    return pytest.mark.parametrize(("family", name), parameters)
