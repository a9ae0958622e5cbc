"""Code that somebody put onto a model: hooks, exchanged methods, and functions that are not a trusted package's."""

import sys
from collections.abc import Iterator
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from spec.errors import SpecError

__all__ = [
    "KEPT_AS", "check_hooks", "computing_hooks", "is_foreign", "is_known", "is_own_method", "name_of", "refuse_code",
]

# Whose code is told by its name: a release of these packages is not part of a model.
TRUSTED = sys.stdlib_module_names | {"accelerate", "models_integration", "numpy", "peft", "torch", "transformers"}
# Whose hooks watch, or move values, and come and go.
WATCHING = ("accelerate.", "models_integration.", "torch._dynamo.", "torch.distributed.", "transformers.")
# The hooks of accelerate that only move values; LayerwiseCastingHook computes in another dtype.
MOVING = {"ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"}
# Attributes in which torch and accelerate keep a method of another name.
KEPT_AS = {"_compiled_call_impl": "_call_impl", "_old_forward": "forward"}
# Of the flags of a class: it is written in Python, or like one.
HEAP = 1 << 9


def name_of(value: object) -> str:
    """What a class or a function is called, or the class of anything else."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def is_known(value: Any) -> bool:
    """Whether a class or a function is what a trusted package has under the name that it says."""
    if isinstance(value, type) and not value.__flags__ & HEAP:
        return True
    found: Any = sys.modules.get(str(value.__module__))
    for part in name_of(value).split("."):
        found = getattr(found, part, None)
    return found is value and not is_foreign(value)


def is_foreign(value: object) -> bool:
    """Whether anything that a callable is made of is code of no trusted package."""
    return any(home.partition(".")[0] not in TRUSTED for homes in _homes(value) for home in homes)


def _homes(value: Any) -> Iterator[set[str]]:
    """The modules of the functions and classes that a callable is made of: what each says, and where it was compiled.

    `functools.wraps` copies what a function says.
    """
    waiting, seen = [value], dict[int, object]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, partial):
            given = (*one.args, *one.keywords.values())
            waiting += [one.func, *(part for part in given if _is_code(part) or isinstance(part, nn.Module))]
        elif isinstance(one, MethodType | BuiltinMethodType):
            waiting += [getattr(one, "__func__", None), one.__self__]
        elif isinstance(one, FunctionType):
            yield {str(one.__module__), str(one.__globals__.get("__name__"))}
            waiting += filter(_is_code, (cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)))
        else:
            yield {str((one if isinstance(one, type) else type(one)).__module__)}


def _is_code(value: object) -> bool:
    return isinstance(value, partial | MethodType | FunctionType | type)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_own_method(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute is only the method that it hides: bound, compiled by torch, or wrapped by accelerate."""
    called = getattr(value, "func", value)
    if isinstance(called, FunctionType):
        home = str(called.__globals__.get("__name__"))
        if home == "accelerate.hooks" and isinstance(value, partial):
            return value.args == (module,)
        if home.startswith("accelerate."):
            return True
        if home.startswith("torch._dynamo."):
            value = getattr(value, "_torchdynamo_orig_callable", value)
    method = getattr(type(module), KEPT_AS.get(name, name), None)
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is method


def check_hooks(model: nn.Module) -> None:
    """Nothing but the modules' own code computes what the model says.

    Raises:
        SpecError: for a hook that somebody else has put there: its name would say nothing of its values.
    """
    everywhere = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    for hook in (hook for hooks in everywhere for hook in hooks.values()):
        _check_trusted(hook, "every module")
    for name, module in model.named_modules():
        where = name or type(model).__name__
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            _check_trusted(hook, where)
        moving = getattr(module, "_hf_hook", None)
        for hook in (moving, *getattr(moving, "hooks", ())):
            kind = type(hook)
            if hook is not None and not (is_known(kind) and kind.__name__ in MOVING and not _hidden(hook)):
                refuse_code("the forward hook", hook, where)


def _check_trusted(hook: object, where: str) -> None:
    if is_foreign(hook):
        refuse_code("the forward hook", hook, where)


def _hidden(value: object) -> list[str]:
    """The methods of an object's class that its attributes hide."""
    return [name for name in vars(value) if callable(getattr(type(value), name, None))]


def computing_hooks(module: nn.Module) -> list[object]:
    """The hooks that compute something, from what the module holds: legacy weight and spectral norm, pruning."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if not all(_is_watching(homes) for homes in _homes(hook))]


def _is_watching(homes: set[str]) -> bool:
    return any(f"{home}.".startswith(WATCHING) for home in homes)


def refuse_code(what: str, function: object, where: str) -> None:
    """Raise the error for code whose name says nothing of its values."""
    raise SpecError(
        "model", where, f"has {what}, {name_of(function)}, which may change its answers: remove it. If it changes no"
        " answer, make the identity without it and pass identity=..."
    )
