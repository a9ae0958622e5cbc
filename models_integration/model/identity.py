"""Identity of a model, stored in saved caches, archived chunks, calibrations and rows of results."""

import copy
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models_integration.model.foreign_code import check_hooks, is_foreign, is_known
from models_integration.model.rotation import keeps_frequencies, rotary_buffers, starting_frequencies
from models_integration.model.seams import ATTENTION, EXPERTS, choose_attention
from models_integration.model.tensor_digest import digest_of_named, digest_of_tensor, plain
from models_integration.model.values import DROPOUT, Reader, Unreadable, UnreadableError, sha
from spec.errors import SpecError

__all__ = ["ModelIdentity", "identify"]

# Field of the config that contains the name of a function, for each table of functions.
REGISTRIES: tuple[tuple[str, Any], ...] = (
    (ATTENTION, ALL_ATTENTION_FUNCTIONS), (ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS),
    (EXPERTS, ALL_EXPERTS_FUNCTIONS),
)


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes of all parts of a model that determine its keys, values and answers. Errors name the part that differs.

    The identity does not depend on the device, the folder, the attention implementation, the way of loading or the
    generation config. The release of torch or transformers changes the identity only if the release renames an
    activation. The identity includes activations and replaced modules, also if a table (ACT2FN, attention, experts) has
    them under a name.

    The identity contains the names under which Python modules have classes and functions. It also contains the
    attributes of objects and the defaults of functions. kvspec refuses code without such a name, such as closures,
    lambdas, and methods of objects that are not part of the model. kvspec also refuses methods of a class that come
    from a different package. The identity does not include the code itself. If source code, attributes of classes,
    global variables or functions of Python modules are changed, the identity stays the same.

    The identity is not computed from answers to fixed tokens. Such answers depend on device, threads and attention
    implementation, rounding could change a hash of the answers, and some experts would not be used.

    Compute the identity once and pass it on. It is not stored in the model, because the values of a model can change.
    """

    weights: str
    """SHA-256 of names, dtypes, shapes and bytes of all parameters and of all buffers except rotary frequencies."""
    rotation_dtype: str
    """Dtypes of the rotary frequencies. (`.to(bfloat16)` rounds the frequencies.)"""
    rotation: str
    """SHA-256 of the initial rotary frequencies and of their factors."""
    config: str
    """SHA-256 of the model's class, the config, and all differences between the modules and the config: adapters
    (with scaling and switches), and replaced modules and constants."""
    dtype: str
    """Dtype of the keys and values that the model computes."""

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        return sha(asdict(self))

    @property
    def unrotated(self) -> str:
        """SHA-256 of weights and config, which determine queries and keys before RoPE."""
        return sha([self.weights, self.config])

    def named(self, label: str) -> str:
        """Return the label with 16 digits of the digest. Different models with the same label have different names."""
        return f"{label}@{self.digest[:16]}"


def identify(model: PreTrainedModel) -> ModelIdentity:
    """Return the identity of a model. The computation takes seconds per gigabyte of parameters.

    Raises:
        SpecError: if a parameter or buffer has no values (device "meta"), or if an attribute or its class cannot be
            read. Also if a module has a forward hook or a replaced `forward` of unknown effect.
    """
    check_hooks(model)
    frequencies = list(starting_frequencies(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    reader = Reader.of(modules)
    config = [type(model).__name__, reader.config(model.config), _unconfigured(model, modules, reader)]
    return ModelIdentity(
        _weights(model), ",".join(sorted({plain(values.dtype) for _, values, _ in frequencies})),
        _rotation(frequencies), sha([*config, _registered(modules, reader)]), plain(model.dtype),
    )


def _weights(model: PreTrainedModel) -> str:
    rotating = {name for name, _ in rotary_buffers(model)}
    buffers = [
        (name, one) for name, one in model.named_buffers(remove_duplicate=False)
        if name not in rotating and not keeps_frequencies(model.get_submodule(name.rpartition(".")[0]), name)
    ]
    return digest_of_named([*sorted(model.named_parameters(remove_duplicate=False)), *sorted(buffers)])


def _rotation(frequencies: Iterable[tuple[str, Tensor, float]]) -> str:
    return sha([[name, digest_of_tensor(values, name), factor] for name, values, factor in frequencies])


def _unconfigured(model: PreTrainedModel, modules: dict[str, nn.Module], reader: Reader) -> list[object]:
    """Return, by name, activations and all modules that differ from the modules that the config gives.

    Activations are always included, because the table of activations can be changed before the model is made.

    Raises:
        SpecError: if an attribute of such a module cannot be read.
    """
    expected = _configured(model)
    theirs_reader = Reader.of(expected)
    differences: list[object] = [f"no {name}" for name in sorted(expected.keys() - modules.keys())]
    for name, module in modules.items():
        configured, description = expected.get(name), reader.module(module)
        if isinstance(kind := description["class"], Unreadable):
            _refuse_value(name or type(model).__name__, kind.reason)
        if configured is not None and _is_of_its_class(module, configured):
            theirs = theirs_reader.module(configured)
            keys = {key for key in description.keys() | theirs.keys() if description.get(key) != theirs.get(key)}
            description = {key: description.get(key) for key in keys}
        for key, value in description.items():
            if isinstance(value, Unreadable):
                _refuse_value(f"{name}.{key.removeprefix('.')}".strip("."), value.reason)
        if description:
            differences.append([name, description])
    return differences


def _is_of_its_class(module: nn.Module, configured: nn.Module) -> bool:
    """Return True if an unchanged module can be left out: its class is trusted, and not selected from a table."""
    has_contents = module._parameters or module._buffers or module._modules or isinstance(module, DROPOUT)
    kind: Any = type(module)
    return bool(has_contents) and type(configured) is kind and is_known(kind) and not is_foreign(kind.forward)


def _configured(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that the model's class makes from the config, without values, or {} if this fails."""
    config = copy.deepcopy(model.config)
    try:
        choose_attention(config, "eager")
        for one in (config, config.get_text_config(decoder=True)):
            one.pad_token_id = 0  # a module that counts positions by this id is included
        with torch.device("meta"):
            return dict(type(model)(config).named_modules(remove_duplicate=False))
    except Exception:  # the model's code can raise anything
        return {}


def _registered(modules: dict[str, nn.Module], reader: Reader) -> list[object]:
    """Return functions for attention, masks and experts that the config names and untrusted code registered."""
    functions = set()
    for name, module in modules.items():
        for field, registry in REGISTRIES:
            kind = getattr(getattr(module, "config", None), field, None)
            function = registry.get(kind) if isinstance(kind, str) else None
            if function is not None and is_foreign(function):
                try:
                    functions.add(json.dumps([name, kind, reader.read(function)], sort_keys=True))
                except UnreadableError as error:
                    _refuse_value(f"{name}.config.{field}".strip("."), str(error))
    return list[object](sorted(functions))


def _refuse_value(where: str, reason: str) -> NoReturn:
    raise SpecError(
        "model", where, f"{reason}: use only numbers, strings, tensors and modules. If the value does not change the"
        " answers, compute the identity without the value, and pass identity=..."
    )
