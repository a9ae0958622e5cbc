"""Random queries, keys and values of one layer, before and after rotation, without transformers and kvpress."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from reference.policies.attention import unrotated
from reference.policies.kvzip import rehearsal_chunks
from spec.policy import LayerView, Rehearsal, Repeat

D = 8
RATIOS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.75", "0.8", "0.9")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Constants:
    """Constants of the presses and of kvspec's policies."""

    window: int
    kernel: int
    """Size of the pool."""
    chunk: int
    sinks: int
    future: int
    """Number of positions over which Expected Attention averages."""
    layers: int
    lag: int
    """Tokens of a partition of LagKV."""
    rehearsed: int
    """Tokens of a chunk that KVzip repeats."""
    piece: int
    """Tokens of a piece that is evicted alone."""
    gate: int
    """Tokens of a spiky chunk that are kept."""


SMALL = Constants(window=3, kernel=5, chunk=4, sinks=4, future=16, layers=4, lag=4, rehearsed=10, piece=9, gate=2)
"""Constants of random inputs."""


@dataclass(frozen=True)
class Inputs:
    """Prompt of n tokens in one of the layers, with a ratio: the share of tokens that is evicted."""

    seed: int
    ratio: str
    layer: int
    raw_q: Array
    """Queries before rotation (H, n, d)."""
    k: Array
    v: Array
    inv_freq: Array
    constants: Constants = SMALL

    @property
    def n(self) -> int:
        return int(self.k.shape[1])

    @cached_property
    def W_o(self) -> Array:
        """Random output projection (H, d, hidden)."""
        return np.random.default_rng(self.seed + 1).standard_normal((len(self.raw_q), D, 6))

    def at(self, ratio: str) -> "Inputs":
        """Return the same tensors with a different ratio."""
        other = copy(self)
        object.__setattr__(other, "ratio", ratio)
        return other

    @property
    def kept(self) -> Fraction:
        """Share of tokens that is kept."""
        return 1 - Fraction(self.ratio)

    @cached_property
    def view(self) -> LayerView:
        q = unrotated(self.raw_q, -np.arange(self.n), self.inv_freq, 1.0)
        return LayerView(q, self.k, self.v, self.k.shape[2] ** -0.5, None)


def drawn(seed: int, most: int, least: int = 6) -> Inputs:
    """Return normal numbers for `least` to `most` tokens, and 1 to 3 KV heads with 1 or 2 query heads each."""
    rng = np.random.default_rng(seed)
    n, H_kv, G = int(rng.integers(least, most + 1)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    ratio = RATIOS[int(rng.integers(len(RATIOS)))]
    return Inputs(
        seed, ratio, int(rng.integers(SMALL.layers)), 2 * rng.standard_normal((H_kv * G, n, D)),
        rng.standard_normal((H_kv, n, D)), rng.standard_normal((H_kv, n, D)),
        100.0 ** (-np.arange(D // 2) / (D // 2)),
    )


LAYER_WEIGHTS, HEAD_WEIGHTS = (11, 10, 10, 9), {1: (10,), 2: (11, 9), 3: (11, 10, 9)}
"""Tenths of the kept share: of each layer, and of each KV head of a layer."""


def evicted(ratio: float, weights: Sequence[int]) -> list[float]:
    """Return the ratio of each layer or head. The mean is the given ratio."""
    return [1 - (1 - ratio) * weight / 10 for weight in weights]


def positions_of(some: Array, keys: Array) -> Array:
    """Return the positions (heads, m) of some keys (heads, m, d) among all keys (heads, n, d), compared by their bytes.

    Raises:
        ValueError: for a key that does not occur, or that occurs at two positions of its head.
    """
    result = np.empty(some.shape[:2], dtype=np.int64)
    for head, (wanted, every) in enumerate(zip(some, keys, strict=True)):
        places = {key.tobytes(): at for at, key in enumerate(every)}
        if len(places) < len(every):
            raise ValueError(f"head {head}: {len(every) - len(places)} of {len(every)} keys are equal to another")
        try:
            result[head] = [places[key.tobytes()] for key in wanted]
        except KeyError:
            raise ValueError(f"head {head}: a key is none of the prompt's") from None
    return result


def threshold(ratio: float) -> float:
    """Return a threshold for negated norms of D normal numbers. About this share of the norms scores less."""
    return 2.5 * ratio - 4.0


@dataclass(frozen=True)
class Rehearsed:
    """Layers of a prompt that KVzip repeats, random like the input.

    The id of a token is its position. The ids of the template come after them.
    """

    inputs: Inputs

    @property
    def prefix(self) -> int:
        """Number of tokens of a chat template before the context."""
        return min(self.inputs.seed % 9, self.inputs.n // 2)

    @property
    def template(self) -> tuple[tuple[int, ...], ...]:
        n = self.inputs.n
        return (n, n + 1), (n + 2,), (n + 3,)

    @cached_property
    def _drawn(self) -> tuple[Array, Array, Array, Array]:
        rng, L = np.random.default_rng(self.inputs.seed + 2), self.inputs.constants.layers
        H_kv, n, d = self.inputs.k.shape
        shapes = (L, n + 4, len(self.inputs.raw_q) * d), (L, H_kv, n + 4, d), (L, H_kv, n, d), (L, H_kv, n, d)
        hidden, queries, k, v = (rng.standard_normal(shape) for shape in shapes)
        return 2 * hidden, queries, k, v

    def cached(self, layer: int) -> tuple[Array, Array]:
        """Return the keys and values of the prompt (H_kv, n, d)."""
        _, _, k, v = self._drawn
        return k[layer], v[layer]

    def read(self, layer: int, ids: Array) -> tuple[Array, Array]:
        """Return hidden states (r, H d) and keys (H_kv, r, d) of tokens read after the prompt.

        The hidden states are the queries of these tokens.
        """
        hidden, queries, _, _ = self._drawn
        return hidden[layer, ids], queries[layer][:, ids]

    def views(self, first: int) -> dict[int, LayerView]:
        """Return the layers, after the tokens from `first` on have been repeated."""
        inputs, result = self.inputs, dict[int, LayerView]()
        plan = Rehearsal(self.template, first, 0, inputs.constants.rehearsed, 8)
        for layer in range(inputs.constants.layers):
            repeats, (k, v) = list[Repeat](), self.cached(layer)
            for start, stop, ids in rehearsal_chunks(np.arange(inputs.n), plan):
                hidden, queries = self.read(layer, ids)
                raw = hidden.reshape(len(ids), -1, D).transpose(1, 0, 2)
                q = unrotated(raw, -inputs.n - np.arange(len(ids)), inputs.inv_freq, 1.0)
                repeats.append(Repeat(start, stop, q, queries, np.linalg.norm(hidden, axis=1)))
            result[layer] = LayerView(inputs.raw_q[:, :0], k, v, D**-0.5, None, repeats=tuple(repeats))
        return result
