"""What the layers of a decoder are: what each attends to, and whose cache it reads, as its configuration has it."""

from typing import Any

from transformers import PretrainedConfig

__all__ = [
    "CHUNKED", "FULL", "HYBRID", "INDEXED", "RECURRENT", "SHARING", "SLIDING", "STORELESS", "by_layer", "cache_owners",
    "layer_types", "of_layer", "stated_types",
]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Layers with a state of a fixed size, and layers that store nothing.
RECURRENT, STORELESS = ("linear_attention", "conv"), ("moe", "mlp")
# Layers that store keys and values, and have a state beside them.
HYBRID = "hybrid"
# Layers whose queries read the tokens that an indexer chooses.
INDEXED = "indexed_attention"
# Layers that read the cache of an earlier layer.
SHARING = "sharing"


def by_layer(config: PretrainedConfig, name: str) -> list[Any]:
    """What a configuration says of its layers: one value for all of them, or one for each; None where it says nothing.

    Configurations whose layers differ raise an error of their own where such a value is asked of all.
    """
    parts = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [getattr(part, name, None) for part in parts]


def of_layer(config: PretrainedConfig, name: str, layer: int) -> Any:
    """What a configuration says of one layer."""
    values = by_layer(config, name)
    return values[layer if len(values) > 1 else 0]


def layer_types(config: PretrainedConfig) -> list[str]:
    """What each layer attends to, as the cache that transformers makes for this config has it."""
    kinds = [FULL if kind in (HYBRID, INDEXED) else kind for kind in stated_types(config)]
    return [SHARING if owner != index else kinds[index] for index, owner in enumerate(cache_owners(config))]


def stated_types(config: PretrainedConfig) -> list[str]:
    """The kind of each layer by the configuration."""
    stated = getattr(config, "layer_types", None)
    if stated is not None:
        return list(stated)
    kind = FULL
    if getattr(config, "sliding_window", None) is not None:
        kind = SLIDING
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = CHUNKED
    return [kind] * getattr(config, "num_hidden_layers", 0)


def cache_owners(config: PretrainedConfig) -> list[int]:
    """By layer, the layer whose cache it reads: itself, or the last one of its kind that stores for others.

    -1 for a layer that reads the cache of a different model.
    """
    kinds, modes = stated_types(config), getattr(config, "kv_sharing_modes", None) or ()
    owners = list(range(len(kinds)))
    for index, mode in enumerate(modes):
        if mode == "reuse":
            stored = (one for one in range(index) if modes[one] == "store" and kinds[one] == kinds[index])
            owners[index] = max(stored, default=-1)
    return owners
