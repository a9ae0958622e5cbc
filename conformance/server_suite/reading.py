"""Log-probabilities of an answer and kept sets of a policy, computed by the witness."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.cache_suite.oracle import Masked, PositionRule, Snapshot
from conformance.witness.statement import Statement
from models_integration import RetentionPolicy, policy_from_name
from models_integration.model.cache_argument import cache_name
from models_integration.policies.foreign import (
    EXTREME,
    check_local_constants,
    check_numbers,
    check_values,
    has_extreme_number,
)
from models_integration.policies.methods import parse_policy
from reference.policies.names import is_built_in
from spec.errors import SpecError

__all__ = [
    "BOUNDS", "WEIGHT_NOISE", "Bound", "Event", "Reader", "computing_in", "events_of", "policy_of", "policy_sets",
    "with_noise",
]


@dataclass(frozen=True)
class Bound:
    """Bound of the differences of log-probabilities that the rounding of a server explains.

    Attributes:
        tolerance: largest allowed distance between the server and the witness.
        power: number of tolerances by which masking must change log-probabilities, so that a comparison can pass.
        mean: True if the distance is the mean difference of the answer tokens, False if it is the largest.
    """

    tolerance: float
    power: float
    mean: bool = False

    def apart(self, a: Tensor, b: Tensor) -> float:
        """Return the distance of log-probabilities. NaN counts as infinite."""
        if not len(a):
            return 0.0
        differences = (a - b).abs()
        distance = float(differences.mean() if self.mean else differences.max())
        return distance if distance == distance else float("inf")


BOUNDS = {"float32": Bound(2e-3, 10), "bfloat16": Bound(0.3, 2, mean=True)}
"""Bounds by dtype of the server.

In float32, answers of vLLM differ by at most 5e-5, and 24 answers of SmolLM2 also by at most 5e-5
(`nox -s lab -- witness`). In bfloat16, 22 of these 24 right answers have mean differences of 0.03 to 0.17. The two
others, with 0.73 and 0.97, depend on rounding: noise of 2^-8 in the weights moves them by 0.25 and 0.22.
"""
WEIGHT_NOISE = {"float32": 2.0**-21, "bfloat16": 2.0**-8}
"""Relative change of weights that changes scores as much as the rounding of a different engine."""

_NOT_STATED = {
    "backend": "must not be stated: the witness chooses the backend",
    "calibration": "must not be stated: the witness opens no file for a server",
    "template": "must not be stated: the witness makes the template from the tokenizer",
}
"""Constants that only the witness may set, with the end of the error message."""

HeadSets = list[list[list[int]]]
"""Kept positions, by full-attention layer and KV head."""


@dataclass(frozen=True)
class Event:
    """One eviction: after `seen` tokens, only the tokens of `sets` are visible."""

    seen: int
    sets: HeadSets


class Reader:
    """A model that reads answers with masks in place of evictions.

    Attributes:
        layers: number of full-attention layers.
        heads: number of KV heads of a layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._masked = Masked(model)
        self._prefix: tuple[list[int], Tensor, Snapshot] | None = None
        config = model.config.get_text_config(decoder=True)
        self.layers = len(self._masked.visible)
        self.heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads

    def logprobs(
        self, ids: Sequence[int], n: int, events: Sequence[Event], rule: str = "kept", excepted: int | None = None,
    ) -> Tensor:
        """Return the log-probability of each token after the first n, (len(ids) - n,).

        Args:
            ids: token ids of the prompt and the answer.
            n: number of prompt tokens.
            events: evictions in order. An eviction after the last token that is read has no effect.
            rule: "kept", "renumbered" (each KV head counts its kept tokens from 0), or "slots". With "slots", kept
                tokens keep the positions of the text. Later tokens are counted by the number of stored tokens, which
                is a fault.
            excepted: number of a full-attention layer that uses the opposite rule ("kept" or "renumbered"), which is a
                fault. Default: no layer.
        """
        masked, read = self._masked, min([n, *(event.seen for event in events[:1])])
        start, logits = read, [self._read_prefix(list(ids[:read]))]
        numbers = {layer: number for number, layer in enumerate(masked.visible)}
        masked.rules = {
            layer: PositionRule((rule == "renumbered") != (numbers[stored] == excepted))
            for layer, stored in masked.stores.items()
        }
        for event in [*events, Event(len(ids) - 1, [])]:
            end = min(event.seen, len(ids) - 1)
            if end > read:
                logits.append(masked.read(torch.tensor([list(ids[read:end])]))[0])
                read = end
            if event.sets and read == event.seen:
                masked.keep(event.sets)
                masked.shift = event.seen - len(event.sets[0][0]) if rule == "slots" else 0
        rows = torch.cat(logits)[n - start :][: len(ids) - n].to(torch.float64).log_softmax(dim=-1)
        return rows.gather(1, torch.tensor(list(ids[n:]), dtype=torch.int64)[:, None])[:, 0]

    def _read_prefix(self, ids: list[int]) -> Tensor:
        """Read the tokens before the first eviction, and return the logits of the last token, (1, vocabulary).

        The witness reads a prompt with several evictions in a row, so the state after the last prefix is stored.
        """
        if self._prefix is None or self._prefix[0] != ids:
            self._masked.reset()
            logits = self._masked.read(torch.tensor([ids]), last=1)[0, -1:]
            self._prefix = ids, logits, self._masked.snapshot()
        _, logits, snapshot = self._prefix
        self._masked.restore(snapshot)
        return logits


def events_of(statement: Statement, layers: int, heads: int) -> list[Event]:
    """Return the evictions of a statement by layer and KV head.

    Raises:
        MalformedStatement: if the statement does not fit the model.
    """
    return [Event(one.seen, one.positions(layers, heads)) for one in statement.evictions]


def policy_of(statement: Statement, tokenizer: Any = None) -> RetentionPolicy:
    """Return the stated policy, with its constants and budget.

    Args:
        statement: statement of a server.
        tokenizer: tokenizer of the model, for constants that are not stated, such as the sentence ends of CrystalCache.

    Raises:
        SpecError: if kvspec has no such policy, or if a constant or the budget is not valid. The text comes from the
            server, so it imports no module, opens no file, and has no constant that takes the memory of the witness.
    """
    if has_extreme_number(statement.policy):
        raise SpecError("policy", statement.policy, EXTREME)
    if not is_built_in(statement.policy.partition("(")[0]):
        raise SpecError("policy", statement.policy, "must be a policy of kvspec (`kvspec policies` lists them)")
    return _policy(statement.policy, statement.budget, tokenizer)


@lru_cache(maxsize=16)  # a search for the sentence ends of a tokenizer can take seconds
def _policy(text: str, budget: str, tokenizer: Any) -> RetentionPolicy:
    name, constants = parse_policy(text)
    check_local_constants(name, constants, _NOT_STATED)
    check_numbers(constants)
    check_values(name, constants)
    return policy_from_name(name, budget, tokenizer=tokenizer, **constants)


def policy_sets(
    model: PreTrainedModel, policy: RetentionPolicy, statement: Statement, seen: Sequence[int],
) -> list[HeadSets]:
    """Return the sets that a session of a policy stores, for each number of tokens in `seen`.

    Raises:
        SpecError: if kvspec does not support the policy for the model.
    """
    result, ids, n = [], torch.tensor([statement.ids]), len(statement.prompt_ids)
    with torch.no_grad(), policy(model) as run:
        model(input_ids=ids[:, :n])
        for at in range(n, max(seen) + 1):
            if at > n:
                model(input_ids=ids[:, at - 1 : at], **{cache_name(model): run.cache})
            if at in seen:
                assert run.cache is not None
                layers = run.cache.full_layers
                result.append([[layer.head_positions(0, head).tolist() for head in range(layer.heads)]
                              for layer in layers])
    return result


def with_noise(model: PreTrainedModel, noise: float, seed: int) -> PreTrainedModel:
    """Return a copy of a model whose weights and embedded tokens are changed at random by a relative `noise`.

    Equal tokens at different positions are changed differently, because rounding can also rank them.
    """
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)

    def near(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + noise * (2 * torch.rand(x.shape, generator=generator) - 1)).to(x.dtype)

    with torch.no_grad():
        for weight in changed.parameters():
            weight.copy_(near(weight))
    # If a forward hook returns a tensor, the module returns this tensor (torch 2.13).
    changed.get_input_embeddings().register_forward_hook(lambda module, args, output: near(output))
    return changed


def computing_in(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, whose weights are changed to `dtype`. Rotary frequencies stay in float32, as in a server."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model
