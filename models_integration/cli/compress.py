"""`kvspec compress`."""

from pathlib import Path

import torch
from rich.console import Console

from models_integration.cli.checks import read_text
from models_integration.policies.methods import CrystalCache, prefill
from models_integration.studies.evidence.rules import check_budget
from models_integration.studies.subject import Loading
from spec.records import CrystalRetention

__all__ = ["run"]


def run(prompt: Path, budget: str, loading: Loading) -> None:
    """Compact one prompt with CrystalCache, and say what was kept."""
    text = read_text("PROMPT", prompt)
    check_budget("budget", budget)
    subject = loading.subject()
    method = CrystalCache(budget, sentence_ends=subject.sentence_ends, backend=loading.backend)
    ids = subject.tokenizer(text, return_tensors="pt").input_ids.to(subject.model.device)
    subject.check_positions("PROMPT", ids.shape[1])
    with torch.no_grad():
        session = prefill(subject.model, method, ids).run
    result = session.retention
    assert isinstance(result, CrystalRetention)
    Console().print(
        f"{len(result.kept)} of {result.retention.seen} tokens kept (budget {result.budget}),"
        f" {session.bytes_freed / 1024:.0f} KiB freed, {len(result.ratio)} trunks,"
        f" {int((result.ratio == 0).sum())} evicted; backend {session.backend}"
    )
