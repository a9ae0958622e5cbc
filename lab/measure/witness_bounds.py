"""Measure the bounds of the witness: `python -m lab.measure.witness_bounds`, with the weights of SmolLM2.

For each dtype and seed, a session of SnapKV in this dtype answers 24 prompts of the witness. The witness reads the
answers in float32. The first table has the distance between the two, and how often the difference of a fault is larger
than the tolerance. The second table has the verdicts of the rule "masking" of spec/witness.md. The log-probabilities of
a fault are those of the witness's model with the fault, plus the rounding of the answer.

`--right` measures right answers alone, to count false alarms. Linear layers then multiply in float32
and round the result to the dtype, as the tensor cores of a GPU do. A CPU without instructions for bfloat16 is slow.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.server_suite.prompts import ANSWER, prompts_of
from conformance.server_suite.reading import BOUNDS, WEIGHT_NOISE, Bound, Event, HeadSets, Reader, with_noise
from conformance.server_suite.witness import SPREAD
from lab import pages
from models_integration import RetentionPolicy, policy_from_name
from models_integration.model.cache_argument import cache_name
from models_integration.pocket import model_folder

__all__ = ["Measured", "masking_verdict", "measure", "right_answers", "right_row", "table", "verdict_table"]

GROUPS = ("shared prefixes", "recalled", "at once", "lengths")
SHORTEST = 33
"""Length of the shortest prompt. SnapKV evicts nothing from a prompt of 32 tokens."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAULTS = ("full cache", "slot numbers", "one exchanged token", "renumbered")
RIGHT = "right answer"
VERDICTS = ("passed", "undecided", "failed")


@dataclass(frozen=True)
class Measured:
    """Distances of one answer.

    Attributes:
        mean: mean difference between the answer and the reading of the witness.
        largest: largest difference of an answer token.
        decided: True if masking changes the log-probabilities enough.
        noticed: faults whose difference is larger than the tolerance.
        verdicts: verdict of the rule "masking", for the right answer and for each fault.
    """

    mean: float
    largest: float
    decided: bool
    noticed: tuple[str, ...]
    verdicts: Mapping[str, str]


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


def masking_verdict(bound: Bound, difference: float, decided: bool, moved: float) -> str:
    """Return the verdict of the rule "masking", by the conditions of `check_masking`.

    Args:
        bound: bound of the dtype.
        difference: distance between the answer and the reading of the witness.
        decided: True if masking changes the log-probabilities enough.
        moved: largest distance by which noise in the weights moves the reading.
    """
    if difference <= bound.tolerance:
        return "passed" if decided else "undecided"
    return "undecided" if moved > bound.tolerance / 2 else "failed"


def measured(
    reader: Reader, noisy: Sequence[Reader], prompt: Sequence[int], given: tuple[list[int], Tensor, HeadSets],
    bound: Bound,
) -> Measured:
    """Return the distances and verdicts of an answer from `answer`. `noisy` are readers whose weights have noise."""
    tokens, logprobs, sets = given
    ids, n, events = [*prompt, *tokens], len(prompt), [Event(len(prompt), sets)]
    masked = reader.logprobs(ids, n, events)
    rounding = logprobs - masked
    faults: Mapping[str, tuple[Sequence[Event], str]] = dict(zip(FAULTS, (
        ([], "kept"), (events, "slots"), ([Event(n, exchanged(sets, n))], "kept"), (events, "renumbered"),
    ), strict=True))
    read = {name: reader.logprobs(ids, n, *fault) for name, fault in faults.items()}
    differences = {name: bound.apart(one + rounding, masked) for name, one in {RIGHT: masked, **read}.items()}
    decided = bound.apart(masked, read["full cache"]) >= bound.power * bound.tolerance
    moved = max(bound.apart(one.logprobs(ids, n, events), masked) for one in noisy)
    return Measured(
        float(rounding.abs().mean()), float(rounding.abs().max()), decided,
        tuple(name for name in FAULTS if differences[name] > bound.tolerance),
        {name: masking_verdict(bound, one, decided, moved) for name, one in differences.items()},
    )


def models(folder: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model that answers, in `dtype`, and the model of the witness, in float32."""
    served, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=one) for one in (DTYPES[dtype], torch.float32))
    return served, model


def readers(model: PreTrainedModel, dtype: str) -> tuple[Reader, list[Reader]]:
    """Return the reader of the witness, and readers whose weights have noise."""
    return Reader(model), [Reader(with_noise(model, WEIGHT_NOISE[dtype], at)) for at in range(SPREAD)]


def all_prompts(model: PreTrainedModel, groups: Sequence[str], seed: int) -> list[list[int]]:
    """Return the prompts from which SnapKV evicts."""
    longest = model.config.max_position_embeddings - ANSWER
    return [
        ids for group in groups for ids in prompts_of(group, model.config.vocab_size, longest, seed)
        if len(ids) >= SHORTEST
    ]


def multiply_in_float32(model: PreTrainedModel) -> None:
    """Let the linear layers of a model multiply in float32, and round the result to the dtype of the input."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight, bias = (None if one is None else one.float() for one in (module.weight, module.bias))
            module.forward = partial(rounded_linear, weight, bias)  # type: ignore[method-assign]


def rounded_linear(weight: Tensor, bias: Tensor | None, values: Tensor) -> Tensor:
    return torch.nn.functional.linear(values.float(), weight, bias).to(values.dtype)


def right_answers(folder: str, dtype: str, groups: Sequence[str], seed: int) -> list[tuple[float, bool]]:
    """Return for each right answer its distance from the reading of the witness, and whether rule 2 fails it."""
    served, model = models(folder, dtype)
    multiply_in_float32(served)
    reader, noisy = readers(model, dtype)
    policy, bound, result = policy_from_name("snapkv", 0.3), BOUNDS[dtype], list[tuple[float, bool]]()
    for at, ids in enumerate(all_prompts(model, groups, seed)):
        tokens, logprobs, sets = answer(served, policy, ids, 1000 * seed + at)
        request = [*ids, *tokens], len(ids), [Event(len(ids), sets)]
        masked = reader.logprobs(*request)
        difference, moved = bound.apart(logprobs, masked), 0.0
        if difference > bound.tolerance:
            moved = max(bound.apart(one.logprobs(*request), masked) for one in noisy)
        result.append((difference, masking_verdict(bound, difference, True, moved) == "failed"))
    return result


def right_row(dtype: str, answers: Sequence[tuple[float, bool]]) -> str:
    """Return the number of right answers, their largest difference, and the number of false alarms."""
    bound, differences = BOUNDS[dtype], [difference for difference, _ in answers]
    above = sum(one > bound.tolerance for one in differences)
    return (f"{dtype}: {len(answers)} right answers, largest difference {max(differences):.2g}, {above} above the "
            f"tolerance of {bound.tolerance:g}, {sum(failed for _, failed in answers)} false alarms")


def measure(folder: str, dtype: str, groups: Sequence[str] = GROUPS, seed: int = 0) -> list[Measured]:
    """Return the distances and verdicts of all answers of a model whose sessions run in `dtype`."""
    served, model = models(folder, dtype)
    policy, prompts = policy_from_name("snapkv", 0.3), all_prompts(model, groups, seed)
    reader, noisy = readers(model, dtype)
    result = []
    for at, ids in enumerate(prompts):
        given = answer(served, policy, ids, 1000 * seed + at)
        result.append(measured(reader, noisy, ids, given, BOUNDS[dtype]))
        print(f"{dtype}, seed {seed}: {len(result)} of {len(prompts)} answers", file=sys.stderr, flush=True)
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


def verdict_table(results: Mapping[str, Sequence[Measured]]) -> str:
    """Return the number of each verdict by dtype and log-probabilities, as a table of Markdown."""
    rows = []
    for dtype, all_ in results.items():
        for name in (RIGHT, *FAULTS):
            counts = Counter(one.verdicts[name] for one in all_)
            rows.append([dtype, name, *(f"{counts[verdict]}" for verdict in VERDICTS)])
    return pages.table(["dtype", "log-probabilities", *VERDICTS], rows)


def main(options: Sequence[str]) -> int:
    """Print the tables of a model. They are printed again after each seed."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure.witness_bounds", description=main.__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="name or folder of a model. Default: smollm2")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes. Default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="random seeds of the prompts. Default: 0")
    parser.add_argument("--right", action="store_true", help="measure right answers alone, and count false alarms")
    chosen = parser.parse_args(options)
    folder, results = str(model_folder(chosen.model)), dict[str, list[Measured]]()
    right: dict[str, list[tuple[float, bool]]] = {dtype: [] for dtype in chosen.dtypes}
    for seed in chosen.seeds:
        if chosen.right:
            for dtype in chosen.dtypes:
                right[dtype].extend(right_answers(folder, dtype, GROUPS, seed))
                print(right_row(dtype, right[dtype]), flush=True)
            continue
        for dtype in chosen.dtypes:
            results.setdefault(dtype, []).extend(measure(folder, dtype, seed=seed))
        print(f"{table(results)}\n{verdict_table(results)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
