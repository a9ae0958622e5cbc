"""Kept sets of kvpress. The presses run unchanged, on a replacement of the attention module."""

import logging
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

import kvpress  # type: ignore[import-not-found]
import numpy as np
import torch
from kvpress.presses.fastkvzip_press import FastKVzipGate  # type: ignore[import-not-found]

from lab.measure.peers.composed import LAZY
from lab.measure.peers.inputs import (
    HEAD_WEIGHTS,
    LAYER_WEIGHTS,
    Constants,
    Inputs,
    Rehearsed,
    evicted,
    positions_of,
    threshold,
)
from lab.measure.peers.learned import Learned
from reference.policies.attention import observed_attention, unrotated

VERSION = version("kvpress")
logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip's press warns whenever it is created
Array: TypeAlias = np.ndarray[Any, Any]
Make: TypeAlias = Callable[[float, Constants], Any]
"""Function that returns a press for a ratio of evicted tokens."""


def module_of(inputs: Inputs) -> Any:
    """Return the attributes of an attention layer that a press reads: sizes, query projection and rotary tables."""
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


def given_to(inputs: Inputs, eager: bool, with_keys: bool = False) -> tuple[Any, ...]:
    """Return the arguments of a press, with the module first. Keys before RoPE are a part of the hidden states."""
    module = module_of(inputs)
    hidden = torch.tensor(inputs.raw_q.transpose(1, 0, 2).reshape(1, inputs.n, -1))
    keys, values = torch.tensor(inputs.k)[None], torch.tensor(inputs.v)[None]
    tables = module.rotary_emb(hidden, torch.arange(inputs.n)[None])
    A = torch.tensor(observed_attention(inputs.view, inputs.n))[None] if eager else None
    module.masked_key_indices = None
    if with_keys:
        width, back = hidden.shape[2], unrotated(inputs.k, np.arange(inputs.n), inputs.inv_freq, 1.0)
        hidden = torch.cat([hidden, torch.tensor(back.transpose(1, 0, 2).reshape(1, inputs.n, -1))], dim=2)
        module.q_proj, module.k_proj = (lambda x: x[..., :width]), (lambda x: x[..., width:])
    return module, hidden, keys, values, A, {"position_embeddings": tables}


def kept_by_press(make: Make, inputs: Inputs, eager: bool) -> list[list[int]]:
    """Return the kept positions of each KV head, ascending.

    If the press decides over all layers, return the positions of all layers.
    """
    press: Any = make(float(inputs.ratio), inputs.constants)
    set_learned(press, Learned(inputs))
    if isinstance(press, kvpress.FastKVzipPress):
        return [head for module in gated_by(press, inputs) for head in unmasked(module, inputs)]
    if isinstance(press, kvpress.KVzipPress):
        return [head for module in rehearsed_by(press, inputs) for head in unmasked(module, inputs)]
    with_keys = isinstance(press, kvpress.LeverageScorePress | kvpress.CompactorPress)
    module, hidden, keys, *others = given_to(inputs, eager, with_keys)
    torch.manual_seed(inputs.seed)
    if isinstance(press, kvpress.DMSPress | kvpress.PerLayerCompressionPress | kvpress.DecodingPress
                  | kvpress.PrefillDecodingPress):
        one_by_one = not isinstance(press, kvpress.DMSPress | kvpress.PerLayerCompressionPress)
        stored = stored_by(press, inputs, module, hidden, inputs.n // 2 if one_by_one else inputs.n)
        if module.masked_key_indices is not None:
            return unmasked(module, inputs)
        return [sorted(head.tolist()) for head in positions_of(stored[0].numpy(), inputs.k)]
    result, places = gathered_by(press, module, hidden, keys, *others)
    if module.masked_key_indices is not None:
        return unmasked(module, inputs)
    if result is keys:
        return [[*range(inputs.n)] for _ in inputs.k]
    if places is None:
        places = positions_of(result[0].numpy(), inputs.k)
    return [sorted(head.tolist()) for head in places]


def stored_by(press: Any, inputs: Inputs, module: Any, hidden: Any, prompt: int) -> Any:
    """Return the keys that are stored after a prompt, and one decode step for each later token."""
    keys, values = torch.tensor(inputs.k)[None], torch.tensor(inputs.v)[None]
    layer = SimpleNamespace(keys=keys[:, :, :0], values=values[:, :, :0])
    cache, first = SimpleNamespace(layers={inputs.layer: layer}), 0
    for stop in (prompt, *range(prompt + 1, inputs.n + 1)):
        layer.keys = torch.cat([layer.keys, keys[:, :, first:stop]], dim=2)
        layer.values = torch.cat([layer.values, values[:, :, first:stop]], dim=2)
        at = torch.arange(first, stop)
        shown = {"hidden_states": hidden[:, first:stop], "past_key_values": cache, "cache_position": at}
        press.forward_hook(module, [], {**shown, "position_ids": at[None]}, [None, None])
        first = stop
    return layer.keys


def gathered_by(press: Any, module: Any, hidden: Any, keys: Any, *others: Any) -> tuple[Any, Any]:
    """Return the keys that a press keeps, and their positions (H_kv, kept), or None if the press gathers no keys."""
    gather, taken = torch.Tensor.gather, list[Any]()

    def recorded(x: Any, dim: int, index: Any) -> Any:
        taken.extend([index] if x is keys else [])
        return gather(x, dim, index)

    with patch.object(torch.Tensor, "gather", recorded):
        result, _ = press.compress(module, hidden, keys, *others)
    return result, taken[-1][0, :, :, 0].numpy() if taken else None


def unmasked(module: Any, inputs: Inputs) -> list[list[int]]:
    """Return the positions that are not masked by a press that only masks."""
    marks = module.masked_key_indices or ((), (), ())
    gone = {(int(h), int(i)) for h, i in zip(*marks[1:], strict=True)}
    return [[i for i in range(inputs.n) if (h, i) not in gone] for h in range(len(inputs.k))]


def set_learned(press: Any, learned: Learned) -> None:
    """Set the filters, statistics, networks or gates that a press would download."""
    taken = learned.calibration
    if isinstance(press, kvpress.QFilterPress):
        press.q_filters = -torch.tensor(taken.filters)
    if isinstance(press, kvpress.ExpectedAttentionStatsPress):
        press.mu, press.cov = torch.tensor(taken.mean), torch.tensor(taken.covariance)
    if isinstance(press, kvpress.KVzapPress):
        arrays = {name: torch.tensor(x) for name, x in learned.networks.arrays.items()}
        press.kvzap_model = SimpleNamespace(layers=[
            torch.nn.Sequential(
                *([linear(arrays["W_1"][at], arrays["b_1"][at]), torch.nn.GELU()] if "W_1" in arrays else []),
                linear(arrays["W_2"][at], arrays["b_2"][at]),
            ) for at in range(len(arrays["W_2"]))
        ])
    if isinstance(press, kvpress.RandomPress):
        press.seed = learned.inputs.seed
    if isinstance(press, kvpress.LUKVPress):
        rates = evicted(press.compression_ratio, HEAD_WEIGHTS[learned.sizes[2]])
        press._budget_curves = np.broadcast_to(rates, (99, learned.sizes[0], len(rates))).copy()
    if isinstance(press, kvpress.DuoAttentionPress):
        given, scores = learned.inputs.constants, learned.head_scores
        press.sink_size, press.recent_size = given.sinks, given.window
        order = np.argsort(scores, axis=None)[:round(scores.size * press.head_compression_ratio)]
        press.streaming_mask = torch.zeros(scores.shape, dtype=torch.bool)
        press.streaming_mask[np.unravel_index(order, scores.shape)] = True
    if isinstance(press, kvpress.FastKVzipPress):
        press.gates = [gate_of(learned, at) for at in range(len(taken.layers))]


def linear(weight: Any, bias: Any) -> Any:
    outputs, inputs = weight.shape
    result = torch.nn.Linear(inputs, outputs, dtype=torch.float64)
    result.load_state_dict({"weight": weight, "bias": bias})
    return result


def gate_of(learned: Learned, layer: int) -> Any:
    """Return a gate of kvpress with the weights of a layer. The gate's norms compute in float32."""
    x = {name: torch.tensor(array[layer]) for name, array in learned.gates.arrays.items()}
    (H, r, width), (H_kv, s, _) = x["W_q"].shape, x["base"].shape
    gate = FastKVzipGate(layer, width, H_kv, H // H_kv, torch.float64, r, s).double()
    gate.load_state_dict({
        "q_proj.weight": x["W_q"].reshape(-1, width), "q_proj.bias": x["b_q"].flatten(),
        "k_proj.weight": x["W_k"].reshape(-1, width), "q_norm.weight": x["norm_q"], "k_norm.weight": x["norm_k"],
        "k_base": x["base"][:, None], "b": x["bias"].reshape(H_kv, 1, -1),
    })
    return gate


def gated_by(press: Any, inputs: Inputs) -> list[Any]:
    """Return the masked modules of the layers after a press has scored the hidden states of each layer."""
    hidden = torch.tensor(Learned(inputs).hidden)
    modules = [SimpleNamespace(**{**vars(module_of(inputs)), "layer_idx": at}) for at in range(len(hidden))]
    press.score_val = [None for _ in modules]
    with torch.no_grad():
        for module, x in zip(modules, hidden, strict=True):
            module.masked_key_indices = None
            press._score_fast(module, x[None])
        press.compress_post(SimpleNamespace(model=SimpleNamespace(
            layers=[SimpleNamespace(self_attn=module) for module in modules],
        )))
    return modules


class Reader(SimpleNamespace):
    """Model whose layers store the given tokens. The hooks of a press on the layers do the rest."""

    def __call__(self, input_ids: Any, past_key_values: Any) -> None:
        for at, (layer, stored) in enumerate(zip(self.layers, past_key_values.layers, strict=True)):
            hidden, queries = map(torch.tensor, self.prompt.read(at, input_ids[0].numpy()))
            positions = stored.keys.shape[2] + torch.arange(len(hidden))
            stored.keys, stored.values = (torch.cat([x, queries[None]], dim=2) for x in (stored.keys, stored.values))
            tables = layer.self_attn.rotary_emb(hidden, positions[None])
            layer.self_attn(hidden_states=hidden[None], past_key_values=past_key_values, position_embeddings=tables)


def rehearsed_by(press: Any, inputs: Inputs) -> list[Any]:
    """Return the masked modules of the layers after KVzip's press has made the model repeat the prompt."""
    prompt, L, modules = Rehearsed(inputs), inputs.constants.layers, list[Any]()
    for layer in range(L):
        modules.append(torch.nn.Module())
        vars(modules[-1]).update({**vars(module_of(inputs)), "layer_idx": layer, "forward": lambda **_: (None, None)})
    pairs = [[torch.tensor(x)[None] for x in prompt.cached(layer)] for layer in range(L)]
    first, later, answer = prompt.template
    press._context_ids, press._suffix_ids = torch.arange(inputs.n)[None], torch.tensor([answer])
    press._cache = SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v) for k, v in pairs])
    press.prefix_length = prompt.prefix
    tokenizer = SimpleNamespace(encode=lambda text, **_: torch.tensor([later if "starting with" in text else first]))
    reader = Reader(prompt=prompt, layers=[SimpleNamespace(self_attn=module) for module in modules])
    sizes = SimpleNamespace(num_hidden_layers=L, num_key_value_heads=len(inputs.k))
    model = SimpleNamespace(model=reader, config=sizes, dtype=torch.float64, device="cpu")
    torch.set_default_dtype(torch.float64)  # otherwise the mask of the press overflows
    press._perform_kvzip_compression(model, tokenizer)
    torch.set_default_dtype(torch.float32)
    return modules


def scores_by_press(make: Make, inputs: Inputs, eager: bool) -> Array:
    """Return the scores (H_kv, n) of a press, or of the press inside it."""
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


def statistics(ratio: float, given: Constants) -> Any:
    return kvpress.ExpectedAttentionStatsPress(ratio, n_future_positions=given.future, n_sink=given.sinks)


def chunk(ratio: float, given: Constants) -> Any:
    return kvpress.ChunkPress(kvpress.KeyDiffPress(ratio), chunk_length=given.piece)


def gated(ratio: float, given: Constants) -> Any:
    return kvpress.EntropyGatedChunkKVPress(
        kvpress.KnormPress(ratio), chunk_length=given.chunk, low_entropy_chunk_length=given.gate,
    )


def kvzip(ratio: float, given: Constants, **options: bool) -> Any:
    return kvpress.KVzipPress(ratio, n_sink=given.sinks, chunk_size=given.rehearsed, **options)


def decoding(base: Any, given: Constants) -> Any:
    return kvpress.DecodingPress(base, compression_interval=given.chunk, target_size=given.piece)


def compactor(ratio: float, given: Constants) -> Any:
    return kvpress.CompactorPress(ratio, sink_size_start=given.sinks, sink_size_end=1, chunk_size=given.chunk)


def lazy_layers(_: float, given: Constants) -> Any:
    return kvpress.SimLayerKVPress(lazy_threshold=LAZY, n_recent=given.window, n_initial=given.sinks)


def ratio_decoding(ratio: float, given: Constants) -> Any:
    return kvpress.CompressionRatioDecodingPress(
        kvpress.KnormPress(), compression_interval=given.chunk, target_compression_ratio=ratio,
    )


# Presses with the constants of the comparison, and whether they get the attention weights.
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
    "CriticalAdaKV": (lambda r, given: kvpress.CriticalAdaKVPress(snapkv(r, given), alpha_safeguard=0.2), False),
    "LagKV": (lambda r, given: kvpress.LagKVPress(r, n_sink=given.sinks, lag_size=given.lag), False),
    "ObservedAttention": (lambda r, _: kvpress.ObservedAttentionPress(r), True),
    "Chunk of KeyDiff": (chunk, False),
    "EntropyGatedChunkKV of Knorm": (gated, False),
    "KVzip": (kvzip, False),
    "KVzip by layer": (lambda r, given: kvzip(r, given, layerwise=True), False),
    "KVzip+": (lambda r, given: kvzip(r, given, kvzip_plus_normalization=True), False),
    "DMS of Knorm": (lambda r, given: kvpress.DMSPress(kvpress.KnormPress(), threshold(r), given.window), False),
    "QFilter": (lambda r, _: kvpress.QFilterPress(r), False),
    "ExpectedAttentionStats": (statistics, False),
    "KVzap": (lambda r, _: kvpress.KVzapPress(r), False),
    "FastKVzip": (lambda r, given: kvpress.FastKVzipPress(r, n_sink=given.sinks), False),
    "CUR": (lambda r, given: kvpress.CURPress(r, num_sinks=given.sinks, local_window_size=given.lag), False),
    "Cap": (
        lambda r, given: kvpress.CapPress(r, n_sink=given.sinks, n_future_positions=given.future), False,
    ),
    "NonCausalAttn": (lambda r, given: kvpress.NonCausalAttnPress(r, chunk_size=given.chunk), False),
    "LeverageScore": (lambda r, _: kvpress.LeverageScorePress(r), False),
    "Compactor": (compactor, False),
    "Random": (lambda r, _: kvpress.RandomPress(r), False),
    "SimLayerKV": (lazy_layers, False),
    "PerLayerCompression of Knorm": (
        lambda r, _: kvpress.PerLayerCompressionPress(kvpress.KnormPress(), evicted(r, LAYER_WEIGHTS)), False,
    ),
    "LUKV of Knorm": (
        lambda r, given: kvpress.LUKVPress(kvpress.KnormPress(), r, sink=given.sinks, window=1), False,
    ),
    "Block of KeyDiff": (lambda r, given: kvpress.BlockPress(kvpress.KeyDiffPress(r), given.chunk), False),
    "DuoAttention": (lambda r, _: kvpress.DuoAttentionPress(r), False),
    "Decoding of KeyDiff": (lambda _, given: decoding(kvpress.KeyDiffPress(), given), False),
    "CompressionRatioDecoding of Knorm": (ratio_decoding, False),
    "PrefillDecoding of Knorm": (
        lambda r, given: kvpress.PrefillDecodingPress(kvpress.KnormPress(r), decoding(kvpress.KeyDiffPress(), given)),
        False,
    ),
}
