"""Saving and loading of a compacted cache with all states, so that one process reads a prompt and another decodes."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from models_integration.cache.continuation import Continuation, CrystalStates, Pending, ScorerRecords, Spliced
from models_integration.cache.dense_layer import DenseLayer, IndexedLayer
from models_integration.cache.fixed_size_layers import INDEXER_KEYS, GappedSlidingLayer, fill_states, state_tensors
from models_integration.cache.positions import StoredRows
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.snapshot_contents import check_contents, check_states_fit
from models_integration.cache.tensor_file import TENSORS_MOST, Damaged, read, write
from models_integration.model.architecture import Architecture, describe
from models_integration.model.identity import ModelIdentity, identify
from spec import SPEC_VERSION
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights, check_state
from spec.errors import SpecError
from spec.printing import printable
from spec.validate import check_types

__all__ = ["load_cache", "packed", "save_cache", "unpacked"]

FORMAT = "kvspec-cache/3"
LONGEST = 300
"""Longest part of an error that a file states."""

# Fields of a layer that describe the positions of the slots.
_ROWS = tuple(field.name for field in fields(StoredRows))


def save_cache(
    cache: RetainedCache | None, model: PreTrainedModel, path: str | Path, identity: ModelIdentity | None = None,
) -> None:
    """Save a compacted cache to a file.

        kvspec.save_cache(run.cache, model, "document.cache")

    The write is atomic: if the write fails, an old file at `path` is unchanged. If the policy is CrystalCache, the file
    includes the state for later eviction.

    Args:
        cache: a cache with tokens, such as `run.cache` after a prompt. Inside `with run.prompt():` a cache cannot be
            saved.
        model: the model that computed the cache.
        path: file to write. An existing file is replaced.
        identity: `ModelIdentity` of the model. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the cache is empty or unusable, if keys or values are not finite, or if `path` is not a file.
            A cache cannot be saved if the policy evicts in each decoding step, as H2O does.
        OSError: if the file cannot be written. An existing file at `path` is unchanged.
    """
    if cache is None:
        raise SpecError("cache", None, "is empty before a prompt: save run.cache after the model has read one")
    call = "save_cache(run.cache, model, path)"
    check_types(call, cache=(cache, RetainedCache), model=(model, nn.Module), path=(path, (str, Path)))
    path = _file(path)
    seen = cache.get_seq_length()
    if seen == 0:
        raise SpecError("cache", "0 tokens", "a cache without tokens cannot be saved")
    cache.check_kept_positions("saved")
    if isinstance(cache.continuation, ScorerRecords):
        reason = "keeps scores of single tokens, which cannot be saved: use a policy that evicts only after prompts"
        raise SpecError("cache", cache.continuation.policy, f"{reason}, such as snapkv or crystalcache")
    layers, tensors = _packed_layers(cache)
    known = cache.continuation if isinstance(cache.continuation, CrystalStates) else CrystalStates()
    numbers, arrays = _packed_states(known)
    manifest = {
        **_belongs(model, identity), **numbers, "layers": layers, "differ": cache.layers_differ,
        "dtypes": [_dtype(name, tensors) for name in ("keys", "values")],
    }
    tensors |= arrays
    if len(tensors) > TENSORS_MOST:
        raise SpecError("cache", f"{len(tensors)} tensors", f"must have at most {TENSORS_MOST}: save fewer rows")
    try:
        _checked_states(manifest, tensors, describe(model))
    except Damaged as error:
        raise SpecError("cache", f"{seen} tokens", f"cannot be saved: {error}") from error
    write(path, {"format": FORMAT, "manifest": json.dumps(manifest)}, tensors)


def load_cache(path: str | Path, model: PreTrainedModel, identity: ModelIdentity | None = None) -> RetainedCache:
    """Load a saved cache onto the device of the model. You can use the loaded cache like the saved cache.

        cache = kvspec.load_cache("document.cache", model)

    Args:
        path: file that `save_cache` wrote.
        model: the model that computed the cache.
        identity: `ModelIdentity` of the model. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file is missing or damaged, or was saved with a different model, format or specification
            version.
        OSError: if the file cannot be read.
    """
    check_types("load_cache(path, model)", path=(path, (str, Path)), model=(model, nn.Module))
    path, architecture = _file(path), describe(model)
    if not path.exists():
        raise SpecError("path", str(path), "does not exist; kvspec.save_cache(run.cache, model, path) writes the file")
    manifest, tensors = _read(path)
    for name, expected in _belongs(model, identity).items():
        if manifest.get(name) != expected:
            stated = printable(str(manifest.get(name)), LONGEST)
            way = "save the cache again" if name == "spec" else "load the model with which the cache was saved"
            raise SpecError("path", path.name, f"was saved with {name} {stated}, not with {expected}: {way}")
    try:
        states = _checked_states(manifest, tensors, architecture)
    except Damaged as error:
        reason = f"does not contain a cache of this model: {printable(str(error), LONGEST)}"
        raise SpecError("path", path.name, reason) from error
    cache = RetainedCache(architecture.config)
    layers: list[Any] = cache.layers
    groups = _grouped(tensors)
    for index, (layer, numbers) in enumerate(zip(layers, manifest["layers"], strict=True)):
        layers[index] = _unpacked_layer(layer, numbers, groups[f"{index}"], model.device)
    for index, state in cache.beside.items():
        fill_states(state, {name: one.to(model.device) for name, one in groups[f"{index}"].items()})
    cache.continuation = _unpacked_states(states, manifest, tensors, model.device)
    cache.layers_differ = manifest["differ"]
    return cache


def _packed_layers(cache: RetainedCache) -> tuple[list[dict[str, int]], dict[str, Tensor]]:
    """Return the numbers of each layer, and the tensors of all layers by layer and name."""
    layers, tensors = [], dict[str, Tensor]()
    for index, layer in enumerate(cache.layers):
        counts, packed_tensors = _packed_layer(layer)
        packed_tensors |= state_tensors(cache.beside.get(index))
        tensors |= {f"{index}.{name}": tensor for name, tensor in packed_tensors.items()}
        layers.append(counts)
    return layers, tensors


def _packed_states(known: CrystalStates) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return CrystalCache's states of all rows as numbers and tensors, with the pending tokens and chunks."""
    states, tensors = [], dict[str, Tensor]()
    for row, state in enumerate(known.rows):
        numbers, arrays = packed(state)
        tensors |= {f"row {row}.{name}": array for name, array in arrays.items()}
        states.append(numbers)
    if known.pending:
        tensors["pending"] = torch.cat(known.pending, dim=1)
    for at, chunk in enumerate(known.spliced):
        for name, places in (("ids", chunk.token_ids), ("kept", chunk.kept)):
            tensors[f"chunk {at}.{name}"] = torch.tensor(places, device="cpu")
    chunks = [chunk.after for chunk in known.spliced]
    return {"states": states, "columns": known.columns, "pending": known.kind.value, "chunks": chunks}, tensors


def _unpacked_states(
    rows: tuple[DecodeState, ...], manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device,
) -> Continuation:
    """Return the state of the policy from the result of `_packed_states`. It is empty without rows and chunks."""
    spliced = tuple(
        Spliced(after, tensors[f"chunk {at}.ids"].numpy(), tensors[f"chunk {at}.kept"].numpy())
        for at, after in enumerate(manifest["chunks"])
    )
    known = CrystalStates(rows, manifest["columns"], spliced=spliced)
    if "pending" in tensors:
        known = known.read(tensors["pending"].to(device), Pending(manifest["pending"]))
    return known if rows or spliced else Continuation()


def _packed_layer(layer: object) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return a layer as numbers and tensors. An empty or a recurrent layer has neither keys nor values."""
    if isinstance(layer, RaggedLayer):
        return {"padded_seen": layer.padded_seen}, layer.packed()
    if not isinstance(layer, DynamicLayer):
        return {}, state_tensors(layer)
    of_cache = cast(Any, layer)
    tensors = {"keys": of_cache.keys, "values": of_cache.values} if of_cache.is_initialized else {}
    tensors |= state_tensors(layer)
    if isinstance(layer, DenseLayer):
        return {"evicted": layer.evicted}, {
            **tensors, **{name: getattr(layer.rows, name).contiguous() for name in _ROWS},
        }
    seen = {"seen": of_cache.get_seq_length()}
    if isinstance(layer, GappedSlidingLayer):
        return {**seen, "first_kept": layer.first_kept}, {**tensors, "positions": layer.positions}
    return seen, tensors


def _unpacked_layer(
    layer: Any, numbers: Mapping[str, int], tensors: Mapping[str, Tensor], device: torch.device,
) -> object:
    """Return the layer from the result of `_packed_layer`: the new cache's layer, or a layer that replaces it."""
    if not isinstance(layer, DynamicLayer):
        fill_states(layer, {name: tensor.to(device) for name, tensor in tensors.items()})
        return layer
    stored = {name: tensors[name].to(device) for name in ("keys", "values") if name in tensors}
    if "padded_seen" in numbers:
        return RaggedLayer.unpacked({**tensors, **stored}, numbers["padded_seen"])
    if isinstance(layer, DenseLayer):
        layer.rows, layer.evicted = StoredRows(*(tensors[name] for name in _ROWS)), numbers["evicted"]
        if INDEXER_KEYS in tensors:
            cast(IndexedLayer, layer).update_indexer(tensors[INDEXER_KEYS].to(device))
    else:
        if "first_kept" in numbers:
            layer = GappedSlidingLayer(sliding_window=cast(Any, layer).sliding_window)
            layer.positions, layer.first_kept = tensors["positions"], numbers["first_kept"]
        layer.cumulative_length = numbers["seen"]
    if stored:
        layer.lazy_initialization(*stored.values())
        layer.keys, layer.values = stored.values()
    return layer


def _dtype(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype of all keys or all values, which is the dtype in the first layer with tokens."""
    first = next(tensor for whose, tensor in tensors.items() if whose.endswith(f".{name}"))
    return str(first.dtype).removeprefix("torch.")


def _file(path: str | Path) -> Path:
    """Check that a path is a file or does not exist. Opening a FIFO would wait for a different process."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise SpecError("path", str(path), "must be a file, and is a folder, FIFO, socket or device")
    return path


def _belongs(model: PreTrainedModel, identity: ModelIdentity | None) -> dict[str, str]:
    """Return the values that must be equal in a file and in the loading process. Errors report the first difference."""
    return {"spec": SPEC_VERSION, **asdict(identify(model) if identity is None else identity)}


def _checked_states(
    manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], architecture: Architecture,
) -> tuple[DecodeState, ...]:
    """Check that a manifest and tensors belong to a cache of the model, and return the states.

    Raises:
        Damaged: if an entry does not match. The message names the first such entry.
    """
    check_contents(manifest, tensors, architecture)
    try:
        groups = _grouped(tensors)
        states = tuple(unpacked(numbers, groups[f"row {row}"]) for row, numbers in enumerate(manifest["states"]))
    except SpecError as error:
        raise Damaged(str(error)) from error
    check_states_fit(states, manifest, tensors)
    return states


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        metadata, tensors = read(path)
    except Damaged as error:
        raise SpecError("path", path.name, "is damaged: the content differs from the saved content") from error
    if metadata["format"] != FORMAT:
        stated = printable(metadata["format"], LONGEST)
        bound = f"has format {stated}, not {FORMAT}: read the text again and save the new cache"
        raise SpecError("path", path.name, bound)
    try:
        manifest = json.loads(metadata["manifest"])
        if not isinstance(manifest, dict):
            raise ValueError(f"it is a {type(manifest).__name__}")
    except (ValueError, RecursionError) as error:
        raise SpecError("path", path.name, f"must have a readable manifest: {error}") from error
    # The tensors are copied, because a view would keep the whole file in memory.
    return manifest, {name: tensor.clone() for name, tensor in tensors.items()}


def packed(state: DecodeState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state as JSON numbers and tensors."""
    live, W, budget = state.live, state.W, state.budget
    numbers = {
        "fraction": None if budget.fraction is None else str(budget.fraction), "count": budget.count,
        "seen": state.seen, "step": state.step, "mu": state.mu, "sigma": state.sigma,
        "tail_ids": list(state.tail_ids),
    }
    arrays = {
        "positions": live.positions, "offsets": live.offsets, "impact": live.impact,
        "inverse_norms": live.inverse_norms, "trunk_impact": live.trunk_impact, "D": state.D, "indptr": W.indptr,
        "indices": W.indices, "weights": W.weights, "ids": state.ids, "counts": state.counts,
        "tail_inverse_norms": np.array(state.tail_inverse_norms, dtype=np.float64),
    }
    return numbers, {name: torch.tensor(array, device="cpu") for name, array in arrays.items()}


def unpacked(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DecodeState:
    """Return the state from the result of `packed`, bit for bit.

    Raises:
        SpecError: if the numbers and tensors are not a valid state.
    """
    a = {name: tensor.numpy() for name, tensor in tensors.items()}
    fraction = None if numbers["fraction"] is None else Fraction(numbers["fraction"])
    state = DecodeState(
        Budget(fraction, numbers["count"]), numbers["seen"], numbers["step"],
        LiveTrunks(a["positions"], a["offsets"], a["impact"], a["inverse_norms"], a["trunk_impact"]), a["D"],
        TrunkWeights(a["indptr"], a["indices"], a["weights"]), a["ids"], a["counts"], numbers["mu"], numbers["sigma"],
        tuple(numbers["tail_ids"]), tuple(a["tail_inverse_norms"].tolist()),
    )
    check_state(state)
    return state


def _grouped(tensors: Mapping[str, Tensor]) -> defaultdict[str, dict[str, Tensor]]:
    """Return the tensors by the part of the name before the point, such as a layer, and by the rest of the name."""
    groups = defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups[group][rest] = tensor
    return groups
