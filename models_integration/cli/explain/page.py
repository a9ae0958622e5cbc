"""A prompt's retention as one self-contained page: the records of the run, and the code that computes from them."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from models_integration.studies.page.elements import style
from reference.crystalcache.graph import trunk_pairs
from spec.arrays import Int64, IntVector
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

__all__ = ["explain_html", "record"]

HOME = Path(__file__).parent
SCRIPTS = ("stages.mjs", "drawing.mjs", "page.mjs")
"""Together the page's one module."""
TAKEN = ("M_min", "M_max", "tau_edge", "s", "epsilon", "alpha", "N_sink", "W_recent", "N_min", "impact", "graph")
"""Parameters of S3 to S6."""
_SETS = {Granularity.MODEL: "for the model", Granularity.LAYER: "a layer", Granularity.HEAD: "a layer and KV head"}


def record(
    result: CrystalRetention, token_ids: Int64[IntVector, " n"], parameters: CrystalCacheParameters,
) -> dict[str, Any]:
    """What `prefill` of stages.mjs goes on from: S1's salience, S2's trunks, Eq. 24's pairs; and what was kept.

    Numbers are exact: JSON has the shortest decimals that give the same float64.
    """
    pairs = trunk_pairs(result.coattention.edges(), result.trunks.offsets)
    return {
        "token_ids": token_ids.tolist(), "salience": result.coattention.salience.tolist(),
        "offsets": result.trunks.offsets.tolist(),
        "pairs": {name: column.tolist() for name, column in pairs._asdict().items()},
        "tokens": result.budget, "kept": result.kept.tolist(),
        "parameters": {name: getattr(parameters, name) for name in TAKEN},
    }


def explain_html(
    shown: dict[str, Any], texts: Sequence[str], title: str, run: str,
    beside: tuple[str, Retention] | None = None,
) -> str:
    """The page.

    Args:
        shown: the `record` of the run.
        texts: of each token, (n,).
        title: what the prompt is called.
        run: a sentence about the run.
        beside: another policy by name, with what it keeps of the same prompt.

    Raises:
        SpecError: for more or fewer texts than tokens, or another policy that has seen more or fewer.
    """
    n = len(shown["token_ids"])
    if len(texts) != n:
        raise SpecError("texts", len(texts), f"must be as many as the tokens, {n}")
    data = {**shown, "tokens_text": list(texts), "run": run}
    if beside is not None:
        data["beside"] = _beside(*beside, n)
    script = "\n".join(map(_read, SCRIPTS))
    # Inside a script element "<" could end it.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = Template(_read("page.html"))
    return page.substitute(title=escape(title), style=style("base") + _read("page.css"), data=text, script=script)


def _beside(name: str, retention: Retention, n: int) -> dict[str, Any]:
    if retention.seen != n:
        raise SpecError("beside", retention.seen, f"must have seen the same {n} tokens")
    counts = np.bincount(retention.positions, minlength=n)
    return {
        "name": name, "groups": retention.groups, "granularity": _SETS[retention.granularity],
        "counts": counts.tolist(),
    }


def _read(name: str) -> str:
    return (HOME / name).read_text(encoding="utf-8")
