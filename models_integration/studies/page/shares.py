"""Right answers in shares: the sections of a comparison and of a sweep, whose rows have the same figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from models_integration.studies.estimate import SAME_CACHE, SIGNIFICANT, Estimate, format_p, pairs_of, share_of
from models_integration.studies.page.elements import Html, best_of, forest, grid, note, panel, plots, section, table
from models_integration.studies.page.pictures import Curve
from models_integration.studies.report import title_of
from models_integration.studies.results import Row
from reference.statistics import holm

__all__ = ["Share", "failures", "grouped", "kept_of", "shares_sections"]


@dataclass(frozen=True)
class Share:
    """What one policy, or variant, said on one task at one budget.

    Attributes:
        kept: tokens of the prompt that are kept, a mean over samples, layers and KV heads.
        mean_cache: slots while it answers, the answer's own tokens included.
        outcomes: right (1) or wrong (0), sample by sample; () where the samples are not there.
        notes: other figures, by name.
    """

    task: str
    name: str
    budget: str
    n: int
    correct: int
    kept: float
    mean_cache: float
    outcomes: Sequence[float]
    notes: dict[str, str]

    @property
    def estimate(self) -> Estimate:
        """With Wilson's interval."""
        return share_of(self.correct, self.n)


def kept_of(row: Row) -> float:
    """Tokens of the prompt that a cell keeps; rows of before 0.4 have the mean cache alone."""
    return float(row["mean_kept"] if "mean_kept" in row else row["mean_cache"])


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
    """What does best, pictures over the prompt tokens kept, paired differences to `base`, flagged and all figures.

    `whole` is the policy that needs no budget, and is never called best.
    """
    if not every:
        return []
    tasks = {task: [one for one in every if one.task == task] for task in dict.fromkeys(one.task for one in every)}
    names = list(dict.fromkeys(one.name for one in every))
    budgets = {one.budget for one in every if one.name != whole}
    panels = [
        panel(f"{title_of(task)}, n = {shares[0].n}", [
            Curve(name, key, [(one.budget, one.kept, one.estimate) for one in shares if one.name == name])
            for key, name in enumerate(names)
        ], "prompt tokens kept", "exact match") for task, shares in tasks.items()
    ]
    return [
        section("Best by task and budget", _best(tasks, whole)),
        section("Exact match against prompt tokens kept", plots(names, [grid(panels)]) if len(budgets) > 1 else ""),
        section(f"Paired differences to {base}", *_differences(tasks, base)),
        section("Flagged: a different number of prompt tokens kept", _flagged(every)),
        section("All figures", _figures(every)),
    ]


def _off(shares: Sequence[Share]) -> list[tuple[Share, float]]:
    """Cells that keep more or fewer prompt tokens than the middle cell of their task and budget; by what part."""
    found = []
    for one in shares:
        beside = [other.kept for other in shares if (other.task, other.budget) == (one.task, one.budget)]
        found.append((one, one.kept / median(beside) - 1))
    return [(one, part) for one, part in found if abs(part) > SAME_CACHE]


def _best(tasks: dict[str, list[Share]], whole: str) -> Html:
    budgets = list(dict.fromkeys(one.budget for shares in tasks.values() for one in shares if one.name != whole))

    def winner(shares: Sequence[Share]) -> str:
        off = [one for one, _ in _off(shares)]
        some = [one for one in shares if one not in off]
        if not some:
            return ""
        most = max(one.correct / one.n for one in some)
        first, *ties = [one for one in some if one.correct / one.n == most]
        if not most:
            return "no right answer"
        close = [one.name for one in some if one not in (first, *ties) and not _apart(first, one)]
        return best_of([first.name, *(one.name for one in ties)], first.estimate, close)

    lines = []
    for task, shares in tasks.items():
        limited = [one for one in shares if one.name != whole]
        lines.append([title_of(task), *(winner([one for one in limited if one.budget == at]) for at in budgets)])
    caption = (
        "Highest exact match among cells that keep the same number of prompt tokens, chosen after the fact. Told apart:"
        f" McNemar's exact p of the same samples is at most {SIGNIFICANT}, uncorrected."
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
        if (least := 2.0 ** (1 - reference.n)) > SIGNIFICANT:
            yield note(f"{reference.n} samples cannot tell two policies apart: the smallest p is {least:g}.", "warning")
        yield forest(
            f"{title_of(task)}, n = {reference.n}; {base}: {reference.estimate}; p: McNemar's exact, by Holm",
            ["", "budget", "exact match", "won", "lost", "p"], [
                (
                    [one.name, one.budget, one.estimate, pair.won, pair.lost, format_p(corrected[str(at)])],
                    pair.difference, None,
                )
                for at, (one, pair) in enumerate(zip(others, pairs, strict=True))
            ],
        )


def _flagged(every: Sequence[Share]) -> str:
    lines = [
        [one.name, one.budget, title_of(one.task), f"{one.kept:.1f}", f"{part:+.1%}"] for one, part in _off(every)
    ]
    caption = f"More than {SAME_CACHE:.0%} off the middle number of prompt tokens kept; never called best"
    return table(caption, ["", "budget", "task", "prompt tokens kept", "off by"], lines) if lines else note("None.")


def _figures(every: Sequence[Share]) -> Html:
    headings = ["", "budget", "task", "exact match", "right", "n", "kept", "mean cache, slots", *every[0].notes]
    return table("Every cell", headings, [
        [
            one.name, one.budget, title_of(one.task), one.estimate, one.correct, one.n, f"{one.kept:.1f}",
            f"{one.mean_cache:.1f}",
            *one.notes.values(),
        ] for one in every
    ], folded=True)
