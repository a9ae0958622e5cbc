"""What kvpress keeps. Its presses are run as they are, on a stand-in for an attention module."""

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import kvpress  # type: ignore[import-not-found]
import numpy as np
import torch

from conformance.measure.peers.inputs import D, Inputs, L
from reference.policies.attention import observed_attention

__all__ = ["FUTURE", "KERNEL", "PRESSES", "SINK", "VERSION", "C", "W", "kept_by_press"]

VERSION = version("kvpress")
W, KERNEL, C, SINK, FUTURE = 3, 5, 4, 4, 16


def module_of(inputs: Inputs) -> Any:
    """What a press reads of an attention layer: sizes, the query projection and the rotary tables."""
    H, H_kv = len(inputs.raw_q), len(inputs.k)
    frequencies = torch.tensor(np.concatenate([inputs.inv_freq, inputs.inv_freq]))

    def rotary(x: Any, position_ids: Any) -> tuple[Any, Any]:
        angle = position_ids[..., None] * frequencies
        return angle.cos(), angle.sin()

    config = SimpleNamespace(
        num_attention_heads=H, num_key_value_heads=H_kv, num_hidden_layers=L, _attn_implementation="sdpa"
    )
    return SimpleNamespace(
        config=config, head_dim=D, layer_idx=inputs.layer, rotary_emb=rotary, q_proj=lambda hidden: hidden
    )


def kept_by_press(make: Callable[[float], Any], inputs: Inputs, eager: bool) -> list[list[int]]:
    """Kept positions of each KV head, ascending."""
    module, press = module_of(inputs), make(float(inputs.ratio))
    hidden = torch.tensor(inputs.raw_q.transpose(1, 0, 2).reshape(1, inputs.n, -1))
    keys, values = torch.tensor(inputs.k)[None], torch.tensor(inputs.v)[None]
    tables = module.rotary_emb(hidden, torch.arange(inputs.n)[None])
    A = torch.tensor(observed_attention(inputs.view, inputs.n))[None] if eager else None
    module.masked_key_indices = None
    found, _ = press.compress(module, hidden, keys, values, A, {"position_embeddings": tables})
    if module.masked_key_indices is not None:
        gone = {(int(h), int(i)) for h, i in zip(*module.masked_key_indices[1:], strict=True)}
        return [[i for i in range(inputs.n) if (h, i) not in gone] for h in range(len(inputs.k))]
    same = (found[0].numpy()[:, :, None] == inputs.k[:, None]).all(axis=3)
    return [sorted(int(i) for i in np.argmax(head, axis=1)) for head in same]


def snapkv(ratio: float) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=W, kernel_size=KERNEL)


# Each press with the constants of the comparison; whether it is given the attention weights.
PRESSES: dict[str, tuple[Callable[[float], Any], bool]] = {
    "StreamingLLM": (lambda r: kvpress.StreamingLLMPress(r, n_sink=SINK), False),
    "SnapKV": (snapkv, False),
    "PyramidKV": (lambda r: kvpress.PyramidKVPress(r, window_size=W, kernel_size=KERNEL), False),
    "ChunkKV": (lambda r: kvpress.ChunkKVPress(snapkv(r), chunk_length=C), False),
    "TOVA": (kvpress.TOVAPress, False),
    "KeyDiff": (kvpress.KeyDiffPress, False),
    "Knorm": (kvpress.KnormPress, False),
    "AdaKV": (lambda r: kvpress.AdaKVPress(snapkv(r), alpha_safeguard=0.2), False),
    "ExpectedAttention": (
        lambda r: kvpress.ExpectedAttentionPress(r, n_future_positions=FUTURE, n_sink=SINK), False
    ),
    "ObservedAttention": (kvpress.ObservedAttentionPress, True),
}
