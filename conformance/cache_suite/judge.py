"""Inputs and expected log-probabilities of a cache or an engine: random kept sets, and the masked model."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from conformance.abstentions import abstain
from conformance.cache_suite.mistakes import Kept, mistakes_of_blocks, mistakes_of_positions, mistakes_of_sets
from conformance.cache_suite.oracle import Masked, PositionRule, UnknownRotation, check_rotation
from conformance.checks.failing_input import note_code
from conformance.checks.refusals import boundary
from conformance.tolerances import MASKED_LOGITS, MASKED_VISIBLE

PROMPT = 40
"""Default number of tokens of a prompt: enough for different kept sets, and few enough to print."""
LENGTHS = (2, 65, 130, 600)
"""Numbers of tokens of prompts: the shortest prompt, and more tokens than blocks of 64, 128 and 512."""
BLOCKS = (16, 17, 64, 128, 129, 256, 257, 512, 513)
"""Numbers of tokens that fill blocks, pages and tiles, or leave one token for the last block."""
LONG = 2_050
"""Number of tokens of a long prompt, above 2 048."""
LONGER = 4_100
"""Number of tokens of a longer prompt, above 4 096. Only one model reads it: attention takes four times longer."""
TRIALS = 8
"""Largest number of kept sets that are drawn until the eviction changes the log-probabilities visibly."""
TRIES = 300
"""Largest number of lost blocks, and of mixtures of position rules, that are tried to explain a failure."""
CLOSER = 4
"""Factor by which a mistake must be closer to the result than the right kept sets to be reported."""
WHOLE = "nothing is evicted"
Run = Callable[..., Any]
"""run(prompt_ids, kept, next_ids, model), with additional parameters for the abilities in `abilities.ABILITIES`."""


_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "initializer_range": 1.2 / 256**0.5, "max_position_embeddings": 8192,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 64}
_EIGHT = {**_SIZES, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_ONE = {
    **_SIZES, "vocab_size": 70_000, "hidden_size": 56, "initializer_range": 1.2 / 56**0.5, "num_hidden_layers": 12,
    "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32,
}
TINY: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }),
    "qwen3": lambda: Qwen3Config(**_EIGHT),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES),
    "gemma2": lambda: Gemma2Config(**{
        **_ONE, "layer_types": ["full_attention"] * 12, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 4.0,
    }),
    "gemma3_text": lambda: Gemma3TextConfig(**{
        **_GROUPED, "sliding_window": 16, "query_pre_attn_scalar": 64, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    # Both experts of each token: a choice of one expert could depend on the rounding of an engine.
    "gpt_oss": lambda: GptOssConfig(**{
        **_GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 3,
    }),
}
"""Configurations of tiny models, by family.

"llama" has grouped queries, and the frequencies of Llama 3.1. "qwen3" has eight wide KV heads and normalised keys.
"gpt_neox" has separate keys for each query head, which are partly rotated. "gemma2" has one KV head for seven query
heads, 12 layers, token ids above 2^16, logits with a soft cap, and a scaling that is not d^-0.5. "gemma3_text" has
sliding layers before and between full layers. "gpt_oss" has attention sinks.
"""


_tiny: dict[str, str] = {}
"""Families of the tiny models that this process saved, by folder."""


def save_tiny(family: str, folder: Path) -> Path:
    """Save a small model with random parameters. Engines have kernels for its head dimension. Return the folder."""
    _tiny[str(folder)] = family
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(TINY[family]())  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("sinks"):  # Near 0, as they are drawn, a wrong sink would hardly change a log-probability.
                values.normal_(0, 2)
    model.save_pretrained(folder)
    return folder


@cache
def load_model(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True,
    )
    return model


@cache
def _unknown_rotation(folder: str) -> str:
    """Return the reason why positions of this model cannot be renumbered, or an empty string if they can."""
    try:
        check_rotation(load_model(folder))
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
    """Return kept sets of different sizes for the heads of a layer: no token, all, one, and random numbers.

    The order of the sizes differs by layer.
    """
    result: Kept = {}
    for at, (layer, count) in enumerate(heads.items()):
        sizes = [0, n, 1, *rng.integers(2, max(3, n), count).tolist()]
        sizes = sizes[:count] if count > 1 else [sizes[at % len(sizes)]]
        result[layer] = [_set(rng, n, min(n, int(size))) for size in rng.permutation(sizes)]
    return result


def _older(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
    """Return kept sets without the newest tokens, so that they do not show how many tokens were read."""
    older = max(1, n - 5)
    return {layer: [_set(rng, older, _half(older)) for _ in range(count)] for layer, count in heads.items()}


def _nearly_all(n: int) -> int:
    return n - max(1, n // 20)


def _layers(*sizes: Callable[[int], int]) -> Callable[[np.random.Generator, Mapping[int, int], int], Kept]:
    """Return a function that draws kept sets whose sizes alternate by layer."""
    def draw(rng: np.random.Generator, heads: Mapping[int, int], n: int) -> Kept:
        return {
            layer: [_set(rng, n, sizes[at % len(sizes)](n)) for _ in range(count)]
            for at, (layer, count) in enumerate(heads.items())
        }

    return draw


KINDS: Mapping[str, Callable[[np.random.Generator, Mapping[int, int], int], Kept]] = {
    WHOLE: _nothing,
    "one set for all": _one_set,
    "a set for each layer": _by_layer,
    "a set for each KV head": _layers(_half),
    "a set of its own length for each KV head": _any_length,
    "the newest tokens are evicted": _older,
    "a twentieth is evicted": _layers(_nearly_all),
    "all of the first layer and few of the next": _layers(lambda n: n, lambda n: max(1, n // 8)),
    "nothing of the first layer and half of the next": _layers(lambda n: 0, _half),
}
"""Functions that draw kept sets, by kind. A function gets a generator, KV heads by layer, and the prompt length."""


@dataclass(frozen=True)
class Case:
    """Prompt, kept sets, following tokens, and their log-probabilities with masks (`expected`) and without masks."""

    prompt: list[int]
    kept: Kept
    following: list[int]
    expected: Tensor
    unmasked: Tensor


def _special_ids(config: Any, count: int) -> list[int]:
    """Return ids of padding and of the ends of a text. In a prompt, such tokens are as visible as all others."""
    given = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos"))
    ids = dict.fromkeys([0, *(one for one in given if isinstance(one, int))])
    return list(islice(cycle(ids), count))


def _case(folder: str, kind: str, new: int, seed: int, renumbered: bool, length: int, again: int) -> Case:
    """Return a case. The prompt and the following tokens do not depend on `kind` and `again`."""
    model, rng = load_model(folder), np.random.default_rng([seed, new, length])
    config = model.config.get_text_config(decoder=True)
    length = min(length, config.max_position_embeddings - new)
    prompt, following = (rng.integers(config.vocab_size, size=n).tolist() for n in (length, new))
    for part in (prompt, following):
        part[: len(part) - 1 : 4] = _special_ids(config, len(part[: len(part) - 1 : 4]))
    rng = np.random.default_rng([seed, new, length, list(KINDS).index(kind), again])
    heads, masked = masked_model(model, prompt, following, renumbered)
    unmasked = masked(_nothing(rng, heads, length))
    for _ in range(1 if kind == WHOLE else TRIALS):
        kept = KINDS[kind](rng, heads, length)
        expected = masked(kept)
        if _apart(unmasked, expected) > MASKED_VISIBLE:
            break
    return Case(prompt, kept, following, expected, unmasked)


def check(
    run: Run, folder: str, kind: str, new: int, seed: int = 0, renumbered: bool = False, length: int = PROMPT,
    again: int = 0,
) -> None:
    """Check the log-probabilities of `new` tokens after a prompt of `length` tokens is evicted.

    Args:
        run: function under test.
        folder: folder of the model.
        kind: kind of kept sets, in `KINDS`.
        new: number of tokens that follow the prompt.
        seed: random seed.
        renumbered: True if the cache renumbers kept tokens, False if they keep the positions of the text.
        length: number of tokens of the prompt.
        again: number that changes the kept sets, but not the prompt.

    Raises:
        AssertionError: if the log-probabilities differ from those of the masked model.
    """
    case = visible_case(folder, kind, new, seed, renumbered, length, again)
    given = (_tiny.get(folder, folder), kind, new, seed, renumbered, length, again)
    with note_code(f"from conformance.cache_suite.judge import case_of\ncase, model = case_of{given}"):
        try:
            answer = call(run, case.prompt, copy.deepcopy(case.kept), case.following, folder)
        except NotImplementedError as error:
            abstain("not served", f"{kind}: not served ({error})")
        compare(case, answer, kind, folder, renumbered)


def case_of(
    model: str, kind: str, new: int, seed: int = 0, renumbered: bool = False, length: int = PROMPT, again: int = 0,
) -> tuple[Case, str]:
    """Return a case as `kvspec verify` printed it, and the folder of the model. `run` receives three of its attributes.

        logits = run(case.prompt, case.kept, case.following, model)

    Args:
        model: family of a tiny model, or folder of a model.
        kind: as in `check`. The further arguments are those of `check` too.
        new: as in `check`.
        seed: as in `check`.
        renumbered: as in `check`.
        length: as in `check`.
        again: as in `check`.
    """
    folder = str(save_tiny(model, Path(mkdtemp()))) if model in TINY else model
    return visible_case(folder, kind, new, seed, renumbered, length, again), folder


def check_first_served(run: Run, folder: str, kinds: Sequence[str], *given: Any) -> None:
    """Check the first of these kinds that the engine supports."""
    for kind in kinds:
        try:
            check(run, folder, kind, *given)
            break
        except pytest.skip.Exception:
            if kind == kinds[-1]:
                raise


def visible_case(folder: str, kind: str, new: int, seed: int, renumbered: bool, length: int, again: int) -> Case:
    """Return a case in which masking changes the log-probabilities visibly. If there is none, skip the test."""
    if renumbered and (unknown := _unknown_rotation(folder)):
        pytest.skip(f"{kind}: {unknown}")
    case = _case(folder, kind, new, seed, renumbered, length, again)
    if kind != WHOLE and _apart(case.unmasked, case.expected) <= MASKED_VISIBLE:
        pytest.skip(f"{kind}: masking changes nothing that could be seen on this model")
    return case


def call(run: Run, *given: Any, **offered: Any) -> Tensor:
    with boundary("the cache's function", NotImplementedError):
        return torch.as_tensor(run(*given, **offered)).detach().to("cpu", torch.float32)


def compare(case: Case, actual: Tensor, kind: str, folder: str, renumbered: bool) -> None:
    """Check that log-probabilities equal the expected ones of a case.

    Raises:
        AssertionError: if they differ. The message has the first step that differs, and if known the layer and head.
    """
    assert actual.shape == case.expected.shape, f"logits are {tuple(actual.shape)}, not (new tokens, vocabulary)"
    logged = _log(actual)
    apart = _apart(logged, case.expected)
    if not apart <= MASKED_LOGITS:
        hint = "it is as if nothing were evicted" if _apart(logged, case.unmasked) <= MASKED_LOGITS else ""
        hint = hint or site(case, logged, folder, renumbered)
        raise AssertionError(
            f"{kind}, {len(case.prompt)} and {len(case.following)} tokens: log-probabilities are {apart:.1e} of the"
            f" largest away from those of the model whose evicted tokens are masked, more than {MASKED_LOGITS:.0e}"
            f"{hint and f'; {hint}'}\n{_example(case, logged)}"
        )


def site(case: Case, result: Tensor, folder: str, renumbered: bool) -> str:
    """Return the mistakes that explain the log-probabilities, or a sentence that none of those tried explains them.

    If a lost block and a mistake of kept sets explain them, both are returned. Mistakes of positions are tried last.
    """
    n, apart = len(case.prompt), _apart(result, case.expected)
    _, masked = masked_model(load_model(folder), case.prompt, case.following, renumbered)

    def explains(kept: Kept, rules: Mapping[int, PositionRule] | None = None) -> bool:
        return _apart(masked(kept, rules), result) <= min(MASKED_LOGITS, apart / CLOSER)

    lost, sets = [*islice(mistakes_of_blocks(case.kept, n), TRIES)], [*mistakes_of_sets(case.kept, n)]
    explanations = [
        next((words for words, kept in tries if kept != case.kept and explains(kept)), "") for tries in (lost, sets)
    ]
    most = 0 if any(explanations) or _unknown_rotation(folder) else TRIES
    mixed = [*islice(mistakes_of_positions(case.kept, renumbered, n), most)]
    explanations.append(next((words for words, rules in mixed if explains(case.kept, rules)), ""))
    if any(explanations):
        return f"it is as if {', or as if '.join(filter(None, explanations))}"
    return f"none of {len(lost) + len(sets) + len(mixed)} mistakes that were tried explains it"


def masked_model(
    model: PreTrainedModel, prompt: Sequence[int], following: Sequence[int], renumbered: bool,
) -> tuple[dict[int, int], Callable[..., Tensor]]:
    """Return the KV heads by layer, and a function of kept sets and position rules.

    The function returns the log-probabilities of the following tokens. The prompt is read once. No token is evicted
    before it is read, so its keys depend neither on the kept sets nor on the rules.
    """
    masked = Masked(model, renumbered)
    masked.read(torch.tensor([prompt]), last=1)
    cache, declared = masked.cache, masked.rules

    def read(kept: Kept, rules: Mapping[int, PositionRule] | None = None) -> Tensor:
        masked.cache, masked.seen = copy.deepcopy(cache), len(prompt)
        masked.rules = {layer: rules[stored] for layer, stored in masked.stores.items()} if rules else declared
        masked.keep(list(kept.values()))
        return _log(masked.read(torch.tensor([following]))[0])

    return masked.heads, read


def _example(case: Case, result: Tensor) -> str:
    """Return a text with the first token that differs, the id with the largest difference, and a layer's kept sets."""
    off = (result - case.expected).abs().amax(dim=1) / case.expected.abs().max()
    token = int((~(off <= MASKED_LOGITS)).int().argmax())
    word = int((result[token] - case.expected[token]).abs().argmax())
    layer, sets = next(iter(case.kept.items()))
    return (
        f"first at next token {token}, id {word}: expected {case.expected[token, word]:.4f},"
        f" found {result[token, word]:.4f}\nof {len(case.prompt)} tokens layer {layer} keeps {sets}"
    )


def _log(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits. Log-probabilities are not changed."""
    return logits.to(torch.float64).log_softmax(dim=-1)


def _apart(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value. NaN counts as infinite."""
    worst = float((actual - expected).abs().max() / expected.abs().max())
    return worst if worst == worst else float("inf")
