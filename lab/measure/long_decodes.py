"""Measure eviction during long generation: `python -m lab.measure.long_decodes --out FOLDER`.

Two tasks. "late": the model reads a prompt of 96 tokens, then 288 tokens of the text one by one, as if it had
generated them. One sentence of these is a fact. The question follows, also one by one. "copy": the model copies a
list of words in numbered lines. Each policy keeps to its budget while tokens are decoded. The command appends a row
for each sample and policy to FOLDER/rows.jsonl, and prints a table at the end. If the command was stopped, the next
call continues.

Rules, committed before any row. A task is shown only if the full cache answers 0.7 of its samples. The paired
differences of each policy from the full cache are shown with 95 % bootstrap intervals over samples; the seed is fixed.
Three statements are tested for each policy: it answers fewer late questions than the full cache, it copies fewer lines,
and its copies are longer. A statement holds if the interval excludes 0.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from conformance.paths import DOCS
from experiments.studies.report import Estimate, mean_of
from experiments.studies.results import Row, append_row, load_rows
from experiments.studies.subject import Loading, Subject
from experiments.tasks import score
from experiments.tasks.context import Ground, read_prose
from experiments.tasks.in_prose import WORDS
from experiments.tasks.needle import generator
from experiments.tasks.registry import resolve_task
from lab import pages
from models_integration import RetainedCache
from models_integration.model.cache_argument import cache_name
from models_integration.model.frame import bare, decode, encode
from reference.calibration import load_calibration

FULL, BUDGET, SAMPLES, SEED = "fullcache", 96, 16, 20261203
POLICIES = (
    FULL, "h2o", "tova", "rkv", "morphkv", "triattention", "snapkv/every=64", "crystalcache(decode=true)",
)
CALIBRATION = DOCS / "results" / "smollm2" / "facts-2048.npz"
LENGTH, PROMPT, DEPTHS = 384, 96, (0.4, 0.5, 0.6, 0.7)
"""Number of tokens of a text with a fact, of which the first are the prompt, and places of the fact."""
ITEMS = 16
ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Decoding:
    """Sample of a long generation.

    Attributes:
        prompt: token ids of the prompt.
        given: token ids that follow one by one.
        most: maximum number of generated tokens.
        stop: text that ends the generated text, or "".
        judge: function of the generated ids, which returns the score from 0 to 1.
        right: number of tokens of the right answer.
    """

    prompt: Sequence[int]
    given: Sequence[int]
    most: int
    stop: str
    judge: Callable[[Sequence[int]], float]
    right: int


def late_question(subject: Subject, index: int) -> Decoding:
    """Return a sample whose fact and question are read one token after the other."""
    ground = Ground(subject.tokenizer, read_prose(subject.tokenizer), bare(subject.tokenizer))
    task = resolve_task(f'placed_fact(depth={DEPTHS[index % len(DEPTHS)]}, mentions="none")')
    (sample,) = task(ground, LENGTH, index, SEED)
    given = (*sample.context_ids[PROMPT:], *sample.question_ids)
    right = len(ground.follow(sample.expected))
    return Decoding(
        sample.context_ids[:PROMPT], given, right + 2, "", lambda ids: score(subject.tokenizer, ids, sample), right,
    )


def lines_of(words: Sequence[str]) -> str:
    """Return the words as counted lines, and the last line "End."."""
    return "".join(f"{at}. {word}\n" for at, word in enumerate(words, 1)) + "End."


def copied(text: str, words: Sequence[str]) -> float:
    """Return the fraction of the words that the text has in a line with the right number."""
    lines = {line.strip() for line in text.split("\n")}
    return sum(f"{at}. {word}" in lines for at, word in enumerate(words, 1)) / len(words)


def copy_and_count(subject: Subject, index: int) -> Decoding:
    """Return a sample that asks for a copy of a list of words, each in a line with its number."""
    words = [str(word) for word in generator((SEED, index)).permutation(WORDS)[:ITEMS]]
    shown = f"List:\n{lines_of(words)}\n\nCopy:\n1. {words[0]}\n2."
    right = len(encode(subject.tokenizer, lines_of(words)))
    return Decoding(
        encode(subject.tokenizer, shown), (), 2 * right, "End.",
        lambda ids: copied(f"1. {words[0]}\n2.{decode(subject.tokenizer, ids)}", words), right,
    )


TASKS = {"late": late_question, "copy": copy_and_count}


@torch.no_grad()
def row_of(subject: Subject, task: str, index: int, policy: str) -> Row:
    """Return the score and the length of an answer with a policy, and the most tokens that the first layer held."""
    sample = TASKS[task](subject, index)
    with subject.policy(policy, BUDGET)(subject.model):
        cache, token = _next(subject.model, sample.prompt, None)
        held = cache.stored_length
        for one in sample.given:
            cache, token = _next(subject.model, [one], cache)
            held = max(held, cache.stored_length)
        ids = [token]
        while len(ids) < sample.most and token not in subject.stop_ids and not _ended(subject, ids, sample.stop):
            cache, token = _next(subject.model, [token], cache)
            held = max(held, cache.stored_length)
            ids.append(token)
    return {
        "task": task, "index": index, "policy": policy, "budget": BUDGET, "score": sample.judge(ids), "held": held,
        "length": len(ids) / sample.right, "tokens": len(sample.prompt) + len(sample.given) + len(ids),
    }


def _next(model: PreTrainedModel, ids: Sequence[int], cache: RetainedCache | None) -> tuple[RetainedCache, int]:
    output = model(input_ids=torch.tensor([list(ids)]), use_cache=True, **{cache_name(model): cache})
    return output.past_key_values, int(output.logits[0, -1].argmax())


def _ended(subject: Subject, ids: Sequence[int], stop: str) -> bool:
    return bool(stop) and stop in decode(subject.tokenizer, ids[-6:])


def measure(subject: Subject, folder: Path, samples: int = SAMPLES) -> Iterator[Row]:
    """Yield a row for each sample and policy that has no row yet."""
    done = {(row["task"], row["index"], row["policy"]) for row in load_rows(folder / ROWS)}
    for index in range(samples):
        for task in TASKS:
            for policy in POLICIES:
                if (task, index, policy) not in done:
                    row = row_of(subject, task, index, policy)
                    append_row(folder / ROWS, row)
                    yield row


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return a table of the policies: scores, differences from the full cache, lengths, and tokens held."""
    tasks = [task for task in TASKS if _column(rows, task, FULL, "score").mean() >= 0.7]
    heads = [cell for task in tasks for cell in (f"{task}, score", f"{task}, over full")]
    lengths = ["length of a copy", "length, over full"] if "copy" in tasks else []
    lines = [["policy", *heads, *lengths, "most tokens held"]]
    for policy in POLICIES:
        cells = [
            cell for task in tasks
            for cell in (f"{_column(rows, task, policy, 'score').mean():.2f}", _over(rows, task, policy, "score"))
        ]
        if lengths:
            mean = _column(rows, "copy", policy, "length").mean()
            cells += [f"{mean:.2f}", _over(rows, "copy", policy, "length")]
        held = max(row["held"] for row in rows if row["policy"] == policy)
        lines.append([f"`{policy}`", *cells, f"{held}"])
    return lines


def difference(rows: Sequence[Row], task: str, policy: str, measured: str) -> Estimate:
    """Return the mean paired difference from the full cache, with a bootstrap interval over samples."""
    return mean_of(_column(rows, task, policy, measured) - _column(rows, task, FULL, measured))


def _over(rows: Sequence[Row], task: str, policy: str, measured: str) -> str:
    if policy == FULL:
        return ""
    value, low, high, _ = difference(rows, task, policy, measured)
    return f"{value:+.2f} [{low:.2f}, {high:.2f}]"


def _column(rows: Sequence[Row], task: str, policy: str, measured: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    chosen = {row["index"]: row[measured] for row in rows if (row["task"], row["policy"]) == (task, policy)}
    return np.array([float(chosen[index]) for index in sorted(chosen)])


def main() -> None:
    """Measure all samples, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure.long_decodes", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    subject = replace(Loading("smollm2").subject(), calibration=load_calibration(CALIBRATION))
    for row in measure(subject, given.out):
        print(row, flush=True)
    head, *lines = table(load_rows(given.out / ROWS))
    print(pages.table(head, lines))


if __name__ == "__main__":
    main()
