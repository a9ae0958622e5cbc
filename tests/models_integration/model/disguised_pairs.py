"""Models that differ only in code, order, types, registries or tensors, and equal models that look different."""

import copy
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from tests.models_integration.model.identity_pairs import (
    _UP,
    Change,
    _exchanged,
    _holding,
    _nothing,
    made,
)


class Named(nn.Module):
    """Layer times a number, which is an attribute with a given name."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base, self.name = base, name
        vars(self)[name] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        actual: Tensor = self.base(x) * vars(self)[self.name]
        return actual


class Buffered(nn.Module):
    """Layer times a function of a buffer."""

    def __init__(self, base: nn.Module, tensor: Tensor, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.base, self.use = base, use
        self.register_buffer("tensor", tensor)

    def forward(self, x: Tensor) -> Tensor:
        actual: Tensor = self.base(x) * self.use(self.get_buffer("tensor"))
        return actual


class Packed(nn.Module):
    """Layer whose weights have a scale as an attribute, as quantised weights do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        weight: Any = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        weight.scale = {"by": 1.0}
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        actual: Tensor = x @ (weight * weight.scale["by"]).T
        return actual


class Settings(list[int]):
    """List with an attribute."""

    def __init__(self, by: float) -> None:
        super().__init__([1])
        self.by = by


class Forgetful:
    """Object that describes its type but not its content."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __deepcopy__(self, memo: object) -> "Forgetful":
        return self


class ByName(Forgetful):
    """Object that is pickled as a global variable."""

    def __reduce__(self) -> str:
        return "ONE"


class ByFactory(Forgetful):
    """Object that is pickled as a call without arguments."""

    def __reduce__(self) -> Any:
        return (dict, ())


class WithoutState(Forgetful):
    """Object that is pickled without its attributes."""

    def __getstate__(self) -> object:
        return {}


def _module(by: float) -> types.ModuleType:
    actual = types.ModuleType(f"factor_{by}")
    vars(actual)["by"] = by
    return actual


def _times(x: Tensor, value: Any) -> Tensor:
    actual: Tensor = x * value.by
    return actual


def _stepped(x: Tensor, steps: Any) -> Tensor:
    for step in steps.values():
        x = step(x)
    return x


def _named(name: str) -> tuple[str, Change, Change]:
    wrap = _exchanged(_UP, partial(Named, name=name))
    return "Llama", wrap, lambda model: vars(model.get_submodule(_UP)).update({name: 3.0})


def _buffered(use: Callable[[Tensor], Tensor], one: Callable[[], Tensor], other: Callable[[], Tensor]) -> Any:
    wrap = _exchanged(_UP, lambda base: Buffered(base, one(), use))
    return "Llama", wrap, lambda model: vars(model.get_submodule(_UP))["_buffers"].update(tensor=other())


def _quantised(by: float) -> Tensor:
    actual: Tensor = torch.quantize_per_tensor(torch.ones(48) * by, by / 10, 0, torch.qint8)
    return actual


def _reversed_layers(model: Any) -> None:
    parts = model.model.layers._modules
    for name in list(reversed(parts))[1:]:
        parts[name] = parts.pop(name)


def _hot_experts(module: nn.Module, *tensors: Any, **options: Any) -> Any:
    return batched_mm_experts_forward(module, *tensors, **options) * 3.0


def _experts(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS.register("hot", _hot_experts)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "hot"


def _half_dynamic(model: Any) -> None:
    model.config.rope_parameters.update(rope_type="dynamic", factor=4.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.to(torch.bfloat16)


def _add_one(x: Tensor) -> Tensor:
    return x + 1


def _by_key(x: Tensor, table: Any) -> Tensor:
    actual: Tensor = x * table.get(1, 1.0)
    return actual


def _first_of(x: Tensor, values: Any) -> Tensor:
    actual: Tensor = x * values[0]
    return actual


def _by_kind(x: Tensor, kind: object) -> Tensor:
    return x * (1 + isinstance(kind, str))


def _unchanged(x: Tensor) -> Tensor:
    return x


def _dense(x: Tensor) -> Tensor:
    return x.to_dense()


def _sum_of_parts(x: Tensor) -> Tensor:
    return x.real + x.imag


# Family, change of both models, and change of the second model alone.
DISGUISED: dict[str, tuple[str, Change, Change]] = {
    "the order of a dict": _holding(
        _stepped, {"add": _add_one, "cut": torch.relu}, {"cut": torch.relu, "add": _add_one},
    ),
    "the type of a key": _holding(_by_key, {1: 3.0}, {"1": 3.0}),
    "a dtype and its name": _holding(_by_kind, torch.half, "torch.float16"),
    "an attribute of a list": _holding(_times, Settings(0.5), Settings(2.0)),
    "a range": _holding(_first_of, range(1, 5), range(2, 5)),
    "a default dictionary": _holding(_by_key, defaultdict(float, {1: 0.5}), defaultdict(float, {1: 2.0})),
    "a module of Python": _holding(_times, _module(0.5), _module(2.0)),
    **{
        f"an object pickled {kind.__name__}": _holding(_times, kind(0.5), kind(2.0))
        for kind in (ByName, ByFactory, WithoutState)
    },
    **{
        f"an attribute called {name}": _named(name)
        for name in ("generate", "warnings_issued", "name_or_path", "gradient_checkpointing", "_private", "my_inv_freq")
    },
    "the order of layers": ("Llama", _nothing, _reversed_layers),
    "a weight's scale": (
        "Llama", _exchanged(_UP, Packed), lambda model: model.get_submodule(_UP).weight.scale.update(by=2.0),
    ),
    "a quantised buffer": _buffered(torch.dequantize, partial(_quantised, 1.0), partial(_quantised, 2.0)),
    "a sparse buffer": _buffered(
        _dense, lambda: torch.ones(48).to_sparse(), lambda: torch.full((48,), 2.0).to_sparse(),
    ),
    "a conjugate buffer": _buffered(
        _sum_of_parts, lambda: torch.full((48,), 1 + 2j), lambda: torch.full((48,), 1 + 2j).conj(),
    ),
    "a negative buffer": _buffered(
        _unchanged, lambda: torch.ones(48), lambda: torch.full((48,), 1j).conj().imag,
    ),
    "a registered experts' function": ("Qwen3Moe", _nothing, _experts),
    "rounded dynamic frequencies": (
        "Llama", _half_dynamic, lambda model: model.model.rotary_emb.inv_freq.mul_(1.02),
    ),
}


class _Hook(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, module: Any, inputs: Any, output: Any) -> Any:
        return output * 2


class _Watcher(nn.Module):
    def forward(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * 2


def _hooked(hook: Callable[..., Any]) -> Change:
    return lambda model: model.get_submodule(_UP).register_forward_hook(hook)


def _over(name: str, prepare: Change = _nothing) -> Change:
    """Return a change that replaces a method of a layer by one that doubles its result."""

    def change(model: Any) -> None:
        layer = model.get_submodule(_UP)
        prepare(layer)
        before = getattr(layer, {"_compiled_call_impl": "_call_impl"}.get(name, name))
        vars(layer)[name] = lambda *inputs: before(*inputs) * 2

    return change


def _move(layer: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device="cpu"))


def _cast(model: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    cast = hooks.LayerwiseCastingHook(torch.float32, torch.bfloat16, non_blocking=False)
    vars(model.model.norm)["_parameters"]["weight"].data.fill_(0.3)
    hooks.add_hook_to_module(model.model.norm, cast)


# Foreign code in place of a method, or in hooks with the names of torch's hooks. Such models are refused.
EXCHANGED: dict[str, Change] = {
    "forward over accelerate's": _over("forward", _move), "_call_impl": _over("_call_impl"),
    "_compiled_call_impl": _over("_compiled_call_impl"), "casting": _cast,
    "function's hook": _hooked(_Hook.apply), "module's hook": _hooked(_Watcher().__call__),
    "call of a module": _hooked(partial(nn.Module.__call__, _Watcher())),
}


def _dispatched(model: Any) -> None:
    pytest.importorskip("accelerate").dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def _answered(model: Any) -> None:
    with torch.no_grad():
        model(torch.arange(3, 9)[None])


def _generated(model: Any) -> None:
    model.generate(torch.arange(3, 9)[None], max_new_tokens=2, cache_implementation="static")


def _normed(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.spectral_norm(model.get_submodule(_UP))
    model.eval()


def _weighed_before(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.get_submodule(_UP))


def _weighed(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.get_submodule(_UP))


def _pruned_and_back(model: Any) -> None:
    layer = model.get_submodule(_UP)
    layer.weight = nn.Parameter(layer._parameters.pop("weight"))


# Changes of a model that change no answer.
EQUAL: dict[str, tuple[Change, Change]] = {
    "dispatched": (_nothing, _dispatched),
    "legacy spectral norm": (_normed, _answered), "legacy weight norm": (_weighed_before, _answered),
    "parametrized, copied": (_weighed, copy.deepcopy),
    "noted by a compiler": (
        _nothing, lambda model: setattr(model.get_submodule(_UP).weight, "_dynamo_static_input_type", "unguarded"),
    ),
    "dropout in training": (_nothing, lambda model: made("Llama", attention_dropout=0.1)),
    "dropout stated later": (_nothing, lambda model: setattr(model.config, "attention_dropout", 0.1)),
    "generated with a static cache": (_nothing, _generated),
    "tagged": (_nothing, lambda model: model.add_model_tags(["mine"])),
    "parameters in another order": (_nothing, _pruned_and_back),
}
