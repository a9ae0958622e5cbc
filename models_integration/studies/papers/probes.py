"""The diagnostics of the paper on cross-session injection: attention of a question, keys of archived and fresh text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.archive.splice import Chunk
from models_integration.model.architecture import restored_rotation
from models_integration.model.rotation import plain_layers, prefilled
from reference.injection.diagnostics import entropy, key_cosine, sink_mass

__all__ = ["attention_figures", "eager", "key_figures"]


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """Context manager inside which the model computes attention weights."""
    stock = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(stock)


def attention_figures(weights: Sequence[Tensor], layers: Sequence[int], queries: int) -> dict[str, list[float]]:
    """By layer, means over heads and the last queries: entropy in nats, and attention to positions 0 to 3."""
    figures: dict[str, list[float]] = {"entropy": [], "sinks": []}
    for layer in layers:
        own = weights[layer][0, :, -queries:].double().cpu().numpy()
        figures["entropy"].append(float(entropy(own).mean()))
        figures["sinks"].append(float(sink_mass(own, np.arange(own.shape[-1])).mean()))
    return figures


def key_figures(
    model: PreTrainedModel, before: Sequence[int], chunks: Sequence[Chunk], texts: Sequence[range],
) -> dict[str, list[float]]:
    """By layer, mean cosines of archived keys and keys of the same text after `before`, with and without rotation.

    Args:
        texts: places in each chunk of the tokens that count.
    """
    starts = np.cumsum([len(before), *(len(chunk.ids) for chunk in chunks)])
    places = [np.array(text, dtype=np.int64) for text in texts]
    old, new = np.concatenate(places), np.concatenate([start + at for start, at in zip(starts, places, strict=False)])
    with restored_rotation(model):
        fresh = plain_layers(prefilled(model, [*before, *(token for chunk in chunks for token in chunk.ids)]))
    figures: dict[str, list[float]] = {"cosine": [], "unrotated": []}
    for layer in sorted(chunks[0].layers):
        rule, frequencies = chunks[0].rotary.layers[layer], np.zeros(0)
        if rule.buffer is not None:
            frequencies = chunks[0].rotary.frequencies[rule.buffer].double().cpu().numpy()
        slot = int(rule.slot == "values")
        stored = torch.cat([chunk.layers[layer][slot][:, at] for chunk, at in zip(chunks, places, strict=True)], 1)
        again = (fresh[layer].keys, fresh[layer].values)[slot][0, :, new]
        archived, live = (x.double().cpu().numpy() for x in (stored, again))
        cosines = key_cosine(archived, live, (old, new), frequencies, rule.style or "half_split")
        for name, each in zip(figures, cosines, strict=True):
            figures[name].append(float(each.mean()))
    return figures
