"""`kvspec keep`."""

import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from models_integration.cli.checks import read_text
from models_integration.engines.keep import keep
from models_integration.model.published_weights import located
from models_integration.pocket import load_pocket_tokenizer
from models_integration.policies.methods import constants_of, policy_from_name, spelled
from models_integration.policies.tokenizer_values import sentence_ends
from models_integration.studies.evidence.rules import check_budget
from models_integration.studies.subject import AUTO, DTYPES, SHIPPED
from spec.validate import check_choices

__all__ = ["run"]


def run(prompt: Path, budget: str, policy: str, form: str, model: str, backend: str, dtype: str) -> None:
    """Decide about one prompt from the first layer's queries and keys, and print what is kept."""
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
