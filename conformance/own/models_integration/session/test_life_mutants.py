"""Breaths, turns, streams and saved caches have teeth: each of these mistakes fails an assertion of their tests."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor, nn

from conformance.own.models_integration.session import (
    test_breaths,
    test_conversations,
    test_padded_turns,
    test_streams,
    test_turns,
)
from conformance.own.models_integration.session.families import states_of
from conformance.own.models_integration.session.saved import lived, same
from conformance.own.models_integration.session.test_oracle import converse, converse_in_rows, run
from conformance.own.models_integration.session.test_session_machine import SessionMachine
from models_integration.attention.capture import Recorder
from models_integration.cache import retained_cache
from models_integration.cache.crystal_states import CrystalStates, DecodeRule, Pending
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.positions import Plan, StoredRows
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.cache.tensor_file import DIGEST_AT, read
from models_integration.session import inputs, session
from models_integration.session.inputs import OPEN, ForwardSpan
from models_integration.session.segment import ObservedSegment
from models_integration.session.session import Session
from models_integration.session.streams import Stream
from spec.errors import SpecError
from spec.policy import LayerView

pytestmark = pytest.mark.law("the-proof-has-teeth")

Patch = pytest.MonkeyPatch


def a_breath_compacts_the_observed_layer_alone(patch: Patch) -> None:
    """Other layers keep what the policy evicted."""
    compact = RetainedCache.compact

    def wrong(cache: RetainedCache, retentions: Any, padding: Any = None, layers: Any = None) -> None:
        compact(cache, retentions, padding, [cache.layers.index(cache.full_layers[0])] if layers is None else layers)

    patch.setattr(RetainedCache, "compact", wrong)


def a_breath_keeps_other_tokens(patch: Patch) -> None:
    """As many as it should, but the newest."""
    follow = DenseLayer.follow

    def wrong(layer: DenseLayer, plan: Plan) -> None:
        newest = torch.arange(plan.length - len(plan.slots[0]), plan.length) if plan.slots else None
        later = plan.before.kept.shape[1] > 0 and newest is not None
        follow(layer, replace(plan, slots=(newest,)) if later else plan)  # type: ignore[arg-type]

    patch.setattr(DenseLayer, "follow", wrong)


def stale_positions_after_a_breath(patch: Patch) -> None:
    """The slots of a breath hold what they held before it, as far as the cache knows."""
    follow = DenseLayer.follow

    def wrong(layer: DenseLayer, plan: Plan) -> None:
        before = layer.rows
        follow(layer, plan)
        if before.kept.shape[1]:
            stale = before.positions(plan.length)[:, : layer.stored_length]
            layer.rows = StoredRows(stale, layer.rows.seen_at_compaction)

    patch.setattr(DenseLayer, "follow", wrong)


def the_first_row_s_tokens_for_all(patch: Patch) -> None:
    """Every row's state learns what the first row has read."""
    ids = CrystalStates.ids
    patch.setattr(CrystalStates, "ids", lambda states: [ids(states)[0]] * len(states.rows))


def the_first_row_s_keys_for_all(patch: Patch) -> None:
    """Every row's tokens have the key norms of the first row's."""
    flushed = DecodeRule.flushed
    patch.setattr(DecodeRule, "flushed", lambda rule, states, keys: flushed(rule, states, keys[:1].expand_as(keys)))


def states_stay_where_they_were(patch: Patch) -> None:
    """A beam goes on as another was, and its state does not."""
    select = CrystalStates.select

    def wrong(states: CrystalStates, rows: Tensor) -> CrystalStates:
        return states if len(rows) == len(states.rows) else select(states, rows)

    patch.setattr(CrystalStates, "select", wrong)


def the_tail_is_forgotten_in_a_turn(patch: Patch) -> None:
    """Tokens read since the last segment are in no trunk, and so go with the next eviction."""
    extended = DecodeRule.extended

    def unsettled(rule: DecodeRule, states: CrystalStates, keys: Tensor) -> CrystalStates:
        n = states.pending_tokens
        return CrystalStates(tuple(replace(state, seen=state.seen + n) for state in states.rows), states.columns + n)

    def wrong(rule: DecodeRule, state: Any, view: LayerView, ids: Any) -> Any:
        k = np.concatenate([view.k[:, : len(state.stored)], view.k[:, view.k.shape[1] - len(ids) :]], axis=1)
        return extended(rule, state, replace(view, k=k), ids)

    patch.setattr(DecodeRule, "flushed", unsettled)
    patch.setattr(DecodeRule, "extended", wrong)


def steps_without_decode_decay(patch: Patch) -> None:
    """D fades for every token that waits."""
    flushed = DecodeRule.flushed
    patch.setattr(
        DecodeRule, "flushed", lambda rule, states, keys: flushed(rule, replace(states, kind=Pending.DECODED), keys)
    )


def queries_of_a_turn_stand_at_their_slots(patch: Patch) -> None:
    """A turn's positions follow the number of slots."""

    def wrong(cache: RetainedCache, tokens: int, device: Any) -> dict[str, Tensor]:
        return {"position_ids": cache.stored_length + torch.arange(tokens)[None]} if tokens > 1 else {}

    patch.setattr(RetainedCache, "step_inputs", wrong)
    patch.setattr("models_integration.session.inputs._check_positions", lambda *_: None)


def a_turn_s_padding_is_taken_for_tokens(patch: Patch) -> None:
    """Empty slots of shorter rows are shown to S1, in place of the last stored keys."""
    views = Recorder.views

    def wrong(recorder: Recorder, row: int, slots: Any, queries: Any) -> dict[int, LayerView]:
        shown = views(recorder, row, slots, queries)
        first = 0 if slots is None else int(torch.nonzero(slots)[0, 0])
        return {layer: replace(view, k=np.roll(view.k, first, axis=1)) for layer, view in shown.items()}

    patch.setattr(Recorder, "views", wrong)


def hidden_columns_of_a_turn_are_tokens(patch: Patch) -> None:
    """A padded turn's first columns take positions, and are attended."""
    patch.setattr(RetainedCache, "expect", lambda cache, is_token: None)


def hidden_queries_of_a_turn_are_counted(patch: Patch) -> None:
    """S1 sums over the queries of columns that hold no token, in place of the row's first."""
    views = Recorder.views

    def wrong(recorder: Recorder, row: int, slots: Any, queries: Any) -> dict[int, LayerView]:
        first = queries.sort(descending=True).values
        return views(recorder, row, slots, first if int(queries.sum()) < len(queries) else queries)

    patch.setattr(Recorder, "views", wrong)


def hidden_columns_of_a_turn_stand_elsewhere(patch: Patch) -> None:
    """A 2D mask is looked up as if a row's tokens stood in columns without a gap."""
    columns = StoredRows.columns
    patch.setattr(StoredRows, "columns", lambda rows, positions, seen, tokens: columns(
        StoredRows(rows.kept, rows.seen_at_compaction), positions, seen, tokens
    ))


def a_turn_in_pieces_forgets_its_ids(patch: Patch) -> None:
    """Rarity counts the first piece's tokens, as often as it takes."""
    token_ids = ObservedSegment.token_ids

    def wrong(observed: ObservedSegment, row: int) -> Any:
        ids = token_ids(observed, row)
        first = observed.text._ids[0].shape[1]
        return np.resize(ids[:first], len(ids)) if observed.later else ids

    patch.setattr(ObservedSegment, "token_ids", wrong)


def a_stream_s_segments_end_with_its_forwards(patch: Patch) -> None:
    """A forward that is too long is read at once, and its segment ends late."""

    def wrong(stream: Stream, decoder: nn.Module, arguments: Any, room: int) -> dict[str, Any]:
        return {"past_key_values": None, **arguments}

    patch.setattr(Stream, "ahead", wrong)


def the_paper_s_protection_for_all(patch: Patch) -> None:
    """Nothing is safe at a breath."""
    flushed = DecodeRule.flushed

    def wrong(rule: DecodeRule, states: CrystalStates, keys: Tensor) -> CrystalStates:
        bare = replace(rule, parameters=replace(rule.parameters, breath_protection="none"))
        return flushed(bare, states, keys)

    patch.setattr(DecodeRule, "flushed", wrong)


def no_breath(patch: Patch) -> None:
    """Steps are counted, and none is ever due."""
    patch.setattr(DecodeRule, "due", lambda rule, states: False)


def no_digest(patch: Patch) -> None:
    """A saved file is read whatever its digest says."""

    def wrong(path: Path) -> Any:
        import hashlib

        data = bytearray(path.read_bytes())
        data[DIGEST_AT : DIGEST_AT + 64] = b"0" * 64
        data[DIGEST_AT : DIGEST_AT + 64] = hashlib.sha256(data).hexdigest().encode()
        with TemporaryDirectory() as folder:
            other = Path(folder) / path.name
            other.write_bytes(data)
            return read(other)

    patch.setattr("models_integration.cache.snapshot.read", wrong)


def waiting_tokens_are_not_saved(patch: Patch) -> None:
    """A file holds the states as they were at the last breath."""
    load = load_cache

    def wrong(path: Path, model: Any) -> RetainedCache:
        cache = load(path, model)
        cache.continuation = replace(states_of(cache), pending=(), pending_tokens=0)
        return cache

    patch.setattr("conformance.own.models_integration.session.test_life_mutants.load_cache", wrong)


def unchecked_step(patch: Patch) -> None:
    """A step's position ids and mask are looked at by nobody."""

    def wrong(vocabulary: int, arguments: Any, cache: RetainedCache) -> ForwardSpan:
        ids = arguments["input_ids"]
        inputs.check_rows(cache, ids)
        defaults = cache.step_inputs(ids.shape[1], ids.device)
        return ForwardSpan(cache.get_seq_length(), OPEN, torch.ones(ids.shape, dtype=torch.bool), defaults)

    patch.setattr(session, "step_span", wrong)


def reading_decides(patch: Patch) -> None:
    """There is no way to read and decide nothing."""
    inside = Session._inside
    patch.setattr(Session, "_inside", lambda run, block: inside(run, "" if block == "reading()" else block))


def half_compacted(patch: Patch) -> None:
    """Each layer is compacted as soon as its plan is made."""
    compact = RetainedCache.compact

    def wrong(
        cache: RetainedCache, retentions: Any, padding: Tensor | None = None, layers: Sequence[int] | None = None,
    ) -> None:
        full = [index for index, layer in enumerate(cache.layers) if layer in cache.full_layers]
        for index in full if layers is None else layers:
            compact(cache, retentions, padding, [index])

    patch.setattr(RetainedCache, "compact", wrong)
    patch.setattr(retained_cache, "failing_whole", lambda cache, change="": nullcontext())


def mistake(machine: SessionMachine) -> None:
    machine.mistake(machine.prompt("crystalcache", 45), "positions")


def read_without_deciding(machine: SessionMachine) -> None:
    machine.reading(machine.prompt("crystalcache", 45), 6)


def keep_what_is_not_stored(machine: SessionMachine) -> None:
    machine.keep(machine.prompt("streamingllm", 45), "layer", 0.7, unstored=True)


def check_saved() -> None:
    """A saved cache is the same again, and none once a byte of a tensor has changed."""
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


def check_breaths() -> None:
    run(partial(converse, policy="breathing"))


def check_rows() -> None:
    assert run(partial(converse_in_rows, policy="crystalcache"))["a padded turn"]


def check_pieces() -> None:
    test_conversations.test_a_turn_in_pieces_is_the_turn_in_one_forward("llama", (5, 1, 6))


def check_padded_turn() -> None:
    test_padded_turns.test_each_row_equals_its_single_run("llama", "crystalcache")


def check_stream() -> None:
    test_streams.test_it_does_not_matter_where_the_forwards_end("llama", "odd")


def check_beams() -> None:
    with Patch.context() as patch:
        test_breaths.test_beams_keep_their_states(patch)


MUTANTS: dict[Callable[[Patch], None], Callable[[], object]] = {
    a_breath_compacts_the_observed_layer_alone: check_breaths,
    a_breath_keeps_other_tokens: check_breaths,
    stale_positions_after_a_breath: check_breaths,
    no_breath: check_breaths,
    the_first_row_s_tokens_for_all: lambda: test_breaths.test_rows_of_a_batch_breathe_as_they_do_alone("llama"),
    the_first_row_s_keys_for_all: lambda: test_breaths.test_rows_of_a_batch_breathe_as_they_do_alone("llama"),
    states_stay_where_they_were: check_beams,
    the_tail_is_forgotten_in_a_turn: lambda: test_turns.test_the_kept_sets_are_those_of_the_reference(30, 0),
    steps_without_decode_decay: test_breaths.test_steps_read_without_decode_do_not_fade,
    queries_of_a_turn_stand_at_their_slots: check_breaths,
    a_turn_s_padding_is_taken_for_tokens: lambda: test_conversations.test_turns_of_padded_rows_equal_their_single_runs(
        "llama", "crystalcache"
    ),
    hidden_columns_of_a_turn_are_tokens: check_rows,
    hidden_queries_of_a_turn_are_counted: check_padded_turn,
    hidden_columns_of_a_turn_stand_elsewhere: check_rows,
    a_turn_in_pieces_forgets_its_ids: check_pieces,
    a_stream_s_segments_end_with_its_forwards: check_stream,
    the_paper_s_protection_for_all: (
        lambda: test_breaths.test_the_newest_tokens_are_safe_unless_the_paper_s_rule_is_asked_for("sink+recent")
    ),
    no_digest: check_saved,
    waiting_tokens_are_not_saved: check_saved,
    unchecked_step: lambda: run(mistake),
    reading_decides: lambda: run(read_without_deciding),
    half_compacted: lambda: run(keep_what_is_not_stored),
}


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_killed(mutate: Callable[[Patch], None]) -> None:
    check = MUTANTS[mutate]
    check()
    with Patch.context() as patch, pytest.raises(AssertionError):
        mutate(patch)
        check()


@pytest.mark.nightly
@pytest.mark.parametrize("mutate", [unchecked_step, reading_decides, half_compacted])
def test_random_programs_find_it(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    unguided = settings(
        max_examples=2000, stateful_step_count=15, phases=[Phase.generate], database=None, deadline=None
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            partial(SessionMachine, "llama", Counter[str]()),  # type: ignore[arg-type]
            settings=unguided,
        )
