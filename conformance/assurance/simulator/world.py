"""The world of caches: each operation is applied to a session's cache and to the oracle's rows, and both are compared.

An operation ends in one of three ways: it is done; it is refused, and nothing has changed; it has failed half way, and
the cache refuses to be used. Whatever else is raised is a finding.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conformance.assurance.simulator.disk import Disk, Shelf, told
from conformance.assurance.simulator.operations import LIVES, Operation
from conformance.assurance.simulator.oracle import HEADS, LAYERS, VOCABULARY, MaskedModel, Row, Sets, tiny_model
from conformance.assurance.simulator.states import Met, Violation, must
from conformance.assurance.simulator.trips import Tripped, knobs, tripping
from conformance.tolerances import MASKED_LOGITS
from models_integration import (
    CrystalCache,
    CustomPolicy,
    Decision,
    FullCache,
    Published,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
    compact,
    load_cache,
    save_cache,
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

__all__ = ["World"]

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
def _model() -> PreTrainedModel:
    return tiny_model()


@cache
def _policy(name: str) -> RetentionPolicy:
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


class World:
    """All lives of one script, its archive and its disk; `met` counts states. To be used as a context."""

    def __init__(self, folder: Path, met: Met) -> None:
        self.model, self.met = _model(), met
        self._oracle = MaskedModel(self.model)
        self._identity = identify(self.model)
        self._lives: list[Life | None] = [None] * LIVES
        self._undo = ExitStack()
        self._folder, self.shelf = folder, Shelf(folder / "archive", self.model, self._identity, met)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        self.shelf.close()
        self._undo.close()

    def apply(self, operation: Operation) -> None:
        """Do it, and judge what it left.

        Raises:
            Violation, or anything that the code under test raises and should not.
        """
        owner: Any = self.shelf if hasattr(Shelf, operation.kind) else self
        getattr(owner, operation.kind)(**operation.values)

    def knobs(self, room: int | None, **sizes: int) -> None:
        """Sizes for the rest of the script."""
        self._undo.enter_context(knobs(sizes))
        self.shelf.limit(room)

    # What the model reads.

    def begin(
        self, life: int, policy: str, n: int, seed: int, padding: Sequence[int], cuts: Sequence[int],
        trip: tuple[str, int] | None,
    ) -> None:
        """A prompt in a new cache, padded on the left, in one forward or in several."""
        made = Life(RetainedCache(self.model.config), policy, [Row()] * len(padding))
        made.sets, made.open = made.stored(), any(padding)
        self._lives[life] = made
        self._segment(life, policy, ids_of(n, seed, len(padding)), padding, cuts, trip)

    def turn(
        self, life: int, n: int, seed: int, padding: Sequence[int], cuts: Sequence[int], other: str | None,
        trip: tuple[str, int] | None,
    ) -> None:
        """A later segment, under the policy of before or another."""
        if (made := self._living(life)) is not None:
            rows = len(made.rows)
            shown = (list(padding) * rows)[:rows]
            self._segment(life, other or made.policy, ids_of(n, seed, rows), shown, cuts, trip)

    def _segment(
        self, life: int, policy: str, ids: Tensor, padding: Sequence[int], cuts: Sequence[int],
        trip: tuple[str, int] | None,
    ) -> None:
        made, n = self._lives[life], ids.shape[1]
        assert made is not None
        is_token = torch.arange(n) >= torch.tensor(padding)[:, None]
        first, ends = made.columns, [*cuts, n]
        run: Session | None = None

        def act() -> None:
            nonlocal run
            with self._session(made, policy, trip) as run, run.prompt() if cuts else nullcontext():
                for start, stop in zip([0, *cuts], ends, strict=True):
                    self._read(made, ids[:, start:stop], mask=self._masked(made, is_token[:, start:stop]))

        if self._attempt(life, act) == "done":
            assert run is not None
            self._judge_segment(made, run, policy)
            self.met(f"a {'turn' if first else 'prompt'} in {'pieces' if cuts else 'one forward'}")
            if any(padding):
                self.met(f"a padded {'turn' if first else 'prompt'}")

    def _masked(self, life: Life, is_token: Tensor) -> Tensor | None:
        """The 2D mask of a forward, where one is needed."""
        if bool(is_token.all()) and life.columns == len(life.rows[0].tokens):
            return None
        before = life.cache.is_token.expand(len(is_token), -1) if life.columns else is_token[:, :0]
        return torch.cat([before, is_token], dim=1).long()

    def steps(
        self, life: int, n: int, seed: int, other: str | None, trip: tuple[str, int] | None,
    ) -> None:
        """One token at a time."""
        if (made := self._living(life)) is None:
            return
        ids = ids_of(n, seed, len(made.rows))

        def act() -> None:
            with self._session(made, other or made.policy, trip):
                for token in torch.split(ids, 1, dim=1):
                    before = made.sets
                    self._read(made, token)
                    gone = any(len(a) <= len(b) for a, b in zip(_flat(made.sets), _flat(before), strict=True))
                    self.met(f"a step that {'evicts' if gone else 'lets the cache grow'}")

        self._attempt(life, act)

    def reading(self, life: int, n: int, seed: int, trip: tuple[str, int] | None) -> None:
        """Tokens that are only read."""
        if (made := self._living(life)) is None:
            return

        def act() -> None:
            with self._session(made, made.policy, trip) as run, run.reading():
                self._read(made, ids_of(n, seed, len(made.rows)), evicts=False)

        if self._attempt(life, act) == "done":
            self.met("tokens are read, and nothing is decided")

    def outside(self, life: int, n: int, seed: int) -> None:
        """Tokens that the model reads outside any context."""
        if (made := self._living(life)) is None:
            return

        def act() -> None:
            with self._watching(made) as reads:
                self._read(made, ids_of(n, seed, len(made.rows)), evicts=False, reads=reads)

        if self._attempt(life, act) == "done":
            self.met("tokens are read outside the context")

    def wrong(self, life: int, how: str, n: int, seed: int, reading: bool) -> None:
        """A forward that must be refused."""
        if (made := self._living(life)) is None:
            return
        ids, rows, seen = ids_of(n, seed, len(made.rows)), len(made.rows), made.columns
        positions = torch.tensor([[len(row.tokens)] for row in made.rows]) + torch.arange(n)
        hole = torch.ones(rows, seen + n, dtype=torch.int64)
        hole[:, int(made.sets[0][0][0][-1]) + seen - len(made.rows[0].tokens)] = 0
        wrong: dict[str, dict[str, Any]] = {
            "width": {"attention_mask": torch.ones(rows, seen + n + (1 if seed % 2 else -1), dtype=torch.int64)},
            "positions": {"position_ids": positions + (1 if seed % 2 else -1)},
            "hole": {"attention_mask": hole},
            "ids": {"input_ids": ids + VOCABULARY},
            "rows": {"input_ids": ids.repeat(rows + 1, 1)},
            "use_cache": {"use_cache": False},
            "embeds": {"input_ids": None, "inputs_embeds": torch.zeros(rows, n, 32)},
        }

        def act() -> None:
            with self._session(made, made.policy, None) as run, run.reading() if reading else nullcontext():
                self.model(**{"input_ids": ids, "past_key_values": made.cache, **wrong[how]})

        ended = self._attempt(life, act)
        must(ended != "done", f"a forward with a wrong {how} was taken")
        self.met(f"a wrong {how} is refused")

    # What is done with a cache between two forwards.

    def rows(self, life: int, how: str, order: Sequence[int]) -> None:
        """Rows change places, are repeated, or are chosen."""
        if (made := self._living(life)) is None:
            return
        count = len(made.rows)
        if how == "repeat":
            repeats = 2 if count < 3 else 1
            chosen = [row for row in range(count) for _ in range(repeats)]
            self._attempt(life, lambda: made.cache.batch_repeat_interleave(repeats))
        else:
            most = count if how == "reorder" else 1 + order[0] % count
            chosen = [row % count for row in (list(order) * count)[:most]]
            act = made.cache.reorder_cache if how == "reorder" else made.cache.batch_select_indices
            self._attempt(life, lambda: act(torch.tensor(chosen)))
        made.rows, made.sets = [made.rows[row] for row in chosen], [made.sets[row] for row in chosen]
        self._judge(life)
        self.met("rows differ" if len(set(map(str, made.sets))) > 1 else "rows agree")

    def crop(self, life: int, n: int) -> None:
        """The last tokens are taken back."""
        if (made := self._living(life)) is None or n >= min(len(row.tokens) for row in made.rows):
            return
        known = not isinstance(made.cache.continuation, Nothing)
        if self._attempt(life, lambda: made.cache.crop(-n)) != "done":
            return
        made.rows, made.columns = [row.cropped(n) for row in made.rows], made.columns - n
        ends = [len(row.tokens) for row in made.rows]
        made.sets = [
            [[[at for at in own if at < end] for own in heads] for heads in sets]
            for sets, end in zip(made.sets, ends, strict=True)
        ]
        if min(len(own) for own in _flat(made.sets)) == 0:
            self._lives[life] = None  # nothing is left to attend to
            return
        self._judge(life)
        if n and known:
            kept = not isinstance(made.cache.continuation, Nothing)
            self.met(f"a crop behind which the states are {'kept' if kept else 'forgotten'}")

    def save(self, life: int, fault: Sequence[Any] | None) -> None:
        """Written to a file, and read again; the life goes on from there."""
        if (made := self._living(life)) is None:
            return
        path, disk = self._folder / "cache", Disk(fault)

        def act() -> None:
            with disk.failing():
                save_cache(made.cache, self.model, path, self._identity)
            made.cache = load_cache(path, self.model, self._identity)

        try:
            if self._attempt(life, act) == "done":
                self.met("a cache is saved and loaded")
        except OSError as error:
            must(fault is not None, f"save_cache: {told(error)}")
            self.met("a cache is not saved: the disk fails")
        self._judge(life)

    def fork(self, life: int, to: int, deep: bool) -> None:
        """A copy goes on beside what it was copied from."""
        if (made := self._living(life)) is None or to == life:
            return
        other: list[RetainedCache] = []

        def act() -> None:
            whole = self._retentions(made, "head" if made.cache.layers_differ else "model", lambda own: own)
            copied = copy.deepcopy(made.cache) if deep else compact(made.cache, Decision(whole))
            other.append(copied)

        if self._attempt(life, act) == "done":
            self._lives[to] = replace(made, cache=other[0])
            self._judge(to)
            self._judge(life)
            self.met(f"a cache goes on beside its {'copy' if deep else 'compaction'}")

    def keep(
        self, life: int, granularity: str, share: float, unstored: bool, seed: int, trip: tuple[str, int] | None,
    ) -> None:
        """A compaction by hand; with a token that is not stored, it is refused."""
        if (made := self._living(life)) is None:
            return
        if made.cache.layers_differ:
            granularity = "head"
        rng = Random(seed)

        def some(own: list[int]) -> list[int]:
            return sorted(rng.sample(own, max(1, int(share * len(own)))))

        retentions = self._retentions(made, granularity, some)
        sets = [_spread(retention) for retention in retentions]
        missing = sorted({*range(len(made.rows[-1].tokens))} - {*made.sets[-1][-1][-1]})
        if unstored and missing:
            sets[-1][-1][-1] = sorted({*sets[-1][-1][-1], rng.choice(missing)})
            retentions = self._of_sets(made, sets, "head" if granularity == "head" else granularity)

        def act() -> None:
            with tripping(self.model, trip):
                made.cache.compact(retentions)
            made.cache.continuation = Nothing()

        ended = self._attempt(life, act)
        must(ended != "done" or not (unstored and missing), "a token that is not stored was kept")
        must(ended != "refused" or bool(unstored and missing), "a compaction to stored tokens is refused")
        if ended == "done":
            made.sets = sets
            self._judge(life)
        self.met(f"a compaction by hand is {ended}")

    def splice(self, life: int, chunks: Sequence[Sequence[int]]) -> None:
        """Chunks of the archive, behind what a session has read."""
        made = self._living(life)
        keys = [self.shelf.stored(*chunk) for chunk in chunks]
        if made is None or None in keys:
            return
        tokens = [self.shelf.text(chunk[1]) for chunk in chunks]
        if self._attempt(life, lambda: self.shelf.inject(chunks[0][0], made.cache, keys)) != "done":
            return
        for own in tokens:
            start = len(made.rows[0].tokens)
            made.rows, made.columns = [made.rows[0].splice(own)], made.columns + len(own)
            added = [*range(start, start + len(own))]
            made.sets = [[[[*held, *added] for held in heads] for heads in made.sets[0]]]
        known = not isinstance(made.cache.continuation, Nothing)
        self.met(f"a chunk behind which the states {'go on' if known else 'are forgotten'}")
        self._judge(life)

    # How it is done and judged.

    def _living(self, life: int) -> Life | None:
        """A life that may still grow."""
        made = self._lives[life]
        return made if made is not None and max(len(row.tokens) for row in made.rows) < MOST else None

    @contextmanager
    def _session(self, life: Life, policy: str, trip: tuple[str, int] | None) -> Iterator[Session]:
        with _policy(policy)(self.model) as run, self._watching(life) as reads, tripping(self.model, trip):
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
        for a, b in zip(_flat(now), _flat(before), strict=True):
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
            method = _policy(policy).on(self.model)
            self.met("more is protected than the budget has" if run.over_budget else "the budget holds")
            over = run.over_budget
            for retention, sets, row in zip(kept, life.sets, life.rows, strict=True):
                assert retention is not None
                own = retention.retention if isinstance(retention, CrystalRetention) else retention
                must(_spread(own) == sets, "the session says that it kept other tokens than are stored")
                B = max(method.policy.floor, method.budget.tokens(len(row.tokens)))
                over -= max(0, len(own.positions) - B * own.groups)
            must(over >= 0, "more is stored than the budget, and the session does not say so")
        evicted = any(len(own) < len(life.rows[0].tokens) for own in _flat(life.sets))
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


def _flat(rows: Sequence[Sets]) -> list[list[int]]:
    return [own for sets in rows for heads in sets for own in heads]


def _spread(retention: Retention) -> Sets:
    """Its groups for each layer and head."""
    groups = [retention.group(at).tolist() for at in range(retention.groups)]
    if retention.granularity is not Granularity.HEAD:
        groups = [group for group in groups for _ in range(HEADS * LAYERS // len(groups))]
    return [groups[at : at + HEADS] for at in range(0, HEADS * LAYERS, HEADS)]
