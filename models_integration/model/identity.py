"""Which model this is: one record that saved caches, archived chunks, calibrations and rows of results carry."""

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
from models_integration.model.tensor_digest import digest_of_named, digest_of_tensor, plain
from models_integration.model.values import DROPOUT, Reader, Unreadable, UnreadableError, sha
from spec.errors import SpecError

__all__ = ["ModelIdentity", "identify"]

# The tables of functions that a config names: in which field.
REGISTRIES: tuple[tuple[str, Any], ...] = (
    ("_attn_implementation", ALL_ATTENTION_FUNCTIONS), ("_attn_implementation", ALL_MASK_ATTENTION_FUNCTIONS),
    ("_experts_implementation", ALL_EXPERTS_FUNCTIONS),
)


@dataclass(frozen=True)
class ModelIdentity:
    """A model by all that its keys, its values and its answers come from, in parts: a refusal names what differs.

    It does not depend on the device, the folder, the kind of attention or how the model was loaded. It does not depend
    on the generation config, which changes no logits, or on the release of torch or transformers, unless a release
    renames an activation. Activations, exchanged modules and functions are read, also those that a table (ACT2FN,
    attention, experts) has under a name.

    Code of torch, transformers, accelerate, peft, numpy and Python is known by its name; other code by its bytecode,
    which another Python changes. So these are not covered: global variables that functions read, Python modules by
    more than their names, and who patches functions of these packages or torch itself.

    The structure decides, and no probe: the answers to fixed tokens depend on device, threads and kind of attention, a
    rounded answer may lie on either side of a step, and experts that the tokens do not reach would be missed.

    Compute it once and pass it on. It is not stored with a model, because the values of a model may change.
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
        return sha(asdict(self))

    @property
    def unrotated(self) -> str:
        """sha256 of weights and config: whatever queries and keys come from before they are rotated."""
        return sha([self.weights, self.config])

    def named(self, label: str) -> str:
        """A label with 16 digits of the digest: two models of one label have two names."""
        return f"{label}@{self.digest[:16]}"


def identify(model: PreTrainedModel) -> ModelIdentity:
    """The identity of a model; seconds for each gigabyte of parameters.

    Raises:
        SpecError: for a parameter or buffer without values (on the device "meta"); for a forward hook, or a `forward`
            of a module's own, which may change the answers and cannot be read; for an attribute that cannot be read.
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
    """Modules that are not as the model's class makes them of its config, and activations; by name.

    A table of activations may have been changed before the model was made, so these are always told.

    Raises:
        SpecError: for an attribute of such a module that cannot be read.
    """
    expected = _configured(model)
    theirs_reader = Reader.of(expected)
    found: list[object] = [f"no {name}" for name in sorted(expected.keys() - modules.keys())]
    for name, module in modules.items():
        made, own = expected.get(name), reader.module(module)
        if made is not None and _is_of_its_class(module, made):
            theirs = theirs_reader.module(made)
            own = {key: own.get(key) for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key)}
        for key, value in own.items():
            if isinstance(value, Unreadable):
                _refuse_value(f"{name}{key}".strip("."), value.reason)
        if own:
            found.append([name, own])
    return found


def _is_of_its_class(module: nn.Module, made: nn.Module) -> bool:
    """Whether what is as its class makes it need not be told: the class is known, and no table may have named it."""
    told = module._parameters or module._buffers or module._modules or isinstance(module, DROPOUT)
    kind: Any = type(module)
    return bool(told) and type(made) is kind and is_known(kind) and not is_foreign(kind.forward)


def _configured(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that the model's class makes of its config, without values; none where it needs more than that."""
    config = copy.deepcopy(model.config)
    try:
        config._attn_implementation = "eager"
        for one in (config, config.get_text_config(decoder=True)):
            one.pad_token_id = 0  # where a module counts positions by it, that is told
        with torch.device("meta"):
            return dict(type(model)(config).named_modules(remove_duplicate=False))
    except Exception:  # of code that is not ours
        return {}


def _registered(modules: dict[str, nn.Module], reader: Reader) -> list[object]:
    """Functions for attention, its masks and experts that a config names and somebody else has registered."""
    found = set()
    for name, module in modules.items():
        for field, registry in REGISTRIES:
            kind = getattr(getattr(module, "config", None), field, None)
            function = registry.get(kind) if isinstance(kind, str) else None
            if function is not None and is_foreign(function):
                try:
                    found.add(json.dumps([name, kind, reader.read(function)], sort_keys=True))
                except UnreadableError as error:
                    _refuse_value(f"{name}.config.{field}".strip("."), str(error))
    return list[object](sorted(found))


def _refuse_value(where: str, reason: str) -> NoReturn:
    raise SpecError(
        "model", where, f"{reason}: keep numbers, strings, tensors and modules there. If it changes no answer, make the"
        " identity without it and pass identity=..."
    )
