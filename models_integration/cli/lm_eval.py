"""`kvspec lm-eval`."""

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate

from models_integration.studies import harness

__all__ = ["run"]

_OTHER = ("ls", "validate")
"""Commands of lm-eval that run no model."""


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line, which knows our model by now."""
    chosen = "--model" in arguments or not arguments or arguments[0] in (*_OTHER, "-h", "--help")
    sys.argv = ["lm-eval", *arguments, *(() if chosen else ("--model", harness.NAME))]
    cli_evaluate()
