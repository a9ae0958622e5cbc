"""EpiCache: one cache for each episode of a dialogue, read in blocks, and the cache of the episode of a question."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.handover import check_attention_uses_cache_tensors
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, describe, device_of
from models_integration.policies.prefill import blocks_of
from models_integration.session.inputs import check_input_ids
from models_integration.session.method import Method, decide, method_of
from models_integration.session.verbs import NOTHING, observe, read
from reference.policies import epicache
from reference.policies import episodes as stages
from spec.arrays import Float64, Matrix
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.retention import Granularity
from spec.validate import check_whole

__all__ = ["Episodes", "layer_similarities", "prefill_episodes"]

Ids: TypeAlias = Sequence[int]
Embed: TypeAlias = Callable[[Sequence[Ids]], Any]
"""Function that returns a vector for each text, (texts, d), from the token ids of the texts."""


@dataclass(frozen=True)
class Episodes:
    """Caches of the episodes of a dialogue, as `prefill_episodes` returns them.

    Attributes:
        history: token ids of the whole dialogue, (1, n). Pass the history, followed by a question, to `generate`.
        caches: cache of each episode. Each cache has read the whole dialogue.
        labels: episode of each window of the dialogue.
        centroids: mean embedding of the windows of each episode, (episodes, d).
        prompts: token ids of each episode's patched prompt.
    """

    history: Tensor
    caches: tuple[RetainedCache, ...]
    labels: tuple[int, ...]
    centroids: Float64[Matrix, "episodes d"]
    prompts: tuple[tuple[int, ...], ...]
    _embed: Embed
    _architecture: Architecture

    def nearest(self, question: Ids) -> int:
        """Return the episode of a question, from the token ids of the question.

        Raises:
            SpecError: if the question has no token, or a token id that the model does not have.
        """
        if len(question) == 0:
            raise SpecError("question", "no token ids", "must have at least one token id")
        _check_ids(self._architecture, question=question)
        return stages.nearest_episode(_unit_rows(self._embed, [question])[0], self.centroids)

    def cache(self, question: Ids) -> RetainedCache:
        """Return a copy of the cache of the question's episode. Answers do not change the caches of the episodes.

        Raises:
            SpecError: if the question has no token, or a token id that the model does not have.
        """
        return copy.deepcopy(self.caches[self.nearest(question)])


def prefill_episodes(
    model: PreTrainedModel, dialogue: Sequence[Ids], budget: int, *, block: int = 2048, episodes: int = 4,
    window: int = 4, prompt_windows: int = 4, instruction: Ids = (), embed: Embed | None = None,
    similarities: Sequence[float] | None = None, power: float = 1.1, seed: int = 42,
) -> Episodes:
    """Read a dialogue once for each episode, in blocks, and keep the tokens that matter for the episode (EpiCache).

        episodes = kvspec.prefill_episodes(model, [tokenizer(text).input_ids for text in utterances], budget=512)
        ids = torch.cat([episodes.history, question], dim=1)
        with kvspec.FullCache()(model) as run, run.reading():
            output = model.generate(ids, past_key_values=episodes.cache(question[0].tolist()))

    After each block the model reads the episode's patched prompt, whose queries score the cached tokens. A cache stores
    `budget` tokens for each KV head in the mean, and at most the budget, one block and the patched prompt.

    Args:
        model: a causal language model with full attention in all layers.
        dialogue: token ids of each utterance, in temporal order.
        budget: number of tokens that an episode keeps for each KV head, in the mean over layers and heads.
        block: number of tokens in a block, at least 2.
        episodes: number of episodes, at most the number of windows. Equal windows can give fewer.
        window: number of successive utterances that are embedded together.
        prompt_windows: largest number of windows in a patched prompt.
        instruction: token ids at the start of each patched prompt.
        embed: function that returns a vector for each text, (texts, d), from token ids. Default: the mean of the
            model's input embeddings.
        similarities: a number for each layer, such as `layer_similarities(model, ids)`. Layers with small numbers keep
            more tokens. Default: all layers keep equally many tokens.
        power: exponent of the layers' weights.
        seed: seed of the clusters.

    Raises:
        SpecError: if kvspec does not support the model, or if an argument is invalid.
    """
    shared = parse_budget(budget)
    architecture = _check_model(model)
    _check_sizes(dialogue, shared, {"window": window, "prompt_windows": prompt_windows, "episodes": episodes})
    _check_ids(architecture, dialogue=chain.from_iterable(dialogue), instruction=instruction)
    texts = [list(chain.from_iterable(dialogue[at : at + window])) for at in range(0, len(dialogue), window)]
    embed = embed or _MeanEmbedding(model)
    device = device_of(architecture.decoder)
    x = _unit_rows(embed, texts)
    labels, centroids = stages.cluster_windows(x, episodes, seed)
    prompts = tuple(
        (*instruction, *chain.from_iterable(texts[at] for at in chosen))
        for chosen in stages.prompt_windows(x, labels, centroids, prompt_windows)
    )
    method = method_of(epicache(_shares(architecture, shared, similarities, power)), shared)
    history = torch.tensor([list(chain.from_iterable(dialogue))], device=device)
    parts = blocks_of(history, block)
    caches = tuple(_episode(model, method, parts, torch.tensor([ids], device=device)) for ids in prompts)
    return Episodes(history, caches, tuple(labels.tolist()), centroids, prompts, embed, architecture)


def _episode(model: PreTrainedModel, method: Method, parts: Sequence[Tensor], prompt: Tensor) -> RetainedCache:
    """Return the cache of an episode: read each block, then let the patched prompt decide what the cache keeps."""
    cache = observe(model, parts[0], needs=NOTHING).cache
    for at, part in enumerate(parts):
        if at:
            read(model, cache, part)
        observed = read(model, cache, prompt, method.policy.scorer.needs)
        cache.crop(-prompt.shape[1])
        cache.compact(decide(method, observed).retentions)
    return cache


def _check_model(model: PreTrainedModel) -> Architecture:
    """Check that the patched prompt can be read and removed, and return the description of the model."""
    architecture = describe(model)
    cache = RetainedCache(architecture.config)
    if len(cache.full_layers) < len(cache.layers) or cache.recurrent:
        reason = "has sliding-window or recurrent layers, from which the patched prompt cannot be removed"
        raise SpecError("model", architecture.name, reason)
    check_attention_uses_cache_tensors(architecture, epicache().scorer.needs, Granularity.HEAD)
    return architecture


def _check_sizes(dialogue: Sequence[Ids], budget: Budget, sizes: Mapping[str, int]) -> None:
    if budget.count is None:
        raise SpecError("budget", str(budget), "must be a number of tokens, because the dialogue is read in blocks")
    if not _has_ids(dialogue):
        reason = "must be the ids of each utterance: type [tokenizer(text).input_ids for text in utterances]"
        raise SpecError("dialogue", type(dialogue).__name__, reason)
    if len(dialogue) == 0 or any(len(utterance) == 0 for utterance in dialogue):
        raise SpecError("dialogue", f"{len(dialogue)} utterances", "must have utterances of at least one token id")
    for name, value in sizes.items():
        check_whole(name, value, 1)


def _has_ids(dialogue: Iterable[Iterable[object]]) -> bool:
    try:
        return all(isinstance(one, (int, np.integer)) for utterance in dialogue for one in utterance)
    except TypeError:
        return False


def _check_ids(architecture: Architecture, **texts: Iterable[int]) -> None:
    size = architecture.vocabulary
    for name, ids in texts.items():
        if outside := [one for one in ids if not 0 <= one < size]:
            raise SpecError(name, outside[0], f"must have token ids of the model, from 0 to {size - 1}")


def _shares(
    architecture: Architecture, budget: Budget, similarities: Sequence[float] | None, power: float,
) -> Sequence[int]:
    """Return the number of tokens of each layer, or an empty list if the shares are equal."""
    if similarities is None:
        return []
    L = len(architecture.full_layers)
    if len(similarities) != L:
        raise SpecError("similarities", f"{len(similarities)} numbers", f"must be {L}, one for each layer")
    assert budget.count is not None
    shares: list[int] = stages.layer_shares(np.array(similarities, dtype=np.float64), budget.count, power).tolist()
    return shares


@dataclass(frozen=True)
class _MeanEmbedding:
    """Mean of the model's input embeddings over the tokens of a text."""

    model: PreTrainedModel

    def __call__(self, texts: Sequence[Ids]) -> Matrix:
        weight = cast(Tensor, self.model.get_input_embeddings().weight)
        with torch.no_grad():
            rows = [weight[torch.tensor(list(ids), device=weight.device)].double().mean(dim=0) for ids in texts]
        return torch.stack(rows).cpu().numpy()


def _unit_rows(embed: Embed, texts: Sequence[Ids]) -> Matrix:
    """Return the embedding of each text, with length 1.

    Raises:
        SpecError: if a text has no embedding, or an embedding of length 0 or infinity.
    """
    rows = np.asarray(embed(texts), dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    if rows.shape[:-1] != (len(texts),) or not (np.isfinite(lengths).all() and (lengths > 0).all()):
        reason = f"must return a vector of finite length above 0 for each of {len(texts)} texts"
        raise SpecError("embed", rows.shape, reason)
    unit: Matrix = rows / lengths
    return unit


def layer_similarities(
    model: PreTrainedModel, input_ids: Tensor, window: int = 4096, N_sink: int = 128,
) -> list[float]:
    """Measure how much the keys of each layer stay the same if the model reads a text in windows.

        similarities = kvspec.layer_similarities(model, ids, window=1024)
        episodes = kvspec.prefill_episodes(model, utterances, budget=512, similarities=similarities)

    The model reads the text twice: with causal attention, and in windows of which each overlaps half of the next. The
    number of a layer is the mean cosine of the keys of both passes. Both passes need the full cache, and the second
    pass needs a mask of all pairs of tokens.

    Args:
        model: a causal language model with full attention in all layers, and the attention "sdpa" or "eager".
        input_ids: a text (1, n) that is longer than the window.
        window: number of tokens in a window, even.
        N_sink: number of first tokens to which all tokens attend.

    Raises:
        SpecError: if kvspec does not support the model, or if an argument is invalid.
    """
    n = check_input_ids(input_ids).shape[1]
    if check_whole("window", window) < 2 or window % 2 or n <= window:
        raise SpecError("window", window, f"must be an even number from 2 to {n - 1}, and below the length of the text")
    check_whole("N_sink", N_sink)
    architecture = _check_model(model)
    whole = observe(model, input_ids, needs=NOTHING).cache
    visible = torch.from_numpy(stages.visible_in_windows(n, window, N_sink)).to(input_ids.device)
    with _with_mask(architecture, visible):
        cut = observe(model, input_ids, needs=NOTHING).cache
    pairs = [(whole.keys_of(at), cut.keys_of(at)) for at in range(len(architecture.full_layers))]
    return [float(torch.cosine_similarity(a.double(), b.double(), dim=-1).mean()) for a, b in pairs]


@contextmanager
def _with_mask(architecture: Architecture, visible: Tensor) -> Iterator[None]:
    """Context manager inside which every layer attends to the visible pairs of tokens, (n, n)."""
    def masked(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        states = options["hidden_states"] if "hidden_states" in options else args[0]
        lowest = torch.full(visible.shape, torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
        return args, {**options, "attention_mask": lowest.masked_fill(visible.to(states.device), 0.0)[None, None]}

    # The model of transformers 5.24 makes the masks itself. Each attention module receives its mask by this name.
    with ExitStack() as undo:
        for module in architecture.attention.values():
            undo.callback(module.register_forward_pre_hook(masked, with_kwargs=True).remove)
        yield
