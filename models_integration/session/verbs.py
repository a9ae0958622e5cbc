"""Functions for one prompt and many policies: observe the prompt once, then decide and compact for each policy.

    observed = observe(model, input_ids)
    for policy in policies:
        decision = decide(policy, observed)
        cache = compact(observed.cache, decision)

With these functions, memory contains the full cache, and `compact` does not change the full cache. A session avoids the
full cache if the policy can evict layer by layer.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models_integration.attention.capture import observing
from models_integration.attention.handover import check_attention_uses_cache_tensors, check_readable, check_recurrence
from models_integration.cache.continuation import Decision
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.fixed_size_layers import is_recurrent
from models_integration.cache.retained_cache import RetainedCache, failing_whole
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.model.architecture import check_free, decoder_inputs, describe, position_range
from models_integration.model.cache_argument import cache_name
from models_integration.session.admission import check_forward, check_rehearsed
from models_integration.session.inputs import ONE_FORWARD, OPEN, ForwardSpan, accepted, first_span, later_span
from models_integration.session.observed import ObservedSegment
from models_integration.session.rules import rebased
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention
from spec.validate import check_types

__all__ = ["EVERYTHING", "after_eviction", "compact", "observe", "read", "side_by_side"]

EVERYTHING = Needs(layers="all", query_rows=None, values=True, token_ids=True)
"""All tensors that kvspec can capture for a scorer."""
NOTHING = Needs()


def observe(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None, needs: Needs = EVERYTHING,
) -> ObservedSegment:
    """Run a model on prompts, keep the full cache, and capture the tensors that policies need.

        observed = kvspec.observe(model, input_ids)
        decision = kvspec.decide(kvspec.policy_from_name("snapkv", 0.3), observed)
        cache = kvspec.compact(observed.cache, decision)

    Args:
        model: a causal language model, used outside `with policy(model)`.
        input_ids: prompts, (rows, n).
        attention_mask: 2D mask (rows, n) with zeros for padding on the left. Default: no padding.
        needs: tensors to capture. Default: the values, and the queries and keys after RoPE, of all full-attention
            layers. For KVzip, which needs a second pass, give
            `replace(EVERYTHING, rehearsal=method.policy.scorer.needs.rehearsal)`. For KVzap, which needs hidden states,
            give `replace(EVERYTHING, hidden=True)`.

    Returns:
        The captured tensors. The attribute `cache` is the full cache, and `logits` are the logits after each prompt.

    Raises:
        SpecError: if kvspec does not support the model or the prompt.
    """
    architecture = describe(model)
    if not isinstance(needs, Needs):
        raise SpecError("needs", type(needs).__name__, "must be tensors to capture: type needs=kvspec.Needs('all')")
    check_free(model)
    check_attention_uses_cache_tensors(architecture, needs, Granularity.MODEL)
    arguments = {"input_ids": input_ids, "attention_mask": attention_mask}
    given = check_forward(arguments, default_use_cache=True)
    check_recurrence(architecture, given, None)
    nothing = torch.ones(len(input_ids), 0, dtype=torch.bool, device="cpu")
    span = first_span(architecture.vocabulary, given, nothing, ONE_FORWARD)
    check_rehearsed(needs, span)
    cache = RetainedCache(architecture.config)
    observed = ObservedSegment(needs, architecture, cache, lse=True)
    observed.model = model
    observed.read(span.ids, span.is_token, input_ids.device)
    observed.logits = _forward(model, observed, input_ids, span, 1, attention_mask)[:, -1:]
    observed.rehearse()
    return observed


def _forward(
    model: PreTrainedModel, observed: ObservedSegment, input_ids: Tensor, span: ForwardSpan, last: int,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the logits. If the model supports `logits_to_keep`, the result has only the last columns."""
    parameters, inputs = inspect.signature(model.forward).parameters, decoder_inputs(observed.architecture.decoder)
    names = set(parameters)
    base = observed.cache.renumber(input_ids.shape[1], position_range(observed.architecture.config))
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):  # the model passes these to the decoder
        names |= inputs
    arguments: dict[str, Any] = {
        "input_ids": input_ids, "attention_mask": attention_mask,
        **rebased(accepted(span.defaults, inputs & names), base),
        cache_name(model): observed.cache,
    }
    if "logits_to_keep" in names:
        arguments["logits_to_keep"] = last
    with (
        torch.no_grad(), observing(observed.architecture, observed.cache, observed, observed.layers),
        failing_whole(observed.cache, "a forward pass failed"),
    ):
        logits: Tensor = model(**arguments, use_cache=True).logits
    observed.cache.note_ids(input_ids)
    return logits


def read(
    model: PreTrainedModel, cache: RetainedCache, input_ids: Tensor, needs: Needs = NOTHING, last: int = 1,
) -> ObservedSegment:
    """Process tokens, such as a question or an answer, after the tokens of a cache, without eviction.

    kvspec appends the tokens to the cache. Rows, layers and heads of the cache may store different tokens.

    Args:
        model: model outside `with policy(model)`.
        cache: cache, such as the result of `compact`.
        input_ids: token ids (rows, n).
        needs: tensors of the new tokens to capture.
        last: number of last columns whose logits are returned.

    Returns:
        The captured tensors. The attribute `logits` is (rows, last, vocabulary).

    Raises:
        SpecError: if kvspec does not support the model or the tokens.
    """
    check_free(model)
    architecture = describe(model)
    if cache.layers_differ:
        check_readable(architecture, cache)
    check_recurrence(architecture, {"input_ids": input_ids}, cache)
    span = later_span(architecture.vocabulary, {"input_ids": input_ids}, cache, OPEN)
    observed = ObservedSegment(needs, architecture, cache)
    observed.read(span.ids, span.is_token, input_ids.device)
    observed.logits = _forward(model, observed, input_ids, span, last)[:, -last:]
    return observed


def _rows(cache: RetainedCache) -> int:
    if not cache.get_seq_length():
        raise SpecError("cache", "an empty cache", "has no rows: type kvspec.observe(model, input_ids).cache")
    return cache.full_layers[0].batch


def compact(cache: RetainedCache, decision: Decision) -> RetainedCache:
    """Make a new cache that has only the kept tokens. The full cache is not changed.

        cache = kvspec.compact(observed.cache, kvspec.decide(policy, observed))

    If no token is evicted, the new cache shares tensors with the full cache. Shared tensors are never changed in place.

    Args:
        cache: full cache, for example the attribute `cache` of the result of `observe`.
        decision: result of `decide` for this cache.

    Raises:
        SpecError: if the cache is empty, or if the decision does not match its tokens, rows, layers or heads.
    """
    call = "compact(observed.cache, decision)"
    check_types(call, cache=(cache, RetainedCache), decision=(decision, Decision))
    cache.check_usable()
    rows = _rows(cache)
    if len(decision.retentions) != rows:
        raise SpecError("decision", f"{len(decision.retentions)} prompts", f"must be for the {rows} rows of the cache")
    compacted = cache.branch()
    compacted.compact(decision.retentions, decision.padding)
    compacted.continuation = decision.continuation
    compacted.numbering = decision.numbering or compacted.numbering
    return compacted


def side_by_side(cache: RetainedCache, rows: int) -> RetainedCache:
    """Return a cache with `rows` equal rows, as views. `compact` can then keep different tokens in each row.

    Args:
        cache: cache with one row. All layers and heads must store the same tokens, as after `observe`.
        rows: number of rows, at least 1.

    Raises:
        SpecError: if the cache does not satisfy these conditions, or if `rows` is below 1.
    """
    batch = _rows(cache)
    if not cache.uniform or batch != 1:
        raise SpecError("cache", f"{batch} rows", "must have one, which stores the same in all layers and heads")
    if rows < 1:
        raise SpecError("rows", rows, "must be at least 1")
    wide = cache.branch()
    for state in wide.recurrent:
        state.reorder_cache(torch.zeros(rows, dtype=torch.int64, device="cpu"))
    layers: list[Any] = wide.layers
    for layer in layers:
        if isinstance(layer, DenseLayer):
            layer.replace_tensors(lambda tensor: tensor.expand(rows, -1, -1, -1))
        elif not is_recurrent(layer) and layer.keys is not None:
            layer.keys, layer.values = (tensor.expand(rows, -1, -1, -1) for tensor in (layer.keys, layer.values))
    return wide


def after_eviction(
    prompt_ids: list[Any], kept: Any, next_ids: list[Any], model: str, batch: bool = False,
    save_to: str | None = None, load_from: str | None = None,
) -> Tensor:
    """Return the logits of tokens that a model processes after the eviction of prompt tokens.

    This is kvspec's cache as a test subject: `kvspec verify --cache models_integration.session.verbs:after_eviction`.

    Args:
        prompt_ids: n token ids of the prompt. With `batch`, this and the next two arguments are lists with an entry for
            each row, and shorter prompts are padded on the left.
        kept: kept positions, ascending, for each full-attention layer and KV head.
        next_ids: ids of the tokens after the prompt. The first of these tokens has the position n.
        model: folder or name of a transformers model. The model is loaded in float32.
        batch: True for several rows at once.
        save_to: file for the cache after eviction. Default: the cache is not saved.
        load_from: file of a saved cache, which replaces the prompt. Default: the prompt is processed.

    Returns:
        Logits (next tokens, vocabulary). With `batch`: (rows, next tokens, vocabulary).

    Raises:
        SpecError: if kvspec does not support the model.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts, sets, following = (prompt_ids, kept, next_ids) if batch else ([prompt_ids], [kept], [next_ids])
    cache = load_cache(load_from, loaded) if load_from else _evicted(loaded, prompts, sets)
    if save_to:
        save_cache(cache, loaded, save_to)
    logits = read(loaded, cache, torch.tensor(following, device="cpu"), last=len(following[0])).logits
    assert logits is not None
    return logits if batch else logits[0]


def _evicted(
    model: PreTrainedModel, prompts: Sequence[list[int]], kept: Sequence[Mapping[int, Sequence[Sequence[int]]]],
) -> RetainedCache:
    """Return a cache with one row for each prompt. Each row stores the kept tokens of its prompt."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)], device="cpu")
    mask = torch.arange(longest, device="cpu") >= torch.tensor(padding, device="cpu")[:, None]
    full = observe(model, ids, mask.long() if any(padding) else None).cache
    retentions = []
    for prompt, sets in zip(prompts, kept, strict=True):
        groups = [tokens for layer in sorted(sets) for tokens in sets[layer]]
        offsets = np.cumsum([0, *map(len, groups)])
        positions = np.concatenate(groups).astype(np.int64)
        retentions.append(Retention(positions, offsets, len(prompt), Granularity.HEAD))
    return compact(full, Decision(tuple(retentions), padding=torch.tensor(padding) if any(padding) else None))
