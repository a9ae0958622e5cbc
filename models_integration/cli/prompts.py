"""Implementation of `kvspec compress` and `kvspec keep`, which evict tokens of one prompt."""

import json
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import AutoTokenizer

from models_integration.cli.checks import read_text
from models_integration.engines.keep import keep
from models_integration.model.published_weights import located
from models_integration.pocket import load_pocket_tokenizer
from models_integration.policies.methods import CrystalCache, constants_of, policy_from_name, prefill, spelled
from models_integration.policies.tokenizer_values import sentence_ends
from models_integration.studies.evidence.rules import check_budget
from models_integration.studies.subject import AUTO, DTYPES, SHIPPED, Loading
from spec.records import CrystalRetention
from spec.validate import check_choices

__all__ = ["run_compress", "run_keep"]


def run_compress(prompt: Path, budget: str, loading: Loading) -> None:
    """Evict tokens of one prompt with CrystalCache, and print the number of kept tokens and the freed memory."""
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


def run_keep(prompt: Path, budget: str, policy: str, form: str, model: str, backend: str, dtype: str) -> None:
    """Select the kept tokens of a prompt from the queries and keys of the first layer, and print the positions."""
    text = read_text("PROMPT", prompt)
    check_budget("budget", budget)
    check_choices("format", (form,), ("ranges", "json"))
    check_choices("dtype", (dtype,), DTYPES)
    name, constants = spelled(policy)
    folder, shipped = Path(SHIPPED.get(model) or located(model)), model in SHIPPED
    tokenizer = load_pocket_tokenizer(folder) if shipped else AutoTokenizer.from_pretrained(folder)
    known = constants_of(name)
    offered = {"backend": backend} | ({"sentence_ends": sentence_ends(tokenizer)} if "sentence_ends" in known else {})
    given = {key: value for key, value in offered.items() if key in known} | constants
    stored = "float32" if shipped else None
    decided = keep(
        folder, policy_from_name(name, budget, **given), tokenizer(text).input_ids, stored if dtype == AUTO else dtype
    )
    kept = decided.positions
    breaks = np.flatnonzero(np.diff(kept) > 1)
    ranges = list(zip(kept[[0, *(breaks + 1)]].tolist(), (kept[[*breaks, -1]] + 1).tolist(), strict=True))
    if form == "json":
        print(json.dumps({"seen": decided.seen, "kept": len(kept), "ranges": ranges}))
    else:
        print("\n".join(f"{first} {end}" for first, end in ranges))
