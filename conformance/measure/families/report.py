"""What is written of the families: every cell to results/, and one page, sorted by what people run."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from textwrap import wrap

from conformance.measure.families.run import BOUND, COLUMNS, Outcome

__all__ = ["cells", "counts", "page"]

Rows = dict[str, dict[str, Outcome]]
"""Outcomes by family, then by column."""

USED = (
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "llama", "llama4", "mistral", "ministral3", "mixtral",
    "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "deepseek_v2", "deepseek_v32",
    "kimi_linear", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "phi3", "nemotron_h", "granite",
    "granitemoehybrid", "lfm2", "lfm2_moe", "olmo3", "olmo_hybrid", "smollm3", "falcon_h1", "minimax_m2", "gpt2", "opt",
)
"""What people run, by hand: their families come first."""

_NECESSARY = {
    "nothing to evict": "yes: no part of the cache grows",
    "ALiBi is not served": "yes: the model would need its bias at the kept positions",
    "its attention depends on the distance of slots": "yes, as for ALiBi",
    "its indexer takes positions from slots": "yes: eviction moves tokens to other slots",
    "its attention is not causal": "yes: later tokens change what earlier ones store",
    "it stores one latent for all heads (MLA)": "yes: no head has keys of its own to evict",
    "its recurrent layers lose their state when several tokens follow others": "yes: transformers computes it wrongly",
    "its decoder numbers positions itself": "yes: the model counts padding",
}
"""By the first words of a reason, whether kvspec must refuse; other refusals are work that is not done."""


def by_family(outcomes: Iterable[Outcome]) -> Rows:
    """In the order of USED, then by name."""
    rows: Rows = defaultdict(dict)
    for outcome in sorted(outcomes, key=lambda one: (USED.index(one.family) if one.family in USED else len(USED))):
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
    """Each family in each column."""
    rows = by_family(outcomes)
    body = [[family, *(cell(own[column]) for column in COLUMNS)] for family, own in rows.items()]
    return "\n".join(table(["family", *COLUMNS], body))


def counts(outcomes: Sequence[Outcome]) -> list[str]:
    """The table of sums by column."""
    body = []
    for column in COLUMNS:
        own = [outcome for outcome in outcomes if outcome.policy == column]
        each = [sum(one.verdict == verdict for one in own) for verdict in ("holds", "refused", "fails", "not built")]
        worst = max((one for one in own if one.verdict == "holds"), key=lambda one: one.worst, default=None)
        shown = "" if worst is None else f"{worst.worst:.1e} ({worst.family})"
        body.append([column, *map(str, each), shown])
    return table(["column", "holds", "refused", "fails", "not built", "worst error"], body)


def reason(outcome: Outcome) -> str:
    """The first words of a refusal, without the names of the model."""
    words = outcome.detail
    for mark in ("; ", ": ", ", to its "):
        words = words.partition(mark)[0]
    return words


def _grouped(refused: Iterable[Outcome]) -> list[str]:
    """Refused families by the same first words, and whether that is necessary."""
    families: dict[str, list[str]] = defaultdict(list)
    for outcome in refused:
        families[reason(outcome)].append(outcome.family)
    body = []
    for why, own in sorted(families.items(), key=lambda item: (-len(item[1]), item[0])):
        necessary = next((words for first, words in _NECESSARY.items() if why.startswith(first)), "no")
        body.append([why, ", ".join(dict.fromkeys(own)), necessary])
    return table(["reason", "families", "necessary"], body)


def page(outcomes: Sequence[Outcome]) -> str:
    """docs/results/families.md."""
    rows = by_family(outcomes)
    refused = {family for family, own in rows.items() if own["model"].verdict == "refused"}
    unbuilt = [family for family, own in rows.items() if own["model"].verdict == "not built"]
    every = [family for family, own in rows.items() if {one.verdict for one in own.values()} == {"holds"}]
    some = [family for family in rows if family not in {*refused, *unbuilt, *every}]
    parts = [one for family in some for one in rows[family].values() if one.verdict == "refused"]
    return "\n".join([
        "# Every causal family of transformers", "",
        f"`python -m conformance.measure.families --write` tested {len(rows)} model classes of AutoModelForCausalLM"
        f" with transformers {version('transformers')} and torch {version('torch')}. Each model is tiny, with random"
        " weights in float32. The command writes the reason for each cell to results/families.md.", "",
        "In the first four columns the model reads a prompt and 20 decode steps. The policies keep one set for the"
        " model, read attention, keep a set per layer, or a set per head. A copy of the model reads the same tokens"
        " with the full cache of transformers, and the evicted tokens are masked in attention.", "",
        "- *Turn*: several tokens after a step. A full cache that is read in pieces must also equal one forward.",
        "- *Padded batch*: two rows, one with padding on its left.",
        "- *Save*: a saved and loaded cache continues with equal logits.",
        "- *Decode*: a policy that evicts in each step.", "",
        f"A family holds (+) if no logit differs by more than {BOUND:.0e} of the largest logit. A family is refused (-)"
        " if kvspec raises `SpecError` with the model and the reason. The command exits with 1 for any different"
        " outcome.", "",
        "If a family has sliding and full layers, the tested model has both. Families with a window in all layers are"
        " tested without the window. A family may be refused in a different configuration.", "",
        *counts(outcomes),
        "## Families that people run", "", *_marks(rows, [family for family in USED if family in rows]),
        f"## Hold in every column ({len(every)})", "",
        "```text", *wrap(", ".join(sorted(every)), 120), "```", "",
        f"## Hold in some columns ({len(some)})", "", *_marks(rows, sorted(some)), *_grouped(parts),
        f"## Refused ({len(refused)})", "", *_grouped(rows[family]["model"] for family in sorted(refused)),
        f"Not built: {', '.join(unbuilt)}.", "",
    ])


def _marks(rows: Rows, families: Iterable[str]) -> list[str]:
    """Families with one sign in each column."""
    signs = {"holds": "+", "refused": "-", "fails": "fails", "not built": "not built"}
    return table(["family", *COLUMNS], [
        [family, *(signs[rows[family][column].verdict] for column in COLUMNS)] for family in families
    ])
