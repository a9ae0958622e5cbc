"""Inputs with the shapes of real models: wide heads, large groups, many layers, hundreds of tokens.

There are few inputs, and they never change. Random inputs are small, so that an equation can be evaluated for many of
them. The inputs here show errors that occur only at larger sizes. Each value of a size occurs with several values of
the other sizes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from conformance.strategies.policy_inputs import Inputs
from spec.policy import LayerView

Array = np.ndarray[Any, Any]
WORD = 2**16
"""Step between token ids. Ids of a large vocabulary do not fit in 16 bits, so some ids differ only in higher bits."""
SMALL_KEYS = 2.0**-18
"""Factor of float32 keys, and divisor of the queries. In half precision both would lose digits."""


LONG_KEYS = 2.0**6
"""Size of keys and values. The square of the norm of a key exceeds the largest number of float16, 65 504.

The biases of the keys of a model such as Qwen2 cause such norms.
"""
BIAS, EXCESS = 2.0**9, 5 / 8
"""Bias of one channel of the keys of an input with a level, and the share by which one late key has more of it."""
DIP, RARE = 1 / 8, 32
"""Share by which the level of one in RARE queries is smaller."""
BORDER, LAST_BORDER = 128, 4_096
"""Multiples of BORDER are borders of tiles. LAST_BORDER is the last border of tiles of any power of two."""


class Shape(NamedTuple):
    """Sizes of a model's inputs, dtype of the arrays, and share of tokens to keep."""

    tokens: int
    layers: int
    kv_heads: int
    group: int
    width: int
    scaling: float
    softcap: float | None
    dtype: str
    sinks: bool
    share: float
    size: float = 1.0
    """Factor of keys and values, and divisor of queries."""
    level: float = 0.0
    """Common part of the logits: the level for even query heads, and minus the level for odd query heads.

    exp of a level of 1 000 or -1 000 is infinite or 0 in every floating type.
    """
    uneven: float = 1.0
    """Factor by which the queries of a layer are longer than those of the next layer, and likewise of KV heads.

    Budgets of layers or heads then differ much. A first part is full, and then a second one.
    """
    steps: int = 2
    """Number of decoded tokens, for a method that evicts while decoding."""
    indexes: tuple[int, ...] = ()
    """Indexes of the layers in the model. Empty: 0 to layers - 1."""
    borders: float = 1.0
    """Factor of keys near the borders of tiles, so that tokens across a border are kept for their neighbours."""

    def __str__(self) -> str:
        capped = f", softcap {self.softcap:g}" if self.softcap else ""
        capped += f", keys and values times {self.size:g}" if self.size != 1 else ""
        capped += f", queries {self.uneven:g} times longer in each layer and head before" if self.uneven != 1 else ""
        capped += f", layers {', '.join(map(str, self.indexes))} of the model" if self.indexes else ""
        capped += f", logits near {self.level:g} and {-self.level:g}" if self.level else ""
        return (
            f"{self.tokens} tokens, layers x KV heads = {self.layers} x {self.kv_heads}, groups of {self.group},"
            f" width {self.width}, scaling {self.scaling:g}{capped}"
            f"{', attention sinks' if self.sinks else ''}, {self.dtype}"
        )

    def inputs(self) -> Inputs:
        """Return the inputs. They are the same in every call."""
        rng = np.random.default_rng([self.tokens, self.layers, self.kv_heads, self.width])
        n, d, H = self.tokens, self.width, self.kv_heads * self.group
        layers = [self._layer(rng, H, at) for at in range(self.layers)]
        W_o = [rng.standard_normal((H, d, 5)).astype(np.float32).astype(np.float64) for _ in range(self.layers)]
        ids = rng.integers(0, n // 5, n) + WORD * rng.integers(0, 3, n)
        ids[rng.random(n) < 0.05] = 0  # Id 0 ends a sentence.
        inv_freq = 10_000.0 ** -(np.arange(d // 2) / (d // 2))
        return Inputs(layers, inv_freq, W_o, ids, factor=1.0 + (self.layers == 3) / 4, indexes=self.indexes)

    def _layer(self, rng: np.random.Generator, H: int, at: int) -> LayerView:
        n, d, H_kv = self.tokens, self.width, self.kv_heads
        q, k = 2 * rng.standard_normal((H, n, d)) / self.size, self.size * rng.standard_normal((H_kv, n, d))
        if self.uneven != 1:
            q *= self.uneven ** -(at + np.arange(H) // self.group)[:, None, None].astype(float)
        if self.level:
            self._add_level(q, k)
        for border in range(BORDER, n - BORDER, BORDER):
            k[:, border - 2 if border < LAST_BORDER else border + 1] *= self.borders
        arrays = [
            self._in_dtype(q, 1 / SMALL_KEYS), self._in_dtype(k, SMALL_KEYS),
            self._in_dtype(self.size * rng.standard_normal((H_kv, n, d))),
        ]
        # A model computes all heads of a token together, so the arrays of a session are views with swapped axes.
        q, k, v = (np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in arrays)
        return LayerView(q, k, v, self.scaling, self.softcap, sinks=self._sinks(rng) if self.sinks else None)

    def _add_level(self, q: Array, k: Array) -> None:
        """Add a bias to the slowest rotary channel of the keys, as in Qwen2, and make the queries long in this channel.

        One of the last keys has a larger bias. Queries before this key do not attend to it. The queries are zero in the
        last channel, into which a rotation turns a part of the bias.
        """
        slowest = self.width // 2 - 1
        k[..., slowest] += BIAS
        k[:, -3, slowest] += EXCESS * BIAS
        of_head = np.where(np.arange(len(q)) % 2, -1, 1) * self.level / (self.scaling * BIAS)
        of_query = np.where(np.arange(self.tokens) % RARE == 7, 1 - DIP, 1.0)
        q[..., slowest], q[..., -1] = of_head[:, None] * of_query, 0.0

    def _sinks(self, rng: np.random.Generator) -> Array:
        """Return logits near the log-sum-exp of a row, so that sinks take a large and different share of each head."""
        spread = 2 * self.scaling * self.width**0.5
        middle = np.log(self.tokens) + min(spread**2 / 2, 3 * spread)
        logits = middle + 1.5 * rng.standard_normal(self.kv_heads * self.group)
        rounded: Array = logits.astype(np.float32).astype(np.float64)
        return rounded

    def _in_dtype(self, x: Array, size: float = 1.0) -> Array:
        """Return the numbers rounded to the dtype of the shape.

        A bfloat16 number has 8 bits and is stored in float32.
        """
        if self.dtype == "float64":
            return x.astype(np.float32).astype(np.float64)
        result = x.astype(np.float32)
        if self.dtype == "bfloat16":
            result = (result.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        else:
            result = result * np.float32(size)
        return result


LARGE_LOGITS = Shape(270, 1, 2, 2, 32, 0.2, None, "float64", False, 0.5, level=1000.0)
"""Logits whose exp overflows or is 0 in float64, unless the largest visible logit of each query is subtracted first."""
MANY_LAYERS = Shape(100, 32, 1, 1, 16, 0.2, None, "float64", False, 0.4)
"""Layers whose indexes have one or two digits. As texts, "10" is before "2"."""
SPARSE = Shape(160, 4, 1, 7, 80, 0.2, None, "float64", False, 0.4, steps=0, indexes=(3, 7, 11, 15))
"""Layers of a model whose other layers have a sliding window. No size of a head or of a group is a power of two."""
UNEVEN = Shape(170, 6, 2, 1, 32, 0.3, None, "float64", False, 0.7, uneven=2.0)
"""Layers and heads of very different preference, so that a second share is full after a first one."""
DECODED = Shape(304, 2, 2, 2, 8, 0.5, None, "float64", False, 0.1, steps=264)
"""Decode steps for two decisions of a policy that decides once in 128 tokens, and a few steps after the second."""
LONG_ANSWER = DECODED._replace(tokens=576, steps=536, share=0.06)
"""More decode steps than a buffer of 512 tokens holds."""
MANY_HEADS = Shape(200, 2, 32, 1, 16, 0.5, None, "float64", False, 0.5)
"""KV heads of a model without groups, such as Llama 2."""
FAR = Shape(66_000, 1, 1, 1, 4, 0.5, None, "float64", False, 0.2, steps=0)
"""More tokens than 16 bits count, for methods whose time does not grow with the square of the number of tokens."""
LONG = Shape(4300, 1, 1, 1, 8, 0.5, None, "float64", False, 0.2, borders=3.0)
"""A prompt beyond 4 096 tokens, and beyond 2 048 tokens, above which float16 cannot represent all whole numbers.

Of the long keys, all are before a border of tiles but the last. A pool over each tile alone misses these keys."""
SHAPES = (
    Shape(300, 1, 8, 4, 64, 0.2, None, "float64", False, 0.3),
    Shape(520, 1, 8, 1, 128, 0.5, 50.0, "bfloat16", False, 0.5, size=LONG_KEYS),
    Shape(1100, 1, 1, 4, 64, 0.3, 30.0, "float32", False, 0.2),
    Shape(300, 5, 1, 8, 128, 0.2, 30.0, "float64", True, 0.6),
    Shape(600, 3, 4, 1, 64, 0.25, 50.0, "float32", False, 0.2),
    Shape(1031, 1, 2, 2, 128, 0.05, None, "float64", True, 0.4),
    LARGE_LOGITS,
    MANY_LAYERS,
    SPARSE,
    UNEVEN,
    UNEVEN._replace(layers=4, kv_heads=1, share=0.6, uneven=4.0),
    DECODED,
    LONG_ANSWER,
    MANY_HEADS,
    LONG,
    FAR,
)
"""Shapes for which a method takes a few seconds at most.

520 and 1 031 tokens end a few tokens after a chunk of any power of two from 64 to 1 024.
"""


def of_turn(inputs: Inputs, live: Array, first: int) -> Inputs:
    """Return the inputs at the end of a later turn: the tokens at `live`, and the queries from position `first` on."""
    layers = [replace(x, q=x.q[:, first:], k=x.k[:, live], v=np.asarray(x.v)[:, live]) for x in inputs.layers]
    return replace(inputs, layers=layers, token_ids=inputs.token_ids[live], positions=live)
