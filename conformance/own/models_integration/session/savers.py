"""What a process does that is killed while it saves caches."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from conformance.own.models_integration.session.families import build
from models_integration.cache.snapshot import load_cache, save_cache

__all__ = ["save_until_killed"]


def save_until_killed(family: str, path: Path, others: tuple[Path, Path], ready: Connection) -> None:
    """Save one of two caches and then the other, under the same name; `ready` gets a byte before the first."""
    torch.set_num_threads(1)
    model = build(family)
    caches = [load_cache(other, model) for other in others]
    ready.send_bytes(b"x")
    while True:
        for cache in caches:
            save_cache(cache, model, path)
