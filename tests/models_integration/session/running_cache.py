"""Caches under policies, together with the masked model's rows, and checks after each operation."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import ceil
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import currently_in_test_context, event
from torch import Tensor, nn
from transformers import PreTrainedModel

from conformance.tolerances import MASKED_LOGITS
from models_integration import (
    CrystalCache,
    CustomPolicy,
    FullCache,
    NamedPolicy,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
)
from models_integration.cache.continuation import CrystalStates
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import EMPTY
from models_integration.cache.ragged_layer import RaggedLayer, dense_view
from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.rotation import Rotary, recognise
from reference.policies import (
    adakv,
    cake,
    chunkkv,
    h2o,
    in_blocks,
    kvcrush,
    kvzip,
    lagkv,
    morphkv,
    nestedkv,
    pyramidkv,
    rkv,
    snapkv,
    tova,
    vase,
    vatp,
)
from spec.errors import SpecError
from spec.parameters import TINY
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import ENDS, TABLES, at_once, build, relative, states_of
from tests.models_integration.session.masked import MaskedModel, Row, Sets
from tests.models_integration.session.sessions import REHEARSED, Trip, Tripped, same_state

MAX_TOKENS = 150
"""Largest number of tokens of a row. The oracle reads all tokens of a row in one forward pass."""
BREATHING = replace(TINY, T_breath=4)
POLICIES: dict[str, RetentionPolicy] = {
    "breathing": CrystalCache(20, ENDS, BREATHING, "numpy", decode=True),
    "crystalcache": CrystalCache(0.5, ENDS, TINY, "numpy"),
    "stream": CrystalCache(20, ENDS, BREATHING, "numpy", decode=True, stream=True),
    "streamingllm": StreamingLLM(0.4, N_sink=2),
    "fullcache": FullCache(),
    "snapkv": CustomPolicy(snapkv(W=4), 12),
    "adakv": CustomPolicy(adakv(W=4), 0.4),
    "nestedkv": CustomPolicy(nestedkv(), 0.4),
    "h2o": CustomPolicy(h2o(), 12),
    "tova": CustomPolicy(tova(), 12),
    "rkv": CustomPolicy(rkv(W=4, every=3), 12),
    "lagkv": CustomPolicy(lagkv(lag=4), 0.5),
    "criticalkv": NamedPolicy("criticalkv", 0.5, W=4),
    "pyramidkv": CustomPolicy(pyramidkv(W=4), 12),
    "chunkkv": CustomPolicy(chunkkv(c=5, W=4), 0.4),
    "cake": CustomPolicy(cake(W=4), 0.4),
    "kvcrush": CustomPolicy(kvcrush(W=4, block=4, share=0.5), 0.4),
    "critical-adakv": NamedPolicy("critical-adakv", 0.5, W=4),
    "blocks": CustomPolicy(in_blocks(adakv(W=4), 4), 0.4),
    "vatp": CustomPolicy(vatp(2), 12),
    "morphkv": CustomPolicy(morphkv(W=4), 12),
    "vase": CustomPolicy(vase(W=3), 12),
    "kvzip": CustomPolicy(kvzip(**REHEARSED), 0.4),
    "kvzip-plus": NamedPolicy("kvzip-plus", 0.4, **REHEARSED),
}
GRANULARITY = {"model": Granularity.MODEL, "layer": Granularity.LAYER, "head": Granularity.HEAD}


@dataclass(frozen=True)
class Subject:
    """Tiny model of a family, and the objects that are computed from the model once."""

    model: PreTrainedModel
    oracle: MaskedModel
    identity: ModelIdentity
    rotary: Rotary | None
    """None if sliding windows would skip a chunk, or if positions are a table."""


@cache
def subject(family: str) -> Subject:
    """Return the subject of a family. If the name of the family contains "eager", attention is computed eagerly.

    The dtype is float64, so that the last bits of q and k decide nothing. Gemma2 uses float32, because the attention of
    Gemma2 computes its softmax in float32.
    """
    name, _, attention = family.partition(" ")
    model = build(name, attention=attention or None, dtype=torch.float32 if name == "gemma2" else torch.float64)
    oracle = MaskedModel(model)
    slides = len(oracle.full) < model.config.num_hidden_layers
    return Subject(model, oracle, identify(model), None if slides or name in TABLES else recognise(model))


def ids_of(n: int, seed: int, rows: int = 1) -> Tensor:
    """Return random ids (rows, n)."""
    return torch.randint(3, 131, (rows, n), generator=torch.Generator().manual_seed(seed))


@dataclass
class RunningCache:
    """Cache, the policy of its first prompt, and the oracle's rows."""

    cache: RetainedCache
    policy: str
    rows: list[Row]
    heads: tuple[int, int]
    """Number of full-attention layers, and number of KV heads."""
    sets: list[Sets] = field(default_factory=list)
    """Positions that each row stored at the last check."""
    columns: int = 0
    open: bool = False
    """True inside a first prompt with padding.

    The cache has no information about padding before the prompt ends, so the whole prompt is stored.
    """
    dead: bool = False
    """True after a refused first prompt or a failed operation. Such a cache is not used again."""
    alone: list[RetainedCache] | None = None
    """Separate cache for each row, which reads no padding and reads a segment in one forward pass.

    None after an operation that a separate cache cannot follow.
    """

    def __repr__(self) -> str:
        return f"<{self.policy}, {[len(row.tokens) for row in self.rows]} tokens>"

    @property
    def tokens(self) -> int:
        """Number of tokens of the longest row."""
        return max(len(row.tokens) for row in self.rows)

    def stored(self) -> list[Sets]:
        """Return the stored positions of each row according to the cache."""
        layers, heads = self.heads
        if self.open:
            return [[[[*range(len(row.tokens))]] * heads] * layers for row in self.rows]
        if not all(layer.is_initialized for layer in self.cache.full_layers):
            return [[[[]] * heads] * layers for _ in self.rows]
        return [
            [[_positions(layer, row, head) for head in range(layer.heads)] for layer in self.cache.full_layers]
            for row in range(len(self.rows))
        ]


def _positions(layer: RetainedLayer, row: int, head: int) -> list[int]:
    """Return the positions that a head stores.

    If a layer expects the columns of a padded turn, return the positions that are stored before these columns are read.
    """
    kept = layer.rows.kept
    if isinstance(layer, DenseLayer) and kept.shape[1] > layer.stored_length:
        return [at for at in kept[min(row, len(kept) - 1), : layer.stored_length].tolist() if at != EMPTY]
    positions: list[int] = layer.head_positions(row, head).tolist()
    return positions


class Judge:
    """Reader of tokens into caches of one family's model, with checks of the results.

    `counts` contains the number of occurrences of each state.
    """

    def __init__(self, family: str, met: Counter[str]) -> None:
        self.subject, self.counts = subject(family), met
        self.model = self.subject.model
        self._reads: list[list[Row]] = []

    def met(self, state: str) -> None:
        """Count a state, also in the statistics of Hypothesis."""
        self.counts[state] += 1
        if currently_in_test_context():
            event(state)

    @contextmanager
    def session(self, life: RunningCache, policy: str, trip: Trip) -> Iterator[Session]:
        with POLICIES[policy](self.model) as run, self.watching(life), trip.raised(self.model):
            yield run

    @contextmanager
    def watching(self, life: RunningCache) -> Iterator[None]:
        """Record the rows of each forward pass inside the block, immediately before the model's decoder reads them."""
        reads: list[list[Row]] = []
        self._reads = reads

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids, mask = kwargs["input_ids"] if "input_ids" in kwargs else args[0], kwargs.get("attention_mask")
            before = life.stored()
            self._check_nothing_returns(life, before)
            is_token = torch.ones_like(ids)
            if mask is not None and mask.ndim == 2:
                is_token = mask[:, mask.shape[1] - ids.shape[1] :]
            rows = reads[-1] if reads else life.rows
            reads.append([
                row.read(row_ids[shown == 1].tolist(), stored)
                for row, row_ids, shown, stored in zip(rows, ids, is_token, before, strict=True)
            ])

        with self.model.base_model.register_forward_pre_hook(note, with_kwargs=True):
            yield

    def _check_nothing_returns(self, life: RunningCache, now: list[Sets]) -> None:
        for row, before, after in zip(life.rows, life.sets, now, strict=True):
            for a, b in zip(flat([before]), flat([after]), strict=True):
                back = {at for at in b if at < len(row.tokens)} - {*a}
                assert not back, f"evicted tokens are stored: {sorted(back)}"

    def read(self, life: RunningCache, ids: Tensor, evicts: bool = True, mask: Tensor | None = None) -> None:
        """Read tokens in one forward pass, and check that the logits equal those of the masked model."""
        self._reads.clear()
        with torch.no_grad():
            logits = self.model(input_ids=ids, past_key_values=life.cache, attention_mask=mask).logits
        is_token = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        new = [values[shown.bool()] for values, shown in zip(logits, is_token, strict=True)]
        self.follow(life, new, ids.shape[1], evicts)

    def follow_alone(
        self, life: RunningCache, ended: str, policy: str | None, pieces: Sequence[Sequence[Tensor]],
        reading: bool = False,
    ) -> None:
        """Read the pieces of each row in a separate cache, and compare tokens and states with those of the batch."""
        if ended != "done":
            life.alone = None
        for index, separate in enumerate(life.alone or ()):
            with (
                nullcontext() if policy is None else POLICIES[policy](self.model) as run,
                run.reading() if run and reading else nullcontext(),
            ):
                for ids in pieces[index]:
                    at_once(self.model, ids[None], separate)
            single = replace(life, cache=separate, rows=[life.rows[index]])
            assert single.stored() == [life.sets[index]], "the separate cache stores different tokens than the batch"
            if isinstance(life.cache.continuation, CrystalStates):
                (state,) = states_of(separate).rows
                same_state(life.cache.continuation.rows[index], state, self.rounding())

    def rounding(self) -> float:
        """Return the largest relative difference of states if different kernels read the same tokens.

        Kernels differ between a single row and a batch.
        """
        if self.model.dtype != torch.float64:
            return 1e-2
        # Eager attention (transformers 5.21 to 5.24) computes the softmax in float32 in every model. The rounding error
        # of 6e-8 enters the keys of later layers, and the logistic of D multiplies the error by its argument.
        return 1e-5 if self.model.config._attn_implementation == "eager" else 1e-7

    def follow(self, life: RunningCache, logits: Sequence[Tensor], columns: int, evicts: bool = True) -> None:
        """Check the logits and the stored tokens after forward passes.

        `logits` are those of the last tokens of each row.
        """
        rows, before = self._reads[-1], life.sets
        new = [len(row.tokens) - len(old.tokens) for row, old in zip(rows, life.rows, strict=True)]
        for row, part, n in zip(rows, logits, new, strict=True):
            if n:
                part = part[len(part) - min(n, len(part)) :]
                apart = relative(part, self.subject.oracle.expect(row).logits[-len(part) :])
                assert apart <= MASKED_LOGITS, f"logits are {apart:.1e} from those of the masked model"
        grown = [
            [[[*part, *range(len(row.tokens) - n, len(row.tokens))] for part in heads] for heads in sets]
            for row, n, sets in zip(rows, new, before, strict=True)
        ]
        life.rows, life.columns = rows, life.columns + columns
        if life.cache.failure is None:
            life.sets = life.stored()
            assert evicts or life.sets == grown, "tokens were evicted, although no eviction was due"
            self.check_within(life.sets, grown)
            one = all(sets == [[sets[0][0]] * life.heads[1]] * life.heads[0] for sets in life.sets)
            assert one or life.cache.layers_differ, "layers or heads differ, but layers_differ is False"

    def check_within(self, now: list[Sets], before: list[Sets]) -> None:
        for a, b in zip(flat(now), flat(before), strict=True):
            assert {*a} <= {*b}, f"stored tokens were neither read nor stored before: {sorted({*a} - {*b})}"
            assert all(x < y for x, y in pairwise(a)), f"positions are not ascending: {a}"

    def attempt(self, life: RunningCache, act: Callable[[], None]) -> str:
        """Run an operation and return its outcome: "done", "refused" or "tripped".

        If the operation is not done, the cache must be unchanged or must refuse to be used.
        """
        ended = "done"
        try:
            act()
        except SpecError:
            ended = "refused"
        except Tripped:
            ended = "tripped"
        if life.cache.failure is not None:
            self.met(f"unusable: {life.cache.failure}")
            life.dead = True
            assert all(layer.keys is None for layer in life.cache.layers), "a failed cache still holds tensors"  # type: ignore[union-attr]
            try:
                self.model(input_ids=ids_of(2, 0, len(life.rows)), past_key_values=life.cache)
            except SpecError:
                assert ended != "done", "the operation is done, but the cache refuses to be used"
                return ended
            raise AssertionError("a failed cache was read")
        if ended != "done":
            life.dead = not life.columns
            if not life.dead:
                assert life.stored() == life.sets, f"it was {ended}, and other tokens are stored"
                self.check_storage(life)
                self.met(f"{ended}, and nothing has changed")
        return ended

    def check_storage(self, life: RunningCache) -> None:
        """Check that each head stores exactly the masked model's keys and values of the head's positions."""
        seen = life.cache.get_seq_length()
        assert seen == life.columns, f"the cache has seen {seen} columns instead of {life.columns}"
        assert life.stored() == life.sets, "the cache stores the wrong tokens"
        longest = max(map(len, flat(life.sets)))
        dense = [layer for layer in life.cache.full_layers if isinstance(layer, DenseLayer) and not life.open]
        assert all(layer.stored_length <= longest for layer in dense), "the cache stores padding"
        for index, (row, sets) in enumerate(zip(life.rows, life.sets, strict=True)):
            expected = self.subject.oracle.expect(row).layers
            for layer, heads, both in zip(life.cache.full_layers, sets, expected, strict=True):
                for head, positions in enumerate(heads):
                    held = layer.held(index if layer.batch > 1 else 0, slice(head, head + 1))
                    for tensor, whole in zip(held, both, strict=True):
                        assert tensor.shape[1] == len(positions), "tensors and positions have different lengths"
                        apart = relative(tensor[0], whole[head, positions]) if positions else 0.0
                        assert apart <= MASKED_LOGITS, f"keys or values differ by {apart:.1e} from the masked model"

    def check_segment(self, life: RunningCache, run: Session, policy: str) -> None:
        """Check at the end of a segment that the session reports the stored tokens and the excess over the budget."""
        life.open, before = False, life.sets
        life.sets = life.stored()
        self.check_within(life.sets, before)
        if policy != "stream" and run.retentions:
            method = POLICIES[policy].on(self.model)
            self.met("more is protected than the budget has" if run.over_budget else "the budget holds")
            over = []
            for actual, sets, row in zip(run.retentions, life.sets, life.rows, strict=True):
                assert spread(actual, *life.heads) == sets, "the reported kept tokens are not the stored tokens"
                over.append(ceil(len(actual.positions) / actual.groups) - method.budget.tokens(len(row.tokens)))
            assert run.over_budget == max(0, *over), "over_budget is not the excess over the budget"
        evicted = any(len(places) < len(life.rows[0].tokens) for places in flat(life.sets))
        self.met("a segment that evicts" if evicted else "a segment that evicts nothing")
        for layer in life.cache.full_layers:
            if isinstance(layer, RaggedLayer):
                self.met("heads of one length" if dense_view(layer) is not None else "heads of different lengths")
            elif life.cache.layers_differ:
                self.met("layers that differ, whose heads agree")
        self.check_storage(life)


def retentions(life: RunningCache, granularity: str, sets: Sequence[Sets]) -> tuple[Retention, ...]:
    """Return a retention for each row, with the given kept sets."""
    result = []
    for places, row in zip(sets, life.rows, strict=True):
        groups = {
            "model": [places[-1][-1]], "layer": [heads[-1] for heads in places],
            "head": [one for heads in places for one in heads],
        }[granularity]
        offsets = np.cumsum([0, *map(len, groups)])
        positions = np.array([at for group in groups for at in group], dtype=np.int64)
        result.append(Retention(positions, offsets, len(row.tokens), GRANULARITY[granularity]))
    return tuple(result)


def flat(rows: Sequence[Sets]) -> list[list[int]]:
    return [kept for sets in rows for heads in sets for kept in heads]


def spread(retention: Retention, layers: int, heads: int) -> Sets:
    """Return the kept positions of each layer and head."""
    groups = [retention.group(at).tolist() for at in range(retention.groups)]
    if retention.granularity is not Granularity.HEAD:
        groups = [group for group in groups for _ in range(heads * layers // len(groups))]
    return [groups[at : at + heads] for at in range(0, heads * layers, heads)]


def mask_of(life: RunningCache, is_token: Tensor) -> Tensor | None:
    """Return the 2D mask of a forward pass, or None if no mask is needed."""
    if bool(is_token.all()) and life.columns == len(life.rows[0].tokens):
        return None
    before = life.cache.is_token.expand(len(is_token), -1) if life.columns else is_token[:, :0]
    return torch.cat([before, is_token], dim=1).long()


def chosen(sets: Sets, granularity: str, share: float, rng: Random) -> Sets:
    """Return a random part of the stored tokens of a row.

    The part is the same for all layers ("model"), the same for all heads of a layer ("layer"), or separate for each
    head.
    """
    def some(kept: list[int]) -> list[int]:
        return sorted(rng.sample(kept, max(1, int(share * len(kept)))))

    if granularity == "model":
        one = some(sets[0][0])
        return [[one for _ in heads] for heads in sets]
    if granularity == "layer":
        return [[one for _ in heads] for heads in sets for one in [some(heads[0])]]
    return [[some(kept) for kept in heads] for heads in sets]
