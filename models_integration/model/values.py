"""Description of values as JSON. Equal values have equal descriptions in every process, and different values differ."""

import enum
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from models_integration.model.foreign_code import (
    KEPT_AS,
    check_hooks,
    computing_hooks,
    home_of,
    is_foreign,
    is_known,
    is_method_of_class,
    is_named,
    name_of,
    patched_method,
    refuse_code,
)
from models_integration.model.rotation import keeps_frequencies
from models_integration.model.tensor_digest import digest_of_tensor
from spec.errors import SpecError

__all__ = ["DROPOUT", "Reader", "Unreadable", "UnreadableError", "sha"]

DEEPEST = 6
"""Largest number of nested levels that are read in a value. A deeper value raises an error."""

# Fields of a config, and attributes of known modules, that only training uses.
TRAINING = frozenset({
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "hidden_dropout",
    "hidden_dropout_prob", "neftune_noise_alpha", "output_router_logits", "resid_pdrop", "router_aux_loss_coef",
})
# Fields of a config that change no key, value or logit. Fields with a leading underscore also change none.
SILENT = TRAINING | frozenset({
    "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range",
    "label2id", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})
# Modules that compute nothing at inference.
DROPOUT = nn.modules.dropout._DropoutNd
# Attributes of every torch module. They are read elsewhere (tensors, parts, hooks) or do not change a forward pass.
OF_MODULES = frozenset(vars(nn.Module()))
OF_BUFFERS = frozenset(vars(nn.Buffer(torch.empty(0))))
# Attributes that transformers and accelerate set on modules at loading. `_hf_hook` is checked with the hooks.
OF_LOADING: dict[str, type] = {
    "_hf_hook": object, "_is_hf_initialized": bool, "gradient_checkpointing": bool,
    "_gradient_checkpointing_func": object,
}
# Attributes that transformers and accelerate set on a model for loading, resizing, generation and training.
OF_WHOLE = frozenset({
    "__getstate__", "_compiled_call", "_hf_peft_config_loaded", "_last_compile_config", "_loss_function",
    "_output_capturing_hooks_installed", "_previous_max_cache_length", "_require_grads_hook", "_require_grads_hooks",
    "_use_kernels", "_weight_conversions", "generate", "generation_config", "hf_device_map", "hf_quantizer",
    "init_continuous_batching", "is_parallelizable", "model_parallel", "model_tags", "name_or_path", "padding_idx",
    "vocab_size", "warnings_issued",
})


class UnreadableError(Exception):
    """Error for a value that cannot be described."""


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for the description of a value that cannot be described, with the reason."""

    reason: str


@dataclass(frozen=True)
class Reader:
    """Reader of modules and of the values of modules' attributes.

    Descriptions include types and order. Classes and functions are described by the name under which a module of Python
    has them. Other code, such as a closure, cannot be described.
    """

    names: Mapping[int, str]
    """Paths of the model's modules, by id."""
    configs: dict[int, object] = field(default_factory=dict)
    classes: dict[type, object] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> "Reader":
        return cls({id(module): name for name, module in reversed(list(modules.items()))})

    def module(self, module: nn.Module) -> dict[str, object]:
        """Return the description of a module without tensors. Values that cannot be read are `Unreadable`."""
        hooks = computing_hooks(module)
        set_by_hooks = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
        # A trusted layer accesses its parameters by name.
        parameters: Iterable[str] = () if is_known(type(module)) else module._parameters
        # `named_parameters` of torch 2.13 leaves out parameters that are None or have two names.
        description: dict[str, object] = {"class": type(module), "order": [*module._modules, "", *parameters]}
        if hooks:
            description["hooks"] = hooks
        for name, value in vars(module).items():
            is_described = name not in set_by_hooks and not _is_bookkeeping(module, name, value)
            if is_described and not self._is_method(module, name, value):
                description[f".{name}"] = value
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and _beside_values(tensor):
                description[f".{name}"] = _beside_values(tensor)
        return {name: self._attempt(value) for name, value in description.items()}

    def _is_method(self, module: nn.Module, name: str, value: object) -> bool:
        """Return True if an attribute is the class's own method.

        Raises:
            SpecError: if code from an untrusted package replaces a method.
        """
        if value is None or not (callable(getattr(type(module), name, None)) or name in KEPT_AS):
            return False
        if is_method_of_class(module, name, value):
            return True
        if is_foreign(value) and getattr(value, "__self__", None) is not module:
            refuse_code(f"a {name} of its own", value, self.names.get(id(module)) or type(module).__name__)
        return False

    def _attempt(self, value: object) -> object:
        try:
            return self.read(value)
        except UnreadableError as error:
            return Unreadable(str(error))

    def read(self, value: object, levels: int = DEEPEST) -> object:
        """Return a value as JSON.

        Raises:
            UnreadableError: if a value has too many levels, or if its type does not allow reading the contents.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (bytes, complex, Decimal, Fraction, torch.dtype):
            return [kind.__name__, repr(value)]
        if isinstance(value, GenerationConfig | torch.device):
            return [kind.__name__]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type):
            return self.class_of(value)
        if isinstance(value, PretrainedConfig):
            if id(value) not in self.configs:  # most modules refer to the same config
                self.configs[id(value)] = self.config(value)
            return self.configs[id(value)]
        if isinstance(value, Tensor):
            return ["tensor", digest_of_tensor(value, None), *self._read_all(_beside_values(value), levels)]
        if isinstance(value, nn.Module) and id(value) in self.names:
            return ["part", self.names[id(value)]]
        if isinstance(value, MethodType) and _is_of_class(value) and id(value.__self__) in self.names:
            return ["method", self.names[id(value.__self__)], value.__name__]
        if levels == 0:
            raise UnreadableError(f"holds a {name_of(value)} more than {DEEPEST} levels deep")
        return self._composed(value, levels - 1)

    def _read_all(self, values: Any, levels: int) -> list[object]:
        return [self.read(one, levels) for one in values]

    def _composed(self, value: Any, levels: int) -> object:
        kind = type(value)
        if isinstance(value, list | tuple | deque | range):
            return [self._label(kind), *self._read_all(value, levels), *self._attributes(value, levels)]
        if isinstance(value, dict | MappingProxyType):
            pairs = [self._read_all(pair, levels) for pair in value.items()]
            return [self._label(kind), *pairs, *self._attributes(value, levels)]
        if isinstance(value, set | frozenset):
            items = sorted(json.dumps(one, sort_keys=True) for one in self._read_all(value, levels))
            return [self._label(kind), *items, *self._attributes(value, levels)]
        if kind is slice:
            return ["slice", *self._read_all((value.start, value.stop, value.step), levels)]
        if isinstance(value, PurePath):
            return [kind.__name__, str(value)]
        if isinstance(value, np.generic | np.ndarray):
            return self._array(np.asarray(value), levels)
        if isinstance(value, enum.Enum):
            return ["enum", self.class_of(kind), self.read(value.value, levels)]
        if isinstance(value, nn.Module):
            return self._unregistered(value)
        if isinstance(value, FunctionType | BuiltinFunctionType) and is_named(value):
            has_defaults = isinstance(value, FunctionType) and not is_known(value)
            stated = [getattr(value, name) for name in ("__defaults__", "__kwdefaults__") if has_defaults]
            return [home_of(value), name_of(value), *self._read_all(stated, levels)]
        if kind is partial:
            return ["partial", *self._read_all((value.func, value.args, value.keywords), levels)]
        if _has_only_attributes(value):
            return [self.class_of(kind), *self._attributes(value, levels)]
        raise UnreadableError(f"holds a {name_of(value)}, which does not say what is in it")

    def _array(self, array: Any, levels: int) -> object:
        held = self.read(array.tolist(), levels) if array.dtype.hasobject else hashlib.sha256(array.tobytes())
        return ["array", array.dtype.str, list(array.shape), getattr(held, "hexdigest", lambda: held)()]

    def _attributes(self, value: object, levels: int) -> list[object]:
        return self._read_all([vars(value)] if getattr(value, "__dict__", None) else [], levels)

    def _label(self, kind: type) -> object:
        return kind.__name__ if kind in (list, tuple, dict, set, frozenset, OrderedDict) else self.class_of(kind)

    def _unregistered(self, module: nn.Module) -> object:
        """Return the description of a module that is the value of an attribute and not a submodule of the model."""
        check_hooks(module)
        inner = dict(module.named_modules(remove_duplicate=False))
        reader = replace(self, names={**Reader.of(inner).names, **self.names})
        parts = {name: reader.module(one) for name, one in inner.items()}
        for value in (value for description in parts.values() for value in description.values()):
            if isinstance(value, Unreadable):
                raise UnreadableError(value.reason)
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return ["own module", parts, [[name, digest_of_tensor(tensor, None)] for name, tensor in tensors]]

    def class_of(self, kind: type) -> object:
        """Return the description of a class, which is its name.

        Raises:
            UnreadableError: if no module of Python has the class under its name, or if a method was replaced.
        """
        if kind not in self.classes:
            if not is_named(kind) and is_foreign(kind):
                raise UnreadableError(f"has the class {name_of(kind)}, which is not in a module under this name")
            if (name := patched_method(kind)) is not None:
                raise UnreadableError(f"has the class {name_of(kind)}, whose method {name} is not from its package")
            # Torch makes classes at run time, such as those of parametrized layers, which differ in the bases.
            bases = [] if is_named(kind) else [self.class_of(base) for base in kind.__bases__]
            self.classes[kind] = [home_of(kind), name_of(kind), *bases]
        return self.classes[kind]

    def config(self, config: PretrainedConfig) -> object:
        """Return the values of a config that differ from the defaults, because a later release may add default fields.

        Raises:
            SpecError: if a value cannot be read.
        """
        try:
            defaults = type(config)().to_dict()
        except Exception:  # a user's class whose constructor needs arguments
            defaults = {}
        stated = config.to_dict()
        changed = {key: value for key, value in stated.items() if key not in defaults or defaults[key] != value}
        try:
            return [self.class_of(type(config)), self._audible(changed)]
        except UnreadableError as error:
            raise SpecError("model", "config", f"{error}: use only numbers, strings and lists in the config") from error

    def _audible(self, value: object) -> object:
        """Return a value of a config as JSON, without fields that change no answer."""
        if isinstance(value, Mapping):
            named = {str(key): one for key, one in value.items()}
            return {key: self._audible(one) for key, one in named.items() if not _is_silent(key)}
        return [self._audible(one) for one in value] if isinstance(value, list | tuple) else self.read(value)


def _is_of_class(method: MethodType) -> bool:
    """Return True if a bound method is the method of its object's class under its name."""
    return getattr(type(method.__self__), method.__name__, None) is method.__func__


def _has_only_attributes(value: object) -> bool:
    """Return True if attributes are all that an object has: it extends no type of C, and has no slots."""
    bases = [vars(base) for base in type(value).__mro__ if base is not object]
    in_python = all(isinstance(base.get("__new__", staticmethod(id)), staticmethod) for base in bases)
    plain = in_python and hasattr(value, "__dict__") and not any(base.get("__slots__") for base in bases)
    return plain or type(value) is SimpleNamespace


def _is_silent(field: str) -> bool:
    return field in SILENT or field.startswith("_")


def _is_bookkeeping(module: nn.Module, name: str, value: object) -> bool:
    whole = isinstance(module, PreTrainedModel) and name in OF_WHOLE
    gradients = isinstance(module, nn.Embedding) and name == "padding_idx"  # not used in a forward pass
    training = is_known(type(module)) and (name in TRAINING or (name == "p" and isinstance(module, DROPOUT)))
    silent = name in OF_MODULES or _is_of_loading(name, value) or keeps_frequencies(module, name)
    return whole or gradients or training or silent


def _is_of_loading(name: str, value: object) -> bool:
    return name in OF_LOADING and isinstance(value, OF_LOADING[name])


def _beside_values(tensor: Tensor) -> list[object]:
    """Return the class and the attributes of a tensor subclass, such as the scales of quantised values."""
    attributes = {
        name: value for name, value in vars(tensor).items()
        if name not in OF_BUFFERS and not _is_of_loading(name, value) and not name.startswith("_dynamo_")
    }
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return [] if plain and not attributes else [type(tensor), attributes]


def sha(parts: object) -> str:
    """Return the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
