"""What every run is made of: needs put together, kept sets, greedy answers, and attempts that may fail."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.segment import ObservedSegment
from models_integration.session.verbs import read
from models_integration.studies.leases import Leases
from models_integration.studies.results import ERROR, Row
from reference.policies.retain import retain_each
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs, Policy
from spec.retention import Retention

__all__ = ["Onward", "attempted", "cropped", "generated", "needed", "onward", "retentions"]

Onward: TypeAlias = Callable[[Tensor], Tensor]
"""Reads tokens (rows, n) behind a cache, and gives the logits (rows, vocabulary) of what is next."""


def needed(each: Iterable[Needs]) -> Needs:
    """What all of these scorers must be shown together.

    Raises:
        SpecError: where they need different rehearsals: one observation has one.
    """
    every = list(each)
    layers, rows = {one.layers for one in every}, [one.query_rows for one in every]
    rehearsals = {one.rehearsal for one in every if one.rehearsal is not None}
    if len(rehearsals) > 1:
        raise SpecError(
            "policies", f"{len(rehearsals)} rehearsals",
            "all policies of a run must use the same template: run them separately",
        )
    places = {one.observed for one in every if one.layers == "observed"}
    return Needs(
        "all" if "all" in layers or len(places) > 1 else "observed" if places else "none",
        None if None in rows else max((row for row in rows if row is not None), default=0), next(iter(places), 0),
        any(one.values for one in every), any(one.token_ids for one in every),
        rehearsal=next(iter(rehearsals), None),
    )


def retentions(policy: Policy, budgets: Sequence[Budget], observed: ObservedSegment) -> list[Retention]:
    """What a policy keeps of the one prompt observed, under each budget; it scores once.

    Raises:
        SpecError: where it needs more than was noted, or refuses what it is shown.
    """
    shown = observed.narrowed(policy.scorer.needs).prompt(0, policy.granularity)
    return [retention for retention, _ in retain_each(policy, budgets, shown)]


def cropped(retention: Retention, tokens: int) -> Retention:
    """The same without the last tokens seen, kept or not, as `RetainedCache.crop` leaves it."""
    if not tokens:
        return retention
    seen = retention.seen - tokens
    stays = retention.positions < seen
    before = np.concatenate([[0], np.cumsum(stays)]).astype(np.int64)
    return Retention(retention.positions[stays], before[retention.offsets], seen, retention.granularity)


def onward(model: PreTrainedModel, cache: RetainedCache) -> Onward:
    """How a model reads on behind a cache, and decides nothing."""

    def forward(ids: Tensor) -> Tensor:
        logits = read(model, cache, ids).logits
        assert logits is not None
        return logits[:, -1]

    return forward


@torch.no_grad()
def generated(forward: Onward, logits: Tensor, stop_ids: frozenset[int], max_new_tokens: int) -> list[list[int]]:
    """What each row says greedily, its stop id included, from the logits (rows, vocabulary) of what is next.

    Rows that have stopped are fed on beside the others.
    """
    said: list[list[int]] = [[] for _ in logits]
    while True:
        tokens = logits.argmax(dim=-1)
        for own, token in zip(said, tokens.tolist(), strict=True):
            if not own or own[-1] not in stop_ids:
                own.append(token)
        if all(own[-1] in stop_ids or len(own) == max_new_tokens for own in said):
            return said
        logits = forward(tokens[:, None])


_DEATHS_MOST = 3
"""Workers that a unit may kill before it is left alone."""


def attempted(make: Callable[[], Row], leases: Leases) -> Row:
    """What `make` gives for the held unit; where it raises, the ERROR as one line and its traceback, its memory freed.

    A unit on which workers died again and again has an ERROR without another attempt.
    """
    if leases.deaths >= _DEATHS_MOST:
        return {ERROR: f"{leases.deaths} workers died while they made it: out of memory, or killed"}
    try:
        return make()
    except Exception as error:
        said = " ".join("".join(traceback.format_exception_only(error)).split())
        failed = {ERROR: said, "traceback": traceback.format_exc()}
    torch.cuda.empty_cache()
    return failed
