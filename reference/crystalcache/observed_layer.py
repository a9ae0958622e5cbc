"""Choice of the layer that S1 observes."""

from collections.abc import Sequence

from spec.errors import SpecError

__all__ = ["observed_layer"]


def observed_layer(full_layers: Sequence[int], i: int) -> int:
    """Return the index of the observed layer: S1 uses the queries and keys of this layer.

    Implements: CC-OBSERVED-LAYER

    Source: Section 3.2. The paper's setting "First layer only" is i = 0.

    Args:
        full_layers: indices of the model's full-attention layers, ascending.
        i: index into `full_layers`. Index 0 is the first full-attention layer, and -1 is the last.

    Raises:
        SpecError: if `full_layers` has no index i.
    """
    L = len(full_layers)
    if not -L <= i < L:
        raise SpecError("observed_layer", i, f"must be from {-L} to {L - 1}: the model has {L} full-attention layers")
    return full_layers[i]
