"""Calibration of a model: query statistics for TriAttention, head scores for KVzip, and filters for Q-Filters.

kvspec also reads and writes the statistics of TriAttention (.pt). It reads the head patterns of DuoAttention (.tsv),
and the files of Q-Filters, Expected Attention, KVzap and Fast KVzip (.safetensors).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import AttentionInputs, Watcher, observing
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, describe, restored_rotation
from models_integration.model.cache_argument import cache_name
from models_integration.model.identity import ModelIdentity
from models_integration.model.layer_kinds import layer_config_value, layer_types
from models_integration.policies.networks import has_learned_scores, read_gates, read_networks
from models_integration.policies.served import heads_served_by, served_by
from models_integration.policies.tensor_files import STATISTICS, filters_of, load_tensors, statistics_of
from models_integration.policies.torch_files import load_torch_file
from models_integration.session.inputs import check_ids, check_input_ids
from models_integration.session.verbs import observe
from reference.calibration import Calibration, Identity, load_calibration
from reference.policies.attention import unrotated
from reference.policies.expected_attention import query_statistics
from reference.policies.kvzip import kvzip
from reference.policies.kvzip_heads import head_scores
from reference.policies.qfilters import query_filters
from reference.triattention import band_statistics
from spec.arrays import Cube, Float64, Matrix, Vector
from spec.errors import SpecError
from spec.files import decode_text, read_file
from spec.policy import Policy

__all__ = [
    "calibrate", "check_calibration_length", "given_calibration", "is_published_file", "read_head_pattern",
    "read_published", "read_statistics", "read_tensors", "served_by", "write_statistics",
]

LEAST_TOKENS = 256
"""Smallest number of tokens of a calibration.

Measured on the pocket model (three texts each, budget 0.3, a prompt of 600 tokens): with a calibration from 16, 64,
128, 256 and 1024 tokens, triattention keeps 67, 70, 72, 77 and 75 % of the tokens that triattention keeps with a
calibration from 2048 tokens of a different text.
"""
PARTS = ("q_mean_real", "q_mean_imag", "q_abs_mean")
INSTEAD = "run `kvspec calibrate some-text.txt` with the same --model instead"


def check_calibration_length(argument: str, tokens: int) -> None:
    """Check that a text has enough tokens for a calibration.

    Raises:
        SpecError: if the text has fewer than LEAST_TOKENS tokens.
    """
    if tokens < LEAST_TOKENS:
        reason = (
            f"must be at least {LEAST_TOKENS} tokens, because fewer tokens give means that depend on the choice of the"
            " text; give a longer text"
        )
        raise SpecError(argument, f"{tokens} tokens", reason)


def calibrate(
    model: PreTrainedModel, input_ids: Tensor, identity: ModelIdentity | None = None,
    template: Sequence[Sequence[int]] | None = None, *, covariance: bool = False,
) -> Calibration:
    """Measure a model, and return the calibration that `triattention`, `q-filters` and `kvzip-heads` need.

        calibration = kvspec.calibrate(model, input_ids, template=kvspec.repeat_template(tokenizer))
        policy = kvspec.policy_from_name("triattention", 0.3, calibration=calibration)

    To save the result in the format of `kvspec calibrate`, call
    path)`.

    Args:
        model: a causal language model.
        input_ids: token ids of a text, (1, n), with n at least 256. Any text in a language of the model is suitable.
        identity: `ModelIdentity` of the model. Default: the identity is computed from all parameters of the model.
        template: `repeat_template(tokenizer)`. If `template` is given, the head scores of `kvzip-heads` are also
            measured.
        covariance: if True, the covariance of the queries is also measured, which `expected-attention-stats` needs. A
            calibration of a model with 32 layers of 32 heads with 128 channels then has 134 MB more.

    Returns:
        Filters, and statistics of the queries before rotary embedding. If `template` is given, the result also has head
        scores.

    Raises:
        SpecError: if `input_ids` does not have one row of at least 256 tokens. The error is also raised if no template
            is given and kvspec does not support the rotary embedding of the model.
    """
    if len(check_input_ids(input_ids)) != 1:
        raise SpecError("input_ids", tuple(input_ids.shape), "must be one row of token ids")
    check_calibration_length("input_ids", input_ids.shape[1])
    check_ids(describe(model).vocabulary, input_ids)
    served = (served_by if template is None else heads_served_by)(model, identity)
    taken = _statistics(describe(model), served, input_ids, covariance)
    if template is None:
        return taken
    head_scores = _head_scores(model, input_ids, kvzip(template))
    return replace(taken, head_scores=head_scores.reshape(len(taken.layers), -1))


def _statistics(
    architecture: Architecture, served: Identity, input_ids: Tensor, covariance: bool,
) -> Calibration:
    """Return filters and statistics of the queries of a text. Statistics need a supported rotation."""
    statistics, cache = _Statistics(served, covariance), RetainedCache(architecture.config)
    with (
        torch.no_grad(), restored_rotation(architecture.decoder),
        observing(architecture, cache, statistics, architecture.full_layers),
    ):
        architecture.decoder(input_ids=input_ids, use_cache=True, **{cache_name(architecture.decoder): cache})
    return statistics.calibration(architecture)


def _head_scores(model: PreTrainedModel, input_ids: Tensor, host: Policy) -> Float64[Vector, " g"]:
    with restored_rotation(model):
        observed = observe(model, input_ids, needs=host.scorer.needs)
    scores = host.scorer(observed.prompt(0, host.granularity), host.protection(input_ids.shape[1]))
    return head_scores([scores.values])


@dataclass
class _Statistics(Watcher):
    """Compute the means of the queries of each layer during attention, without storing the queries."""

    identity: Identity
    wants_covariance: bool = False
    layers: dict[int, list[tuple[Matrix, Matrix]]] = field(default_factory=dict)
    filters: dict[int, Matrix] = field(default_factory=dict)
    covariance: dict[int, list[Cube]] = field(default_factory=dict)

    def attended(self, module: nn.Module, seen: AttentionInputs) -> None:
        self.covariance[seen.layer] = []
        self.layers[seen.layer] = [self.head(one, seen.layer) for one in seen.query[0]]
        self.filters[seen.layer] = query_filters(seen.query[0].detach().double().cpu().numpy(), seen.key.shape[1])

    def head(self, q: Tensor, layer: int) -> tuple[Float64[Matrix, "1 d"], Float64[Matrix, "1 half"]]:
        wide = q.detach().double().cpu().numpy()[None]
        if not len(self.identity.inv_freq):
            return wide[:, 0, :0], wide[:, 0, :0]
        bare = unrotated(wide, np.arange(wide.shape[1]), self.identity.inv_freq, self.identity.factor)
        if self.wants_covariance:
            self.covariance[layer].append(query_statistics(bare)[1])
        return band_statistics(bare)

    def calibration(self, architecture: Architecture) -> Calibration:
        mean, magnitude = (
            np.stack([np.concatenate([head[part] for head in self.layers[at]]) for at in architecture.full_layers])
            for part in (0, 1)
        )
        filters = np.stack([self.filters[at] for at in architecture.full_layers])
        spreads = [np.concatenate(heads) for layer in architecture.full_layers if (heads := self.covariance[layer])]
        covariance = np.stack(spreads) if spreads else None
        return Calibration(
            self.identity, architecture.full_layers, mean, magnitude, filters=filters, covariance=covariance,
        )


def read_statistics(
    path: str | PathLike[str], model: PreTrainedModel, identity: ModelIdentity | None = None,
) -> Calibration:
    """Read statistics in the format of TriAttention's repository. TensorRT-LLM also reads this format.

        policy = kvspec.policy_from_name("triattention", 0.3, calibration="stats.pt")
        calibration = read_statistics("stats.pt", model)

    The file has neither a hash of the weights nor frequencies. Therefore kvspec cannot check whether the file was made
    with the given model. Code in the file is not executed. Statistics of layers with a sliding window are not used.

    Args:
        path: path of the .pt file.
        model: model that the statistics were measured on.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file has a different format, or if the rotation of the model is not supported. Also if the
            heads, shapes or rotary style of the file differ from the model.
    """
    architecture, name = describe(model), str(path)
    metadata, stats = _payload(path)
    style = metadata.get("rope_style")
    if not (isinstance(style, str) and style == "half"):
        shown = style if isinstance(style, str) or style is None else type(style).__name__
        raise SpecError("rope_style", shown, f"in {name} must be 'half'; {INSTEAD}")
    served, layers = served_by(model, identity), architecture.full_layers
    H = layer_config_value(architecture.config, "num_attention_heads", layers[0])
    half = len(served.inv_freq)
    if other := [type(key).__name__ for key in stats if not isinstance(key, str)]:
        raise SpecError("stats", other[0], f"in {name} must have only keys such as {_key(0, 0)!r}; {INSTEAD}")
    if unknown := sorted(stats.keys() - _keys(range(len(layer_types(architecture.config))), H)):
        raise SpecError("stats", unknown[0], f"in {name} is a head that the model does not have; {INSTEAD}")
    rows = [[_head(stats, key, half, name) for key in _keys((layer,), H)] for layer in layers]
    real, imaginary, magnitude = np.moveaxis(np.array(rows), 2, 0)
    return Calibration(served, layers, np.concatenate([real, imaginary], axis=2), magnitude)


def write_statistics(calibration: Calibration, file: str | PathLike[str] | IO[bytes]) -> None:
    """Write statistics in the format of TriAttention's repository: float32, without the hash of the model.

    Args:
        calibration: calibration with statistics of queries. Head scores and filters are not written.
        file: path, or file object that is open for writing bytes.

    Raises:
        SpecError: if the calibration has no query statistics.
    """
    L, H, d = calibration.mean.shape
    if not calibration.magnitude.shape[2]:
        raise SpecError("calibration", calibration.digest, "has no query statistics; calibrate with a text")
    half, pairs = d // 2, [(layer, head) for layer in range(L) for head in range(H)]
    rows = np.concatenate([calibration.mean, calibration.magnitude], axis=2).astype(np.float32)
    stats = {
        _key(calibration.layers[layer], head): {
            part: torch.tensor(rows[layer, head, at * half : (at + 1) * half]) for at, part in enumerate(PARTS)
        } for layer, head in pairs
    }
    metadata = {
        "head_dim": d, "rope_style": "half", "model_name": calibration.identity.model,
        "sampled_heads": [[calibration.layers[layer], head] for layer, head in pairs],
    }
    torch.save({"metadata": metadata, "stats": stats}, file)


def read_head_pattern(
    path: str | PathLike[str], model: PreTrainedModel, threshold: float | None = None,
    identity: ModelIdentity | None = None,
) -> Calibration:
    """Read DuoAttention's `full_attention_heads.tsv` as head scores for `kvzip-heads`.

        calibration = read_head_pattern("full_attention_heads.tsv", model)
        policy = kvspec.policy_from_name("kvzip-heads", 0.5, calibration=calibration, N_sink=64, N_recent=256)

    The heads with the highest values keep all tokens. The budget determines the number of these heads. DuoAttention
    stores the numbers of sinks and recent tokens in `config.json`, in the folder of the .tsv file.

    Args:
        path: path of the .tsv file, which has one line for each layer. A line has one number for each KV head,
            separated by tabs.
        model: model that the pattern was measured on.
        threshold: number in [0, 1]. Smaller values become 0, and all other values become 1. Default: values are not
            changed.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file does not have one finite number for each layer and KV head, or if the threshold is not in
            [0, 1].
    """
    if threshold is not None and not 0 <= threshold <= 1:
        raise SpecError("threshold", threshold, "must be between 0 and 1")
    architecture = describe(model)
    served, layers = heads_served_by(model, identity), architecture.full_layers
    table = np.clip(_table(Path(path), architecture), 0.0, 1.0)
    values = table[list(layers)] if threshold is None else (table[list(layers)] >= threshold).astype(np.float64)
    H = layer_config_value(architecture.config, "num_attention_heads", layers[0])
    nothing = np.empty((len(layers), H, 0))
    return Calibration(served, layers, nothing, nothing, values)


def read_tensors(
    path: str | PathLike[str], model: PreTrainedModel, identity: ModelIdentity | None = None,
) -> Calibration:
    """Read a .safetensors file: filters of Q-Filters, or query statistics of Expected Attention.

        policy = kvspec.policy_from_name("q-filters", 0.3, calibration="model.safetensors")

    The authors publish such files for some models, and kvpress reads these files. The tensor `q_filters` has one filter
    for each layer and KV head, whose sign kvspec changes. The tensors `query_mean` and `query_cov` have the mean and
    the covariance of the queries before RoPE. The file has no hash of the weights. Therefore kvspec cannot check
    whether the file was made with the given model.

    Args:
        path: path of the .safetensors file.
        model: model that the file was made with.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if the file has none of these tensors, or if a shape does not fit the model. Also if the statistics
            are for a rotation that is not supported.
    """
    architecture, tensors = describe(model), load_tensors(path)
    layers = architecture.full_layers
    H = layer_config_value(architecture.config, "num_attention_heads", layers[0])
    nothing = np.empty((len(layers), H, 0))
    if not set(STATISTICS) & set(tensors):
        filters, served = filters_of(tensors, architecture), heads_served_by(model, identity)
        return Calibration(served, layers, nothing, nothing, filters=filters)
    served = served_by(model, identity)
    mean, covariance = statistics_of(tensors, architecture, 2 * len(served.inv_freq))
    return Calibration(served, layers, mean, nothing, covariance=covariance)


def is_published_file(given: object) -> bool:
    """Return True for the path of a calibration file of another project, by the suffix (see `read_published`)."""
    return isinstance(given, str | PathLike) and Path(given).suffix in _READERS


def read_published(path: Any, model: PreTrainedModel, identity: ModelIdentity | None = None) -> Calibration:
    """Read a calibration file of another project, by the suffix of the path.

    Raises:
        SpecError: as in `read_statistics`, `read_head_pattern`, `read_tensors`, `read_networks` and `read_gates`.
    """
    return _READERS[Path(path).suffix](path, model, identity=identity)


def _read_tensors(path: Any, model: PreTrainedModel, identity: ModelIdentity | None = None) -> Calibration:
    for prefix, read in (("layers.", read_networks), ("gates.", read_gates)):
        if has_learned_scores(path, prefix):
            return read(path, model, identity)
    return read_tensors(path, model, identity)


_READERS: Mapping[str, Callable[..., Calibration]] = {
    ".pt": read_statistics, ".tsv": read_head_pattern, ".safetensors": _read_tensors,
}


def given_calibration(given: Calibration | str | PathLike[str] | None) -> Calibration | str | PathLike[str]:
    """Return a calibration. A published file (.pt, .tsv or .safetensors) is read when the model is known."""
    if given is None:
        raise SpecError("calibration", None, "is needed; `kvspec calibrate` or kvspec.calibrate makes the calibration")
    return given if isinstance(given, Calibration) or is_published_file(given) else load_calibration(given)


def _key(layer: int, head: int) -> str:
    return f"layer{layer:02d}_head{head:02d}"


def _keys(layers: Any, H: int) -> dict[str, None]:
    return dict.fromkeys(_key(layer, head) for layer in layers for head in range(H))


def _payload(path: str | PathLike[str]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        payload = load_torch_file(path)
    except ValueError as error:
        raise SpecError("path", str(path), f"must be a .pt file of tensors ({error}); {INSTEAD}") from error
    metadata, stats = (payload.get(part) if isinstance(payload, dict) else None for part in ("metadata", "stats"))
    if not isinstance(metadata, dict) or not isinstance(stats, dict):
        raise SpecError("path", str(path), f"must have `metadata` and `stats` as in TriAttention; {INSTEAD}")
    return metadata, stats


def _head(stats: Mapping[str, Any], key: str, half: int, name: str) -> list[Float64[Matrix, " half"]]:
    """Return the three rows of a head (see PARTS)."""
    rows, head = [], stats.get(key)
    for part in PARTS:
        row = head.get(part) if isinstance(head, dict) else None
        if row is None:
            raise SpecError(f"{key}.{part}", None, f"is missing in {name}; {INSTEAD}")
        if not isinstance(row, Tensor) or not _is_plain(row):
            shown = str(row.dtype) if isinstance(row, Tensor) else type(row).__name__
            raise SpecError(f"{key}.{part}", shown, f"in {name} must be a dense tensor of floats; {INSTEAD}")
        if tuple(row.shape) != (half,):
            raise SpecError(f"{key}.{part}", tuple(row.shape), f"in {name} must have the shape ({half},); {INSTEAD}")
        numbers = row.detach().double().numpy()
        if not np.isfinite(numbers).all():
            raise SpecError(f"{key}.{part}", numbers[~np.isfinite(numbers)][0], f"in {name} must be finite; {INSTEAD}")
        rows.append(numbers)
    return rows


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a dense tensor of floating-point numbers, whose values are in the file."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return bool(dense and tensor.is_floating_point())


def _table(path: Path, architecture: Architecture) -> Float64[Matrix, "L H_kv"]:
    text = decode_text("path", path, read_file("path", path), "utf-8-sig")
    try:
        rows = [line.split("\t") for line in text.splitlines() if line.strip()]
        table = np.array([[float(cell) for cell in row] for row in rows])
    except ValueError as error:
        raise SpecError("path", str(path), f"must be lines of numbers between tabs: {error}") from error
    config, L = architecture.config, len(layer_types(architecture.config))
    H_kv = layer_config_value(config, "num_key_value_heads", architecture.full_layers[0])
    if table.shape != (L, H_kv) or not np.isfinite(table).all():
        bound = f"has the shape {table.shape}; the model has {L} layers of {H_kv} KV heads, each a finite number"
        raise SpecError("path", str(path), bound)
    return table
