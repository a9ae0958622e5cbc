"""The tables of the studies on real weights, computed from their rows: `python -m conformance.measure.evidence_pages`.

A page marks each table by `<!-- table NAME -->` and `<!-- end -->`; the text between them is written by this command
and nothing else. Without `--write` it only says which tables of the pages differ from the rows.
"""

import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models_integration.studies.estimate import Estimate, format_p
from models_integration.studies.evidence.claims import ENDS, Samples, Verdict, verdicts
from models_integration.studies.evidence.controls import FULL
from models_integration.studies.evidence.rules import PARTS, Claim, load_rules
from models_integration.studies.evidence.run import merged
from models_integration.studies.papers.injection import TEMPLATES
from models_integration.studies.papers.injection_tables import (
    HEADINGS,
    LOCOMO,
    InjectionTable,
    filled_lines,
    tables_of,
)
from models_integration.studies.papers.protocol import COSTS, PAPERS, Paper, Part, Table, load_paper, rules_of_part
from models_integration.studies.papers.tables import Measured, fill, shaped
from reference.statistics import mcnemar

ROOT = Path(__file__).parents[2]
HOME = ROOT / "docs" / "results" / "smollm2"
PAGES = (ROOT / "README.md", HOME / "README.md", HOME / "erratum.md", HOME / "papers.md")

FACTS = ("needle_in_prose", "keys_in_prose_2", "keys_in_prose_4")
PAIRS, PROSE = ("key_value_short",), ("prose_continuation",)
FACT = ("fact",)
NAMES = {
    "fullcache": "full cache", "evidence": "evidence, then random", "random": "random set, one for each head",
    'crystalcache(k_heads=0, graph="zero", T_max=1)': "rarity alone", "nestedkv": "NestedKV",
    "crystalcache(observed_layer=-1)": "CrystalCache, last layer observed",
    "crystalcache(observed_layer=1)": "CrystalCache, second layer observed", "keydiff": "KeyDiff",
    'crystalcache(graph="zero")': "CrystalCache without D", "knorm": "Knorm", "chunkkv": "ChunkKV",
    "streamingllm": "StreamingLLM", "crystalcache": "CrystalCache", "expected-attention": "Expected Attention",
    "adakv": "Ada-KV", "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "kvzip": "KVzip", "kvzip-plus": "KVzip+",
    "lagkv": "LagKV", "kvzip-uniform": "KVzip, the same number in each head", "vase@prompt": "VaSE",
    "critical-adakv": "CriticalAdaKV", "cake": "CAKE", "criticalkv": "CriticalKV over SnapKV",
    "morphkv@prompt": "MorphKV", "h2o@prompt": "H2O", "tova@prompt": "TOVA", "vatp@prompt": "VATP",
    "kvzip-heads": "KVzip's full and streaming heads",
    "random-shared": "random tokens, one set for all heads", "random-trunks": "random trunks",
    "crystalcache(observed_layer=-3)": "CrystalCache, last layer but two observed",
    'crystalcache(observed_layer=-3, graph="zero")': "CrystalCache without D, last layer but two observed",
    'crystalcache(observed_layer=-3, graph="zero", T_max=1)': "tokens, no D, last layer but two observed",
    'crystalcache(observed_layer=-1, graph="zero")': "CrystalCache without D, last layer observed",
    'crystalcache(observed_layer=-1, rarity="reciprocal")': "CrystalCache, reciprocal rarity, last layer observed",
    'crystalcache(observed_layer=-1, impact="salience")': "CrystalCache without rarity, last layer observed",
    "kvcrush": "KVCrush, blocks of 16", "snapkv(block=16)": "SnapKV in blocks of 16",
}


class Column(NamedTuple):
    """Samples of one kind under one budget: their right answers, the recovery of their likelihood, or both."""

    title: str
    tasks: Sequence[str]
    placement: str
    budget: str
    answers: bool = True
    recovery: bool = True


def _after(title: str, tasks: Sequence[str], budget: str = "0.3", answers: bool = True) -> Column:
    return Column(title, tasks, "after", budget, answers)


@cache
def rows_of(study: str) -> list[dict[str, Any]]:
    """The rows of a study."""
    with lzma.open(HOME / f"{study}.jsonl.xz") as file:
        return [json.loads(line) for line in file]


@cache
def samples_of(study: str, part: str = "confirm") -> Samples:
    """The rows of a study's part."""
    return Samples([row for row in rows_of(study) if row["part"] == part])


def figures(
    study: str, columns: Sequence[Column], policies: Sequence[str], part: str = "confirm",
) -> list[list[str]]:
    """Right answers and recovery of policies, each with its 95 % interval."""
    each = [samples_of(study, part).where(task=column.tasks, placement=(column.placement,)) for column in columns]
    head = ["policy"]
    for column, some in zip(columns, each, strict=True):
        head += [f"{column.title}: right of {len(some.rows)}"] if column.answers else []
        head += [f"{'' if column.answers else column.title + ': '}recovery"] if column.recovery else []
    lines = [head]
    for policy in policies:
        line = [NAMES[policy]]
        for column, some in zip(columns, each, strict=True):
            cell = ENDS[0] if policy == FULL else (policy, column.budget)
            line += [_right(some, cell)] if column.answers else []
            if column.recovery:
                line.append("1" if policy == FULL else str(some.recovery(cell)))
        lines.append(line)
    return lines


def _right(some: Samples, cell: tuple[str, str]) -> str:
    if cell not in some.cells:
        return ""
    right = some.of(cell, "right")
    return f"{right.sum():.0f}: {some.ratio(right, np.ones(len(right)))}"


def decided(study: str) -> list[list[str]]:
    """Every claim of a study with its difference, and the answers of the same samples."""
    lines = [["claim", "claimed", "difference", "p (Holm)", "outcome", "right answers", "p (McNemar)"]]
    dev, confirm = (samples_of(study, part) for part in PARTS)
    for one in verdicts(load_rules(HOME / f"{study}.toml").claims, dev, confirm):
        lines.append([
            _sentence(one.claim), f"{one.claim.difference:g}", str(one.difference), one.corrected_text, _outcome(one),
            *_answers(one.claim, confirm),
        ])
    return lines


def _sentence(claim: Claim) -> str:
    first, second = NAMES[claim.first], NAMES[claim.second]
    kind = "Facts" if set(claim.tasks) <= {*FACTS, *FACT} else "Pairs" if claim.tasks == PAIRS else "Prose"
    place = "in the prompt" if claim.placement == "in_prompt" else "after"
    return f"{kind}, question {place}, {claim.budget}: {first} over {second}" + (
        ", by answers" if claim.measure == "accuracy" else ""
    )


def _outcome(one: Verdict) -> str:
    outcome = one.outcome if one.outcome == "holds" else f"**{one.outcome}**"
    return f"{outcome} ({one.flag})" if one.flag else outcome


def _answers(claim: Claim, confirm: Samples) -> list[str]:
    some = confirm.where(task=claim.tasks, placement=(claim.placement,))
    first, second = (
        some.of(ENDS[0] if name == FULL else (name, claim.budget), "right") for name in (claim.first, claim.second)
    )
    if np.isnan(first).any():
        return ["", ""]
    p = mcnemar(int((second > first).sum()), int((first > second).sum()))
    return [f"{first.sum():.0f} and {second.sum():.0f} of {len(first)}", format_p(p)]


def answerable() -> list[list[str]]:
    """What the full cache and no context answer of each task, and how much likelihood the context is worth."""
    lines = [["task", "tokens", "n", "full cache right", "blind right", "log-likelihood gained by the context, nats"]]
    for task in dict.fromkeys(row["task"] for row in samples_of("rules").rows):
        whole = samples_of("rules").where(task=(task,), placement=("after",))
        for length in sorted({row["length"] for row in whole.rows}):
            some = whole.where(length=(length,))
            right = [some.of(cell, "right") for cell in ENDS]
            said = ["" if np.isnan(one).any() else f"{one.sum():.0f}" for one in right]
            lines.append([task, str(length), str(len(some.rows)), *said, _one(some.worth())])
    return lines


def depths() -> list[list[str]]:
    """Recovery at each depth of the fact, of a method that keeps the newest tokens and of three others."""
    whole = samples_of("rules").where(task=FACTS, placement=("after",))
    at = {
        depth: [row for row in whole.rows if row["metadata"]["depth"] == depth] for depth in (0.1, 0.3, 0.5, 0.7, 0.9)
    }
    lines = [["policy", *(f"depth {depth}: {len(rows)} samples" for depth, rows in at.items())]]
    for policy in ("streamingllm", "crystalcache", "random", "nestedkv"):
        lines.append([NAMES[policy], *(f"{Samples(rows).recovery((policy, '0.3')).value:.2f}" for rows in at.values())])
    return lines


def paper_table(name: str, paper: Paper, table: Table) -> list[list[str]]:
    """A table of a paper from the rows of `kvspec paper NAME --model smollm2 --quick`."""
    parts = [part for part in paper.parts if part.name in table.parts]
    found = fill(table, paper, [_asked(name, paper, part) for part in parts])
    head, lines = shaped(found)
    head[0] += f" (n = {' to '.join(map(str, dict.fromkeys((found.n[0], found.n[-1]))))})"
    return [head, *lines]


def _asked(name: str, paper: Paper, part: Part) -> Measured:
    """The rows of a part, with the cells that its rules name."""
    rules = rules_of_part(paper, part, ["smollm2"], (), True)
    assert rules is not None
    rows, cells = rows_of(f"paper-{name}"), {(FULL, "1.0"), *product(rules.policies, rules.budgets)}
    if part.kind == COSTS:
        return Measured(rules, "smollm2", [row for row in rows if row["task"] == COSTS])
    return Measured(rules, "smollm2", [
        {**row, "cells": [cell for cell in row["cells"] if (cell["policy"], cell["budget"]) in cells]}
        for row in merged(row for row in rows if row["task"] in rules.tasks)
        if row["length"] in rules.lengths and row["seed"] in rules.seeds and row["index"] < rules.contexts
    ])


def injection_table(table: InjectionTable) -> list[list[str]]:
    """A table of the paper on injection, from the rows of `kvspec paper injection --model smollm2 --quick`."""
    found: dict[str, list[Any]] = {}
    for row in rows_of("paper-injection"):
        found.setdefault(row["session"], []).append(row)
    n = len(next(iter(found.values())))
    return [[f"{HEADINGS[0]} (n = {n})", *HEADINGS[1:]], *filled_lines(table, found)]


def _one(estimate: Estimate) -> str:
    return f"{estimate.value:.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"


MAIN = (
    "fullcache", "evidence", 'crystalcache(k_heads=0, graph="zero", T_max=1)', "nestedkv",
    "crystalcache(observed_layer=-1)", "crystalcache(observed_layer=1)", 'crystalcache(graph="zero")', "keydiff",
    "streamingllm", "chunkkv", "crystalcache", "knorm", "adakv", "snapkv", "random", "pyramidkv", "expected-attention",
)
FEW = (
    "fullcache", "kvzip", 'crystalcache(observed_layer=-3, graph="zero")', "nestedkv", "crystalcache", "streamingllm",
    "chunkkv", "snapkv", "random",
)
LATER = (
    "fullcache", "evidence", "kvzip", "kvzip-plus", "keydiff", "lagkv", "vase@prompt", "kvzip-uniform", "random",
    "critical-adakv", "cake", "criticalkv", "morphkv@prompt", "snapkv", "vatp@prompt",
)
REPAIR = (
    "fullcache", "evidence", 'crystalcache(observed_layer=-3, graph="zero")',
    'crystalcache(observed_layer=-1, rarity="reciprocal")', 'crystalcache(observed_layer=-1, graph="zero")',
    "crystalcache(observed_layer=-3)", "crystalcache(observed_layer=-1)", 'crystalcache(graph="zero")', "nestedkv",
    'crystalcache(observed_layer=-1, impact="salience")', "random-trunks", "crystalcache",
    'crystalcache(observed_layer=-3, graph="zero", T_max=1)', "random-shared", "random",
)
FORMS = (
    "fullcache", "evidence", "kvzip", 'crystalcache(observed_layer=-3, graph="zero")', "nestedkv",
    'crystalcache(observed_layer=-1, rarity="reciprocal")', "crystalcache(observed_layer=-1)", "crystalcache",
    "keydiff", "random-trunks", "streamingllm", "chunkkv", "snapkv", "expected-attention", "random-shared", "random",
)
FORM_COLUMNS = [Column(f"facts, {at}", FACT, "after", at, recovery=False) for at in ("0.5", "0.3", "0.15")]
COLUMNS = (
    _after("facts, question after", FACTS), Column("facts, question in the prompt", FACTS, "in_prompt", "0.3"),
    _after("continued prose", PROSE, answers=False),
)
PROSE_AT_3 = _after("continued prose, 0.3", PROSE, answers=False)
TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "few": lambda: figures("facts", FORM_COLUMNS[1:], FEW),
    "main": lambda: figures("rules", COLUMNS, MAIN),
    "claims": lambda: decided("rules"),
    "answerable": answerable,
    "depths": depths,
    "methods": lambda: figures("methods", (_after("facts, 0.3", FACTS), _after("facts, 0.1", FACTS, "0.1")), LATER),
    "methods-claims": lambda: decided("methods"),
    "h2o": lambda: figures("h2o", COLUMNS[:2], ("fullcache", "h2o@prompt", "tova@prompt", "random"), "dev"),
    "heads": lambda: figures(
        "heads", (_after("facts, 0.3", FACTS),), ("fullcache", "kvzip-heads", "snapkv(block=16)", "kvcrush", "snapkv")
    ),
    "heads-claims": lambda: decided("heads"),
    "advice": lambda: figures(
        "advice", (_after("facts, 0.3", FACTS), _after("facts, 0.1", FACTS, "0.1"), PROSE_AT_3),
        ("fullcache", "kvzip", "kvzip-heads", "nestedkv", "random"),
    ),
    "advice-claims": lambda: decided("advice"),
    "repair": lambda: figures(
        "repair", [_after(f"facts, {at}", FACT, at) for at in ("0.3", "0.1")], REPAIR, "all"
    ),
    "facts-dev": lambda: figures("facts", FORM_COLUMNS, FORMS, "dev"),
    "facts": lambda: figures("facts", FORM_COLUMNS, FORMS),
    "facts-claims": lambda: decided("facts"),
    "pairs": lambda: figures("rules", (_after("pairs of letters, 0.3", PAIRS),), MAIN),
}
PAPER_TABLES = {
    f"{name}-{table.name}": partial(paper_table, name, paper, table) for name in PAPERS
    for paper in (load_paper(name),) for table in paper.tables
    if table.parts and not any(part.needs_files for part in paper.parts if part.name in table.parts)
} | {f"injection-{table.name}": partial(injection_table, table) for table in tables_of(TEMPLATES["markers"])
       if table.name != LOCOMO}
TABLES |= {
    name: make for name, make in PAPER_TABLES.items() if (HOME / f"paper-{name.partition('-')[0]}.jsonl.xz").exists()
}
_MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def markdown(name: str) -> str:
    """A table as Markdown."""
    head, *lines = TABLES[name]()
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def written(text: str) -> str:
    """A page whose marked tables are those of the rows."""
    return _MARKED.sub(lambda match: f"{match[1]}{markdown(match[2])}{match[3]}", text)


def stale(pages: Sequence[Path] = PAGES) -> Iterator[str]:
    """The tables of pages that differ from the rows, and those that no page shows."""
    shown = set()
    for page in pages:
        for match in _MARKED.finditer(page.read_text(encoding="utf-8")):
            shown.add(match[2])
            if match[0] != written(match[0]):
                yield f"{page.relative_to(ROOT)}: table {match[2]}"
    yield from (f"no page: table {name}" for name in TABLES if name not in shown)


def main(arguments: Sequence[str]) -> int:
    """Write the tables, or say which differ."""
    if "--write" in arguments:
        for page in PAGES:
            page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    differing = list(stale())
    print("\n".join(differing) or "every table of the pages is that of the rows")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
