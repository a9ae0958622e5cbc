"""Reading of .pt files of other projects. Code in a file is not executed, and a malicious file takes no time."""

import pickle
import pickletools
import zipfile
from os import PathLike
from typing import Any

import torch

from spec.files import ARCHIVE_ERRORS, check_unpacked

__all__ = ["load_torch_file"]

MOST_HASHED = 10**7
"""Largest number of items in all tuples of a file, where each use of a tuple counts again."""
_ERRORS = (
    OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError,
    pickle.UnpicklingError, *ARCHIVE_ERRORS,
)


def load_torch_file(path: str | PathLike[str]) -> Any:
    """Return the object in a file of `torch.save`, with tensors on the CPU.

    Raises:
        ValueError: if the file cannot be read, contains code, or contains tuples that take long to hash.
    """
    try:
        check_unpacked(path)
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise ValueError(f"it has {len(names)} files data.pkl")
            _check_tuples(archive.read(names[0]))
        return torch.load(path, map_location="cpu", weights_only=True)
    except _ERRORS as error:
        reason = "it contains code, which is not run" if "nsupported" in str(error) else str(error).split("\n")[0]
        raise ValueError(reason) from error


def _check_tuples(data: bytes) -> None:
    """Check the tuples of a pickle. A tuple of the same tuple twice, sixty times, has 2^60 items to hash.

    The items of a tuple are hashed again whenever the tuple becomes a key. The function runs the program of the pickle
    with the number of items in place of each object.

    Raises:
        ValueError: if the tuples have more than MOST_HASHED items, or if the bytes are no pickle.
    """
    stack, marks, memo, total = list[int](), list[int](), dict[int, int](), 0
    for code, argument, _ in pickletools.genops(data):
        if code.name == "MARK":
            marks.append(len(stack))
        elif code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif code.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif code.name == "DUP":
            stack.append(stack[-1])
        else:
            at = len(stack) - len(code.stack_before)
            if pickletools.markobject in code.stack_before:
                at = marks.pop() - code.stack_before.index(pickletools.markobject)
            items = stack[at:]
            del stack[at:]
            whole = "TUPLE" in code.name or code.name in ("REDUCE", "NEWOBJ", "BUILD", "FROZENSET")
            stack += [1 + sum(items) if whole else 1] * len(code.stack_after)
        total += stack[-1] if stack else 0
        if total > MOST_HASHED:
            raise ValueError(f"its tuples have more than {MOST_HASHED} items")
