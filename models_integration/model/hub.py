"""Models of the Hugging Face hub: possible names, and models in the cache on this machine."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download

__all__ = ["downloaded", "is_hub_name"]

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def is_hub_name(name: str) -> bool:
    """Return True if a model of the hub can have this name."""
    return _NAME.fullmatch(name) is not None


def downloaded(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model with weights in the cache of the hub, or None. The hub is not contacted.

    Args:
        name: name of the model on the hub.
        revision: branch, tag or commit. None: the default branch.
    """
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not whole
        return None
    return folder if any(any(folder.glob(pattern)) for pattern in _WEIGHTS) else None
