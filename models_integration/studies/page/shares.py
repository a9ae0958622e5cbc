"""Right answers in shares: the sections of a comparison and of a sweep, whose rows have the same figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from models_integration.studies.estimate import SAME_CACHE, SIGNIFICANT, Estimate, pairs_of, share_of
from models_integration.studies.page.elements import Html, best_of, forest, grid, note, panel, plots, section, table
from models_integration.studies.page.pictures import Curve
from models_integration.studies.report import title_of
from models_integration.studies.results import Row
from reference.statistics import holm

__all__ = ["Share", "failures", "grouped", "shares_sections"]


@dataclass(frozen=True)
class Share:
    """What one policy, or variant, said on one task at one budget.

    Attributes:
        outcomes: right (1) or wrong (0), sample by sample; () where the samples are not there.
        notes: other figures, by name.
    """

    task: str
    name: str
    budget: str
    n: int
    correct: int
    mean_cache: float
    outcomes: Sequence[float]
    notes: dict[str, str]

    @property
    def estimate(self) -> Estimate:
        """With Wilson's interval."""
        return share_of(self.correct, self.n)


def grouped(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Rows that agree in all of these; with what they agree in."""
    found: dict[str, tuple[Row, list[Row]]] = {}
    for row in rows:
        about = {name: row.get(name) for name in names}
        found.setdefault(repr(about), (about, []))[1].append(row)
    return list(found.values())


def failures(rows: Sequence[Row]) -> Html:
    """Samples whose last attempt failed."""
    lines = [[title_of(row["task"]), str(row["index"]), row["error"]] for row in rows]
    return section("Failed", table("Left out of all figures", ["task", "number", "error"], lines) if lines else "")


def shares_sections(every: Sequence[Share], base: str, whole: str = "") -> list[Html]:
    """What does best, pictures over the mean cache, paired differences to `base`, flagged and all figures.

    `whole` is the policy that needs no budget, and is never called best.
    """
    if not every:
        return []
    tasks = {task: [one for one in every if one.task == task] for task in dict.fromkeys(one.task for one in every)}
    names = list(dict.fromkeys(one.name for one in every))
    budgets = {one.budget for one in every if one.name != whole}
    panels = [
        panel(f"{title_of(task)}, n = {shares[0].n}", [
            Curve(name, key, [(one.budget, one.mean_cache, one.estimate) for one in shares if one.name == name])
            for key, name in enumerate(names)
        ], "mean cache, slots", "exact match") for task, shares in tasks.items()
    ]
    return [
        section("Best by task and budget", _best(tasks, whole)),
        section("Exact match against mean cache", plots(names, [grid(panels)]) if len(budgets) > 1 else ""),
        section(f"Paired differences to {base}", *_differences(tasks, base)),
        section("Flagged: another mean cache", _flagged(every)),
        section("All figures", _figures(every)),
    ]


def _off(shares: Sequence[Share]) -> list[tuple[Share, float]]:
    """Those off the middle mean cache of their task and budget by more than may be."""
    found = []
    for one in shares:
        beside = [other.mean_cache for other in shares if (other.task, other.budget) == (one.task, one.budget)]
        found.append((one, one.mean_cache / median(beside) - 1))
    return [(one, part) for one, part in found if abs(part) > SAME_CACHE]


def _best(tasks: dict[str, list[Share]], whole: str) -> Html:
    budgets = list(dict.fromkeys(one.budget for shares in tasks.values() for one in shares if one.name != whole))

    def winner(shares: Sequence[Share]) -> str:
        off = [one for one, _ in _off(shares)]
        some = [one for one in shares if one not in off]
        if not some:
            return ""
        best = max(some, key=lambda one: one.correct / one.n)
        close = [one.name for one in some if one is not best and not _apart(best, one)]
        return best_of(best.name, best.estimate, close)

    lines = []
    for task, shares in tasks.items():
        limited = [one for one in shares if one.name != whole]
        lines.append([title_of(task), *(winner([one for one in limited if one.budget == at]) for at in budgets)])
    caption = (
        "Highest exact match among those of one mean cache, chosen after the fact. Told apart: McNemar's exact p of the"
        f" same samples is at most {SIGNIFICANT}, uncorrected."
    )
    return table(caption, ["task", *(f"budget {budget}" for budget in budgets)], lines) if budgets else Html("")


def _apart(first: Share, second: Share) -> bool:
    if not (first.outcomes and second.outcomes):
        return False
    return pairs_of(first.outcomes, second.outcomes).p <= SIGNIFICANT


def _differences(tasks: dict[str, list[Share]], base: str) -> Iterator[Html]:
    for task, shares in tasks.items():
        reference = next((one for one in shares if one.name == base and one.outcomes), None)
        others = [one for one in shares if one is not reference and one.outcomes]
        if reference is None or not others:
            yield note(f"{title_of(task)}: no paired difference, for want of samples of {base} and others.", "warning")
            continue
        pairs = [pairs_of(one.outcomes, reference.outcomes) for one in others]
        corrected = holm({str(at): pair.p for at, pair in enumerate(pairs)})
        yield forest(
            f"{title_of(task)}, n = {reference.n}; {base}: {reference.estimate}; p: McNemar's exact, by Holm",
            ["", "budget", "exact match", "won", "lost", "p"], [
                (
                    [one.name, one.budget, one.estimate, pair.won, pair.lost, f"{corrected[str(at)]:.4f}"],
                    pair.difference, None,
                )
                for at, (one, pair) in enumerate(zip(others, pairs, strict=True))
            ],
        )


def _flagged(every: Sequence[Share]) -> str:
    lines = [
        [one.name, one.budget, title_of(one.task), f"{one.mean_cache:.1f}", f"{part:+.1%}"] for one, part in _off(every)
    ]
    caption = f"Off the middle mean cache of task and budget by more than {SAME_CACHE:.0%}; never called best."
    return table(caption, ["", "budget", "task", "mean cache, slots", "off by"], lines) if lines else note("None.")


def _figures(every: Sequence[Share]) -> Html:
    headings = ["", "budget", "task", "exact match", "right", "n", "mean cache, slots", *every[0].notes]
    return table("Every cell", headings, [
        [
            one.name, one.budget, title_of(one.task), one.estimate, one.correct, one.n, f"{one.mean_cache:.1f}",
            *one.notes.values(),
        ] for one in every
    ], folded=True)
