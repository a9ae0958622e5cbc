"""The oracle per layer and head has teeth: each of these mistakes in the storage fails an assertion."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.test_oracle import converse, converse_in_rows, run
from conformance.own.models_integration.session.test_ragged import (
    test_a_2d_mask_hides_positions_in_every_head as check_hidden,
)
from conformance.own.models_integration.session.test_ragged import test_a_quarter_of_the_bytes as check_bytes
from conformance.own.models_integration.session.test_ragged import test_h2o_drops_the_smallest_sum as check_h2o
from conformance.own.models_integration.session.test_ragged import (
    test_tova_drops_the_least_attended_key_of_the_last_query as check_tova,
)
from conformance.own.models_integration.session.test_ragged_turns import check_small_keys_stay
from conformance.own.models_integration.session.test_session_machine import SessionMachine
from models_integration.attention import ragged_attention as attention_module
from models_integration.attention.masks import LayerMasks
from models_integration.cache import positions
from models_integration.cache import ragged_layer as ragged_module
from models_integration.cache import retained_cache as retained_module
from models_integration.cache.positions import StoredRows
from models_integration.cache.ragged_layer import HeadLayout, RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.segment import ObservedSegment

pytestmark = pytest.mark.law("the-proof-has-teeth")

Patch = pytest.MonkeyPatch


def one_mask_for_all_layers(patch: Patch) -> None:
    """Every layer gets the mask of as many slots as it has, but of positions that start at 0."""
    of = LayerMasks.of

    def wrong(masks: LayerMasks, rows: StoredRows, slots: int, seen: int, row: int | None = None) -> Tensor | None:
        return of(masks, StoredRows.none(), slots, slots, row)

    patch.setattr(LayerMasks, "of", wrong)


def new_tokens_see_each_other(patch: Patch) -> None:
    """No mask where the layers differ: a token of a turn sees those after it."""

    def wrong(masks: LayerMasks, rows: StoredRows, slots: int, seen: int, row: int | None = None) -> Tensor:
        return torch.ones(1, 1, masks.sizes["q_length"], slots, dtype=torch.bool)

    patch.setattr(LayerMasks, "of", wrong)


def heads_change_places(patch: Patch) -> None:
    """The first KV head answers the second group's queries."""
    segments_of = RaggedLayer.segments
    patch.setattr(RaggedLayer, "segments", lambda layer: segments_of(layer)[::-1])


def all_heads_keep_the_first_one_s_tokens(patch: Patch) -> None:
    """The right number of tokens in a layer, one kept set."""
    plan_split = RaggedLayer.plan_split.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, layer: Any, kept: Any, padding: Any) -> Callable[[], RaggedLayer]:
        shifted = [[own if head == 0 else heads[0][: len(own)] for head, own in enumerate(heads)] for heads in kept]
        split = plan_split(cls, layer, shifted, padding)

        def apply() -> RaggedLayer:
            made: RaggedLayer = split()
            made.layout = HeadLayout(tuple(own for heads in kept for own in heads))
            return made

        return apply

    patch.setattr(RaggedLayer, "plan_split", classmethod(wrong))


def new_tokens_go_to_one_head(patch: Patch) -> None:
    """The spare slots of the wrong head are written."""
    update = RaggedLayer.update

    def wrong(layer: RaggedLayer, keys: Tensor, values: Tensor, *rest: Any, **others: Any) -> Any:
        return update(layer, keys.flip(1), values.flip(1), *rest, **others)

    patch.setattr(RaggedLayer, "update", wrong)


def spare_slots_are_attended_to(patch: Patch) -> None:
    """A head's storage up to the next head's."""

    def wrong(layer: RaggedLayer) -> Any:
        assert layer.keys is not None
        assert layer.values is not None
        ends = [*layer.layout.starts[1:], len(layer.keys)]
        return [
            (layer.keys[None, None, start:end], layer.values[None, None, start:end])
            for start, end in zip(layer.layout.starts, ends, strict=True)
        ]

    patch.setattr(ragged_module, "_SPARE", 1)
    patch.setattr(RaggedLayer, "segments", wrong)
    patch.setattr(attention_module, "rectangle", lambda layer: None)


def padded_storage(patch: Patch) -> None:
    """Every head has room for as many tokens as the fullest one."""
    compact = RetainedCache.compact

    def wrong(cache: RetainedCache, *rest: Any) -> None:
        compact(cache, *rest)
        for layer in cache.full_layers:
            if isinstance(layer, RaggedLayer):
                assert layer.keys is not None
                assert layer.values is not None
                lengths = layer.layout.lengths
                padded = replace(layer.layout, spare=max(lengths) - min(lengths))
                layer.keys, layer.values = (
                    ragged_module._moved(tensor, layer.layout, padded) for tensor in (layer.keys, layer.values)
                )
                layer.layout = padded

    patch.setattr(RetainedCache, "compact", wrong)


def views_of_the_full_cache(patch: Patch) -> None:
    """The kept slots are views: what was evicted stays alive."""
    flattened = ragged_module._flattened

    def wrong(tensor: Tensor, slots: Any) -> Tensor:
        flat = flattened(tensor, slots)
        return torch.cat([flat, tensor.reshape(-1, tensor.shape[3])])[: len(flat)]

    patch.setattr(ragged_module, "_flattened", wrong)


def steps_forget_the_scaling(patch: Patch) -> None:
    """A step's attention is computed anew, with another scale than the model's."""
    attended = ObservedSegment.attended

    def wrong(observed: ObservedSegment, module: Any, seen: Any) -> None:
        step = observed.later and observed.columns == 1
        attended(observed, module, replace(seen, options={**seen.options, "scaling": 1.0}) if step else seen)

    patch.setattr(ObservedSegment, "attended", wrong)


def steps_decide_by_the_first_head_s_query(patch: Patch) -> None:
    """What a step is shown is the attention of one group only."""
    attended = ObservedSegment.attended

    def wrong(observed: ObservedSegment, module: Any, seen: Any) -> None:
        step = observed.later and observed.columns == 1
        attended(observed, module, replace(seen, query=seen.query[:, :1].expand_as(seen.query)) if step else seen)

    patch.setattr(ObservedSegment, "attended", wrong)


def padding_counts_as_tokens(patch: Patch) -> None:
    """The kept sets of a padded row are counted from the padding's first column."""
    change = retained_module._change

    def wrong(layer: Any, kept: Any, padding: Any) -> Any:
        if padding is not None:
            kept = [
                [torch.unique((own - 1).clamp(min=0)) for own in heads] if int(columns) else heads
                for heads, columns in zip(kept, padding, strict=True)
            ]
        return change(layer, kept, padding)

    patch.setattr(retained_module, "_change", wrong)


def hidden_tokens_are_read_by_slot(patch: Patch) -> None:
    """A 2D mask counts slots of each head."""
    of = LayerMasks.of

    def wrong(masks: LayerMasks, rows: StoredRows, slots: int, seen: int, row: int | None = None) -> Tensor | None:
        assert masks.padding is not None
        shown = masks.padding.clone()
        hidden = int((~shown.bool()).nonzero()[0, 1])
        shown[:] = True
        shown[0, int(rows.kept[0, min(hidden, rows.kept.shape[1] - 1)])] = False
        return of(replace(masks, padding=shown), rows, slots, seen, row)

    patch.setattr(LayerMasks, "of", wrong)


def turns_are_decided_by_another_head(patch: Patch) -> None:
    """A kept set is scored by the keys of the next head, as far as they go."""
    held = RaggedLayer.held

    def wrong(layer: RaggedLayer, row: int, heads: slice) -> tuple[Tensor, Tensor]:
        own, other = held(layer, row, heads), held(layer, row, slice(1 - heads.start, 2 - heads.start))
        n = min(own[0].shape[1], other[0].shape[1])
        return torch.cat([other[0][:, :n], own[0][:, n:]], dim=1), own[1]

    patch.setattr(RaggedLayer, "held", wrong)


def third_run(patch: Patch) -> None:
    """The third of the long runs of slots is copied from one slot early."""

    def wrong(tensor: Tensor, slots: Tensor) -> Tensor:
        ends = [at + 1 for at in range(len(slots) - 1) if slots[at + 1] != slots[at] + 1]
        if len(slots) >= positions._LONG_RUN * (len(ends) + 1) and len(ends) >= 2:
            slots = slots.clone()
            slots[ends[1] : ends[2] if len(ends) > 2 else len(slots)] -= 1
        return tensor.index_select(-2, slots)

    patch.setattr(positions, "_taken", wrong)


def with_long_runs(machine: SessionMachine) -> None:
    machine.set_sizes(1, 64)
    machine.keep(machine.prompt("fullcache", 60), "model", 0.7)


def conversing(policy: str) -> Callable[[], object]:
    return lambda: run(partial(converse, policy=policy))


MUTANTS: dict[Callable[[Patch], None], Callable[[], object]] = {
    one_mask_for_all_layers: conversing("adakv"),
    new_tokens_see_each_other: conversing("chunkkv"),
    heads_change_places: conversing("adakv"),
    all_heads_keep_the_first_one_s_tokens: conversing("snapkv"),
    new_tokens_go_to_one_head: conversing("adakv"),
    spare_slots_are_attended_to: conversing("adakv"),
    padded_storage: lambda: check_bytes("adakv"),
    views_of_the_full_cache: lambda: check_bytes("pyramidkv"),
    steps_forget_the_scaling: check_h2o,
    steps_decide_by_the_first_head_s_query: check_tova,
    padding_counts_as_tokens: lambda: run(partial(converse_in_rows, policy="adakv")),
    hidden_tokens_are_read_by_slot: lambda: check_hidden("adakv"),
    turns_are_decided_by_another_head: check_small_keys_stay,
    third_run: lambda: run(with_long_runs),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mistake_fails_an_assertion(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check = MUTANTS[mutant]
    check()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
