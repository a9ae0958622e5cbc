"""What the pocket model answers with its full cache: `python -m models_integration.pocket.training.evaluate`.

Exact match of greedy answers, task by task and length by length, on held-out values and on two fillers that
training never showed: held-out sentences of the training grammar, and the tasks' default paragraphs.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models_integration.pocket.shipped import ASSETS, load_pocket
from models_integration.pocket.training.facts import HELD_OUT_VALUES
from models_integration.pocket.training.filler_text import held_out_filler
from models_integration.tasks import DEFAULT_FILLER, TASKS, Filler, Sample, draw_sample, score

__all__ = [
    "MAX_NEW_TOKENS", "SAMPLES", "Cell", "answer", "draw_held_out", "evaluate", "evaluation_fillers", "main",
    "read_cells", "table",
]

SEED = 42
LENGTHS = (512, 1024, 2048, 4096)
DISTRACTORS = (0, 3)
SAMPLES = 60
MAX_NEW_TOKENS = 24
"""More than the longest answer sentence; an answer ends by itself."""

RESULTS_FILE = "evaluation.json"


@dataclass(frozen=True)
class Cell:
    """One figure of the table: exact matches among the samples of a task, filler, distractor count, length."""

    task: str
    filler: str
    distractors: int
    length: int
    samples: int
    correct: int

    @property
    def accuracy(self) -> float:
        """Share of exact matches."""
        return self.correct / self.samples


def evaluation_fillers() -> dict[str, Filler]:
    """The fillers of the table by name."""
    return {"held-out": held_out_filler(SEED), "default": DEFAULT_FILLER}


@torch.no_grad()
def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[int]:
    """Token ids of the greedy answer to a sample."""
    prompt = torch.tensor([[*sample.context_ids, *sample.question_ids]], device=model.device)
    generating: Any = model  # some versions declare the mixin's self in a way that mypy refuses
    generated = generating.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return [int(token) for token in generated[0, prompt.shape[1] :]]


def draw_held_out(
    tokenizer: PreTrainedTokenizerFast, task: str, filler: Filler, distractors: int, length: int, count: int
) -> list[Sample]:
    """The samples of one cell, with held-out values."""
    return [
        draw_sample(task, tokenizer, length, i, SEED, filler=filler, distractors=distractors, values=HELD_OUT_VALUES)
        for i in range(count)
    ]


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lengths: Sequence[int], samples: int
) -> list[Cell]:
    """Every cell of the table; each is printed as soon as it is known."""
    cells: list[Cell] = []
    for name, filler in evaluation_fillers().items():
        for task in TASKS:
            for distractors in DISTRACTORS:
                for length in lengths:
                    drawn = draw_held_out(tokenizer, task, filler, distractors, length, samples)
                    correct = sum(score(tokenizer, answer(model, tokenizer, sample), sample) == 1 for sample in drawn)
                    cells.append(Cell(task, name, distractors, length, samples, correct))
                    print(f"{task} {name} {distractors} {length}: {cells[-1].accuracy:.3f}", flush=True)
    return cells


def table(cells: Sequence[Cell]) -> str:
    """The cells as a Markdown table with one column a length."""
    lengths = sorted({cell.length for cell in cells})
    rows: dict[tuple[str, str, int], dict[int, float]] = {}
    for cell in cells:
        rows.setdefault((cell.task, cell.filler, cell.distractors), {})[cell.length] = cell.accuracy
    lines = [f"| task | filler | distractors | {' | '.join(str(length) for length in lengths)} |"]
    lines.append("|---|---|---|" + "---|" * len(lengths))
    for (task, filler, distractors), by_length in rows.items():
        figures = " | ".join(f"{by_length[length]:.3f}" for length in lengths)
        lines.append(f"| {task} | {filler} | {distractors} | {figures} |")
    return "\n".join(lines)


def read_cells(folder: Path = ASSETS) -> list[Cell]:
    """The cells that were measured on a shipped model."""
    return [Cell(**fields) for fields in json.loads((folder / RESULTS_FILE).read_text())]


def main() -> None:
    """Parse the command line, measure, print the table and write the figures beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ASSETS, help="folder of the model")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples a cell")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cells = evaluate(*load_pocket(options.model), options.lengths, options.samples)
    (options.model / RESULTS_FILE).write_text(json.dumps([asdict(cell) for cell in cells]) + "\n")
    print(table(cells))


if __name__ == "__main__":
    main()
