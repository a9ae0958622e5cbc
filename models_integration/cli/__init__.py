"""The command `kvspec`."""

import sys
from typing import NoReturn

from models_integration.archive.errors import ArchiveError
from models_integration.model.errors import UnknownModel
from spec.errors import BackendUnavailable, SpecError

__all__ = ["main"]

# What the commands import, and the extra that brings it.
BROUGHT_BY = {
    "cryptography": "archive", "bm25s": "archive", "wordllama": "wordllama", "ray": "ray", "lm_eval": "lm-eval",
    "gguf": "weights", "matplotlib": "plots", "accelerate": "weights", "llama_cpp": "llamacpp",
} | dict.fromkeys(
    ("typer", "pytest", "hypothesis"), "conformance"
) | dict.fromkeys(
    ("torch", "transformers", "safetensors", "tokenizers", "rich", "tqdm", "pandas", "pandera"), "models"
)


def main() -> None:
    """Run the command; an input that is refused, and what is missing, is one line on stderr and exit code 2."""
    try:
        from models_integration.cli.app import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in BROUGHT_BY:
            raise
        _refuse(f"{missing} is missing; pip install 'kvspec[{BROUGHT_BY[missing]}]'")
    except (SpecError, BackendUnavailable, ArchiveError, UnknownModel, OSError) as error:
        _refuse(str(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for this
            raise
        _refuse(f"the device has no memory left; a smaller --batch-size or --length needs less: {error}")


def _refuse(reason: str) -> NoReturn:
    print("kvspec:", " ".join(reason.split()), file=sys.stderr)
    sys.exit(2)
