"""Tables of the paper on cross-session injection: sessions of the arms, and numbers from rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

import numpy as np

from experiments.studies.papers.injection import ASYMMETRIC, PATCHES, Session, Template
from experiments.studies.report import SEED, format_p, mean_of, share_of
from experiments.studies.results import Row
from reference.statistics import bootstrap, draws, mcnemar
from spec.arrays import Float64, Vector

__all__ = ["LOCOMO", "NOT_RUN", "InjectionTable", "filled_lines", "interaction", "tables_of"]

_HEADINGS = (
    "arm", "r@1 or F1 [95 %]", "difference from the first arm", "bootstrap 95 %", "McNemar exact p", "Pr > 0",
    "discordant (first arm / arm)", "ms to the first token", "published", "difference (published)",
)
_PROBES = {
    "attention": {"entropy": "entropy in nats", "sinks": "attention to positions 0 to 3"},
    "keys": {"cosine": "cosine", "unrotated": "cosine without rotation"},
}
"""Names of a layer's numbers in rows of probes, and headings in tables, by measure."""
NOT_RUN = (
    "Not run: eager attention of Table 1 (give --attn eager), Table 3 (give a base model with --model), Appendix C"
    " (potion), Appendix F (DeepSeek)."
)
LOCOMO = "locomo"
"""Name of the table for questions from a file."""
_RESAMPLES = 10_000
_PUBLISHED_WRAPPERS = {
    "A_full": 0.55, "B_opening_only": 0.55, "C_closing_only": 0.5625, "D_role_name_only": 0.4875,
    "E_markers_no_role": 0.5375, "A_full_phi3": 0.6, "E_markers_phi3": 0.6,
}


@dataclass(frozen=True)
class InjectionTable:
    """Table of the paper.

    Attributes:
        name: name for the option `--part`.
        arms: sessions by name in the paper. Differences are relative to the first session.
        published: published numbers, by arm.
        measure: "right" (fraction), "f1" (mean), or for probes by layer "attention" or "keys".
    """

    name: str
    title: str
    arms: Mapping[str, Session]
    published: Mapping[str, float]
    note: str = ""
    measure: str = "right"

    @property
    def headings(self) -> Sequence[str]:
        """Return the headings of the columns."""
        if self.measure not in _PROBES:
            return _HEADINGS
        return "arm", "layer", *(f"{name} [95 %]" for name in _PROBES[self.measure].values())


def tables_of(template: Template) -> Sequence[InjectionTable]:
    """Return the tables for a model with this chat template."""
    raw, short = Session(), Session("short")
    return (
        InjectionTable("table-1", "Tables 1a and 1b: other explanations", {
            "baseline": raw, "global sink": Session(before="sinks"), "cond1": Session(before="prefix"),
            "per_chunk": Session("full"),
        }, {"baseline": 0.5125, "global sink": 0.5125, "cond1": 0.5375, "per_chunk": 0.575},
            "Published: Qwen2.5-7B-Instruct, n = 80. The global sink's session is its own first four tokens."),
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
        InjectionTable("table-13", "Table 13: activation patching", {
            "patch_baseline": raw, "patch_pc_full": short,
            **{f"patch_denoise_{band}": Session("short", patch=band) for band in PATCHES[:-1]},
            "patch_noise_upper": Session("short", patch=PATCHES[-1]),
        }, {"patch_baseline": 0.5, "patch_pc_full": 0.55, "patch_denoise_early": 0.45, "patch_denoise_mid": 0.4,
            "patch_denoise_upper": 0.5, "patch_denoise_all": 0.55, "patch_denoise_random": 0.3,
            "patch_noise_upper": 0.5,
        }, "Published: Phi-3-medium, n = 20. Markers are patched while a chunk is computed, not while the model"
            " answers."),
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
        InjectionTable("figure-3", "Figure 3: attention of the question's tokens", {
            "baseline": Session(probe=True), "global sink": Session(before="sinks", probe=True),
            "per_chunk": Session("full", probe=True), "text-RAG": Session(text=True, probe=True),
        }, {}, "Published: 98 % less attention to positions 0 to 3 after injection. The paper does not name the"
               " comparison.", "attention"),
        InjectionTable("figure-4", "Figure 4: archived keys and keys of the same text in the session", {
            "baseline": Session(probe=True), "per_chunk": Session("full", probe=True),
        }, {}, "Published: about 1 without rotation in all layers.", "keys"),
        InjectionTable(LOCOMO, "Section 5.6: LoCoMo, F1", {"baseline": Session(text=True), "per_chunk": short},
                       {"baseline": 0.135, "per_chunk": 0.189}, "Published: n = 200. The baseline reads the turns as"
                       " text. The paper does not name the model.", "f1"),
    )


def filled_lines(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """Yield the lines of a table. `rows` has the rows of each session, in the order of the questions."""
    if table.measure in _PROBES:
        yield from _layers(table, rows)
        return
    (first, base), *_ = table.arms.items()
    reference = _figures(rows[base.name], table.measure)
    for name, session in table.arms.items():
        figures, n = _figures(rows[session.name], table.measure), len(reference)
        share = share_of(int(figures.sum()), n) if table.measure == "right" else mean_of(figures, _RESAMPLES)
        published, before = table.published.get(name, nan), table.published.get(first, nan)
        line = [name, share.text(".3f")]
        line += ["", "", "", "", ""] if name == first else _compared(figures - reference, table.measure)
        line += [
            f"{1000 * median(row['seconds'] for row in rows[session.name]):.1f}",
            "" if isnan(published) else f"{published:g}",
            "" if name == first or isnan(published - before) else f"{published - before:+.3f}",
        ]
        yield line


def _layers(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """Yield a line with the mean over layers for each arm, and a line for each layer."""
    for arm, session in table.arms.items():
        each = [np.array([row[name] for row in rows[session.name]]) for name in _PROBES[table.measure]]
        each = [np.hstack([one.mean(1, keepdims=True), one]) for one in each]
        for at in range(each[0].shape[1]):
            name = str(at - 1) if at else "all"
            yield [arm, name, *(mean_of(one[:, at], _RESAMPLES).text(".3f") for one in each)]


def _figures(rows: Sequence[Row], measure: str = "right") -> Float64[Vector, " n"]:
    return np.array([float(row[measure]) for row in rows])


def _bootstrap(figures: Float64[Vector, " n"]) -> tuple[float, float, float]:
    return bootstrap(figures, draws(len(figures), _RESAMPLES, SEED))


def _compared(difference: Float64[Vector, " n"], measure: str) -> list[str]:
    lost, won = int((difference < 0).sum()), int((difference > 0).sum())
    low, high, positive = _bootstrap(difference)
    return [
        f"{difference.mean():+.3f}", f"[{low:+.3f}, {high:+.3f}]",
        format_p(mcnemar(lost, won)) if measure == "right" else "", f"{positive:.2f}", f"{lost} / {won}",
    ]


def interaction(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> str:
    """Return a sentence about the additional effect of markers at sentence ends, or "" for different tables."""
    if table.name != "table-2":
        return ""
    A, B, C, D = (_figures(rows[session.name]) for session in table.arms.values())
    difference = (D - C) - (B - A)
    low, high, _ = _bootstrap(difference)
    return f"Interaction (D - C) - (B - A): {difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]."
