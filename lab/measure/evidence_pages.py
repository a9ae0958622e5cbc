"""Tables of the studies on real weights, computed from their rows: `python -m lab.measure.evidence_pages`.

A page marks each table by `<!-- table NAME -->` and `<!-- end -->`. Only this command writes the text between the
marks. Without `--write`, the command lists the tables that differ from the rows.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.studies.answers import read_budget
from experiments.studies.evidence.claims import Verdict, compared, verdicts
from experiments.studies.evidence.kept import FULL
from experiments.studies.evidence.protocol import commits_with_rules
from experiments.studies.evidence.rules import PARTS, Claim, load_rules
from experiments.studies.evidence.samples import ENDS, Samples
from experiments.studies.evidence.splits import FEWEST, ORDER, SPLITS
from experiments.studies.evidence.tables import lost_at
from experiments.studies.report import SAME_CACHE, format_p
from lab import pages
from lab.measure import long_decodes
from lab.measure.evidence_papers import PAPER_TABLES
from lab.measure.evidence_place import PLACE_PAGE, PLACE_TABLES, write_pictures
from lab.measure.evidence_rows import (
    DELAYED,
    FACT,
    FACTS,
    HOME,
    KINDS,
    NAMES,
    NEEDLE,
    PLACES,
    PROSE,
    ROOT,
    rows_of,
    samples_of,
)
from reference.statistics import mcnemar

LONG_DECODES = "long-decodes"
PAGES = (
    ROOT / "README.md", HOME / "README.md", HOME / "papers.md", PLACE_PAGE, HOME.parent / f"{LONG_DECODES}.md",
)


class Column(NamedTuple):
    """Samples of one kind under one budget, with their right answers, the recovery of their likelihood, or both.

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
        return some.about("density", self.density) if self.density else some


def _after(title: str, tasks: Sequence[str], budget: str = "0.3", answers: bool = True) -> Column:
    return Column(title, tasks, "after", budget, answers)


def figures(
    study: str, columns: Sequence[Column], part: str = "confirm", policies: Sequence[str] = (),
) -> list[list[str]]:
    """Return right answers and recovery of policies, each with its 95 % interval.

    By default, the table has all policies, sorted by right answers. With `policies`, it also has the number of kept
    tokens. A policy that keeps more than the budget has no figures.
    """
    each = [column.of(samples_of(study, part)) for column in columns]
    head = ["policy"]
    for column, some in zip(columns, each, strict=True):
        head += [f"{column.title}: tokens kept"] if policies else []
        head += [f"{column.title}: right answers of {len(some.rows)}"] if column.answers else []
        head += [f"{'' if column.answers else column.title + ': '}recovery"] if column.recovery else []
    lines = [head]
    for policy in policies or _ranked(each, columns):
        line = [NAMES[policy]]
        for column, some in zip(columns, each, strict=True):
            cell = ENDS[0] if policy == FULL else (policy, column.budget)
            over, kept = exceeds(some, cell), f"{some.prompt_kept(cell):.0f}"
            line += [kept] if policies else []
            line += [over or _right(some, cell)] if column.answers else []
            if column.recovery:
                line.append("1" if policy == FULL else over or str(some.recovery(cell)))
        lines.append(line)
    return lines


def exceeds(some: Samples, cell: tuple[str, str]) -> str:
    """Return a note if a policy keeps more tokens than its budget, otherwise "".

    The table shows a note, not figures.
    """
    rows, budget = some.having(cell).rows, read_budget(cell[1])
    prompts = [int(row.get("prompt_tokens") or row["length"]) for row in rows]
    if cell == ENDS[0] or not prompts:
        return ""
    wanted = float(np.mean([budget.tokens(tokens) for tokens in prompts]))
    kept = some.prompt_kept(cell)
    return f"keeps {kept:.0f}, not {wanted:.0f}" if kept > (1 + SAME_CACHE) * wanted else ""


def split(study: str, column: Column) -> list[list[str]]:
    """Return the right answers of each policy for each place of the fact and each text with at least ten samples."""
    some = column.of(samples_of(study))
    parts = [
        (kind, name, part) for kind, value in SPLITS.items() for name in ORDER
        if len((part := some.only([row for row in some.rows if value(row) == name])).rows) >= FEWEST
    ]
    lines = [["policy", *(f"{kind}: {name}, right of {len(part.rows)}" for kind, name, part in parts)]]
    for policy in _ranked([some], [column]):
        cell = ENDS[0] if policy == FULL else (policy, column.budget)
        over = exceeds(some, cell)
        lines.append([NAMES[policy], *(over or f"{part.of(cell, 'right').sum():.0f}" for _, _, part in parts)])
    return lines


def _ranked(each: Sequence[Samples], columns: Sequence[Column]) -> list[str]:
    """Return the full cache and the evidence, then the named policies by right answers at 0.3."""
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
    """Return every claim of a study with its difference, and the answers of the same samples."""
    head = ["claim", "claimed", "difference", "by place of the fact, by text", "p (Holm)", "outcome", "kind"]
    lines = [[*head, "right answers", "p (McNemar)"]]
    dev, confirm = (samples_of(study, part) for part in PARTS)
    rules = load_rules(HOME / f"{study}.toml")
    for one in verdicts(rules.claims, dev, confirm, commits_with_rules(rules, confirm.rows)):
        lines.append([
            _sentence(one.claim), f"{one.claim.difference:g}", str(one.difference), ", ".join(one.splits),
            one.corrected_text, _outcome(one), one.kind, *_answers(one.claim, confirm),
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
    opposite = f"**opposite signs {one.opposite}**" if one.opposite else ""
    return "; ".join(filter(None, [f"{outcome} ({one.flag})" if one.flag else outcome, opposite]))


def _answers(claim: Claim, confirm: Samples) -> list[str]:
    first, second = (
        side.of(ENDS[0] if name == FULL else (name, claim.budget), "right")
        for side, name in zip(compared(claim, confirm), (claim.first, claim.second), strict=True)
    )
    if np.isnan(first).any():
        return ["", ""]
    p = mcnemar(int((second > first).sum()), int((first > second).sum()))
    return [f"{first.sum():.0f} and {second.sum():.0f} of {len(first)}", format_p(p)]


def answerable() -> list[list[str]]:
    """Return the right answers of the full cache and without context by task, and the likelihood that context adds."""
    lines = [["task", "tokens", "n", "full cache right", "blind right", "log-likelihood gained by the context, nats"]]
    for task in dict.fromkeys(row["task"] for row in samples_of("rules").rows):
        whole = samples_of("rules").where(task=(task,), placement=("after",))
        for length in sorted({row["length"] for row in whole.rows}):
            some = whole.where(length=(length,))
            right = [some.of(cell, "right") for cell in ENDS]
            cells = ["" if np.isnan(one).any() else f"{one.sum():.0f}" for one in right]
            worth = some.worth()
            gained = f"{worth.value:.1f} [{worth.low:.1f}, {worth.high:.1f}]"
            lines.append([task, str(length), str(len(some.rows)), *cells, gained])
    return lines


def templates() -> list[list[str]]:
    """Return the right answers in the paper's tasks by template of the fact."""
    whole = samples_of("paper-tasks")
    policies = (FULL, "crystalcache", 'crystalcache(observed_layer=-3, graph="zero")', "random-trunks", "snapkv")
    lines = [["task", "template", "n", *(NAMES[policy] for policy in policies)]]
    for task in (*NEEDLE, *DELAYED):
        rows = whole.where(task=(task,)).rows
        for template in sorted({row["metadata"]["template"] for row in rows}):
            some = whole.where(task=(task,)).about("template", template)
            cells = [ENDS[0] if policy == FULL else (policy, "0.3") for policy in policies]
            right = [f"{some.of(cell, 'right').sum():.0f}" for cell in cells]
            lines.append([task.replace("_", " "), template, str(len(some.rows)), *right])
    return lines


def depths() -> list[list[str]]:
    """Return the recovery at each depth of the fact, for StreamingLLM and three different policies."""
    whole = samples_of("rules").where(task=FACTS, placement=("after",))
    at = {
        depth: [row for row in whole.rows if row["metadata"]["depth"] == depth] for depth in (0.1, 0.3, 0.5, 0.7, 0.9)
    }
    lines = [["policy", *(f"depth {depth}: {len(rows)} samples" for depth, rows in at.items())]]
    for policy in ("streamingllm", "crystalcache", "random", "nestedkv"):
        lines.append([NAMES[policy], *(f"{Samples(rows).recovery((policy, '0.3')).value:.2f}" for rows in at.values())])
    return lines


def parts_of_crystalcache() -> list[list[str]]:
    """Return the stage of CrystalCache at which the evidence of samples is lost."""
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
    """Return recovery and kept evidence of CrystalCache on the paper's layer and on the four best layers."""
    whole = samples_of("crystalcache", "dev")
    tasks = {"two keys": "keys_in_prose_2", "four keys": "keys_in_prose_4", "needle": "needle_in_prose"}
    lines = [["observed layer", "recovery, 0.3", *tasks, "evidence kept", "recovery, 0.1", "evidence kept"]]
    for layer in (0, 1, 5, 27, 29):
        policy = f"crystalcache(observed_layer={layer})" if layer else "crystalcache"
        each = [whole, *(whole.where(task=(task,)) for task in tasks.values())]
        result = [some.recovery((policy, "0.3")) for some in each] + [whole.survival((policy, "0.3"))]
        result += [whole.recovery((policy, "0.1")), whole.survival((policy, "0.1"))]
        lines.append([str(layer), *(f"{one.value:.2f}" for one in result)])
    return lines


def whole_blocks() -> list[list[str]]:
    """Return kept evidence and recovery of policies that keep whole blocks."""
    lines = [["policy, budget", "tokens", "b = 16", "b = 32", "b = 64"]]
    for at, policy in product(("0.3", "0.1"), ("nestedkv", "keydiff", "snapkv", "streamingllm")):
        place = "in_prompt" if policy == "snapkv" else "after"
        some = samples_of("blocks", "dev").where(placement=(place,))
        cells = [(name, at) for name in (policy, *(f"{policy}(block={b})" for b in (16, 32, 64)))]
        each = [f"{some.survival(cell).value:.2f} / {some.recovery(cell).value:.2f}" for cell in cells]
        lines.append([f"{NAMES[policy]}, {at}", *each])
    return lines


FEW = (
    "fullcache", "kvzip", 'crystalcache(observed_layer=-3, graph="zero")', "nestedkv", "crystalcache", "streamingllm",
    "snapkv", "random-trunks", "random",
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
}
"""Tables of answers by name, each with the study, its columns and its part."""
SPLIT = {
    f"{study}-splits": (study, column) for study, column in {
        "rules": COLUMNS[0], "methods": FACTS_AT[0], "advice": FACTS_AT[0], "facts": FORM_COLUMNS[1],
        "facts-2048": FORM_COLUMNS[1], "paper-tasks": Column("both tasks", (*NEEDLE, *DELAYED), "paper", "0.3"),
    }.items()
}
"""Tables of answers by place of the fact and by text."""
CLAIMS = {"claims": "rules"} | {
    f"{study}-claims": study for study in ("methods", "heads", "advice", "facts", "facts-2048", "paper-tasks")
}
TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "few": lambda: figures("facts", [
        each._replace(title=f"budget {each.budget}", recovery=False) for each in FORM_COLUMNS[1:2]
    ], policies=FEW),
    "stages": parts_of_crystalcache, "layers": observed_layers, "blocks": whole_blocks, "answerable": answerable,
    "depths": depths, **{name: partial(figures, *study) for name, study in STUDIES.items()},
    **{name: partial(decided, study) for name, study in CLAIMS.items()},
    **{name: partial(split, *asked) for name, asked in SPLIT.items()}, "paper-templates": templates,
}
TABLES |= PAPER_TABLES | PLACE_TABLES | {LONG_DECODES: lambda: long_decodes.table(rows_of(LONG_DECODES))}


def answers_nothing(lines: Sequence[Sequence[str]]) -> bool:
    """Return True if the row of the full cache has shares of right answers, and all of them are zero."""
    full = [line for line in lines if line[0] in ("fullcache", NAMES[FULL])]
    shares = [cell for line in full for cell in line[1:] if re.match(r"(\d+: )?\d\.\d\d \[", cell)]
    return bool(shares) and all(re.match(r"(0: )?0\.00 \[", cell) for cell in shares)


@cache
def markdown(name: str) -> str:
    """Return a table as Markdown, or a sentence if the full cache has no right answer."""
    head, *lines = TABLES[name]()
    if answers_nothing(lines):
        return "The full cache answers none of the samples, so the table is not printed.\n"
    return pages.table(head, lines)


def stale(files: Sequence[Path] = PAGES) -> Iterator[str]:
    """Yield the tables of pages that differ from the rows, and the tables that are on no page."""
    shown = set()
    for page in files:
        for match in pages.BLOCK.finditer(page.read_text(encoding="utf-8")):
            shown.add(match[2])
            if match[0] != pages.fill(match[0], markdown):
                yield f"{page.relative_to(ROOT)}: table {match[2]}"
    yield from (f"no page: table {name}" for name in TABLES if name not in shown)


def main(arguments: Sequence[str]) -> int:
    """Write the tables and pictures if asked, and print the tables that differ. Return 1 if there is one."""
    if "--write" in arguments:
        for page in PAGES:
            pages.write(page, markdown)
        write_pictures()
    differing = list(stale())
    print("\n".join(differing) or "every table of the pages is that of the rows")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
