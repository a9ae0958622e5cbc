"""What kvpress keeps. Its presses are run as they are, on a stand-in for an attention module."""

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, TypeAlias

import kvpress  # type: ignore[import-not-found]
import numpy as np
import torch

from conformance.measure.peers.inputs import Constants, Inputs
from conformance.measure.peers.sets import positions_of
from reference.policies.attention import observed_attention

__all__ = ["PRESSES", "VERSION", "Make", "given_to", "kept_by_press", "scores_by_press"]

VERSION = version("kvpress")
Array: TypeAlias = np.ndarray[Any, Any]
Make: TypeAlias = Callable[[float, Constants], Any]
"""A press for a ratio that is removed."""


def module_of(inputs: Inputs) -> Any:
    """What a press reads of an attention layer: sizes, the query projection and the rotary tables."""
    H, H_kv = len(inputs.raw_q), len(inputs.k)
    frequencies = torch.tensor(np.concatenate([inputs.inv_freq, inputs.inv_freq]))

    def rotary(x: Any, position_ids: Any) -> tuple[Any, Any]:
        angle = position_ids[..., None] * frequencies
        return angle.cos(), angle.sin()

    config = SimpleNamespace(
        num_attention_heads=H, num_key_value_heads=H_kv, num_hidden_layers=inputs.constants.layers,
        _attn_implementation="sdpa", head_dim=inputs.k.shape[2], hidden_size=inputs.W_o.shape[2],
    )
    return SimpleNamespace(
        config=config, head_dim=inputs.k.shape[2], layer_idx=inputs.layer, rotary_emb=rotary,
        q_proj=lambda hidden: hidden, num_key_value_groups=H // H_kv,
        o_proj=SimpleNamespace(weight=torch.tensor(inputs.W_o.reshape(-1, inputs.W_o.shape[2]).T)),
    )


def given_to(inputs: Inputs, eager: bool) -> tuple[Any, ...]:
    """What a press is called with, its module first."""
    module = module_of(inputs)
    hidden = torch.tensor(inputs.raw_q.transpose(1, 0, 2).reshape(1, inputs.n, -1))
    keys, values = torch.tensor(inputs.k)[None], torch.tensor(inputs.v)[None]
    tables = module.rotary_emb(hidden, torch.arange(inputs.n)[None])
    A = torch.tensor(observed_attention(inputs.view, inputs.n))[None] if eager else None
    module.masked_key_indices = None
    return module, hidden, keys, values, A, {"position_embeddings": tables}


def kept_by_press(make: Make, inputs: Inputs, eager: bool) -> list[list[int]]:
    """Kept positions of each KV head, ascending."""
    module, *others = given_to(inputs, eager)
    found, _ = make(float(inputs.ratio), inputs.constants).compress(module, *others)
    if module.masked_key_indices is not None:
        gone = {(int(h), int(i)) for h, i in zip(*module.masked_key_indices[1:], strict=True)}
        return [[i for i in range(inputs.n) if (h, i) not in gone] for h in range(len(inputs.k))]
    return [sorted(head.tolist()) for head in positions_of(found[0].numpy(), inputs.k)]


def scores_by_press(make: Make, inputs: Inputs, eager: bool) -> Array:
    """Scores (H_kv, n) of a press, or of the one in it."""
    press: Any = make(float(inputs.ratio), inputs.constants)
    inner: Any = getattr(press, "press", press)
    scores: Array = inner.score(*given_to(inputs, eager))[0].numpy()
    return scores


def snapkv(ratio: float, given: Constants) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=given.window, kernel_size=given.kernel)


def pyramidkv(ratio: float, given: Constants) -> Any:
    return kvpress.PyramidKVPress(ratio, window_size=given.window, kernel_size=given.kernel)


def expected_attention(ratio: float, given: Constants) -> Any:
    return kvpress.ExpectedAttentionPress(ratio, n_future_positions=given.future, n_sink=given.sinks)


# Each press with the constants of the comparison; whether it is given the attention weights.
PRESSES: dict[str, tuple[Make, bool]] = {
    "StreamingLLM": (lambda r, given: kvpress.StreamingLLMPress(r, n_sink=given.sinks), False),
    "SnapKV": (snapkv, False),
    "PyramidKV": (pyramidkv, False),
    "ChunkKV": (lambda r, given: kvpress.ChunkKVPress(snapkv(r, given), chunk_length=given.chunk), False),
    "TOVA": (lambda r, _: kvpress.TOVAPress(r), False),
    "KeyDiff": (lambda r, _: kvpress.KeyDiffPress(r), False),
    "Knorm": (lambda r, _: kvpress.KnormPress(r), False),
    "AdaKV": (lambda r, given: kvpress.AdaKVPress(snapkv(r, given), alpha_safeguard=0.2), False),
    "ExpectedAttention": (expected_attention, False),
    "CriticalKV": (lambda r, given: kvpress.CriticalKVPress(snapkv(r, given)), False),
    "LagKV": (lambda r, given: kvpress.LagKVPress(r, n_sink=given.sinks, lag_size=given.lag), False),
    "ObservedAttention": (lambda r, _: kvpress.ObservedAttentionPress(r), True),
}
