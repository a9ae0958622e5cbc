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

from models_integration.studies.evidence.claims import Verdict, verdicts
from models_integration.studies.evidence.kept import FULL
from models_integration.studies.evidence.rules import PARTS, Claim, load_rules
from models_integration.studies.evidence.run import merged
from models_integration.studies.evidence.samples import ENDS, Samples
from models_integration.studies.evidence.tables import lost_at
from models_integration.studies.papers import COSTS, PAPERS, Paper, Part, Table, load_paper, rules_of_part
from models_integration.studies.papers.injection import TEMPLATES
from models_integration.studies.papers.injection_tables import (
    LOCOMO,
    InjectionTable,
    filled_lines,
    tables_of,
)
from models_integration.studies.papers.tables import Measured, fill, shaped
from models_integration.studies.report import format_p
from reference.statistics import mcnemar

ROOT = Path(__file__).parents[2]
HOME = ROOT / "docs" / "results" / "smollm2"
PAGES = (ROOT / "README.md", HOME / "README.md", HOME / "erratum.md", HOME / "papers.md")

FACTS = ("needle_in_prose", "keys_in_prose_2", "keys_in_prose_4")
PAIRS, PROSE = ("key_value_short",), ("prose_continuation",)
FACT = ("fact",)
NEEDLE, DELAYED = ("needle",), ("delayed_association",)
NAMES = {
    "fullcache": "full cache", "evidence": "evidence, then random", "random": "random tokens in each head",
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
    "random-heads": "random heads",
    "crystalcache(observed_layer=-3)": "CrystalCache, third-last layer observed",
    'crystalcache(observed_layer=-3, graph="zero")': '`crystalcache(observed_layer=-3, graph="zero")`',
    'crystalcache(observed_layer=-3, graph="zero", T_max=1)': "tokens, no D, third-last layer observed",
    'crystalcache(observed_layer=-1, graph="zero")': "CrystalCache without D, last layer observed",
    'crystalcache(observed_layer=-1, rarity="reciprocal")': "CrystalCache, reciprocal rarity, last layer observed",
    'crystalcache(observed_layer=-1, impact="salience")': "CrystalCache without rarity, last layer observed",
    "kvcrush": "KVCrush, blocks of 16", "snapkv(block=16)": "SnapKV in blocks of 16",
}

KINDS = {
    PAIRS: "Pairs", PROSE: "Prose", DELAYED: "Delayed association",
    (*NEEDLE, *DELAYED): "Needle and delayed association",
}
PLACES = {"after": "after", "in_prompt": "in the prompt", "paper": "as in the paper"}


class Column(NamedTuple):
    """Samples of one kind under one budget: their right answers, the recovery of their likelihood, or both.

    `density` selects samples of delayed association.
    """

    title: str
    tasks: Sequence[str]
    placement: str
    budget: str
    answers: bool = True
    recovery: bool = True
    density: str = ""

    def of(self, samples: Samples) -> Samples:
        """Select the samples of this column."""
        some = samples.where(task=self.tasks, placement=(self.placement,))
        return Samples([row for row in some.rows if self.density in ("", row["metadata"].get("density"))])


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
    study: str, columns: Sequence[Column], part: str = "confirm", policies: Sequence[str] = (),
) -> list[list[str]]:
    """Right answers and recovery of policies, each with its 95 % interval; by default of all policies, by answers."""
    each = [column.of(samples_of(study, part)) for column in columns]
    head = ["policy"]
    for column, some in zip(columns, each, strict=True):
        head += [f"{column.title}: right answers of {len(some.rows)}"] if column.answers else []
        head += [f"{'' if column.answers else column.title + ': '}recovery"] if column.recovery else []
    lines = [head]
    for policy in policies or _ranked(each, columns):
        line = [NAMES[policy]]
        for column, some in zip(columns, each, strict=True):
            cell = ENDS[0] if policy == FULL else (policy, column.budget)
            line += [_right(some, cell)] if column.answers else []
            if column.recovery:
                line.append("1" if policy == FULL else str(some.recovery(cell)))
        lines.append(line)
    return lines


def _ranked(each: Sequence[Samples], columns: Sequence[Column]) -> list[str]:
    """Full cache and evidence, then the named policies by right answers at 0.3."""
    budget = "0.3" if any(column.budget == "0.3" for column in columns) else columns[0].budget
    right = dict.fromkeys(
        (name for some in each for name, at in some.cells if at == budget and name in NAMES), 0.0
    )
    for some, column in zip(each, columns, strict=True):
        for name in right:
            if column.answers and column.budget == budget and (name, budget) in some.cells:
                right[name] -= some.of((name, budget), "right").sum()
    del right["evidence"]
    return [FULL, "evidence", *sorted(right, key=lambda name: right[name])]


def _right(some: Samples, cell: tuple[str, str]) -> str:
    if cell not in some.cells:
        return ""
    right = some.of(cell, "right")
    return f"{right.sum():.0f}: {some.ratio(right, np.ones(len(right)))}"


def decided(study: str) -> list[list[str]]:
    """Every claim of a study with its difference, and the answers of the same samples."""
    lines = [["claim", "claimed", "difference", "p (Holm)", "outcome", "kind", "right answers", "p (McNemar)"]]
    dev, confirm = (samples_of(study, part) for part in PARTS)
    for one in verdicts(load_rules(HOME / f"{study}.toml").claims, dev, confirm):
        lines.append([
            _sentence(one.claim), f"{one.claim.difference:g}", str(one.difference), one.corrected_text, _outcome(one),
            one.kind, *_answers(one.claim, confirm),
        ])
    return lines


def _sentence(claim: Claim) -> str:
    first, second = NAMES[claim.first], NAMES[claim.second]
    kind = "Facts" if set(claim.tasks) <= {*FACTS, *FACT} else KINDS[claim.tasks]
    return f"{kind}, question {PLACES[claim.placement]}, {claim.budget}: {first} over {second}" + (
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
            worth = some.worth()
            gained = f"{worth.value:.1f} [{worth.low:.1f}, {worth.high:.1f}]"
            lines.append([task, str(length), str(len(some.rows)), *said, gained])
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


def parts_of_crystalcache() -> list[list[str]]:
    """At which stage of CrystalCache the evidence of samples is lost."""
    some, named = samples_of("crystalcache", "dev"), load_rules(HOME / "crystalcache.toml").stages
    budgets, lines = ("0.3", "0.1"), [["stage, after all earlier stages"]]
    lost = [np.bincount(lost_at(some, named, at), minlength=len(named) + 1) for at in budgets]
    for at in budgets:
        lines[0] += [f"evidence kept, budget {at}", "lost here"]
    for number, stage in enumerate(named):
        line = [stage.name]
        for at, counts in zip(budgets, lost, strict=True):
            line += [str(some.survival((stage.policy, at))), str(counts[number])]
        lines.append(line)
    return [*lines, ["kept to the end", *(text for counts in lost for text in ("", str(counts[-1])))]]


def observed_layers() -> list[list[str]]:
    """Recovery and kept evidence of CrystalCache on the paper's layer and on the four best."""
    whole = samples_of("crystalcache", "dev")
    tasks = {"two keys": "keys_in_prose_2", "four keys": "keys_in_prose_4", "needle": "needle_in_prose"}
    lines = [["observed layer", "recovery, 0.3", *tasks, "evidence kept", "recovery, 0.1", "evidence kept"]]
    for layer in (0, 1, 5, 27, 29):
        policy = f"crystalcache(observed_layer={layer})" if layer else "crystalcache"
        each = [whole, *(whole.where(task=(task,)) for task in tasks.values())]
        found = [some.recovery((policy, "0.3")) for some in each] + [whole.survival((policy, "0.3"))]
        found += [whole.recovery((policy, "0.1")), whole.survival((policy, "0.1"))]
        lines.append([str(layer), *(f"{one.value:.2f}" for one in found)])
    return lines


def whole_blocks() -> list[list[str]]:
    """Kept evidence and recovery of policies that keep whole blocks."""
    lines = [["policy, budget", "tokens", "b = 16", "b = 32", "b = 64"]]
    for at, policy in product(("0.3", "0.1"), ("nestedkv", "keydiff", "snapkv", "streamingllm")):
        place = "in_prompt" if policy == "snapkv" else "after"
        some = samples_of("blocks", "dev").where(placement=(place,))
        cells = [(name, at) for name in (policy, *(f"{policy}(block={b})" for b in (16, 32, 64)))]
        each = [f"{some.survival(cell).value:.2f} / {some.recovery(cell).value:.2f}" for cell in cells]
        lines.append([f"{NAMES[policy]}, {at}", *each])
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
    return [[f"{table.headings[0]} (n = {n})", *table.headings[1:]], *filled_lines(table, found)]


FEW = (
    "fullcache", "kvzip", 'crystalcache(observed_layer=-3, graph="zero")', "nestedkv", "crystalcache", "streamingllm",
    "chunkkv", "snapkv", "random",
)
FORM_COLUMNS = [_after(f"facts, {at}", FACT, at) for at in ("0.5", "0.3", "0.15")]
PAPER_COLUMNS = [
    Column("needle", NEEDLE, "paper", "0.3", recovery=False), *(
        Column(f"delayed association, {density} density", DELAYED, "paper", "0.3", recovery=False, density=density)
        for density in ("high", "low")
    ),
]
COLUMNS = (
    _after("facts, question after", FACTS), Column("facts, question in the prompt", FACTS, "in_prompt", "0.3"),
    _after("continued prose", PROSE, answers=False),
)
FACTS_AT = [_after(f"facts, {at}", FACTS, at) for at in ("0.3", "0.1")]
PROSE_AT_3 = _after("continued prose, 0.3", PROSE, answers=False)
STUDIES: dict[str, tuple[str, Sequence[Column], str]] = {
    "main": ("rules", COLUMNS, "confirm"),
    "methods": ("methods", FACTS_AT, "confirm"),
    "h2o": ("h2o", COLUMNS[:2], "dev"),
    "heads": ("heads", FACTS_AT[:1], "confirm"),
    "advice": ("advice", (*FACTS_AT, PROSE_AT_3), "confirm"),
    "repair": ("repair", [_after(f"facts, {at}", FACT, at) for at in ("0.3", "0.1")], "all"),
    "facts": ("facts", FORM_COLUMNS, "confirm"),
    "facts-dev": ("facts", FORM_COLUMNS, "dev"),
    "facts-2048": ("facts-2048", FORM_COLUMNS[1:2], "confirm"),
    "facts-2048-dev": ("facts-2048", FORM_COLUMNS[1:2], "dev"),
    "paper-tasks": ("paper-tasks", PAPER_COLUMNS, "confirm"),
    "paper-tasks-dev": ("paper-tasks", PAPER_COLUMNS, "dev"),
    "pairs": ("rules", (_after("pairs of letters, 0.3", PAIRS),), "confirm"),
}
"""Tables of answers by name: the study, its columns and its part."""
CLAIMS = {"claims": "rules"} | {
    f"{study}-claims": study for study in ("methods", "heads", "advice", "facts", "facts-2048", "paper-tasks")
}
TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "few": lambda: figures("facts", [
        each._replace(title=f"budget {each.budget}", recovery=False) for each in FORM_COLUMNS[1:]
    ], policies=FEW),
    "stages": parts_of_crystalcache, "layers": observed_layers, "blocks": whole_blocks, "answerable": answerable,
    "depths": depths, **{name: partial(figures, *study) for name, study in STUDIES.items()},
    **{name: partial(decided, study) for name, study in CLAIMS.items()},
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
