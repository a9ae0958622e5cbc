"""What an injection is compared with: each arm makes the session that the query is then read in.

The paper's arms (3.4, 3.5) and those that it lacks: CacheBlend (arXiv 2405.16444), LegoLink (EPIC, arXiv 2410.15332),
and full recomputation. Every arm gets the same case, and gives a cache that nobody else holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from models_integration.archive.layer_masks import additive
from models_integration.archive.splice import Chunk, splice
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import LayerRotary, Rotary, frequencies_at, plain_layers
from reference.injection.splicing import SINKS, first_tokens, most_deviating
from spec.errors import SpecError

__all__ = ["ARMS", "Case", "cacheblend", "inject", "legolink", "recompute"]

CHECKED_LAYER = 1


@dataclass(frozen=True)
class Case:
    """A session, the same chunks archived raw and wrapped, and how many tokens the session will still hold."""

    model: PreTrainedModel
    rotary: Rotary
    session: tuple[int, ...]
    raw: tuple[Chunk, ...]
    wrapped: tuple[Chunk, ...]
    prefix: tuple[int, ...] = ()
    """The wrapper's ids before a chunk."""
    room: int = 0


def live(case: Case, tokens: int) -> Rotary:
    """The rotations of the session once it holds so many tokens, and its room."""
    return frequencies_at(case.model, case.rotary, tokens + case.room)


def read(case: Case, ids: Sequence[int]) -> RetainedCache:
    """A new session that has read these ids, with the positions and the mask that it has by default."""
    cache = RetainedCache(case.model.config.get_text_config(decoder=True))
    if ids:
        with torch.no_grad():
            case.model(
                input_ids=torch.tensor([list(ids)], device=case.model.device), **{CACHE: cache}, use_cache=True,
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=case.model.device),
            )
    return cache


def behind(case: Case, ids: Sequence[int], chunks: Sequence[Chunk]) -> RetainedCache:
    """The chunks behind a session that has read these ids."""
    cache = read(case, ids)
    splice(cache, chunks, live(case, len(ids) + sum(len(chunk.visible) for chunk in chunks)))
    return cache


def inject(case: Case) -> RetainedCache:
    """The wrapped chunks, moved to their place: the paper's per_chunk with position math."""
    return behind(case, case.session, case.wrapped)


def inject_raw(case: Case) -> RetainedCache:
    """The raw chunks, moved to their place."""
    return behind(case, case.session, case.raw)


def no_shift(case: Case) -> RetainedCache:
    """The wrapped chunks, whose keys keep the rotation of positions 0, 1, ...: the paper's "naive concat"."""
    still = tuple(
        replace(chunk, rotary=replace(chunk.rotary, layers=(LayerRotary(),) * len(chunk.rotary.layers)))
        for chunk in case.wrapped
    )
    return behind(case, case.session, still)


def prefix(case: Case) -> RetainedCache:
    """The raw chunks behind the wrapper's prefix, which the session reads once: the paper's cond1."""
    return behind(case, case.session + case.prefix, case.raw)


def global_sink(case: Case) -> RetainedCache:
    """The raw chunks behind the session's first four tokens (BOS first) and nothing else of it."""
    return behind(case, case.session[:SINKS], case.raw)


def legolink(case: Case, k: int) -> RetainedCache:
    """The wrapped chunks, the first k tokens of each computed again: they stop being sinks of their own.

    Raises:
        SpecError: for a negative k, or such a token that a compacted chunk does not store.
    """
    chosen = first_tokens(len(case.session), [len(chunk.visible) for chunk in case.wrapped], k)
    return _renewed(case, inject(case), chosen)


def cacheblend(case: Case, r: float) -> RetainedCache:
    """The wrapped chunks, a share r of their tokens computed again: those whose keys in layer 1 deviate most.

    The tokens that are chosen are computed again in every layer. The deviation is read off a full prefill, so that the
    time of this arm says nothing about CacheBlend's.

    Raises:
        SpecError: for a share outside [0, 1], or compacted chunks.
    """
    if any(chunk.kept is not None for chunk in case.wrapped):
        raise SpecError("wrapped", "compacted chunks", "must store all of their tokens: their deviation is compared")
    cache, fresh = inject(case), text_wrapped(case)
    layer = min(CHECKED_LAYER, len(cache.layers) - 1)
    slot = case.rotary.layers[layer].slot or "keys"
    spliced, wanted = (
        getattr(plain_layers(one)[layer], slot)[0, :, len(case.session) :].double().cpu().numpy()
        for one in (cache, fresh)
    )
    return _renewed(case, cache, most_deviating(spliced, wanted, len(case.session), r))


def full_recompute(case: Case) -> RetainedCache:
    """Every spliced token computed again."""
    cache = inject(case)
    return _renewed(case, cache, range(len(case.session), cache.get_seq_length()))


def text(case: Case) -> RetainedCache:
    """The chunks as text behind the session: text retrieval."""
    return read(case, [*case.session, *(token for chunk in case.raw for token in chunk.visible)])


def text_wrapped(case: Case) -> RetainedCache:
    """The chunks as text in their wrappers: what the wrapper does without any injection."""
    return read(case, _wrapped_ids(case))


Arm = Callable[[Case], RetainedCache]

ARMS: Mapping[str, Arm] = {
    "inject": inject, "inject_raw": inject_raw, "no_shift": no_shift, "prefix": prefix, "global_sink": global_sink,
    "legolink_3": partial(legolink, k=3), "cacheblend_15": partial(cacheblend, r=0.15),
    "full_recompute": full_recompute, "text": text, "text_wrapped": text_wrapped,
}


def _wrapped_ids(case: Case) -> list[int]:
    return [*case.session, *(token for chunk in case.wrapped for token in chunk.visible)]


def _renewed(case: Case, cache: RetainedCache, positions: Sequence[int]) -> RetainedCache:
    ids = _wrapped_ids(case)
    recompute(case.model, cache, [ids[position] for position in positions], positions)
    return cache


class _Overwritten(DynamicLayer):  # type: ignore[no-untyped-call]  # the base's __init_subclass__ is untyped
    """New keys and values go to the slots of their tokens, not to the end."""

    def __init__(self, layer: RetainedLayer, slots: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert layer.keys is not None
        assert layer.values is not None
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values, self._slots = layer.keys, layer.values, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Overwrite, and return all that are stored."""
        assert self.keys is not None
        assert self.values is not None
        self.keys = self.keys.index_copy(2, self._slots, key_states)
        self.values = self.values.index_copy(2, self._slots, value_states)
        return self.keys, self.values


def recompute(model: PreTrainedModel, cache: RetainedCache, tokens: Sequence[int], positions: Sequence[int]) -> None:
    """Exchange the keys and values at some positions for those of a forward that sees every stored token before them.

    One forward over these tokens alone; a layer's fresh keys are read by its own later tokens. All tokens of a session
    give its full prefill.

    Args:
        cache: of one row; every layer attends to all that it stores, and stores the same positions.
        tokens: ids at the positions.
        positions: absolute, ascending.

    Raises:
        SpecError: for a cache with sliding windows, or layers that differ, or a position that is not stored; nothing
            has changed then.
    """
    if not positions:
        return
    stored = cache.stored_positions()
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, RetainedLayer) or not torch.equal(layer.stored_positions()[0], stored):
            raise SpecError("cache", f"layer {index}", "must be a full-attention layer that stores what the first does")
    places = torch.tensor(list(positions))
    slots = torch.searchsorted(stored, places)
    if not torch.equal(stored[slots.clamp(max=len(stored) - 1)], places):
        raise SpecError("positions", list(positions), "must be stored")
    device = model.device
    working = DynamicCache()
    working.layers = [_Overwritten(layer, slots.to(device)) for layer in cache.full_layers]
    with torch.no_grad():
        model(
            input_ids=torch.tensor([list(tokens)], device=device), position_ids=places[None].to(device),
            attention_mask=additive((stored <= places[:, None]).to(device), model.dtype),
            **{CACHE: working}, use_cache=True,
        )
    for layer, fresh in zip(cache.full_layers, plain_layers(working), strict=True):
        layer.keys, layer.values = fresh.keys, fresh.values
