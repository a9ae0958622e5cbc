"""Measure the processor time of a prefill against kvpress: `python -m lab.measure.peers.speed PYTHON`.

A random Llama of 77 M parameters processes a prompt on one thread. This Python runs kvspec, and a second Python runs
kvpress 0.5.5. Both run in turn. The command prints the additional time of a prefill with
eviction, as a share of the time of a plain prefill in the same round. The figures are the median over rounds and the
quartiles. `--policy NAME` selects a policy.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from statistics import quantiles
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOKENS, ROUNDS, KEPT, LAYERS = (2_048, 4_096), 7, 0.3, 12
PRESSES: dict[str, Callable[[Any, float], Any]] = {
    "streamingllm": lambda kvpress, r: kvpress.StreamingLLMPress(r),
    "snapkv": lambda kvpress, r: _snapkv(kvpress, r),
    "pyramidkv": lambda kvpress, r: kvpress.PyramidKVPress(r, window_size=32, kernel_size=7),
    "chunkkv": lambda kvpress, r: kvpress.ChunkKVPress(_snapkv(kvpress, r), chunk_length=10),
    "tova": lambda kvpress, r: kvpress.TOVAPress(r),
    "keydiff": lambda kvpress, r: kvpress.KeyDiffPress(r),
    "knorm": lambda kvpress, r: kvpress.KnormPress(r),
    "lagkv": lambda kvpress, r: kvpress.LagKVPress(r),
    "adakv": lambda kvpress, r: kvpress.AdaKVPress(_snapkv(kvpress, r)),
    "expected-attention": lambda kvpress, r: kvpress.ExpectedAttentionPress(r),
    "criticalkv": lambda kvpress, r: kvpress.CriticalKVPress(_snapkv(kvpress, r)),
    "critical-adakv": lambda kvpress, r: kvpress.CriticalAdaKVPress(_snapkv(kvpress, r)),
}
TEMPLATE = ((5, 6, 7), (8, 9), (10,))
"""Ids before, between and after the text that KVzip repeats."""
OTHERS = (
    "cake", "caote", "defensivekv", "h2o", "h2o-described", "kvcrush", "kvzip", "morphkv", "nestedkv", "rkv", "vase",
    "vatp",
)
"""Policies that kvpress does not have in this form."""


def _snapkv(kvpress: Any, r: float) -> Any:
    return kvpress.SnapKVPress(r, window_size=32, kernel_size=7)


def llama(layers: int = LAYERS) -> LlamaForCausalLM:
    """Return a random Llama: 768 wide, 12 heads on 4 KV heads. With 12 layers it has 77 M parameters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=1_024, hidden_size=768, intermediate_size=2_048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=2 * max(TOKENS),
    ))
    model.train(False)
    return model


def prompt(tokens: int) -> torch.Tensor:
    """Return a prompt (1, tokens)."""
    return torch.randint(3, 1_000, (1, tokens), generator=torch.Generator().manual_seed(1))


def serve(side: str) -> None:
    """Answer each line "policy tokens" with the processor times of a prefill without and with the policy."""
    torch.set_num_threads(1)
    model = llama()
    library = import_module(side)
    for line in sys.stdin:
        policy, tokens = line.split()
        make = _applied(library, policy, model)
        print(*(_seconds(model, int(tokens), each) for each in (nullcontext, make)), flush=True)


def _applied(library: Any, policy: str, model: LlamaForCausalLM) -> Callable[[], Any]:
    if library.__name__ == "kvpress":
        return lambda: PRESSES[policy](library, 1 - KEPT)(model)
    constants: dict[str, Any] = {"template": TEMPLATE} if policy == "kvzip" else {}
    return lambda: library.policy_from_name(policy, KEPT, **constants)(model)


@torch.no_grad()
def _seconds(model: LlamaForCausalLM, tokens: int, make: Callable[[], Any]) -> float:
    ids = prompt(tokens)
    began = time.process_time()
    with make() as run:
        given = {} if hasattr(run, "cache") else {"past_key_values": DynamicCache()}
        model(input_ids=ids, **given, logits_to_keep=1)
    return time.process_time() - began


@contextmanager
def server(python: str, side: str) -> Iterator[Callable[[str, int], float]]:
    """Context manager for a process that measures.

    Each call is one round, and returns the additional time as a share of the time of a plain prefill.
    """
    command = [python, "-m", "lab.measure.peers.speed", "--serve", side]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        def measured(policy: str, tokens: int) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            print(policy, tokens, file=process.stdin, flush=True)
            bare, under = map(float, process.stdout.readline().split())
            return under / bare - 1

        yield measured


def main() -> None:
    """Print a row for each policy and length."""
    parser = argparse.ArgumentParser(prog="lab.measure.peers.speed", description=__doc__)
    parser.add_argument("python", nargs="?", default=sys.executable, help="Python with kvpress 0.5.5")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--policy", action="append", choices=[*PRESSES, *OTHERS], help="these policies only")
    parser.add_argument("--tokens", action="append", type=int, help=f"these lengths only; default: {TOKENS}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    print("| policy | tokens | kvspec | quartiles | kvpress | quartiles |\n|---|---|---|---|---|---|")
    with server(sys.executable, "models_integration") as ours, server(options.python, "kvpress") as theirs:
        for policy in options.policy or (*PRESSES, *OTHERS):
            for tokens in options.tokens or TOKENS:
                sides = [ours, theirs] if policy in PRESSES else [ours]
                rounds = [[side(policy, tokens) for side in sides] for _ in range(options.rounds + 1)][1:]
                cells = [_cell(list(side)) for side in zip(*rounds, strict=True)]
                print(f"| {policy} | {tokens} | {' | '.join(cells)} |", flush=True)


def _cell(parts: list[float]) -> str:
    low, middle, high = (100 * part for part in quantiles(parts, n=4, method="inclusive"))
    return f"{middle:.1f} % | {low:.1f} to {high:.1f}"


if __name__ == "__main__":
    main()
