"""Which model this is: one record that saved caches, archived chunks, calibrations and rows of results carry."""

import copy
import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from models_integration.model.rotation import rotary_buffers, rotary_module, scaling_of
from models_integration.model.weights import CHANGING
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
# Attributes of modules that loading, moving or reading changes, beside those of every module and of frequencies.
BOOKKEEPING = frozenset({
    *vars(nn.Module()), "_hf_hook", "_is_hf_initialized", "_old_forward", "forward", "generate",
    "gradient_checkpointing", "hf_device_map", "name_or_path", "warnings_issued",
})
FREQUENCIES = ("inv_freq", "max_seq_len_cached")
# Whose hooks compute nothing else, or only from parameters and buffers.
TRUSTED = frozenset({"accelerate", "models_integration", "torch", "transformers"})
DEEPEST = 6
"""Levels of an attribute's value that are read."""


@dataclass(frozen=True)
class ModelIdentity:
    """A model by all that its keys, its values and its answers come from, in parts: a refusal names what differs.

    It does not depend on the device, the folder, the kind of attention or the release of transformers. It does not
    cover the code of the model's classes. It is made once by who needs it, and handed on; nobody stores it for a
    model, whose values may change.
    """

    weights: str
    """sha256 of every parameter, and of every buffer but rotary frequencies: names, dtypes, shapes, bytes."""
    rotation_dtype: str
    """The dtypes of the rotary frequencies; `.to(bfloat16)` rounds them."""
    rotation: str
    """sha256 of every buffer of rotary frequencies that the model starts from, and of its factor."""
    config: str
    """sha256 of the model's class, its config, and all that its modules hold and the config would not have built:
    adapters with their scaling and switches, modules and constants that were exchanged."""
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
            of a module's own, which may change the answers and cannot be read.
    """
    _check_unhooked(model)
    frequencies = list(_frequencies(model))
    return ModelIdentity(
        _weights(model), ",".join(sorted({_plain(values.dtype) for _, values, _ in frequencies})),
        _rotation(frequencies), _sha([type(model).__name__, _stated(model.config), _unconfigured(model)]),
        _plain(model.dtype),
    )


def _weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    buffers = [(name, one) for name, one in model.named_buffers() if not name.endswith("inv_freq") or one.dim() != 1]
    for name, tensor in (*sorted(model.named_parameters()), *sorted(buffers)):
        for part in _described(name, tensor):
            digest.update(part)
    return digest.hexdigest()


def _rotation(frequencies: Iterable[tuple[str, Tensor, float]]) -> str:
    digest = hashlib.sha256()
    for name, values, factor in frequencies:
        digest.update(json.dumps(factor).encode())
        for part in _described(name, values):
            digest.update(part)
    return digest.hexdigest()


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, float]]:
    """Name, frequencies and factor of each rotary buffer; those of before, where a long prompt exchanges them."""
    for name, buffer in sorted(rotary_buffers(model)):
        module, prefix, kind = rotary_module(model, name)
        changes = any(word in kind for word in CHANGING)
        start: Tensor = getattr(module, f"{prefix}original_inv_freq", buffer) if changes else buffer
        yield name, start, scaling_of(model, name)


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
    return [_audible(one) for one in value] if isinstance(value, list | tuple) else _jsonable(value)


def _is_silent(field: str) -> bool:
    return field in SILENT or field.startswith("_")


def _unconfigured(model: PreTrainedModel) -> list[object]:
    """Modules, and their attributes, that are not as the model's class makes them of its config; by name."""
    expected, modules = _configured(model), dict(model.named_modules())
    found: list[object] = [f"no {name}" for name in expected.keys() - modules.keys()]
    found.sort(key=str)
    for name, module in modules.items():
        made = expected.get(name)
        if made is not None and type(made) is type(module):
            own, theirs = _attributes(module, private=False), _attributes(made, private=False)
            differ = {key: own.get(key) for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key)}
        else:
            differ = {"class": type(module).__qualname__, **_attributes(module, private=True)}
        if differ:
            found.append([name, differ])
    return found


def _configured(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that the model's class makes of its config, without values; none where it needs more than that."""
    config = copy.deepcopy(model.config)
    try:
        config._attn_implementation = "eager"
        with torch.device("meta"):
            return dict(type(model)(config).named_modules())
    except Exception:  # of code that is not ours
        return {}


def _attributes(module: nn.Module, private: bool) -> dict[str, object]:
    return {
        name: _jsonable(value) for name, value in vars(module).items()
        if name not in BOOKKEEPING and not name.endswith(FREQUENCIES) and (private or not name.startswith("_"))
    }


def _jsonable(value: object, levels: int = DEEPEST) -> object:
    """A value as JSON: the same for equal values in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Number | np.generic | bytes | torch.dtype | enum.Enum):
        return repr(value)
    if levels == 0 or isinstance(value, nn.Module | PretrainedConfig | GenerationConfig):
        return type(value).__qualname__
    if isinstance(value, Tensor | np.ndarray):
        return _of_tensor(torch.as_tensor(value))
    if isinstance(value, Mapping):
        return {str(key): _jsonable(one, levels - 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(one, levels - 1) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_jsonable(one, levels - 1), sort_keys=True) for one in value)
    if isinstance(value, partial):
        return [_jsonable(one, levels - 1) for one in (value.func, value.args, value.keywords)]
    if hasattr(value, "__qualname__"):
        return _name_of(value)
    return [_name_of(value), _jsonable(getattr(value, "__dict__", None), levels - 1)]


def _name_of(value: object) -> str:
    """What a class or a function is called, or the class of anything else."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _of_tensor(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for part in [b"meta"] if tensor.is_meta else _described("", tensor):
        digest.update(part)
    return digest.hexdigest()


def _check_unhooked(model: PreTrainedModel) -> None:
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
    while isinstance(hook, partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    if home.partition(".")[0] not in TRUSTED:
        _refuse_hook("the forward hook", hook, where)


def _refuse_hook(what: str, function: object, where: str) -> None:
    raise SpecError(
        "model", where, f"has {what}, {_name_of(function)}, which may change its answers: remove it; if it changes"
        " nothing, make the identity before it is there, and give that (identity=...)"
    )


def _described(name: str, tensor: Tensor) -> Iterator[bytes | memoryview]:
    """What a tensor is called and like, then its bytes, a chunk at a time."""
    if tensor.is_meta:
        raise SpecError("model", name, "has no values: it must be loaded, not on the device meta")
    yield json.dumps([name, _plain(tensor.dtype), list(tensor.shape)]).encode()
    flat = tensor.detach().flatten()
    for part in torch.split(flat, CHUNK_BYTES // flat.element_size()):
        # Of no or one element, any stride is contiguous; a view as bytes wants 1.
        yield part.cpu().as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
