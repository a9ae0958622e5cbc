"""A badge: what conforms, on how many families, in one picture."""

from collections.abc import Mapping
from html import escape
from typing import Any

from conformance.verify.certificate import COMPARED, KEEPS, PARTIAL, PASSED, scope

__all__ = ["GREEN", "RED", "YELLOW", "badge"]

GREEN, YELLOW, RED = "#1a7f37", "#9a6700", "#cf222e"
_LETTER = 6.6
"""Width of a letter at 11 pixels, about."""

_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{left}: {right}">
<rect width="{width}" height="20" rx="3" fill="{colour}"/>
<path d="M0 3a3 3 0 0 1 3-3h{edge}v20H3a3 3 0 0 1-3-3z" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{first}" y="14" textLength="{long}">{left}</text>
<text x="{second}" y="14" textLength="{longer}">{right}</text></g>
</svg>
"""


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def badge(made: Mapping[str, Any]) -> str:
    """An SVG: green where certified, yellow with exceptions or in part, red with the number of failing items."""
    exceptions = len(made["exception"])
    if made["verdict"] == PARTIAL:
        colour, right = YELLOW, f"{scope(made)} in part; {_many(len(made['unproven']), 'item')} unproven"
    elif made["verdict"] not in PASSED:
        colour, right = RED, f"not certified; {_many(len(made['failing']) + len(made['undecided']), 'item')}"
    elif made["verdict"] == KEEPS:
        colour, right = GREEN, f"keeps its {scope(made)}; {COMPARED}"
    elif exceptions:
        colour, right = YELLOW, f"{scope(made)}; {_many(exceptions, 'exception')}"
    else:
        colour, right = GREEN, scope(made)
    left = f"kvspec {made['spec']}"
    long, longer = round(len(left) * _LETTER), round(len(right) * _LETTER)
    return _SVG.format(
        left=escape(left), right=escape(right), colour=colour, long=long, longer=longer, width=long + longer + 20,
        edge=long + 7, first=5 + long / 2, second=long + 15 + longer / 2,
    )
