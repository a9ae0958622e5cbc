"""Commands `kvspec verify` and `kvspec lm-eval`, which pass all arguments on without parsing."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand

from spec.errors import SpecError

__all__ = ["PassedOn", "judge", "lm_eval", "run", "verify"]

OURS = ("spec", "reference", "accelerated", "conformance", "models_integration")


class PassedOn(TyperCommand):
    """Command that passes all arguments on without parsing, including `--` and `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def verify(context: typer.Context) -> None:
    """Test your engine, policy or cache, and write a certificate. See kvspec verify --help."""
    raise typer.Exit(run(context.args))


def lm_eval(context: typer.Context) -> None:
    """Run the command line of lm-evaluation-harness on a model that evicts tokens.

    Example: kvspec lm-eval run --model_args pretrained=pocket,policy=snapkv,budget=0.3 --tasks ...
    """
    from models_integration.studies.harness import command

    command(context.args)


def run(arguments: Sequence[str]) -> int:
    """Run `python -m conformance.verify` in the current folder, and return the exit code.

    Raises:
        ModuleNotFoundError: if pytest or hypothesis is not installed.
        SpecError: if a file or package in the current folder hides a package of kvspec.
    """
    for name in ("pytest", "hypothesis"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    for name in OURS:
        here, ours = PathFinder.find_spec(name, [os.getcwd()]), find_spec(name)
        if here is not None and here.origin is not None and (ours is None or not _same(here.origin, ours.origin)):
            reason = f"hides the package {name!r} of kvspec; rename the file, or start kvspec in a different folder"
            raise SpecError("folder", here.origin, reason)
    return judge([sys.executable, "-m", "conformance.verify", *arguments])


def judge(command: Sequence[str]) -> int:
    """Run a process and return the exit code. SIGTERM to this process also terminates the new process."""
    with subprocess.Popen(command) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def _same(here: str, ours: str | None) -> bool:
    return ours is not None and os.path.realpath(here) == os.path.realpath(ours)
