"""Archived chunks for tests: small, seeded, and told apart by their seed."""

import torch
from torch import Tensor

from models_integration.archive.manifest import ALL, Manifest, ids_digest
from models_integration.model.identity import ModelIdentity

__all__ = ["MODEL", "chunk"]

MODEL = ModelIdentity("weights", "float32", "rotation", "config", "bfloat16")


def chunk(
    seed: int, tenant: str = "alice", tokens: int = 6, layers: int = 2, model: ModelIdentity = MODEL,
) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and the tensors of a raw chunk."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (tokens,), generator=generator)
    tensors: dict[str, Tensor] = {"token_ids": ids}
    for layer in range(layers):
        for name in ("k", "v"):
            values = torch.randn((2, tokens, 8), generator=generator)
            tensors[f"{layer}.{name}"] = values.to(torch.bfloat16)
    manifest = Manifest(
        tenant, ids_digest(ids), tokens, "raw", 0, (), 0, tokens, "none", tuple(range(layers)), ALL,
        model, float(seed),
    )
    return manifest, tensors
