"""The commands whose arguments another process reads: `kvspec verify` and `kvspec lm-eval`."""

from typing import Any

import typer
from typer.core import TyperCommand

__all__ = ["PassedOn", "lm_eval", "verify"]


class PassedOn(TyperCommand):
    """A command whose whole line is read by another process, `--` and `--help` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def verify(context: typer.Context) -> None:
    """Test your engine, policy or cache, and write a certificate. See kvspec verify --help."""
    from models_integration.cli.verify import run

    raise typer.Exit(run(context.args))


def lm_eval(context: typer.Context) -> None:
    """Run the command line of lm-evaluation-harness on a model that evicts tokens.

    Example: kvspec lm-eval run --model_args pretrained=pocket,policy=snapkv,budget=0.3 --tasks ...
    """
    from models_integration.studies.harness import command

    command(context.args)
