"""What is written of the families: every cell to results/, and one page that groups them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from textwrap import wrap

from conformance.measure.families.run import BOUND, POLICIES, Outcome

__all__ = ["cells", "counts", "page"]

Rows = dict[str, dict[str, Outcome]]
"""Outcomes by family, then by policy."""


def by_family(outcomes: Iterable[Outcome]) -> Rows:
    rows: Rows = defaultdict(dict)
    for outcome in outcomes:
        rows[outcome.family][outcome.policy] = outcome
    return rows


def cell(outcome: Outcome) -> str:
    """One field of a table in Markdown."""
    if outcome.verdict == "holds":
        return f"holds ({outcome.worst:.0e})"
    return f"{outcome.verdict} ({outcome.detail})".replace("|", "/").replace("\n", " ")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(fields)} |" for fields in (header, ["---"] * len(header), *rows)]
    return [*lines, ""]


def cells(outcomes: Iterable[Outcome]) -> str:
    """Each family under each policy."""
    rows = by_family(outcomes)
    body = [[family, *(cell(own[policy]) for policy in POLICIES)] for family, own in rows.items()]
    return "\n".join(table(["family", *POLICIES], body))


def counts(outcomes: Sequence[Outcome]) -> list[str]:
    """The table of sums by policy."""
    body = []
    for policy in POLICIES:
        own = [outcome for outcome in outcomes if outcome.policy == policy]
        each = [sum(one.verdict == verdict for one in own) for verdict in ("holds", "refused", "fails", "not built")]
        worst = max((one for one in own if one.verdict == "holds"), key=lambda one: one.worst, default=None)
        shown = "" if worst is None else f"{worst.worst:.1e} ({worst.family})"
        body.append([policy, *map(str, each), shown])
    return table(["one set for each", "holds", "refused", "fails", "not built", "worst error"], body)


def reason(outcome: Outcome) -> str:
    """The first words of a refusal, without the names of the model."""
    words = outcome.detail
    for mark in ("; ", ": ", ", to its "):
        words = words.partition(mark)[0]
    return words


def _grouped(rows: Rows) -> list[str]:
    """How many families are refused by the same first words."""
    reasons = Counter(reason(next(iter(own.values()))) for own in rows.values())
    return table(["reason", "families"], [[why, str(count)] for why, count in reasons.most_common()])


def page(outcomes: Sequence[Outcome]) -> str:
    """docs/results/families.md."""
    rows = by_family(outcomes)
    of = {family: {one.verdict for one in own.values()} for family, own in rows.items()}
    every = [family for family in rows if of[family] == {"holds"}]
    some = {family: own for family, own in rows.items() if len(of[family]) > 1}
    refused = {family: own for family, own in rows.items() if of[family] == {"refused"}}
    unbuilt = [family for family in rows if of[family] == {"not built"}]
    return "\n".join([
        "# Every causal family of transformers", "",
        f"`python -m conformance.measure.families --write` tested {len(rows)} model classes of AutoModelForCausalLM"
        f" with transformers {version('transformers')} and torch {version('torch')}. Each model is tiny, with random"
        " weights in float32. The command writes the reason for each cell to results/families.md.", "",
        "Under each policy the model reads a prompt, a decode step, a turn and a second step. A copy of the model reads"
        " the same tokens with the full cache of transformers, and the evicted tokens are masked in attention.", "",
        f"- *Holds*: no logit differs by more than {BOUND:.0e} of the largest logit.",
        "- *Refused*: `SpecError` with the model and the reason, before the prompt is read.",
        "- *Fails*: any different outcome. The command exits with 1.", "",
        "If a family has sliding and full layers, the tested model has both. Families with a window in all layers are"
        " tested without the window. A family may be refused in a different configuration.", "",
        *counts(outcomes),
        f"## Hold under all four ({len(every)})", "", "```text", *wrap(", ".join(every), 120), "```", "",
        "## Hold under some", "",
        *table(["family", *POLICIES], [[family, *map(cell, own.values())] for family, own in some.items()]),
        "## Refused under all", "", *_grouped(refused),
        f"Not built: {', '.join(unbuilt)}.", "",
    ])
