"""`python -m conformance.measure.gpu.counts [NAME ...]`: counts of a session under each policy, which need no GPU.

A random Llama of 12 layers reads a prompt of 2 048 tokens at a budget of 0.3. Printed for each policy: the most bytes
of keys and values that the cache holds after any layer has stored the prompt, over those of the full cache; the host
reads of a prompt of 254 tokens and of a decode step, on an emulated device.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conformance.measure.gpu.emulated import DeviceTensor, HostReads, on_device
from models_integration import RetainedCache, Session, calibrate, policy_from_name
from models_integration.cache.retained_cache import storage_bytes
from models_integration.session.method import Method
from reference.policies.names import BACKEND, POLICIES, constants_of, families_of
from spec.backend import resolve

LAYERS, TOKENS, BUDGET, VOCABULARY = 12, 2_048, 0.3, 131
SHORT = 254
"""The second step has seen 256 tokens: policies that decide every 64 or 128 tokens decide then."""
H_KV, D = 2, 16
TEMPLATE = ((5, 6, 7), (8, 9), (10,))


class Watched(RetainedCache):
    """Notes the most bytes that its layers hold."""

    most = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As a RetainedCache."""
        found = super().update(*args, **kwargs)
        self.most = max(self.most, storage_bytes(self.layers))
        return found


def deep_llama(layers: int = LAYERS) -> LlamaForCausalLM:
    """A Llama with two KV heads, in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=H_KV * D * 2, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=2 * H_KV, num_key_value_heads=H_KV, max_position_embeddings=2 * TOKENS,
    ))
    model.train(False)
    return model


def text(n: int = TOKENS) -> Tensor:
    """A prompt (1, n)."""
    return torch.randint(3, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(1))


def constants(name: str, model: LlamaForCausalLM) -> dict[str, Any]:
    """What this policy has no default of."""
    required = {"calibration", "sentence_ends", "template"} & constants_of(name)
    return {
        key: calibrate(model, text(128), template=TEMPLATE) if key == "calibration"
        else {"template": TEMPLATE, "sentence_ends": frozenset(range(3, VOCABULARY, 9))}[key]
        for key in required
    }


@torch.no_grad()
def peak(name: str, model: LlamaForCausalLM) -> float:
    """Most bytes that the cache holds after any layer, over those of the full cache."""
    cache, ids = Watched(model.config), text()
    with policy_from_name(name, BUDGET, **constants(name, model))(model):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache.most / (2 * LAYERS * H_KV * D * ids.shape[1] * 4)


def method_on(name: str, model: LlamaForCausalLM) -> Method:
    """A policy for a model, with the backend torch if it has the stages, else with the reference."""
    has = all(getattr(resolve("torch"), one) is not None for one in families_of(name))
    own = {"backend": "torch" if has else "numpy"} if BACKEND in constants_of(name) else {}
    return policy_from_name(name, BUDGET, **constants(name, model), **own).on(model)


@torch.no_grad()
def host_reads(method: Method, model: LlamaForCausalLM, n: int = SHORT) -> tuple[list[Tensor], list[int], Session]:
    """A prompt of n tokens and two decode steps on the emulated device.

    Returns:
        Logits of the prompt's last token and of the steps; host reads of kvspec in each forward; the session.
    """
    logits, counts = [], []
    with HostReads() as reads:
        session = Session(method, model)
        reads.counts.clear()
        ids, mask = DeviceTensor(text(n)), DeviceTensor(torch.ones(1, n + 2, dtype=torch.int64))
        with session:
            for step in range(3):
                given = {"input_ids": ids[:, -1:] if step else ids, "attention_mask": mask[:, : n + step]}
                output = model(**given, past_key_values=session.cache, logits_to_keep=1)
                logits.append(output.logits.cpu())
                counts.append(reads.of_kvspec())
    return logits, counts, session


def main(names: list[str]) -> None:
    """Print a row for each policy."""
    model, device = deep_llama(), on_device(deep_llama())
    print("| policy | peak / full cache | host reads, prompt | host reads, decode step |\n|---|---|---|---|")
    for name in names or POLICIES:
        _, counts, _ = host_reads(method_on(name, model), device)
        print(f"| {name} | {peak(name, model):.2f} | {counts[0]} | {max(counts[1:])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
