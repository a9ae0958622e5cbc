"""Tests of the measurement of context shifts, with a model of transformers in place of llama.cpp."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the measurement writes a file of the model")

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.cache_suite.judge import save_tiny
from conformance.cache_suite.oracle import Masked
from lab.measure import context_shift as measurement


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = save_tiny("llama", tmp_path_factory.mktemp("llama"))
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded


class Engine:
    """Context that evicts by masks, under one rule of positions."""

    def __init__(self, model: PreTrainedModel, renumbered: bool) -> None:
        self.masked, self.stored = Masked(model, renumbered), list[int]()

    def read(self, ids: list[int]) -> torch.Tensor:
        self.stored += range(self.masked.seen, self.masked.seen + len(ids))
        return self.masked.read(torch.tensor([ids]))[0].double().log_softmax(-1)

    def shift(self, keep: int, discard: int) -> None:
        del self.stored[keep : keep + discard]
        self.masked.keep([[self.stored]] * len(self.masked.visible))

    def close(self) -> None:
        """Close nothing."""


@pytest.mark.parametrize("renumbered", [True, False])
def test_the_rule_of_an_engine_is_measured(
    model: PreTrainedModel, renumbered: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = Engine(model, renumbered)
    monkeypatch.setattr(measurement, "open_context", lambda file, cells, dtype: engine)
    monkeypatch.setattr(measurement, "read", lambda llama, ids: llama.read(ids))
    monkeypatch.setattr(measurement, "shift", lambda llama, keep, discard: llama.shift(keep, discard))
    case = measurement.Case(12, 2, 4)
    before, one, three = measurement.measure(model, Path("none"), case, "float32", (0, 1, 3))
    assert before == (0, 0.0, 0.0, 0)
    for actual, turns in ((one, 1), (three, 2)):
        right, wrong = (actual.renumbered, actual.kept) if renumbered else (actual.kept, actual.renumbered)
        assert right == 0
        assert wrong > 1e-2
        assert actual.turns == turns


def test_a_context_counts_the_turns_of_each_key() -> None:
    context = measurement.Context()
    for tokens in (6, 2, 2):
        context.read(tokens)
        context.shift(keep=1, discard=2)
    assert (context.stored, context.turns) == ([0, 7, 8, 9], [0, 2, 1, 1])
