"""Count bytes and host reads of a session under each policy, without a GPU: `python -m lab.measure.gpu.counts`.

A random Llama of 12 layers reads a prompt of 2 048 tokens at a budget of 0.3. The command prints two figures for each
policy, or for the named ones:

- the most bytes of keys and values in the cache after any layer has stored the prompt, relative to the full cache;
- the host reads of a prompt of 254 tokens and of a decode step, on an emulated device.
"""

import math
import sys
from collections import Counter
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)
from transformers import LlamaConfig, LlamaForCausalLM

from conformance.strategies.policy_inputs import random_gates, random_networks
from models_integration import RetainedCache, Session, calibrate, policy_from_name
from models_integration.cache.retained_cache import storage_bytes
from models_integration.session.method import Method
from reference.policies.names import BACKEND, POLICIES, constants_of, families_of
from spec.backend import resolve

# mypy: allow-untyped-calls


class _Hook(_DummyPrivateUse1Hook):
    """Hook that hides the emulated device from torch.accelerator, so that other code is not affected."""

    def is_available(self) -> bool:
        return False


class _Module(_DummyBackendModule):
    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


_setup_privateuseone_for_python_backend("emulated", _Module(), _Hook())
DEVICE, CPU = torch.device("emulated", 0), torch.device("cpu")
aten: Any = torch.ops.aten
_READS = {
    getattr(aten, name).default for name in (
        "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
        "unique_consecutive",
    )
} | {aten.repeat_interleave.Tensor}
"""Operators for which the host waits, because it needs the result or the shape of the result."""
_FREE = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten._unsafe_view.default}
_SCALARS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
_KVSPEC = ("models_integration", "accelerated", "reference", "spec")


Model = TypeVar("Model", bound=nn.Module)


class DeviceTensor(Tensor):
    """Tensor on the emulated device. `held` contains its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        created: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )
        created.held = held
        return created

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None,
    ) -> Any:
        with HostReads():
            return func(*args, **(kwargs or {}))

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory that contains the values."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """Return the values. The host waits for them."""
        return self.cpu().tolist()


class _Tensors(TorchFunctionMode):
    """Mode in which `torch.tensor` makes its result on the host and then copies it to the device.

    `torch.tensor` dispatches no operator, so `HostReads` alone does not see it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is not torch.tensor or torch.device(kwargs.get("device") or CPU).type != DEVICE.type:
            return function(*args, **kwargs)
        return torch.tensor(*args, **kwargs | {"device": CPU}).to(DEVICE)


class HostReads(TorchDispatchMode):
    """Mode that runs the operators of the emulated device, and counts host reads.

    A host read is an operation for which the host waits for the device. A copy of values to the device counts too,
    unless it is non-blocking.

    Attributes:
        counts: host reads, by the function of kvspec or transformers that waited.
    """

    held_on = CPU

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._tensors = _Tensors()

    def __enter__(self) -> "HostReads":
        self._tensors.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tensors.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        target = kwargs.get("device")
        inside = any(isinstance(one, DeviceTensor) for one in given)
        if not inside and (target is None or torch.device(target).type != DEVICE.type):
            return function(*args, **kwargs)
        self._check(function, given)
        written_on_host = function is aten.copy_.default and not isinstance(given[0], DeviceTensor)
        to_host = written_on_host or (target is not None and torch.device(target).type == "cpu")
        if "device" in kwargs:
            kwargs["device"] = CPU if to_host else self.held_on
        if (inside and (to_host or function in _READS or _masks(function, args))) or _waits(function, given, kwargs):
            self.counts[reader()] += 1
        wrappers = {id(one.held): one for one in given if isinstance(one, DeviceTensor)}
        result = self.calculate(function, *_held(args), **_held(kwargs))
        if to_host or function in _SCALARS:
            return result
        wrap = lambda one: wrappers[id(one)] if id(one) in wrappers else DeviceTensor(one)  # noqa: E731
        return tree_map_only(Tensor, wrap, result)

    @staticmethod
    def calculate(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator on the values of the tensors."""
        return function(*args, **kwargs)

    @staticmethod
    def _check(function: Any, given: list[Tensor]) -> None:
        mixed = any(one.ndim for one in given if not isinstance(one, DeviceTensor))
        if not mixed or function in _COPIES or not any(isinstance(one, DeviceTensor) for one in given):
            return
        if function not in _INDEXED or not isinstance(given[0], DeviceTensor):
            raise RuntimeError(f"{function}: expected all tensors to be on the same device")

    def of_kvspec(self) -> int:
        """Return the number of host reads since the last call, without those of transformers."""
        reads = sum(count for place, count in self.counts.items() if place.partition(".")[0] in _KVSPEC)
        self.counts.clear()
        return reads


class Work(TorchDispatchMode):
    """Mode that counts operators, and the bytes that operators read and write. Views and allocations do not count.

    The counts do not need values, so they can be made for tensors on the device "meta".

    Attributes:
        operators: number of operators. On a GPU, most of them are one kernel launch.
        bytes: bytes of all tensors that operators read or write. A part that is broadcast counts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function not in _FREE:
            self.operators += 1
            self.bytes += sum(_stored(one) for one in tree_iter((args, result)) if isinstance(one, Tensor))
        return result


def _stored(x: Tensor) -> int:
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


class Shapes(HostReads):
    """Mode for tensors without values. The host reads zeros, and all tensors are equal."""

    held_on = torch.device("meta")

    @staticmethod
    def calculate(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator on the shapes of the tensors."""
        if function in _SCALARS:
            return function is aten.equal.default
        if function is aten.copy_.default and not args[0].is_meta:
            return args[0].zero_()
        if function is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == CPU:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return function(*args, **kwargs)


def _held(values: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda one: one.held, values)


def _masks(function: Any, args: Any) -> bool:
    """Return True if a tensor is indexed by a mask, so that the length of the result depends on the mask's values."""
    if function not in _INDEXED:
        return False
    masked = any(isinstance(one, DeviceTensor) and one.dtype == torch.bool for one in args[1])
    return masked and (function is aten.index.Tensor or args[2].numel() > 1)


def _waits(function: Any, given: list[Tensor], kwargs: Any) -> bool:
    """Return True if values of the host are copied to the device in a blocking way, so that the host waits."""
    if function not in _COPIES | _INDEXED or kwargs.get("non_blocking"):
        return False
    return any(one.numel() and not isinstance(one, DeviceTensor) for one in given)


def reader() -> str:
    """Return the function of kvspec or transformers that is currently running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in (*_KVSPEC, "transformers"):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def on_device(model: Model) -> Model:
    """Move the parameters and buffers of a model to the device, and return the model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(DeviceTensor(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = DeviceTensor(buffer)
    return model


LAYERS, TOKENS, BUDGET, VOCABULARY = 12, 2_048, 0.3, 131
SHORT = 254
"""Tokens of the short prompt. The second step has seen 256 tokens, a multiple of 64 and of 128.

Policies that decide every 64 or 128 tokens therefore decide in this step.
"""
H_KV, D = 2, 16
TEMPLATE = ((5, 6, 7), (8, 9), (10,))


class Watched(RetainedCache):
    """Cache that records the maximum number of bytes in its layers."""

    most = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Update the cache as a RetainedCache, and record the number of bytes."""
        result = super().update(*args, **kwargs)
        self.most = max(self.most, storage_bytes(self.layers))
        return result


def deep_llama(layers: int = LAYERS) -> LlamaForCausalLM:
    """Return a Llama with two KV heads, in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=H_KV * D * 2, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=2 * H_KV, num_key_value_heads=H_KV, max_position_embeddings=2 * TOKENS,
    ))
    model.train(False)
    return model


def text(n: int = TOKENS) -> Tensor:
    """Return a prompt (1, n)."""
    return torch.randint(3, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(1))


def constants(name: str, model: LlamaForCausalLM) -> dict[str, Any]:
    """Return the arguments of the policy that have no default."""
    required = {"calibration", "sentence_ends", "template"} & constants_of(name)
    heads = model.config.num_key_value_heads or H_KV
    shape = (model.config.num_hidden_layers, heads, model.config.hidden_size)
    networks, gates = random_networks(*shape, 64), random_gates(*shape, model.config.num_attention_heads // heads)
    return {
        key: replace(calibrate(model, text(256), template=TEMPLATE, covariance=True), networks=networks, gates=gates)
        if key == "calibration"
        else {"template": TEMPLATE, "sentence_ends": frozenset(range(3, VOCABULARY, 9))}[key]
        for key in required
    }


@torch.no_grad()
def peak(name: str, model: LlamaForCausalLM) -> float:
    """Return the most bytes in the cache after any layer, relative to the full cache."""
    cache, ids = Watched(model.config), text()
    with policy_from_name(name, BUDGET, **constants(name, model))(model):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return cache.most / (2 * LAYERS * H_KV * D * ids.shape[1] * 4)


def method_on(name: str, model: LlamaForCausalLM) -> Method:
    """Return a policy for a model, with the backend torch if it has the stages, else with the reference."""
    has = all(getattr(resolve("torch"), one) is not None for one in families_of(name))
    backend = {"backend": "torch" if has else "numpy"} if BACKEND in constants_of(name) else {}
    return policy_from_name(name, BUDGET, **constants(name, model), **backend).on(model)


@torch.no_grad()
def host_reads(method: Method, model: LlamaForCausalLM, n: int = SHORT) -> tuple[list[Tensor], list[int], Session]:
    """Run a prompt of n tokens and two decode steps on the emulated device.

    Returns:
        Logits of the prompt's last token and of the steps, host reads of kvspec in each forward pass, and the session.
    """
    logits, counts = [], []
    with HostReads() as reads:
        session = Session(method, model)
        reads.counts.clear()
        ids, mask = DeviceTensor(text(n)), DeviceTensor(torch.ones(1, n + 2, dtype=torch.int64))
        with session:
            for step in range(3):
                given = {"input_ids": ids[:, -1:] if step else ids, "attention_mask": mask[:, : n + step]}
                output = model(**given, past_key_values=session.cache, logits_to_keep=1)
                logits.append(output.logits.cpu())
                counts.append(reads.of_kvspec())
    return logits, counts, session


def main(names: list[str]) -> None:
    """Print a row for each policy."""
    model, device = deep_llama(), on_device(deep_llama())
    print("| policy | peak / full cache | host reads, prompt | host reads, decode step |\n|---|---|---|---|")
    for name in names or POLICIES:
        _, counts, _ = host_reads(method_on(name, model), device)
        print(f"| {name} | {peak(name, model):.2f} | {counts[0]} | {max(counts[1:])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
