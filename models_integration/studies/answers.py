"""What a model says under a policy: samples read one at a time or side by side, and answered greedily."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import ceil
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.positions import EMPTY
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.policies.methods import Published, RetentionPolicy
from models_integration.session.session import Session
from models_integration.tasks import Placement

__all__ = ["Answer", "answer", "answer_all", "batches"]


@dataclass(frozen=True)
class Answer:
    """What a policy let the model say."""

    token_ids: list[int]
    kept: int
    """Slots that the policy kept, per layer and head."""
    mean_cache: float
    """Slots stored per layer and head, mean over the answer's forwards."""
    peak_cache: int
    """The most slots stored per layer and head at any time, the prompt's own forward included."""


def batches(placements: Sequence[Placement], size: int) -> list[list[int]]:
    """Indices of samples that can be read side by side: all their texts are equally long, so no row is padded.

    What is taken back from a cache (`dropped_slots`) is taken back from one row alone.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, placement in enumerate(placements):
        alike.setdefault((len(placement.prompt_ids), len(placement.fed_ids)), []).append(index)
    found = []
    for group in alike.values():
        most = 1 if placements[group[0]].dropped_slots else size
        found += [group[first : first + most] for first in range(0, len(group), most)]
    return found


def answer_all(
    model: PreTrainedModel, method: RetentionPolicy, placements: Sequence[Placement], max_new_tokens: int,
    stop_ids: frozenset[int], batch_size: int, answered: Callable[[], None],
) -> list[Answer]:
    """The answer to each placement, in their order; `answered` is told of every one.

    The batch size decides how many are read at once, and nothing else: each row is observed, decided and compacted as
    if it were alone. A model's own products over several rows may round otherwise than over one.
    """
    found: dict[int, Answer] = {}
    for batch in batches(placements, batch_size):
        given = _answer_rows(model, method, [placements[index] for index in batch], max_new_tokens, stop_ids)
        for index, one in zip(batch, given, strict=True):
            found[index] = one
            answered()
    return [found[index] for index in range(len(placements))]


def answer(
    model: PreTrainedModel, method: RetentionPolicy, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int],
) -> Answer:
    """Present one sample in its placement and decode greedily until a stop id or `max_new_tokens`.

    A published policy reads token by token inside its context, so that one that decides in its steps does. What is
    dropped and read again leaves no records behind, so such a policy's prompt ends before it.
    """
    (only,) = _answer_rows(model, method, [placement], max_new_tokens, stop_ids)
    return only


@torch.no_grad()
def _answer_rows(
    model: PreTrainedModel, method: RetentionPolicy, placements: Sequence[Placement], max_new_tokens: int,
    stop_ids: frozenset[int],
) -> list[Answer]:
    on_model = method.on(model)
    if isinstance(method, Published) and on_model.policy.cadence.every is not None:
        placements = [_read_once(placement) for placement in placements]
    rows = _Rows(model, placements, max_new_tokens, stop_ids)
    with Session(on_model, model) as run:
        logits = rows.read(run)
        if isinstance(method, Published):
            return rows.answered(logits, at_once=1)
        if len(placements) > 1:
            # Rows that keep different tokens can be read inside the context only.
            return rows.answered(logits, len(placements[0].fed_ids), run)
    return rows.answered(logits, len(placements[0].fed_ids))


def _read_once(placement: Placement) -> Placement:
    if not placement.dropped_slots:
        return placement
    return replace(placement, prompt_ids=placement.prompt_ids[: -placement.dropped_slots], dropped_slots=0)


@dataclass
class _Rows:
    """Samples whose texts are equally long, side by side."""

    model: PreTrainedModel
    placements: Sequence[Placement]
    max_new_tokens: int
    stop_ids: frozenset[int]
    cache: RetainedCache = field(init=False)

    def read(self, run: Session) -> Tensor:
        """Read the prompts; the logits (rows, 1, vocabulary) of what comes next."""
        logits = self.model(input_ids=self._ids(one.prompt_ids for one in self.placements), use_cache=True).logits
        self.cache = cast(RetainedCache, run.cache)
        return cast(Tensor, logits[:, -1:])

    def answered(self, logits: Tensor, at_once: int, run: Session | None = None) -> list[Answer]:
        """Feed what is left of the placements, so many tokens at once; then decode until every row has stopped.

        Args:
            logits: of the prompts.
            at_once: tokens of a forward.
            run: decides nothing about what is fed.
        """
        kept, stored = [ceil(length) for length in self._lengths()], list[list[float]]()
        if self.placements[0].dropped_slots:
            self.cache.crop(-self.placements[0].dropped_slots)
        with nullcontext() if run is None else run.reading():
            for first in range(0, len(self.placements[0].fed_ids), at_once or 1):
                fed = self._ids(one.fed_ids[first : first + at_once] for one in self.placements)
                logits = self._forward(fed, stored)
        forwards = len(stored)
        said = self._said(logits, stored)
        return [self._answer(row, said[row], kept[row], stored, forwards) for row in range(len(said))]

    def _said(self, logits: Tensor, stored: list[list[float]]) -> list[list[int]]:
        """What each row says, up to its own stop; a row that has stopped is fed on beside the others."""
        said: list[list[int]] = [[] for _ in self.placements]
        going = [True] * len(said)
        for _ in range(self.max_new_tokens):
            tokens = logits[:, -1].argmax(dim=-1).tolist()
            for row, token in enumerate(tokens):
                if going[row]:
                    said[row].append(token)
                    going[row] = token not in self.stop_ids
            if not any(going):
                break
            logits = self._forward(self._ids([token] for token in tokens), stored)
        return said

    def _answer(self, row: int, said: list[int], kept: int, stored: list[list[float]], forwards: int) -> Answer:
        """A row's own, from the forwards that its own answer took: none follows its stop."""
        steps = len(said) - (said[-1] in self.stop_ids)
        own = [lengths[row] for lengths in stored[: forwards + steps]]
        return Answer(said, kept, sum(own) / len(own), max(len(self.placements[row].prompt_ids), *map(ceil, own)))

    def _forward(self, ids: Tensor, stored: list[list[float]]) -> Tensor:
        logits = self.model(input_ids=ids, past_key_values=self.cache).logits
        stored.append(self._lengths())
        return cast(Tensor, logits)

    def _lengths(self) -> list[float]:
        """Slots in use of a layer and KV head of each row, on average."""
        if len(self.placements) == 1:
            return [self.cache.mean_length]
        by_layer = [_row_lengths(layer, len(self.placements)) for layer in self.cache.full_layers]
        return [sum(lengths) / len(by_layer) for lengths in zip(*by_layer, strict=True)]

    def _ids(self, rows: Iterable[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=self.model.device)


def _row_lengths(layer: RetainedLayer, rows: int) -> list[float]:
    if isinstance(layer, RaggedLayer):
        lengths, heads = layer.layout.lengths, layer.heads
        return [sum(lengths[first : first + heads]) / heads for first in range(0, rows * heads, heads)]
    positions = layer.stored_positions()
    counts = (positions != EMPTY).sum(dim=1).tolist()
    return [float(count) for count in (counts * rows if len(counts) == 1 else counts)]
