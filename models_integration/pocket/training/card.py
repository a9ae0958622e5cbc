"""The model card, written from what was measured, so that its figures are always those of the shipped weights."""

import json
from collections.abc import Sequence
from pathlib import Path

from models_integration.pocket.shipped import ASSETS
from models_integration.pocket.training.evaluate import MAX_NEW_TOKENS, SAMPLES, Cell, read_cells, table
from models_integration.pocket.training.facts import HELD_OUT_VALUES
from models_integration.pocket.training.filler_text import HELD_OUT_EVERY

__all__ = ["CARD_FILE", "render_card", "write_card"]

CARD_FILE = "MODEL_CARD.md"
COST_FILE = "training.json"

_CARD = """\
# The pocket model

A Llama of {parameters:,} parameters ({mebibytes:.1f} MiB, float32) with its own tokenizer, trained from scratch
by scripts of this package. It does one thing: it reads a context that states facts ("The secret code for Project
Aurora is 7492."), is asked about one of them, and answers in a full sentence. It is a measuring device for caches
that evict, so that the first command works without a download. It is no language model and knows nothing else.

{layers} layers, {width} wide, {queries} query heads on {keys} key-value heads of {head}, rotary base {theta:.0e},
{vocabulary} tokens: the 256 bytes, the words of its training text, and digits and punctuation on their own. A text
opens with a `<bos>` token.

## Full-cache exact match

Greedy answers, {samples} samples a cell, at most {answer} new tokens; a sample counts if its answer contains the value.
Columns are context tokens. Values are held out of training ({values} of 9000 numbers). So are both fillers: *held-out*
is the one sentence in {every} of the training grammar that a checksum reserves; *default* is the tasks' own
paragraphs, whose sentences training never shows. Distractors are facts of the same form about other subjects. Depths
take turns over 0, 0.25, 0.5, 0.75 and 1; densities over high and low.

{table}

The lowest cell up to 2048 tokens is {lowest:.3f} without distractors and {lowest_distracted:.3f} with them.

## Cost

{steps} steps, {millions:.1f} million tokens, {minutes:.0f} minutes of one thread on a CPU that other work shared.

## Recipe

The scripts are in `models_integration.pocket.training`. `python -m models_integration.pocket.training.train` with
`--checkpoint FOLDER` goes on where it was stopped, `evaluate` measures the table, and `card` writes this card.

- **Rows** hold many facts and several questions, each answered in a sentence. The loss weighs an answer's digits 1,
  its words 0.1 and running text 0.03; the value's first statement is not scored.
- **Length**: dense rows of 192 tokens first, then 64 to 512, then up to 2048, at last up to 4352.
- **Positions jump** between sentences in half of the rows, up to 4480. Short rows then teach long distances, and the
  model meets what it sees after eviction: survivors at their original positions.
- **Initial weights are structured** (`initialisation.py`): layer 0 starts by looking one to four tokens back, the
  others by matching content on slowly turning rotary channels and copying what they find.
- AdamW, warm-up to 3e-3, linear decay to 1e-5, gradient norm 1.

## Limits

- Layer 0 looks mostly at the few tokens before, whatever stands there, so the salience that a policy reads from its
  attention is nearly flat.
- Subjects and sentence forms of the tasks occur in training; a subject that the tokenizer has to spell byte by byte is
  retrieved less reliably than a known word.
- Values are four digits.
"""


def _lowest(cells: Sequence[Cell], distracted: bool) -> float:
    chosen = [cell.accuracy for cell in cells if bool(cell.distractors) == distracted and cell.length <= 2048]
    return min(chosen)


def render_card(folder: Path) -> str:
    """The text of the card for the files in a folder."""
    cells = read_cells(folder)
    cost = json.loads((folder / COST_FILE).read_text())
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    return _CARD.format(
        parameters=_parameters(weights),
        mebibytes=weights.stat().st_size / 2**20,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        queries=config["num_attention_heads"],
        keys=config["num_key_value_heads"],
        head=config["head_dim"],
        theta=config["rope_parameters"]["rope_theta"],
        vocabulary=config["vocab_size"],
        samples=SAMPLES,
        answer=MAX_NEW_TOKENS,
        values=len(HELD_OUT_VALUES),
        every=HELD_OUT_EVERY,
        table=table(cells),
        lowest=_lowest(cells, distracted=False),
        lowest_distracted=_lowest(cells, distracted=True),
        steps=cost["step"],
        millions=cost["tokens"] / 1e6,
        minutes=cost["seconds"] / 60,
    )


def _parameters(weights: Path) -> int:
    """Numbers in a safetensors file (float32), by its header, which opens with its own length."""
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    offsets: list[tuple[int, int]] = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return sum(end - begin for begin, end in offsets) // 4


def write_card(folder: Path) -> None:
    """Write the card into its folder."""
    (folder / CARD_FILE).write_text(render_card(folder))


if __name__ == "__main__":
    write_card(ASSETS)
