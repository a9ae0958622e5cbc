"""The tables of the paper on cross-session injection: which sessions are their arms, and figures from rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

import numpy as np

from models_integration.studies.estimate import Estimate, format_p
from models_integration.studies.papers.injection import ASYMMETRIC, Session, Template
from models_integration.studies.results import Row
from reference.statistics import bootstrap, draws, mcnemar, wilson
from spec.arrays import Float64, Vector

__all__ = ["HEADINGS", "NOT_RUN", "InjectionTable", "filled_lines", "interaction", "tables_of"]

HEADINGS = (
    "arm", "r@1 [Wilson 95 %]", "difference from the first arm", "bootstrap 95 %", "McNemar exact p", "Pr > 0",
    "discordant (first arm / arm)", "ms to the first token", "r@1 (published)", "difference (published)",
)
NOT_RUN = (
    "Not run: Table 1 (sinks, cond1, eager), Table 3 (give a base model with --model), multi-turn LoCoMo and its F1,"
    " Table 13 (activation patching), Appendix C (potion), Appendix F (DeepSeek)."
)
_RESAMPLES, _SEED = 10_000, 0
_PUBLISHED_WRAPPERS = {
    "A_full": 0.55, "B_opening_only": 0.55, "C_closing_only": 0.5625, "D_role_name_only": 0.4875,
    "E_markers_no_role": 0.5375, "A_full_phi3": 0.6, "E_markers_phi3": 0.6,
}


@dataclass(frozen=True)
class InjectionTable:
    """A table of the paper.

    Attributes:
        name: as `--part` has it.
        arms: sessions by the names of the paper; differences are from the first.
        published: shares of right answers of the paper, by arm.
    """

    name: str
    title: str
    arms: Mapping[str, Session]
    published: Mapping[str, float]
    note: str = ""


def tables_of(template: Template) -> Sequence[InjectionTable]:
    """The tables for a model with this chat template."""
    raw, short = Session(), Session("short")
    return (
        InjectionTable("table-1c", "Table 1c: raw and wrapped chunks", {"baseline": raw, "per_chunk": Session("full")},
                       {"baseline": 0.486, "per_chunk": 0.542}, "Published: Qwen2.5-7B-Instruct, n = 467."),
        InjectionTable("table-2", "Table 2: boundaries and markers", {
            "A arbitrary, stripped": Session("raw", "arbitrary"), "B arbitrary, markers": Session("full", "arbitrary"),
            "C sentence, stripped": Session("raw", "sentence"), "D sentence, markers": Session("full", "sentence"),
        }, {"A arbitrary, stripped": 0.5, "B arbitrary, markers": 0.512, "C sentence, stripped": 0.487,
            "D sentence, markers": 0.55}, "Published: Qwen2.5-7B-Instruct, n = 80, interaction +0.050."),
        InjectionTable("table-4", "Tables 4 and 5: wrappers", {name: Session(name) for name in template.wrappers},
                       _PUBLISHED_WRAPPERS, "Published: Qwen2.5-7B-Instruct or Phi-3-medium, n = 80."),
        InjectionTable("table-6", "Table 6: unrelated chunks", {
            f"{count} fillers": Session("full", fillers=count) for count in range(3)
        }, {"0 fillers": 0.5, "1 fillers": 0.45, "2 fillers": 0.425}, "Published: Qwen2.5-7B-Instruct, n = 40."),
        InjectionTable("table-7a", "Table 7a: wrapped layers", {
            "baseline": raw, "abl_pc_full": short, "abl_upper_mixed": Session("short", half="upper"),
            "abl_lower_mixed": Session("short", half="lower"),
        }, {"baseline": 0.42, "abl_pc_full": 0.475, "abl_upper_mixed": 0.45, "abl_lower_mixed": 0.415},
            "Published: Qwen2.5-7B-Instruct, n = 200."),
        InjectionTable("table-10", "Table 10: 8-bit integers", {
            name: Session("short", codec=codec) for name, codec in (
                ("pc_bf16", "none"), ("pt_asym", ASYMMETRIC), ("pt_sym", "per_tensor"), ("per_ch", "per_head"),
                ("per_tok", "per_token"), ("selective", "selective_per_head"), ("k_only", "keys_per_head"),
                ("layer_low", "lower_half_per_head"), ("layer_hi", "upper_half_per_head"),
            )
        }, {}, "Published: a loss of 0.05 for pt_asym and pt_sym, none for per_ch, per_tok and k_only. per_ch has one"
               " scale for each head."),
        InjectionTable("table-g1", "Table G1: another system prompt", {
            "baseline": raw, "same_prompt": short, "drifted_prompt": Session("short", prompt=1),
        }, {"baseline": 0.43, "same_prompt": 0.48, "drifted_prompt": 0.48}, "Published: Qwen2.5-7B-Instruct, n = 200."),
        InjectionTable("text", "Section 4.7: wrappers in text", {
            "plain_rag": Session(text=True), "wrapped_rag": Session("full", text=True),
        }, {}, "Published difference: +0.005."),
        InjectionTable("figure-6", "Figure 6: time to the first token", {
            "raw inject": raw, "per_chunk": short, "text-RAG": Session(text=True),
            "full re-prefill": Session(text=True, every=True),
        }, {}, "Published: text-RAG takes 2.6 times as long as per_chunk, and 3.4 times as long as raw inject. Here"
               " chunks are in memory."),
    )


def filled_lines(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """The lines under HEADINGS; rows are those of each session, in the order of the questions."""
    (first, base), *_ = table.arms.items()
    reference = _right(rows[base.name])
    for name, session in table.arms.items():
        right, n = _right(rows[session.name]), len(reference)
        share = Estimate(float(right.mean()), *wilson(int(right.sum()), n), n)
        published, before = table.published.get(name, nan), table.published.get(first, nan)
        line = [name, f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"]
        line += ["", "", "", "", ""] if name == first else _compared(right - reference)
        line += [
            f"{1000 * median(row['seconds'] for row in rows[session.name]):.1f}",
            "" if isnan(published) else f"{published:g}",
            "" if name == first or isnan(published - before) else f"{published - before:+.3f}",
        ]
        yield line


def _right(rows: Sequence[Row]) -> Float64[Vector, " n"]:
    return np.array([float(row["right"]) for row in rows])


def _compared(difference: Float64[Vector, " n"]) -> list[str]:
    lost, won = int((difference < 0).sum()), int((difference > 0).sum())
    low, high, positive = bootstrap(difference, draws(len(difference), _RESAMPLES, _SEED))
    return [
        f"{difference.mean():+.3f}", f"[{low:+.3f}, {high:+.3f}]", format_p(mcnemar(lost, won)), f"{positive:.2f}",
        f"{lost} / {won}",
    ]


def interaction(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> str:
    """What markers add at sentence ends beyond what they add elsewhere, as a sentence; "" for other tables."""
    if table.name != "table-2":
        return ""
    A, B, C, D = (_right(rows[session.name]) for session in table.arms.values())
    difference = (D - C) - (B - A)
    low, high, _ = bootstrap(difference, draws(len(difference), _RESAMPLES, _SEED))
    return f"Interaction (D - C) - (B - A): {difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]."
