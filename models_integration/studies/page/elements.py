"""HTML elements of a page of results: text, tables and sections."""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from html import escape
from itertools import count
from pathlib import Path

from models_integration.studies.estimate import Estimate
from models_integration.studies.page.pictures import KEYS, Curve, curves, forest_axis, forest_mark, legend
from spec.arrays import Float64, Vector

__all__ = [
    "Html", "best_of", "forest", "grid", "note", "page", "panel", "plots", "section", "shaded", "strong", "style",
    "table",
]

_HOME = Path(__file__).parent
_FIGURE = re.compile(r"([<≤] )?[-+]?\d")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body class="results">
<header><h1>{title}</h1>
<nav aria-label="Parts of this page">{links}</nav></header>
<main>
{body}
</main>
</body>
</html>
"""


class Html(str):
    """Text that already is HTML. All other text is escaped."""

    def __add__(self, other: str) -> "Html":
        return Html(str(self) + _html(other))


def _html(text: object) -> str:
    return text if isinstance(text, Html) else escape(str(text))


def strong(text: str) -> Html:
    """Return text in bold."""
    return Html(f"<strong>{_html(text)}</strong>")


def note(text: str, kind: str = "note") -> Html:
    """Return a paragraph with a class of the style sheet, or "" for empty text."""
    return Html(f'<p class="{kind}">{_html(text)}</p>' if text else "")


def best_of(names: Sequence[str], estimate: Estimate, close: Sequence[str]) -> Html:
    """Return a cell with the names of the best policies, and of policies without a significant difference to them."""
    apart = f"not told apart: {', '.join(close)}" if close else "told apart from all others"
    return strong(", ".join(names)) + Html(f" {estimate}") + note(apart, "small")


def section(title: str, *parts: str, level: int = 2) -> Html:
    """Return a section with a heading, or "" if there are no parts."""
    body = "\n".join(filter(None, parts))
    return Html(f"<section>\n<h{level}>{_html(title)}</h{level}>\n{body}\n</section>\n" if body else "")


def table(
    caption: str, headings: Sequence[object], lines: Iterable[Sequence[object]], folded: bool = False, kind: str = "",
) -> Html:
    """Return a table with row headings in the first column. With `folded`, the table is hidden until it is opened.

    A table wider than the page scrolls, by keys too. On narrow screens the cells of a `stacked` table are below each
    other, each after the heading of its column.
    """
    head = "".join(f'<th scope="col">{_html(heading)}</th>' for heading in headings)
    names = [heading if "stacked" in kind and not isinstance(heading, Html) else "" for heading in headings]
    body = "\n".join(
        f'<tr><th scope="row">{_html(line[0])}</th>{"".join(map(_cell, line[1:], names[1:]))}</tr>' for line in lines
    )
    made = (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )
    if folded:
        return Html(f"<details><summary>{_html(caption)}</summary>{made}</details>")
    return Html(f"<figure><figcaption>{_html(caption)}</figcaption>{made}</figure>")


def _cell(content: object, name: object) -> str:
    kind = ' class="figure"' if _FIGURE.match(str(content)) else ""
    said = f' data-name="{escape(str(name))}"' if name else ""
    return f"<td{kind}{said}>{_html(content)}</td>"


def forest(
    caption: str, headings: Sequence[str], lines: Sequence[tuple[Sequence[object], Estimate, float | None]],
) -> Html:
    """Return a table with a forest plot of each line's difference. A dashed line is the smallest claimed difference."""
    made = [
        [first, Html(forest_mark(one, smallest)), str(one) or "not known", *others]
        for (first, *others), one, smallest in lines
    ]
    above = Html(f"difference{forest_axis()}")
    return table(caption, [headings[0], above, "95 % interval", *headings[1:]], made, kind="forest stacked")


def shaded(shares: Float64[Vector, " n"]) -> Html:
    """Return the mean of fractions as a cell of a heat map, or "-" without values."""
    if not len(shares):
        return Html("-")
    return Html(f'<span style="--share:{100 * shares.mean():.0f}%">{shares.mean():.2f}</span>')


def panel(title: str, every: Sequence[Curve], across: str, upward: str) -> Html:
    """Return a chart of curves and a table of the points, or "" without values."""
    known = [(curve.name, *point) for curve in every for point in curve.points if point[2].known]
    lines = [[name, what, *map(_plain, (at, *one[:3]))] for name, what, at, one in known]
    behind = table(f"Table of {upward}, {title}", ["policy", "at", across, upward, "low", "high"], lines, folded=True)
    picture = curves(every, across, upward, f"{upward}, {title}")
    return Html(f"<figure><figcaption>{_html(title)}</figcaption>{picture}{behind}</figure>" if picture else "")


def _plain(value: float) -> str:
    return f"{value:.3f}" if value == value else ""


def grid(parts: Iterable[str], kind: str = "grid") -> Html:
    """Return parts in a responsive grid. The kind "grid broad" has fewer columns."""
    shown = "\n".join(filter(None, parts))
    return Html(f'<div class="{kind}">{shown}</div>' if shown else "")


def plots(names: Sequence[str], groups: Iterable[str], references: Collection[str] = ()) -> Html:
    """Return charts of curves with a common legend."""
    shown = "\n".join(groups)
    return Html(f'<div class="plots">{legend(names, references)}{shown}</div>' if shown else "")


def page(title: str, sections: Iterable[str]) -> str:
    """Return the complete page, with links to the sections."""
    numbers, links = count(), list[str]()

    def linked(match: re.Match[str]) -> str:
        at = next(numbers)
        links.append(f'<a href="#part-{at}">{match[1]}</a>')
        return f'<h2 id="part-{at}">{match[1]}</h2>'

    body = re.sub("<h2>(.*?)</h2>", linked, "".join(sections))
    looks = style("base") + style("report") + KEYS
    return _PAGE.format(title=escape(title), style=looks, links=" ".join(links), body=body)


@cache
def style(name: str) -> str:
    """Return a style sheet by name."""
    return (_HOME / f"{name}.css").read_text(encoding="utf-8")
