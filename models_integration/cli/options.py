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
    typer.Option(help="Model: 'pocket' or 'chat' (shipped with kvspec), 'smollm2' (after `kvspec models fetch"
                 " smollm2`), or a folder, GGUF file or hub name."),
]
Backend = Annotated[
    str, typer.Option(help="Backend that selects the tokens: auto, numpy, numba, triton or 'module:ATTRIBUTE'.")
]
Device = Annotated[str, typer.Option(help="PyTorch device of the model: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option(help="dtype of the model: auto (as stored), float32, bfloat16, float16, float64.")]
Attention = Annotated[str, typer.Option("--attn", help="Attention implementation of transformers: auto, sdpa, eager.")]
BatchSize = Annotated[
    int, typer.Option(help="Batch size: cells of one sample per forward pass. Kept tokens and answers do not change.")
]

Workers = Annotated[
    int, typer.Option(help="Processes on this machine. The same command on a machine with this folder adds workers.")
]
Engine = Annotated[
    str, typer.Option(help="Workers: processes, or ray for actors of Ray. With --device cuda each actor has a GPU.")
]
Address = Annotated[str, typer.Option(help="Address of a running Ray cluster. Default: start one on this machine.")]
Again = Annotated[bool, typer.Option("--again", help="Retry failed samples. Finished samples are never repeated.")]


def names_of(option: str, text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, each once; a comma inside brackets belongs to its part.

    Raises:
        SpecError: for a list of none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()))
    if not names:
        raise SpecError(option, text, "must name at least one; several are separated by commas")
    return names
