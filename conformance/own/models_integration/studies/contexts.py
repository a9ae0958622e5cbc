"""A sample in a context of its own, read as a user would: what every study's answers are held against."""

import subprocess
from contextlib import nullcontext
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from models_integration.policies.methods import RetentionPolicy
from models_integration.tasks import Placement

__all__ = ["Answer", "answer", "commit_all"]


class Answer(NamedTuple):
    """What a policy let the model say, slots of a layer and head that it kept of the prompt, and stored meanwhile."""

    token_ids: list[int]
    kept: int
    mean_cache: float
    peak_cache: int


@torch.no_grad()
def answer(
    model: PreTrainedModel, policy: RetentionPolicy, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int],
) -> tuple[Answer, list[list[int]]]:
    """What is said, and the kept set of each group of the prompt; a policy with steps reads token by token."""
    method = policy.on(model)
    steps = method.policy.cadence.every is not None or method.continuation.decode
    if steps and placement.dropped_slots:
        placement = replace(placement, prompt_ids=placement.prompt_ids[:-1], dropped_slots=0)
    stored: list[float] = []
    with policy(model) as run:
        logits = model(input_ids=torch.tensor([placement.prompt_ids])).logits
        cache, whole = run.cache, run.retention
        assert cache is not None
        retention: Any = getattr(whole, "retention", whole)
        kept = ceil(cache.mean_length)
        if placement.dropped_slots:
            cache.crop(-placement.dropped_slots)

        def read(tokens: list[int]) -> Any:
            with nullcontext() if steps else run.reading():
                return model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits

        fed, said = list(placement.fed_ids), list[int]()
        for piece in [[token] for token in fed] if steps else [fed] if fed else []:
            logits = read(piece)
            stored.append(cache.mean_length)
        while not said or (said[-1] not in stop_ids and len(said) < max_new_tokens):
            if said:
                logits = read(said[-1:])
                stored.append(cache.mean_length)
            said.append(int(logits[0, -1].argmax()))
    mean = sum(stored) / len(stored) if stored else float(kept)
    peak = max([len(placement.prompt_ids), *map(ceil, stored)])
    return Answer(said, kept, mean, peak), [retention.group(at).tolist() for at in range(retention.groups)]


def commit_all(folder: Path) -> str:
    """Commit all files of a folder, in its own repository; the commit."""
    author = ["-c", "user.name=kvspec", "-c", "user.email=tests@kvspec.invalid"]
    for arguments in (["init", "-q"], ["add", "--all"], [*author, "commit", "-q", "--allow-empty", "-m", "files"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return said.stdout.strip()
