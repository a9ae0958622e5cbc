"""A calibration: average statistics of the queries and KV heads of one model, stored in a file."""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from io import BufferedIOBase
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from spec.arrays import Cube, Float64, Hypercube, Matrix, Vector
from spec.errors import SpecError
from spec.files import ARCHIVE_ERRORS, check_unpacked

__all__ = ["Calibration", "Gates", "Identity", "Networks", "load_calibration", "save_calibration"]

FORMAT = "kvspec.triattention/3"
ARRAYS = {"mean": 3, "magnitude": 3, "inv_freq": 1}
OPTIONAL = {"head_scores": 2, "filters": 3, "covariance": 4}
NETWORKS = {"W_2": 3, "b_2": 2, "W_1": 3, "b_1": 2}
GATES = {"W_q": 4, "b_q": 3, "W_k": 4, "norm_q": 2, "norm_k": 2, "base": 4, "bias": 2}
"""Names of arrays in a file, with their numbers of dimensions."""


@dataclass(frozen=True)
class Identity:
    """The model and the rotary embedding (RoPE) for which a calibration was computed."""

    model: str
    """Unique name of the model. Two models that differ in weights or computation must have different names."""
    inv_freq: Float64[Vector, " half"]
    factor: float = 1.0
    """Factor that multiplies RoPE's cosines and sines. The factor is 1 without RoPE scaling (such as YaRN)."""

    @property
    def rope(self) -> str:
        """Hash (16 hex digits) of the RoPE frequencies and the attention factor, both in float64."""
        numbers = np.append(np.asarray(self.inv_freq, dtype="<f8"), self.factor)
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Networks:
    """Networks of KVzap, one for each layer: a linear map of hidden states, or two linear maps with GELU in between.

    Raises:
        SpecError: if shapes do not agree, or if a weight is not finite.
    """

    W_2: Float64[Cube, "_ _ _"]
    """Weights of the scores, (L, H_kv, m). Without `W_1`, m is the width of the hidden states."""
    b_2: Float64[Matrix, "_ _"]
    """Biases of the scores, (L, H_kv)."""
    W_1: Float64[Cube, "_ _ _"] | None = None
    """Weights of the first of two maps, (L, m, width), or None for a linear map."""
    b_1: Float64[Matrix, "_ _"] | None = None
    """Biases of the first of two maps, (L, m), or None for a linear map."""

    def __post_init__(self) -> None:
        L, H_kv, m = self.W_2.shape
        wanted: dict[str, tuple[int, ...]] = {"W_2": (L, H_kv, m), "b_2": (L, H_kv)}
        if self.W_1 is not None or self.b_1 is not None:
            wanted |= {"W_1": (L, m, self.width), "b_1": (L, m)}
        _check_arrays("networks", self.arrays, wanted)

    @property
    def arrays(self) -> dict[str, Any]:
        """Weights and biases by name, without those that are None."""
        return {name: x for name, x in vars(self).items() if x is not None}

    @property
    def width(self) -> int:
        """Number of channels of the hidden states."""
        return (self.W_2 if self.W_1 is None else self.W_1).shape[2]


@dataclass(frozen=True)
class Gates:
    """Gates of Fast KVzip, one for each layer: queries and keys of r channels from hidden states, and s base keys.

    Raises:
        SpecError: if shapes do not agree, or if a weight is not finite.
    """

    W_q: Float64[Hypercube, "_ _ _ _"]
    """Weights of the gate's queries, (L, H, r, width)."""
    b_q: Float64[Cube, "_ _ _"]
    """Biases of the gate's queries, (L, H, r)."""
    W_k: Float64[Hypercube, "_ _ _ _"]
    """Weights of the gate's keys, (L, H_kv, r, width)."""
    norm_q: Float64[Matrix, "_ _"]
    """Weights of the norm of the queries, (L, r)."""
    norm_k: Float64[Matrix, "_ _"]
    """Weights of the norm of the keys, (L, r)."""
    base: Float64[Hypercube, "_ _ _ _"]
    """Base keys, (L, H_kv, s, r)."""
    bias: Float64[Matrix, "_ _"]
    """Bias of the logit of each query head, (L, H)."""

    def __post_init__(self) -> None:
        (L, H, r, width), (H_kv, s) = self.W_q.shape, self.base.shape[1:3]
        _check_arrays("gates", self.arrays, {
            "W_q": (L, H, r, width), "b_q": (L, H, r), "W_k": (L, H_kv, r, width), "norm_q": (L, r), "norm_k": (L, r),
            "base": (L, H_kv, s, r), "bias": (L, H),
        })
        if H % H_kv:
            reason = f"must have a multiple of {H_kv} query heads, the number of KV heads"
            raise SpecError("calibration.gates", H, reason)

    @property
    def arrays(self) -> dict[str, Any]:
        """Arrays by name."""
        return dict(vars(self))

    @property
    def width(self) -> int:
        """Number of channels of the hidden states."""
        return self.W_q.shape[3]


def _check_arrays(part: str, arrays: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {name: x.shape for name, x in arrays.items()}
    if shapes != wanted:
        raise SpecError(f"calibration.{part}", shapes, f"must have the shapes {wanted}")
    for name, x in arrays.items():
        if not np.isfinite(x).all():
            raise SpecError(f"calibration.{name}", "infinite or NaN", "must be finite")


@dataclass(frozen=True)
class Calibration:
    """Statistics of each full-attention layer and query head: mean query before RoPE, mean norm of each rotary pair."""

    identity: Identity
    layers: tuple[int, ...]
    mean: Float64[Cube, "_ _ _"]
    """Mean query before RoPE, (L, H, d). The size d is 0 if the calibration contains no statistics of queries."""
    magnitude: Float64[Cube, "_ _ _"]
    """Mean norm of each rotary pair of a query, (L, H, d / 2). The last size is 0 if the norms were not computed."""
    head_scores: Float64[Matrix, "_ _"] | None = None
    """KVzip's head scores, (L, H_kv), or None if the head scores were not computed."""
    samples: tuple[str, ...] | None = None
    """Hashes of the study contexts on which the calibration was computed, or None if the contexts are unknown."""
    filters: Float64[Cube, "_ _ _"] | None = None
    """Q-Filters, (L, H_kv, d), or None if the filters were not computed."""
    networks: Networks | None = None
    """Networks of KVzap for the full-attention layers, or None."""
    covariance: Float64[Hypercube, "_ _ _ _"] | None = None
    """Covariance of the queries before RoPE, (L, H, d, d), or None if the covariance was not computed."""
    gates: Gates | None = None
    """Gates of Fast KVzip for the full-attention layers, or None."""

    def __post_init__(self) -> None:
        L, H, half = len(self.layers), self.mean.shape[1], len(self.identity.inv_freq)
        if not self.mean.shape[2] and self._optional:
            half = 0
        for part, given in (("networks", self.networks), ("gates", self.gates)):
            if given is not None and (number := len(next(iter(given.arrays.values())))) != L:
                raise SpecError(f"calibration.{part}", number, f"must be {L}, the number of layers")
        shapes: dict[str, tuple[int, ...]] = {"mean": (L, H, 2 * half), "magnitude": (L, H, half)}
        if self.head_scores is not None:
            shapes["head_scores"] = (L, *self.head_scores.shape[1:2])
        if self.filters is not None:
            shapes["filters"] = (L, *self.filters.shape[1:3])
        if self.covariance is not None:
            shapes["covariance"] = (L, H, 2 * half, 2 * half)
            if not self.magnitude.shape[2]:
                shapes["magnitude"] = (L, H, 0)
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise SpecError(f"calibration.{name}", array.shape, f"must have the shape {shape}")
            finite = np.isfinite(array)
            if not finite.all():
                at = tuple(int(i) for i in np.argwhere(~finite)[0])
                raise SpecError(f"calibration.{name}", array[at], f"must be finite; this value is at {at}")

    @property
    def _optional(self) -> dict[str, Any]:
        """Arrays that a calibration can lack, by name."""
        known: dict[str, Any] = {name: getattr(self, name) for name in OPTIONAL}
        for part in (self.networks, self.gates):
            known |= {} if part is None else part.arrays
        return {name: array for name, array in known.items() if array is not None}

    @property
    def digest(self) -> str:
        """Hash (8 hex digits) of the statistics. Calibration on a different text gives a different hash."""
        arrays = (self.mean, self.magnitude, *self._optional.values())
        parts = (np.ascontiguousarray(x, dtype="<f8").tobytes() for x in arrays)
        return hashlib.sha256(b"".join(parts)).hexdigest()[:8]

    def check(self, served: Identity) -> None:
        """Check that the calibration was computed for the served model.

        Implements: TA-CALIBRATION

        Raises:
            SpecError: if the name or RoPE of the served model differs from the calibration. The error message contains
                both names, or the hashes of both RoPEs.
        """
        if self.identity.model != served.model:
            raise SpecError(
                "calibration", self.identity.model,
                f"was made for a different model, not for {served.model!r}; run `kvspec calibrate` with this model",
            )
        if self.identity.rope != served.rope:
            raise SpecError(
                "calibration", self.identity.rope,
                f"was made with different rotary frequencies, not with {served.rope}; run `kvspec calibrate` again",
            )


def save_calibration(calibration: Calibration, file: str | PathLike[str] | BufferedIOBase) -> None:
    """Write the calibration to an .npz archive: the float64 arrays and a JSON header.

    If `file` is a path, an existing file is overwritten in place. If another process may be reading the file, save to a
    BytesIO first, then replace the file.

    Implements: TA-CALIBRATION
    """
    header = {
        "format": FORMAT, "model": calibration.identity.model, "rope": calibration.identity.rope,
        "factor": calibration.identity.factor, "layers": list(calibration.layers),
        "samples": None if calibration.samples is None else list(calibration.samples),
    }
    with open(file, "wb") if isinstance(file, str | PathLike) else nullcontext(file) as target:
        np.savez(
            target, header=np.array(json.dumps(header)), mean=calibration.mean, magnitude=calibration.magnitude,
            inv_freq=calibration.identity.inv_freq, **calibration._optional,
        )


def load_calibration(path: str | PathLike[str]) -> Calibration:
    """Read a calibration from a file that `save_calibration` wrote. Reading executes no code from the file.

    Implements: TA-CALIBRATION

    Raises:
        SpecError: if the file is missing or has a different format. Also if the hash in the file's header does not
            match the RoPE frequencies in the file.
    """
    try:
        check_unpacked(path)
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(str(archive["header"]))
            mean, magnitude, inv_freq = (_array(archive, name, ndim) for name, ndim in ARRAYS.items())
            optional = {
                name: _array(archive, name, ndim) for name, ndim in (OPTIONAL | NETWORKS | GATES).items()
                if name in archive
            }
        form, rope = header["format"], header["rope"]
        _check_header(header)
        layers, samples = tuple(header["layers"]), header.get("samples")
        networks, gates = ({name: optional[name] for name in part if name in optional} for part in (NETWORKS, GATES))
        if (networks and not {"W_2", "b_2"} <= networks.keys()) or (gates and gates.keys() != GATES.keys()):
            raise ValueError("arrays of the networks or of the gates are missing")
        identity = Identity(header["model"], inv_freq, header["factor"])
    except (OSError, KeyError, TypeError, ValueError, EOFError, *ARCHIVE_ERRORS) as error:
        raise SpecError("calibration", str(path), _way_out(Path(path), error)) from error
    if form != FORMAT:
        bound = f"has the format {form!r}, not {FORMAT!r}: make it again with kvspec calibrate"
        raise SpecError("calibration", str(path), bound)
    if identity.rope != rope:
        raise SpecError("calibration", str(path), f"is damaged: frequencies are {identity.rope}, in the header {rope}")
    heads, filters, covariance = (optional.get(name) for name in OPTIONAL)
    known = None if samples is None else tuple(samples)
    return Calibration(
        identity, layers, mean, magnitude, heads, known, filters, Networks(**networks) if networks else None,
        covariance, Gates(**gates) if gates else None,
    )


def _array(archive: Mapping[str, Any], name: str, ndim: int) -> Any:
    """Return an array of a file.

    Raises:
        ValueError: if the array has no floating-point numbers, or a different number of dimensions.
    """
    array = archive[name]
    if array.dtype.kind != "f" or array.ndim != ndim:
        raise ValueError(f"the array {name} has the dtype {array.dtype} and {array.ndim} dimensions")
    return np.asarray(array, dtype=np.float64)


def _check_header(header: Mapping[str, Any]) -> None:
    """Check the types of the values that a header has beside the format and the hash.

    Raises:
        KeyError: if a value is missing.
        ValueError: if a value has a different type.
    """
    factor, layers, samples = header["factor"], header["layers"], header.get("samples")
    rising = isinstance(layers, list) and all(type(one) is int for one in layers) and layers == sorted(set(layers))
    fits = {
        "model": isinstance(header["model"], str), "layers": rising and min(layers, default=0) >= 0,
        "factor": type(factor) in (int, float) and math.isfinite(factor) and factor > 0,
        "samples": samples is None or (isinstance(samples, list) and all(isinstance(one, str) for one in samples)),
    }
    if wrong := [name for name, fit in fits.items() if not fit]:
        raise ValueError(f"the header has a wrong {wrong[0]}")


def _way_out(path: Path, error: Exception) -> str:
    """Return why a file is not a calibration file, and the command that makes one."""
    if path.suffix in (".pt", ".tsv", ".safetensors"):
        return (
            f"must be an .npz file: pass calibration={path.name!r} to policy_from_name, or convert the file by"
            f" `kvspec calibrate {path.name} --model NAME`"
        )
    if path.suffix != ".npz" and path.is_file():
        command = f"kvspec calibrate {path.name} --model NAME --out calibration.npz"
        return f"must be an .npz file: if this is a text, run `{command}`, and give calibration.npz"
    reason = str(error).split(":")[0].split(". ")[0] if "pickle" not in str(error) else "it is no .npz file"
    return f"must be a file that kvspec calibrate wrote: {reason}"
