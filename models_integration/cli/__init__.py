"""The command `kvspec`."""

import sys

from models_integration.archive.errors import ArchiveError
from models_integration.model.errors import UnknownModel
from spec.errors import BackendUnavailable, SpecError

__all__ = ["main"]

# What the commands import, and the extra that brings it.
BROUGHT_BY = {"typer": "conformance"} | dict.fromkeys(
    ("torch", "transformers", "safetensors", "tokenizers", "rich", "matplotlib"), "models"
)


def main() -> None:
    """Run the command; an input that the specification or an archive refuses is one line on stderr and exit code 2."""
    try:
        from models_integration.cli.app import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in BROUGHT_BY:
            raise
        print(f"kvspec: {missing} is missing; pip install 'kvspec[{BROUGHT_BY[missing]}]'", file=sys.stderr)
        sys.exit(2)
    except (SpecError, BackendUnavailable, ArchiveError, UnknownModel) as error:
        print(f"kvspec: {error}", file=sys.stderr)
        sys.exit(2)
