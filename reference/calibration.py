"""A calibration: what one model's queries and KV heads are like on average, in a file of its own."""

import hashlib
import json
import zipfile
from contextlib import nullcontext
from dataclasses import dataclass
from io import BufferedIOBase
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from spec.arrays import Cube, Float64, Matrix, Vector
from spec.errors import SpecError

__all__ = ["Calibration", "Identity", "load_calibration", "save_calibration"]

FORMAT = "kvspec.triattention/3"
ARRAYS = ("mean", "magnitude", "inv_freq")


@dataclass(frozen=True)
class Identity:
    """The model and the rotation that a calibration belongs to."""

    model: str
    """A name that a model with other weights, or that computes otherwise, does not have."""
    inv_freq: Float64[Vector, " half"]
    factor: float = 1.0
    """The factor inside the rotary tables (1 but for YaRN and its kind)."""

    @property
    def rope(self) -> str:
        """16 hex digits over the frequencies and the factor, as float64."""
        numbers = np.append(np.asarray(self.inv_freq, dtype="<f8"), self.factor)
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration:
    """Per full-attention layer and query head: the mean query before its rotation, and the mean size of each band."""

    identity: Identity
    layers: tuple[int, ...]
    mean: Float64[Cube, "_ _ _"]
    """(L, H, d); d is 0 where head scores are all there is."""
    magnitude: Float64[Cube, "_ _ _"]
    """(L, H, d / 2)."""
    head_scores: Float64[Matrix, "_ _"] | None = None
    """(L, H_kv): KVzip's, where they were taken."""
    samples: tuple[str, ...] | None = None
    """Digests of the contexts that it was taken over, where they are those of a study; None where nobody knows."""

    def __post_init__(self) -> None:
        L, H, half = len(self.layers), self.mean.shape[1], len(self.identity.inv_freq)
        if not self.mean.shape[2] and self.head_scores is not None:
            half = 0
        shapes: dict[str, tuple[int, ...]] = {"mean": (L, H, 2 * half), "magnitude": (L, H, half)}
        if self.head_scores is not None:
            shapes["head_scores"] = (L, *self.head_scores.shape[1:2])
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise SpecError(f"calibration.{name}", array.shape, f"must have the shape {shape}")
            finite = np.isfinite(array)
            if not finite.all():
                at = tuple(int(i) for i in np.argwhere(~finite)[0])
                raise SpecError(f"calibration.{name}", array[at], f"must be finite, and is not at {at}")

    @property
    def digest(self) -> str:
        """8 hex digits over the statistics: another text gives others."""
        arrays = (self.mean, self.magnitude, *(() if self.head_scores is None else (self.head_scores,)))
        parts = (np.ascontiguousarray(x, dtype="<f8").tobytes() for x in arrays)
        return hashlib.sha256(b"".join(parts)).hexdigest()[:8]

    def check(self, served: Identity) -> None:
        """Whether it may score this model's keys.

        Implements: TA-CALIBRATION

        Raises:
            SpecError: when it is another model's, or was taken under another rotation; both are named.
        """
        if self.identity.model != served.model:
            raise SpecError("calibration", self.identity.model, f"is another model's; this one is {served.model!r}")
        if self.identity.rope != served.rope:
            raise SpecError(
                "calibration", self.identity.rope, f"was taken under other rotary frequencies; here {served.rope}"
            )


def save_calibration(calibration: Calibration, file: str | PathLike[str] | BufferedIOBase) -> None:
    """Write an .npz archive: the arrays as float64, and a header in JSON.

    A path is written in place; who replaces a file that others read gives an open one, such as a BytesIO.

    Implements: TA-CALIBRATION
    """
    header = {
        "format": FORMAT, "model": calibration.identity.model, "rope": calibration.identity.rope,
        "factor": calibration.identity.factor, "layers": list(calibration.layers),
        "samples": None if calibration.samples is None else list(calibration.samples),
    }
    taken: dict[str, Any] = {} if calibration.head_scores is None else {"head_scores": calibration.head_scores}
    with open(file, "wb") if isinstance(file, str | PathLike) else nullcontext(file) as target:
        np.savez(
            target, header=np.array(json.dumps(header)), mean=calibration.mean, magnitude=calibration.magnitude,
            inv_freq=calibration.identity.inv_freq, **taken,
        )


def load_calibration(path: str | PathLike[str]) -> Calibration:
    """Read what `save_calibration` wrote. Nothing in the file is run.

    Implements: TA-CALIBRATION

    Raises:
        SpecError: for no file, one of another kind, or one whose frequencies are not those that its header names.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(str(archive["header"]))
            mean, magnitude, inv_freq = (np.asarray(archive[name], dtype=np.float64) for name in ARRAYS)
            heads = np.asarray(archive["head_scores"], dtype=np.float64) if "head_scores" in archive else None
        form, rope, layers = header["format"], header["rope"], tuple(header["layers"])
        samples = None if header.get("samples") is None else tuple(map(str, header["samples"]))
        identity = Identity(header["model"], inv_freq, header["factor"])
    except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).split(":")[0].split(". ")[0] if "pickle" not in str(error) else "it is no .npz file"
        bound = f"must be a file that kvspec calibrate wrote: {reason}"
        if Path(path).suffix in (".pt", ".tsv"):
            bound = f"must be an .npz file: `kvspec calibrate {Path(path).name} --model NAME` writes it"
        raise SpecError("path", str(path), bound) from error
    if form != FORMAT:
        bound = f"has the format {form!r}, not {FORMAT!r}: make it again with kvspec calibrate"
        raise SpecError("path", str(path), bound)
    if identity.rope != rope:
        raise SpecError("path", str(path), f"is damaged: frequencies are {identity.rope}, in the header {rope}")
    return Calibration(identity, layers, mean, magnitude, heads, samples)
