"""Requests of the witness, the answers of a server, and the log-probabilities that the witness reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.server_suite.prompts import ANSWER, LONG_ANSWER, ROUNDED_ANSWER, prompts_of
from conformance.server_suite.reading import (
    BOUNDS,
    WEIGHT_NOISE,
    Event,
    Reader,
    events_of,
    policy_of,
    policy_sets,
    with_noise,
)
from conformance.witness.client import Answer, Server
from conformance.witness.statement import MalformedStatement, Statement
from models_integration import RetentionPolicy
from spec.errors import SpecError

__all__ = ["SPREAD", "Reading", "Witness"]

REQUESTS = 32
"""Number of requests that are sent at once to count how many of them the server runs."""
READINGS = 8
"""Largest number of copies of the model with noise. The copies show the tokens whose eviction depends on rounding."""
SPREAD = 3
"""Number of these copies that read an answer before the answer is called wrong."""


@dataclass(eq=False)
class Reading:
    """A request, the server's answer, and the log-probabilities that the witness reads."""

    witness: "Witness"
    answer: Answer

    @cached_property
    def statement(self) -> Statement:
        """Statement of the server. Without a statement, the test is skipped, except for the rule "eviction".

        Raises MalformedStatement if a value is not allowed, or if the model does not have an answer token.
        """
        if self.answer.stated is None:
            pytest.skip(f"prompt of {len(self.answer.prompt_ids)} ids: the server states nothing (spec/witness.md)")
        result, size = self.answer.statement(), self.witness.vocabulary
        if (largest := max(result.answer_ids, default=0)) >= size:
            raise MalformedStatement("answer_ids", largest, f"must be below {size}, the number of ids of --model")
        return result

    @property
    def policy(self) -> RetentionPolicy:
        """Stated policy.

        Raises:
            SpecError: if kvspec has no such policy, or if a constant or the budget is not valid.
        """
        return policy_of(self.statement, self.witness.tokenizer)

    @cached_property
    def events(self) -> list[Event]:
        return events_of(self.statement, self.witness.reader.layers, self.witness.reader.heads)

    @cached_property
    def stated_logprobs(self) -> Tensor:
        """Log-probabilities of the server."""
        return torch.tensor(self.statement.logprobs, dtype=torch.float64)

    @cached_property
    def masked(self) -> Tensor:
        return self.read(self.events, self.statement.positions)

    @cached_property
    def full(self) -> Tensor:
        return self.read([], "kept")

    def read(self, events: Sequence[Event], rule: str, excepted: int | None = None) -> Tensor:
        """Return the log-probabilities of the answer after evictions, read by the witness (see `Reader.logprobs`)."""
        one, reader = self.answer if self.answer.stated is None else self.statement, self.witness.reader
        return reader.logprobs([*one.prompt_ids, *(one.answer_ids or ())], len(one.prompt_ids), events, rule, excepted)

    @property
    def has_power(self) -> bool:
        """True if masking changes the log-probabilities enough to decide."""
        bound = self.witness.bound
        return bound.apart(self.masked, self.full) >= bound.power * bound.tolerance

    @property
    def depends_on_rounding(self) -> bool:
        """True if noise of the size of rounding errors changes the answer by more than half the tolerance."""
        one, bound = self.statement, self.witness.bound
        copies = (Reader(model) for model in islice(self.witness.noisy(), SPREAD))
        read = (copy.logprobs(one.ids, len(one.prompt_ids), self.events, one.positions) for copy in copies)
        return any(bound.apart(noisy, self.masked) > bound.tolerance / 2 for noisy in read)

    def __str__(self) -> str:
        one = self.statement
        return f"prompt of {len(one.prompt_ids)} ids, {one.policy} at {one.budget}"


class Witness:
    """The model of the witness, and the answers of a server.

    Args:
        model: the weights that the server claims to run, in float32.
        server: server that answers the requests.
        dtype: dtype of the server's computation, "float32" or "bfloat16".
        seed: random seed of the prompts.
        tokenizer: tokenizer of the model, for policies with constants that the server does not state. With None, rule 4
            is undecided for these policies.
    """

    def __init__(
        self, model: PreTrainedModel, server: Server, dtype: str = "float32", seed: int = 0, tokenizer: Any = None,
    ) -> None:
        self.model, self.server, self.dtype, self.seed, self.tokenizer = model, server, dtype, seed, tokenizer
        self.reader, self.bound = Reader(model), BOUNDS[dtype]
        self._tokens = ROUNDED_ANSWER if self.bound.mean else ANSWER
        self._readings: dict[str, list[Reading]] = {}
        self._refused: dict[str, str] = {}
        self._cancelled: list[list[int]] = []
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size

    def readings(self, group: str) -> list[Reading]:
        """Return the readings of a group of requests. The server is asked once for each group.

        If the server does not answer, the test is skipped: an answer that does not exist breaks no rule.
        """
        if group not in self._readings and group not in self._refused:
            try:
                self._readings[group] = [Reading(self, answer) for answer in self._answers(group)]
            except SpecError as error:
                self._refused[group] = str(error)
        if group in self._refused:
            pytest.skip(f"{group}: {self._refused[group]}")
        return self._readings[group]

    def group_of(self, reading: Reading) -> list[Reading]:
        """Return all readings of the group of a reading, or the reading alone."""
        groups = (readings for readings in self._readings.values() if any(one is reading for one in readings))
        return next(groups, [reading])

    def _answers(self, group: str) -> list[Answer]:
        """Ask for the answers of a group.

        Raises:
            SpecError: if the server does not answer.
        """
        config = self.model.config.get_text_config(decoder=True)
        tokens = LONG_ANSWER if group == "long answers" else self._tokens
        prompts = prompts_of(group, config.vocab_size, config.max_position_embeddings - tokens, self.seed)
        if group == "at once":
            return self.server.complete_all(prompts, tokens, self.seed)
        if group == "cancelled":
            return [self._after_cancelled(*pair) for pair in zip(prompts[::2], prompts[1::2], strict=True)]
        return [self.server.complete(ids, tokens, bool(at % 2), at) for at, ids in enumerate(prompts)]

    def _after_cancelled(self, cancelled: list[int], ids: list[int]) -> Answer:
        """Close the connection of a request at the start of its answer, and ask for the answer of the next request."""
        self._cancelled.append(cancelled)
        self.server.cancel(cancelled, LONG_ANSWER)
        return self.server.complete(ids, self._tokens, stream=True)

    def running_at_once(self) -> int:
        """Return how many of 32 requests with long answers the server runs at once.

        If the server does not answer, the test is skipped.
        """
        config = self.model.config.get_text_config(decoder=True)
        rng = np.random.default_rng(self.seed)
        n = min(400, config.max_position_embeddings - LONG_ANSWER)
        prompts = rng.integers(min(100, config.vocab_size // 2), config.vocab_size, (REQUESTS, n)).tolist()
        try:
            return self.server.running_at_once(prompts, LONG_ANSWER)
        except SpecError as error:
            pytest.skip(str(error))

    def noisy(self) -> Iterator[PreTrainedModel]:
        """Yield copies of the model with noise. One copy is in memory at a time."""
        return (with_noise(self.model, WEIGHT_NOISE[self.dtype], at) for at in range(READINGS))

    def others(self, reading: Reading) -> list[tuple[str, list[Event]]]:
        """Return the evictions of other requests, each with a name of the request.

        The server states nothing about cancelled requests, so the witness computes the sets of the stated policy.
        """
        stated = [
            ("a different request", one.events) for readings in self._readings.values() for one in readings
            if one is not reading and one.answer.stated is not None and one.events
        ]
        try:
            return stated + [("a cancelled request", self._decided(ids, reading)) for ids in self._cancelled]
        except SpecError:  # kvspec does not have the stated policy
            return stated

    def _decided(self, ids: list[int], reading: Reading) -> list[Event]:
        """Return the eviction at the end of a prompt, by the policy of a reading."""
        one = replace(reading.statement, prompt_ids=ids, answer_ids=[], logprobs=[], evictions=[])
        return [Event(len(ids), *policy_sets(self.model, reading.policy, one, [len(ids)]))]
