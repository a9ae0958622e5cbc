"""Prompts of the witness, and the names that the witness gives to faults of a server."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from conformance.server_suite.faults import name_fault
from conformance.server_suite.prompts import LENGTHS, prompts_of
from conformance.server_suite.reading import BOUNDS, Event, Reader
from conformance.witness.statement import Statement

pytestmark = pytest.mark.law("the-proof-has-teeth")

N, LATER = 60, 66
"""Number of prompt tokens, and of tokens before the second eviction."""
Change = Callable[[list[Event]], list[Event]]


@pytest.fixture(scope="module")
def reader(model: PreTrainedModel) -> Reader:
    return Reader(model)


def stated() -> list[Event]:
    """Return two evictions with different sets for each layer and KV head, without the last three tokens."""
    rng = np.random.default_rng(0)
    first = [[sorted(rng.choice(range(2, N - 3), 20, replace=False).tolist()) for _ in range(2)] for _ in range(3)]
    return [Event(N, first), Event(LATER, [[[*head[::2], *range(N, LATER - 3)] for head in layer] for layer in first])]


def moved(by: int) -> Change:
    return lambda events: [
        replace(one, sets=[[[position + by for position in head] for head in layer] for layer in one.sets])
        for one in events
    ]


def later(events: list[Event]) -> list[Event]:
    """Return evictions that keep the token after the stated time too."""
    return [
        Event(one.seen + 1, [[[*head, one.seen] for head in layer] for layer in one.sets]) for one in events
    ]


def earlier(events: list[Event]) -> list[Event]:
    """Return evictions before the last of the tokens that the server states."""
    return [
        Event(one.seen - 1, [[[p for p in head if p < one.seen - 1] for head in layer] for layer in one.sets])
        for one in events
    ]


CHANGES: dict[str, Change] = {
    "each kept token is +1 beside the stated position": moved(1),
    "each kept token is -1 beside the stated position": moved(-1),
    "the eviction happened +1 tokens later than stated": later,
    "the eviction happened -1 tokens later than stated": earlier,
    f"eviction 1 of 2, after {N} tokens, did not happen": lambda events: events[1:],
    f"eviction 2 of 2, after {LATER} tokens, did not happen": lambda events: events[:1],
    "the kept sets of the layers are in reverse order": lambda events: [Event(e.seen, e.sets[::-1]) for e in events],
    "no known fault explains the log-probabilities": moved(2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_error_by_one_is_named(reader: Reader, name: str) -> None:
    events = stated()
    ids = np.random.default_rng(1).integers(100, 250, N + 12).tolist()
    result = reader.logprobs(ids, N, CHANGES[name](events))
    statement = Statement("snapkv", "0.4", "kept", ids[:N], ids[N:], result.tolist(), [], "")
    assert name_fault(reader, statement, events, result, BOUNDS["float32"]).startswith(name)


@pytest.mark.law("as-it-is-described")
def test_the_prompts_of_the_witness() -> None:
    groups = {group: prompts_of(group, 1000, 4096, 7) for group in (
        "lengths", "shared prefixes", "recalled", "at once", "cancelled", "long answers",
    )}
    assert [len(one) for one in groups["lengths"]] == [*LENGTHS]
    assert {16, 31, 32, 33, 64, 65, 127, 128, 129, 257, 512} <= {*LENGTHS}  # around blocks and chunks
    shared = groups["shared prefixes"]
    assert all(one[:300] == shared[0][:300] and len(one) > 300 for one in shared)
    assert len({tuple(one) for one in shared}) == 4
    for n, one in zip((60, 120, 200), groups["recalled"], strict=True):
        assert one[-n // 2 :] == one[: n // 2]
    assert len(groups["at once"]) == 8
    assert [len(one) for one in groups["cancelled"]] == [300, 300, 177, 177]
    assert len(groups["long answers"]) == 2
    assert prompts_of("lengths", 1000, 4096, 8) != groups["lengths"]
    assert max(len(one) for group in groups for one in prompts_of(group, 1000, 100, 7)) == 100
