"""Lives of caches beside the oracle's rows: how an operation is done, and what is judged once it has ended."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conformance.assurance.simulator.disk import Shelf
from conformance.assurance.simulator.operations import LIVES
from conformance.assurance.simulator.oracle import HEADS, LAYERS, VOCABULARY, MaskedModel, Row, Sets, tiny_model
from conformance.assurance.simulator.states import Met, Violation, must
from conformance.assurance.simulator.trips import Tripped, tripping
from conformance.tolerances import MASKED_LOGITS
from models_integration import (
    CrystalCache,
    CustomPolicy,
    FullCache,
    Published,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
)
from models_integration.cache.continuation import Nothing
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import EMPTY
from models_integration.cache.ragged_layer import RaggedLayer, rectangle
from models_integration.model.identity import identify
from models_integration.session.verbs import read
from reference.policies import adakv, chunkkv, h2o, lagkv, nestedkv, pyramidkv, rkv, snapkv, tova
from spec.errors import SpecError
from spec.parameters import TINY
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

__all__ = ["MOST", "Judge", "Life", "flat", "ids_of", "spread"]

MOST = 150
"""Tokens of a row: the oracle's forward is over all of them."""
ENDS = frozenset(range(3, VOCABULARY, 7))
BREATHING = replace(TINY, T_breath=4)
MAKE: Mapping[str, Callable[[], RetentionPolicy]] = {
    "breathing": lambda: CrystalCache(20, ENDS, BREATHING, "numpy", decode=True),
    "crystalcache": lambda: CrystalCache(0.5, ENDS, TINY, "numpy"),
    "stream": lambda: CrystalCache(20, ENDS, BREATHING, "numpy", decode=True, stream=True),
    "streamingllm": lambda: StreamingLLM(0.4, N_sink=2),
    "fullcache": FullCache,
    "snapkv": lambda: CustomPolicy(snapkv(W=4), 12),
    "adakv": lambda: CustomPolicy(adakv(W=4), 0.4),
    "nestedkv": lambda: CustomPolicy(nestedkv(), 0.4),
    "h2o": lambda: CustomPolicy(h2o(), 12),
    "tova": lambda: CustomPolicy(tova(), 12),
    "rkv": lambda: CustomPolicy(rkv(W=4, every=3), 12),
    "lagkv": lambda: CustomPolicy(lagkv(lag=4), 0.5),
    "criticalkv": lambda: Published("criticalkv", 0.5, W=4),
    "pyramidkv": lambda: CustomPolicy(pyramidkv(W=4), 12),
    "chunkkv": lambda: CustomPolicy(chunkkv(c=5, W=4), 0.4),
}
GRANULARITY = {"model": Granularity.MODEL, "layer": Granularity.LAYER, "head": Granularity.HEAD}


@cache
def the_model() -> PreTrainedModel:
    return tiny_model()


@cache
def policy_of(name: str) -> RetentionPolicy:
    return MAKE[name]()


def ids_of(n: int, seed: int, rows: int = 1) -> Tensor:
    """Random ids, (rows, n); some repeat, as words do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, n), generator=generator)


@dataclass
class Life:
    """A cache, the policy that it began under, and what the oracle knows of its rows."""

    cache: RetainedCache
    policy: str
    rows: list[Row]
    sets: list[Sets] = field(default_factory=list)
    """What each row stores, as far as was seen last."""
    columns: int = 0
    open: bool = False
    """Inside a first prompt with padding, which no cache knows of before it is over: all of it is stored."""

    def stored(self) -> list[Sets]:
        """What the cache says that it stores of each row."""
        if not self.open:
            return sets_of(self.cache, len(self.rows))
        return [[[[*range(len(row.tokens))]] * HEADS] * LAYERS for row in self.rows]


def sets_of(cache: RetainedCache, rows: int) -> list[Sets]:
    """What the cache says that it stores."""
    if not all(layer.is_initialized for layer in cache.full_layers):
        return [[[[]] * HEADS] * LAYERS for _ in range(rows)]
    return [
        [[_positions(layer, row, head) for head in range(layer.heads)] for layer in cache.full_layers]
        for row in range(rows)
    ]


def _positions(layer: RetainedLayer, row: int, head: int) -> list[int]:
    """What a head stores; of a layer that expects the columns of a padded turn, what it stores before they are read."""
    kept = layer.rows.kept
    if isinstance(layer, DenseLayer) and kept.shape[1] > layer.stored_length:
        return [at for at in kept[min(row, len(kept) - 1), : layer.stored_length].tolist() if at != EMPTY]
    found: list[int] = layer.head_positions(row, head).tolist()
    return found


class Judge:
    """The lives of one script; `met` counts states."""

    def __init__(self, folder: Path, met: Met) -> None:
        self.model, self.met = the_model(), met
        self._oracle = MaskedModel(self.model)
        self._identity = identify(self.model)
        self._lives: list[Life | None] = [None] * LIVES
        self._undo = ExitStack()
        self._folder, self.shelf = folder, Shelf(folder / "archive", self.model, self._identity, met)


    def _living(self, life: int) -> Life | None:
        """A life that may still grow."""
        made = self._lives[life]
        return made if made is not None and max(len(row.tokens) for row in made.rows) < MOST else None

    @contextmanager
    def _session(self, life: Life, policy: str, trip: tuple[str, int] | None) -> Iterator[Session]:
        with policy_of(policy)(self.model) as run, self._watching(life) as reads, tripping(self.model, trip):
            self._reads = reads
            yield run

    @contextmanager
    def _watching(self, life: Life) -> Iterator[list[list[Row]]]:
        """What the rows are once a forward is over, noted as the model's decoder is about to read it."""
        reads: list[list[Row]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
            before = life.stored()
            self._shrunk(life, before)
            is_token = torch.ones_like(ids)
            if mask is not None and mask.ndim == 2:
                is_token = mask[:, mask.shape[1] - ids.shape[1] :]
            rows = reads[-1] if reads else life.rows
            reads.append([
                row.read(own[shown == 1].tolist(), stored)
                for row, own, shown, stored in zip(rows, ids, is_token, before, strict=True)
            ])

        hook = self.model.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield reads
        finally:
            hook.remove()

    def _shrunk(self, life: Life, now: list[Sets]) -> None:
        """Nothing that was evicted has come back."""
        for row, (before, after) in enumerate(zip(life.sets, now, strict=True)):
            n = len(life.rows[row].tokens)
            for a, b in zip((own for heads in before for own in heads), (o for h in after for o in h), strict=True):
                new = {at for at in b if at >= n}
                must({*b} <= {*a} | new, f"row {row} stores tokens that were evicted: {sorted({*b} - {*a} - new)}")

    def _read(
        self, life: Life, ids: Tensor, evicts: bool = True, reads: list[list[Row]] | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """One forward, whose logits are those of the masked model."""
        reads = self._reads if reads is None else reads
        reads.clear()
        with torch.no_grad():
            logits = self.model(input_ids=ids, past_key_values=life.cache, attention_mask=mask).logits
        rows = reads[-1]
        new = [len(row.tokens) - len(old.tokens) for row, old in zip(rows, life.rows, strict=True)]
        self._compare(rows, [own[len(own) - n :] for own, n in zip(logits, new, strict=True)], "logits")
        grown = [
            [[[*own, *range(len(row.tokens) - n, len(row.tokens))] for own in heads] for heads in sets]
            for row, n, sets in zip(rows, new, life.sets, strict=True)
        ]
        life.rows, life.columns = rows, life.columns + ids.shape[1]
        if life.cache.failure is None:
            life.sets = life.stored()
            must(evicts or life.sets == grown, "tokens went, although nothing was to be decided")
            self._within(life.sets, grown)

    def _within(self, now: list[Sets], before: list[Sets]) -> None:
        for a, b in zip(flat(now), flat(before), strict=True):
            must({*a} <= {*b}, f"stored, and neither read nor stored before: {sorted({*a} - {*b})}")
            must(all(x < y for x, y in pairwise(a)), f"positions do not rise: {a}")

    def _compare(self, rows: Sequence[Row], found: Sequence[Tensor], what: str) -> None:
        for at, (row, own) in enumerate(zip(rows, found, strict=True)):
            if len(own):
                wanted = self._oracle.logits(row)[-len(own) :]
                apart = float((own - wanted).abs().max() / wanted.abs().max())
                must(apart <= MASKED_LOGITS, f"{what} of row {at} are {apart:.1e} from those of the masked model")

    def _attempt(self, life: int, act: Callable[[], None]) -> str:
        """How it ended: done, refused or tripped; then the cache is as it was, or refuses to be used."""
        made, ended = self._lives[life], "done"
        assert made is not None
        try:
            act()
        except SpecError as error:
            ended = "refused"
            self.met.refusal(error)
        except Tripped:
            ended = "tripped"
        if made.cache.failure is not None:
            self.met(f"a cache that cannot be used any more: {made.cache.failure}")
            self._check_unusable(made)
            self._lives[life] = None
            must(ended != "done", "it was done, and the cache cannot be used")
            return ended
        if ended != "done":
            if not made.columns:
                self._lives[life] = None
                return ended
            must(made.stored() == made.sets, f"it was {ended}, and other tokens are stored")
            self._judge(life)
            self.met(f"{ended}, and nothing has changed")
        return ended

    def _check_unusable(self, life: Life) -> None:
        try:
            self.model(input_ids=ids_of(2, 0, len(life.rows)), past_key_values=life.cache)
        except SpecError:
            return
        raise Violation("a cache that has failed was read")

    def _judge_segment(self, life: Life, run: Session, policy: str) -> None:
        """A segment is over: what it says that it kept is what is stored, and within the budget."""
        life.open, before = False, life.sets
        life.sets = life.stored()
        self._within(life.sets, before)
        kept = run.retention if isinstance(run.retention, tuple) else (run.retention,)
        if policy != "stream" and kept[0] is not None:
            method = policy_of(policy).on(self.model)
            self.met("more is protected than the budget has" if run.over_budget else "the budget holds")
            over = run.over_budget
            for retention, sets, row in zip(kept, life.sets, life.rows, strict=True):
                assert retention is not None
                own = retention.retention if isinstance(retention, CrystalRetention) else retention
                must(spread(own) == sets, "the session says that it kept other tokens than are stored")
                B = max(method.policy.floor, method.budget.tokens(len(row.tokens)))
                over -= max(0, len(own.positions) - B * own.groups)
            must(over >= 0, "more is stored than the budget, and the session does not say so")
        evicted = any(len(own) < len(life.rows[0].tokens) for own in flat(life.sets))
        self.met("a segment that evicts" if evicted else "a segment that evicts nothing")
        for layer in life.cache.full_layers:
            if isinstance(layer, RaggedLayer):
                self.met("heads of one length" if rectangle(layer) is not None else "heads of different lengths")
            elif life.cache.layers_differ:
                self.met("layers that differ, whose heads agree")
            else:
                self.met("one set for the whole model")
        index = self._lives.index(life)
        self._judge(index)

    def _judge(self, life: int) -> None:
        """Two tokens behind a copy of the cache: it says what the masked model says, and stores what it should."""
        made = self._lives[life]
        if made is None:
            return
        must(made.cache.get_seq_length() == made.columns, f"{made.cache.get_seq_length()} columns, not {made.columns}")
        must(made.stored() == made.sets, "other tokens are stored than should be")
        probe = copy.copy(made.cache)
        probe.layers, probe.continuation = copy.deepcopy(made.cache.layers), Nothing()
        ids = ids_of(2, 7, len(made.rows))
        rows = [row.read(own.tolist(), sets) for row, own, sets in zip(made.rows, ids, made.sets, strict=True)]
        logits = read(self.model, probe, ids, last=2).logits
        assert logits is not None
        self._compare(rows, list(logits), "what is stored: logits behind it")

    def _retentions(
        self, life: Life, granularity: str, some: Callable[[list[int]], list[int]],
    ) -> tuple[Retention, ...]:
        """Kept sets of each row, chosen out of what it stores."""
        chosen = []
        for sets in life.sets:
            if granularity == "model":
                one = some(sets[0][0])
                chosen.append([[one] * HEADS] * LAYERS)
            elif granularity == "layer":
                layers = [some(heads[0]) for heads in sets]
                chosen.append([[own] * HEADS for own in layers])
            else:
                chosen.append([[some(own) for own in heads] for heads in sets])
        return self._of_sets(life, chosen, granularity)

    def _of_sets(self, life: Life, sets: Sequence[Sets], granularity: str) -> tuple[Retention, ...]:
        made = []
        for own, row in zip(sets, life.rows, strict=True):
            groups = {
                "model": [own[-1][-1]], "layer": [heads[-1] for heads in own], "head": [one for h in own for one in h],
            }[granularity]
            offsets = np.cumsum([0, *map(len, groups)])
            positions = np.array([at for group in groups for at in group], dtype=np.int64)
            made.append(Retention(positions, offsets, len(row.tokens), GRANULARITY[granularity]))
        return tuple(made)


def flat(rows: Sequence[Sets]) -> list[list[int]]:
    return [own for sets in rows for heads in sets for own in heads]


def spread(retention: Retention) -> Sets:
    """Its groups for each layer and head."""
    groups = [retention.group(at).tolist() for at in range(retention.groups)]
    if retention.granularity is not Granularity.HEAD:
        groups = [group for group in groups for _ in range(HEADS * LAYERS // len(groups))]
    return [groups[at : at + HEADS] for at in range(0, HEADS * LAYERS, HEADS)]
