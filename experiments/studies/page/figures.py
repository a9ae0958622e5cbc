"""Figures for papers, made with matplotlib: recovery over kept prompt tokens.

Your own questions, and results whose recovery is unknown, have accuracy instead.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from experiments.studies.evidence.kept import EVERY_CONTROL
from experiments.studies.evidence.samples import ENDS, Samples
from experiments.studies.evidence.tables import budgets_of, by_task, policies_of
from experiments.studies.report import NOTHING
from experiments.studies.results import Row
from models_integration.cache.atomic_file import publish_readable
from spec.errors import SpecError

__all__ = ["curve_style", "save_figure", "write_figure"]

_MARKS = "osD^vP*X<>"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Of Okabe and Ito, which readers with colour blindness tell apart, without yellow, which is pale on paper."""
_DASHES = ("-", "--", ":", "-.")
_COLUMN, _PAGE, _HEIGHT = 3.3, 6.75, 2.1
"""Inches: the width of one panel alone and of several, as a paper's column and page, and the height of a panel."""
_APART, _SPREAD = 2.0, 8.0
"""Points: the distance between the marks of two policies at the same place, and the largest distance of any two."""
_STYLE: Any = {"svg.hashsalt": "kvspec", "pdf.fonttype": 42, "font.size": 8, "xtick.labelsize": 7, "ytick.labelsize": 7}
"""Settings for reproducible files, and for PDF fonts that journals accept."""
_METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Creator": "kvspec", "Date": None}, ".pdf": {"Creator": "kvspec"}, ".png": {"Software": "kvspec"},
}
"""Metadata by suffix. With the name in the metadata, `spec.files.check_output` recognises a figure of kvspec."""


def write_figure(rows: Sequence[Row], path: Path) -> None:
    """Write a figure with a panel for each model, placement and task. Each policy has a curve with intervals.

    Policies at the same place are drawn slightly apart. A horizontal line is the full cache.

    Raises:
        SpecError: if no row has a policy with a budget.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = {
        f"{task}, {placement.replace('_', ' ')}" + (f", {model}" if len(models) > 1 else ""): samples
        for model in models
        for placement in dict.fromkeys(row["placement"] for row in rows)
        for task, samples in by_task(_some(rows, model, placement)).items()
    }
    names = list(dict.fromkeys(name for samples in panels.values() for name in policies_of(samples)))
    if not names:
        raise SpecError("figure", str(path), "would be empty, because no result has a policy with a budget")
    with mpl.rc_context(_STYLE):
        title = f"Results by number of kept prompt tokens. Panels: {'; '.join(panels)}. Policies: {', '.join(names)}"
        save_figure(_drawn(panels, names), path, title)


def save_figure(figure: Figure, path: Path, title: str) -> None:
    """Write a figure as .svg, .pdf or .png with reproducible ids. Screen readers read the title of an SVG file."""
    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": _STYLE["svg.hashsalt"]}):
        figure.savefig(file, format=path.suffix[1:], metadata={**_METADATA[path.suffix], "Title": title})
    data = file.getvalue()
    if path.suffix == ".svg":
        data = data.replace(b"<svg ", f'<svg role="img" aria-label={quoteattr(title)} '.encode(), 1)
    publish_readable(path, data)


def _drawn(panels: Mapping[str, Samples], names: Sequence[str]) -> Figure:
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    across = _PAGE if columns > 1 else _COLUMN
    beside = max(1, int(across / (0.6 + 0.053 * max(map(len, names)))))
    below = 0.16 * -(-len(names) // beside)
    figure = Figure(figsize=(across, lines * _HEIGHT + below), layout="constrained")
    axes = [figure.add_subplot(lines, columns, at + 1) for at in range(len(panels))]
    for each, (title, samples) in zip(axes, panels.items(), strict=True):
        _panel(each, title, samples, names)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=beside, frameon=False, fontsize=7)
    return figure


def curve_style(at: int, name: str) -> dict[str, Any]:
    """Colour, dash and mark of a curve by its number; a control is grey, and never solid."""
    mark = _MARKS[at % len(_MARKS)]
    if name in EVERY_CONTROL:
        return {"color": "0.4", "linestyle": _DASHES[1 + at % 3], "marker": mark}
    turn, colour = divmod(at, len(_COLOURS))
    return {"color": _COLOURS[colour], "linestyle": _DASHES[turn % 2], "marker": mark}


def _some(rows: Sequence[Row], model: str, placement: str) -> Samples:
    return Samples([
        row for row in rows if (row["model"], row["placement"]) == (model, placement) and not row.get("control")
    ])


def _panel(axes: Axes, title: str, samples: Samples, names: Sequence[str]) -> None:
    answered = samples.of_user and any(samples.accuracy(cell).known for cell in samples.cells)
    recovery = samples.has_recovery and not answered
    measure = samples.recovery if recovery else samples.accuracy
    full = measure(ENDS[0]) if ENDS[0] in samples.cells else NOTHING
    if full.known:
        axes.axhline(full.value, label=ENDS[0][0], linewidth=0.8, color="0.6", zorder=0)
    step = min(_APART, _SPREAD / len(names))
    for at, name in enumerate(names):
        apart = ScaledTranslation((at - (len(names) - 1) / 2) * step / 72, 0, axes.figure.dpi_scale_trans)
        points = sorted(
            (samples.prompt_kept((name, budget)), one) for budget in budgets_of(samples)
            if (name, budget) in samples.cells and (one := measure((name, budget))).known
        )
        x, y = [kept for kept, _ in points], [one.value for _, one in points]
        ends = [[one.value - one.low for _, one in points], [one.high - one.value for _, one in points]]
        axes.errorbar(
            x, y, yerr=ends, label=name, markersize=3, linewidth=1, elinewidth=0.5, markerfacecolor="none",
            transform=axes.transData + apart, **curve_style(at, name),
        )
        # Results of one text have no interval. matplotlib ignores a point of the limits that is NaN.
        axes.update_datalim([(kept, end) for kept, one in points for end in (one.low, one.value, one.high)])
    axes.autoscale_view()
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.set_title(f"{title}\nn = {len(samples.rows)}", fontsize=8)
    axes.set_xlabel("prompt tokens kept")
    axes.set_ylabel("recovery (full cache = 1)" if recovery else "accuracy (share of answers)")
