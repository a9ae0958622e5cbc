"""Measure the processor time that policies add under each backend: `python -m lab.measure.backends [NAME ...]`.

A Llama with 77 M parameters reads a prompt of 2 048 tokens on one thread of a CPU, at a budget of 0.3. In each round,
the backends read the prompt under the policy, one after another. The command measures the time in which the policy
records, scores, selects and compacts inside the forward pass. The time is a share of the rest of the same forward pass,
so other programs slow down both.

The command prints the median of the rounds for `backend="auto"`. It also prints the medians for Numba and torch, if
these backends can score the policy. `--write` stores the medians of Numba and torch. From the next run on, "auto"
chooses from them.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from transformers import LlamaForCausalLM

import models_integration.policies
from lab.measure.gpu.counts import constants
from lab.measure.peers.speed import LAYERS, llama, prompt
from models_integration import RetentionPolicy, policy_from_name
from models_integration.policies.fastest import MEASURED
from models_integration.session.segment import Segment
from models_integration.session.stages import scores_owner
from reference.policies.names import BACKEND, POLICIES, constants_of

TOKENS, BUDGET, ROUNDS, WARM = 2_048, 0.3, 3, 1_280
BACKENDS = ("numba", "torch")
FILE = Path(models_integration.policies.__path__[0], MEASURED)


@contextmanager
def timed_segments() -> Iterator[list[float]]:
    """Collect the processor time of each call in which a policy works inside a forward pass."""
    result, kept = list[float](), {name: getattr(Segment, name) for name in ("attended", "finish")}

    def watched(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                result.append(time.process_time() - began)

        return run

    for name, function in kept.items():
        setattr(Segment, name, watched(function))
    try:
        yield result
    finally:
        for name, function in kept.items():
            setattr(Segment, name, function)


@torch.no_grad()
def added(policy: RetentionPolicy, model: LlamaForCausalLM, tokens: int = TOKENS) -> float:
    """Return the processor time of a policy in a prompt, as a share of the rest of the forward pass."""
    ids = prompt(tokens)
    with timed_segments() as times, policy(model):
        began = time.process_time()
        model(input_ids=ids, logits_to_keep=1)
        whole = time.process_time() - began
    return sum(times) / (whole - sum(times))


def sides(name: str, model: LlamaForCausalLM) -> dict[str, RetentionPolicy]:
    """Return the policy under "auto", and under each backend whose code computes scores of the policy."""
    given = constants(name, model)
    result = {"auto": policy_from_name(name, BUDGET, **given)}
    for backend in BACKENDS if BACKEND in constants_of(name) else ():
        policy = policy_from_name(name, BUDGET, **given, backend=backend)
        method = policy.on(model)
        if backend in scores_owner(method.policy, method.engine).split(" + "):
            result[backend] = policy
    return result


def measured(name: str, model: LlamaForCausalLM, rounds: int) -> dict[str, float]:
    """Return the median share of each side."""
    policies = sides(name, model)
    for policy in policies.values():
        added(policy, model, WARM)  # compiles, also for chunks after the first
    result: dict[str, list[float]] = {side: [] for side in policies}
    for _ in range(rounds):
        for side, policy in policies.items():
            result[side].append(added(policy, model))
    return {side: round(median(shares), 4) for side, shares in result.items()}


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings on which the figures depend."""
    return {
        "command": "python -m lab.measure.backends --write", "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread",
        "versions": {name: version(name) for name in ("numpy", "numba", "torch", "transformers")},
        "tokens": TOKENS, "budget": BUDGET, "layers": options.layers, "rounds": options.rounds,
    }


def write(row: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    """Write rows to the file. Rows of other policies stay if they were measured in the same way."""
    whole = json.loads(FILE.read_text())
    now, before = about(options), whole["cpu"]
    kept = before["added"] if all(before.get(key) == value for key, value in now.items()) else {}
    rows = {name: (kept | row)[name] for name in POLICIES if name in kept | row}
    FILE.write_text(json.dumps(whole | {"cpu": now | {"added": rows}}, indent=1) + "\n")


def main() -> None:
    """Print a row for each policy."""
    parser = argparse.ArgumentParser(prog="lab.measure.backends", description=__doc__)
    parser.add_argument("policies", nargs="*", default=list(POLICIES), metavar="NAME")
    parser.add_argument("--write", action="store_true", help='write the file from which backend="auto" chooses')
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model; 12 have 77 M parameters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = llama(options.layers)
    print(f"| policy | auto | {' | '.join(BACKENDS)} |\n|---|---|---|---|")
    with threadpool_limits(1):
        for name in options.policies:
            result = measured(name, model, options.rounds)
            cells = [f"{100 * result[side]:.1f} %" if side in result else "-" for side in ("auto", *BACKENDS)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
            stored = {backend: result[backend] for backend in BACKENDS if backend in result}
            if options.write and stored:
                write({name: stored}, options)


if __name__ == "__main__":
    main()
