"""Detection of code that was added to a model: hooks, replaced methods, and functions from untrusted packages."""

import sys
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from spec.errors import SpecError

__all__ = [
    "KEPT_AS", "check_hooks", "computing_hooks", "home_of", "is_foreign", "is_known", "is_method_of_class", "is_named",
    "name_of", "patched_method", "refuse_code",
]

# Packages whose code is identified by name. The release of these packages is not part of a model's identity.
TRUSTED = sys.stdlib_module_names | {
    "accelerate", "huggingface_hub", "models_integration", "numpy", "peft", "torch", "transformers",
    "typing_extensions",
}
# Modules whose hooks only observe or move values.
WATCHING = ("accelerate.", "models_integration.", "torch._dynamo.", "torch.distributed.", "transformers.")
# Hooks of accelerate that only move values. (LayerwiseCastingHook computes in a different dtype.)
MOVING = {"ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"}
# Attributes with a method under a different name: torch 2.13 stores `module.compile()` in the first, and accelerate
# 1.15 stores the `forward` that it replaces in the second.
KEPT_AS = {"_compiled_call_impl": "_call_impl", "_old_forward": "forward"}
# Flag of a class that is written in Python or behaves like such a class.
HEAP = 1 << 9


def name_of(value: object) -> str:
    """Return the name of a class or function, or for any other value the name of its class."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def home_of(value: Any) -> str:
    """Return the name of the module of a class or function, without the folder of a model's own code.

    transformers 5 imports the code of a model as `transformers_modules.<folder>.<revision>.<file>`.
    """
    parts = str(value.__module__).split(".")
    return ".".join(parts[:1] + parts[2:] if parts[0] == "transformers_modules" else parts)


def is_named(value: Any) -> bool:
    """Return True if a module of Python contains this class or function under its stated name."""
    if isinstance(value, type) and not value.__flags__ & HEAP:
        return True
    if isinstance(value, BuiltinFunctionType):  # Functions of torch state no module (2.13).
        return value is getattr(sys.modules.get(value.__module__ or "torch"), value.__name__, None)
    named: Any = sys.modules.get(str(value.__module__))
    for part in name_of(value).split("."):
        named = getattr(named, part, None)
    return named is value


def is_known(value: Any) -> bool:
    """Return True if a trusted package contains this class or function under its stated name."""
    return is_named(value) and not is_foreign(value)


def patched_method(kind: type) -> str | None:
    """Return the name of a method of a class or its bases that comes from an untrusted package, or None."""
    for base in kind.__mro__:
        # Functions that attrs makes have no module ("None").
        trusted = TRUSTED | {base.__module__.partition(".")[0], "None"}
        for name, attribute in vars(base).items():
            held = (attribute, *(getattr(attribute, wrapped, None) for wrapped in ("fget", "fset", "func", "__func__")))
            functions = [one for one in held if isinstance(one, FunctionType)]
            homes = {home.partition(".")[0] for one in functions for homes in _homes(one) for home in homes}
            if not homes <= trusted:
                return name
    return None


def is_foreign(value: object) -> bool:
    """Return True if any part of a callable is code from an untrusted package."""
    return any(home.partition(".")[0] not in TRUSTED for homes in _homes(value) for home in homes)


def _homes(value: Any) -> Iterator[set[str]]:
    """Yield the modules of a callable's functions and classes: the stated module, and the module of the code.

    The two can differ, because `functools.wraps` copies the stated module.
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


def is_method_of_class(module: nn.Module, name: str, value: Any) -> bool:
    """Return True if an attribute is the class's own method: bound, compiled by torch, or wrapped by accelerate."""
    called = getattr(value, "func", value)
    if isinstance(called, FunctionType):
        home = str(called.__globals__.get("__name__"))
        if home == "accelerate.hooks" and isinstance(value, partial):
            return value.args == (module,)
        if home.startswith("accelerate."):
            return True
        # torch.compile of a bound method returns a function of torch that has the method in this attribute (2.13).
        if home.startswith("torch._dynamo."):
            value = getattr(value, "_torchdynamo_orig_callable", value)
    method = getattr(type(module), KEPT_AS.get(name, name), None)
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is method


def check_hooks(model: nn.Module) -> None:
    """Check that no hooks or replaced methods change the output of the model.

    Raises:
        SpecError: if a module has a hook from an untrusted package, because a name does not identify its values.
    """
    # torch 2.13 has functions that add hooks to all modules, but none that lists the hooks.
    everywhere = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    for hook in (hook for hooks in everywhere for hook in hooks.values()):
        _check_trusted(hook, "every module")
    for name, module in model.named_modules():
        where = name or type(model).__name__
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            _check_trusted(hook, where)
        # accelerate 1.15 registers no hook: it replaces `forward`, and stores its hook in this attribute.
        moving = getattr(module, "_hf_hook", None)
        for hook in (moving, *getattr(moving, "hooks", ())):
            kind = type(hook)
            if hook is not None and not (is_known(kind) and kind.__name__ in MOVING and not _hidden(hook)):
                refuse_code("the forward hook", hook, where)


def _check_trusted(hook: object, where: str) -> None:
    if is_foreign(hook):
        refuse_code("the forward hook", hook, where)


def _hidden(value: object) -> list[str]:
    """Return the names of the class's methods that attributes of the object hide."""
    return [name for name in vars(value) if callable(getattr(type(value), name, None))]


def computing_hooks(module: nn.Module) -> list[object]:
    """Return the hooks that compute values from the module's tensors: weight norm, spectral norm, pruning."""
    # torch 2.13 has no public list of the hooks of a module.
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if not all(_is_watching(homes) for homes in _homes(hook))]


def _is_watching(homes: set[str]) -> bool:
    return any(f"{home}.".startswith(WATCHING) for home in homes)


def refuse_code(what: str, function: object, where: str) -> None:
    """Raise the error for code that a name does not identify."""
    raise SpecError(
        "model", where, f"has {what}, {name_of(function)}, which may change the answers: remove the function. If the"
        " answers do not change, remove the function, compute the identity, and pass identity=..."
    )
