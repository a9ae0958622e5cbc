"""Names of faults that explain why log-probabilities of a server do not fit the stated evictions."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from conformance.server_suite.reading import Bound, Event, Reader
from conformance.witness.statement import Statement

__all__ = ["Hypothesis", "hypotheses", "name_fault"]

_PAIRS = 64
"""Largest number of pairs of KV heads that are tried."""
_LEFT = 0.25
"""A fault explains the log-probabilities if at most this share of their difference is left."""


class Hypothesis(NamedTuple):
    """A possible fault: what the server did instead of what it states.

    Attributes:
        name: name of the fault.
        events: evictions of the server.
        rule: position rule of the server (see `Reader.logprobs`).
        excepted: number of a full-attention layer with the opposite position rule. Default: no layer.
    """

    name: str
    events: Sequence[Event]
    rule: str
    excepted: int | None = None


def name_fault(
    reader: Reader, statement: Statement, events: Sequence[Event], result: Tensor, bound: Bound,
    others: Sequence[tuple[str, Sequence[Event]]] = (),
) -> str:
    """Return the name of the first fault that explains the log-probabilities of a server.

    Args:
        reader: the witness's model.
        statement: what the server states.
        events: the evictions of the statement.
        result: log-probabilities of the server.
        bound: largest distance that rounding explains.
        others: evictions of different requests, each with a name of the request.
    """
    ids, n = statement.ids, len(statement.prompt_ids)
    difference = bound.apart(reader.logprobs(ids, n, events, statement.positions), result)
    largest = min(bound.tolerance, _LEFT * difference)
    for one in hypotheses(events, statement.positions, others):
        if bound.apart(reader.logprobs(ids, n, *one[1:]), result) <= largest:
            return one.name
    return "no known fault explains the log-probabilities: a different set, or different weights"


def hypotheses(
    events: Sequence[Event], rule: str, others: Sequence[tuple[str, Sequence[Event]]] = (),
) -> Iterator[Hypothesis]:
    """Yield possible faults of a server that states the evictions `events` and the position rule `rule`.

    Args:
        events: stated evictions.
        rule: stated position rule.
        others: evictions of different requests, each with a name of the request.
    """
    yield Hypothesis("the log-probabilities are those of the full cache: nothing was evicted", [], "kept")
    for another in ("kept", "renumbered", "slots"):
        if another != rule:
            name = f"kept tokens and the answer have positions of the rule {another!r}, not {rule!r}"
            yield Hypothesis(name, events, another)
    for name, changed in _changed_sets(events):
        yield Hypothesis(name, changed, rule)
    for request, one in others:
        fitted = [_fitted(event, other) for event, other in zip(events, one, strict=False)]
        yield Hypothesis(f"the kept set is that of {request}", fitted, rule)
    for layer, a, b in _pairs(events):
        name = f"KV heads {a} and {b} of full-attention layer {layer} are exchanged"
        yield Hypothesis(name, [_exchanged(event, layer, a, b) for event in events], rule)
    for layer in range(len(events[0].sets) if events else 0):
        name = f"only in full-attention layer {layer}, positions are not those of the rule {rule!r}"
        yield Hypothesis(name, events, rule, layer)


def _changed_sets(events: Sequence[Event]) -> Iterator[tuple[str, list[Event]]]:
    """Yield faults of the sets: shifted positions, a different time, and evictions that did not happen."""
    for by in (1, -1):
        yield f"each kept token is {by:+d} beside the stated position", [_moved(event, by) for event in events]
        yield f"the eviction happened {by:+d} tokens later than stated", _later(events, by)
    for at, event in enumerate(events):
        name = f"eviction {at + 1} of {len(events)}, after {event.seen} tokens, did not happen"
        yield name, [*events[:at], *events[at + 1 :]]
    for layer in range(len(events[0].sets) if events else 0):
        yield f"full-attention layer {layer} evicted nothing", [_whole(event, layer) for event in events]
    yield "the kept sets of the layers are in reverse order", [Event(one.seen, one.sets[::-1]) for one in events]


def _moved(event: Event, by: int) -> Event:
    return Event(event.seen, [
        [sorted({min(max(position + by, 0), event.seen - 1) for position in tokens}) for tokens in layer]
        for layer in event.sets
    ])


def _later(events: Sequence[Event], by: int) -> list[Event]:
    """Return evictions that happen `by` tokens later. Tokens between the two times are kept, or not read yet."""
    return [
        Event(one.seen + by, [
            [[*(p for p in tokens if p < one.seen + by), *range(one.seen, one.seen + by)] for tokens in layer]
            for layer in one.sets
        ]) for one in events
    ]


def _whole(event: Event, layer: int) -> Event:
    sets = list(event.sets)
    sets[layer] = [list(range(event.seen))] * len(sets[layer])
    return Event(event.seen, sets)


def _fitted(event: Event, other: Event) -> Event:
    """Return the sets of a different request, without positions that this request has not read."""
    return Event(event.seen, [[[p for p in tokens if p < event.seen] for tokens in layer] for layer in other.sets])


def _pairs(events: Sequence[Event]) -> list[tuple[int, int, int]]:
    """Return pairs of KV heads that keep different tokens, as (layer, head, head)."""
    sets = events[0].sets if events else []
    result = [
        (layer, a, b) for layer, heads in enumerate(sets)
        for a, b in combinations(range(len(heads)), 2) if heads[a] != heads[b]
    ]
    return result[:_PAIRS]


def _exchanged(event: Event, layer: int, a: int, b: int) -> Event:
    sets = [list(layer_sets) for layer_sets in event.sets]
    sets[layer][a], sets[layer][b] = sets[layer][b], sets[layer][a]
    return Event(event.seen, sets)
