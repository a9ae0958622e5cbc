"""Tables and pictures of docs/results/place.md: does CrystalCache keep associated tokens, or early tokens?"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from experiments.studies.evidence.claims import Verdict, compared, verdicts
from experiments.studies.evidence.protocol import commits_with_rules
from experiments.studies.evidence.rules import PARTS, Claim, load_rules
from experiments.studies.evidence.samples import Samples
from experiments.studies.page.figures import curve_style, save_figure
from lab.measure.evidence_rows import HOME, ROOT, samples_of

__all__ = ["PICTURES", "PLACE_PAGE", "PLACE_TABLES", "whole", "write_pictures"]

PLACE_PAGE = ROOT / "docs" / "results" / "place.md"
DEPTHS = (0.0, 0.15, 0.3, 0.5, 0.7)
MENTIONS = {"high": "four mentions", "low": "two hints", "none": "no mention"}
KEPT = {
    "crystalcache": "CrystalCache as in the paper",
    'crystalcache(impact="uniform")': "association alone (M = 1)",
    'crystalcache(graph="zero")': "impact alone (D = 0)",
    "streamingllm(N_sink=60)": "first 60 tokens, and recent ones",
    "random-trunks": "random trunks",
}
FORMS_OF_THE_PAPER = tuple(policy for policy in KEPT if policy.startswith("crystalcache"))
LOCAL = "local-salience"
FORMS = {
    "crystalcache": KEPT["crystalcache"],
    'crystalcache(observed_layer=-3, graph="zero")': "impact alone, last layer but two",
    "local-trunks": "local salience and rarity",
    "local-salience-trunks": "local salience alone",
    "local-geometric-trunks": "geometric mean of both, last layer but two",
    "rarity-trunks": "rarity alone, ties at random",
    "shuffled-trunks": "shuffled local salience, and rarity",
    "random-trunks": KEPT["random-trunks"],
    "streamingllm(N_sink=60)": KEPT["streamingllm(N_sink=60)"],
}
"""Policies and controls of the study of the local salience, with their titles."""
ANSWERS = "place-answers"
ANSWERED = {
    "fullcache": "full cache", "evidence": "the fact, then random tokens", "snapkv": "SnapKV",
    **{policy: KEPT[policy] for policy in ("crystalcache", 'crystalcache(graph="zero")', "random-trunks")},
    "random": "random tokens in each head", "blind": "question alone",
}
"""Policies and controls of the study of answers, with their titles."""
FURTHER, KVZIP = "place-policies", "place-kvzip"
SHARES = {
    'crystalcache(observed_layer=-3, graph="zero")': FORMS['crystalcache(observed_layer=-3, graph="zero")'],
    **{policy: KEPT[policy] for policy in ("crystalcache", "random-trunks")},
    "snapkv": "SnapKV", "nestedkv": "NestedKV", "kvzip": "KVzip", "random": "random tokens in each head",
}
"""Policies and controls of the studies of further policies, with their titles."""
TITLES = {**KEPT, **FORMS, **ANSWERED, **SHARES}
BUDGET = "0.3"
PICTURES = {"place": "place", "place-2048": "place-2048"}
"""Files beside the page, each with the study that it shows."""


def whole(samples: Samples, policy: str, depth: float, mentions: str) -> tuple[int, int]:
    """Return in how many samples a policy keeps every token of the fact, and the number of samples."""
    rows = samples.about("depth", depth).about("mentions", mentions).rows
    asked = policy, BUDGET
    cells = [(row, cell) for row in rows for cell in row["cells"] if (cell["policy"], cell["budget"]) == asked]
    return sum(cell["evidence_kept"] == row["evidence_tokens"] for row, cell in cells), len(cells)


def kept_facts(study: str, placement: str) -> list[list[str]]:
    """Return the number of samples in which the whole fact is kept, by policy, mentions and place of the fact."""
    some = samples_of(study).where(placement=(placement,))
    lines = [["policy", "mentions", *(f"fact at {depth:g}" for depth in DEPTHS)]]
    for policy, title in KEPT.items():
        for mentions, text in MENTIONS.items():
            counts = (whole(some, policy, depth, mentions) for depth in DEPTHS)
            lines.append([title, text, *(f"{kept} of {n}" for kept, n in counts)])
    return lines


def differences_by_place(study: str) -> list[list[str]]:
    """Return by place how much more of the fact is kept with four mentions, and by random trunks, with the question."""
    some = samples_of(study).where(placement=("paper",))
    lines = [["difference of the share kept", *(f"fact at {depth:g}" for depth in DEPTHS)]]

    def share(policy: str, depth: float, mentions: Sequence[str]) -> float:
        rows = some.about("depth", depth)
        kept = [rows.about("mentions", one).kept_share((policy, BUDGET)) for one in mentions]
        return float(np.concatenate(kept).mean())

    for policy in FORMS_OF_THE_PAPER:
        gains = (share(policy, depth, ("high",)) - share(policy, depth, ("none",)) for depth in DEPTHS)
        lines.append([f"four mentions over none, {KEPT[policy]}", *(f"{gain:+.2f}" for gain in gains)])
    trunks, paper = "random-trunks", "crystalcache"
    leads = (share(trunks, depth, [*MENTIONS]) - share(paper, depth, [*MENTIONS]) for depth in DEPTHS)
    return [*lines, [f"{KEPT[trunks]} over {KEPT[paper]}", *(f"{lead:+.2f}" for lead in leads)]]


def kept_common_facts() -> list[list[str]]:
    """Return the samples in which the whole fact in common words is kept, and the mean tokens kept, by form."""
    some = samples_of(LOCAL)
    lines = [["form", *(f"fact at {depth:g}" for depth in DEPTHS), "tokens kept"]]
    for form, title in FORMS.items():
        counts = (whole(some, form, depth, "none") for depth in DEPTHS)
        tokens = f"{some.prompt_kept((form, BUDGET)):.0f}"
        lines.append([title, *(f"{kept} of {n}" for kept, n in counts), tokens])
    return lines


def answers() -> list[list[str]]:
    """Return the right answers by policy, mentions and place of the fact."""
    some = samples_of(ANSWERS)
    lines = [["policy", "mentions", *(f"fact at {depth:g}" for depth in DEPTHS)]]
    for policy, title in ANSWERED.items():
        for mentions, text in MENTIONS.items():
            rights = (right_answers(some, policy, depth, mentions) for depth in DEPTHS)
            lines.append([title, text, *(f"{sum(right)} of {len(right)}" for right in rights)])
    return lines


def right_answers(samples: Samples, policy: str, depth: float, mentions: str) -> list[bool]:
    """Return for each sample whether a policy's answer is right. In these rows, each policy has one budget."""
    rows = samples.about("depth", depth).about("mentions", mentions).rows
    return [cell["right"] for row in rows for cell in row["cells"] if cell["policy"] == policy]


def kept_shares() -> list[list[str]]:
    """Return the mean share of the fact's tokens that further policies keep, by mentions and place, and tokens kept."""
    lines = [["policy", "mentions", *(f"fact at {depth:g}" for depth in DEPTHS), "tokens kept"]]
    for policy, title in SHARES.items():
        study, cell = KVZIP if policy == "kvzip" else FURTHER, (policy, BUDGET)
        for mentions, text in MENTIONS.items():
            some = samples_of(study).about("mentions", mentions)
            shares = [some.about("depth", depth).kept_share(cell) for depth in DEPTHS if some.rows]
            if shares:
                line = [title, text, *(f"{share.mean():.2f}" for share in shares), f"{some.prompt_kept(cell):.0f}"]
                lines.append(line)
    return lines


def kept_tokens(study: str) -> list[list[str]]:
    """Return the mean number of tokens that each policy keeps of a prompt, beside the budget."""
    some = samples_of(study)
    prompt = sum(row["prompt_tokens"] for row in some.rows) / len(some.rows)
    lines = [["policy", f"tokens kept, budget {float(BUDGET) * prompt:.0f}"]]
    return [*lines, *([title, f"{some.prompt_kept((policy, BUDGET)):.0f}"] for policy, title in KEPT.items())]


def claims(study: str) -> list[list[str]]:
    """Return every claim of a study with its two sides, their difference and its outcome."""
    dev, confirm = (samples_of(study, part) for part in PARTS)
    rules = load_rules(HOME / f"{study}.toml")
    between, least = "first side minus second side", "claimed: at least"
    lines = [["claim", between, "difference", "splits", least, "p (Holm)", "outcome", "kind"]]
    result = verdicts(rules.claims, dev, confirm, commits_with_rules(rules, confirm.rows))
    return [*lines, *(_claim_line(one, confirm) for one in result)]


def sides(claim: Claim, confirm: Samples) -> str:
    """Return the two sides of a claim's difference: policies, or numbers of mentions or places for one policy."""
    if claim.first != claim.second:
        return f"{TITLES[claim.first]} minus {TITLES[claim.second]}"
    each = [[row["metadata"] for row in side.rows] for side in compared(claim, confirm)]
    mentions = [{about["mentions"] for about in side} for side in each]
    if mentions[0] != mentions[1]:
        return " minus ".join(" or ".join(MENTIONS[name] for name in sorted(names)) for names in mentions)
    places = [sorted({about["depth"] for about in side}) for side in each]
    ends = [dict.fromkeys((depths[0], depths[-1])) for depths in places]
    return " minus ".join(f"fact at {' to '.join(f'{depth:g}' for depth in pair)}" for pair in ends)


def _claim_line(one: Verdict, confirm: Samples) -> list[str]:
    outcome = f"{one.outcome} ({one.flag})" if one.flag else one.outcome
    signs = "; **opposite signs**" if one.opposite else ""
    numbers = str(one.difference), "; ".join(one.splits), f"{one.claim.difference:g}", one.corrected_text
    return [one.claim.name, sides(one.claim, confirm), *numbers, outcome + signs, one.kind]


def picture(study: str, placement: str = "paper") -> Figure:
    """Draw the share of whole facts over the place of the fact, with a panel for each number of mentions."""
    some = samples_of(study).where(placement=(placement,))
    figure = Figure(figsize=(6.75, 2.6), layout="constrained")
    for at, (mentions, text) in enumerate(MENTIONS.items()):
        axes: Any = figure.add_subplot(1, 3, at + 1)
        for number, (policy, title) in enumerate(KEPT.items()):
            counts = [whole(some, policy, depth, mentions) for depth in DEPTHS]
            shares = [kept / n for kept, n in counts]
            axes.plot(DEPTHS, shares, label=title, markersize=3, **curve_style(number, policy))
        axes.set(title=text, xlabel="place of the fact", ylim=(-0.05, 1.05), xticks=DEPTHS)
        if at == 0:
            axes.set_ylabel("whole fact kept")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def write_pictures(folder: Path = PLACE_PAGE.parent) -> None:
    """Write the pictures of the page as SVG."""
    with mpl.rc_context({"font.size": 8, "xtick.labelsize": 7, "ytick.labelsize": 7}):
        for name, study in PICTURES.items():
            title = f"Share of contexts in which the whole fact is kept, by place, policy and mentions; study {study}"
            save_figure(picture(study), folder / f"{name}.svg", title)


PLACE_TABLES: dict[str, Callable[[], list[list[str]]]] = {
    name: table for study in PICTURES.values() for name, table in {
        f"{study}-kept": partial(kept_facts, study, "paper"), f"{study}-after": partial(kept_facts, study, "after"),
        f"{study}-tokens": partial(kept_tokens, study), f"{study}-claims": partial(claims, study),
        f"{study}-places": partial(differences_by_place, study),
    }.items()
} | {
    f"{LOCAL}-kept": kept_common_facts, f"{LOCAL}-claims": partial(claims, LOCAL),
    ANSWERS: answers, f"{ANSWERS}-claims": partial(claims, ANSWERS),
    f"{FURTHER}-kept": kept_shares, **{f"{study}-claims": partial(claims, study) for study in (FURTHER, KVZIP)},
}
