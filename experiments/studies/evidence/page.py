"""Sections of a study on a page of results: main results first, then charts, all other numbers, published numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

from experiments.studies.evidence.claims import compared, verdicts
from experiments.studies.evidence.kept import BLIND, EVERY_CONTROL, EVIDENCE, FULL
from experiments.studies.evidence.protocol import commits_with_rules
from experiments.studies.evidence.rules import ALL, PARTS, Rules
from experiments.studies.evidence.run import merged
from experiments.studies.evidence.samples import Samples, is_user_question
from experiments.studies.evidence.tables import (
    budgets_of,
    by_task,
    controls,
    curves_of,
    depths,
    differences,
    flagged,
    off_budget,
    seconds,
    sizes,
    stages,
    sweeps,
)
from experiments.studies.page import Html, best_of, forest, note, section, strong, table
from experiments.studies.papers import PAPERS, Paper, Table, load_paper
from experiments.studies.report import (
    SAME_CACHE,
    SIGNIFICANT,
    control_cells,
    failed_controls,
    format_p,
    summary,
    title_of,
)
from experiments.studies.results import Row
from spec.printing import counted

__all__ = ["study_sections"]


_FEW = 10
"""Smallest number of contexts for a reliable bootstrap interval. With fewer contexts, intervals are too narrow."""
_BEST = (
    "The tables compare the policies that keep the same number of prompt tokens. Each best policy is chosen after the"
    " measurement, so use claims for decisions. A difference is significant if the interval of the paired difference"
    " does not contain 0. A cell is 'not known' if no policy can be compared, or if the answers do not clearly depend"
    " on the context."
)
_MOST = "Most right answers{tasks}. Test: exact McNemar test, uncorrected"
_HIGHEST = (
    "Highest recovery. For tasks without recovery: highest accuracy, with the exact McNemar test, uncorrected"
)
_WITHOUT = {
    FULL: "no recovery, and no check that the model can do the task", BLIND: "no recovery",
    EVIDENCE: "no upper limit for policies that keep the evidence",
}
_OPEN = 10
"""Largest number of your own questions whose tables of answers are open from the start."""


def study_sections(rows: Sequence[Row], rules: Rules | None) -> list[Html]:
    """Return the sections of one study. All rows must belong to the same model and the same rules file.

    The sections show the confirming samples if there are any, otherwise the dev samples, which decide nothing. If the
    rules have no claims (a sweep), all samples are shown.
    """
    every = merged(rows)
    measured = [row for row in every if not row.get("control")]
    dev, confirm = (Samples([row for row in measured if row["part"] == part]) for part in PARTS)
    shown = confirm if confirm.rows else dev
    if not shown.rows or (rules is not None and not rules.claims):
        shown = Samples(measured)
    placements = {
        f"Question {name.replace('_', ' ')}": shown.where(placement=(name,))
        for name in dict.fromkeys(row["placement"] for row in shown.rows)
    }

    checked = [row for row in summary(every) if row["control"]]
    bounds = table("Controls and their required accuracy", *control_cells(checked)) if checked else ""
    failed = ", ".join(failed_controls(checked))

    def each(cell: Callable[[Samples], str]) -> str:
        return Html("".join(section(name, cell(some), level=3) for name, some in placements.items()))

    return [
        section(
            rules.title if rules else "Results", *_about(rows[0], shown), *_missing(shown, rules),
            note(f"Failed controls: {failed}." if failed else "", "warning"),
        ),
        section("Claims", *_claims(rules, dev, confirm)),
        section("Answers to your questions", *_answers(shown.rows)),
        section("Best policy by task and budget", note(_BEST), each(_best)),
        section("Results by number of kept prompt tokens", curves_of(placements)),
        section("Paired differences", each(differences)),
        section("Evidence kept by depth and length", each(depths)),
        section("Effect of one constant", each(sweeps)),
        section("Loss of evidence by stage", each(lambda some: stages(rules.stages if rules else (), some))),
        section("Controls", bounds, each(controls)),
        section("Cost", seconds(shown), each(sizes)),
        section("Excluded: different number of kept prompt tokens", each(flagged)),
        section("Published results", _beside_papers(placements)),
    ]


def _about(first: Row, shown: Samples) -> Iterator[Html]:
    part = " and ".join(dict.fromkeys(row["part"] for row in shown.rows)) or "none"
    rows = f"{counted(len(shown.rows), 'row')} of {counted(shown.contexts, 'text' if shown.of_user else 'context')}"
    yield note(
        f"Model {first['model']}, backend {first.get('backend')}. {'' if part == ALL else f'Part {part}: '}{rows}."
        f" Rules {first['rules'][:8]}. Intervals are 95 % intervals: Wilson intervals for shares of right answers, and"
        " bootstrap intervals over contexts for all other results."
    )
    if part == PARTS[0]:
        yield note("These results are from dev samples. Dev samples decide no claim.", "warning")


def _missing(shown: Samples, rules: Rules | None) -> Iterator[Html]:
    """Yield notes about results that the page cannot show, with reasons."""
    if shown.contexts == 1 and shown.of_user:
        yield note("All questions are about one text, so recoveries have no interval and no test.", "warning")
    elif shown.contexts == 1:
        yield note("One context gives no interval, no recovery and no comparison.", "warning")
    elif shown.contexts < _FEW:
        yield note(f"Bootstrap intervals over only {shown.contexts} contexts are too narrow.", "warning")
    measured = {name for name, _ in shown.cells}
    needed = {name: lost for name, lost in _WITHOUT.items() if name != EVIDENCE or not shown.of_user}
    absent = [f"{name} ({lost})" for name, lost in needed.items() if measured and name not in measured]
    without = dict[str, dict[str, None]]()
    for policy, budget in () if shown.of_user else shown.cells:  # your own texts have no random controls
        control = shown.control((policy, budget))
        if policy not in EVERY_CONTROL and control not in measured:
            without.setdefault(control, {})[policy] = None
    for control, (first, *others) in without.items():
        more = f" and {len(others)} more" if others else ""
        absent.append(f"{control} (the random control of {first}{more})")
    if absent:
        yield note(f"Missing controls: {'; '.join(absent)}.", "warning")
    if rules is None and not shown.of_user:
        yield note("This page has no claims and no stages. To see them, pass the rules file with --rules.", "warning")
    used = shown.rows[0].get("calibration") if shown.rows else None
    if used and not used["controlled"]:
        yield note(f"Uncontrolled: calibration {used['digest']} does not name the text of the calibration.", "warning")


def _answers(rows: Sequence[Row]) -> Iterator[Html]:
    """Yield a table for each of your own questions, with the answer of each policy."""
    asked = list(filter(is_user_question, rows))
    for row in asked:
        about, placement = row["metadata"], row["placement"].replace("_", " ")
        caption = f"{about['question']} Expected: {about['expected']} (text {about['text']}, question {placement})"
        lines = [
            [cell["policy"], cell["budget"], (cell["answer"] or "").strip(), f"{cell['right']:.2f}"]
            for cell in row["cells"] if cell["right"] is not None
        ]
        yield table(caption, ["policy", "budget", "answer", "score"], lines, folded=len(asked) > _OPEN, kind="stacked")


def _claims(rules: Rules | None, dev: Samples, confirm: Samples) -> Iterator[Html]:
    if rules is None or not rules.claims:
        return
    if not confirm.rows:
        yield note(f"None of the {len(rules.claims)} claims is decided yet.", "verdict")
        return
    lines, outcomes = [], list[str]()
    for one in verdicts(rules.claims, dev, confirm, commits_with_rules(rules, confirm.rows)):
        claim, p = one.claim, one.corrected_text
        about = f"{claim.first} over {claim.second}: {claim.measure} at {claim.budget}, n = {one.difference.n}"
        some, other = compared(claim, confirm)
        if some is other and (pair := some.pairs((claim.first, claim.budget), (claim.second, claim.budget))):
            about += f"; only the first is right: {pair.won}, only the second: {pair.lost} (p {format_p(pair.p)})"
        opposite = f"opposite signs {one.opposite}" if one.opposite else ""
        outcome = strong(one.outcome) + note(one.flag, "small") + note(opposite, "warning")
        outcomes.append(f"{one.outcome} ({one.kind})")
        sentence = strong(claim.name) + note("; ".join([about, *one.splits]), "small")
        lines.append(([sentence, outcome, one.kind, p, f"{one.power:.2f}"], one.difference, claim.difference))
    held = sum(outcome.startswith("holds ") for outcome in outcomes)
    yield note(f"{held} of {len(lines)} claims hold", "verdict")
    yield note(", ".join(f"{outcome}: {outcomes.count(outcome)}" for outcome in sorted(set(outcomes))))
    yield note(
        "A claim holds if p is at most 0.05 after Holm's correction, and if the difference reaches the claimed size"
        " (dashed line). A negative size claims non-inferiority. Right answers are the primary measure, because a"
        " policy can recover likelihood without more right answers. kvspec does not compare two policies if their"
        f" numbers of kept prompt tokens differ by more than {SAME_CACHE:.0%}."
    )
    yield note(
        "A claim is exploratory if a result does not name a commit that contains the rules. A claim is confirmatory if"
        " at least 30 dev contexts give a power of at least 0.8 for the claimed size. All other claims are screening"
        " claims."
    )
    caption = "Paired differences, first policy minus second. An arrow marks a value beyond the axis"
    yield forest(caption, ["claim", "outcome", "kind", "p (Holm)", "power"], lines)


def _most_right(some: Samples, cells: Sequence[tuple[str, str]]) -> str:
    """Return the cell with the most right answers, and the cells that are not significantly worse."""
    result = {cell: one for cell in cells if (one := some.accuracy(cell)).known}
    best = max(result, key=lambda cell: result[cell].value, default=None)
    if best is None or not result[best].value:
        return "no right answer" if result else "not known"
    ties = [cell for cell in result if result[cell].value == result[best].value]
    pairs = {cell: some.pairs(best, cell) for cell in result if cell not in ties}
    close = [cell[0] for cell, pair in pairs.items() if pair is None or pair.p > SIGNIFICANT]
    return best_of([name for name, _ in ties], result[best], close)


def _best(samples: Samples) -> str:
    budgets, off = budgets_of(samples), off_budget(samples)

    def is_compared(cell: tuple[str, str]) -> bool:
        return cell[0] not in EVERY_CONTROL and cell not in off

    def winner(some: Samples, budget: str) -> str:
        cells = [cell for cell in some.cells if cell[1] == budget and is_compared(cell)]
        result = {cell: some.recovery(cell) for cell in cells}
        if not any(one.known for one in result.values()):
            return "not known" if some.worth().known else _most_right(some, cells)
        best = max(result, key=lambda cell: result[cell].value)
        ties = [cell for cell in cells if result[cell].value == result[best].value]
        if some.contexts == 1:
            alone = note("one text, so no test of the difference", "small")
            return strong(", ".join(name for name, _ in ties)) + Html(f" {result[best]}") + alone
        close = [cell[0] for cell in cells if cell not in ties and not some.over(best, cell).low > 0]
        return best_of([name for name, _ in ties], result[best], close)

    def winner_by_answers(some: Samples, budget: str) -> str:
        return _most_right(some, [cell for cell in some.cells if cell[1] == budget and is_compared(cell)])

    heading = ["task", *(f"budget {budget}" for budget in budgets)]
    answered = {title: some for title, some in by_task(samples).items() if some.able().rows}
    most = _MOST.format(tasks="" if samples.of_user else ", for tasks that the full cache can do")
    tables = [
        table(caption, heading, [[title, *(win(some, budget) for budget in budgets)] for title, some in each.items()],
              kind="stacked")
        for caption, win, each in ((most, winner_by_answers, answered), (_HIGHEST, winner, by_task(samples)))
        if each
    ]
    return Html("".join(tables)) if budgets else ""


class _Published(NamedTuple):
    """Published numbers of a paper by policy, with columns by model and budget, and kvspec's tasks of the same kind."""

    caption: str
    note: str
    tasks: Sequence[str]
    columns: Sequence[tuple[str, str]]
    rows: Mapping[str, Sequence[float]]


def _published() -> Iterator[_Published]:
    for paper in map(load_paper, PAPERS):
        for each in paper.tables:
            tasks = _tasks(paper, each)
            if not each.published or list(each.rows) != ["policy"]:
                continue
            by_task = list(each.columns) == ["model", "task"]
            for some in [(task,) for task in tasks] if by_task else [tuple(tasks)]:
                at = [at for at, key in enumerate(each.published["columns"]) if not by_task or key[1] in some]
                columns = [each.published["columns"][one] for one in at]
                yield _Published(
                    f"{paper.title}, {each.title}{f': {title_of(some[0]).lower()}' if by_task else ''}", each.note,
                    [*some, *(f"{task}_in_prose" for task in some if task == "needle")],
                    [(model, each.budgets[0] if by_task else budget) for model, budget in columns],
                    {name: [values[one] for one in at] for name, values in each.published.items() if name != "columns"},
                )


def _tasks(paper: Paper, each: Table) -> list[str]:
    parts = [part for part in paper.parts if part.name in each.parts and not part.kind]
    return list(dict.fromkeys(task for part in parts for task in {**paper.study, **part.study}["tasks"]))


_TABLES = tuple(_published())
_PAPER_TASKS = tuple(dict.fromkeys(task for each in _TABLES for task in each.tasks))
"""kvspec's tasks of the same kind as each task of the papers."""


def _beside_papers(placements: Mapping[str, Samples]) -> Html:
    """Return each published table with its source and kvspec's accuracies for the same policies, budgets and tasks.

    Without a task of the papers, there is nothing to compare, and the result is "".
    """
    ours = [
        (task, f"{title_of(task)}, {name.lower()}", some) for name, whole in placements.items()
        for task in _PAPER_TASKS if (some := whole.where(task=(task,))).rows
    ]
    if not ours:
        return Html("")
    created = [note(
        "The published results are from different models, prompt lengths and samples. Compare the order of the policies"
        " only.", "warning"
    )]
    for each in _TABLES:
        budgets = dict.fromkeys(budget for _, budget in each.columns)
        here = [
            (title, some, budget) for task, title, some in ours if task in each.tasks for budget in budgets
            if any(at == budget for _, at in some.cells)
        ]
        lines = []
        for policy, values in each.rows.items():
            cells = [(some, (policy, "1.0" if policy == FULL else budget)) for _, some, budget in here]
            accuracies = [str(some.accuracy(cell)) if cell in some.cells else "" for some, cell in cells]
            lines.append([policy, *("" if isnan(value) else f"{value:g}" for value in values), *accuracies])
        headings = [
            "", *(f"{model}, {budget}" for model, budget in each.columns),
            *(f"here: {title}, {budget}" for title, _, budget in here),
        ]
        created.append(table(each.caption, headings, lines, folded=not here) + note(each.note, "small"))
    return Html("\n".join(created))
