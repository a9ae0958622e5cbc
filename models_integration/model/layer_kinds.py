"""Kinds of a decoder's layers according to the config, and the layer whose cache each layer uses."""

from typing import Any

from transformers import PretrainedConfig

__all__ = [
    "CHUNKED", "FULL", "HYBRID", "INDEXED", "RECURRENT", "SHARING", "SLIDING", "STORELESS", "by_layer", "cache_owners",
    "layer_config_value", "layer_types", "stated_types",
]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# Layers with a state of a fixed size, or without a state.
RECURRENT, STORELESS = ("linear_attention", "conv"), ("moe", "mlp")
# Layers that store keys and values, and also a recurrent state.
HYBRID = "hybrid"
# Layers whose queries attend to the tokens that an indexer chooses.
INDEXED = "indexed_attention"
# Layers that use the cache of an earlier layer.
SHARING = "sharing"


def by_layer(config: PretrainedConfig, name: str) -> list[Any]:
    """Return the config's value for all layers or the values per layer, as a list. Values that are not set are None.

    If layers have different values, some configs raise an error when the value is read.
    """
    parts = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [getattr(part, name, None) for part in parts]


def layer_config_value(config: PretrainedConfig, name: str, layer: int) -> Any:
    """Return the config's value for one layer."""
    values = by_layer(config, name)
    return values[layer if len(values) > 1 else 0]


def layer_types(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer, as in the cache that transformers makes for this config."""
    kinds = [FULL if kind in (HYBRID, INDEXED) else kind for kind in stated_types(config)]
    return [SHARING if owner != index else kinds[index] for index, owner in enumerate(cache_owners(config))]


def stated_types(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer according to the config."""
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
    """Return for each layer the layer whose cache it uses: itself, or the last layer of its kind that stores a cache.

    The entry is -1 for a layer that uses the cache of a different model.
    """
    kinds, modes = stated_types(config), getattr(config, "kv_sharing_modes", None) or ()
    owners = list(range(len(kinds)))
    for index, mode in enumerate(modes):
        if mode == "reuse":
            stored = (one for one in range(index) if modes[one] == "store" and kinds[one] == kinds[index])
            owners[index] = max(stored, default=-1)
    return owners
