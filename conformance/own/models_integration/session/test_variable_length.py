"""Decode steps over ragged heads in one call: the runs of a head are merged to what the whole head gives.

The kernel itself needs a GPU. Here each of its sequences is computed alone, by the contract of its documentation.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import build, prompt, relative
from conformance.own.models_integration.session.sessions import NEW, PROMPT, TOLERANCE, method
from models_integration.attention import ragged_attention
from models_integration.attention.ragged_attention import RUN, attended_in_runs
from models_integration.cache.ragged_layer import HeadLayout

pytestmark = pytest.mark.law("eviction-equals-masking")

D, G = 8, 2
LENGTHS = [(1,), (RUN,), (RUN + 1, 3), (5, 3 * RUN, 2 * RUN - 1, 1)]


def sequences(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_ends: Tensor, most_queries: int,
    most_keys: int, *, scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output (T, 1, d) and log-sum-exp (1, T) of T queries; sequence i attends within its own keys."""
    assert query_ends[0] == key_ends[0] == 0
    assert len(query_ends) == len(key_ends)
    assert query_ends[-1] == len(query)
    assert key_ends[-1] == len(keys)
    outputs, sums = [], []
    for at in range(len(query_ends) - 1):
        q, k, v = (
            tensor[ends[at] : ends[at + 1], 0]
            for tensor, ends in ((query, query_ends), (keys, key_ends), (values, key_ends))
        )
        if len(q):
            assert len(q) <= most_queries
            assert 0 < len(k) <= most_keys
            logits = q @ k.T * (D**-0.5 if scale is None else scale)
            outputs.append(logits.softmax(dim=1) @ v)
            sums.append(logits.logsumexp(dim=1))
    return torch.cat(outputs)[:, None], torch.cat(sums)[None]


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_runs_are_merged_to_the_attention_of_the_whole_head(
    lengths: tuple[int, ...], rows: int, spare: int, scale: float | None,
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths) + spare)
    kept = tuple(torch.arange(length - 1) for _ in range(rows) for length in lengths)
    layout = HeadLayout(kept, grown=1, spare=spare)
    slots = sum(layout.lengths) + spare * len(kept)
    keys, values = (10 * torch.randn(slots, D, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(rows, G * len(lengths), 1, D, generator=generator, dtype=torch.float64)
    found = attended_in_runs(sequences, query, keys, values, layout, scale)
    assert found.shape == (rows, 1, G * len(lengths), D)
    for head, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
        own = slice(start, start + length)
        row, first = divmod(head, len(lengths))
        for each in range(first * G, first * G + G):
            logits = keys[own] @ query[row, each, 0] * (D**-0.5 if scale is None else scale)
            assert torch.allclose(found[row, 0, each], logits.softmax(dim=0) @ values[own], rtol=1e-5, atol=1e-5)


def test_a_session_s_steps_are_those_of_one_call_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(ragged_attention, "RUN", 4)
    logits: list[Tensor] = []
    calls: list[Any] = []

    def counted(*given: Any, scale: float | None) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return sequences(*given, scale=scale)

    for served in (False, True):
        monkeypatch.setattr(ragged_attention, "_flash", lambda query, served=served: served)
        monkeypatch.setattr(ragged_attention, "variable_length", lambda: counted)
        with method("adakv")(model) as run, torch.no_grad():
            model(input_ids=prompt(PROMPT))
            steps = [model(input_ids=one, past_key_values=run.cache).logits for one in torch.split(prompt(NEW), 1, 1)]
        logits.append(torch.cat(steps, dim=1))
        assert (len(calls) > NEW) == served
    assert relative(logits[1], logits[0]) < TOLERANCE
