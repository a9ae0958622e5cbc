"""Sessions compared with the masked model in any order of operations, and mutants (mutants.toml) that fail checks.

An operation has one of three results. It is done. It is refused and changes nothing. It fails, and the cache then
refuses to be used. Any other exception is a bug.
"""

import json
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor
from transformers import PreTrainedModel

from lab.faults import FAULTS, WELL, Fault, Killed
from lab.mutants.edits import Edit, replaced
from models_integration import Decision, RetainedCache, Session, compact, load_cache, prefill, save_cache
from models_integration.archive.splice import compacted, computed, splice
from models_integration.attention.capture import observing
from models_integration.cache.continuation import Continuation
from models_integration.cache.retained_cache import storage_bytes
from models_integration.model.architecture import describe
from models_integration.model.rotation import frequencies_at
from spec.errors import SpecError
from spec.retention import Retention
from tests.models_integration.session import (
    test_capture,
    test_model_untouched,
    test_other_architectures,
    test_ragged,
    test_renumbered,
    test_snapshots,
    test_turns,
)
from tests.models_integration.session.families import (
    FAMILIES,
    METHODS,
    SLIDING,
    VOCABULARY,
    WHOLE,
    at_once,
    build,
    crossed,
    greedy,
    prompt,
    relative,
)
from tests.models_integration.session.masked import Masked
from tests.models_integration.session.running_cache import (
    MAX_TOKENS,
    POLICIES,
    Judge,
    RunningCache,
    chosen,
    flat,
    ids_of,
    mask_of,
    retentions,
)
from tests.models_integration.session.sessions import (
    NEW,
    NOWHERE,
    PLACES,
    PROMPT,
    TOLERANCE,
    Trip,
    live_sets,
    lived,
    method,
    read_prompt,
    same,
    skip_without_attention,
)

pytestmark = pytest.mark.law("eviction-equals-masking")

policies, seeds = st.sampled_from([*POLICIES]), st.integers(0, 99)
others = st.none() | st.none() | st.none() | policies
"""Policy of a later operation. None, which is frequent, means the policy of the cache."""
trips = st.one_of(*[st.just(NOWHERE)] * 5, st.builds(Trip, st.sampled_from([*PLACES]), st.integers(0, 2)))
cuts = st.one_of(st.just(()), st.just(()), st.tuples(st.integers(1, 24)), st.just((1, 3)))
"""Positions at which a segment is split into forward passes, if the segment is long enough."""
paddings = st.one_of(st.just(()), st.just(()), st.tuples(*[st.integers(0, 20)] * 3))
"""Hidden columns on the left of each row, modulo the length of the row."""


class SessionMachine(RuleBasedStateMachine):
    """State machine with the caches of one family. Each cache has a policy, and sometimes a different policy runs."""

    caches = Bundle("caches")

    def __init__(self, family: str, met: Counter[str]) -> None:
        super().__init__()
        self.judge, self.undo = Judge(family, met), ExitStack()
        self.model, self.met = self.judge.model, self.judge.met

    @initialize(long_run=st.sampled_from([64, 1, 2]), spare=st.sampled_from([64, 1, 4]))
    def set_sizes(self, long_run: int, spare: int) -> None:
        """Set small sizes for limits that only long caches would reach."""
        self.undo.enter_context(patch("models_integration.cache.positions._LONG_RUN", long_run))
        self.undo.enter_context(patch("models_integration.cache.ragged_layer._SPARE", spare))

    def teardown(self) -> None:
        self.undo.close()

    # Rules for texts that the model reads.

    @rule(target=caches, policy=policies, n=st.sampled_from([30, 45, 60, 9, 3]), rows=st.sampled_from([1, 1, 2, 3]),
          seed=seeds, padding=paddings, cuts=cuts, trip=trips)
    def prompt(
        self, policy: str, n: int, rows: int = 1, seed: int = 0, padding: tuple[int, ...] = (),
        cuts: tuple[int, ...] = (), trip: Trip = NOWHERE,
    ) -> RunningCache:
        """Read a prompt into a new cache."""
        life = self.begin(policy, rows)
        life.open = any(hidden % n for hidden in padding[:rows])
        self.segment(life, policy, ids_of(n, seed, rows), padding, cuts, trip)
        return life

    def begin(self, policy: str, rows: int = 1) -> RunningCache:
        """Return an empty cache."""
        oracle = self.judge.subject.oracle
        cache = RetainedCache(self.model.config)
        life = RunningCache(cache, policy, [oracle.nothing] * rows, (len(oracle.full), oracle.heads))
        life.alone = [RetainedCache(self.model.config) for _ in range(rows)]
        life.sets = life.stored()
        return life

    @rule(life=caches, n=st.sampled_from([12, 25, 7, 3, 2]), seed=seeds, padding=paddings, cuts=cuts, other=others,
          trip=trips, holes=st.sampled_from([(), (), (2, 3, 7)]))
    def turn(
        self, life: RunningCache, n: int, seed: int = 1, padding: tuple[int, ...] = (), cuts: tuple[int, ...] = (),
        other: str | None = None, trip: Trip = NOWHERE, holes: tuple[int, ...] = (),
    ) -> None:
        """Read a later segment under the previous or a different policy. A mask may hide columns of the first row."""
        if self.runs(life):
            self.segment(life, other or life.policy, ids_of(n, seed, len(life.rows)), padding, cuts, trip, holes)

    def runs(self, life: RunningCache) -> bool:
        return not life.dead and life.tokens < MAX_TOKENS

    def segment(
        self, life: RunningCache, policy: str, ids: Tensor, padding: tuple[int, ...], cuts: tuple[int, ...], trip: Trip,
        holes: tuple[int, ...] = (),
    ) -> None:
        rows, n = ids.shape
        hidden = torch.tensor([row % n for row in (*padding, 0, 0, 0)[:rows]])[:, None]
        is_token, first, streams = torch.arange(n) >= hidden, life.columns == 0, policy == "stream"
        is_token[0, [at % (n - 1) for at in holes]] = False
        # A stream treats a piece of one token as a decode step.
        inner = [at for at in cuts[-1:] if 1 < at < n - 1] if streams else [at for at in cuts if at < n]
        run: Session | None = None

        def act() -> None:
            nonlocal run
            block = inner and not streams
            with self.judge.session(life, policy, trip) as run, run.prompt() if block else nullcontext():
                for start, stop in zip([0, *inner], [*inner, n], strict=True):
                    mask = mask_of(life, is_token[:, start:stop])
                    self.judge.read(life, ids[:, start:stop], evicts=streams or stop == n, mask=mask)

        if (ended := self.judge.attempt(life, act)) == "done":
            assert run is not None
            self.judge.check_segment(life, run, policy)
            kind = "prompt" if first else "turn"
            self.met(f"a {kind} in {'pieces' if inner else 'one forward'}")
            if not bool(is_token.all()):
                self.met(f"a padded {kind}")
        self.judge.follow_alone(life, ended, policy, [[row[shown]] for row, shown in zip(ids, is_token, strict=True)])

    @rule(life=caches, n=st.sampled_from([1, 9, 3]), seed=seeds, other=others, trip=trips)
    def steps(
        self, life: RunningCache, n: int, seed: int = 2, other: str | None = None, trip: Trip = NOWHERE,
    ) -> None:
        """Read one token at a time."""
        if not self.runs(life):
            return
        ids, policy = ids_of(n, seed, len(life.rows)), other or life.policy

        def act() -> None:
            with self.judge.session(life, policy, trip):
                for token in torch.split(ids, 1, dim=1):
                    before = life.sets
                    self.judge.read(life, token)
                    evicted = any(len(a) <= len(b) for a, b in zip(flat(life.sets), flat(before), strict=True))
                    self.met(f"a step that {'evicts' if evicted else 'lets the cache grow'}")

        ended = self.judge.attempt(life, act)
        self.judge.follow_alone(life, ended, policy, [torch.split(row_ids, 1) for row_ids in ids])

    @rule(life=caches, n=st.sampled_from([5, 1, 12]), new=st.sampled_from([6, 2]), seed=seeds, trip=trips)
    def generate(self, life: RunningCache, n: int, new: int, seed: int = 3, trip: Trip = NOWHERE) -> None:
        """Generate an answer to a question of n tokens. The last generated token has no forward pass."""
        if not self.runs(life):
            return
        ids = ids_of(n, seed, len(life.rows))
        shown = life.cache.is_token.expand(len(ids), -1)
        history = torch.zeros(shown.shape, dtype=torch.int64)
        history[shown] = torch.tensor([token for row in life.rows for token in row.tokens])
        mask = torch.cat([shown, torch.ones_like(ids)], dim=1).long()

        def act() -> None:
            self.judge.met("generate is called")
            with self.judge.session(life, life.policy, trip):
                output: Any = self.model.generate(  # type: ignore[operator]
                    torch.cat([history, ids], dim=1), attention_mask=mask, past_key_values=life.cache,
                    max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True,
                )
            self.judge.follow(life, list(torch.stack(output.logits, dim=1)), n + new - 1)

        if (ended := self.judge.attempt(life, act)) == "done":
            self.judge.check_storage(life)
            self.met("tokens are generated")
        read = [torch.tensor(row.tokens[1 - n - new :]) for row in life.rows]
        self.judge.follow_alone(life, ended, life.policy, [[one[:n], *torch.split(one[n:], 1)] for one in read])

    @rule(life=caches, n=st.sampled_from([2, 1, 6]), seed=seeds, trip=trips)
    def reading(self, life: RunningCache, n: int, seed: int = 4, trip: Trip = NOWHERE) -> None:
        """Read tokens inside `reading()`."""
        if not self.runs(life):
            return

        ids = ids_of(n, seed, len(life.rows))

        def act() -> None:
            with self.judge.session(life, life.policy, trip) as run, run.reading():
                self.judge.read(life, ids, evicts=False)

        if (ended := self.judge.attempt(life, act)) == "done":
            self.met("tokens are read without an eviction")
        self.judge.follow_alone(life, ended, life.policy, [[row_ids] for row_ids in ids], reading=True)

    @rule(life=caches, n=st.sampled_from([4, 1]), seed=seeds)
    def outside(self, life: RunningCache, n: int, seed: int = 5) -> None:
        """Read tokens outside any context."""
        if not self.runs(life):
            return

        ids = ids_of(n, seed, len(life.rows))

        def act() -> None:
            with self.judge.watching(life):
                self.judge.read(life, ids, evicts=False)

        if (ended := self.judge.attempt(life, act)) == "done":
            assert not life.cache.layers_differ, "layers or heads that differ were read outside the context"
            assert life.cache.full_layers[0].rows.shared, "rows that differ were read outside the context"
            self.met("tokens are read outside the context")
        self.judge.follow_alone(life, ended, None, [[row_ids] for row_ids in ids])

    @rule(life=caches, n=st.sampled_from([1, 3]), early=st.booleans(), reads=st.booleans(),
          how=st.sampled_from(["width", "positions", "hole", "ids", "rows", "use_cache", "embeds"]))
    def mistake(self, life: RunningCache, how: str, n: int = 1, early: bool = False, reads: bool = False) -> None:
        """Run a forward pass with wrong arguments, such as one column or position too few or too many."""
        if not self.runs(life):
            return
        rows, seen, by = len(life.rows), life.columns, -1 if early else 1
        ids = ids_of(n, 6, rows)
        positions = torch.tensor([[len(row.tokens)] for row in life.rows]) + torch.arange(n)
        hole = torch.ones(rows, seen + n, dtype=torch.int64)
        hole[:, int(life.sets[0][0][0][-1]) + seen - len(life.rows[0].tokens)] = 0
        wrong: dict[str, dict[str, Any]] = {
            "width": {"attention_mask": torch.ones(rows, seen + n + by, dtype=torch.int64)},
            "positions": {"position_ids": positions + by},
            "hole": {"attention_mask": hole},
            "ids": {"input_ids": ids + VOCABULARY},
            "rows": {"input_ids": ids.repeat(rows + 1, 1)},
            "use_cache": {"use_cache": False},
            "embeds": {"input_ids": None, "inputs_embeds": torch.zeros(rows, n, self.model.config.hidden_size)},
        }

        def act() -> None:
            with self.judge.session(life, life.policy, NOWHERE) as run, run.reading() if reads else nullcontext():
                self.model(**{"input_ids": ids, "past_key_values": life.cache, **wrong[how]})

        assert self.judge.attempt(life, act) != "done", f"a forward with a wrong {how} was taken"
        self.met("a mistake is refused")

    # Rules for a cache between two forward passes.

    @rule(life=caches, how=st.sampled_from(["reorder", "repeat", "select"]),
          order=st.lists(st.integers(0, 2), min_size=3, max_size=3))
    def choose_rows(self, life: RunningCache, how: str, order: list[int]) -> None:
        """Reorder, repeat or select rows."""
        if not self.runs(life):
            return
        count = len(life.rows)
        if how == "repeat":
            repeats = 2 if count < 3 else 1
            chosen = [row for row in range(count) for _ in range(repeats)]
            self.judge.attempt(life, lambda: life.cache.batch_repeat_interleave(repeats))
        else:
            chosen = [row % count for row in order][: count if how == "reorder" else 1 + order[0] % count]
            act = life.cache.reorder_cache if how == "reorder" else life.cache.batch_select_indices
            self.judge.attempt(life, lambda: act(torch.tensor(chosen)))
        life.rows, life.sets = [life.rows[row] for row in chosen], [life.sets[row] for row in chosen]
        life.alone = life.alone and [deepcopy(life.alone[row]) for row in chosen]
        self.judge.check_storage(life)
        self.met("rows differ" if len(set(map(str, life.sets))) > 1 else "rows agree")

    @rule(life=caches, n=st.sampled_from([1, 3, 0, 20]))
    def crop(self, life: RunningCache, n: int) -> None:
        """Remove the last tokens."""
        if not self.runs(life) or n >= min(len(row.tokens) for row in life.rows):
            return
        known = life.cache.continuation != Continuation()
        if self.judge.attempt(life, lambda: life.cache.crop(-n)) != "done":
            return
        life.rows, life.columns = [row.cropped(n) for row in life.rows], life.columns - n
        for stored in life.alone or ():
            stored.crop(-n)
        life.sets = [
            [[[at for at in stored if at < len(row.tokens)] for stored in heads] for heads in sets]
            for sets, row in zip(life.sets, life.rows, strict=True)
        ]
        life.dead = min(map(len, flat(life.sets))) == 0  # No token is left for attention.
        if not life.dead:
            self.judge.check_storage(life)
        if n and known:
            kept = life.cache.continuation != Continuation()
            self.met(f"a crop after which the states are {'kept' if kept else 'forgotten'}")

    @rule(life=caches, fault=FAULTS)
    def save(self, life: RunningCache, fault: Fault) -> None:
        """Save the cache to a file, and load it. The loaded cache is the same, and the session continues from it."""
        if not self.runs(life):
            return

        def act() -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "cache"
                with fault.happening():
                    save_cache(life.cache, self.model, path, self.judge.subject.identity)
                loaded = load_cache(path, self.model, self.judge.subject.identity)
            same(loaded, life.cache)
            assert storage_bytes(loaded.layers) <= storage_bytes(life.cache.layers)
            life.cache = loaded

        try:
            if self.judge.attempt(life, act) == "done":
                self.met("a cache is saved and loaded")
        except (OSError, Killed):
            assert fault.kind in ("full", "error", "killed")
            self.met("a cache is not saved: the disk fails")
        self.judge.check_storage(life)

    @rule(target=caches, life=caches, deep=st.booleans())
    def copy(self, life: RunningCache, deep: bool = True) -> RunningCache:
        """Return a copy of the cache that is used in addition to the original."""
        if not self.runs(life):
            return life
        copied = replace(life, alone=deepcopy(life.alone) if deep else None)

        def act() -> None:
            whole = retentions(life, "head" if life.cache.layers_differ else "model", life.sets)
            copied.cache = deepcopy(life.cache) if deep else compact(life.cache, Decision(whole))

        if self.judge.attempt(life, act) != "done":
            return life
        self.judge.check_storage(copied)
        self.met(f"a cache goes on beside its {'copy' if deep else 'compaction'}")
        return copied

    @rule(life=caches, granularity=st.sampled_from(["model", "layer", "head"]), share=st.sampled_from([0.3, 0.7, 1.0]),
          unstored=st.booleans(), seed=seeds, trip=trips)
    def keep(
        self, life: RunningCache, granularity: str, share: float, unstored: bool = False, seed: int = 7,
        trip: Trip = NOWHERE,
    ) -> None:
        """Compact a cache by hand. A token that is not stored is refused."""
        if not self.runs(life):
            return
        rng, granularity = Random(seed), "head" if life.cache.layers_differ else granularity
        sets = [chosen(positions, granularity, share, rng) for positions in life.sets]
        missing = sorted({*range(len(life.rows[-1].tokens))} - {*life.sets[-1][-1][-1]})
        if wrong := unstored and bool(missing):
            sets[-1][-1][-1] = sorted({*sets[-1][-1][-1], rng.choice(missing)})

        def act() -> None:
            with trip.raised(self.model):
                life.cache.compact(retentions(life, granularity, sets))
            life.cache.continuation = Continuation()

        ended = self.judge.attempt(life, act)
        assert (ended == "done") <= (not wrong), "a token that is not stored was kept"
        assert (ended == "refused") <= wrong, "a compaction to stored tokens was refused"
        if ended == "done":
            life.sets, life.alone = sets, None
            self.judge.check_storage(life)
        self.met(f"a compaction by hand is {ended}")

    @rule(life=caches, lengths=st.sampled_from([[9], [9, 14]]), evicted=st.sampled_from([(), (0, 3, 4)]))
    def splice(self, life: RunningCache, lengths: list[int], evicted: tuple[int, ...] = ()) -> None:
        """Splice chunks that were computed elsewhere after the tokens of the session, without their evicted tokens."""
        rotary = self.judge.subject.rotary
        if not self.runs(life) or rotary is None:
            return
        places = [[at for at in range(n) if at not in evicted] for n in lengths]
        chunks = [
            compacted(computed(self.model, ids_of(n, n)[0].tolist(), rotary), Retention.shared(np.array(kept), n))
            for n, kept in zip(lengths, places, strict=True)
        ]
        inverse_frequencies = frequencies_at(self.model, rotary, life.columns + sum(lengths))

        def act() -> None:
            splice(life.cache, chunks, inverse_frequencies)

        if self.judge.attempt(life, act) != "done":
            return
        life.alone = None
        for chunk, kept in zip(chunks, places, strict=True):
            start = life.columns
            life.rows, life.columns = [life.rows[0].read(chunk.ids)], start + len(chunk.ids)
            added = [start + at for at in kept]
            life.sets = [[[[*held, *added] for held in heads] for heads in life.sets[0]]]
        known = life.cache.continuation != Continuation()
        self.met(f"a chunk after which the states {'go on' if known else 'are forgotten'}")
        self.judge.check_storage(life)


@pytest.mark.parametrize("family", [
    *WHOLE, *[pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES if family not in WHOLE],
])
def test_a_session_equals_the_masked_model(family: str) -> None:
    """Run operations in any order."""
    profile = settings.default or settings()
    lives = settings(
        profile, max_examples=max(10, profile.max_examples // 15), stateful_step_count=15,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(
        partial(SessionMachine, family, Counter[str]()),  # type: ignore[arg-type]
        settings=lives
    )


def converse(machine: SessionMachine, policy: str) -> None:
    """Run a prompt in pieces, steps, a turn in pieces, generate, a file, and tokens outside the context."""
    life: Any = machine.prompt(policy, 45, cuts=(20, 21))
    machine.steps(life, 9)
    machine.turn(life, 12, cuts=(5, 6))
    machine.generate(life, 5, 6)
    machine.reading(life, 2)
    machine.steps(life, 1)
    machine.reading(life, 3)
    machine.turn(life, 9)
    machine.crop(life, 1)
    machine.save(life, WELL)
    machine.steps(life, 3)
    machine.outside(life, 4)
    assert not life.dead
    assert life.tokens > 45 + 9


def converse_in_rows(machine: SessionMachine, policy: str) -> None:
    """Run rows of different lengths, in the prompt and in turns, that are reordered, selected and repeated."""
    life = machine.prompt(policy, 45, rows=3, padding=(20, 0, 1))
    machine.steps(life, 4)
    machine.crop(life, 2)
    machine.turn(life, 12, padding=(5, 0, 1))
    machine.mistake(life, "hole")
    machine.reading(life, 2)
    machine.turn(life, 9, padding=(0, 4, 0), cuts=(3, 5), holes=(2, 7))
    machine.generate(life, 5, 6)
    machine.outside(life, 1)
    other = machine.copy(life)
    machine.choose_rows(life, "reorder", [1, 1, 0])
    machine.steps(life, 4)
    machine.choose_rows(other, "select", [1, 0, 0])
    machine.choose_rows(other, "repeat", [])
    machine.steps(other, 2)
    machine.steps(life, 1)
    machine.save(other, WELL)
    machine.save(life, WELL)


def converse_with_chunks(machine: SessionMachine, policy: str) -> None:
    """Run chunks with and without gaps: first, after steps, after a turn, and around a decode-time eviction."""
    begun: Any = machine.begin(policy)
    machine.splice(begun, [9, 14], evicted=(0, 3, 4))
    machine.turn(begun, 12)
    life: Any = machine.prompt(policy, 45)
    for _ in range(3):
        machine.steps(life, 3)
        machine.splice(life, [9])
        machine.steps(life, 1)
    machine.turn(life, 12)
    machine.splice(life, [9, 14], evicted=(0, 3, 4))
    machine.steps(life, 1)
    machine.save(life, WELL)
    machine.turn(life, 7)
    machine.generate(life, 5, 6)
    machine.crop(life, 3)
    assert life.tokens > 45 + 27


def run(program: Callable[[SessionMachine], object], family: str = "llama") -> Counter[str]:
    """Run a program on a new machine, and return the counts of the states met."""
    met = Counter[str]()
    machine = SessionMachine(family, met)
    try:
        program(machine)
    finally:
        machine.teardown()
    return met


@crossed("policy", POLICIES, always=["stream", "h2o"], whole=("llama",))
@pytest.mark.spec("CC-COMPACT")
def test_a_conversation_equals_the_masked_model(family: str, policy: str) -> None:
    """Check each family and each policy."""
    met = run(partial(converse, policy=policy), family)
    assert (met["a segment that evicts"] > 0) == (policy != "fullcache")
    assert policy not in ("breathing", "stream", "h2o", "tova", "rkv") or met["a step that evicts"] > 0


@crossed("policy", ["crystalcache", "streamingllm", "adakv", "breathing", "fullcache"])
def test_rows_equal_the_masked_model(family: str, policy: str) -> None:
    check_rows(policy, family)


@pytest.mark.law("saved-is-what-was")
@pytest.mark.parametrize("policy", ["adakv", "chunkkv"])
def test_rows_that_differ_are_saved_beside_columns_without_a_token(policy: str) -> None:
    def program(machine: SessionMachine) -> None:
        life = machine.prompt("fullcache", 45, rows=3, padding=(20, 0, 1))
        machine.turn(life, 9, padding=(0, 4, 2))
        machine.turn(life, 20, other=policy)
        machine.save(life, WELL)
        machine.steps(life, 1)

    met = run(program)
    assert met["a padded turn"] == met["a cache is saved and loaded"] == 1


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize(
    "policy", ["breathing", "crystalcache", "streamingllm", "snapkv", "chunkkv", "adakv", "nestedkv"],
)
def test_a_conversation_with_chunks_equals_the_masked_model(policy: str) -> None:
    met = run(partial(converse_with_chunks, policy=policy))
    assert met["a segment that evicts"] > 1


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("policy", ["h2o", "tova", "rkv"])
def test_a_policy_with_records_of_each_token_refuses_what_it_has_not_read(policy: str) -> None:
    def program(machine: SessionMachine) -> None:
        life: Any = machine.prompt(policy, 45)
        machine.splice(life, [9])
        machine.turn(life, 12)
        assert life.tokens == 45 + 9

    assert run(program)["refused, and nothing has changed"] == 1


def fail_at(machine: SessionMachine, policy: str, place: str, at: int) -> None:
    """Raise an exception at a call of a prompt in pieces, of a turn, of steps, and of a text inside `reading()`."""
    trip = Trip(place, at)
    machine.prompt(policy, 45, rows=2, trip=trip)
    machine.prompt(policy, 45, cuts=(20,), trip=trip)
    machine.turn(machine.prompt(policy, 45), 12, trip=trip)
    machine.steps(machine.prompt(policy, 45), 9, trip=trip)
    machine.reading(machine.prompt(policy, 45), 3, trip=trip)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in machine.model.modules())


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize(("policy", "place"), [
    pytest.param(policy, place, marks=[pytest.mark.nightly] * ((at + to) % 2))
    for at, policy in enumerate(["breathing", "stream", "adakv", "h2o", "kvzip"]) for to, place in enumerate(PLACES)
])
def test_a_failure_leaves_the_cache_as_it_was_or_unusable(policy: str, place: str) -> None:
    met = Counter[str]()
    for at in (0, 2):
        met += run(partial(fail_at, policy=policy, place=place, at=at))
    assert any(state.startswith("unusable") for state in met), met


@pytest.mark.parametrize(("family", "policy"), [("llama", "adakv"), ("gemma3", "breathing"), ("gemma3", "chunkkv")])
def test_eager_attention_is_served_as_it_is(family: str, policy: str) -> None:
    run(partial(converse, policy=policy), f"{family} eager")


def check_hidden_token(model: PreTrainedModel, policy: str = "crystalcache") -> None:
    """Check that a 2D mask hides the same token in every head, in whichever slot the head stores the token."""
    following, (_, cache) = prompt(NEW, seed=9), read_prompt(model, method(policy))
    kept = live_sets(cache)
    positions = kept[max(kept)][0]
    hidden = positions[4]
    # The offset between slot and position must differ from the offset at the end. Otherwise a mask by slot would pass
    # too.
    assert hidden - 4 < PROMPT - len(positions)
    mask = torch.ones(1, PROMPT + NEW, dtype=torch.int64)
    mask[0, hidden] = 0
    left = {layer: [[at for at in one if at != hidden] for one in sets] for layer, sets in kept.items()}
    # The token stays visible to the sliding layers of the oracle. Therefore models with sliding layers are excluded.
    expected = Masked(model, prompt(PROMPT), left).read(following)
    with observing(describe(model), cache) if cache.layers_differ else nullcontext():
        assert relative(at_once(model, following, cache, attention_mask=mask), expected) < TOLERANCE


@pytest.mark.parametrize(("family", "attention", "policy"), [
    ("llama", "eager", "crystalcache"), ("llama", "sdpa", "adakv"), ("llama", "sdpa", "chunkkv"),
    *((family, "sdpa", "crystalcache") for family in FAMILIES if family not in SLIDING),
])
def test_a_2d_mask_counts_tokens_and_not_slots(family: str, attention: str, policy: str) -> None:
    check_hidden_token(build(family, attention=attention), policy)


def test_generate_goes_on_outside_the_context() -> None:
    model, ids, following = build("llama"), prompt(PROMPT), prompt(5, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    oracle = Masked(model, ids, cache.stored_positions().tolist())
    chosen = [int(oracle.read(following)[0, -1].argmax())]
    while len(chosen) < 6:
        chosen.append(int(oracle.read(torch.tensor([[chosen[-1]]]))[0, -1].argmax()))
    whole = torch.cat([ids, following], dim=1)
    assert greedy(model, whole, 6, past_key_values=cache)[0].tolist() == chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_served(dtype: torch.dtype) -> None:
    skip_without_attention(dtype)
    model, ids, following = build("llama", dtype=dtype), prompt(PROMPT), prompt(8, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    expected = Masked(model, ids, cache.stored_positions().tolist()).read(following)
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    assert relative(at_once(model, following, cache), expected) < tolerance


MUTANTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))


def with_long_runs(machine: SessionMachine) -> None:
    machine.set_sizes(1, 64)
    machine.keep(machine.prompt("fullcache", 60), "model", 0.7)


def check_saved() -> None:
    """Check that a loaded cache equals the saved cache, and that a file with one changed byte is refused."""
    model, cache = lived("llama")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        save_cache(cache, model, path)
        same(load_cache(path, model), cache)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        refused = False
        try:
            load_cache(path, model)
        except SpecError:
            refused = True
        assert refused


def check_rows(policy: str, family: str = "llama") -> None:
    """Check rows of different lengths. Heads that differ and sliding windows refuse padded turns."""
    served = policy != "adakv" and family not in SLIDING
    assert (run(partial(converse_in_rows, policy=policy), family)["a padded turn"] > 0) == served


def check_beams() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_turns.test_beams_keep_their_states(patch)


CHECKS: dict[str, Callable[[], object]] = {
    "a hidden token": lambda: check_hidden_token(build("llama")),
    "a hidden token of heads": lambda: check_hidden_token(build("llama"), "adakv"),
    "turns of the reference": lambda: test_turns.test_the_kept_sets_are_those_of_the_reference(30, 0),
    "beams": check_beams, "a cascade": test_ragged.check_cascades, "a saved cache": check_saved,
    "steps without decode": test_turns.test_steps_read_without_decode_do_not_fade,
    "protected tokens": (
        lambda: test_turns.test_the_newest_tokens_are_safe_unless_the_paper_s_rule_is_asked_for("sink+recent")
    ),
    "a mistake": partial(run, lambda machine: machine.mistake(machine.prompt("crystalcache", 45), "positions")),
    "a reading": partial(run, lambda machine: machine.reading(machine.prompt("crystalcache", 45), 6)),
    "a token that is not stored": partial(
        run, lambda machine: machine.keep(machine.prompt("streamingllm", 45), "layer", 0.7, unstored=True)
    ),
    "long runs": partial(run, with_long_runs),
    "copies": test_other_architectures.test_the_caches_of_two_decisions_do_not_share_states,
    "sinks in a turn": (
        test_other_architectures.test_in_a_turn_each_kept_set_is_scored_with_the_sinks_of_its_own_heads
    ),
    "h2o": test_ragged.test_h2o_drops_the_smallest_sum,
    "tova": test_ragged.test_tova_drops_the_least_attended_key_of_the_last_query,
    "small keys": test_ragged.test_a_turn_is_decided_over_each_head_s_own_keys,
    "the log-sum-exp": lambda: test_capture.test_it_is_the_sum_over_what_each_query_sees("llama", torch.float64, 1e-14),
    "a scaled rope": lambda: test_renumbered.test_a_session_equals_the_oracle("llama, linear", "streamingllm"),
    "a renumbered stream": (
        lambda: test_renumbered.test_an_endless_text_stays_in_the_range_of_the_model("streamingllm")
    ),
    "the bits": lambda: test_model_untouched.test_a_full_budget_changes_no_bit("llama", "crystalcache", torch.float32),
}
WORDS: dict[str, Callable[[str], object]] = {
    "converse": lambda policy: run(partial(converse, policy=policy)),
    "rows": check_rows,
    "stores": lambda name: test_other_architectures.check_conversation(
        test_other_architectures.build(name), "streamingllm"
    ),
    "pinned": test_other_architectures.test_an_image_that_is_pinned_stays,
    "last queries": test_other_architectures.test_layers_that_share_a_cache_read_the_last_queries_alone,
    "padded by head": lambda name: test_other_architectures.test_padded_rows_equal_their_single_runs(name, "keydiff"),
    "renumbered": lambda policy: test_renumbered.test_a_session_equals_the_oracle("llama", policy),
    "a quarter": test_ragged.test_a_quarter_of_the_bytes,
    "shown": lambda family: test_model_untouched.check_shown(test_model_untouched.telling_model(family)),
    "decided": lambda family: test_model_untouched.check_decided(test_model_untouched.telling_model(family)),
}


def run_test(name: str) -> None:
    """Run a test function of this folder: "test_MODULE.FUNCTION", then its argument, or all arguments as JSON."""
    path, _, text = name.partition(" ")
    module, _, function = path.partition(".")
    test = getattr(import_module(f"{__package__}.{module}"), function)
    arguments = json.loads(text) if text.startswith("[") else [text] * bool(text)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        fixtures = {"tmp_path": Path(folder), "monkeypatch": patch, "saved": test_snapshots.saving(Path(folder))}
        test(*arguments, **{name: fixtures[name] for name in fixtures if name in signature(test).parameters})


def check(name: str) -> None:
    """Run a check by its name: a test function, one of CHECKS, or one of WORDS and its argument."""
    words, _, argument = name.rpartition(" ")
    if name.startswith("test_"):
        run_test(name)
    else:
        CHECKS[name]() if name in CHECKS else WORDS[words](argument)


def place(name: str) -> str:
    return name if name.startswith("reference.") else f"models_integration.{name}"


def mutate(stack: ExitStack, name: str) -> None:
    """Apply the mutant to this process until the stack is closed, and forget cached models."""
    test_other_architectures.build.cache_clear()
    stack.callback(test_other_architectures.build.cache_clear)
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for constant, value in MUTANTS[name].get("sizes", {}).items():
        patch.setattr(place(constant), value)
    for edit in MUTANTS[name]["edits"]:
        stack.enter_context(replaced(Edit(**{**edit, "of": place(edit["of"])})))


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(("name", "judge"), [(name, judge) for name in MUTANTS for judge in MUTANTS[name]["checks"]])
def test_a_mutant_is_killed(name: str, judge: str) -> None:
    """Check that a check kills the mutant. A different test runs the same check without the mutant."""
    with ExitStack() as stack:
        mutate(stack, name)
        with pytest.raises((AssertionError, pytest.fail.Exception)):  # the second if an error is not raised
            check(judge)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", [
    "a cascade", "a saved cache", "a mistake", "a reading", "a token that is not stored", "long runs",
])
def test_a_check_that_is_no_test_passes(name: str) -> None:
    check(name)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["unchecked_step", "reading_decides", "half_compacted"])
def test_random_programs_find_it(name: str) -> None:
    unguided = settings(
        max_examples=2000, stateful_step_count=15, phases=[Phase.generate], database=None, deadline=None
    )
    with ExitStack() as stack:
        mutate(stack, name)
        with pytest.raises(AssertionError):
            run_state_machine_as_test(
                partial(SessionMachine, "llama", Counter[str]()), settings=unguided,  # type: ignore[arg-type]
            )
