"""The work of `kvspec explain`."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import calibration_of, check_file, read_text
from models_integration.cli.explain.page import explain_html, record
from models_integration.policies.methods import prefill
from models_integration.policies.spelled import spelled
from models_integration.studies.evidence.rules import check_budget
from models_integration.studies.subject import Loading, Subject
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.records import CrystalRetention
from spec.retention import Retention

__all__ = ["TOKENS_MOST", "run", "texts_of"]

TOKENS_MOST = 8192
"""Of a page: with so many a browser takes some 0.2 s for a step of a slider."""


def run(
    prompt: Path, out: Path, budget: str, loading: Loading, beside: str | None, calibration: Path | None,
) -> None:
    """Read one prompt under CrystalCache, and under another policy if one is named, and write the page.

    Raises:
        SpecError: before any work for what cannot be read or written; for a prompt of more than TOKENS_MOST tokens,
            or of more than the model has positions.
    """
    text = read_text("PROMPT", prompt)
    check_budget("budget", budget)
    check_file("out", out)
    others = [beside] if beside else []
    for other in others:
        spelled(other)
    statistics = calibration_of(others, calibration)
    subject = replace(loading.subject(), calibration=statistics)
    ids = subject.tokenizer(text).input_ids
    if len(ids) > TOKENS_MOST:
        raise SpecError("PROMPT", f"{len(ids)} tokens", f"must have at most {TOKENS_MOST} for a page; cut it")
    subject.check_positions("PROMPT", len(ids))
    result = _retention(subject, "crystalcache", budget, ids)
    assert isinstance(result, CrystalRetention)
    compared = [(other, _plain(_retention(subject, other, budget, ids))) for other in others]
    said = f"CrystalCache with budget {budget} on the model {subject.label}, backend {subject.backend}."
    shown = record(result, torch.tensor(ids).numpy(), PAPER)
    page = explain_html(shown, texts_of(subject.tokenizer, ids), prompt.name, said, *compared)
    publish_readable(out, page.encode())
    Console().print(
        f"{out}: {len(result.kept)} of {len(ids)} tokens kept (budget {result.budget}), {len(result.ratio)} trunks,"
        f" {len(page) / 1024:.0f} KiB", highlight=False, soft_wrap=True,
    )


def _retention(subject: Subject, policy: str, budget: str, ids: list[int]) -> CrystalRetention | Retention:
    given = torch.tensor([ids], device=subject.model.device)
    found = prefill(subject.model, subject.policy(policy, budget), given).run.retention
    assert isinstance(found, CrystalRetention | Retention)
    return found


def _plain(found: CrystalRetention | Retention) -> Retention:
    return found.retention if isinstance(found, CrystalRetention) else found


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token behind the one before it: alone, some tokenizers drop the space that it begins with."""
    def text(some: list[int]) -> str:
        return str(tokenizer.decode(some, clean_up_tokenization_spaces=False))

    alone = [text([token]) for token in ids]
    pairs = [text(ids[i - 1 : i + 1]) for i in range(1, len(ids))]
    behind = [
        pair.removeprefix(before) if pair.startswith(before) else own
        for pair, (before, own) in zip(pairs, pairwise(alone), strict=True)
    ]
    return [*alone[:1], *behind]
