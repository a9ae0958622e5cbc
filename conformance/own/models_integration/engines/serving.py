"""Tiny models behind continuous batching: random prompts that arrive at random times, and what was answered."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from conformance.measure.paged import greedy
from conformance.own.models_integration.session.families import VOCABULARY
from conformance.own.models_integration.session.masked import HeadSets, Masked
from spec.retention import Granularity, Retention


def prompts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    """Random ids, special ones left out, of random lengths."""
    random = Random(seed)
    return [[random.randrange(3, VOCABULARY) for _ in range(random.randint(*lengths))] for _ in range(count)]


def serve(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], config: ContinuousBatchingConfig, new: int,
    arrivals: Random | None = None,
) -> dict[str, Any]:
    """The engine's outputs by request: ids are the places of their texts."""
    found: dict[str, Any] = {}
    served: Any = model
    with served.continuous_batching_context_manager(
        generation_config=greedy(new), continuous_batching_config=config
    ) as manager:
        for place, text in enumerate(texts):
            if arrivals is not None and arrivals.random() < 0.3:
                time.sleep(arrivals.random() * 0.02)
            manager.add_request(list(text), request_id=str(place))
        while len(found) < len(texts) and manager.is_running():
            output = manager.get_result(timeout=0.2)
            if output is not None and output.is_finished():
                found[output.request_id] = output
    return found


def kept_sets(retention: Retention, layers: int, heads: int) -> HeadSets:
    """The kept positions of each layer and KV head, at any granularity."""
    def place(layer: int, head: int) -> int:
        sets = {Granularity.MODEL: 0, Granularity.LAYER: layer, Granularity.HEAD: layer * heads + head}
        return sets[retention.granularity]

    return {layer: [retention.group(place(layer, head)).tolist() for head in range(heads)] for layer in range(layers)}


@contextmanager
def recorded_logits(model: PreTrainedModel, processors: list[Any]) -> Iterator[dict[str, list[Tensor]]]:
    """The logits that each answered token was chosen from, by request."""
    rows: dict[str, list[Tensor]] = {}
    head: Any = model.lm_head

    def hook(module: object, args: object, output: Tensor) -> None:
        requests = list(processors[-1].inputs_and_outputs.req_id_to_new_token_position)
        for request, row in zip(requests, output[0].detach().clone(), strict=False):
            rows.setdefault(request, []).append(row)

    handle = head.register_forward_hook(hook)
    yield rows
    handle.remove()


class Between:
    """Looks at the processor before each batch, where every prompt that has ended is decided."""

    def __init__(self, monkeypatch: Any, look: Callable[[Any], None] = lambda processor: None) -> None:
        self.processors: list[Any] = []
        own = ContinuousBatchProcessor.prepare_next_batch

        def prepare(processor: Any) -> bool:
            if processor not in self.processors:
                self.processors.append(processor)
            look(processor)
            return bool(own(processor))

        monkeypatch.setattr(ContinuousBatchProcessor, "prepare_next_batch", prepare)


def tables(processor: Any) -> dict[str, list[int]]:
    """Blocks by request."""
    cache = processor.cache
    (allocator,) = cache.cache_allocators.values() if hasattr(cache, "cache_allocators") else cache.group_cache_managers
    found: dict[str, list[int]] = allocator.block_table
    return found


def all_free(processor: Any) -> bool:
    """Whether no request holds a block, and every block is free."""
    cache = processor.cache
    if not hasattr(cache, "pool"):
        return not any(tables(processor).values()) and bool(cache.get_num_free_blocks() == cache.num_blocks)
    cache.pool.try_to_free_sectors()
    return not any(tables(processor).values()) and bool(cache.pool.num_free_sectors == cache.num_sectors)


def closest(found: Sequence[Tensor], expected: Tensor) -> float:
    """Largest difference, by the largest value expected."""
    return float((torch.stack(list(found)) - expected).abs().max() / expected.abs().max())


def masked_logits(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], kept: HeadSets) -> Tensor:
    """Logits of each token of the answer, (tokens, vocabulary), where the evicted tokens of the prompt are masked."""
    oracle = Masked(model, torch.tensor([prompt]), kept)
    later = [oracle.read(torch.tensor([answer[:-1]]))[0]] if len(answer) > 1 else []
    return torch.cat([oracle.prompt_logits[0, -1:], *later])
