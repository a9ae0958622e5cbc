"""Rules of spec/witness.md. Each rule is a function that checks the reading of one answer."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from conformance.server_suite.faults import name_fault
from conformance.server_suite.likelihood import likelier_fault
from conformance.server_suite.reading import Event, computing_in, policy_sets
from conformance.server_suite.ties import flat, judged_differences
from conformance.server_suite.witness import Reading, Witness
from conformance.witness.client import Answer
from conformance.witness.statement import are_integers, digest_of, is_finite
from reference.policies.kept import most_kept
from spec.budget import parse_budget
from spec.composition import required_by
from spec.errors import SpecError

__all__ = ["RULES", "Reading", "Witness"]


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
    if difference > bound.tolerance and not reading.depends_on_rounding:
        fault = name_fault(
            reading.witness.reader, reading.statement, reading.events, reading.stated_logprobs, bound,
            reading.witness.others(reading),
        )
        raise AssertionError(
            f"{reading}: log-probabilities differ by {difference:.2g} from those of masking by the stated set, more"
            f" than {bound.tolerance:g}; {fault}"
        )
    fault = likelier_fault(tuple(reading.witness.group_of(reading))) if bound.mean else ""
    assert not fault, f"{reading}: the answers of this group are much likelier if the server has a fault: {fault}"
    if difference > bound.tolerance:
        pytest.skip(f"{reading}: the answer depends on rounding, so its log-probabilities decide nothing")
    if reading.events and not reading.has_power:
        pytest.skip(f"{reading}: masking changes too little to decide")


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
    if bound.apart(reading.read(half, "kept"), reading.full) < bound.power * bound.tolerance:
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
