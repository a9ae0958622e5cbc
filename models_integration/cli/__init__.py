"""The command `kvspec`."""

import sys

from models_integration.archive.errors import ArchiveError
from models_integration.cli.app import app
from models_integration.model.errors import UnknownModel
from spec.errors import BackendUnavailable, SpecError

__all__ = ["main"]


def main() -> None:
    """Run the command; an input that the specification or an archive refuses is one line on stderr and exit code 2."""
    try:
        app()
    except (SpecError, BackendUnavailable, ArchiveError, UnknownModel) as error:
        print(f"kvspec: {error}", file=sys.stderr)
        sys.exit(2)
