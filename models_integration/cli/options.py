"""Options that several commands have."""

import re
from typing import Annotated

import typer

from spec.errors import SpecError

__all__ = [
    "Address", "Again", "Attention", "Backend", "BatchSize", "Device", "Dtype", "Engine", "Model", "Workers",
    "names_of",
]

Model = Annotated[
    str,
    typer.Option(help="'pocket' or 'chat' (shipped with kvspec), 'smollm2' (after `kvspec models fetch smollm2`), or a"
                 " transformers causal model by folder, GGUF file or hub name."),
]
Backend = Annotated[str, typer.Option(help="Whose code decides: auto, numpy, numba, triton, or 'module:ATTRIBUTE'.")]
Device = Annotated[str, typer.Option(help="Where the model runs, as PyTorch names it: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option(help="Of the model: auto (as it is stored), float32, bfloat16, float16, float64.")]
Attention = Annotated[str, typer.Option("--attn", help="How transformers computes attention: auto, sdpa, eager.")]
BatchSize = Annotated[
    int, typer.Option(help="Cells of one sample that are read side by side. It changes no kept token, and no answer.")
]

Workers = Annotated[
    int, typer.Option(help="Processes on this machine. The same command on others that share the folder joins them.")
]
Engine = Annotated[
    str, typer.Option(help="processes, or ray: the workers are then actors of Ray, with a GPU each where --device is.")
]
Address = Annotated[str, typer.Option(help="Of a Ray cluster that runs; without it, one is started on this machine.")]
Again = Annotated[bool, typer.Option("--again", help="Make again what failed; what is stored is never made again.")]


def names_of(option: str, text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, each once; a comma inside brackets belongs to its part.

    Raises:
        SpecError: for a list of none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()))
    if not names:
        raise SpecError(option, text, "must name at least one; several are separated by commas")
    return names
