"""Cache from which tokens can be evicted: tensors and positions of the kept tokens, and number of tokens seen."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from models_integration.cache.compaction import change_of_layer, check_seen, kept_by_layer, sets_agree, shared_changes
from models_integration.cache.continuation import Continuation
from models_integration.cache.dense_layer import DenseLayer, IndexedLayer, RetainedLayer, drop_tensors
from models_integration.cache.fixed_size_layers import (
    StatefulCache,
    check_window_crop,
    crop_window,
    fresh_layer,
    is_recurrent,
    state_tensors,
)
from models_integration.cache.history import ReadIds, call_into
from models_integration.cache.positions import LayersDiffer, check_row_count, chosen_rows
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.renumbering import LayerNumbering, Numbering
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["RetainedCache", "check_cache", "failing_whole", "storage_bytes"]


class RetainedCache(StatefulCache):
    """Cache of a session: a DynamicCache that can evict tokens from its full-attention layers.

        model(input_ids=next_token, cache=run.cache)    # past_key_values before transformers 5.24

    No tokens are evicted from sliding-window layers and recurrent layers. Outside `with policy(model)` no token is
    evicted, and you do not need to pass position ids or masks. If you pass a 2D attention mask, the mask needs a column
    for each token seen, including evicted tokens. If rows, layers or heads store different positions, the model can use
    the cache only inside `with policy(model)`.

    Args:
        config: config of the model. For a model that also accepts images, pass the text config.

    Attributes:
        failure: reason why the cache can no longer be used, or None.
        layers_differ: True if layers or heads store different positions.
        continuation: state of the policy for later evictions.
        bytes_freed: bytes of keys and values that eviction has freed so far.
        numbering: numbering of renumbered positions. If None, each key has the rotary position of the text.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer or index in self.beside:
                self.layers[index] = DenseLayer()
            elif type(layer) is DynamicIndexedLayer:
                self.layers[index] = IndexedLayer()
        self.failure: str | None = None
        self.layers_differ = False
        self.continuation: Continuation = Continuation()
        self.bytes_freed = 0
        self.numbering: Numbering | None = None
        self._read = ReadIds()
        self._call: object = None  # config of the last `generate` that used the cache; each call has a new config
        self._in_context = False

    @property
    def full_layers(self) -> list[RetainedLayer]:
        """Layers from which tokens can be evicted, one for each full-attention layer of the model."""
        return [layer for layer in self.layers if isinstance(layer, RetainedLayer)]

    @property
    def stored_length(self) -> int:
        """Number of token slots in the first full-attention layer."""
        return self.full_layers[0].stored_length

    @property
    def uniform(self) -> bool:
        """True if all rows, layers and heads store the same positions."""
        return not self.layers_differ and self.full_layers[0].uniform

    @property
    def mean_length(self) -> float:
        """Mean number of token slots per KV head in the full-attention layers."""
        return sum(layer.mean_length for layer in self.full_layers) / len(self.full_layers)

    def stored_positions(self, row: int = 0) -> Tensor:
        """Return the absolute positions of the tokens that one row stores, in ascending order, (stored,).

        If layers or heads store different positions, the result is for KV head 0 of the first full-attention layer. For
        a different head, call `full_layers[i].head_positions(row, head)`.
        """
        return self.full_layers[0].head_positions(row, 0)

    def keys_of(self, i: int) -> Tensor:
        """Return the stored keys of the i-th full-attention layer, (rows, H_kv, stored, d)."""
        return cast(Tensor, self.full_layers[i].keys)

    @property
    def tokens(self) -> Tensor:
        """Number of tokens that each row has seen, (rows,). If the number is equal in all rows, the shape is (1,)."""
        return self.full_layers[0].next_positions(1)[:, 0]

    @property
    def is_token(self) -> Tensor:
        """Mask that is True for tokens and False for padding, (rows, columns), or (1, columns) for equal rows."""
        return self.full_layers[0].rows.is_token(self.get_seq_length(), self.tokens)

    @property
    def nbytes(self) -> int:
        """Size of the cache in bytes: keys, values, turned copies of keys, and recurrent states."""
        return storage_bytes([*self.layers, *self.beside.values(), *(layer.turned for layer in self.full_layers)])

    @property
    def state_bytes(self) -> int:
        """Size of the recurrent states in bytes. `nbytes` includes the recurrent states, which eviction cannot free."""
        return storage_bytes(self.recurrent)

    def note_ids(self, ids: Tensor) -> None:
        """Record the token ids that the model has just processed, (rows, n)."""
        self._read = self._read.extended(self.get_seq_length() - ids.shape[1], ids)

    def check_history(self) -> None:
        """Check that the prompt passed to `generate` begins with the tokens that the cache has seen.

        Raises:
            SpecError: if a token of the prompt differs.
        """
        call = call_into(self)
        if call is not None and call["generation_config"] is not self._call:
            if self.get_seq_length() > 0:
                self._read.check_call(call, self.is_token)
            self._call = call["generation_config"]

    def expect(self, is_token: Tensor) -> None:
        """Record the mask of the next columns, (rows, n), which is True for tokens and False for padding."""
        for layer in self.full_layers:
            layer.expect(is_token)

    def free_padding(self) -> None:
        """Free the slots of padding columns in layers whose heads store different tokens."""
        for layer in self.full_layers:
            if isinstance(layer, RaggedLayer):
                layer.free_padding()

    def step_inputs(self, tokens: int, device: torch.device) -> dict[str, Tensor]:
        """Return position ids and a 2D mask for the next tokens of padded rows.

        If transformers computes correct position ids and masks by default, return an empty dictionary.
        """
        first = self.full_layers[0]
        if first.uniform:
            return {}
        is_token = torch.nn.functional.pad(self.is_token.expand(first.batch, -1), (0, tokens), value=True)
        positions = first.next_positions(tokens)
        here, mask = positions.to(device, non_blocking=True), is_token.to(device, torch.int64, non_blocking=True)
        return {"position_ids": here, "attention_mask": mask}

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """Context manager inside which kvspec makes the attention masks for the cache."""
        self._in_context = True
        try:
            yield
        finally:
            self._in_context = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, including evicted tokens."""
        self.check_usable()
        layer = self.layers[layer_idx]
        return (layer if isinstance(layer, RetainedLayer) else self.full_layers[0]).get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and the offset of the attention mask of a layer.

        Raises:
            SpecError: if rows store different positions and the call is outside `with policy(model)`, or if the prompt
                does not begin with the tokens seen.
        """
        self.check_usable()
        if not self._in_context and not self.full_layers[0].uniform:
            raise SpecError("past_key_values", "rows that differ", "can be used only inside `with policy(model)`")
        if not self._in_context and self.numbering is not None and self.numbering.base:
            raise SpecError("past_key_values", "a renumbered stream", "can be used only inside `with policy(model)`")
        if not torch.compiler.is_compiling():
            self.check_history()
        if not isinstance(self.layers[layer_idx], CacheLayerMixin):
            layer_idx = self.layers.index(self.full_layers[0])
        if self.layers_differ and isinstance(self.layers[layer_idx], RetainedLayer):
            return self.get_seq_length() + query_length, LayersDiffer()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, and return all stored keys and values."""
        self.check_usable()
        if self.layers_differ and not self._in_context:
            raise SpecError("past_key_values", "layers that differ", "can be used only inside `with policy(model)`")
        layer = self.layers[layer_idx]
        if (keys := getattr(layer, "keys", None)) is not None and keys.ndim == key_states.ndim and len(keys):
            check_row_count(len(keys), (len(key_states), key_states.shape[2]))
        stored: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.numbering is None or not isinstance(layer, RetainedLayer) or layer_idx not in self.numbering.layers:
            return stored
        layer.numbering = LayerNumbering(self.numbering, self.numbering.layers[layer_idx])
        # Attention over heads that store different tokens turns the keys itself (attention/cached_attention.py).
        return layer.attended() if isinstance(layer, DenseLayer) else stored

    def renumber(self, tokens: int, limit: int) -> int:
        """Prepare the rotary positions of a forward pass of `tokens` columns, and return the base of these positions.

        The base stays if rows have different lengths, or if the model has sliding-window layers. It also stays if the
        number `limit` of the model's positions is 0 (unknown).
        """
        if self.numbering is None:
            return 0
        seen, alike = self.get_seq_length(), len(self.full_layers) == len(self.layers)
        if limit and seen and alike and self.full_layers[0].uniform:
            longest = max(layer.stored_length for layer in self.full_layers)
            self.numbering = self.numbering.before(seen, longest, tokens, limit)
        return self.numbering.base

    def check_kept_positions(self, verb: str) -> None:
        """Check that the cache does not have renumbered positions.

        Raises:
            SpecError: if it does.
        """
        if self.numbering is not None:
            reason = f"cannot be {verb}: make the policy with positions='kept'"
            raise SpecError("positions", "renumbered", reason)

    def compact(
        self, retentions: Sequence[Retention], padding: Tensor | None = None, layers: Iterable[int] | None = None,
    ) -> None:
        """Evict all tokens that are not in the sets of kept tokens. If every token is kept, no tensor is changed.

        Args:
            retentions: sets of kept tokens for `layers`, with one entry for each row or one entry for all rows.
            padding: number of padding columns on the left of each row of a first prompt, (rows,).
            layers: indices of the layers to compact. Default: all full-attention layers.

        Raises:
            SpecError: if a set of kept tokens does not match the tokens, layers or heads of the cache. The cache is
                unchanged.
        """
        full = {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, RetainedLayer)}
        chosen = full if layers is None else {index: full[index] for index in layers}
        first = next(iter((chosen or full).values()))
        check_seen(first, retentions, padding)
        if not self.layers_differ and all(one.granularity is Granularity.MODEL for one in retentions):
            changes, differ = shared_changes(chosen, retentions, padding), False
        else:
            kept = [kept_by_layer(retention, tuple(full), tuple(chosen), first.heads) for retention in retentions]
            changes = {
                index: change_of_layer(layer, [one[index] for one in kept], padding) for index, layer in chosen.items()
            }
            differ = any(not sets_agree(positions for sets in one.values() for positions in sets) for one in kept)
        before = storage_bytes(chosen.values())
        with failing_whole(self):
            for index, change in changes.items():
                self.layers[index] = change()
        self.bytes_freed += before - storage_bytes(self.layers[index] for index in changes)
        self.layers_differ |= differ

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row i by row beam_idx[i].

        Raises:
            SpecError: if an index does not name a row of the cache. The cache is unchanged.
        """
        self._choose("beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times.

        Raises:
            SpecError: if `repeats` is less than 1. The cache is unchanged.
        """
        if repeats < 1:
            raise SpecError("repeats", repeats, "must be at least 1")
        if self.get_seq_length():
            self._choose("repeats", torch.arange(self.full_layers[0].batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows of the batch that `indices` selects, either by row numbers or by a mask.

        Raises:
            SpecError: if an index does not name a row of the cache. The cache is unchanged.
        """
        self._choose("indices", indices)

    def _choose(self, argument: str, indices: Tensor) -> None:
        if self.get_seq_length():
            rows = chosen_rows(argument, indices, self.full_layers[0].batch)
            with failing_whole(self, "a choice of rows failed half way"):
                super().reorder_cache(cast(torch.LongTensor, rows))
                self.continuation, self._read = self.continuation.select(rows), self._read.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens that the cache has seen. If `tokens_to_remove` is -3, three tokens are removed.

        If the state of the policy includes a removed token, the state is deleted. If the state is deleted, the next
        eviction raises `SpecError`.

        Raises:
            SpecError: if a layer cannot remove tokens, such as a recurrent layer, or a sliding-window layer that has
                freed tokens. The cache is unchanged.
        """
        if self.numbering is not None and self.numbering.base:
            self.check_kept_positions("cropped after its positions began again")
        if self.recurrent and tokens_to_remove:
            reason = "recurrent layers cannot remove a token from the states: process the text with a new cache"
            raise SpecError("tokens_to_remove", tokens_to_remove, reason)
        sliding = [layer for layer in self.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        for layer in self.full_layers:
            layer.check_crop(tokens_to_remove)
        for window in sliding:
            check_window_crop(window, tokens_to_remove)
        with failing_whole(self, "a crop failed half way"):
            for layer in self.full_layers:
                layer.crop(tokens_to_remove)
            for window in sliding:
                crop_window(window, tokens_to_remove)
            self.continuation = self.continuation.crop(-tokens_to_remove)
            self._read = self._read.first(self.get_seq_length())

    def reset(self) -> None:
        """Remove all tokens, so that the cache can be used for a new prompt."""
        for index, layer in enumerate(self.layers):
            # Caches may share tensors, and `reset` of a recurrent layer zeroes its tensors (transformers 5.24).
            if is_recurrent(layer):
                self.layers[index] = fresh_layer(layer)
                continue
            drop_tensors(layer)
            layer.reset()
            if isinstance(layer, RaggedLayer):
                self.layers[index] = DenseLayer()
        self.beside = {index: fresh_layer(layer) for index, layer in self.beside.items()}
        self.layers_differ, self.continuation, self._read = False, Continuation(), ReadIds()

    def fail(self, reason: str) -> None:
        """Remove all tokens. Any later use of the cache raises a `SpecError` that has `reason` as its message."""
        self.reset()
        self.failure = reason

    def check_usable(self) -> None:
        """Check that the cache can still be used.

        Raises:
            SpecError: if an earlier failure has made the cache unusable.
        """
        if self.failure is not None:
            raise SpecError("past_key_values", "an unusable cache", f"{self.failure}; start again with a new one")


def check_cache(cache: object) -> None:
    """Check that a cache that a caller passes is a RetainedCache.

    Raises:
        SpecError: if the cache is of a different class. The session cannot evict tokens from such a cache.
    """
    if not isinstance(cache, RetainedCache):
        raise SpecError(
            "past_key_values", type(cache).__name__,
            "must be a RetainedCache: leave out past_key_values for a new prompt, or pass run.cache for a later turn",
        )


@contextmanager
def failing_whole(cache: RetainedCache, reason: str = "a compaction failed half way") -> Iterator[None]:
    """Context manager that empties the cache after an error, because an error can leave only some layers changed."""
    try:
        yield
    except BaseException:
        cache.fail(reason)
        raise


def storage_bytes(layers: Iterable[object]) -> int:
    """Return the number of bytes of the tensors of cache layers. Each memory block is counted once."""
    blocks = {}
    for layer in layers:
        attended = (getattr(layer, "keys", None), getattr(layer, "values", None))
        for tensor in (*attended, *state_tensors(layer).values()):
            if isinstance(tensor, Tensor):
                block = tensor.untyped_storage()
                blocks[block.data_ptr()] = block.nbytes()
    return sum(blocks.values())
