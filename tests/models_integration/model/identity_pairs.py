"""Pairs of models that differ in one field, value, module, type, order or registry, and answer differently.

Further changes change no answer.
"""

import copy
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.models_integration.archive.block_mask import LATENT
from tests.models_integration.session.families import SMALL, prepared

_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "initializer_range": 0.5,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "Qwen3Moe": _EXPERTS,
    "Gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, "Gemma3": {"head_dim": 8},
    "DeepseekV3": LATENT, "Roberta": {"is_decoder": True},
}

# Family, field, its two values.
FIELDS: list[tuple[str, str, Any, Any]] = [
    ("Llama", "hidden_act", "silu", "gelu"), ("Llama", "rms_norm_eps", 1e-6, 1e-1), ("Olmo", "clip_qkv", None, 0.1),
    ("Granite", "attention_multiplier", 1.0, 0.3), ("Mixtral", "num_experts_per_tok", 2, 1),
    ("GPTNeoX", "use_parallel_residual", True, False), ("Gemma2", "attn_logit_softcapping", 50.0, 0.5),
    ("Gemma2", "sliding_window", 4, 7), ("DeepseekV3", "routed_scaling_factor", 2.5, 1.0),
    ("Roberta", "pad_token_id", 1, 7),
]


class LoRA(nn.Module):
    """Adapter on a linear layer. Several kinds of attributes determine its effect."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(torch.ones(2, 32)), nn.Parameter(torch.ones(32, 2) * 0.1)
        self.alpha, self.settings = 1.0, SimpleNamespace(rank=2.0)
        self.scaling, self._active_adapter, self._disable_adapters = {"default": 1.0, "other": 3.0}, ["default"], False

    def forward(self, x: Tensor) -> Tensor:
        actual: Tensor = self.base(x)
        if self._disable_adapters:
            return actual
        scale: float = self.alpha / self.settings.rank * sum(self.scaling[name] for name in self._active_adapter)
        return actual + scale * (x @ self.a.T @ self.b.T)


class Holding(nn.Module):
    """Layer with a value. A function computes the output from both."""

    def __init__(self, base: nn.Module, value: Any, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.base, self.value, self.use = base, value, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.base(x), self.value)


def _through(x: Tensor, functions: list[Callable[[Tensor], Tensor]]) -> Tensor:
    return functions[0](x)


@wraps(nn.functional.relu)
def _decorated(x: Tensor) -> Tensor:
    return x * 3


# The decorator copies the name of `relu`, so the function gets back the name under which this module has it.
_decorated.__module__, _decorated.__qualname__ = __name__, "_decorated"


def _by_the_innermost(x: Tensor, settings: Any) -> Tensor:
    while isinstance(settings, list):
        settings = settings[0]
    return x * settings  # type: ignore[no-any-return]


class Times:
    """Factor in an object that has its fields in a dictionary."""

    def __init__(self, by: float) -> None:
        self.by = by

    def of(self, x: Tensor) -> Tensor:
        return x * self.by


class Slotted:
    """Factor in an object without a dictionary."""

    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


def make_model(family: str, **fields: Any) -> PreTrainedModel:
    """Return a family's tiny model. Fields that do not change shapes do not change the weights."""
    return prepared(family, **{**SMALL, **_FIELDS.get(family, {}), **fields})


Change = Callable[[Any], object]


def _exchanged(path: str, make: Change) -> Change:
    """Return a change that replaces a module or an attribute by the result of `make`."""
    holder, _, name = path.rpartition(".")

    def change(model: Any) -> None:
        where = model.get_submodule(holder)
        setattr(where, name, make(getattr(where, name)))

    return change


def _set(path: str, value: object) -> Change:
    return _exchanged(path, lambda _: value)


def _written(path: str) -> Change:
    """Return a change that writes different values into a tensor in place."""

    def change(model: Any) -> None:
        tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[path]
        with torch.no_grad():
            tensor.copy_(torch.linspace(-3, 3, tensor.numel()).view(tensor.shape))

    return change


def _nothing(model: Any) -> None:
    """Leave a model unchanged."""


_MLP, _UP, _ADAPTER = "model.layers.0.mlp", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def _closing_over(by: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        return x * by

    return scaled


def _holding(use: Callable[[Any, Any], Any], one: Any, other: Any) -> tuple[str, Change, Change]:
    """Return two models whose layers have a module with different values."""
    return "Llama", _exchanged(_UP, lambda base: Holding(base, one, use)), _set(f"{_UP}.value", other)


def _linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(48, 48)


def _tied(path: str, layer: int) -> Change:
    """Return a change that puts a part or parameter of an earlier layer into the last layer."""
    holder, _, name = path.rpartition(".")

    def tie(model: Any) -> None:
        last, earlier = (model.get_submodule(f"model.layers.{at}.{holder}".strip(".")) for at in (2, layer))
        setattr(last, name, getattr(earlier, name))

    return tie


def _four_layers(model: Any) -> None:
    """Append two layers that differ from all other layers."""
    torch.manual_seed(1)
    for at in (2, 3):
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
        model.model.layers[at].self_attn.layer_idx = at
    model.config.num_hidden_layers = 4
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _both(first: Change, second: Change) -> Change:
    return lambda model: (first(model), second(model))


def _dynamic(length: int) -> Change:
    """Return a change to frequencies that change after `length` tokens."""

    def change(model: Any) -> None:
        model.config.rope_parameters.update(rope_type="dynamic", factor=4.0)
        model.config.max_position_embeddings = length
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)

    return change


def _separate_rope(model: Any) -> None:
    """Give the rotation a separate config with a different factor."""
    rotation = model.model.rotary_emb
    rotation.config = copy.deepcopy(rotation.config)
    rotation.config.rope_parameters["factor"] = 90.0


def _plain_frequencies(model: Any) -> None:
    """Store the frequencies as an attribute that is no buffer."""
    rotation = model.model.rotary_emb
    frequencies = rotation.inv_freq
    del rotation.inv_freq
    rotation.inv_freq = frequencies.clone()


def _hot(module: nn.Module, *tensors: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, *tensors, **{**options, "scaling": (options.get("scaling") or 1) * 0.2})


def _attend_hot(model: Any) -> None:
    AttentionInterface.register("hot", _hot)
    model.config._attn_implementation = "hot"


_ON_ADAPTERS: dict[str, Change] = {
    "weights": _written(f"{_ADAPTER}.a"), "alpha": _set(f"{_ADAPTER}.alpha", 9.0),
    "scaling": lambda model: model.get_submodule(_ADAPTER).scaling.update(default=7.0),
    "rank, in an object": lambda model: vars(model.get_submodule(_ADAPTER).settings).update(rank=16.0),
    "active one": _set(f"{_ADAPTER}._active_adapter", ["other"]), "switch": _set(f"{_ADAPTER}._disable_adapters", True),
}
# Family, change of both models, and change of the second model alone.
CHANGES: dict[str, tuple[str, Change, Change]] = {
    "a weight": ("Llama", _nothing, _written(f"{_UP}.weight")),
    "a trained buffer": ("DeepseekV3", _nothing, _written("model.layers.1.mlp.gate.e_score_correction_bias")),
    "a buffer that no file holds": ("Gemma3", _nothing, _written("model.embed_tokens.embed_scale")),
    "frequencies": ("Llama", _nothing, _written("model.rotary_emb.inv_freq")),
    "another activation": ("Llama", _nothing, _set(f"{_MLP}.act_fn", nn.GELU())),
    "a norm's epsilon": ("Llama", _nothing, _set("model.norm.variance_epsilon", 5.0)),
    "a multiplier": ("Granite", _nothing, _set("model.embedding_multiplier", 2.0)),
    "experts of a token": ("Mixtral", _nothing, _set("model.layers.0.mlp.gate.top_k", 1)),
    "a norm left out": ("Llama", _nothing, _set("model.layers.0.input_layernorm", nn.Identity())),
    "a vector that steers": _holding(torch.add, torch.full((48,), 0.5), torch.full((48,), 0.9)),
    "an adapter": ("Llama", _nothing, _exchanged(_ADAPTER, LoRA)),
    **{
        f"an adapter's {name}": ("Llama", _exchanged(_ADAPTER, LoRA), change) for name, change in _ON_ADAPTERS.items()
    },
    **{
        f"of which layer is {path}": ("Llama", _both(_four_layers, _tied(path, 0)), _tied(path, 1))
        for path in ("mlp", "self_attn.q_proj", "mlp.up_proj.weight")
    },
    "arguments of a partial function": _holding(
        _through, *([partial(torch.mul, torch.tensor(by))] for by in (0.5, 2.0))
    ),
    "a module in a list": _holding(_through, [_linear(1)], [_linear(2)]),
    "a nested module in a list": _holding(
        _through, *([nn.Sequential(nn.Sequential(nn.Sequential(_linear(seed))))] for seed in (1, 2))
    ),
    "a decorated function": _holding(_through, [_decorated], [nn.functional.silu]),
    "frequencies that are no buffer": (
        "Llama", _plain_frequencies, lambda model: model.model.rotary_emb.inv_freq.mul_(0.3),
    ),
    "dynamic frequencies": ("Llama", _dynamic(40), lambda model: model.model.rotary_emb.inv_freq.mul_(0.3)),
    "a rotation's own config": ("Llama", _dynamic(20), _separate_rope),
    "an attention function": ("Llama", _nothing, _attend_hot),
}


def _steer(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output + 1


def _steer_before(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] + 1,)


# Changes that are refused, because the identity cannot read them.
HOOKS: dict[str, Change] = {
    "hook": lambda model: model.get_submodule(_UP).register_forward_hook(_steer),
    "hook on the whole": lambda model: model.model.norm.register_forward_hook(lambda *seen: _steer(*seen)),
    "hook before": lambda model: model.get_submodule(_UP).register_forward_pre_hook(_steer_before),
    "partial hook": lambda model: model.get_submodule(_UP).register_forward_hook(partial(_steer)),
    "forward": _exchanged(f"{_UP}.forward", lambda forward: lambda x: forward(x) + 1),
}

_KEEP = ".*: use only numbers, strings, tensors and modules"
# Values whose content cannot be read, and the error.
UNREADABLE: dict[str, tuple[Change, str]] = {
    "deep": (
        _exchanged(_UP, partial(Holding, value=[[[[[[[[0.5]]]]]]]], use=_by_the_innermost)),
        f"up_proj.value': holds a list more than 6{_KEEP}",
    ),
    "iterator": (
        _exchanged(_UP, partial(Holding, value=[(at for at in [0])], use=_through)),
        f"up_proj.value': holds a <genexpr>{_KEEP}",
    ),
    **{
        f"a {name}": (_exchanged(_UP, partial(Holding, value=[value], use=_through)), f"{reason}{_KEEP}")
        for name, value, reason in (
            ("closure", _closing_over(0.5), "holds a _closing_over.<locals>.scaled, which"),
            ("wrapped closure", wraps(nn.functional.silu)(_closing_over(0.5)), "holds a silu, which"),
            ("lambda", lambda x: x, "holds a <lambda>, which"),
            ("method", Times(0.5).of, "holds a Times.of, which"),
            ("method of a tensor", torch.tensor(0.5).mul, "holds a Tensor.mul, which"),
            ("slotted object", Slotted(0.5), "holds a Slotted, which"),
            ("class without a name", type("Kind", (), {"by": 0.5}), "has the class Kind, which is not in a module"),
        )
    },
    "a tensor of tensors": (
        lambda model: model.model.norm.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2)])),
        "'model.norm.ragged': the layout .* is not supported: convert the tensor",
    ),
    "no values": (lambda model: model.to("meta"), "has no values"),
}


def _read(model: Any) -> None:
    """Run forward passes with all optional outputs, and with a prompt beyond the first frequencies."""
    with torch.no_grad():
        model(torch.arange(3, 90)[None], output_hidden_states=True, output_attentions=True)
    model.generate(torch.arange(3, 9)[None], max_new_tokens=2)


def _loaded(model: PreTrainedModel) -> PreTrainedModel:
    """Save the model, rename the folder, and load it with a different attention implementation."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "one"))
        path = Path(folder, "one").rename(Path(folder, "other"))
        actual: PreTrainedModel = type(model).from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    return actual


def _accelerated(model: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model.model.norm, hooks.SequentialHook(hooks.ModelHook()))


# Changes that change no answer.
SAME: dict[str, Change] = {
    "copied": copy.deepcopy, "read": _read, "saved and loaded": _loaded,
    "wider and back": lambda model: model.to(torch.float64).to(torch.float32), "moved": lambda model: model.to("cpu"),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "flags": lambda model: model.config.__dict__.update(use_cache=False, output_hidden_states=True, eos_token_id=9),
    "training and back": lambda model: model.train().eval(),
    "frozen": lambda model: model.requires_grad_(False),
    "checkpointed": lambda model: [vars(part).update(gradient_checkpointing=True) for part in model.model.children()],
    "padded": lambda model: model.config.__dict__.update(pad_token_id=2),
    "renamed": lambda model: vars(model.config).update(_name_or_path="elsewhere"),
    "forward that is its own": _exchanged("model.forward", lambda forward: forward),
    "accelerated": _accelerated,
}


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
    "an object": _holding(_times, Times(0.5), Times(2.0)),
    **{
        f"an attribute called {name}": _named(name)
        for name in ("generate", "gradient_checkpointing", "_private", "my_inv_freq")
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
    "dropout in training": (_nothing, lambda model: make_model("Llama", attention_dropout=0.1)),
    "dropout stated later": (_nothing, lambda model: setattr(model.config, "attention_dropout", 0.1)),
    "generated with a static cache": (_nothing, _generated),
    "tagged": (_nothing, lambda model: model.add_model_tags(["mine"])),
    "parameters in another order": (_nothing, _pruned_and_back),
    "tied parts that become equal ones": (
        lambda model: setattr(model.get_submodule("model.layers.1.mlp"), "up_proj", model.get_submodule(_UP)),
        _exchanged("model.layers.1.mlp.up_proj", copy.deepcopy),
    ),
}
