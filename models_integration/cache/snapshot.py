"""A compacted cache in one file, with its states: prefill here, decode elsewhere."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.archive.manifest import weights_digest
from models_integration.cache.atomic_file import publish
from models_integration.cache.continuation import Nothing
from models_integration.cache.crystal_states import CrystalStates, Pending, Spliced
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.positions import StoredRows
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.scorer_records import ScorerRecords
from models_integration.cache.tensor_file import parts, read
from models_integration.model.architecture import describe
from spec import SPEC_VERSION
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights, check_state
from spec.errors import SpecError

__all__ = ["load_cache", "packed", "save_cache", "unpacked"]

# What a layer knows of the positions behind its slots.
_ROWS = tuple(field.name for field in fields(StoredRows))
# What of a config decides how keys and values are read, and is in neither the weights nor the rotation.
_CONFIG = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layer_types",
    "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping",
)


def save_cache(cache: RetainedCache, model: PreTrainedModel, path: str | Path) -> None:
    """Write a cache and its rows' states; a reader of the path sees the file of before, or all of this one.

    Args:
        cache: with its tokens; not while a segment is open.
        model: the one that made it.
        path: replaced if it is there.

    Raises:
        SpecError: for a cache that is empty or unusable, or whose layers or heads keep different tokens.
        OSError: from the file system; nothing has changed.
    """
    seen = cache.get_seq_length()
    if seen == 0:
        raise SpecError("cache", "0 tokens", "there is nothing to save")
    if cache.layers_differ or isinstance(cache.continuation, ScorerRecords):
        raise SpecError("cache", "kept sets of layers or heads", "cannot be saved: one kept set for the model can")
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cast(list[Any], cache.layers)):
        tensors |= {f"{index}.keys": layer.keys, f"{index}.values": layer.values}
        if isinstance(layer, RetainedLayer):
            tensors |= {f"{index}.{name}": getattr(layer.rows, name).contiguous() for name in _ROWS}
            layers.append({"evicted": layer.evicted})
        else:
            layers.append({"seen": layer.get_seq_length()})
    known = cache.continuation if isinstance(cache.continuation, CrystalStates) else CrystalStates()
    states = []
    for row, state in enumerate(known.rows):
        numbers, arrays = packed(state)
        tensors |= {f"row {row}.{name}": array for name, array in arrays.items()}
        states.append(numbers)
    if known.pending:
        tensors["pending"] = torch.cat(known.pending, dim=1)
    for at, chunk in enumerate(known.spliced):
        tensors |= {f"chunk {at}.ids": torch.tensor(chunk.token_ids), f"chunk {at}.kept": torch.tensor(chunk.kept)}
    manifest = {
        **_identity(model), "spec": SPEC_VERSION, "layers": layers, "states": states, "columns": known.columns,
        "pending": known.kind.value, "chunks": [chunk.after for chunk in known.spliced],
    }
    publish(Path(path), parts(manifest, tensors))


def load_cache(path: str | Path, model: PreTrainedModel) -> RetainedCache:
    """A saved cache on the model's device, as it was: steps, turns and further saves go on from it.

    Raises:
        SpecError: when the bytes are not those that were saved, or belong to another model, specification or rotation.
        OSError: from the file system.
    """
    path = Path(path)
    manifest, tensors = read(path)
    for name, own in {"spec": SPEC_VERSION, **_identity(model)}.items():
        if manifest[name] != own:
            raise SpecError("path", path.name, f"was saved under {name} {manifest[name]}, this is {own}")
    cache = RetainedCache(describe(model).config)
    made: list[Any] = cache.layers
    for index, (layer, numbers) in enumerate(zip(made, manifest["layers"], strict=True)):
        keys, values = (tensors[f"{index}.{name}"].to(model.device) for name in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, RetainedLayer):
            layer.rows = StoredRows(*(tensors[f"{index}.{name}"] for name in _ROWS))
            layer.evicted = numbers["evicted"]
        else:
            layer.cumulative_length = numbers["seen"]
    rows = tuple(unpacked(numbers, _row(row, tensors)) for row, numbers in enumerate(manifest["states"]))
    spliced = tuple(
        Spliced(after, tensors[f"chunk {at}.ids"].numpy(), tensors[f"chunk {at}.kept"].numpy())
        for at, after in enumerate(manifest["chunks"])
    )
    known = CrystalStates(rows, manifest["columns"], spliced=spliced)
    if "pending" in tensors:
        known = known.read(tensors["pending"].to(model.device), Pending(manifest["pending"]))
    cache.continuation = known if rows or spliced else Nothing()
    return cache


def _identity(model: PreTrainedModel) -> dict[str, str]:
    architecture = describe(model)
    config = {name: getattr(architecture.config, name, None) for name in _CONFIG}
    return {
        "weights": weights_digest(model), "config": _sha([type(model).__name__, config]), "rotation": _rotation(model),
    }


def _rotation(model: PreTrainedModel) -> str:
    """sha256 of the frequencies that the model starts from, and of what its config says of them."""
    config = describe(model).config
    found: list[Any] = [getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)]
    for name, buffer in sorted(model.named_buffers()):
        original = f"{name.removesuffix('inv_freq')}original_inv_freq"
        if name.endswith("inv_freq") and "original" not in name:
            own, _, attribute = name.rpartition(".")
            module: Any = model.get_submodule(own)
            start = getattr(module, original.rpartition(".")[2], buffer)
            scaling = getattr(module, f"{attribute.removesuffix('inv_freq')}attention_scaling", 1.0)
            found.append([name, str(start.dtype), start.double().tolist(), scaling])
    return _sha(found)


def _sha(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def packed(state: DecodeState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A state as JSON numbers and tensors."""
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
    return numbers, {name: torch.tensor(array) for name, array in arrays.items()}


def unpacked(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DecodeState:
    """The state of `packed`, bit for bit.

    Raises:
        SpecError: when no state can be like that.
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


def _row(row: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"row {row}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
