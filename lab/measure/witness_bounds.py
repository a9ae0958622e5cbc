"""Measure the bounds of the witness: `python -m lab.measure.witness_bounds`, with the weights of SmolLM2.

For each dtype, a session of SnapKV in this dtype answers 24 prompts of the witness. The witness reads the answers
in float32. The command prints the distance between both, and how often the rule "masking" of spec/witness.md detects a
fault. The log-probabilities of a fault are those of the witness's model with the fault, plus the rounding of the
answer.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.server_suite.prompts import ANSWER, prompts_of
from conformance.server_suite.reading import BOUNDS, Event, HeadSets, Reader
from lab import pages
from models_integration import RetentionPolicy, policy_from_name
from models_integration.model.cache_argument import cache_name
from models_integration.pocket import model_folder

__all__ = ["Measured", "measure", "table"]

GROUPS = ("shared prefixes", "recalled", "at once", "lengths")
SHORTEST = 33
"""Length of the shortest prompt. SnapKV evicts nothing from a prompt of 32 tokens."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAULTS = ("full cache", "slot numbers", "one exchanged token", "renumbered")


@dataclass(frozen=True)
class Measured:
    """Distances of one answer.

    Attributes:
        mean: mean difference between the answer and the reading of the witness.
        largest: largest difference of an answer token.
        decided: True if masking changes the log-probabilities enough.
        noticed: faults that the rule "masking" detects.
    """

    mean: float
    largest: float
    decided: bool
    noticed: tuple[str, ...]


def answer(
    model: PreTrainedModel, policy: RetentionPolicy, prompt: Sequence[int], seed: int,
) -> tuple[list[int], Tensor, HeadSets]:
    """Return token ids that a session draws after a prompt, with log-probabilities and the kept sets."""
    generator, tokens, logprobs = torch.Generator().manual_seed(seed), list[int](), list[float]()
    with torch.no_grad(), policy(model) as run:
        row = model(input_ids=torch.tensor([list(prompt)])).logits[0, -1]
        assert run.cache is not None
        sets = [
            [layer.head_positions(0, head).tolist() for head in range(layer.heads)] for layer in run.cache.full_layers
        ]
        for _ in range(ANSWER):
            values = row.double().log_softmax(dim=-1)
            tokens.append(int(torch.multinomial(values.exp(), 1, generator=generator)))
            logprobs.append(float(values[tokens[-1]]))
            row = model(input_ids=torch.tensor([tokens[-1:]]), **{cache_name(model): run.cache}).logits[0, -1]
    return tokens, torch.tensor(logprobs, dtype=torch.float64), sets


def exchanged(sets: HeadSets, n: int) -> HeadSets:
    """Return sets in which one token in the middle is exchanged for the first evicted token."""
    return [[
        sorted({*(set(kept) - {kept[len(kept) // 2]}), min(set(range(n)) - set(kept))}) for kept in layer
    ] for layer in sets]


def measured(reader: Reader, prompt: Sequence[int], given: tuple[list[int], Tensor, HeadSets], dtype: str) -> Measured:
    """Return the distances of an answer from `answer`."""
    tokens, logprobs, sets = given
    ids, n, bound = [*prompt, *tokens], len(prompt), BOUNDS[dtype]
    masked = reader.logprobs(ids, n, [Event(n, sets)])
    rounding = logprobs - masked
    faults: Mapping[str, tuple[Sequence[Event], str]] = dict(zip(FAULTS, (
        ([], "kept"), ([Event(n, sets)], "slots"), ([Event(n, exchanged(sets, n))], "kept"),
        ([Event(n, sets)], "renumbered"),
    ), strict=True))
    read = {name: reader.logprobs(ids, n, *fault) for name, fault in faults.items()}
    return Measured(
        float(rounding.abs().mean()), float(rounding.abs().max()),
        bound.apart(masked, read["full cache"]) >= bound.power * bound.tolerance,
        tuple(name for name, fault in read.items() if bound.apart(fault + rounding, masked) > bound.tolerance),
    )


def measure(folder: str, dtype: str, groups: Sequence[str] = GROUPS) -> list[Measured]:
    """Return the distances of all answers of a model whose sessions run in `dtype`."""
    served, model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=one) for one in (DTYPES[dtype], torch.float32)
    )
    config, policy = model.config, policy_from_name("snapkv", 0.3)
    prompts = [
        ids for group in groups
        for ids in prompts_of(group, config.vocab_size, config.max_position_embeddings - ANSWER, 0)
        if len(ids) >= SHORTEST
    ]
    reader = Reader(model)
    result = []
    for seed, ids in enumerate(prompts):
        result.append(measured(reader, ids, answer(served, policy, ids, seed), dtype))
        print(f"{dtype}: {len(result)} of {len(prompts)} answers", file=sys.stderr, flush=True)
    return result


def table(results: Mapping[str, Sequence[Measured]]) -> str:
    """Return the distances and the detected faults by dtype, as a table of Markdown."""
    rows = []
    for dtype, all_ in results.items():
        decided = [one for one in all_ if one.decided]
        means = [one.mean for one in all_]
        rows.append([
            dtype, f"{len(all_)}", f"{min(means):.2g} to {max(means):.2g}", f"{max(one.largest for one in all_):.2g}",
            f"{len(decided)}", *(f"{sum(name in one.noticed for one in decided)}" for name in FAULTS),
        ])
    return pages.table(["dtype", "answers", "mean difference", "largest", "decided", *FAULTS], rows)


def main(names: Sequence[str]) -> int:
    """Print the table of a model, SmolLM2 by default."""
    folder = str(model_folder(names[0] if names else "smollm2"))
    print(table({dtype: measure(folder, dtype) for dtype in DTYPES}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
