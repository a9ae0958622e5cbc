"""Checks that the contents of a saved file are a cache of the model, before the cache is built."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from models_integration.cache.continuation import Pending
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.fixed_size_layers import INDEXER_KEYS, state_tensors
from models_integration.cache.positions import EMPTY, NO_HOLE, StoredRows
from models_integration.cache.ragged_layer import HEADS
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.tensor_file import Damaged
from models_integration.model.architecture import Architecture
from models_integration.model.isolated_forward import isolated_forward, read_tokens
from spec.decode import DecodeState

__all__ = ["check_contents", "check_states_fit"]

MOST = 1 << 40
"""Upper bound of numbers of tokens, numbers of steps and ids."""
HALVES = ("float16", "bfloat16")
"""Dtypes that autocast uses."""
_FRACTION = re.compile(r"[1-9][0-9]{0,399}(/[1-9][0-9]{0,399})?")
_ROWS = {"kept": 2, "seen_at_compaction": 1, "holes": 2}
"""Tensors that describe the positions of a dense layer's slots, with their numbers of dimensions."""
_HEADS = dict(zip(HEADS, (1, 1, 1, 2), strict=True))
"""Tensors that describe the positions of a ragged layer's slots, with their numbers of dimensions."""
_FULL, _SLIDING = ({"evicted"}, {"padded_seen"}), ({"seen"}, {"seen", "first_kept"})
"""Names of a layer's numbers: (dense, ragged) for full attention, (without gap, with gap) for sliding windows."""
_PLACES = {"evicted": _ROWS, "padded_seen": _HEADS, "seen": {}, "first_kept": {"positions": 1}}
"""Tensors that a layer with this number has."""
_STATE = {
    **dict.fromkeys(("positions", "offsets", "indptr", "indices", "ids", "counts"), torch.int64),
    **dict.fromkeys(("impact", "inverse_norms", "trunk_impact", "D", "weights", "tail_inverse_norms"), torch.float64),
}
_NUMBERS = {"fraction", "count", "seen", "step", "mu", "sigma", "tail_ids"}


def check_contents(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Check that a manifest and tensors belong to a cache of the model.

    Raises:
        Damaged: if an entry does not match. The message names the first such entry.
    """
    layers: Sequence[Any] = RetainedCache(architecture.config).layers
    sample = _sample(architecture)
    states = {
        f"{index}.{name}": tensor for index, layer in (*enumerate(sample.layers), *sample.beside.items())
        for name, tensor in state_tensors(layer).items()
    }
    _check_manifest(manifest, layers)
    _check_names(manifest, tensors, states)
    for name, state in states.items():
        shape = (_batch(manifest, tensors), *state.shape[1:])
        if name.endswith(INDEXER_KEYS):
            shape = (shape[0], _slots(int(name.partition(".")[0]), tensors), shape[2])
        _check_tensor(name, tensors[name], shape, str(state.dtype).removeprefix("torch."), None)
    _check_layers(manifest, tensors, layers, sample)
    _check_known(manifest, tensors, architecture.vocabulary)


def check_states_fit(
    states: Sequence[DecodeState], manifest: Mapping[str, Any], tensors: Mapping[str, Tensor],
) -> None:
    """Check that states, pending tokens and chunks describe the first tokens that the cache stores.

    The cache may contain later tokens that were read outside a context.

    Raises:
        Damaged: if the tokens do not match.
    """
    if not states and not manifest["chunks"]:
        return
    index = next(at for at, numbers in enumerate(manifest["layers"]) if "evicted" in numbers)
    rows, batch, slots = _stored_rows(index, tensors), _batch(manifest, tensors), _slots(index, tensors)
    known, seen = manifest["columns"] + _behind(manifest, tensors), slots + manifest["layers"][index]["evicted"]
    _require(known <= seen, f"its states know of {known} tokens, the cache of {seen}")
    positions = rows.positions(slots).expand(batch, -1)
    for row in range(batch):
        expected = list(_known_positions(states[row] if states else None, manifest, tensors))
        stored = positions[row][positions[row] != EMPTY][: len(expected)]
        _require(stored.tolist() == expected, f"row {row}: its state knows of other tokens than the cache stores")


def _sample(architecture: Architecture) -> RetainedCache:
    """Return a cache after three tokens. The tensors show the shapes that the model stores."""
    cache = RetainedCache(architecture.config)
    with isolated_forward(architecture):
        read_tokens(architecture, cache, 3)
    return cache


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Damaged(otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


def _check_manifest(manifest: Mapping[str, Any], layers: Sequence[Any]) -> None:
    lists = ("layers", "states", "chunks", "dtypes")
    _require(all(type(manifest.get(name)) is list for name in lists), f"its manifest lacks one of {', '.join(lists)}")
    _require(_is_count(manifest.get("columns")), f"columns is {manifest.get('columns')!r}, no number of tokens")
    kinds = [kind.value for kind in Pending]
    _require(manifest.get("pending") in kinds, f"pending is {manifest.get('pending')!r}, none of {', '.join(kinds)}")
    _require(type(manifest.get("differ")) is bool, f"differ is {manifest.get('differ')!r}, not whether layers do")
    count = len(manifest["layers"])
    _require(count == len(layers), f"it has {count} layers, the model {len(layers)}")
    for index, (layer, numbers) in enumerate(zip(layers, manifest["layers"], strict=True)):
        name, keys = ("evicted", _FULL) if isinstance(layer, DenseLayer) else ("seen", _SLIDING)
        keys = keys if isinstance(layer, DynamicLayer) else (set(), set())
        fits = type(numbers) is dict and numbers.keys() in keys and all(map(_is_count, numbers.values()))
        _require(fits, f"layer {index} says {numbers!r} and not how many tokens were {name}")
    after, dtypes = manifest["chunks"], manifest["dtypes"]
    _require(all(map(_is_count, after)) and after == sorted(after), f"chunks stand after {after!r}")
    fits = len(dtypes) == 2 and all(one in (manifest["dtype"], *HALVES) for one in dtypes)
    _require(fits, f"keys and values are said to be {dtypes!r}, and the model computes {manifest['dtype']}")


def _check_names(
    manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], states: Mapping[str, Tensor],
) -> None:
    """Check that exactly the expected tensors exist, with the right dimensions and (except keys and values) dtypes."""
    least = len(_STATE) * len(manifest["states"]) + 2 * len(manifest["chunks"])
    _require(least <= len(tensors), f"it has {len(tensors)} tensors, and its states and chunks need {least}")
    expected = dict(_expected(manifest, tensors)) | {name: (one.dtype, one.ndim) for name, one in states.items()}
    wrong = sorted(expected.keys() ^ tensors.keys())
    _require(not wrong, f"tensors are missing or too many: {', '.join(wrong[:4])}")
    for name, (dtype, dimensions) in expected.items():
        tensor = tensors[name]
        _require(tensor.ndim == dimensions, f"{name} has the shape {tuple(tensor.shape)}, not {dimensions} dimensions")
        _require(dtype in (None, tensor.dtype), f"{name} has the dtype {tensor.dtype}, not {dtype}")


def _expected(
    manifest: Mapping[str, Any], tensors: Mapping[str, Tensor],
) -> Iterator[tuple[str, tuple[torch.dtype | None, int]]]:
    for index, numbers in enumerate(manifest["layers"]):
        heads_differ, both = "padded_seen" in numbers, (f"{index}.keys", f"{index}.values")
        if heads_differ or (numbers and any(name in tensors for name in both)):
            yield from ((name, (None, 2 if heads_differ else 4)) for name in both)
        places = [item for number in numbers for item in _PLACES[number].items()]
        yield from ((f"{index}.{name}", (torch.int64, dimensions)) for name, dimensions in places)
    for row in range(len(manifest["states"])):
        yield from ((f"row {row}.{name}", (dtype, 1)) for name, dtype in _STATE.items())
    for at in range(len(manifest["chunks"])):
        yield from ((f"chunk {at}.{name}", (torch.int64, 1)) for name in ("ids", "kept"))
    if "pending" in tensors:
        yield "pending", (torch.int64, 2)


def _stored_rows(index: int, tensors: Mapping[str, Tensor]) -> StoredRows:
    return StoredRows(*(tensors[f"{index}.{name}"] for name in _ROWS))


def _slots(index: int, tensors: Mapping[str, Tensor]) -> int:
    """Return a layer's number of slots (for a ragged layer: of all heads), or 0 for an empty layer."""
    keys = tensors.get(f"{index}.keys")
    return 0 if keys is None else keys.shape[-2]


def _batch(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return the number of rows of the first full-attention layer with tokens, or 0 if all layers are empty."""
    for index, numbers in enumerate(manifest["layers"]):
        if "padded_seen" in numbers:
            return len(tensors[f"{index}.seen"])
        if "evicted" in numbers and f"{index}.keys" in tensors:
            return len(tensors[f"{index}.keys"])
    return 0


def _check_layers(
    manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], layers: Sequence[Any], sample: RetainedCache,
) -> None:
    """Check that the keys and values of all layers belong to the same batch and the same text."""
    batch, columns, tokens, stored = _batch(manifest, tensors), set[int](), list[Tensor](), list[Tensor]()
    _require(batch > 0, "it has no rows")
    for index, (layer, numbers) in enumerate(zip(layers, manifest["layers"], strict=True)):
        if not numbers:
            continue
        read: Any = sample.layers[index]
        heads, widths = read.keys.shape[1], (read.keys.shape[3], read.values.shape[3])
        shape: tuple[int, ...] = (batch, heads, _slots(index, tensors))
        filled = None
        if "evicted" in numbers:
            seen, now, positions = _check_set(index, numbers["evicted"], tensors, batch)
            tokens.append(now)
            stored.append(positions)
            filled = positions != EMPTY
        elif "padded_seen" in numbers:
            seen, shape = numbers["padded_seen"], shape[2:]
            _check_heads(index, seen, tensors, batch, heads)
            tokens.append(tensors[f"{index}.seen"])
        else:
            seen = numbers["seen"]
            _check_window(index, layer.sliding_window, numbers, tensors)
        columns.add(seen)
        for name, d, dtype in zip(("keys", "values"), widths, manifest["dtypes"], strict=True):
            if f"{index}.{name}" in tensors:
                _check_tensor(f"{index}.{name}", tensors[f"{index}.{name}"], (*shape, d), dtype, filled)
    _require(len(columns) == 1 and columns != {0}, f"its layers have seen {sorted(columns)} tokens")
    _require(all(torch.equal(one, tokens[0]) for one in tokens), "its layers have seen different tokens")
    agree = len(stored) == len(tokens) and all(torch.equal(one, stored[0]) for one in stored)
    _require(agree or manifest["differ"], "its layers store different positions")


def _check_set(index: int, evicted: int, tensors: Mapping[str, Tensor], batch: int) -> tuple[int, Tensor, Tensor]:
    """Check a dense layer. Return the columns seen, the number of tokens per row, and the stored positions."""
    rows, slots = _stored_rows(index, tensors), _slots(index, tensors)
    _check_rows(index, rows, slots, slots + evicted, batch)
    return slots + evicted, rows.tokens(slots).expand(batch), rows.positions(slots).expand(batch, -1)


def _check_heads(index: int, seen: int, tensors: Mapping[str, Tensor], batch: int, heads: int) -> None:
    """Check the number of tokens and the positions of each head of a ragged layer."""
    positions, lengths, tokens, holes = (tensors[f"{index}.{name}"] for name in _HEADS)
    _check_rows(index, StoredRows(torch.empty(batch, 0, dtype=torch.int64), tokens, holes), 0, seen, batch)
    slots = _slots(index, tensors)
    fits = lengths.shape == (batch * heads,) and _inside(lengths, slots + 1)
    fits = fits and int(lengths.sum()) == len(positions) == slots
    _require(fits, f"layer {index} has lengths that are not those of {batch * heads} heads in its {slots} slots")
    for segment, part in enumerate(torch.split(positions, lengths.tolist())):
        row, head = divmod(segment, heads)
        where = f"layer {index}, row {row}, head {head}"
        _require(_rises(part, int(tokens[row])), f"{where}: its positions do not rise inside its {tokens[row]} tokens")


def _check_window(index: int, window: int, numbers: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Check that a sliding-window layer stores all tokens that the next query attends to, or some if it has a gap."""
    seen, slots = numbers["seen"], _slots(index, tensors)
    first = max(0, seen - window + 1)
    if "first_kept" not in numbers:
        _require(slots == seen - first, f"layer {index} stores {slots} of the {seen - first} tokens in its window")
        return
    positions, freed = tensors[f"{index}.positions"], numbers["first_kept"]
    fits = len(positions) == slots and _rises(positions - first, seen - first)
    _require(fits, f"layer {index}: its positions do not rise inside its window, [{first}, {seen})")
    _require(freed <= first, f"layer {index} has freed the tokens before {freed}, and its window begins at {first}")


def _rises(positions: Tensor, end: int) -> bool:
    """Return True if positions are strictly ascending inside [0, end)."""
    return bool((positions[1:] > positions[:-1]).all()) and _inside(positions, end)


def _check_rows(index: int, rows: StoredRows, slots: int, columns: int, batch: int) -> None:
    """Check the positions of one layer's slots."""
    kept, seen, holes = rows.kept, rows.seen_at_compaction, rows.holes
    fits = len(kept) in (1, batch) and seen.shape == (len(kept),) and len(holes) in (1, len(kept))
    _require(fits and kept.shape[1] <= slots, f"layer {index} has positions of other rows or slots than its keys")
    for row, (positions, tokens) in enumerate(zip(kept, seen.tolist(), strict=True)):
        tokens_of_row = positions[positions != EMPTY]
        where, rises = f"layer {index}, row {row}", _rises(tokens_of_row, tokens)
        _require(0 <= tokens <= columns and rises, f"{where}: its positions do not rise inside its {tokens} tokens")
        gaps = holes[row if len(holes) > 1 else 0]
        some = gaps[gaps != NO_HOLE]
        _require(bool((gaps[1:] >= gaps[:-1]).all()) and _inside(some, columns + 1), f"{where}: its holes do not rise")
        read = tokens + slots - kept.shape[1] + len(some)
        _require(read <= columns, f"{where}: {read} tokens and holes are more than its {columns} columns")


def _check_tensor(name: str, tensor: Tensor, wanted: tuple[int, ...], dtype: str, filled: Tensor | None) -> None:
    """Check the keys or values of one layer. `filled` (rows, slots) is True for slots with a token."""
    _require(tuple(tensor.shape) == wanted, f"{name} has the shape {tuple(tensor.shape)}, not {wanted}")
    _require(str(tensor.dtype) == f"torch.{dtype}", f"{name} has the dtype {tensor.dtype}, not {dtype}")
    finite = tensor.isfinite()
    if filled is not None:
        finite = finite.all(dim=3).all(dim=1) | ~filled.to(finite.device)
    _require(bool(finite.all()), f"{name} holds NaN or infinity")


def _check_known(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], vocabulary: int) -> None:
    """Check the states, pending tokens and chunks, without the stored tokens."""
    batch, states, chunks = _batch(manifest, tensors), manifest["states"], manifest["chunks"]
    _require(len(states) in (0, batch), f"it has {len(states)} states of {batch} rows")
    _require(not (manifest["differ"] and (states or chunks)), "its layers differ, and states know of one set")
    nothing = manifest["columns"] == 0 and "pending" not in tensors
    _require(bool(states or chunks) or nothing, "it has tokens behind states, and no states")
    for row, numbers in enumerate(states):
        _check_numbers(f"row {row}", numbers, vocabulary)
        _check_ids(f"row {row}.ids", tensors[f"row {row}.ids"], vocabulary)
    if "pending" in tensors:
        shape = tuple(tensors["pending"].shape)
        _require(shape[0] == batch and shape[1] > 0, f"pending has the shape {shape}, of {batch} rows")
        _check_ids("pending", tensors["pending"], vocabulary)
    _require(not chunks or batch == 1, f"it has chunks in {batch} rows")
    for at, after in enumerate(chunks):
        ids, kept = (tensors[f"chunk {at}.{name}"] for name in ("ids", "kept"))
        _check_ids(f"chunk {at}.ids", ids, vocabulary)
        _require(_rises(kept, len(ids)), f"chunk {at} keeps other tokens than its {len(ids)}")
        _require(after <= _pending(tensors), f"chunk {at} stands after {after} of {_pending(tensors)} pending tokens")


def _check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    _require(_inside(ids, vocabulary), f"{name} must lie in [0, {vocabulary})")


def _inside(numbers: Tensor, end: int) -> bool:
    return numbers.numel() == 0 or (int(numbers.min()) >= 0 and int(numbers.max()) < end)


def _check_numbers(row: str, numbers: object, vocabulary: int) -> None:
    """Check the numbers of a state."""
    _require(type(numbers) is dict and numbers.keys() == _NUMBERS, f"{row} must say {', '.join(sorted(_NUMBERS))}")
    assert isinstance(numbers, dict)
    fraction, count, ids = (numbers[name] for name in ("fraction", "count", "tail_ids"))
    by_share = type(fraction) is str and _FRACTION.fullmatch(fraction) is not None and count is None
    by_count = type(count) is int and fraction is None
    _require(by_share or by_count, f"{row}: {fraction!r}, {count!r} is no budget")
    _require(all(_is_count(numbers[name]) for name in ("seen", "step")), f"{row}: seen and step are no numbers")
    finite = all(type(numbers[name]) is float and math.isfinite(numbers[name]) for name in ("mu", "sigma"))
    _require(finite and numbers["sigma"] > 0, f"{row}: mu and sigma are {numbers['mu']!r} and {numbers['sigma']!r}")
    known = type(ids) is list and all(_is_count(one) and one < vocabulary for one in ids)
    _require(known, f"{row}: tail_ids must lie in [0, {vocabulary})")


def _pending(tensors: Mapping[str, Tensor]) -> int:
    return tensors["pending"].shape[1] if "pending" in tensors else 0


def _behind(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return the number of tokens after the states: pending tokens and tokens of chunks."""
    return _pending(tensors) + sum(len(tensors[f"chunk {at}.ids"]) for at in range(len(manifest["chunks"])))


def _known_positions(
    state: DecodeState | None, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor],
) -> Iterable[int]:
    """Return the positions that a row must store first: of the state, then of pending tokens and chunks."""
    at = 0
    if state is not None:
        yield from state.stored.tolist()
        at = state.seen
    chunks = list(enumerate(manifest["chunks"]))
    for place in range(_pending(tensors) + 1):
        while chunks and chunks[0][1] == place:
            number, _ = chunks.pop(0)
            yield from (at + one for one in tensors[f"chunk {number}.kept"].tolist())
            at += len(tensors[f"chunk {number}.ids"])
        if place < _pending(tensors):
            yield at
            at += 1
