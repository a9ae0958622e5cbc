"""Implementation of `kvspec compress`, `keep` and `calibrate`, which read one text."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from experiments.studies.evidence.rules import PARTS, Rules, check_budget, load_rules
from experiments.studies.evidence.run import items
from experiments.studies.report import say
from experiments.studies.subject import AUTO, DTYPES, SHIPPED, Loading, Subject, model_errors, policy_with
from kvspec.cli.checks import check_counts, read_prompt
from models_integration.cache.atomic_file import publish_readable
from models_integration.engines.keep import keep_and_count
from models_integration.model.published_weights import WEIGHTS
from models_integration.pocket import load_pocket_tokenizer, model_folder
from models_integration.policies.calibration import (
    calibrate,
    check_calibration_length,
    is_published_file,
    read_head_pattern,
    read_published,
    write_statistics,
)
from models_integration.policies.methods import parse_policy
from models_integration.policies.prefill import prefill
from models_integration.policies.values import repeat_template, sentence_ends
from reference.calibration import Calibration, save_calibration
from spec.errors import SpecError
from spec.files import check_output, check_readable
from spec.records import CrystalRetention
from spec.validate import check_choices, did_you_mean

__all__ = ["is_published_file", "run_calibrate", "run_compress", "run_keep"]


def run_compress(prompt: Path, budget: str, loading: Loading) -> None:
    """Evict tokens of one prompt with CrystalCache, and print the number of kept tokens and the freed memory."""
    text = read_prompt("PROMPT", prompt)
    check_budget("budget", budget, memory=True)
    subject = loading.subject()
    method = subject.policy("crystalcache", budget)
    ids = subject.tokenizer(text, return_tensors="pt").input_ids.to(subject.model.device)
    subject.check_positions("PROMPT", ids.shape[1])
    with torch.no_grad():
        session = prefill(subject.model, method, ids).run
    (result,) = session.retentions
    assert isinstance(result, CrystalRetention)
    Console().print(
        f"kept {session.kept_tokens[0]};"
        f" {session.bytes_freed / 1024:.0f} KiB freed, {len(result.ratio)} trunks,"
        f" {int((result.ratio == 0).sum())} evicted; backend {session.backend}"
    )


def run_keep(prompt: Path, budget: str, policy: str, form: str, model: str, backend: str, dtype: str) -> None:
    """Select the kept tokens of a prompt from the queries and keys of the first layer, and print the positions."""
    text = read_prompt("PROMPT", prompt)
    check_budget("budget", budget, memory=True)
    check_choices("format", (form,), ("ranges", "json"))
    check_choices("dtype", (dtype,), DTYPES)
    parse_policy(policy)  # an unknown policy is an error before a model is read
    folder, shipped = Path(model_folder(model)), model in SHIPPED
    with model_errors(model):
        if not folder.is_dir():  # the rest reads only parts of the weights, and a model of the hub has no such folder
            names = ", ".join(map(repr, (*SHIPPED, *WEIGHTS)))
            reason = f"is no folder on this machine; for kvspec keep give {names}, or a folder with safetensors files"
            reason += did_you_mean(model, (*SHIPPED, *WEIGHTS))
            raise SpecError("model", model, reason)
        tokenizer = load_pocket_tokenizer(folder) if shipped else AutoTokenizer.from_pretrained(folder)
        AutoConfig.from_pretrained(folder)
    method = policy_with(policy, budget, backend=backend, sentence_ends=sentence_ends(tokenizer))
    stored = "float32" if shipped else None
    given = tokenizer(text).input_ids
    decided, counts = keep_and_count(folder, method, given, stored if dtype == AUTO else dtype)
    kept = decided.positions
    breaks = np.flatnonzero(np.diff(kept) > 1)
    ranges = list(zip(kept[[0, *(breaks + 1)]].tolist(), (kept[[*breaks, -1]] + 1).tolist(), strict=True))
    if form == "json":
        print(json.dumps({
            "seen": decided.seen, "kept": len(kept), "budget": counts.budget, "over_budget": counts.over_budget,
            "ranges": ranges,
        }))
    else:
        print(f"kept {counts}", file=sys.stderr)
        print("\n".join(f"{first} {end}" for first, end in ranges))


def run_calibrate(
    text: Path, out: Path, tokens: int, loading: Loading, threshold: float | None = None, force: bool = False,
    covariance: bool = False,
) -> None:
    """Write the calibration of a model: measured on a text, or converted from a file of another project.

    If `text` is the rules file of a study, the first dev context of the study is the text. The calibration file then
    stores a hash of this context. If `out` ends in .pt, the file has the format of TriAttention's repository. If an
    error is raised, `out` is not changed.

    Raises:
        SpecError: if the text has no token, if a file cannot be read or written, or if the model is not supported.
    """
    check_counts(tokens=tokens)
    if threshold is not None and text.suffix != ".tsv":
        raise SpecError("threshold", threshold, f"can be used only with a head pattern (.tsv), not with {text.name}")
    check_output("out", out, (text,), force)
    if text.suffix == ".npz":
        raise SpecError("TEXT", str(text), "is a calibration file, which this command writes; give the text to read")
    published = is_published_file(text)
    if published:
        check_readable("TEXT", text)  # before the model is loaded
    if covariance and published:
        raise SpecError("covariance", covariance, f"is measured on a text, not read from {text.name}; give a text")
    calibration = _read(text, loading, threshold) if published else _measure(text, tokens, loading, covariance)
    file = BytesIO()
    (write_statistics if out.suffix == ".pt" else save_calibration)(calibration, file)
    publish_readable(out, file.getvalue())
    layers, heads, d = calibration.mean.shape
    channels = f"of {d} channels" if d else "(no query statistics)"
    say(
        f"{out}: {calibration.digest}, {layers} layers of {heads} heads {channels};"
        f" model {calibration.identity.model}, rotation {calibration.identity.rope}"
    )


def _read(file: Path, loading: Loading, threshold: float | None) -> Calibration:
    model = loading.subject().model
    return read_published(file, model) if threshold is None else read_head_pattern(file, model, threshold)


def _measure(text: Path, tokens: int, loading: Loading, covariance: bool) -> Calibration:
    rules = load_rules(text) if text.suffix == ".toml" else None
    read = read_prompt("TEXT", text)
    subject = loading.subject()
    given, samples = _dev_context(rules, subject) if rules else (_tokens(text, read, subject), None)
    argument = "TEXT" if len(given) < tokens else "tokens"
    check_calibration_length(argument, len(given[:tokens]))
    ids = torch.tensor([given[:tokens]], device=subject.model.device)
    subject.check_positions("tokens", ids.shape[1])
    taken = calibrate(subject.model, ids, template=repeat_template(subject.tokenizer), covariance=covariance)
    return replace(taken, samples=samples)


def _tokens(text: Path, read: str, subject: Subject) -> Sequence[int]:
    tokens: Sequence[int] = subject.tokenizer(read).input_ids
    if not subject.tokenizer(read, add_special_tokens=False).input_ids:
        raise SpecError("TEXT", str(text), "must have at least one token")
    return tokens


def _dev_context(rules: Rules, subject: Subject) -> tuple[Sequence[int], tuple[str]]:
    """Return the token ids and the digest of the first dev context of a study."""
    for item in items(rules, subject, PARTS[:1]):
        return item.sample.context_ids, (item.sample.group,)
    raise SpecError("TEXT", rules.title, "must be the rules file of a study with at least one dev context")
