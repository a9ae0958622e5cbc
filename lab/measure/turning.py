"""Measure the time to rotate kept keys to new positions: `python -m lab.measure.turning`.

A policy with renumbered positions reads a prompt and keeps a number of tokens for each KV head. The command prints the
processor time of the prompt's forward pass, and of turning the kept keys of all layers once, with one thread.
"""

import argparse
import time
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.studies.subject import Loading
from experiments.tasks.context import read_prose
from models_integration import policy_from_name
from models_integration.cache.renumbering import RENUMBERED
from models_integration.model.cache_argument import cache_name

REPEATS = 5


class Cost(NamedTuple):
    """Processor time in seconds.

    Attributes:
        prompt: number of tokens of the prompt.
        turned: number of turned keys of one KV head, the mean over the layers.
        prefill: time of the forward pass of the prompt, with the eviction.
        turning: time of turning the keys of all layers and KV heads once, the median of several repeats.
    """

    prompt: int
    turned: float
    prefill: float
    turning: float

    @property
    def share(self) -> float:
        """Turning, divided by the forward pass."""
        return self.turning / self.prefill


def measure(model: PreTrainedModel, prompt: Tensor, kept: int) -> Cost:
    """Measure the cost for one prompt of token ids (1, n). Knorm keeps tokens from all parts, so most keys turn."""
    repeats = []
    with torch.no_grad(), policy_from_name("knorm", kept, positions=RENUMBERED)(model) as run:
        start = time.process_time()
        model(prompt, logits_to_keep=1)
        prefill = time.process_time() - start
        assert run.cache is not None
        # The forward pass after the eviction numbers the layers.
        model(prompt[:, -1:], **{cache_name(model): run.cache})
        layers: list[Any] = list(run.cache.full_layers)
        for _ in range(REPEATS):
            for layer in layers:
                layer.turned = None
            start = time.process_time()
            for layer in layers:
                layer.attended()
            repeats.append(time.process_time() - start)
    keys = sum(layer.turned.keys[..., 0].numel() for layer in layers)
    return Cost(prompt.shape[1], keys / sum(layer.heads for layer in layers), prefill, median(repeats))


def main() -> None:
    """Measure a model, and print the times."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure.turning", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="model, as for `kvspec compare`")
    parser.add_argument("--prompt", type=int, default=8_176, help="number of tokens of the prompt")
    parser.add_argument("--kept", type=int, default=4_096, help="number of kept tokens of each KV head")
    given = parser.parse_args()
    torch.set_num_threads(1)
    subject = Loading(given.model, dtype="float32").subject()
    ids = torch.tensor([read_prose(subject.tokenizer).tokens[: given.prompt]])
    cost = measure(subject.model, ids, given.kept)
    print(f"{cost.turned:.0f} of {given.kept} keys of each KV head turned; prompt of {cost.prompt} tokens:"
          f" {cost.prefill:.2f} s; turning: {cost.turning:.3f} s, {cost.share:.2%} of the prompt")


if __name__ == "__main__":
    main()
