"""Triton's interpreter, which looks through `triton.language` anew at each call of a device function: once a launch."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["patch_once"]

LANGUAGES = (tl, tl.core)


def patch_once() -> None:
    """Have a launch replace the functions of each module once. The second replacement would be the same.

    A third of the interpreter's time goes. Versions of Triton that keep no record of a launch's replacements are left
    as they are.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set[Any]()

    def patch_new(function: Any) -> Any:
        seen = {one for one in LANGUAGES if any(value is one for value in function.__globals__.values())}
        if patched and seen <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:  # a launch begins, and ends with `restore`; those of device functions are not restored
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        patched.update(seen)
        return scope

    interpreter._patch_lang = patch_new
