"""How often NestedKV's gate opens on the pocket model's keys: `python -m conformance.measure.benchmarks.nestedkv_gate`.

Prints a table: per layer and KV head, the share of tokens with alpha > 1/2, under Eq. 13 to 15 alone and under both
orders of Appendix A's "min-max normalized within each head and mean-centered with a rectifier".
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from models_integration.model.cache_argument import CACHE
from models_integration.pocket import load_pocket
from models_integration.tasks import TASKS, draw_sample
from reference import nestedkv as nk
from reference.directions import unit_keys
from spec.parameters import NESTEDKV

__all__ = ["READINGS", "main", "shares"]

LENGTHS = (1024, 2048, 4096)
SAMPLES, SEED = 5, 1
Array = np.ndarray[Any, Any]


def centred_first(a: Array) -> Array:
    """The other order: the head's mean is taken off the deviation, which is cut at 0 and then normalised."""
    s = a.std(axis=0)
    return nk.min_max(np.maximum(0.0, s - s.mean(axis=1, keepdims=True)))


READINGS: Mapping[str, Callable[[Array], Array]] = {
    "Eq. 13 alone": lambda a: a.std(axis=0),
    "normalised, then centred": nk.rectified_surprise,
    "centred, then normalised": centred_first,
}


def readings_of(k: Array) -> Array:
    """The three normalised anomalies (3, H_kv, n) of one layer's keys."""
    unit = unit_keys(k.astype(np.float64))
    memories = (
        nk.stable_memory(unit), nk.episodic_memory(unit, nk.block_size(unit.shape[1], NESTEDKV)),
        nk.current_memory(unit, NESTEDKV.W),
    )
    return np.stack([nk.min_max(nk.anomalies(unit, memory)) for memory in memories])


def shares(layers: list[Array]) -> dict[str, list[float]]:
    """Per reading, the share of tokens with alpha > 1/2 (s > tau) of each layer and KV head, layer major."""
    scales = [readings_of(k) for k in layers]
    return {
        name: [float(x) for a in scales for x in (reading(a) > NESTEDKV.tau).mean(axis=1)]
        for name, reading in READINGS.items()
    }


@torch.no_grad()
def keys_of(model: Any, ids: tuple[int, ...]) -> list[Array]:
    """The cached keys (H_kv, n, d) of each layer after a prompt."""
    cache = model(torch.tensor([ids]), use_cache=True)[CACHE]
    return [layer.keys[0].numpy() for layer in cache.layers]


def main() -> None:
    """Print the table of each length."""
    model, tokenizer = load_pocket()
    for length in LENGTHS:
        found = [
            shares(keys_of(model, draw_sample(task, tokenizer, length, index, SEED).context_ids))
            for task in TASKS for index in range(SAMPLES)
        ]
        heads = len(found[0]["Eq. 13 alone"]) // model.config.num_hidden_layers
        print(f"\n{length} tokens, {len(found)} prompts (mean, and the range over prompts, in percent):\n")
        print("| layer | KV head | " + " | ".join(READINGS) + " |")
        print("| --- " * (2 + len(READINGS)) + "|")
        for row in range(len(found[0]["Eq. 13 alone"])):
            columns = [np.array([sample[name][row] for sample in found]) * 100 for name in READINGS]
            cells = [f"{x.mean():.2f} ({x.min():.2f} to {x.max():.2f})" for x in columns]
            print(f"| {row // heads} | {row % heads} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
