"""Implementation of `kvspec explain`: one page with the records of a run, and the code that computes from them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from experiments.studies.evidence.rules import check_budget
from experiments.studies.page import style
from experiments.studies.report import say
from experiments.studies.subject import Loading, Subject
from kvspec.cli.checks import calibration_of, read_prompt
from models_integration.cache.atomic_file import publish_readable
from models_integration.policies.methods import parse_policy
from models_integration.policies.prefill import prefill
from models_integration.session.session import Session
from reference.crystalcache.graph import trunk_pairs
from spec.arrays import Int64, IntVector
from spec.errors import SpecError
from spec.files import check_output
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

__all__ = ["TOKENS_MOST", "explain_html", "record", "run_explain", "texts_of"]


HOME = Path(__file__).parent
SCRIPTS = ("stages.mjs", "drawing.mjs", "page.mjs")
"""Together the page's one module."""
TAKEN = ("M_min", "M_max", "tau_edge", "s", "epsilon", "alpha", "N_sink", "W_recent", "N_min", "impact", "graph")
"""Parameters of S3 to S6."""
_SETS = {Granularity.MODEL: "for the model", Granularity.LAYER: "a layer", Granularity.HEAD: "a layer and KV head"}


def record(
    result: CrystalRetention, token_ids: Int64[IntVector, " n"], parameters: CrystalCacheParameters,
) -> dict[str, Any]:
    """Return the input of `prefill` in stages.mjs (salience, trunks and pairs of Eq. 24) and the kept tokens.

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
    """Return the page.

    Args:
        shown: the `record` of the run.
        texts: text of each token, (n,).
        title: name of the prompt.
        run: sentence that describes the run.
        beside: name of a second policy, and the retention of this policy for the same prompt.

    Raises:
        SpecError: if the number of texts is not the number of tokens, or if the second policy processed a different
            number of tokens.
    """
    n = len(shown["token_ids"])
    if len(texts) != n:
        raise SpecError("texts", len(texts), f"must have one text for each of the {n} tokens")
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


TOKENS_MOST = 8192
"""Largest number of tokens of a page, with which a browser takes some 0.2 s for a step of a slider."""


def run_explain(
    prompt: Path, out: Path, budget: str, loading: Loading, beside: str | None, calibration: Path | None,
    force: bool = False,
) -> None:
    """Process one prompt under CrystalCache, and under the policy `beside` if given, and write the page.

    Raises:
        SpecError: if a file cannot be read or written, or if the prompt has more than TOKENS_MOST tokens or more tokens
            than the model has positions.
    """
    text = read_prompt("PROMPT", prompt)
    check_budget("budget", budget, memory=True)
    check_output("out", out, filter(None, (prompt, calibration)), force)
    others = [beside] if beside else []
    for other in others:
        parse_policy(other)
    statistics = calibration_of(others, calibration)
    subject = replace(loading.subject(), calibration=statistics)
    ids = subject.tokenizer(text).input_ids
    if len(ids) > TOKENS_MOST:
        raise SpecError("PROMPT", f"{len(ids)} tokens", f"must have at most {TOKENS_MOST} tokens")
    subject.check_positions("PROMPT", len(ids))
    run = _session(subject, "crystalcache", budget, ids)
    (result,), (counts,) = run.retentions, run.kept_tokens
    assert isinstance(result, CrystalRetention)
    compared = [(other, _session(subject, other, budget, ids).retentions[0]) for other in others]
    message = f"CrystalCache with budget {budget} on the model {subject.label}, backend {run.backend}. Kept: {counts}."
    shown = record(result, torch.tensor(ids).numpy(), PAPER)
    page = explain_html(shown, texts_of(subject.tokenizer, ids), prompt.name, message, *compared)
    publish_readable(out, page.encode())
    say(f"{out}: kept {counts}; {len(result.ratio)} trunks, {len(page) / 1024:.0f} KiB")


def _session(subject: Subject, policy: str, budget: str, ids: list[int]) -> Session:
    given = torch.tensor([ids], device=subject.model.device)
    return prefill(subject.model, subject.policy(policy, budget), given).run


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return the text of each token after the previous token. A tokenizer may drop the first space of a single token.
    """
    def text(some: list[int]) -> str:
        return str(tokenizer.decode(some, clean_up_tokenization_spaces=False))

    alone = [text([token]) for token in ids]
    pairs = [text(ids[i - 1 : i + 1]) for i in range(1, len(ids))]
    behind = [
        pair.removeprefix(before) if pair.startswith(before) else after
        for pair, (before, after) in zip(pairs, pairwise(alone), strict=True)
    ]
    return [*alone[:1], *behind]
