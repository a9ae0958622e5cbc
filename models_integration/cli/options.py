"""Options that several commands have."""

import re
from pathlib import Path
from typing import Annotated

import typer

from spec.errors import SpecError

__all__ = [
    "Address", "Again", "Attention", "Backend", "Bare", "BatchSize", "Budget", "Device", "Dtype", "Engine", "Figure",
    "Lengths", "Model", "Models", "Placements", "Prompt", "Results", "Seeds", "TableFile", "Tasks", "Workers",
    "names_of",
]

_YOURS = "For your own task write 'module:ATTRIBUTE' or the name of an entry point."

Model = Annotated[
    str,
    typer.Option(help="Model: 'pocket' or 'chat' (shipped with kvspec), 'smollm2' (run `kvspec models fetch smollm2`"
                 " first), or the folder, GGUF file or hub name of a transformers model."),
]
Models = Annotated[
    str, typer.Option("--models", "--model", help="Comma-separated models: 'pocket' or 'chat' (shipped with kvspec),"
                      " 'smollm2' (run `kvspec models fetch smollm2` first), or the folder, GGUF file or hub name of a"
                      " transformers model."),
]
Tasks = Annotated[
    str, typer.Option(help="Comma-separated tasks. `kvspec tasks` lists the names. needle(depth=0.5) sets a constant."
                       f" ruler-file:PATH reads the samples of a benchmark file. {_YOURS}"),
]
Lengths = Annotated[str, typer.Option("--lengths", "--length", help="Comma-separated context lengths in tokens.")]
Seeds = Annotated[str, typer.Option("--seeds", "--seed", help="Comma-separated random seeds of the samples.")]
Placements = Annotated[
    str, typer.Option("--placements", "--placement", help="Comma-separated positions of the question. 'after': the"
                      " model reads the question after eviction. 'in_prompt': the prompt contains the question, and the"
                      " model reads the last prompt token again after eviction. 'paper': the prompt contains the"
                      " question, and the full cache gives the first answer token."),
]
Bare = Annotated[
    bool, typer.Option("--bare", help="Do not apply the chat template of the tokenizer to the prompts.")
]
TableFile = Annotated[Path | None, typer.Option("--table", help="File to write the table to: .csv, or .tex for LaTeX.")]
Figure = Annotated[
    Path | None,
    typer.Option(help="File to write the figure to: .svg, .pdf or .png. Needs pip install 'kvspec\\[plots]'.")
]
Backend = Annotated[
    str, typer.Option(help="Backend that selects the tokens: auto, numpy, numba, torch, triton or 'module:ATTRIBUTE'.")
]
Device = Annotated[str, typer.Option(help="PyTorch device of the model, such as cpu, cuda or cuda:1.")]
Dtype = Annotated[
    str, typer.Option(help="dtype of the model: auto (as in the model file), float32, bfloat16, float16 or float64.")
]
Attention = Annotated[str, typer.Option("--attn", help="transformers attention implementation: auto, sdpa or eager.")]
BatchSize = Annotated[
    int, typer.Option(help="Number of compacted caches in a forward pass. The batch size does not change the answers.")
]

Workers = Annotated[
    int,
    typer.Option(help="Number of worker processes. To add workers, run the same command on machines that share --out.")
]
Engine = Annotated[
    str, typer.Option(help="Kind of workers: 'processes', or 'ray' for Ray actors. On cuda each actor uses one GPU.")
]
Address = Annotated[
    str, typer.Option(help="Address of a running Ray cluster. Default: start a Ray cluster on this machine.")
]
Budget = Annotated[
    str, typer.Option(help="Budget: a fraction of the prompt (0.3, 30%) or a number of tokens (512).")
]
Prompt = Annotated[Path, typer.Argument(metavar="PROMPT", help="Text file with the prompt.")]
Results = Annotated[
    Path, typer.Option(help="Folder for study.jsonl (one line per sample) and report.html. If a run was stopped, the"
                       " next run continues from study.jsonl.")
]
Again = Annotated[bool, typer.Option("--again", help="Run failed samples again. Finished samples are not run again.")]


def names_of(option: str, text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, each once; a comma inside brackets belongs to its part.

    Raises:
        SpecError: for a list of none.
    """
    names = tuple(dict.fromkeys(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()))
    if not names:
        raise SpecError(option, text, "must have at least one entry; separate entries by commas")
    return names
