"""Options that several commands have."""

import re
from pathlib import Path
from typing import Annotated

import typer

from spec.errors import SpecError

__all__ = [
    "Address", "Again", "Attention", "Backend", "Bare", "BatchSize", "Device", "Dtype", "Engine", "Figure", "Lengths",
    "Model", "Models", "Placements", "Seeds", "TableFile", "Tasks", "Workers", "names_of",
]

_YOURS = "Your own: 'module:ATTRIBUTE', or the name of an entry point."

Model = Annotated[
    str,
    typer.Option(help="Model: 'pocket' or 'chat' (shipped with kvspec), 'smollm2' (after `kvspec models fetch"
                 " smollm2`), or a folder, GGUF file or hub name."),
]
Models = Annotated[
    str, typer.Option("--models", "--model", help="Comma-separated: 'pocket' or 'chat' (shipped with kvspec), 'smollm2'"
                      " (after `kvspec models fetch smollm2`), or transformers causal models by folder, GGUF file or"
                      " hub name."),
]
Tasks = Annotated[
    str, typer.Option(help="Comma-separated names of `kvspec tasks`. needle(depth=0.5) sets a constant. ruler-file:PATH"
                       f" reads a file of a benchmark. {_YOURS}"),
]
Lengths = Annotated[str, typer.Option("--lengths", "--length", help="Context lengths in tokens, comma-separated.")]
Seeds = Annotated[str, typer.Option("--seeds", "--seed", help="Seeds of the samples, comma-separated.")]
Placements = Annotated[
    str, typer.Option("--placements", "--placement", help="Comma-separated positions of the question. 'after': after"
                      " the compaction. 'in_prompt': in the prompt, and the last token is read again. 'paper': in the"
                      " prompt, and the full cache gives the first answer token."),
]
Bare = Annotated[
    bool, typer.Option("--bare", help="Bare text, without the chat template that the tokenizer may have.")
]
TableFile = Annotated[Path | None, typer.Option("--table", help="File for the table: .csv, or .tex for LaTeX.")]
Figure = Annotated[
    Path | None, typer.Option(help="File for the figure: .svg, .pdf or .png (pip install 'kvspec\\[plots]').")
]
Backend = Annotated[
    str, typer.Option(help="Backend that selects the tokens: auto, numpy, numba, triton or 'module:ATTRIBUTE'.")
]
Device = Annotated[str, typer.Option(help="PyTorch device of the model: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option(help="dtype of the model: auto (as stored), float32, bfloat16, float16, float64.")]
Attention = Annotated[str, typer.Option("--attn", help="Attention implementation of transformers: auto, sdpa, eager.")]
BatchSize = Annotated[
    int, typer.Option(help="Batch size: cells of a sample per forward pass. Kept tokens and answers do not change.")
]

Workers = Annotated[
    int, typer.Option(help="Processes on this machine. The same command on a machine with this folder adds workers.")
]
Engine = Annotated[
    str, typer.Option(help="Kind of workers: 'processes', or 'ray' for actors of Ray. On cuda each actor has a GPU.")
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
