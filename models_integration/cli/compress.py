"""`kvspec compress`."""

from pathlib import Path

import torch
from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_file, read_text
from models_integration.cli.explain import explain_html
from models_integration.policies.methods import CrystalCache, prefill
from models_integration.studies.subject import Loading
from spec.budget import parse_budget
from spec.records import CrystalRetention

__all__ = ["run"]


def run(prompt: Path, budget: str, loading: Loading, explain: Path | None) -> None:
    """Compact one prompt with CrystalCache; say what was kept, and show it as a page if asked to."""
    text = read_text("PROMPT", prompt)
    parse_budget(budget)
    if explain is not None:
        check_file("explain", explain)
    subject = loading.subject()
    method = CrystalCache(budget, sentence_ends=subject.sentence_ends, backend=loading.backend)
    ids = subject.tokenizer(text, return_tensors="pt").input_ids.to(subject.model.device)
    with torch.no_grad():
        session = prefill(subject.model, method, ids).run
    result = session.retention
    assert isinstance(result, CrystalRetention)
    console = Console()
    console.print(
        f"{len(result.kept)} of {result.retention.seen} tokens kept (budget {result.budget}),"
        f" {session.bytes_saved / 1024:.0f} KiB freed, {len(result.ratio)} trunks,"
        f" {int((result.ratio == 0).sum())} evicted; backend {session.backend}"
    )
    if explain is not None:
        tokens = [str(subject.tokenizer.decode([token])) for token in ids[0].tolist()]
        publish_readable(explain, explain_html(result, tokens, prompt.name).encode())
        console.print(f"{explain}")
