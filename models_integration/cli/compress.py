"""`kvspec compress`."""

from pathlib import Path

import torch
from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.explain import explain_html
from models_integration.policies.methods import CrystalCache
from models_integration.policies.prefill import prefill
from models_integration.studies.subject import load_subject
from spec.errors import SpecError
from spec.records import CrystalRetention

__all__ = ["run"]


def run(prompt: Path, budget: str, model: str, backend: str, explain: Path | None) -> None:
    """Compact one prompt with CrystalCache; say what was kept, and show it as a page if asked to."""
    try:
        text = prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("PROMPT", str(prompt), f"must be a readable text file: {error}") from error
    subject = load_subject(model, backend)
    method = CrystalCache(budget, sentence_ends=subject.sentence_ends, backend=backend)
    ids = subject.tokenizer(text, return_tensors="pt").input_ids
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
