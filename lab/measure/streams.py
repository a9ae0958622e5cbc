"""Measure an endless stream under both rules of rotary positions: `python -m lab.measure.streams --out FOLDER`.

StreamingLLM reads a book in segments and evicts after each segment. Every 10 000 tokens, the command appends a row to
FOLDER/rows.jsonl. If the command was stopped, the next call continues from the last row. `--page` writes the rows, the
table and the picture of docs/results/streams.md.
"""

import argparse
import json
import math
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from conformance.paths import DOCS
from experiments.studies.page.figures import curve_style, save_figure
from experiments.studies.results import Row, append_row, load_rows
from experiments.studies.subject import Loading
from experiments.tasks.context import read_prose
from lab import pages
from models_integration import RetainedCache, StreamingLLM
from models_integration.cache.renumbering import KEPT, RENUMBERED
from models_integration.model.cache_argument import cache_name
from spec.errors import SpecError

RULES = (RENUMBERED, KEPT)
ROWS = "rows.jsonl"
PAGE = DOCS / "results" / "streams.md"
"""Page of the measurement. The rows and the picture are files with the same name and a different ending."""


def measure(
    model: PreTrainedModel, ids: Sequence[int], rule: str, folder: Path, block: int = 10_000, segment: int = 256,
    budget: int = 512,
) -> Iterator[Row]:
    """Yield a row for each block of tokens that has no row yet.

    A row has the perplexity of the tokens, the bytes of the cache, and the peak bytes of the process. The tokens per
    second are of processor time.

    Args:
        model: the model.
        ids: token ids of the text. Tokens after the last whole block are left out.
        rule: "kept" or "renumbered".
        folder: folder for the rows, and for the cache after the last row.
        block: number of tokens of a row.
        segment: number of tokens of a forward pass, after which the policy evicts.
        budget: number of tokens that the policy keeps.
    """
    done = sum(row["rule"] == rule for row in load_rows(folder / ROWS))
    cache, last = torch.load(_state(folder, rule, done), weights_only=False) if done else (None, None)
    with torch.no_grad(), StreamingLLM(budget, positions=rule)(model):
        for at in range(done, len(ids) // block):
            start, losses = time.process_time(), list[Tensor]()
            for part in torch.split(torch.tensor([ids[at * block : (at + 1) * block]]), segment, dim=1):
                cache, logits = _read(model, part, cache)
                known = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
                losses.append(_losses(known, part[0, -len(known) :]))
                last = logits[-1:]
            assert cache is not None
            row = {
                "rule": rule, "from": at * block, "tokens": block, "bytes": cache.nbytes,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "perplexity": math.exp(float(torch.cat(losses).mean())),
                "tokens_per_second": block / (time.process_time() - start),
            }
            torch.save((cache, last), _state(folder, rule, at + 1))
            append_row(folder / ROWS, row)
            _state(folder, rule, at).unlink(missing_ok=True)
            yield row


def _state(folder: Path, rule: str, done: int) -> Path:
    """Return the file for the cache and the last logits after a number of rows."""
    return folder / f"{rule}-{done}.pt"


def _read(model: PreTrainedModel, ids: Tensor, cache: RetainedCache | None) -> tuple[RetainedCache, Tensor]:
    """Read a segment. Return the cache, and the logits of the tokens after each token of the segment."""
    output = model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
    return output.past_key_values, output.logits[0].float()


def _losses(logits: Tensor, gold: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, gold, reduction="none").double()


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a line for each block of tokens, and the perplexity under both rules."""
    lines = []
    for end in sorted({row["from"] + row["tokens"] for row in rows}):
        at_end = {row["rule"]: row for row in rows if row["from"] + row["tokens"] == end}
        cells = (f"{at_end[rule]['perplexity']:.2f}" if rule in at_end else "not run" for rule in RULES)
        lines.append([f"{end:,}".replace(",", " "), *cells])
    return pages.table(["tokens read", *(f"perplexity, {rule}" for rule in RULES)], lines)


def picture(rows: Sequence[Row]) -> Figure:
    """Draw the perplexity of each block under both rules."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for at, rule in enumerate(RULES):
        chosen = [row for row in rows if row["rule"] == rule]
        axes.plot([row["from"] + row["tokens"] for row in chosen], [row["perplexity"] for row in chosen], label=rule,
                  **curve_style(at, rule))
    axes.set(xlabel="tokens read", ylabel="perplexity of 10 000 tokens", yscale="log")
    axes.legend(title="rotary positions")
    return figure


def write_page(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Write the rows, the table of the page and the picture."""
    rows = sorted(rows, key=lambda row: (RULES.index(row["rule"]), row["from"]))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    page.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
    pages.write(page, {"streams": table(rows)}.__getitem__)
    title = "Perplexity over the tokens of a stream, with kept and with renumbered rotary positions"
    save_figure(picture(rows), page.with_suffix(".svg"), title)


def main() -> None:
    """Measure both rules, or write the page.

    Raises:
        SpecError: if the text is too short.
    """
    parser = argparse.ArgumentParser(prog="python -m lab.measure.streams", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows and the states of caches")
    parser.add_argument("--model", default="smollm2", help="model, as for `kvspec compare`")
    parser.add_argument("--rule", choices=RULES, help="rule of positions. Default: first renumbered, then kept")
    parser.add_argument("--tokens", type=int, default=200_000, help="number of tokens to read")
    parser.add_argument("--page", action="store_true", help="write the page from the rows, and measure nothing")
    given = parser.parse_args()
    if given.page:
        write_page(load_rows(given.out / ROWS))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    subject = Loading(given.model, dtype="float32").subject()
    ids = read_prose(subject.tokenizer).tokens[: given.tokens]
    if len(ids) < given.tokens:
        raise SpecError("tokens", given.tokens, f"must be at most {len(ids)}, the length of the text")
    warnings.filterwarnings("ignore", message="the text has")  # kept positions leave the range on purpose
    for rule in RULES if given.rule is None else (given.rule,):
        for row in measure(subject.model, ids, rule, given.out):
            print(row, flush=True)


if __name__ == "__main__":
    main()
