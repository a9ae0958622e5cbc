"""Continuous batching under a policy: the answers of masked forwards, in no more pages than are kept."""

import re
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import RequestState

from conformance.measure.paged import greedy, pool
from conformance.own.models_integration.session.families import ENDS, VOCABULARY, build, relative
from conformance.own.models_integration.session.masked import HeadSets, Masked, head_sets
from conformance.paths import ROOT
from models_integration import CrystalCache, FullCache, Published, RetentionPolicy, StreamingLLM, decide, observe
from models_integration.engines import page_pool as pool_module
from models_integration.engines.page_pool import pages_freed
from models_integration.engines.paged import PagedSession, _Engine
from spec.budget import parse_budget
from spec.parameters import TINY

NEW = 8
LAYERS, HEADS = 3, 2
TOLERANCE = 1e-5

POLICIES: dict[str, Callable[[float], RetentionPolicy]] = {
    "crystalcache": lambda budget: CrystalCache(budget, ENDS, TINY, backend="numpy"),
    "streamingllm": lambda budget: StreamingLLM(budget, N_sink=2),
    "snapkv": lambda budget: Published("snapkv", budget, W=4),
    "knorm": lambda budget: Published("knorm", budget),
}


def check_answers(
    model: PreTrainedModel, run: PagedSession, texts: list[list[int]], outputs: dict[str, Any], rows: dict[str, Any],
) -> None:
    """Every request chose, greedily, what the masked forward chooses, from the same logits."""
    assert len(outputs) == len(texts)
    for place, text in enumerate(texts):
        output = outputs[str(place)]
        assert output.error is None, output.error
        answer = output.generated_tokens
        expected = masked_logits(model, text, answer, head_sets(run.kept[str(place)], range(LAYERS), HEADS))
        assert expected.argmax(dim=1).tolist() == answer
        assert relative(torch.stack(rows[str(place)][-len(answer) :]), expected) < TOLERANCE


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize(("family", "name"), [*zip(["llama", "qwen2"] * 2, POLICIES, strict=True)])
def test_requests_answer_as_the_masked_forwards(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, random, evicted = build(family, attention="eager" if name == "knorm" else "sdpa"), Random(7), 0
    for seed in range(2):
        texts = prompts(10, (2, 90), seed)
        config = pool(random.randint(20, 60), page=random.choice([4, 8, 16]), chunk=random.randint(12, 100))
        run = PagedSession(POLICIES[name](random.uniform(0.2, 0.7)), model)
        check_answers(model, run, texts, *answered(model, run, texts, config, monkeypatch, arrivals=random))
        evicted += sum(one.seen * one.groups - len(one.positions) for one in run.kept.values())
    assert evicted > 0


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_kept_is_what_the_policy_keeps_outside(name: str) -> None:
    model, policy, texts = build("qwen2"), POLICIES[name](0.4), prompts(12, (2, 90), seed=3)
    with PagedSession(policy, model) as run:
        serve(model, texts, pool(64, chunk=40), NEW)
    for place, text in enumerate(texts):
        (alone,) = decide(policy.on(model), observe(model, torch.tensor([text]))).retentions
        kept = run.kept[str(place)]
        assert (kept.positions.tolist(), kept.offsets.tolist()) == (alone.positions.tolist(), alone.offsets.tolist())


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", ["crystalcache", "snapkv"])
def test_a_decided_request_holds_the_pages_of_what_it_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page, looked = 8, list[str]()

    def look(processor: Any) -> None:
        for request, blocks in tables(processor).items():
            state = processor.scheduler.active_requests[request]
            if request in run.kept:
                kept = len(run.kept[request].group(0))
                assert len(blocks) <= -(-(kept + len(state.generated_tokens) - 1) // page) + 1
                looked.append(request)

    Between(monkeypatch, look)
    model, texts = build("llama"), prompts(20, (30, 90))
    with PagedSession(POLICIES[name](0.3), model) as run:
        outputs = serve(model, texts, pool(60, page), NEW)
    assert all(output.error is None for output in outputs.values())
    assert set(looked) == {str(place) for place in range(20)}
    # Until transformers 5.17 some prompts hold a page more than they fill, which is freed as well.
    assert run.freed_pages >= sum(pages_freed(one.seen, len(one.group(0)), page) for one in run.kept.values())


@pytest.mark.law("figures-are-counted-right")
def test_the_table_of_freed_pages_is_the_rule() -> None:
    """Each cell of docs/results/paged.md, and that what it calls never freed is freed by no shorter prompt."""
    text = (ROOT / "docs" / "results" / "paged.md").read_text(encoding="utf-8")
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.partition("## When pages are freed")[2].splitlines() if line.startswith("|")
    ]
    sizes = [int(re.findall("[0-9]+", cell)[0]) for cell in head[1:]]
    assert getattr(ContinuousBatchingConfig(), "page_size", 256) in sizes
    for first, *cells in rows:
        tokens, share = re.findall("[0-9.]+", first)
        kept = parse_budget(share).tokens(int(tokens))
        assert [int(cell) for cell in cells] == [pages_freed(int(tokens), kept, page) for page in sizes], first
    assert len(rows) >= 6
    for page in sizes:
        assert not any(pages_freed(tokens, 1, page) for tokens in range(1, page + 1))
        assert all(pages_freed(tokens, tokens // 2, page) >= 1 for tokens in range(page + 1, 5 * page))


@pytest.mark.law("freed-memory")
@pytest.mark.spec("PO-BLOCKS")
def test_whole_pages_are_freed_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page: every b tokens that go free a page, no layer is written to, and the answers are the masked."""
    page, written = 8, list[int]()
    for released in (pool_module.SectorPool, pool_module.BlockPool):
        monkeypatch.setattr(released, "layer", lambda own, index: written.append(index))
    model, texts = build("llama"), prompts(12, (2, 90), seed=5)
    run = PagedSession(StreamingLLM(0.4, N_sink=2, block=page), model)
    check_answers(model, run, texts, *answered(model, run, texts, pool(40, page), monkeypatch))
    evicted = [one.seen - len(one.group(0)) for one in run.kept.values()]
    assert {each % page for each in evicted} == {0}
    assert run.freed_pages >= sum(evicted) // page > len(texts)
    assert not written


@pytest.mark.law("freed-memory")
def test_a_pool_of_eight_full_requests_has_twenty_in_flight() -> None:
    full, new, page = 256, 32, 8
    model, texts = build("llama"), prompts(40, (full, full))
    config = pool(8 * (full + new) // page, page, chunk=full + 64, safety_margin=0.0)
    at_once = {}
    for policy in (FullCache(), StreamingLLM(0.3)):
        with PagedSession(policy, model) as run:
            outputs = serve(model, texts, config, new)
        assert all(output.error is None for output in outputs.values())
        assert run.peak_pages <= 8 * (full + new) // page
        at_once[type(policy)] = run.peak_requests
    assert at_once[StreamingLLM] >= 20
    assert at_once[FullCache] <= 9  # the last of them begins while the others still grow


@pytest.mark.law("eviction-equals-masking")
def test_a_request_that_gives_its_pages_back_goes_on_as_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    again, own = list[int](), RequestState.create_equivalent_initial_request

    def noted(state: Any) -> Any:
        again.append(len(state.generated_tokens))
        return own(state)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", noted)
    model, texts = build("llama"), prompts(10, (30, 60))
    run, config = PagedSession(POLICIES["crystalcache"](0.6), model), pool(24, page=4, chunk=64, safety_margin=0.0)
    outputs, rows = answered(model, run, texts, config, monkeypatch, new=24)
    assert max(again, default=0) > 1  # some had answered before
    assert {len(output.generated_tokens) for output in outputs.values()} == {24}
    check_answers(model, run, texts, outputs, rows)


@pytest.mark.law("the-model-stays-as-it-was")
def test_after_the_block_the_model_batches_as_before() -> None:
    model, texts = build("qwen2"), prompts(4, (20, 40))
    before = serve(model, texts, pool(40), NEW)
    with PagedSession(StreamingLLM(0.3), model):
        inside = serve(model, texts, pool(40), NEW)
    after = serve(model, texts, pool(40), NEW)
    answers = [[one[str(place)].generated_tokens for place in range(4)] for one in (before, inside, after)]
    assert answers[0] == answers[2] != answers[1]
    assert model.config._attn_implementation == "sdpa"
    assert "init_continuous_batching" not in vars(model)


def keep_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool_module, "_groups_of_layer", lambda kept, at, layers: [np.arange(len(kept.group(0)))])


def keep_the_next(patch: pytest.MonkeyPatch) -> None:
    own = pool_module._groups_of_layer
    patch.setattr(
        pool_module, "_groups_of_layer",
        lambda kept, at, layers: [(group + (at == layers - 1)) % kept.seen for group in own(kept, at, layers)],
    )


def take_slots_for_positions(patch: pytest.MonkeyPatch) -> None:
    own = _Engine._compact

    def compact(engine: _Engine, state: Any) -> None:
        own(engine, state)
        vars(state)["_kvspec"].evicted = 0

    patch.setattr(_Engine, "_compact", compact)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("mistake", [keep_the_first, keep_the_next, take_slots_for_positions])
def test_a_mistake_is_seen(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    model, texts = build("llama"), prompts(4, (40, 60))
    run = PagedSession(POLICIES["crystalcache"](0.4), model)
    found = answered(model, run, texts, pool(60), monkeypatch)
    with pytest.raises(AssertionError):
        check_answers(model, run, texts, *found)


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


def answered(
    model: PreTrainedModel, run: PagedSession, texts: Sequence[Sequence[int]], config: ContinuousBatchingConfig,
    monkeypatch: pytest.MonkeyPatch, new: int = NEW, arrivals: Random | None = None,
) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """The outputs of a session, and the logits that each answered token was chosen from, by request."""
    rows: dict[str, list[Tensor]] = {}
    head, processors = model.get_submodule("lm_head"), Between(monkeypatch).processors

    def hook(module: object, args: object, output: Tensor) -> None:
        requests = list(processors[-1].inputs_and_outputs.req_id_to_new_token_position)
        for request, row in zip(requests, output[0].detach().clone(), strict=False):
            rows.setdefault(request, []).append(row)

    with run, head.register_forward_hook(hook):
        return serve(model, texts, config, new, arrivals), rows


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


def masked_logits(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], kept: HeadSets) -> Tensor:
    """Logits of each token of the answer, (tokens, vocabulary), where the evicted tokens of the prompt are masked."""
    oracle = Masked(model, torch.tensor([prompt]), kept)
    later = [oracle.read(torch.tensor([answer[:-1]]))[0]] if len(answer) > 1 else []
    return torch.cat([oracle.prompt_logits[0, -1:], *later])
