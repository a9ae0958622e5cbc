"""torch.compile(model) inside a context gives the model's own numbers: what is ours is not traced."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.own.models_integration.session.families import METHODS, build, prompt, relative
from conformance.own.models_integration.session.ragged_checks import live_sets, method
from models_integration import RetentionPolicy

pytestmark = pytest.mark.law("the-model-stays-as-it-was")

POLICIES: dict[str, Callable[[], RetentionPolicy]] = {
    "a set for each head": lambda: method("adakv"), "one set": METHODS["crystalcache"],
}


@pytest.fixture(autouse=True)
def forget_traces() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def read(call: Any, policy: RetentionPolicy) -> tuple[Tensor, Any]:
    """Logits of a prompt's last token and of steps; what was stored in the end."""
    with policy(call) as run, torch.no_grad():
        logits = [call(input_ids=prompt(100)).logits[:, -1:]]
        for token in torch.split(prompt(2, seed=9), 1, dim=1):
            logits.append(call(input_ids=token, past_key_values=run.cache).logits)
        assert run.cache is not None
        return torch.cat(logits, dim=1), live_sets(run.cache)


@pytest.mark.parametrize("name", POLICIES)
def test_a_compiled_model_is_the_model(name: str) -> None:
    model, policy = build("llama"), POLICIES[name]()
    expected, kept = read(model, policy)
    found, own = read(torch.compile(model, backend="eager"), policy)
    assert own == kept
    assert relative(found, expected) < 1e-6
