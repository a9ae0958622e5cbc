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
    typer.Option(help="'pocket' or 'chat' (shipped with kvspec), 'smollm2' (after `kvspec models fetch smollm2`), or a"
                 " transformers causal model by folder, GGUF file or hub name."),
]
Models = Annotated[
    str, typer.Option("--models", "--model", help="Comma-separated: 'pocket' or 'chat' (shipped with kvspec), 'smollm2'"
                      " (after `kvspec models fetch smollm2`), or transformers causal models by folder, GGUF file or"
                      " hub name."),
]
Tasks = Annotated[
    str, typer.Option(help="Comma-separated: needle, delayed_association; for models of running text needle_in_prose,"
                      " keys_in_prose_4, delayed_association_in_prose, key_value_short, ... (kvspec tasks lists them);"
                      f" needle(depth=0.5) is one with a constant; ruler-file:PATH reads a benchmark's file. {_YOURS}"),
]
Lengths = Annotated[str, typer.Option("--lengths", "--length", help="Context tokens, comma-separated.")]
Seeds = Annotated[str, typer.Option("--seeds", "--seed", help="Seeds of the samples, comma-separated.")]
Placements = Annotated[
    str, typer.Option("--placements", "--placement", help="When the question is read, comma-separated: 'after' the"
                      " compaction; 'in_prompt', in the prompt, whose last token is then read again; 'paper', in the"
                      " prompt, which gives the answer's first token."),
]
Bare = Annotated[
    bool, typer.Option("--bare", help="Bare text, without the chat template that the tokenizer may have.")
]
TableFile = Annotated[Path | None, typer.Option("--table", help="File for the table: .csv, or .tex for LaTeX.")]
Figure = Annotated[
    Path | None, typer.Option(help="File for the figure: .svg, .pdf or .png (pip install 'kvspec[plots]').")
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
