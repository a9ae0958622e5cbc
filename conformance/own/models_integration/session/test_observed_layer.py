"""The observed layer by choice: which one it is, who is refused, and which layers wait for it."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from conformance.own.models_integration.session.families import ENDS, at_once, build, prompt
from models_integration import CrystalCache, RetainedCache, RetentionPolicy, decide, observe
from models_integration.model.architecture import describe
from reference.crystalcache.observed_layer import observed_layer
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs

pytestmark = pytest.mark.spec("CC-OBSERVED-LAYER")

N = 64


def observing(which: int) -> RetentionPolicy:
    return CrystalCache(0.5, ENDS, replace(TINY, observed_layer=which), backend="numpy")


@pytest.mark.parametrize("full_layers", [(0,), (0, 1, 2), (1, 3, 5, 8), tuple(range(5, 60, 6))])
def test_it_is_counted_among_the_full_attention_layers(full_layers: tuple[int, ...]) -> None:
    """Walking from either end, one layer at a time."""
    for which, layer in enumerate(full_layers):
        assert observed_layer(full_layers, which) == layer
    for which, layer in enumerate(reversed(full_layers), 1):
        assert observed_layer(full_layers, -which) == layer


@pytest.mark.parametrize("which", [3, -4, 2**31 - 1])
def test_a_layer_that_is_not_there_is_refused_before_a_token_is_read(which: int) -> None:
    model = build("llama")
    with pytest.raises(SpecError) as error:
        observing(which)(model)
    assert (error.value.argument, error.value.value) == ("observed_layer", which)
    assert "-3" in error.value.bound
    assert "2" in error.value.bound
    observed = observe(model, prompt(N))
    with pytest.raises(SpecError, match="observed_layer"):
        decide(observing(which).on(model), observed)


@pytest.mark.parametrize("which", [True, 0.5, "first", 2**31])
def test_it_is_an_integer(which: Any) -> None:
    with pytest.raises(SpecError, match="observed_layer"):
        replace(TINY, observed_layer=which)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_layers_with_windows_are_not_counted(family: str) -> None:
    architecture = describe(build(family))
    kinds = architecture.config.layer_types
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    assert 0 < len(full) < len(kinds)
    for which, layer in enumerate(full):
        assert architecture.watched(Needs("observed", observed=which)) == (layer,)
    assert architecture.watched(Needs("observed", observed=-1)) == (full[-1],)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_layers_up_to_it_wait_and_later_ones_do_not(which: int) -> None:
    """Slots of every layer, as each block of the model ends."""
    model = build("llama")
    cache, seen = RetainedCache(model.config), list[list[int]]()

    def look(module: nn.Module, args: object, output: object) -> None:
        seen.append([layer.stored_length for layer in cache.full_layers])

    blocks = [model.get_submodule(f"model.layers.{layer}") for layer in range(3)]
    handles = [block.register_forward_hook(look) for block in blocks]
    with observing(which)(model) as run:
        at_once(model, prompt(N), cache)
    for handle in handles:
        handle.remove()
    assert run.kept is not None
    assert len(run.kept) < N
    for layer, slots in enumerate(seen):
        held = len(run.kept) if layer >= which else N
        assert slots == [held] * (layer + 1) + [0] * (2 - layer)
