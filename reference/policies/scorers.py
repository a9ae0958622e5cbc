"""Scorers that process layers one by one, and functions that combine the score rows of the layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spec.arrays import BoolVector, Float64, Int64, IntMatrix, Matrix
from spec.composition import ANY_SETS, HEAD_SETS, Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Scores
from spec.retention import Granularity
from spec.validate import MOST_TOKENS, check_whole

__all__ = [
    "LayerScorer", "Received", "Score", "WithoutRecords", "check_odd", "check_positive", "check_weighable", "host_rows",
    "host_tables", "recency", "stacked", "with_window",
]


Score = Callable[[LayerView], Matrix]
Received = Callable[[DeviceArray, DeviceArray, float, float | None, DeviceArray | None], Matrix]


class WithoutRecords:
    """Base class of scorers that compute the scores of all cached tokens again at each step, and store no records."""

    def record(self, records: object, observation: Observation, /) -> None:
        return None

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> None:
        return None

    def join(self, records: Sequence[None], /) -> None:
        return None


@dataclass(frozen=True)
class LayerScorer(WithoutRecords):
    """Scorer of single tokens. `score` returns the scores of a layer: a row per KV head, or one row for all heads.

    The scorer stores no records. While decoding, the scores of all cached tokens are computed again for each eviction.
    """

    needs: Needs
    score: Score
    separable: bool = True
    unscored: tuple[int, int] = (0, 0)
    """Numbers of first and of last tokens whose score is NaN."""
    sets: frozenset[Granularity] = HEAD_SETS
    """Parts of the model for which `score` returns one row, if the scorer uses all layers."""
    layerwise: ClassVar[bool] = True

    @property
    def provided(self) -> Provided:
        """Return what the scorer provides. A decode step has one query, so scores from more queries are refused."""
        repeat, rows = self.needs.rehearsal, self.needs.query_rows
        unscored = self.unscored if repeat is None else (repeat.N_sink, repeat.N_recent)
        no_steps = ""
        if repeat is not None:
            no_steps = "lets the model repeat the prompt: leave the cadence out"
        elif rows is None:
            no_steps = "uses all queries, but a decode step has one: use the scorer of h2o, or leave the cadence out"
        elif rows > 1:
            no_steps = f"uses {rows} queries, but a decode step has one: use QueryCache({rows}, score)"
        sets = self.sets if self.needs.layers == "all" else ANY_SETS
        return Provided(sets=sets, unscored=unscored, no_steps=no_steps)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        return stacked(observation, [self.score(view) for view in observation.layers.values()])

    def step(self, records: object, observation: Observation, /) -> Scores:
        return stacked(observation, [self.score(view) for view in observation.layers.values()])

def host_rows(rows: Sequence[DeviceArray]) -> Float64[Matrix, "g n"]:
    """Concatenate the score rows (h, n) of all layers in CPU memory. Device tensors are copied in one transfer."""
    return host_tables(rows)[0]


def host_tables(*tables: Sequence[DeviceArray]) -> list[Matrix]:
    """Concatenate the rows of each table in CPU memory. Device tensors of all tables are copied in one transfer."""
    if any(isinstance(rows[0], np.ndarray) for rows in tables):
        return [np.concatenate(rows) if isinstance(rows[0], np.ndarray) else host_rows(rows) for rows in tables]
    flat = [layer.reshape(-1) for rows in tables for layer in rows]
    whole, at = flat[0].new_empty(sum(map(len, flat))).double(), 0
    for part in flat:
        whole[at : at + len(part)] = part
        at += len(part)
    ends = np.cumsum([sum(layer.shape[0] * layer.shape[1] for layer in rows) for rows in tables])
    host_parts = np.split(whole.cpu().numpy(), ends[:-1])
    return [part.reshape(sum(map(len, rows)), rows[0].shape[1]) for part, rows in zip(host_parts, tables, strict=True)]


def stacked(observation: Observation, rows: Sequence[DeviceArray], carry: object = None) -> Scores:
    """Return `Scores` of single tokens: the concatenated score rows of all layers.

    Raises:
        SpecError: if `rows` is empty, or if the number of score rows differs from the number of groups.
    """
    if not rows:
        raise SpecError("layers", len(rows), "must be at least 1, because the policy uses attention inputs")
    values = host_rows(rows)
    if len(values) != observation.groups:
        raise SpecError("groups", observation.groups, f"must be {len(values)}, the number of score rows")
    return Scores(values, np.arange(values.shape[1] + 1), carry=carry, heads=len(rows[0]))


def with_window(past: Float64[Matrix, "h past"], n: int) -> Float64[Matrix, "h n"]:
    """Return the scores of all n tokens: `past` before the window, and NaN for the tokens of the window."""
    padded: Matrix = np.pad(past, ((0, 0), (0, n - past.shape[1])), constant_values=np.nan)
    return padded


def check_odd(kernel: int) -> int:
    """Check and return the size of a pooling kernel.

    Raises:
        SpecError: if the size is even or not positive. A kernel of even size has no middle.
    """
    if check_whole("kernel", kernel, 1) % 2 == 0:
        raise SpecError("kernel", kernel, "must be odd and positive")
    return int(kernel)


def check_positive(name: str, value: int) -> int:
    """Check and return a number of tokens.

    Raises:
        SpecError: if the value is no whole number, is not positive, or is larger than that of any prompt.
    """
    return check_whole(name, value, 1, MOST_TOKENS)


def check_weighable(scores: Scores) -> Scores:
    """Check and return scores that the caller multiplies by a norm.

    Raises:
        SpecError: if a score is negative. A larger norm would make a negative score smaller.
    """
    least = np.nanmin(scores.values, initial=0.0)
    if least < 0:
        raise SpecError("host", float(least), "must have scores of at least 0, such as attention weights")
    return scores


@dataclass(frozen=True)
class _Recency:
    needs: Needs = Needs()
    separable: bool = False
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(sets=ANY_SETS, no_steps="keeps no records: leave the cadence out")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        cached = np.arange(observation.seen) if observation.positions is None else observation.positions
        return Scores(np.tile(cached.astype(np.float64), (observation.groups, 1)), np.arange(len(cached) + 1))


recency = _Recency()
