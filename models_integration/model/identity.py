"""Which model this is: one record that saved caches, archived chunks, calibrations and rows of results carry."""

import copy
import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from numbers import Number
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models_integration.model.frequencies import keeps_frequencies, starting_frequencies
from models_integration.model.rotation import rotary_buffers
from spec.errors import SpecError

__all__ = ["ModelIdentity", "identify"]

CHUNK_BYTES = 1 << 24
"""How much of a tensor is on the host at a time."""

# Fields of a config that change no key, value or logit, beside those that begin with an underscore.
SILENT = frozenset({
    "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range",
    "label2id", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})
# Attributes of modules that loading, moving or reading changes, beside those of every module and of rotations.
BOOKKEEPING = frozenset({
    *vars(nn.Module()), "_hf_hook", "_is_hf_initialized", "_old_forward", "forward", "generate",
    "gradient_checkpointing", "hf_device_map", "name_or_path", "warnings_issued",
})
# Whose hooks compute nothing else, or only from parameters and buffers.
TRUSTED = frozenset({"accelerate", "models_integration", "torch", "transformers"})
DEEPEST = 6
"""Levels of an attribute's value that are read; a deeper value is refused."""


class _UnreadableError(Exception):
    """A value that has no description."""


@dataclass(frozen=True)
class _Unreadable:
    """In the place of a value's description: why there is none."""

    reason: str


@dataclass(frozen=True)
class ModelIdentity:
    """A model by all that its keys, its values and its answers come from, in parts: a refusal names what differs.

    It does not depend on the device, the folder, the kind of attention or the release of transformers. It does not
    cover the code of the model's classes, nor global variables. It is made once by who needs it, and
    handed on; nobody stores it for a model, whose values may change.
    """

    weights: str
    """sha256 of every parameter, and of every buffer but rotary frequencies: names, dtypes, shapes, bytes."""
    rotation_dtype: str
    """The dtypes of the rotary frequencies; `.to(bfloat16)` rounds them."""
    rotation: str
    """sha256 of every buffer of rotary frequencies that the model starts from, and of its factor."""
    config: str
    """sha256 of the model's class, its config, and all that its modules hold and the config would not have built:
    adapters with their scaling and switches, modules, constants and functions that were exchanged."""
    dtype: str
    """Of the keys and values that it computes."""

    @property
    def digest(self) -> str:
        """sha256 of all of the above, in hexadecimal."""
        return _sha(asdict(self))

    @property
    def unrotated(self) -> str:
        """sha256 of weights and config: whatever queries and keys come from before they are rotated."""
        return _sha([self.weights, self.config])

    def named(self, label: str) -> str:
        """A label with 16 digits of the digest: two models of one label have two names."""
        return f"{label}@{self.digest[:16]}"


def identify(model: PreTrainedModel) -> ModelIdentity:
    """The identity of a model; seconds for each gigabyte of parameters.

    Raises:
        SpecError: for a parameter or buffer without values (on the device "meta"); for a forward hook, or a `forward`
            of a module's own, which may change the answers and cannot be read; for an attribute that cannot be read.
    """
    _check_unhooked(model)
    frequencies = list(starting_frequencies(model))
    return ModelIdentity(
        _weights(model), ",".join(sorted({_plain(values.dtype) for _, values, _ in frequencies})),
        _rotation(frequencies), _sha([type(model).__name__, _stated(model.config), _unconfigured(model)]),
        _plain(model.dtype),
    )


def _weights(model: PreTrainedModel) -> str:
    rotating = {name for name, _ in rotary_buffers(model)}
    buffers = [
        (name, one) for name, one in model.named_buffers(remove_duplicate=False)
        if name not in rotating and not keeps_frequencies(model.get_submodule(name.rpartition(".")[0]), name)
    ]
    return _of_tensors([*sorted(model.named_parameters(remove_duplicate=False)), *sorted(buffers)])


def _of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of names and values; a tensor of several names is read once, and counts under each."""
    digest, read = hashlib.sha256(), dict[int, str]()
    for name, tensor in tensors:
        if id(tensor) not in read:
            read[id(tensor)] = _of_tensor(tensor, name)
        digest.update(json.dumps([name, read[id(tensor)]]).encode())
    return digest.hexdigest()


def _rotation(frequencies: Iterable[tuple[str, Tensor, float]]) -> str:
    return _sha([[name, _of_tensor(values, name), factor] for name, values, factor in frequencies])


def _stated(config: PretrainedConfig) -> object:
    """What a config says beyond the defaults of its class: a later release may add fields with a default."""
    try:
        defaults = type(config)().to_dict()
    except Exception:  # a class of the user's own, which needs arguments
        defaults = {}
    stated = config.to_dict()
    own = {key: value for key, value in stated.items() if key not in defaults or defaults[key] != value}
    return [type(config).__name__, _audible(own)]


def _audible(value: object) -> object:
    """A config's value as JSON, without the fields that change no answer."""
    if isinstance(value, Mapping):
        return {str(key): _audible(one) for key, one in value.items() if not _is_silent(str(key))}
    if isinstance(value, list | tuple):
        return [_audible(one) for one in value]
    try:
        return _Reader({}, {}).read(value)
    except _UnreadableError as error:
        _refuse_value("config", str(error))


def _is_silent(field: str) -> bool:
    return field in SILENT or field.startswith("_")


def _unconfigured(model: PreTrainedModel) -> list[object]:
    """Modules, and their attributes, that are not as the model's class makes them of its config; by name.

    Raises:
        SpecError: for such an attribute that cannot be read.
    """
    expected, modules = _configured(model), dict(model.named_modules(remove_duplicate=False))
    reader, theirs_reader = _Reader.of(modules), _Reader.of(expected)
    found: list[object] = [f"no {name}" for name in sorted(expected.keys() - modules.keys())]
    for name, module in modules.items():
        made = expected.get(name)
        if made is not None and type(made) is type(module):
            own, theirs = reader.attributes(module, private=False), theirs_reader.attributes(made, private=False)
            differ = {key: own.get(key) for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key)}
        else:
            differ = {"class": type(module).__qualname__, **reader.attributes(module, private=True)}
        for key, value in differ.items():
            if isinstance(value, _Unreadable):
                _refuse_value(f"{name}.{key}".strip("."), value.reason)
        if differ:
            found.append([name, differ])
    return [*found, *_foreign_attention(reader)]


def _configured(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that the model's class makes of its config, without values; none where it needs more than that."""
    config = copy.deepcopy(model.config)
    try:
        config._attn_implementation = "eager"
        with torch.device("meta"):
            return dict(type(model)(config).named_modules(remove_duplicate=False))
    except Exception:  # of code that is not ours
        return {}


@dataclass(frozen=True)
class _Reader:
    """Reads values of modules' attributes as JSON: the same for equal values in every process."""

    modules: Mapping[str, nn.Module]
    names: Mapping[int, str]
    stated: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> "_Reader":
        return cls(modules, {id(module): name for name, module in reversed(list(modules.items()))})

    def attributes(self, module: nn.Module, private: bool) -> dict[str, object]:
        padded = isinstance(module, nn.Embedding | PreTrainedModel)  # whose padding_idx changes gradients alone
        return {
            name: self._attribute(value) for name, value in vars(module).items()
            if name not in BOOKKEEPING and not (padded and name == "padding_idx")
            and not keeps_frequencies(module, name) and (private or not name.startswith("_"))
        }

    def _attribute(self, value: object) -> object:
        try:
            return self.read(value)
        except _UnreadableError as error:
            return _Unreadable(str(error))

    def read(self, value: object, levels: int = DEEPEST) -> object:
        """A value as JSON.

        Raises:
            _UnreadableError: for a value that is too deep, or of a kind that does not say what it holds.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Number | np.generic | bytes | torch.dtype | enum.Enum):
            return repr(value)
        if isinstance(value, GenerationConfig | ModuleType | torch.device | type):
            return _name_of(value)
        if isinstance(value, PretrainedConfig):
            if id(value) not in self.stated:  # most modules hold one config
                self.stated[id(value)] = _stated(value)
            return self.stated[id(value)]
        if isinstance(value, Tensor | np.ndarray):
            return _of_tensor(torch.as_tensor(value), None)
        if isinstance(value, nn.Module) and id(value) in self.names:
            return [type(value).__qualname__, self.names[id(value)]]
        if levels == 0:
            raise _UnreadableError(f"holds a {_name_of(value)} more than {DEEPEST} levels deep")
        return self._composed(value, levels - 1)

    def _composed(self, value: object, levels: int) -> object:
        if isinstance(value, Mapping):
            return {str(key): self.read(one, levels) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.read(one, levels) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(self.read(one, levels), sort_keys=True) for one in value)
        if isinstance(value, partial):
            return [self.read(one, levels) for one in (value.func, value.args, value.keywords)]
        if isinstance(value, nn.Module):
            return self._unregistered(value)
        if isinstance(value, FunctionType):
            return _name_of(value) if _is_known(value) else self._function(value, levels)
        if isinstance(value, CodeType):
            parts = (value.co_code.hex(), value.co_names, *value.co_consts)
            return [self.read(one, levels + 1) for one in parts]  # a function in a function is no deeper
        if isinstance(value, MethodType | BuiltinMethodType | MethodWrapperType):
            bound = (getattr(value, name, None) for name in ("__func__", "__self__"))
            return [_name_of(value), *(self.read(one, levels) for one in bound)]
        return self._object(value, levels)

    def _function(self, function: FunctionType, levels: int) -> object:
        """What a function does, and the values that it does it with."""
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError as error:
            raise _UnreadableError(f"holds {_name_of(function)}, which reads a variable without a value") from error
        values = (function.__code__, function.__defaults__, function.__kwdefaults__, cells, vars(function))
        return [_name_of(function), *(self.read(one, levels) for one in values)]

    def _object(self, value: object, levels: int) -> object:
        try:
            made = value.__reduce_ex__(2)
        except Exception as error:
            raise _UnreadableError(f"holds a {_name_of(value)}, which does not say what is in it") from error
        if isinstance(made, str):  # the name of a global one
            made = (made, getattr(value, "__dict__", None))
        parts = [list(one) if isinstance(one, Iterator) else one for one in made[1:]]
        return [_name_of(value), *(self.read(one, levels) for one in parts)]

    def _unregistered(self, module: nn.Module) -> object:
        """A module that is an attribute's value, and no part of the model by its parameters."""
        _check_unhooked(module)
        inner = dict(module.named_modules(remove_duplicate=False))
        reader = _Reader(inner, {**_Reader.of(inner).names, **self.names})
        attributes = {name: reader.attributes(one, private=True) for name, one in inner.items()}
        for value in (value for found in attributes.values() for value in found.values()):
            if isinstance(value, _Unreadable):
                raise _UnreadableError(value.reason)
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        values = [[name, _of_tensor(tensor, None)] for name, tensor in tensors]
        return [{name: type(one).__qualname__ for name, one in inner.items()}, attributes, values]


def _is_known(function: FunctionType) -> bool:
    """Whether a function is told by its name: one of a package whose code is not part of the identity."""
    inside = {"<locals>", "<lambda>"} & set(_name_of(function).split("."))
    return _is_trusted(function) and function.__closure__ is None and not inside


def _foreign_attention(reader: _Reader) -> list[object]:
    """Functions for attention and its masks that a config names and somebody else has registered."""
    found = set()
    for name, module in reader.modules.items():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        for registered in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            function = registered.get(kind) if isinstance(kind, str) else None
            if function is not None and not _is_trusted(function):
                try:
                    found.add(json.dumps([name, kind, reader.read(function)], sort_keys=True))
                except _UnreadableError as error:
                    _refuse_value(f"{name}.config._attn_implementation".strip("."), str(error))
    return list[object](sorted(found))


def _refuse_value(where: str, reason: str) -> NoReturn:
    raise SpecError(
        "model", where, f"{reason}: keep numbers, strings, tensors and modules there. If it changes no answer, make the"
        " identity without it and pass identity=..."
    )


def _name_of(value: object) -> str:
    """What a class or a function is called, or the class of anything else."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _of_tensor(tensor: Tensor, name: str | None) -> str:
    """sha256 of dtype, shape and values; without a name, a tensor may have none."""
    digest = hashlib.sha256()
    for part in [b"meta"] if tensor.is_meta and name is None else _described(name, tensor):
        digest.update(part)
    return digest.hexdigest()


def _check_unhooked(model: nn.Module) -> None:
    """Nothing but the modules' own code computes what the model says.

    Raises:
        SpecError: for a hook or a `forward` that somebody else has put there: its name would say nothing of its values.
    """
    everywhere = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    for hook in (hook for hooks in everywhere for hook in hooks.values()):
        _check_trusted(hook, "every module")
    for name, module in model.named_modules():
        where = name or type(model).__name__
        accelerated = getattr(module, "_hf_hook", None)
        own = [] if accelerated is None else getattr(accelerated, "hooks", [accelerated])
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *own):
            _check_trusted(hook, where)
        forward: Any = vars(module).get("forward" if accelerated is None else "_old_forward")
        forward = getattr(forward, "_torchdynamo_orig_callable", forward)
        if getattr(forward, "__func__", forward) not in (None, type(module).forward):
            _refuse_hook("a forward of its own", forward, where)


def _check_trusted(hook: Any, where: str) -> None:
    if not _is_trusted(hook):
        _refuse_hook("the forward hook", hook, where)


def _is_trusted(function: Any) -> bool:
    """Whether a function or an object is of a package whose code computes nothing else, and not only says so."""
    while isinstance(function, partial):
        function = function.func
    said = getattr(function, "__module__", None) or type(function).__module__
    homes = {said, getattr(function, "__globals__", {}).get("__name__", said)}  # functools.wraps copies what is said
    return {home.partition(".")[0] for home in homes} <= TRUSTED


def _refuse_hook(what: str, function: object, where: str) -> None:
    raise SpecError(
        "model", where, f"has {what}, {_name_of(function)}, which may change its answers: remove it. If it changes"
        " no answer, make the identity without it and pass identity=..."
    )


def _described(name: str | None, tensor: Tensor) -> Iterator[bytes | memoryview]:
    """What a tensor is like, then its bytes, a chunk at a time."""
    if tensor.is_meta:
        raise SpecError("model", name, "has no values: it must be loaded, not on the device meta")
    yield json.dumps([_plain(tensor.dtype), list(tensor.shape)]).encode()
    flat = tensor.detach().flatten()
    for part in torch.split(flat, CHUNK_BYTES // flat.element_size()):
        # Of no or one element, any stride is contiguous; a view as bytes wants 1.
        yield part.cpu().as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
