"""What an engine is given, and what it must say: drawn kept sets, and the same model with the others masked."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from conformance.cache_suite.oracle import Masked, UnknownRotation, check_rotation
from conformance.checks.refusals import boundary
from conformance.tolerances import MASKED_LOGITS, MASKED_VISIBLE

PROMPT = 40
"""Tokens of a prompt: enough for sets that differ, few enough to look at; `LENGTHS` has others."""
LENGTHS = (2, 65, 130, 600)
"""The shortest prompt that a door takes, and more tokens than a block of 64, of 128 and of 512 holds."""
LONG = 2_050
"""More tokens than 2 048."""
TRIALS = 8
"""Kept sets that are drawn until what is evicted can be seen."""
WHOLE = "nothing is evicted"
Kept = dict[int, list[list[int]]]
"""Kept positions, ascending, by full-attention layer and KV head."""
Run = Callable[[list[int], Kept, list[int], str], Any]


_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "initializer_range": 1.2 / 256**0.5, "max_position_embeddings": 8192,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 64}
_EIGHT = {**_SIZES, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
TINY: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_EIGHT),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES),
    "gemma3_text": lambda: Gemma3TextConfig(**{
        **_GROUPED, "sliding_window": 16, "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }),
}
"""By family: grouped queries; eight heads of normed keys; own keys of each head, partly rotated; sliding layers."""


def save_tiny(family: str, folder: Path) -> Path:
    """A model of about a million random parameters, of head width 64, which engines have kernels for."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(TINY[family]())  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


@cache
def _loaded(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True,
    )
    return model


@cache
def _unknown_rotation(folder: str) -> str:
    """Why positions cannot be renumbered in this model; nothing where they can."""
    try:
        check_rotation(_loaded(folder))
    except UnknownRotation as error:
        return str(error)
    return ""


def _set(rng: np.random.Generator, n: int, size: int) -> list[int]:
    return sorted(rng.choice(n, size, replace=False).tolist())


def _half(n: int) -> int:
    return max(1, n // 2)


def _nothing(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
    return {layer: [list(range(n))] * count for layer, count in heads.items()}


def _one_set(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
    kept = _set(rng, n, _half(n))
    return {layer: [kept] * count for layer, count in heads.items()}


def _by_layer(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
    return {layer: [_set(rng, n, _half(n))] * count for layer, count in heads.items()}


def _any_length(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
    """The heads of a layer store none, all, one and any other number of tokens, in another order in each layer."""
    found: Kept = {}
    for layer, count in heads.items():
        sizes = [0, n, 1, *rng.integers(2, max(3, n), count).tolist()][:count]
        found[layer] = [_set(rng, n, min(n, int(size))) for size in rng.permutation(sizes)]
    return found


def _nearly_all(n: int) -> int:
    return n - max(1, n // 20)


def _layers(*sizes: Callable[[int], int]) -> Callable[[np.random.Generator, Mapping[int, int], int], Kept]:
    """Layers take turns in how many tokens each of their heads keeps."""
    def made(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
        return {
            layer: [_set(rng, n, sizes[at % len(sizes)](n)) for _ in range(count)]
            for at, (layer, count) in enumerate(heads.items())
        }

    return made


KINDS: Mapping[str, Callable[[np.random.Generator, Mapping[int, int], int], Kept]] = {
    WHOLE: _nothing,
    "one set for all": _one_set,
    "a set for each layer": _by_layer,
    "a set for each KV head": _layers(_half),
    "a set of its own length for each KV head": _any_length,
    "a twentieth is evicted": _layers(_nearly_all),
    "all of the first layer and few of the next": _layers(lambda n: n, lambda n: max(1, n // 8)),
    "nothing of the first layer and half of the next": _layers(lambda n: 0, _half),
}
"""How kept sets may differ: by layer, by KV head, in length; and nearly all, all or nothing of a layer."""


@dataclass(frozen=True)
class Case:
    """A prompt, what is kept of it, the tokens behind it; and their log-probabilities, with and without the masks."""

    prompt: list[int]
    kept: Kept
    following: list[int]
    expected: Tensor
    unmasked: Tensor


def _case(folder: str, kind: str, new: int, seed: int, renumbered: bool, length: int, again: int) -> Case:
    """The prompt and the tokens behind it are the same for every kind, and when they are read again."""
    model, rng = _loaded(folder), np.random.default_rng([seed, new, length])
    config = model.config.get_text_config(decoder=True)
    length = min(length, config.max_position_embeddings - new)
    prompt, following = (rng.integers(3, config.vocab_size, n).tolist() for n in (length, new))
    rng = np.random.default_rng([seed, new, length, list(KINDS).index(kind), again])
    full = Masked(model)
    full.read(torch.tensor([prompt]))
    unmasked = _log(full.read(torch.tensor([following]))[0])
    for _ in range(1 if kind == WHOLE else TRIALS):
        masked = Masked(model, renumbered)
        masked.read(torch.tensor([prompt]))
        kept = KINDS[kind](rng, masked.heads, length)
        masked.keep(list(kept.values()))
        expected = _log(masked.read(torch.tensor([following]))[0])
        if _apart(unmasked, expected) > MASKED_VISIBLE:
            break
    return Case(prompt, kept, following, expected, unmasked)


def check(
    run: Run, folder: str, kind: str, new: int, seed: int = 0, renumbered: bool = False, length: int = PROMPT,
    again: int = 0,
) -> None:
    """One prompt of `length` tokens, its kept sets, and `new` tokens behind it, at the text's positions or renumbered.

    The same prompt has other kept sets when it is read `again`.

    Raises:
        AssertionError: where the engine says something else than the masked model.
    """
    if renumbered and (unknown := _unknown_rotation(folder)):
        pytest.skip(f"{kind}: {unknown}")
    case = _case(folder, kind, new, seed, renumbered, length, again)
    if kind != WHOLE and _apart(case.unmasked, case.expected) <= MASKED_VISIBLE:
        pytest.skip(f"{kind}: masking changes nothing that could be seen on this model")
    try:
        with boundary("the cache's function", NotImplementedError):
            said = run(case.prompt, copy.deepcopy(case.kept), case.following, folder)
            found = torch.as_tensor(said).detach().to("cpu", torch.float32)
    except NotImplementedError as error:
        pytest.skip(f"{kind}: not served ({error})")
    assert found.shape == case.expected.shape, f"logits are {tuple(found.shape)}, not (new tokens, vocabulary)"
    apart = _apart(_log(found), case.expected)
    if not apart <= MASKED_LOGITS:
        hint = "; it is as if nothing were evicted" if _apart(_log(found), case.unmasked) <= MASKED_LOGITS else ""
        raise AssertionError(
            f"{kind}, {len(case.prompt)} and {new} tokens: log-probabilities are {apart:.1e} of the largest away from"
            f" those of the model whose evicted tokens are masked, more than {MASKED_LOGITS:.0e}{hint}\n"
            f"{_example(case, _log(found))}"
        )


def _example(case: Case, found: Tensor) -> str:
    """Where it is farthest off, and what was to be kept."""
    token, word = divmod(int((found - case.expected).abs().argmax()), found.shape[1])
    layer, sets = next(iter(case.kept.items()))
    return (
        f"next token {token}, id {word}: expected {case.expected[token, word]:.4f}, found {found[token, word]:.4f}\n"
        f"of {len(case.prompt)} tokens layer {layer} keeps {sets}"
    )


def _log(logits: Tensor) -> Tensor:
    """Log-probabilities, of themselves as well as of logits."""
    return logits.to(torch.float64).log_softmax(dim=-1)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, by the largest expected value; NaN is as far as can be."""
    worst = float((found - expected).abs().max() / expected.abs().max())
    return worst if worst == worst else float("inf")
