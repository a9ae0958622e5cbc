"""The page of a folder of results. If KVSPEC_CHROMIUM names a Chromium, the page is also tested in it."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the commands' modules drive transformers models")

from typer.testing import CliRunner

from experiments.studies.evidence.kept import EVERY_CONTROL
from experiments.studies.evidence.rules import Claim, Rules, Stage
from experiments.studies.page import legend
from experiments.studies.report import title_of
from experiments.studies.results import Row
from kvspec.cli.app import app
from kvspec.cli.study_files import write_page
from spec.errors import SpecError
from tests.experiments.studies.experiments import BUDGETS, DIGEST, PLACEMENTS, POLICIES, TASKS, Page, study_rows
from tests.kvspec.cli.test_explain import CHROMIUM, needs_node, node

pytestmark = pytest.mark.law("figures-are-counted-right")

DRIVER = Path(__file__).parents[2] / "kvspec" / "cli" / "page" / "report.js"
THREE_DIGITS = 5.1e-4
ALL = (*POLICIES, "random", "evidence")


def claim(name: str, first: str, second: str, measure: str = "recovery", budget: str = "0.5") -> Claim:
    return Claim(name, first, second, budget, "after", TASKS[:1], measure, 0.2)


CLAIMS = (
    claim("one <b>", "evidence", "snapkv"), claim("two", "evidence", "snapkv", "accuracy"),
    claim("other caches", "knorm", "snapkv", budget="0.3"),
)
GIVEN = Rules(
    CLAIMS, (Stage("first", "snapkv"), Stage("second", "knorm")), "By hand", ("m",), 12, 2, (0,), (1024, 2048),
    PLACEMENTS, TASKS, POLICIES, BUDGETS, DIGEST,
)


def page_of(folder: Path, rules: Sequence[Rules] = (GIVEN,), **files: Iterable[Row]) -> Page:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_page(folder, list(rules))
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return study_rows()


@pytest.fixture(scope="module")
def shown(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(tmp_path_factory.mktemp("study"), study=[*rows, *study_rows(5, "dev")])


def some(rows: Iterable[Row], **wanted: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def value(row: Row, policy: str, budget: str, name: str) -> float:
    (actual,) = (cell[name] for cell in row["cells"] if (cell["policy"], cell["budget"]) == (policy, budget))
    return float(np.mean(actual))


def interval(above: Sequence[float], below: Sequence[float], contexts: Sequence[str]) -> tuple[float, ...]:
    """Return a ratio of sums, its interval and its two-sided p, with plain loops.

    The bounds are the 51st values from either end of 2000 resamples of whole contexts.
    """
    texts = sorted(set(contexts), key=lambda one: max(at for at, context in enumerate(contexts) if context == one))
    sums = [
        [sum(v for v, c in zip(each, contexts, strict=True) if c == one) for each in (above, below)] for one in texts
    ]
    drawn = np.random.default_rng(0).integers(len(texts), size=(2000, len(texts)), dtype=np.int64).tolist()
    ratios = [sum(sums[k][0] for k in one) / sum(sums[k][1] for k in one) for one in drawn]
    positive = sum(ratio > 0 for ratio in ratios) / 2000
    ratios.sort()
    p = min(1.0, 2 * max(min(positive, 1 - positive), 1 / 2000))
    return sum(above) / sum(below), ratios[50], ratios[1949], p


def recovered(rows: list[Row], first: tuple[str, str], second: tuple[str, str] = ("blind", "0")) -> tuple[float, ...]:
    gain = [value(row, *first, "likelihood") - value(row, *second, "likelihood") for row in rows]
    worth = [value(row, "fullcache", "1.0", "likelihood") - value(row, "blind", "0", "likelihood") for row in rows]
    return interval(gain, worth, [row["context"] for row in rows])


def wilson_by_hand(correct: int, n: int) -> tuple[float, float, float]:
    z, share = 1.959963984540054, correct / n
    middle, half = share + z * z / 2 / n, z * math.sqrt(share * (1 - share) / n + z * z / 4 / n / n)
    return share, (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def test_points_of_the_pictures_are_those_by_hand(shown: Page, rows: list[Row]) -> None:
    for placement in PLACEMENTS:
        for task in TASKS:
            chosen = some(rows, task=task, placement=placement)
            title = f"{title_of(task)}, question {placement.replace('_', ' ')}, n = {len(chosen)}"
            measures = "recovery", "evidence kept", "accuracy"
            tables = [shown.table(f"Table of {measure}, {title}") for measure in measures]
            for policy in ALL:
                for budget in BUDGETS:
                    cell = policy, budget
                    ones, contexts = [1.0] * len(chosen), [row["context"] for row in chosen]
                    kept = [value(row, *cell, "evidence_kept") / 4 for row in chosen]
                    right = int(sum(value(row, *cell, "right") for row in chosen))
                    each = recovered(chosen, cell), interval(kept, ones, contexts), wilson_by_hand(right, len(chosen))
                    stored = np.mean([value(row, *cell, "kept") for row in chosen])
                    for table, actual in zip(tables, each, strict=True):
                        written = [float(figure) for figure in table.line(*cell)[2:]]
                        assert written == pytest.approx([stored, *actual[:3]], abs=THREE_DIGITS)


def test_every_point_stands_where_its_table_says(shown: Page) -> None:
    """Check heights by the words of the axes. The points are exactly those of the tables."""
    assert shown.panels
    tables = {table.caption: table for table in shown.tables}
    for title, panel in shown.panels.items():
        lines = tables[f"Table of {title}"].lines[1:]
        assert len(panel.marks) == len(lines)
        upright = sorted({(y, float(words)) for x, y, words in panel.words if x < 40 and re.match(r"-?\d", words)})
        (y0, v0), *_, (y1, v1) = upright
        for (name, x, y), line in zip(panel.marks, sorted_as_drawn(lines), strict=True):
            assert name.startswith(f"{line[0]}, {line[1]}: ")
            drawn = v0 + (y + 4 - y0) / (y1 - y0) * (v1 - v0)
            assert drawn == pytest.approx(float(line[3]), abs=0.02)
            assert 40 - 9 < x < 330


def sorted_as_drawn(lines: list[list[str]]) -> list[list[str]]:
    """Return the curves in the order of the table, each from left to right."""
    names = dict.fromkeys(line[0] for line in lines)
    return [line for name in names for line in sorted((one for one in lines if one[0] == name), key=lambda one: one[2])]


def test_right_answers_with_half_the_likelihood_are_counted(shown: Page, rows: list[Row]) -> None:
    tables = [table for table in shown.tables if table.caption.startswith("Cache size while answering")]
    counted = list[int]()
    for table, placement in zip(tables, PLACEMENTS, strict=True):
        for policy, budget in product(POLICIES, BUDGETS):
            chosen = some(rows, placement=placement)
            unlikely = sum(
                value(row, policy, budget, "right") == 1 and value(row, policy, budget, "likelihood")
                < value(row, "fullcache", "1.0", "likelihood") - 0.6931471805599453 for row in chosen
            )
            at = table.lines[0].index("right, but unlikely")
            assert table.line(policy, budget)[at] == str(unlikely)
            counted.append(unlikely)
    assert len(set(counted)) > 1


def test_claims_are_decided_as_by_hand(shown: Page, rows: list[Row]) -> None:
    chosen = some(rows, task=TASKS[0], placement="after")
    value_, low, high, _ = recovered(chosen, ("evidence", "0.5"), ("snapkv", "0.5"))
    gains = dict.fromkeys((row["context"] for row in chosen), 0.0)
    for row in chosen:
        gains[row["context"]] += value(row, "evidence", "0.5", "likelihood") - value(row, "snapkv", "0.5", "likelihood")
    flipped = [sum(map(mul, gains.values(), signs)) for signs in product((1, -1), repeat=len(gains))]
    p = sum(abs(each) >= abs(sum(gains.values())) - 1e-9 for each in flipped) / len(flipped)
    pairs = [(value(row, "evidence", "0.5", "right"), value(row, "snapkv", "0.5", "right")) for row in chosen]
    won, lost = (sum(pair == one for pair in pairs) for one in ((1, 0), (0, 1)))
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    exact = min(1.0, 2 * tail / 2 ** (won + lost))
    small, large = sorted([p, exact])
    corrected = {small: min(1.0, 2 * small), large: max(min(1.0, 2 * small), large)}
    table = shown.table("Paired differences, first policy minus second")
    first, second, third = table.lines[1:]
    assert first[0].startswith("one <b>evidence over snapkv: recovery at 0.5, n = 24")
    assert first[2] == f"{value_:.2f} [{low:.2f}, {high:.2f}]"
    assert second[2].startswith(f"{(won - lost) / len(chosen):.2f} [")
    for line, each in ((first, p), (second, exact)):
        assert line[5].removeprefix("≤ ") == f"{corrected[each]:.4f}"
        smaller = float(line[2].split()[0]) < 0.2
        assert line[3] == ("open" if corrected[each] > 0.05 else "smaller than claimed" if smaller else "holds")
        assert line[4] == "exploratory"  # No row names the commit of its rules.
    assert third[3].startswith("not comparedprompt tokens kept: 306.0 and 300.0")
    assert any(" of 3 claims hold" in note for note in shown.notes)


def test_the_best_are_those_by_hand_and_no_flagged_cell_is_one(shown: Page, rows: list[Row]) -> None:
    tables = [table for table in shown.tables if table.caption.startswith("Highest recovery")]
    assert len(tables) == len(PLACEMENTS)
    for table, placement in zip(tables, PLACEMENTS, strict=True):
        for task in TASKS:
            chosen = some(rows, task=task, placement=placement)
            for at, budget in enumerate(BUDGETS, 1):
                names = [name for name in POLICIES if (name, budget) != ("knorm", "0.3")]
                each = {name: recovered(chosen, (name, budget)) for name in names}
                best = max(each, key=lambda name: each[name][0])
                close = [
                    name for name in names if name != best
                    and not recovered(chosen, (best, budget), (name, budget))[1] > 0
                ]
                apart = "significantly better than all others"
                if close:
                    apart = f"no significant difference: {', '.join(close)}"
                value_, low, high, _ = each[best]
                assert table.line(title_of(task))[at] == f"{best} {value_:.2f} [{low:.2f}, {high:.2f}]{apart}"
    flagged = [table.lines[1:] for table in shown.tables if "off the median" in table.caption]
    assert flagged == [[["knorm", "0.3", "306.0 of 461.5", "+2.0%"]]] * 2


@pytest.mark.law("as-it-is-described")
def test_the_page_is_whole_and_needs_nothing_else(shown: Page) -> None:
    assert not re.search(r"https?:|@import|url\(|<script|<b>", shown.text)
    assert all(v.startswith("#part-") for _, name, v in shown.attributes if name in ("src", "href"))
    links = [v[1:] for _, name, v in shown.attributes if name == "href"]
    assert links == [v for tag, name, v in shown.attributes if (tag, name) == ("h2", "id")]
    assert len(links) > 8
    pictures = re.findall("<svg [^>]*>", shown.text)
    assert all(re.search('role="img" aria-label="[^"]|aria-hidden="true"', one) for one in pictures)
    assert ("div", "tabindex", "0") in shown.attributes


@pytest.mark.law("an-identity-tells-apart")
def test_forty_curves_are_told_apart() -> None:
    """Check colour, dash and mark together, on a page and in a figure. Controls are references."""
    names = [*map(str, range(33)), *EVERY_CONTROL[1:8]]
    kinds = r'class="curve k(\d+) (\w+)".*?dasharray="(.*?)".*?class="mark" d="(.*?)"'
    keys = re.findall(kinds, legend(names, EVERY_CONTROL))
    assert len({key[1:] for key in keys}) == len(keys) == 40
    assert [key[1] == "reference" for key in keys] == [name in EVERY_CONTROL for name in names]
    figures = pytest.importorskip("experiments.studies.page.figures", exc_type=ImportError)
    assert len({str(figures.curve_style(at, name)) for at, name in enumerate(names)}) == 40


def test_what_failed_is_named_and_counted_nowhere(rows: list[Row], tmp_path: Path) -> None:
    *others, last = rows
    row = {name: value for name, value in last.items() if name != "cells"}
    failed = {**row, "sample": "the last", "index": 7, "error": "out of <memory>"}
    page = page_of(tmp_path, study=[*others, failed])
    assert page.table("Failed samples").lines[1:] == [[title_of(TASKS[1]), "7", "out of <memory>"]]
    assert f"recovery, {title_of(TASKS[1])}, question in prompt, n = 23" in page.panels
    assert page_of(tmp_path, rules=(), study=[failed]).table("Failed samples").lines[1:]


@pytest.mark.law("as-it-is-described")
def test_what_cannot_be_shown_is_said(rows: list[Row], tmp_path: Path) -> None:
    """Check one sample, results without controls, dev rows only, no rules, and few contexts."""
    (tmp_path / "one").mkdir()
    alone = page_of(tmp_path / "one", rules=(), study=rows[:1])
    assert any("One context gives no interval" in note for note in alone.notes)
    assert any("pass the rules file with --rules" in note for note in alone.notes)
    assert "not known" in alone.table("Highest recovery").lines[1]
    assert not any("recovery" in table.lines[0] for table in alone.tables)
    without = [{**row, "cells": row["cells"][2:5], "part": "dev"} for row in rows[:16]]
    (tmp_path / "none").mkdir()
    page = page_of(tmp_path / "none", study=without)
    notes = " ".join(page.notes)
    assert "fullcache (no recovery, and no check that the model can do the task); blind (no recovery)" in notes
    assert "(the random control of" in notes
    assert "None of the 3 claims is decided" in notes
    assert "Dev samples decide no claim" in notes
    assert "over only 4 contexts are too narrow" in notes
    assert not any(title.startswith("recovery") for title in page.panels)


def compared(**right: str) -> list[Row]:
    """Return rows of cells without gold answer tokens. The digits of a pattern are 1 for right answers."""
    rows = []
    for index in range(len(next(iter(right.values())))):
        cells = [
            {
                "policy": name.partition("_")[0], "budget": budget, "right": each[index] == "1", "kept": tokens,
                "mean_cache": tokens + 20.0 - int(each[index]), "peak_cache": 100, "mean_bytes": 10, "peak_bytes": 20,
                "evidence_kept": 0, "answer": "7492",
            } for name, each in right.items()
            for budget, tokens in [(f"0.{name[-2:]}", int(name[-2:])) if "_" in name else ("1.0", 100)]
        ]
        rows.append({
            "rules": "b" * 64, "model": "m", "backend": "b", "spec_version": "0.4.0", "calibration": None,
            "task": "needle", "metric": "first number", "length": 100, "index": index, "question": 0,
            "placement": "after", "seed": 1, "chat_template": "none", "control": None, "sample": str(index),
            "part": "all", "context": str(index), "metadata": {}, "prompt_tokens": 100, "evidence_tokens": 4,
            "seconds": {"prefill": 0.5, "reading": 1.0}, "cells": cells,
        })
    return rows


PATTERNS = {"a_30": "1100000011", "b_30": "1111110011", "a_60": "1111111110", "fullcache": "1" * 10}


def test_a_comparison_is_counted_by_hand(tmp_path: Path) -> None:
    rows = compared(**PATTERNS)
    for row in rows:
        row["cells"].append({**row["cells"][-1], "policy": "without needle", "right": False})
    page = page_of(tmp_path, rules=(), study=rows)
    differences = page.table("Needle, n = 10. Compared with fullcache 1.0: 1.00")
    # If 6, 2 and 1 samples are lost, p is 2 / 2 ** lost. The smallest p is multiplied by three, and so on.
    wanted = {("a", "0.30"): (-0.6, 6, 3 * 2 / 64), ("b", "0.30"): (-0.2, 2, 1.0), ("a", "0.60"): (-0.1, 1, 1.0)}
    for (name, budget), (difference, lost, p) in wanted.items():
        (line,) = (line for line in differences.lines[1:] if (line[0], line[3]) == (name, budget))
        assert line[2].startswith(f"{difference:.2f} [")
        assert line[5:] == ["0", str(lost), f"{p:.4f}"]
    share = " [{:.2f}, {:.2f}]".format(*wilson_by_hand(8, 10)[1:])
    assert [line[4] for line in differences.lines[1:] if line[0] == "b"] == [f"0.80{share}"]
    best = page.table("Highest recovery").line("Needle")
    assert best[1].startswith("b 0.80")
    assert best[2].startswith("a 0.90")
    bounds = page.table("Controls and their required")
    assert bounds.lines[1] == ["without needle", "Needle", "0.00 (0/10)", "<= 0.05", "holds"]
    assert "accuracy, Needle, question after, n = 10" in page.panels
    few = page_of(tmp_path, rules=(), study=compared(**{name: each[:5] for name, each in PATTERNS.items()})).notes
    assert any("5 samples are too few" in note and "smallest possible p is 0.0625" in note for note in few)


@pytest.mark.parametrize(("right", "best"), [((0, 19, 12), "keydiff 0.95"), ((7, 7, 0), "early, keydiff 0.35"),
                                             ((0, 0, 0), "no right answer")])
def test_the_best_keeps_as_many_prompt_tokens_however_long_its_answers(
    right: tuple[int, ...], best: str, tmp_path: Path,
) -> None:
    """Check three policies that keep 15 tokens. A wrong answer is longer and stores more slots."""
    patterns = {
        f"{name}_15": "1" * count + "0" * (20 - count)
        for name, count in zip(("early", "keydiff", "late"), right, strict=True)
    }
    page = page_of(tmp_path, rules=(), study=compared(**patterns))
    assert page.table("Highest recovery").line("Needle")[1].startswith(best)
    assert not any("off the median" in table.caption for table in page.tables)
    assert "Excluded" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_samples_that_lack_a_policy_are_left_out_of_its_figures_alone(tmp_path: Path) -> None:
    """Check rows of the same samples after a second run, which added a policy and was interrupted."""
    rows = compared(**PATTERNS)
    later = [{**row, "cells": compared(c_30="1" * 10)[0]["cells"]} for row in rows[:4]]
    page = page_of(tmp_path, rules=(), study=[*rows, *later])
    table = page.table("Cache size while answering")
    assert [table.line(*cell)[7] for cell in (("a", "0.30"), ("c", "0.30"))] == ["10", "4"]
    (line,) = (line for line in page.table("Needle, n = 4. Compared with fullcache").lines if line[0] == "c")
    assert line[5:7] == ["0", "0"]


@pytest.mark.parametrize(("contexts", "first"), [(10, False), (2, True)])
def test_the_first_use_of_a_kernel_is_outside_the_median_or_stated(contexts: int, first: bool, tmp_path: Path) -> None:
    """Check that two questions about the first prompt count its time once."""
    rows = compared(**{name: each[:contexts] for name, each in PATTERNS.items()})
    rows += [{**rows[0], "question": 1, "sample": "again"}]
    for row in rows:
        row["seconds"] = {"prefill": 0.5, "a": 9.0 if row["index"] == 0 else 0.25, "reading": 1.0}
        row["cells"][0]["backend"] = "numba"
    table = page_of(tmp_path, rules=(), study=rows).table("Median seconds of a prompt")
    assert table.line("a")[1:] == (["4.625", "9.250", "numba"] if first else ["0.250", "0.500", "numba"])
    assert ("includes the first use of each kernel" in table.caption) is first


def test_a_figure_has_a_curve_for_each_policy(rows: list[Row], tmp_path: Path) -> None:
    """Check a figure for a paper, with one legend, in each format."""
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib: pip install 'kvspec[plots]'")
    (tmp_path / "two").mkdir()
    page_of(tmp_path / "two", study=[*rows, *({**row, "model": "m@0"} for row in compared(**PATTERNS))])
    mixed = CliRunner().invoke(app, ["report", str(tmp_path / "two"), "--figure", str(tmp_path / "figure.svg")])
    assert "results with different rules, backend, spec_version: write each run to a" in str(mixed.exception)
    page_of(tmp_path, study=rows)
    for form, start in (("pdf", b"%PDF"), ("png", b"\x89PNG"), ("svg", b"<?xml")):
        file = tmp_path / "new" / f"figure.{form}"
        result = CliRunner().invoke(app, ["report", str(tmp_path), "--figure", str(file)])
        assert result.exit_code == 0, result.output
        drawn = file.read_bytes()
        assert drawn.startswith(start)
    assert all(f"<!-- {name} -->".encode() in drawn for name in ("snapkv", "knorm", "prompt tokens kept"))
    root = ElementTree.fromstring(drawn)
    assert (root.get("role"), root.get("aria-label")) == ("img", root.findtext("{http://www.w3.org/2000/svg}title"))
    assert all(name in root.get("aria-label", "") for name in ("snapkv", "knorm"))


def test_every_point_of_a_figure_is_inside_its_panel(rows: list[Row], tmp_path: Path) -> None:
    """Check that the shift of policies at the same place does not hide the points from the limits of the panel.

    Your own questions show right answers. If none is known, they show recoveries, which have no interval for one text.
    """
    points = points_inside(rows, tmp_path / "figure.svg")
    assert len(points) > 10
    answered = [
        {**row, "metadata": {**row["metadata"], "question": "Which code?"}}
        for row in rows if row["context"] == rows[0]["context"]
    ]
    unread = [{**row, "cells": [{**cell, "right": None} for cell in row["cells"]]} for row in answered]
    for few, measure in ((answered, "accuracy"), (unread, "recovery")):
        drawn = points_inside(few, tmp_path / "figure.svg")
        assert drawn
        assert all(label.startswith(measure) for label, _ in drawn)
        points += drawn
    assert all(inside for _, inside in points)


def points_inside(rows: list[Row], path: Path) -> list[tuple[str, bool]]:
    """Return the label of the axis of each drawn point, and whether the point is inside the panel."""
    mpl = pytest.importorskip("matplotlib.axes", reason="figures are drawn by matplotlib: pip install 'kvspec[plots]'")
    from experiments.studies.page.figures import write_figure

    seen: list[tuple[str, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpl.Axes, "set_ylabel", lambda axes, label: seen.extend(
            (label, bool(low <= kept <= high and bottom <= share <= top))
            for line in axes.get_lines() if len(line.get_xdata()) and line.get_label() != "fullcache"
            for (low, high), (bottom, top) in [(axes.get_xlim(), axes.get_ylim())]
            for kept, share in line.get_xydata()
        ))
        write_figure(rows, path)
    return seen


@pytest.mark.law("one-line-with-the-way-out")
def test_a_figure_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspec.cli.study_files.find_spec", lambda name: None)
    refused = CliRunner().invoke(app, ["report", str(tmp_path), "--figure", str(tmp_path / "figure.svg")])
    assert "needs matplotlib: pip install 'kvspec[plots]'" in str(refused.exception)


def test_our_figures_stand_beside_the_papers(shown: Page, rows: list[Row]) -> None:
    table = shown.table("CrystalCache, Table 5")
    assert any("Compare the order of the policies" in note for note in shown.notes)
    chosen = some(rows, task=TASKS[0], placement="after")
    at = table.lines[0].index("here: Needle in prose, question after, 0.3")
    share = wilson_by_hand(int(sum(value(row, "snapkv", "0.3", "right") for row in chosen)), len(chosen))
    assert table.line("snapkv")[at] == "{:.2f} [{:.2f}, {:.2f}]".format(*share)
    assert table.line("snapkv")[1] == "0.633"
    assert table.line("h2o-described")[at] == ""


@pytest.mark.law("one-line-with-the-way-out")
def test_the_command_writes_it_where_it_is_told_and_names_what_is_wrong(rows: list[Row], tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "must contain results in study.jsonl" in str(refused.exception)
    with pytest.raises(SpecError, match=r"no result in .* was measured with this rules file"):
        page_of(tmp_path, rules=(GIVEN.__class__(**{**vars(GIVEN), "digest": "b" * 64}),), study=rows[:4])
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "x.html")])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study.jsonl", "x.html"]


@needs_node
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, and none in KVSPEC_CHROMIUM")
def test_in_a_browser_nothing_is_wider_than_a_telephone_and_boxes_hide_curves(shown: Page, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(shown.text, encoding="utf-8")
    steps: list[dict[str, Any]] = [{"width": 420}, {"width": 1280}, {"untick": 1}]
    given = json.dumps([str(tmp_path / "page.html"), steps])
    narrow, wide, less = node("browser.mjs", CHROMIUM or "", str(DRIVER), given=given)
    assert narrow["wider"] == wide["wider"] == []
    assert less["curves"] == wide["curves"] - wide["curves"] // len(ALL)
