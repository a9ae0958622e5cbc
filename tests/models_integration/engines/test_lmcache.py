"""Requests of LMCache after an eviction answer as an oracle with renumbered positions.

`nox -s lab -- lmcache` runs each test also with LMCache's own request. Without LMCache, the tests use a request
with the same steps. The engine is a model of transformers. Like vLLM, the engine uses the longest stored prefix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from models_integration import StreamingLLM, decide, observe, policy_from_name
from models_integration.engines.lmcache import evict
from spec.errors import SpecError
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import SMALL, prepared, prompt, relative
from tests.models_integration.session.position_oracle import Oracle

pytestmark = pytest.mark.law("eviction-equals-masking")

CHUNK, STORED, BUDGET = 16, 64, 32
TEXT, MORE = prompt(STORED + 5)[0].tolist(), prompt(6, seed=3)[0].tolist()


class Kind(Enum):
    """LMCache's kinds of stored tensors."""

    KV = "kv"


class Token(NamedTuple):
    token_id: int
    text: str = ""


class Store:
    """Context of a request: whole chunks of keys and values in memory, by ids and salt."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.chunk_size = kind, CHUNK
        self.entries: dict[tuple[tuple[int, ...], str], Tensor] = {}

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> Tensor | None:
        n = len(tokens) // CHUNK * CHUNK
        while n and (tuple(tokens[:n]), cache_salt) not in self.entries:
            n -= CHUNK
        return self.entries[tuple(tokens[:n]), cache_salt].clone() if n else None

    def store(self, kv: Tensor, tokens: Sequence[int], cache_salt: str = "") -> bool:
        assert len(tokens) == kv.shape[2]
        n = len(tokens) // CHUNK * CHUNK
        return self.entries.setdefault((tuple(tokens[:n]), cache_salt), kv[:, :, :n].clone()) is not None


class Request:
    """A request with the steps of `LMCacheRequestStream`."""

    def __init__(self, contexts: Sequence[Store], engine: Callable[..., Any], ids: list[int], cache_salt: str) -> None:
        self._contexts, self.engine, self.tokens = {one.kind: one for one in contexts}, engine, list(ids)
        self.cache_salt, self._suffix_tokens = cache_salt, list[int]()

    def generate(self, sampling: Mapping[str, Any], suffix_tokens: Sequence[int] = ()) -> None:
        self.tokens += [*self._suffix_tokens, *suffix_tokens]
        self._suffix_tokens = []
        self.tokens += [event.token_id for event in self.engine(self.tokens, sampling, self.cache_salt)]

    def modify_kv(self, fn: Callable[..., Any], timeout: float = 30.0) -> None:
        (store,) = self._contexts.values()
        stored = store.retrieve(self.tokens, self.cache_salt)
        assert stored is not None
        n = stored.shape[2]
        self._suffix_tokens = self.tokens[n:] + self._suffix_tokens
        edited, tokens = fn({store.kind: stored}, self.tokens[:n])
        store.store(edited, tokens, self.cache_salt)
        self.tokens = tokens


class Setting(NamedTuple):
    """A model, an engine that serves the model, and a request that has read the text."""

    model: PreTrainedModel
    store: Store
    logits: list[Tensor]
    engine: Callable[..., Iterator[Any]]
    request: Any


def tensors_of(cache: DynamicCache) -> Tensor:
    layers: list[Any] = list(cache.layers)
    return torch.stack([
        torch.stack([tensor[0].transpose(0, 1).flatten(1) for tensor in side])
        for side in ([one.keys for one in layers], [one.values for one in layers])
    ])


def setting(which: str, **fields: Any) -> Setting:
    model, logits = prepared("Llama", **{**SMALL, **fields}), list[Tensor]()
    kind: Any = Kind.KV
    make: Any = Request
    event: Any = Token
    if which == "lmcache":
        from lmcache.sdk.cache_kind import LMCacheSDKCacheKind  # type: ignore[import-not-found]
        from lmcache.sdk.request import TokenEvent, create_request  # type: ignore[import-not-found]

        kind, make, event = LMCacheSDKCacheKind.KV, create_request, TokenEvent
    store = Store(kind)

    def engine(ids: list[int], _: Mapping[str, Any], salt: str) -> Iterator[Any]:
        prefix, cache, n = store.retrieve(ids[:-1], salt), DynamicCache(), 0
        if prefix is not None:
            n = prefix.shape[2]
            for index, (keys, values) in enumerate(zip(*prefix, strict=True)):
                heads = (part.unflatten(1, (SMALL["num_key_value_heads"], -1)).transpose(0, 1)[None]
                         for part in (keys, values))
                cache.update(*heads, index)
        with torch.no_grad():
            new = model(torch.tensor([ids[n:]]), past_key_values=cache, position_ids=torch.arange(n, len(ids))[None])
        store.store(tensors_of(cache), ids, salt)
        logits.append(new.logits[0])
        yield event(int(new.logits[0, -1].argmax()))

    request = make([store], engine, TEXT, cache_salt="")
    request.generate({"max_tokens": 1})
    return Setting(model, store, logits, engine, request)


@pytest.fixture(params=["stand-in", pytest.param("lmcache", marks=pytest.mark.skipif(
    find_spec("lmcache") is None, reason="LMCache is not installed: nox -s lab -- lmcache runs this"))])
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def decided(model: PreTrainedModel, policy: str) -> Retention:
    method = StreamingLLM(BUDGET) if policy == "streamingllm" else policy_from_name(policy, BUDGET, W=4)
    retention: Retention = decide(method.on(model), observe(model, torch.tensor([TEXT[:STORED]]))).retentions[0]
    return retention


def sets_of(retention: Retention, layers: int, heads: int) -> dict[int, list[Tensor]]:
    groups = [torch.from_numpy(retention.group(at)) for at in range(retention.groups)] * (
        1 if retention.granularity is Granularity.HEAD else layers * heads)
    return {layer: groups[layer * heads : (layer + 1) * heads] for layer in range(layers)}


@pytest.mark.spec("POS-RENUMBERED", "POS-TURN")
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv"])
def test_the_next_answer_is_that_of_the_renumbered_oracle(policy: str, which: str) -> None:
    """The tokens after the last whole chunk, and a new turn, follow the kept tokens."""
    model, _, logits, _, request = setting(which)
    retention, ids = decided(model, policy), list(request.tokens)
    evict(request, retention, model)
    assert request.tokens == [ids[at] for at in retention.group(0)]
    request.generate({"max_tokens": 1}, suffix_tokens=MORE)
    following, each = ids[STORED:] + MORE, {}
    for rule in ("renumbered", "kept"):
        each[rule] = oracle = Oracle(model, rule)
        oracle.read(ids[:STORED])
        oracle.evict(sets_of(retention, SMALL["num_hidden_layers"], SMALL["num_key_value_heads"]))
    assert len(logits[-1]) == len(following)
    wanted = each["renumbered"].read(following)
    assert relative(logits[-1], wanted) <= 1e-5
    assert relative(each["kept"].read(following), wanted) > 1e-2


def test_edited_keys_are_found_by_this_request_alone(which: str) -> None:
    """An ordinary text of the kept ids, with the salt of the request before, is computed and not found."""
    model, store, logits, engine, request = setting(which)
    salts = {request.cache_salt}
    for _ in range(2):
        evict(other := setting(which).request, decided(model, "streamingllm"), model)
        salts.add(other.cache_salt)
    evict(request, decided(model, "streamingllm"), model)
    ids, salts = request.tokens + MORE, salts | {request.cache_salt}
    assert len(salts) == 4
    list(engine(ids, {}, ""))
    assert len(logits[-1]) == len(ids)
    with torch.no_grad():
        assert relative(logits[-1], model(torch.tensor([ids])).logits[0]) <= 1e-5
    assert store.retrieve(TEXT, "") is not None


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("kept", "seen", "reason"), [
    ([[*range(20)]], STORED, "type budget=16 or budget=32"), ([[*range(3)]], STORED, "type budget=16"),
    ([[*range(32)]], STORED + 5, "decide about the first 64 tokens"),
    ([[*range(16)], [*range(32)]], STORED, "equally many tokens"),
    ([[*range(16)]] * 3, STORED, "must have a group for each of 2 layers"),
])
def test_what_lmcache_cannot_store_is_refused(kept: list[list[int]], seen: int, reason: str, which: str) -> None:
    model, store, _, _, request = setting(which)
    before = request.tokens[:], request.cache_salt, request._suffix_tokens, len(store.entries)
    offsets = np.cumsum([0, *map(len, kept)])
    granularity = Granularity.MODEL if len(kept) == 1 else Granularity.LAYER
    with pytest.raises(SpecError, match=reason):
        evict(request, Retention(np.concatenate(kept), offsets, seen, granularity), model)
    assert (request.tokens, request.cache_salt, request._suffix_tokens, len(store.entries)) == before


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_whose_keys_cannot_be_turned_is_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, _, _, _, request = setting("stand-in", rope_parameters=dynamic)
    with pytest.raises(SpecError, match="dynamic"):
        evict(request, Retention.shared(np.arange(32), STORED), model)
    with pytest.raises(SpecError, match="stored keys of shape"):
        evict(request, Retention.shared(np.arange(32), STORED), prepared("Llama", **{**SMALL, "num_hidden_layers": 1}))
    assert len(request.tokens) == len(TEXT) + 1
