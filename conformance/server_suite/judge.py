"""Rules of spec/witness.md. Each rule is a function that checks the reading of one answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.server_suite.faults import name_fault
from conformance.server_suite.prompts import ANSWER, LONG_ANSWER, prompts_of
from conformance.server_suite.reading import (
    BOUNDS,
    WEIGHT_NOISE,
    Event,
    Reader,
    computing_in,
    events_of,
    policy_of,
    policy_sets,
    with_noise,
)
from conformance.server_suite.ties import flat, judged_differences
from conformance.witness.client import Answer, Server
from conformance.witness.statement import MalformedStatement, Statement, are_integers, digest_of, is_finite
from models_integration import RetentionPolicy
from reference.policies.kept import most_kept
from spec.budget import parse_budget
from spec.composition import required_by
from spec.errors import SpecError

__all__ = ["RULES", "Reading", "Witness"]

REQUESTS = 32
"""Number of requests that are sent at once to count how many of them the server runs."""
READINGS = 8
"""Largest number of copies of the model with noise. The copies show the tokens whose eviction depends on rounding."""
SPREAD = 3
"""Number of these copies that read an answer before the answer is called wrong."""


@dataclass
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
        return self._read(self.events, self.statement.positions)

    @cached_property
    def full(self) -> Tensor:
        return self._read([], "kept")

    def _read(self, events: Sequence[Event], rule: str) -> Tensor:
        one, reader = self.answer if self.answer.stated is None else self.statement, self.witness.reader
        return reader.logprobs([*one.prompt_ids, *(one.answer_ids or ())], len(one.prompt_ids), events, rule)

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
        tokens = LONG_ANSWER if group == "long answers" else ANSWER
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
        return self.server.complete(ids, ANSWER, stream=True)

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


def check_size(reading: Reading) -> None:
    """Rule 1: the kept sets are within the budget."""
    one, budget = reading.statement, parse_budget(reading.statement.budget)
    n = len(one.prompt_ids)
    if not one.evictions:
        allowed = _allowed(reading, n)
        assert n <= allowed, f"{reading}: the server kept all {n} tokens of a budget of {allowed}: {one.reason}"
    for event in reading.events:
        sizes = [len(head) for layer in event.sets for head in layer]
        allowed, mean = _allowed(reading, event.seen), sum(sizes) / len(sizes)
        assert mean <= allowed, (
            f"{reading}: after {event.seen} tokens the mean kept set has {mean:g} tokens, {mean - allowed:g} more than"
            f" the budget of {allowed} ({budget})"
        )


def _allowed(reading: Reading, seen: int) -> int:
    """Return the budget in tokens. A policy of kvspec may keep more tokens if it protects tokens."""
    budget = parse_budget(reading.statement.budget)
    try:
        method: Any = reading.policy.on(reading.witness.model)
    except SpecError:
        return budget.tokens(seen)
    return most_kept(method.policy, budget, seen)


def check_masking(reading: Reading) -> None:
    """Rule 2: the answer equals the answer of the full cache with the evicted tokens masked."""
    _check_subsets(reading)
    bound = reading.witness.bound
    difference = bound.apart(reading.masked, reading.stated_logprobs)
    if difference <= bound.tolerance:
        if reading.events and not reading.has_power:
            pytest.skip(f"{reading}: masking changes too little to decide")
        return
    if reading.depends_on_rounding:
        pytest.skip(f"{reading}: the answer depends on rounding, so its log-probabilities decide nothing")
    fault = name_fault(
        reading.witness.reader, reading.statement, reading.events, reading.stated_logprobs, bound,
        reading.witness.others(reading),
    )
    raise AssertionError(
        f"{reading}: log-probabilities differ by {difference:.2g} from those of masking by the stated set, more than"
        f" {bound.tolerance:g}; {fault}"
    )


def _check_subsets(reading: Reading) -> None:
    """Check that no eviction keeps a token that an earlier eviction removed."""
    for before, after in zip(reading.events, reading.events[1:], strict=False):
        for old, new in zip(flat(before.sets), flat(after.sets), strict=True):
            back = [position for position in new if position < before.seen and position not in set(old)]
            assert not back, f"{reading}: the eviction after {after.seen} tokens keeps {back[:8]}, evicted earlier"


def check_eviction(reading: Reading) -> None:
    """Rule 3: the answer differs from the answer of the full cache."""
    if reading.answer.stated is None:
        _check_some_eviction(reading)
        return
    if not reading.events:
        pytest.skip(f"{reading}: nothing was evicted ({reading.statement.reason})")
    if not reading.has_power:
        pytest.skip(f"{reading}: masking changes too little to decide")
    bound = reading.witness.bound
    difference = bound.apart(reading.full, reading.stated_logprobs)
    assert difference > bound.tolerance, (
        f"{reading}: log-probabilities differ by {difference:.2g} from those of the full cache: nothing was evicted"
    )


def _check_some_eviction(reading: Reading) -> None:
    """Check without a statement that the server evicts, if the answer depends on tokens that policies evict."""
    answer, witness = reading.answer, reading.witness
    n, about = len(answer.prompt_ids), f"prompt of {len(answer.prompt_ids)} ids"
    if unreadable := _unreadable(answer, witness.vocabulary):
        pytest.skip(f"{about}: {unreadable}")
    for one in witness.group_of(reading):  # Different weights can agree on one token by chance.
        if different := _first_token_differs(one):
            pytest.skip(different)
    stated, bound = torch.tensor(answer.logprobs, dtype=torch.float64), witness.bound
    middle = [position for position in range(n) if position < 4 or position >= n - n // 2]
    half = [Event(n, [[middle] * witness.reader.heads] * witness.reader.layers)]
    if bound.apart(reading._read(half, "kept"), reading.full) < bound.power * bound.tolerance:
        pytest.skip(f"{about}: the answer does not depend on the tokens that policies evict")
    difference = bound.apart(reading.full, stated)
    assert difference > bound.tolerance, (
        f"{about}: log-probabilities differ by {difference:.2g} from those of the full cache: nothing was evicted"
    )


def _first_token_differs(reading: Reading) -> str:
    """Return the reason why the first answer token does not fit the witness's weights, or an empty string."""
    answer, bound = reading.answer, reading.witness.bound
    if _unreadable(answer, reading.witness.vocabulary):
        return ""
    stated = torch.tensor(answer.logprobs[:1], dtype=torch.float64)  # type: ignore[index]
    largest = bound.tolerance * (bound.power if bound.mean else 1)  # Rounding moves a single token more than the mean.
    if bound.apart(reading.full[:1], stated) <= largest:
        return ""
    return (
        f"prompt of {len(answer.prompt_ids)} ids: the first answer token, which the server chooses from the whole"
        f" prompt, has the log-probability {float(stated):.4g}, and {reading.full[0]:.4g} with the weights of --model:"
        " the server has different weights or a different dtype, or evicts while it reads a prompt"
    )


def _unreadable(answer: Answer, size: int) -> str:
    """Return the reason why a model with `size` ids cannot read an answer without a statement, or an empty string."""
    ids, logprobs = answer.answer_ids, answer.logprobs
    if not ids or not logprobs or not are_integers(ids) or not all(map(is_finite, logprobs)):
        return "the server sends no token ids or no log-probabilities of its answer"
    if len(ids) != len(logprobs):
        return f"the server sends {len(ids)} token ids and {len(logprobs)} log-probabilities"
    if max(ids) >= size:
        return f"the server answers with the token id {max(ids)}, and the model of --model has {size} ids"
    return ""


def check_policy(reading: Reading) -> None:
    """Rule 4: the stated sets equal the sets of the stated policy, unless rounding decides an eviction."""
    one = reading.statement
    try:
        events = _compared_events(reading)
        if not events:
            pytest.skip(f"{reading}: nothing was evicted ({one.reason})")
        seen, stated = [event.seen for event in events], [event.sets for event in events]
        policy, model = reading.policy, reading.witness.model
        expected = policy_sets(model, policy, one, seen)
        selector = required_by(policy.on(model).policy.selector)
        dtype = getattr(torch, reading.witness.dtype)  # rounding moves scores more than noise of the weights
        copies = (policy_sets(computing_in(dtype, changed), policy, one, seen) for changed in reading.witness.noisy())
        clear, tied = judged_differences(stated, expected, one.ids, copies, selector is None or selector.sequential)
    except SpecError as error:
        pytest.skip(f"{reading}: kvspec cannot compute the sets of this policy ({error})")
    if clear:
        at, number, position = min(clear)
        layer, head = divmod(number, reading.witness.reader.heads)
        keeps = position in expected[at][layer][head]
        raise AssertionError(
            f"{reading}: tokens kept or evicted against the policy: {len(clear)}. After {seen[at]} tokens,"
            f" full-attention layer {layer}, KV head {head}: token {position} must be {'kept' if keeps else 'evicted'}"
        )
    if tied:
        pytest.skip(f"{reading}: rounding may explain {len(tied)} tokens that differ from those of the policy")


def _compared_events(reading: Reading) -> list[Event]:
    """Return the stated evictions. For a policy that evicts while decoding, the cache at the end is added.

    Without this rule, a server could stop evicting and stop stating evictions.
    """
    one, events, reader = reading.statement, list(reading.events), reading.witness.reader
    method: Any = reading.policy.on(reading.witness.model)
    evicts = method.policy.cadence.every is not None or method.decode
    end, seen = len(one.ids) - 2, events[-1].seen if events else 0  # No token is read after a later eviction.
    if evicts and end >= len(one.prompt_ids) and end > seen:
        sets = events[-1].sets if events else [[[]] * reader.heads] * reader.layers
        events.append(Event(end, [[[*head, *range(seen, end)] for head in layer] for layer in sets]))
    return events


def check_commitment(reading: Reading) -> None:
    """Rule 5: the digests fit the sets, and were sent before the first answer token that depends on the sets."""
    one, n = reading.statement, len(reading.statement.prompt_ids)
    for eviction in one.evictions:
        expected = digest_of(eviction.seen, eviction.sets, eviction.layers)
        digest = eviction.digest
        assert expected == digest, f"{reading}: the digest of the set is {expected}, the server states {digest}"
    if not reading.answer.digests:
        pytest.skip(f"{reading}: the server sends no digest before its answer")
    sent = [digest for _, digest in reading.answer.digests]
    stated = [eviction.digest for eviction in one.evictions]
    assert sent == stated, f"{reading}: the digests that were sent are not those of the stated sets"
    for (before, _), eviction in zip(reading.answer.digests, one.evictions, strict=True):
        assert before <= eviction.seen - n + 1, (
            f"{reading}: the digest of the eviction after {eviction.seen} tokens came after {before} answer tokens"
        )


RULES: Mapping[str, Callable[[Reading], Any]] = {
    "size": check_size, "masking": check_masking, "eviction": check_eviction, "policy": check_policy,
    "commitment": check_commitment,
}
"""Checks of each answer, by the names in spec/witness.md."""
