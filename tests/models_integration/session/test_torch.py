"""Features of PyTorch: gradients, compiled models, offloaded weights, weights without values, default devices."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration import RetentionPolicy, load_cache, observe, save_cache
from models_integration.model.rotation import recognise
from spec.errors import SpecError
from tests.models_integration.session.families import (
    _GQA,
    METHODS,
    at_once,
    build,
    greedy,
    prompt,
    relative,
    step_by_step,
    tiny,
)
from tests.models_integration.session.sessions import live_sets, method

pytestmark = pytest.mark.law("as-it-is-described")


STEP = 1e-6
N = 40
SETS: dict[str, Callable[[], RetentionPolicy]] = {
    "one set": METHODS["crystalcache"], "a set for each layer": lambda: method("chunkkv"),
    "a set for each head": lambda: method("adakv"), "heads of one length": lambda: method("snapkv"),
    "decisions in steps": lambda: method("h2o"),
}


def loss(model: PreTrainedModel, policy: RetentionPolicy) -> tuple[Tensor, Any]:
    """Return the loss of a prompt, a step, a turn and a step, and the stored positions at the end."""
    with policy(model) as run:
        total = model(input_ids=prompt(N)).logits.square().mean()
        for piece in torch.split(prompt(6, seed=9), [1, 4, 1], dim=1):
            total = total + model(input_ids=piece, past_key_values=run.cache).logits.square().mean()
        return total, live_sets(run.cache)


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("name", SETS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Compare along one direction of a layer's weights, through the keys and values of the prompt."""
    # The norms of this family compute in float64. Otherwise rounding would dominate the differences.
    model, policy = build("gpt_neox", dtype=torch.float64), SETS[name]()
    model.requires_grad_(False)
    for layer in (0, 1):
        attention: Any = model.base_model.get_submodule(f"layers.{layer}.attention")
        weights = attention.query_key_value.weight
        weights.requires_grad_(True)
        model.zero_grad()
        total, kept = loss(model, policy)
        total.backward()  # type: ignore[no-untyped-call]
        assert weights.grad is not None
        direction = torch.randn(weights.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weights += sign * STEP * direction
                value, again = loss(model, policy)
                weights -= sign * STEP * direction
            assert again == kept
            values.append(float(value))
        expected = (values[0] - values[1]) / (2 * STEP)
        assert float((weights.grad * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-8)
        weights.requires_grad_(False)


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", ["one set", "a set for each head"])
def test_without_gradients_nothing_is_kept_for_them(name: str) -> None:
    model = build("llama")
    with SETS[name]()(model) as run, torch.no_grad():
        model(input_ids=prompt(N))
        assert run.cache is not None
        model(input_ids=prompt(1), past_key_values=run.cache)
    for layer in run.cache.full_layers:
        assert layer.keys is not None
        assert not layer.keys.requires_grad


@pytest.fixture
def forget_traces() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def read_compiled(call: Any, policy: RetentionPolicy) -> tuple[Tensor, Any]:
    """Return the logits of a prompt's last token and of steps, and the stored positions at the end."""
    with policy(call) as run, torch.no_grad():
        last = call(input_ids=prompt(100)).logits[:, -1:]
        steps = step_by_step(call, prompt(2, seed=9), run.cache)
        return torch.cat([last, steps], dim=1), live_sets(run.cache)


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.usefixtures("forget_traces")
@pytest.mark.parametrize("name", [pytest.param("one set", marks=pytest.mark.nightly), "a set for each head"])
def test_a_compiled_model_is_the_model(name: str) -> None:
    """Compare a compiled model of one layer. Tracing takes seconds for each layer."""
    model, policy = build("llama"), SETS[name]()
    del model.get_submodule("model.layers")[1:]  # type: ignore[operator]
    model.config.num_hidden_layers = 1
    expected, kept = read_compiled(model, policy)
    actual, compiled_kept = read_compiled(torch.compile(model, backend="eager"), policy)
    assert compiled_kept == kept
    assert relative(actual, expected) < 1e-6


CPU = torch.device("cpu")


def tokens(n: int, seed: int = 3) -> Tensor:
    """Return ids on the CPU for every default device."""
    with CPU:
        return prompt(n, seed)


def life(model: PreTrainedModel, name: str) -> Tensor:
    """Return the logits of a prompt, of steps, and of a text inside `reading()`."""
    with method(name)(model) as run, torch.no_grad():
        first = model(input_ids=tokens(N)).logits
        steps = step_by_step(model, tokens(2, seed=9), run.cache)
        with run.reading():
            return torch.cat([first, steps, at_once(model, tokens(3, seed=8), run.cache)], dim=1)


def rows(model: PreTrainedModel, path: Path) -> Tensor:
    """Return the logits after a padded batch. Its cache is cropped, reduced to selected rows, and saved."""
    ids, mask = torch.cat([tokens(N), tokens(N, seed=4)]), torch.ones(2, N, dtype=torch.int64, device="cpu")
    mask[0, :5] = 0
    with method("crystalcache")(model) as run, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        assert run.cache is not None
        model(input_ids=ids[:, :1], past_key_values=run.cache)
    cache = run.cache
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3], device="cpu"))
    save_cache(cache, model, path)
    return at_once(model, tokens(4), load_cache(path, model))


@pytest.mark.parametrize(("where", "name"), [
    ("memory", "crystalcache"), ("memory", "kvzip"), ("disk", "adakv"), ("disk", "h2o"),
])
def test_an_offloaded_model_is_the_model(where: str, name: str, tmp_path: Path) -> None:
    """Check parameters that are on the device meta between forward passes, and are moved by hooks."""
    model, expected = build("llama"), life(build("llama"), name)
    if where == "memory":
        cpu_offload(model, execution_device=CPU)
    else:
        disk_offload(model, str(tmp_path), execution_device=CPU)
    assert next(model.parameters()).is_meta
    assert torch.equal(life(model, name), expected)
    recognise(model)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("how", ["offloaded", "integers", "another class of tensor"])
def test_a_projection_that_cannot_be_read_is_refused(how: str) -> None:
    class Packed(Tensor):
        """Tensor like those of torchao: multiplication is the only supported operation."""

        def to(self, *_: object, **__: object) -> Tensor:
            raise NotImplementedError

    model = build("llama")
    if how == "offloaded":
        cpu_offload(model, execution_device=CPU)
    else:
        linear = model.get_submodule("model.layers.1.self_attn.o_proj")
        weight = torch.ones(48, 48).as_subclass(Packed) if how != "integers" else torch.ones(48, 48, dtype=torch.int8)
        linear.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(SpecError, match=r"'LlamaAttention': the output projection is quantised or offloaded"):
        method("criticalkv")(model)


@pytest.mark.parametrize("name", ["crystalcache", "adakv", "kvzip", "h2o", "chunkkv", "nestedkv", "rows"])
def test_the_default_device_is_not_used(name: str, tmp_path: Path) -> None:
    """`torch.set_default_device` is for the caller's tensors. Tensors on the device meta have no values."""
    model, read = build("llama"), partial(rows, path=tmp_path / "cache") if name == "rows" else partial(life, name=name)
    expected = read(model)
    with torch.device("meta"):
        assert torch.equal(read(model), expected)


class Adapted(nn.Module):
    """Wrapper like peft's PeftModel: not a PreTrainedModel, but contains one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model


@pytest.mark.parametrize(("wrap", "name"), [
    (Adapted, "critical-adakv"), (lambda model: torch.compile(Adapted(model), backend="eager"), "crystalcache"),
], ids=["adapters", "compiled adapters"])
def test_what_wraps_a_model_is_served_as_the_model(wrap: Callable[[Any], Any], name: str) -> None:
    """Check that a wrapper has the hooks, the `generate` and the constants of the model inside."""
    model = build("llama")
    wrapped, actual = wrap(model), []
    for given in (wrapped, model):
        with method(name)(given) as run, torch.no_grad():
            model(input_ids=prompt(40))
            with pytest.raises(SpecError, match="assisted decoding"):
                greedy(model, prompt(40), 2, prompt_lookup_num_tokens=3)
        actual.append(live_sets(run.cache))
    assert actual[0] == actual[1]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers is about to rename this option.
@pytest.mark.parametrize("when", ["before the context", "inside it"])
def test_gradient_checkpointing_leaves_the_cache_out(when: str) -> None:
    model, words = build("llama"), "gradient checkpointing disables the cache"
    if when == "before the context":
        model.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
        model.train(True)
        with pytest.raises(SpecError, match=words):
            method("adakv")(model)
        return
    with method("adakv")(model) as run, torch.no_grad():
        model.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
        model.train(True)
        with pytest.raises(SpecError, match=words):
            model(input_ids=prompt(40))
        model.train(False)  # Outside training, no layer is checkpointed.
        model(input_ids=prompt(40))
        assert run.cache is not None


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = tiny("Llama", **_GQA)
    refused: list[Callable[[], object]] = [
        lambda: METHODS["crystalcache"]()(model), lambda: method("adakv")(model), lambda: observe(model, prompt(40)),
    ]
    for act in refused:
        with pytest.raises(SpecError, match=r"'LlamaModel': has weights without values \(device meta\)"):
            act()
