"""Page of results, which is a single HTML file without external files: text, tables, sections and SVG charts.

The style sheet defines the colours. matplotlib is not used here, only in `figures`. With matplotlib, a panel of eight
curves has 19.7 kB instead of 7.5 kB. Dark mode cannot change the inline colours, and marks have no titles. `kvspec
compare` would also need matplotlib's 95 MB.
"""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from html import escape
from itertools import count
from pathlib import Path
from typing import NamedTuple

from experiments.studies.report import Estimate
from spec.arrays import Float64, Vector

__all__ = [
    "KEYS", "Curve", "Html", "best_of", "curves", "forest", "forest_axis", "forest_mark", "grid", "legend", "note",
    "page", "panel", "plots", "section", "shaded", "strong", "style", "table",
]

_MOST, _COLOURS, _DASHES = 40, 8, ("", "5 3", "1.5 2.5", "8 2 2 2", "3 1")
_MARKS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", "M-2.7-2.7h5.4v5.4h-5.4z", "M0-3.6L3.4 2.6H-3.4z",
    "M0-3.8L3.4 0L0 3.8L-3.4 0z", "M0 3.6L3.4-2.6H-3.4z", "M-3-1h2v-2h2v2h2v2h-2v2h-2v-2h-2z",
)
KEYS = "".join(
    f".plots:has(.key.k{k} input:not(:checked)) .curve.k{k}{{display:none}}\n"
    f".plots:has(.key.k{k}:hover,.key.k{k} :focus-visible) .curve:not(.k{k}){{opacity:.1}}\n"
    f".plots:has(.key.k{k}:hover,.key.k{k} :focus-visible) .curve.k{k} .bars{{display:inline}}\n" for k in range(_MOST)
)
"""Styles: a policy's box in the legend hides its curve. Pointing at it shows its intervals and fades the others."""
_READABLE = 4
"""Curves whose intervals are shown from the start."""
_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 330, 230, 40, 10, 8, 40
_FARTHEST = (-0.6, 1.4)
"""Limits of an axis of fractions for intervals, which are cut there. Values can extend the axis."""
_APART = 0.8
"""Horizontal distance between points at the same place."""
_FOREST, _DIFFERENCES = 200, (-1.25, 1.25)
"""Width and axis of every forest plot."""


class Curve(NamedTuple):
    """Estimates of a policy by place. `key` selects colour, dash pattern and mark. A reference is grey and dashed."""

    name: str
    key: int
    points: Sequence[tuple[str, float, Estimate]]
    """Title of each point (the budget), place on the horizontal axis, and estimate."""
    reference: bool = False


def curves(every: Sequence[Curve], across: str, upward: str, title: str) -> str:
    """Return a chart of curves, or "" without points. The axis covers [0, 1] and values slightly outside."""
    shown = [curve._replace(points=[p for p in curve.points if p[2].known and not math.isnan(p[1])]) for curve in every]
    places = [at for curve in shown for _, at, _ in curve.points]
    if not places:
        return ""
    each = [one for curve in shown for _, _, one in curve.points]
    values, ends = [one.value for one in each], [end for one in each for end in one[1:3] if not math.isnan(end)]
    low = min(0.0, *values, max(_FARTHEST[0], min([0.0, *ends])))
    high = max(1.0, *values, min(_FARTHEST[1], max([1.0, *ends])))
    left, right = (0.0 if min(places) >= 0 else min(places)), max(places) * 1.06 or 1.0
    axes = _Axes((left, right), (low, high))
    parts = [axes.grid(across, upward), *(axes.curve(curve, len(shown)) for curve in shown if curve.points)]
    return (
        f'<svg class="panel" viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(title)}; its table has the same'
        f' figures">{"".join(parts)}</svg>'
    )


class _Axes(NamedTuple):
    across: tuple[float, float]
    upward: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.across
        return _LEFT + (value - low) / (high - low) * (_W - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.upward
        inside = min(max(value, low), high)
        return _TOP + (high - inside) / (high - low) * (_H - _TOP - _BOTTOM)

    def grid(self, across: str, upward: str) -> str:
        lines, foot = list[str](), _H - _BOTTOM
        for tick in _ticks(*self.upward):
            y, kind = self.y(tick), "bound" if tick in (0.0, 1.0) else "rule"
            lines.append(f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{_W - _RIGHT}"/>')
            lines.append(_words(f'x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end"', f"{tick:g}"))
        for tick in _ticks(*self.across):
            x = self.x(tick)
            lines.append(f'<path class="rule" d="M{x:.1f} {foot}v4"/>{_words(_middle(x, foot + 16), f"{tick:g}")}')
        lines.append(_words(_middle((_LEFT + _W - _RIGHT) / 2, _H - 6), across))
        turned = f'transform="translate(10 {(_TOP + foot) / 2}) rotate(-90)" text-anchor="middle"'
        return "".join([*lines, _words(turned, upward)])

    def curve(self, curve: Curve, of: int) -> str:
        apart = (curve.key - (of - 1) / 2) * _APART
        points = [
            (self.x(at) + apart, self.y(one.value), one, name)
            for name, at, one in sorted(curve.points, key=lambda point: point[1])
        ]
        ends = [(x, self.y(one.low), self.y(one.high)) for x, _, one, _ in points if not math.isnan(one.low)]
        bars = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, low, high in ends)
        marks = "".join(
            f'<path class="mark" d="{_mark(curve.key)}" transform="translate({x:.1f} {y:.1f})">'
            f"<title>{escape(f'{curve.name}, {name}: {one}')}</title></path>" for x, y, one, name in points
        )
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in points)
        return (
            f'<g class="curve {_classes(curve.key, curve.reference)}"><path class="bars" d="{bars}"/>'
            f'<path class="line" stroke-dasharray="{_dash(curve.key, curve.reference)}" d="M{path}"/>{marks}</g>'
        )


def legend(names: Sequence[str], references: Collection[str] = ()) -> str:
    """Return a check box for each policy, in the order of the keys, and one for all intervals. A box hides curves."""
    keys = "".join(
        f'<label class="key {(kind := _classes(key, name in references))}"><input type="checkbox" checked>'
        f'<svg viewBox="0 0 28 10" aria-hidden="true"><g class="curve {kind}">'
        f'<path class="line" stroke-dasharray="{_dash(key, name in references)}" d="M1 5H27"/>'
        f'<path class="mark" d="{_mark(key)}" transform="translate(14 5)"/></g></svg>{escape(name)}</label>'
        for key, name in enumerate(names)
    )
    shown = " checked" if len(names) <= _READABLE else ""
    bars = f'<label class="key intervals"><input type="checkbox"{shown}>95 % intervals</label>'
    return f'<div class="legend" role="group" aria-label="Curves that are shown">{keys}{bars}</div>'


def _classes(key: int, reference: bool) -> str:
    return f"k{key % _MOST} {'reference' if reference else f'c{key % _COLOURS}'}"


def _dash(key: int, reference: bool) -> str:
    return _DASHES[1 + key % (len(_DASHES) - 1) if reference else key // _COLOURS % len(_DASHES)] or "none"


def _mark(key: int) -> str:
    return _MARKS[key % len(_MARKS)]


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers inside the range of an axis."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= most)
    return [round(step * at, 10) for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _words(placed: str, words: str) -> str:
    return f"<text {placed}>{escape(words)}</text>"


def _middle(x: float, y: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle"'


def _at(difference: float) -> float:
    low, high = _DIFFERENCES
    return 6 + (min(max(difference, low), high) - low) / (high - low) * (_FOREST - 12)


def forest_axis() -> str:
    """Return the axis of a forest plot, for the heading of the column."""
    ticks = "".join(_words(_middle(_at(tick), 10), f"{tick:g}") for tick in (-1, -0.5, 0, 0.5, 1))
    return f'<svg viewBox="0 0 {_FOREST} 12" aria-hidden="true">{ticks}</svg>'


def forest_mark(one: Estimate, smallest: float | None) -> str:
    """Return one line of a forest plot: zero line, smallest claimed difference (dashed), interval and value.

    An interval beyond the axis is cut and marked with an arrow.
    """
    parts = [f'<path class="bound" d="M{_at(0):.1f} 0V18"/>']
    if smallest is not None:
        parts.append(f'<path class="smallest" d="M{_at(smallest):.1f} 1V17"/>')
    if not math.isnan(one.low):
        parts.append(f'<path class="interval" d="M{_at(one.low):.1f} 9H{_at(one.high):.1f}"/>')
    low, high = _DIFFERENCES
    cut = [("M8 4L2 9L8 14", min(one[:3]) < low), (f"M{_FOREST - 8} 4l6 5l-6 5", max(one[:3]) > high)]
    parts += [f'<path class="interval" d="{arrow}"/>' for arrow, beyond in cut if beyond]
    if one.known and low <= one.value <= high:
        parts.append(f'<circle cx="{_at(one.value):.1f}" cy="9" r="3.4"/>')
    return f'<svg viewBox="0 0 {_FOREST} 18" aria-hidden="true">{"".join(parts)}</svg>'


_HOME = Path(__file__).parent
_FIGURE = re.compile(r"([<≤] )?[-+]?\d")
_INTERVAL = re.compile(r"\[[^][]*\]")
_BREAKS = re.compile(r"(?<=[(=_])")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="kvspec">
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
    apart = f"no significant difference: {', '.join(close)}" if close else "significantly better than all others"
    return strong(", ".join(names)) + Html(f" {estimate}") + note(apart, "small")


def section(title: str, *parts: str, level: int = 2) -> Html:
    """Return a section with a heading, or "" if there are no parts."""
    body = "\n".join(filter(None, parts))
    return Html(f"<section>\n<h{level}>{_html(title)}</h{level}>\n{body}\n</section>\n" if body else "")


def table(
    caption: str, headings: Sequence[object], lines: Iterable[Sequence[object]], folded: bool = False, kind: str = "",
) -> Html:
    """Return a table with row headings in the first column. With `folded`, the table is hidden until it is opened.

    A table that is wider than the page scrolls, also with the arrow keys. On narrow screens, the cells of a `stacked`
    table are below each other, each after the heading of its column.
    """
    head = "".join(f'<th scope="col">{_html(heading)}</th>' for heading in headings)
    names = [heading if "stacked" in kind and not isinstance(heading, Html) else "" for heading in headings]
    body = "\n".join(
        f'<tr><th scope="row">{_named(line[0])}</th>{"".join(map(_cell, line[1:], names[1:]))}</tr>' for line in lines
    )
    created = (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )
    if folded:
        return Html(f"<details><summary>{_html(caption)}</summary>{created}</details>")
    return Html(f"<figure><figcaption>{_html(caption)}</figcaption>{created}</figure>")


def _named(name: object) -> str:
    """Return a row heading. A long name of a policy can break at its parts."""
    return name if isinstance(name, Html) else _BREAKS.sub("<wbr>", escape(str(name)))


def _cell(content: object, name: object) -> str:
    kind = ' class="figure"' if _FIGURE.match(str(content)) else ""
    attribute = f' data-name="{escape(str(name))}"' if name else ""
    text = _html(content)
    return f"<td{kind}{attribute}>{_INTERVAL.sub(_unbroken, text) if kind else text}</td>"


def _unbroken(interval: re.Match[str]) -> str:
    """Return an interval as HTML that does not break at the spaces of the interval."""
    return f'<span class="unbroken">{interval[0]}</span>'


def forest(
    caption: str, headings: Sequence[str], lines: Sequence[tuple[Sequence[object], Estimate, float | None]],
) -> Html:
    """Return a table with a forest plot of each line's difference. A dashed line is the smallest claimed difference."""
    created = [
        [first, Html(forest_mark(one, smallest)), str(one) or "not known", *others]
        for (first, *others), one, smallest in lines
    ]
    above = Html(f"difference{forest_axis()}")
    return table(caption, [headings[0], above, "95 % interval", *headings[1:]], created, kind="forest stacked")


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
