"""A cache that lives on under a method, beside the full cache in which what it evicted is masked."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import Masked, at_once, relative
from models_integration import RetainedCache

__all__ = ["Beside"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Beside:
    """Reads the same tokens into a session's cache and into the oracle's, and compares the logits of each forward.

    Args:
        model: inside a context, or not.
        twin: the same model outside any context.
        ids: the first prompt, (1, n).
    """

    def __init__(self, model: PreTrainedModel, twin: PreTrainedModel, cache: RetainedCache, ids: Tensor) -> None:
        self.model, self.cache = model, cache
        self.oracle = Masked(twin, ids, range(ids.shape[1]))
        self.bound = TOLERANCE[model.dtype]
        self.sizes: list[int] = []
        at_once(model, ids, cache)
        self.follow()

    def read(self, ids: Tensor) -> Tensor:
        """One forward of both; what the cache evicted at its end is masked from then on."""
        logits = at_once(self.model, ids, self.cache)
        self.compare(logits, ids)
        return logits

    def compare(self, logits: Tensor, ids: Tensor) -> None:
        assert relative(logits, self.oracle.read(ids)) < self.bound
        self.follow()

    def steps(self, ids: Tensor) -> None:
        """One token at a time."""
        for token in torch.split(ids, 1, dim=1):
            self.read(token)

    def follow(self) -> None:
        """The oracle masks what the cache no longer stores; nothing comes back."""
        stored = self.cache.stored_positions()
        assert self.cache.get_seq_length() == len(self.oracle.visible)
        visible = torch.zeros_like(self.oracle.visible)
        visible[stored] = True
        assert not bool((visible & ~self.oracle.visible).any())
        self.oracle.visible = visible
        lengths = {layer.stored_length for layer in self.cache.full_layers}
        assert lengths == {len(stored)}
        self.sizes.append(len(stored))

    @property
    def masked(self) -> int:
        """Tokens that are gone."""
        return int((~self.oracle.visible).sum())
