"""The oracle has teeth: each of these mistakes, made in the integration, fails an assertion."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import METHODS, build
from conformance.own.models_integration.session.oracle_checks import check_hidden_token
from conformance.own.models_integration.session.test_batches import test_rows_equal_their_single_runs as check_batch
from conformance.own.models_integration.session.test_chunks import (
    test_the_kept_set_is_that_of_one_forward as check_chunks,
)
from conformance.own.models_integration.session.test_flash import (
    test_it_is_the_sum_over_what_each_query_sees as check_lse,
)
from conformance.own.models_integration.session.test_flash import test_the_model_s_numbers_keep_their_bits as check_bits
from conformance.own.models_integration.session.test_oracle import converse, converse_in_rows, run
from conformance.own.models_integration.session.test_other_architectures import build as build_store
from conformance.own.models_integration.session.test_other_architectures import check_conversation as check_stores
from conformance.own.models_integration.session.test_other_architectures import (
    test_the_caches_of_two_decisions_do_not_share_states as check_copies,
)
from models_integration.attention import capture as capture_module
from models_integration.attention import masks as visibility
from models_integration.attention.capture import Recorder
from models_integration.cache import dense_layer as layers
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.positions import Plan, SlotOffset, StoredRows
from models_integration.cache.recurrent_states import state_tensors
from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.inputs import later_span, step_span
from models_integration.session.segment import Segment
from reference.policies import retain

pytestmark = pytest.mark.law("the-proof-has-teeth")

Patch = pytest.MonkeyPatch


def slots_as_positions(patch: Patch) -> None:
    """The next query stands at the number of slots."""
    patch.setattr(DenseLayer, "get_seq_length", lambda layer: layer.stored_length)


def mask_shifted_by_one(patch: Patch) -> None:
    """Every stored token stands one later than it does, so that no new token sees itself."""
    sizes = DenseLayer.get_mask_sizes

    def shifted(layer: DenseLayer, q: int) -> tuple[int, int]:
        length, offset = sizes(layer, q)
        return length, SlotOffset(offset, StoredRows(layer.rows.kept + 1, layer.rows.seen_at_compaction + 1))

    patch.setattr(DenseLayer, "get_mask_sizes", shifted)


def offset_forgets_positions(patch: Patch) -> None:
    """A logical length without the positions behind it."""
    patch.setattr(DenseLayer, "get_mask_sizes", lambda layer, q: (layer.stored_length + q, layer.evicted))


def offset_forgotten(patch: Patch) -> None:
    """Slots counted from 0: stored tokens look older than they are, which full attention does not notice."""
    patch.setattr(
        DenseLayer, "get_mask_sizes", lambda layer, q: (layer.stored_length + q, SlotOffset(0, StoredRows.none()))
    )


def score_order(patch: Patch) -> None:
    """Tensors gathered best first, positions noted in ascending order."""
    patch.setattr(layers, "slots_of", lambda stored, wanted: torch.searchsorted(stored, wanted).flip(0))


def newest_slots_instead_of_kept_ones(patch: Patch) -> None:
    """The right number of tokens, the wrong tokens."""
    patch.setattr(layers, "slots_of", lambda stored, wanted: torch.arange(len(stored) - len(wanted), len(stored)))


def values_not_gathered_with_keys(patch: Patch) -> None:
    """Keys of the kept tokens beside the first values."""
    follow = DenseLayer.follow

    def wrong(layer: DenseLayer, plan: Plan) -> None:
        assert isinstance(layer.values, Tensor)
        values = layer.values[:, :, : plan.after.kept.shape[1]].clone()
        follow(layer, plan)
        layer.values = values

    patch.setattr(DenseLayer, "follow", wrong)


def last_layer_keeps_other_tokens(patch: Patch) -> None:
    """One layer holds as many tokens as it should, but its newest ones."""
    compact = RetainedCache.compact

    def wrong(cache: RetainedCache, retentions: Any, padding: Any, layers: Any) -> None:
        last = cache.full_layers[-1]
        keys = last.keys
        compact(cache, retentions, padding, layers)
        if cache.layers.index(last) in layers:
            assert isinstance(keys, Tensor)
            last.keys = keys[:, :, -last.stored_length :]

    patch.setattr(RetainedCache, "compact", wrong)


def nothing_evicted(patch: Patch) -> None:
    """The policy decides and the cache does not care: masking nothing equals evicting nothing."""
    patch.setattr(RetainedCache, "compact", lambda *_: None)


def everything_after_the_kept_set_forgotten(patch: Patch) -> None:
    """Decided on all but the last token."""

    def wrong(policy: Any, budget: Any, observation: Any) -> Any:
        retention, records = retain(policy, budget, observation)
        fewer = type(retention).shared(retention.positions[:-1], retention.seen)
        return fewer, records

    for rule in ("crystal_states", "decide_anew"):
        patch.setattr(f"models_integration.cache.{rule}.retain", wrong)


def check_converse() -> None:
    run(partial(converse, policy="crystalcache"))


def check_rows() -> None:
    run(partial(converse_in_rows, policy="crystalcache"))


def check_hidden() -> None:
    check_hidden_token(build("llama"), METHODS["crystalcache"]())


def padding_kept(patch: Patch) -> None:
    """Empty slots count as tokens at position 0."""
    positions = StoredRows.positions
    patch.setattr(StoredRows, "positions", lambda rows, slots: positions(rows, slots).clamp(min=0))


def stale_padding(patch: Patch) -> None:
    """The padding mask is read by slot, as it was before the compaction."""
    by_position = visibility.by_position

    def wrong(pattern: Any, rows: Any, seen: int, q: int, kv: int, padding: Tensor | None, device: Any) -> Any:
        visible = by_position(pattern, rows, seen, q, kv, None, device)
        assert padding is not None
        return lambda row, head, query, slot: visible(row, head, query, slot) & padding[row, slot]

    patch.setattr(visibility, "by_position", wrong)


def rows_share_the_longest(patch: Patch) -> None:
    """All rows are taken to have seen as much as the longest."""
    by_position = visibility.by_position

    def wrong(pattern: Any, rows: StoredRows, *rest: Any) -> Any:
        return by_position(pattern, StoredRows(rows.kept[:1], rows.seen_at_compaction[:1]), *rest)

    patch.setattr(visibility, "by_position", wrong)


def padding_shown_to_the_policy(patch: Patch) -> None:
    """Queries and keys of padding columns take part in S1, as the row's first tokens."""
    views = Recorder.views
    patch.setattr(Recorder, "views", lambda recorder, row, slots, queries: {
        layer: replace(view, q=view.q[:, : int(queries.sum())], k=view.k[:, : int(slots.sum())])
        for layer, view in views(recorder, row).items()
    })


def first_row_for_all(patch: Patch) -> None:
    """Every row is decided on the first row's queries and keys."""
    views = Recorder.views
    patch.setattr(Recorder, "views", lambda recorder, row, slots, queries: views(recorder, 0, slots, queries))


def padding_counted_as_tokens(patch: Patch) -> None:
    """A row's next position is the number of columns."""

    def wrong(layer: DenseLayer, tokens: int) -> Tensor:
        return layer.get_seq_length() + torch.arange(tokens).expand(len(layer.rows.seen_at_compaction), tokens)

    patch.setattr(DenseLayer, "next_positions", wrong)


def padding_forgotten_in_the_gather(patch: Patch) -> None:
    """Positions are taken for columns, so that a padded row keeps other tokens' tensors."""

    def wrong(padding: Tensor) -> StoredRows:
        return StoredRows(torch.empty(len(padding), 0, dtype=torch.int64), 0 * padding)

    patch.setattr(StoredRows, "padded", wrong)


def decided_on_the_last_piece(patch: Patch) -> None:
    """Queries of earlier pieces are forgotten: S1 has the last piece's alone, as often as it takes."""
    record = Recorder.record

    def wrong(recorder: Recorder, module: Any, layer: Any) -> None:
        before = dict(recorder.seen)
        recorder.seen.clear()
        record(recorder, module, layer)
        for index, seen in recorder.seen.items():
            if index in before:
                times = -(-layer.key.shape[2] // seen.q.shape[2])
                seen.q = seen.q.repeat(1, 1, times, 1)[:, :, : layer.key.shape[2]]

    patch.setattr(Recorder, "record", wrong)


def pieces_in_the_wrong_order(patch: Patch) -> None:
    """Later queries come before earlier ones."""
    record = Recorder.record

    def wrong(recorder: Recorder, module: Any, layer: Any) -> None:
        n = layer.query.shape[2]
        record(recorder, module, layer)
        for seen in recorder.seen.values():
            seen.q = seen.q.roll(n, dims=2) if seen.q.shape[2] > n else seen.q

    patch.setattr(Recorder, "record", wrong)


def evicted_before_the_end(patch: Patch) -> None:
    """Of a piece of a prompt only half is kept."""
    read = Segment.read

    def wrong(segment: Segment, ids: Tensor, shown: Tensor) -> None:
        read(segment, ids, shown)
        for layer in segment.cache.full_layers if segment.cache.get_seq_length() else ():
            layer.retain(torch.arange(layer.stored_length // 2))

    patch.setattr(Segment, "read", wrong)


def another_base(patch: Patch) -> None:
    """A binary log-sum-exp."""
    flash = capture_module.flash_attention

    def wrong(*args: Any) -> Any:
        both = flash(*args)
        return None if both is None else (both[0], both[1] / 0.6931471805599453)

    patch.setattr("models_integration.attention.capture.flash_attention", wrong)


def another_kernel(patch: Patch) -> None:
    """The log-sum-exp comes with an output of its own, right but for its last bits."""
    flash = capture_module.flash_attention

    def wrong(*args: Any) -> Any:
        both = flash(*args)
        return None if both is None else (both[0] * (1 + 2**-23), both[1])

    patch.setattr("models_integration.attention.capture.flash_attention", wrong)


def states_evicted_too(patch: Patch) -> None:
    """Eviction clears a channel of each recurrent state."""
    compact = RetainedCache.compact

    def wrong(cache: RetainedCache, *args: Any) -> None:
        compact(cache, *args)
        for layer in cache.layers:
            for state in state_tensors(layer).values():
                state[:, :1] = 0

    patch.setattr(RetainedCache, "compact", wrong)


def states_shared_by_copies(patch: Patch) -> None:
    """Two caches of one prompt write into one state."""
    patch.setattr("models_integration.session.verbs.copy_layers", lambda layers: [copy.copy(one) for one in layers])


def positions_left_to_the_model(patch: Patch) -> None:
    """Bamba counts the tokens of each forward from 0."""
    patch.setattr(
        "models_integration.session.session.later_span", lambda *args: replace(later_span(*args), defaults={})
    )
    patch.setattr(
        "models_integration.session.session.step_span", lambda *args: replace(step_span(*args), defaults={})
    )


def latent_and_rotated_key_exchanged(patch: Patch) -> None:
    """What is kept of a latent takes the place of the rotated key, and the other way about."""
    follow = DenseLayer.follow

    def wrong(layer: DenseLayer, plan: Plan) -> None:
        follow(layer, plan)
        layer.keys, layer.values = layer.values, layer.keys

    patch.setattr(DenseLayer, "follow", wrong)


MUTANTS: dict[Callable[[Patch], None], Callable[[], object]] = {
    slots_as_positions: check_converse,
    mask_shifted_by_one: check_converse,
    offset_forgets_positions: check_hidden,
    offset_forgotten: check_hidden,
    score_order: check_converse,
    newest_slots_instead_of_kept_ones: check_converse,
    values_not_gathered_with_keys: check_converse,
    last_layer_keeps_other_tokens: check_converse,
    nothing_evicted: check_converse,
    everything_after_the_kept_set_forgotten: check_converse,
    padding_kept: check_rows,
    stale_padding: check_rows,
    rows_share_the_longest: check_rows,
    padding_shown_to_the_policy: lambda: check_batch("llama", "crystalcache"),
    first_row_for_all: lambda: check_batch("llama", "crystalcache"),
    padding_counted_as_tokens: check_rows,
    padding_forgotten_in_the_gather: check_rows,
    decided_on_the_last_piece: lambda: check_chunks("llama", (40, 24)),
    pieces_in_the_wrong_order: lambda: check_chunks("llama", (40, 24)),
    evicted_before_the_end: check_converse,
    another_base: lambda: check_lse("llama", torch.float64, 1e-14),
    another_kernel: lambda: check_bits("llama", torch.float32),
    states_evicted_too: lambda: check_stores(build_store("qwen3_next"), "streamingllm"),
    states_shared_by_copies: check_copies,
    positions_left_to_the_model: lambda: check_stores(build_store("bamba"), "streamingllm"),
    latent_and_rotated_key_exchanged: lambda: check_stores(build_store("deepseek_v3"), "streamingllm"),
}


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_killed(mutate: Callable[[Patch], None]) -> None:
    check = MUTANTS[mutate]
    check()
    with Patch.context() as patch, pytest.raises(AssertionError):
        mutate(patch)
        check()
