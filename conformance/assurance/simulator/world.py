"""The world of caches: each operation is applied to a session's cache and to the oracle's rows, and both are compared.

An operation ends in one of three ways: it is done; it is refused, and nothing has changed; it has failed half way, and
the cache refuses to be used. Whatever else is raised is a finding.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from conformance.assurance.simulator.disk import Disk, Shelf, told
from conformance.assurance.simulator.judge import Judge, Life, flat, ids_of, spread
from conformance.assurance.simulator.operations import Operation
from conformance.assurance.simulator.oracle import VOCABULARY, Row
from conformance.assurance.simulator.states import must
from conformance.assurance.simulator.trips import knobs, tripping
from models_integration import (
    Decision,
    RetainedCache,
    Session,
    compact,
    load_cache,
    save_cache,
)
from models_integration.cache.continuation import Nothing

__all__ = ["World"]


class World(Judge):
    """All lives of one script, its archive and its disk; `met` counts states. To be used as a context."""

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
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
                    gone = any(len(a) <= len(b) for a, b in zip(flat(made.sets), flat(before), strict=True))
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
        if min(len(own) for own in flat(made.sets)) == 0:
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
        sets = [spread(retention) for retention in retentions]
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
