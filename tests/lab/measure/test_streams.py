"""Tests of the measurements of renumbered positions: streams of text, and the time of turning keys."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments.studies.results import Row, load_rows
from lab.measure import streams, turning
from tests.models_integration.session.families import SMALL, prepared, prompt
from tests.models_integration.session.position_oracle import Oracle

pytestmark = pytest.mark.law("figures-are-counted-right")

BLOCK, SEGMENT, BUDGET, SINKS = 40, 8, 12, 4
IDS = prompt(3 * BLOCK + 5)[0].tolist()


def expected(rule: str) -> list[float]:
    """Return the perplexity of each block from the oracle.

    This function selects sinks and newest tokens with its own code.
    """
    oracle, losses, logits = Oracle(prepared("Llama", **SMALL), rule), list[float](), None
    for start in range(0, 3 * BLOCK, SEGMENT):
        ids = IDS[start : start + SEGMENT]
        new = oracle.read(ids)
        known = new[:-1] if logits is None else torch.cat([logits, new[:-1]])
        losses += cross_entropy(known, torch.tensor(ids[-len(known) :]), reduction="none").tolist()
        logits, seen = new[-1:], start + len(ids)
        kept = [at for at in range(seen) if at < SINKS or at >= seen - (BUDGET - SINKS)]
        oracle.evict({layer: [torch.tensor(kept)] for layer in oracle.raw})
    blocks = [losses[: BLOCK - 1], losses[BLOCK - 1 : 2 * BLOCK - 1], losses[2 * BLOCK - 1 :]]
    return [math.exp(sum(block) / len(block)) for block in blocks]


def rows_of(rule: str, folder: Path, blocks: int) -> Sequence[Row]:
    model = prepared("Llama", **SMALL)
    list(streams.measure(model, IDS[: blocks * BLOCK + 5], rule, folder, BLOCK, SEGMENT, BUDGET))
    return load_rows(folder / streams.ROWS)


@pytest.mark.parametrize("rule", streams.RULES)
def test_the_perplexity_of_a_stopped_stream_is_that_of_the_oracle(rule: str, tmp_path: Path) -> None:
    """The second call continues from the first row. The size of the cache does not grow."""
    assert len(rows_of(rule, tmp_path, 1)) == 1
    rows = rows_of(rule, tmp_path, 3)
    assert [row["from"] for row in rows] == [0, BLOCK, 2 * BLOCK]
    assert [row["perplexity"] for row in rows] == pytest.approx(expected(rule), rel=1e-5)
    assert {row["bytes"] for row in rows} == {SMALL["num_hidden_layers"] * 2 * BUDGET * SMALL["hidden_size"] // 2 * 4}
    assert [file.name for file in tmp_path.glob("*.pt")] == [f"{rule}-3.pt"]


def test_the_two_rules_give_different_perplexities() -> None:
    assert expected("kept")[1:] != pytest.approx(expected("renumbered")[1:], rel=1e-3)


def test_the_page_has_a_table_and_a_picture_of_the_rows(tmp_path: Path) -> None:
    """The rows of two processes can be in any order. A block that one rule did not read is "not run"."""
    rows: list[Row] = [
        {"rule": rule, "from": start, "tokens": 10_000, "perplexity": perplexity} for rule, start, perplexity in
        [("kept", 0, 7.25), ("renumbered", 10_000, 8.5), ("renumbered", 0, 7.125)]
    ]
    page = tmp_path / "streams.md"
    page.write_text("Before.\n\n<!-- table streams -->\nold\n<!-- end -->\n\nAfter.\n", encoding="utf-8")
    streams.write_page(rows, page)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[:3] + lines[-3:] == ["Before.", "", "<!-- table streams -->", "<!-- end -->", "", "After."]
    assert lines[5:-3] == ["| 10 000 | 7.12 | 7.25 |", "| 20 000 | 8.50 | not run |"]
    assert load_rows(page.with_suffix(".jsonl")) == [rows[2], rows[1], rows[0]]
    assert "<svg" in page.with_suffix(".svg").read_text(encoding="utf-8")
    drawn = [np.asarray(curve.get_ydata()).tolist() for curve in streams.picture(rows[::-1]).axes[0].get_lines()]
    assert drawn == [[7.125, 8.5], [7.25]]


def test_the_page_says_what_its_rows_say(tmp_path: Path) -> None:
    text = streams.PAGE.read_text(encoding="utf-8")
    rows = load_rows(streams.PAGE.with_suffix(".jsonl"))
    page = tmp_path / streams.PAGE.name
    page.write_text(text, encoding="utf-8")
    streams.write_page(rows, page)
    assert page.read_text(encoding="utf-8") == text
    renumbered, kept = ([row for row in rows if row["rule"] == rule] for rule in streams.RULES)
    assert [row["from"] for row in renumbered] == [row["from"] for row in kept] == list(range(0, 200_000, 10_000))
    factors = [one["perplexity"] / other["perplexity"] for one, other in zip(kept, renumbered, strict=True)]
    early, late = (fmean(row["perplexity"] for row in part) for part in (renumbered[1:10], renumbered[10:]))
    assert f"mean is {early:.1f} from 10 000 to 100 000 tokens and {late:.1f} from there" in text
    assert all(12 < row["perplexity"] < 19.5 for row in renumbered[1:])
    speeds = [round(median(row["tokens_per_second"] for row in one)) for one in (renumbered, kept)]
    assert f"{min(factors[1:]):.0f}\n  to {max(factors[1:]):.0f} times" in text
    assert f"{speeds[0]} tokens per second with `renumbered` and {speeds[1]} with `kept`" in text
    assert f"are {renumbered[0]['perplexity']:.2f} and\n{kept[0]['perplexity']:.2f}." in text
    assert {row["bytes"] for row in rows} == {23_592_960}
    assert max(row["peak_bytes"] for row in rows) <= 1.49e9


def test_nearly_all_kept_keys_turn_and_the_prompt_costs_more() -> None:
    cost = turning.measure(prepared("Llama", **SMALL), prompt(200), 100)
    assert cost.prompt == 200
    assert 90 < cost.turned <= 100
    assert 0 < cost.turning < cost.prefill
    assert turning.Cost(8, 4.0, 2.0, 0.5).share == 0.25
