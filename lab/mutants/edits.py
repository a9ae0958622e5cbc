"""Edits of functions in this process: the edited source is compiled, and its code replaces the code of the function.

The function object stays the same, so all references to the function call the edited code.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any

from spec.errors import SpecError

ORIGINAL = "original"
"""Name under which edited source calls the unedited function."""


@dataclass(frozen=True)
class Edit:
    """Change of one function, given as `find` and `replace`, as `start`, or as `body`.

    Attributes:
        of: The function, as "module:name" or "module:Class.name".
        find: A fragment that occurs once in the source of the function.
        replace: The text that replaces `find`. If `find` is a single line, further lines get the indent of this line.
        start: Statements that run before the statements of the function.
        body: Statements that run instead of the statements of the function. They may call `original`.
    """

    of: str
    find: str = ""
    replace: str = ""
    start: str = ""
    body: str = ""

    def function(self) -> str:
        """Return the source of the edited function.

        Raises:
            SpecError: if `find` does not occur exactly once.
        """
        module = import_module(self.of.partition(":")[0])
        lines = _source(module).splitlines(keepends=True)
        first, begin, last = _span(module, self.of.partition(":")[2])
        head, body = "".join(lines[first:begin]), "".join(lines[begin:last])
        if self.find:
            if body.count(self.find) != 1:
                what = f"must occur once in {self.of}, not {body.count(self.find)} times"
                raise SpecError("find", self.find, what)
            before = body.partition(self.find)[0].rpartition("\n")[2]
            margin = "" if "\n" in self.find else before[: len(before) - len(before.lstrip(" "))]
            return head + body.replace(self.find, self.replace.replace("\n", f"\n{margin}"))
        indent = body[: len(body) - len(body.lstrip(" "))]
        return head + textwrap.indent(f"{self.start or self.body}\n", indent) + (body if self.start else "")

    def code(self) -> CodeType:
        """Compile the module with the edited function in it, and return the code of the function."""
        place, _, name = self.of.partition(":")
        module = import_module(place)
        lines, (first, _, last) = _source(module).splitlines(keepends=True), _span(module, name)
        source = "".join([*lines[:first], self.function(), *lines[last:]])
        return _code_named(compile(source, str(module.__file__), "exec", dont_inherit=True))[name]


@cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(_source(module))


def _span(module: ModuleType, name: str) -> tuple[int, int, int]:
    """Return the lines of a function: its `def`, its first statement after the docstring, and the end of its last."""
    node: Any = _tree(module)
    for part in name.split("."):
        result = [one for one in node.body if getattr(one, "name", None) == part]
        if not result:
            raise SpecError("of", f"{module.__name__}:{name}", "must name a function")
        node = result[-1]
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.lineno - 1, body[0].lineno - 1, node.end_lineno


def _code_named(code: CodeType) -> dict[str, CodeType]:
    """Return the code of each function and method of a module's code, by qualified name."""
    result: dict[str, CodeType] = {}
    for one in [one for one in code.co_consts if isinstance(one, CodeType)]:
        result[one.co_qualname] = one
        if "<locals>" not in one.co_qualname:
            result |= {name: code for name, code in _code_named(one).items() if "<locals>" not in name}
    return result


def function_of(place: str) -> FunctionType:
    """Return the function object that "module:Class.name" names, below all wrappers."""
    module, _, path = place.partition(":")
    result: Any = import_module(module)
    for part in path.split("."):
        result = vars(result)[part]
    result = _plain(result)
    if not isinstance(result, FunctionType):
        raise SpecError("of", place, "must name a function")
    return result


def _plain(value: Any) -> Any:
    """Return the function inside a property, class method or wrapper. Return any other value unchanged."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value


def replace_code(function: FunctionType, code: CodeType) -> None:
    """Replace the code of a function. Its module gets the unedited function under the name `original`."""
    right = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__,
    )
    right.__kwdefaults__ = function.__kwdefaults__
    function.__globals__[ORIGINAL] = right
    function.__code__ = code


@contextmanager
def replaced(edit: Edit) -> Iterator[None]:
    """Context manager that applies the edit to the function inside the block."""
    function, code = function_of(edit.of), edit.code()
    right = function.__code__
    replace_code(function, code)
    try:
        yield
    finally:
        function.__code__ = right
        function.__globals__.pop(ORIGINAL, None)  # another edit of the module has removed it
