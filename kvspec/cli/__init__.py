"""The command `kvspec`."""

import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from models_integration.archive.errors import ArchiveError
from models_integration.model.errors import UnknownModel
from spec.errors import BackendUnavailable, SpecError
from spec.printing import end_of_reader, printable

__all__ = ["main"]

_STOPPED = 130
"""Exit code of a command that Ctrl-C has stopped."""
# Packages that commands import, each with the extra of kvspec that installs the package.
BROUGHT_BY = {
    "cryptography": "archive", "bm25s": "archive", "wordllama": "wordllama", "ray": "ray", "lm_eval": "lm-eval",
    "gguf": "weights", "matplotlib": "plots", "accelerate": "weights", "llama_cpp": "llamacpp",
    "math_verify": "math", "nltk": "locomo",
} | dict.fromkeys(
    ("typer", "pytest", "hypothesis"), "conformance"
) | dict.fromkeys(
    ("huggingface_hub", "pandas", "pandera", "regex", "rich", "safetensors", "tokenizers", "torch", "tqdm",
     "transformers"), "models"
)


def main() -> None:
    """Run the command. For an invalid input or a missing package, print one line on stderr and exit with code 2."""
    try:
        from kvspec.cli.app import app

        warnings.formatwarning = _one_line
        try:
            sys.exit(_ran(app))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(end_of_reader())
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in BROUGHT_BY:
            raise
        _refuse(f"{missing} is missing; pip install 'kvspec[{BROUGHT_BY[missing]}]'")
    except (SpecError, BackendUnavailable, ArchiveError, UnknownModel, OSError) as error:
        _refuse(str(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's error class; torch is not imported here
            raise
        _refuse(f"the device has no memory left; use a smaller --batch-size or --length: {error}")


def _ran(app: Callable[..., Any]) -> Any:
    """Run a command and return the exit code. For a wrong option or argument, print one line and exit."""
    import typer

    usage: type[Any] = typer.BadParameter.__mro__[1]  # click's UsageError; newer versions of typer contain click
    try:
        return app(prog_name="kvspec", standalone_mode=False)
    except usage as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        path = error.ctx.command_path if error.ctx else "kvspec"
        reason = error.format_message().rstrip(".")
        if "unexpected extra argument" in reason:
            reason += f"; {_hint(sys.argv[1:], error.ctx.command.params if error.ctx else ())}"
        _refuse(f"{reason}; {path} --help lists the options")
    except typer.Abort:
        sys.exit(_STOPPED)


def _hint(words: Sequence[str], parameters: Sequence[Any]) -> str:
    """Return what to type in place of a word that belongs to no option."""
    options = {name: one for one in parameters for name in one.opts}
    for word, value in pairwise(words):
        if word in options and value in options and not getattr(options[word], "is_flag", True):
            return f"type a value between {word} and {value}"
    if any(word.endswith(",") or word.startswith(",") for word in words):
        return "write a list without spaces beside the commas"
    return "put a value with spaces in quotes, and --option before the value of an option"


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Return a warning as one line, without the file and the line of source code that Python shows."""
    return f"warning: {printable(str(message))}\n"


def _refuse(reason: str) -> NoReturn:
    print("kvspec:", printable(reason), file=sys.stderr)
    sys.exit(2)
