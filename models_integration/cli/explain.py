"""Which tokens lived, and why: a retention as one self-contained page."""

from collections.abc import Sequence
from html import escape

import numpy as np

from spec.arrays import BoolVector
from spec.errors import SpecError
from spec.records import CrystalRetention

__all__ = ["explain_html"]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvspec: {title}</title>
<style>
:root {{ color-scheme: light dark; --kept: #1a7f37; --gone: #9a9a9a; --pin: #0969da; }}
body {{ font: 15px/1.7 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
.trunk {{ border-bottom: 2px solid transparent; margin-right: 1px; white-space: pre-wrap; }}
.trunk:hover {{ background: color-mix(in srgb, currentColor 12%, transparent); }}
.protected {{ border-color: var(--pin); }} .kept {{ border-color: var(--kept); }}
.partial {{ border-color: var(--kept); border-bottom-style: dashed; }}
.gone {{ color: var(--gone); text-decoration: line-through; text-decoration-thickness: 1px; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<p><span class="trunk protected">protected</span> <span class="trunk kept">kept</span>
<span class="trunk partial">kept in part</span> <span class="trunk"><span class="gone">evicted</span></span>
&nbsp; Point at a trunk for its score: the larger of D (how central it is) and the normalised impact of its tokens.</p>
<p>{trunks}</p>
</html>
"""


def explain_html(result: CrystalRetention, tokens: Sequence[str], title: str) -> str:
    """A page that shows the prompt, trunk by trunk, with what decided each trunk's fate.

    Args:
        result: CrystalCache's retention of the prompt.
        tokens: text of each token, (n,).
        title: what the page is about.

    Raises:
        SpecError: when there are more or fewer tokens than the retention has seen.
    """
    seen = result.retention.seen
    if len(tokens) != seen:
        raise SpecError("tokens", len(tokens), f"must be as many as the retention has seen, {seen}")
    lived = np.zeros(seen, dtype=np.bool_)
    lived[result.kept] = True
    summary = f"{len(result.kept)} of {seen} tokens kept, budget {result.budget}"
    if result.over_budget:
        summary += f" ({result.over_budget} over it: the protected trunks alone exceed it)"
    trunks = "".join(_trunk(result, g, tokens, lived) for g in range(len(result.ratio)))
    return _PAGE.format(title=escape(title), summary=summary, trunks=trunks)


def _trunk(result: CrystalRetention, g: int, tokens: Sequence[str], lived: BoolVector) -> str:
    start, stop = int(result.trunks.offsets[g]), int(result.trunks.offsets[g + 1])
    fate, why = _fate(result, g)
    body = "".join(
        escape(tokens[i]) if lived[i] else f'<span class="gone">{escape(tokens[i])}</span>' for i in range(start, stop)
    )
    return f'<span class="trunk {fate}" title="trunk {g}, tokens {start} to {stop - 1}: {escape(why)}">{body}</span>'


def _fate(result: CrystalRetention, g: int) -> tuple[str, str]:
    if result.protected[g]:
        return "protected", "holds a sink or recent token, never evicted"
    r = result.ratio[g]
    fate = "kept" if r == 1 else "partial" if r > 0 else "evicted"
    return fate, (
        f"score {result.scores[g]:.3f}, D {result.graph.D[g]:.3f}, impact {result.trunks.impact[g]:.2f}, kept {r:.0%}"
    )
