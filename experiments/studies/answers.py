"""Common functions of all runs: budgets, needs, sets of kept tokens, greedy answers, and handling of errors."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.studies.leases import Leases
from experiments.studies.results import ERROR, Row
from models_integration.archive.layer_masks import layer_masks
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import cache_name
from models_integration.session.observed import ObservedSegment
from models_integration.session.verbs import read
from reference.policies import eviction_budget
from reference.policies.retain import retain_each
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.policy import Needs, Policy
from spec.retention import Retention

__all__ = [
    "EVICT",
    "Onward",
    "answered",
    "attempted",
    "cropped",
    "generated",
    "make_forward",
    "needed",
    "next_token",
    "read_budget",
    "retentions",
]

EVICT = "evict "


@dataclass(frozen=True)
class _Evicted(Budget):
    """Budget of floor((1 - r) N) tokens. All other fractions are rounded up."""

    r: str = ""

    def tokens(self, seen: int) -> int:
        return eviction_budget(self.r, seen)


def read_budget(text: int | str, argument: str = "budget") -> Budget:
    """Parse a budget of a study: `0.3`, `30%`, `512`, or `evict 0.75` for the evicted fraction r = 0.75.

    Raises:
        SpecError: if the text has a different form, or if r is outside [0, 1).
    """
    if not isinstance(text, str) or not text.startswith(EVICT):
        return parse_budget(text, argument)
    r = text.removeprefix(EVICT)
    try:
        eviction_budget(r, 10**9)
    except SpecError as error:
        raise SpecError(argument, text, f"r {error.bound}, such as 'evict 0.75'") from error
    return _Evicted(parse_budget("1.0").fraction, r=r)


Onward: TypeAlias = Callable[[Tensor], Tensor]
"""Function that processes tokens (rows, n) with a cache and returns the logits (rows, vocabulary) of the next token."""


def needed(each: Iterable[Needs]) -> Needs:
    """Return needs that include the needs of all given scorers.

    Raises:
        SpecError: if scorers need different rehearsals, because one observation has one rehearsal.
    """
    every = list(each)
    layers, rows = {one.layers for one in every}, [one.query_rows for one in every]
    rehearsals = {one.rehearsal for one in every if one.rehearsal is not None}
    if len(rehearsals) > 1:
        raise SpecError(
            "policies", f"{len(rehearsals)} rehearsals",
            "must all use the same template: run policies with different templates separately",
        )
    places = {one.observed for one in every if one.layers == "observed"}
    return Needs(
        "all" if "all" in layers or len(places) > 1 else "observed" if places else "none",
        None if None in rows else max((row for row in rows if row is not None), default=0), next(iter(places), 0),
        any(one.values for one in every), any(one.token_ids for one in every),
        rehearsal=next(iter(rehearsals), None), hidden=any(one.hidden for one in every),
    )


def retentions(policy: Policy, budgets: Sequence[Budget], observed: ObservedSegment) -> list[Retention]:
    """Return the tokens of an observed prompt that a policy keeps with each budget. The policy scores once.

    Raises:
        SpecError: if the policy needs more than was observed, or if the policy raises the error.
    """
    shown = observed.narrowed(policy.scorer.needs).prompt(0, policy.granularity)
    return retain_each(policy, budgets, shown)


def cropped(retention: Retention, tokens: int) -> Retention:
    """Return the retention without the last `tokens` tokens seen, as after `RetainedCache.crop`."""
    if not tokens:
        return retention
    seen = retention.seen - tokens
    stays = retention.positions < seen
    before = np.concatenate([[0], np.cumsum(stays)]).astype(np.int64)
    return Retention(retention.positions[stays], before[retention.offsets], seen, retention.granularity)


def make_forward(model: PreTrainedModel, cache: RetainedCache) -> Onward:
    """Return a function that processes tokens with a model and a cache, without eviction."""

    def forward(ids: Tensor) -> Tensor:
        logits = read(model, cache, ids).logits
        assert logits is not None
        return logits[:, -1]

    return forward


@torch.no_grad()
def generated(
    forward: Onward, logits: Tensor, stop_ids: frozenset[int], max_new_tokens: int,
    select: Callable[[Tensor], None] | None = None,
) -> list[list[int]]:
    """Return the greedy answer of each row, including the stop id, from the next token's logits (rows, vocabulary).

    Args:
        forward: function that processes the next tokens.
        logits: logits of the first token of each answer.
        stop_ids: token ids that end an answer.
        max_new_tokens: maximum number of tokens of an answer.
        select: function that leaves only the given rows in the cache of `forward`. It is called when half of the rows
            have stopped. If None, rows that have stopped are processed together with the running rows.
    """
    answers: list[list[int]] = [[] for _ in logits]
    rows = list(range(len(logits)))
    while True:
        tokens = logits.argmax(dim=-1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not answers[row] or answers[row][-1] not in stop_ids:
                answers[row].append(token)
        running = [
            place for place, row in enumerate(rows)
            if answers[row][-1] not in stop_ids and len(answers[row]) < max_new_tokens
        ]
        if not running:
            return answers
        if select is not None and 2 * len(running) <= len(rows):
            chosen = torch.tensor(running, device="cpu")
            select(chosen)
            rows, tokens = [rows[place] for place in running], tokens[chosen.to(tokens.device)]
        logits = forward(tokens[:, None])


@torch.no_grad()
def next_token(model: PreTrainedModel, cache: RetainedCache, ids: Sequence[int]) -> int:
    """Return the most likely token after `ids`, which the model processes with the cache."""
    given = torch.tensor([list(ids)], device=model.device)
    names: dict[str, Any] = {cache_name(model): cache}
    return int(model(input_ids=given, use_cache=True, **names).logits[0, -1].argmax())


def answered(
    model: PreTrainedModel, cache: RetainedCache, ids: Sequence[int], stop_ids: frozenset[int], most: int, start: float,
) -> tuple[list[int], float]:
    """Return one greedy answer after `ids` without its stop id, and the seconds from `start` to its first token.

    The layers of the cache may store different positions.
    """
    with layer_masks(model, cache):
        answer, token = list[int](), next_token(model, cache, ids)
        seconds = perf_counter() - start
        while token not in stop_ids:
            answer.append(token)
            if len(answer) == most:
                break
            token = next_token(model, cache, [token])
    return answer, seconds


_DEATHS_MOST = 3
"""Number of workers that a unit may kill before no worker takes the unit again."""


def attempted(make: Callable[[], Row], leases: Leases) -> Row:
    """Return the result of `make` for the unit that the worker holds.

    If `make` raises, free the memory and return the ERROR row.

    If several workers were killed while they processed the unit, return an ERROR row without a further attempt.
    """
    if leases.deaths >= _DEATHS_MOST:
        return {ERROR: f"{leases.deaths} workers died while they made it: out of memory, or killed"}
    try:
        return make()
    except Exception as error:
        message = " ".join("".join(traceback.format_exception_only(error)).split())
        failed = {ERROR: message, "traceback": traceback.format_exc()}
    torch.cuda.empty_cache()
    return failed
