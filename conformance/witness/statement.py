"""Statement of spec/witness.md, with which a server describes the evictions of one request."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec.witness import FORMAT, POSITIONS, Ranges, digest_of

__all__ = ["Eviction", "MalformedStatement", "Statement", "are_integers", "digest_of", "is_finite", "parse_statement"]


class MalformedStatement(ValueError):
    """A statement that spec/witness.md does not allow. The message names the field, its value and the bound."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field} = {json.dumps(value)[:120]}: {bound}")


@dataclass(frozen=True)
class Eviction:
    """One eviction.

    Attributes:
        seen: number of tokens that the model had read.
        sets: distinct kept sets, as ranges [first, end].
        layers: indices in `sets`, by full-attention layer and KV head.
        digest: SHA-256 that the server states.
    """

    seen: int
    sets: list[Ranges]
    layers: list[list[int]]
    digest: str

    def positions(self, layers: int, heads: int) -> list[list[list[int]]]:
        """Return the kept positions by layer and KV head.

        Raises:
            MalformedStatement: if the statement is for a different number of layers or KV heads.
        """
        if len(self.layers) not in (1, layers):
            raise MalformedStatement("layers", self.layers, f"must have 1 or {layers} entries: the model has {layers}")
        rows = self.layers * layers if len(self.layers) == 1 else self.layers
        if wrong := [row for row in rows if len(row) not in (1, heads)]:
            raise MalformedStatement("layers", wrong[0], f"must have 1 or {heads} entries, one for each KV head")
        used = {index for row in rows for index in row}  # a short text can state many long sets that nothing uses
        expanded = {index: [position for a, b in self.sets[index] for position in range(a, b)] for index in used}
        return [[expanded[index] for index in (row * heads if len(row) == 1 else row)] for row in rows]


@dataclass(frozen=True)
class Statement:
    """Statement of a server about one request. The fields are those of spec/witness.md, up to `until`.

    Attributes:
        left_out: number of answer tokens after `until`, which no rule checks.
    """

    policy: str
    budget: str
    positions: str
    prompt_ids: list[int]
    answer_ids: list[int]
    logprobs: list[float]
    evictions: list[Eviction]
    reason: str
    left_out: int = 0

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt and the answer."""
        return self.prompt_ids + self.answer_ids


def parse_statement(body: Mapping[str, Any], answer: Mapping[str, Any]) -> Statement:
    """Return the statement of an answer.

    Args:
        body: the JSON object of the server.
        answer: `prompt_ids`, `answer_ids` and `logprobs` of the answer itself, for fields that the body omits.

    Raises:
        MalformedStatement: if a field is missing or has a value that spec/witness.md does not allow.
    """
    whole = {**answer, **body}
    if whole.get("witness") != FORMAT:
        raise MalformedStatement("witness", whole.get("witness"), f"must be {FORMAT}")
    for field in ("policy", "budget"):
        _check(isinstance(whole.get(field), str) and whole[field], field, whole.get(field), "must be a text")
    _check(whole.get("positions") in POSITIONS, "positions", whole.get("positions"), f"must be in {POSITIONS}")
    for field in ("prompt_ids", "answer_ids"):
        _check(are_integers(whole.get(field)), field, whole.get(field), "must be a list of token ids")
    logprobs = whole.get("logprobs")
    _check(isinstance(logprobs, list) and all(map(is_finite, logprobs)), "logprobs", logprobs,
           "must be a list of finite numbers")
    _check(len(whole["logprobs"]) == len(whole["answer_ids"]), "logprobs", len(whole["logprobs"]),
           f"must have {len(whole['answer_ids'])} entries, one for each answer token")
    for field in ("prompt_ids", "answer_ids"):
        if field in answer:
            _check(whole[field] == answer[field], field, whole[field], "must be the ids of the request and its answer")
    _check(isinstance(whole.get("evictions"), list), "evictions", whole.get("evictions"), "must be a list")
    evictions = [_eviction(entry, whole) for entry in whole["evictions"]]
    tokens = len(whole["answer_ids"])
    whole |= _listed(whole, evictions)
    seen = [one.seen for one in evictions]
    _check(seen == sorted(set(seen)), "seen", seen, "must grow from one eviction to the next")
    _check(evictions or whole.get("reason"), "reason", whole.get("reason"), "is needed if nothing was evicted")
    fields = ("policy", "budget", "positions", "prompt_ids", "answer_ids", "logprobs")
    left_out = tokens - len(whole["answer_ids"])
    known = {name: whole[name] for name in fields}
    return Statement(**known, evictions=evictions, reason=whole.get("reason") or "", left_out=left_out)


def _listed(whole: Mapping[str, Any], evictions: Sequence[Eviction]) -> dict[str, Any]:
    """Return the part of the answer that depends only on the listed evictions."""
    n, until = len(whole["prompt_ids"]), whole.get("until")
    if until is None:
        return {}
    _check(type(until) is int and evictions and until > evictions[-1].seen, "until", until,
           "must be larger than `seen` of the last eviction")
    return {field: whole[field][: max(0, until - n + 1)] for field in ("answer_ids", "logprobs")}


def _check(holds: object, field: str, value: object, bound: str) -> None:
    if not holds:
        raise MalformedStatement(field, value, bound)


def is_finite(value: object) -> bool:
    """Return True for a number that a float can be. Python reads NaN and Infinity from JSON, and bools are ints."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def are_integers(value: object) -> bool:
    """Return True for a list of integers that are not negative, such as token ids."""
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _eviction(entry: Any, whole: Mapping[str, Any]) -> Eviction:
    """Return one eviction, after checks of its fields: ranges ascend up to `seen`, and indices name a set."""
    _check(isinstance(entry, dict), "evictions", entry, "must be a list of objects")
    seen, sets, layers = entry.get("seen"), entry.get("sets"), entry.get("layers")
    end = len(whole["prompt_ids"]) + len(whole["answer_ids"])
    _check(type(seen) is int and 0 < seen <= end, "seen", seen, f"must be from 1 to {end}")
    _check(isinstance(sets, list) and sets and all(_are_ranges(one, seen) for one in sets), "sets", sets,
           f"must be lists of ascending ranges [first, end] up to {seen}")
    _check(isinstance(layers, list) and layers and all(are_integers(row) and row for row in layers), "layers", layers,
           "must be lists of indices in `sets`")
    _check(all(index < len(sets) for row in layers for index in row), "layers", layers, f"must be below {len(sets)}")
    _check(isinstance(entry.get("digest"), str), "digest", entry.get("digest"), "must be a text")
    return Eviction(seen, sets, layers, entry["digest"])


def _are_ranges(ranges: object, seen: int) -> bool:
    if not isinstance(ranges, list) or not all(are_integers(one) and len(one) == 2 for one in ranges):
        return False
    ends = [end for pair in ranges for end in pair]
    return all(a < b for a, b in ranges) and ends == sorted(ends) and (not ends or ends[-1] <= seen)
