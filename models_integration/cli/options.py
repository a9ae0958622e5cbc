"""Options that several commands have."""

from typing import Annotated

import typer

__all__ = ["Model"]

Model = Annotated[
    str,
    typer.Option(help="'pocket' or 'chat' (shipped with kvspec), or a transformers causal model by path or hub name."),
]
