"""Options that several commands share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from spec.budget import parse_budget
from spec.errors import SpecError
from spec.validate import check_once

__all__ = [
    "Address", "Again", "Answers", "Attention", "Backend", "Bare", "BatchSize", "Budget", "Device", "Dtype", "Engine",
    "Figure", "Force", "Grade", "Lengths", "Model", "Models", "Placements", "Prompt", "Questions", "Results", "Seeds",
    "StudyResults", "TableFile", "Tasks", "Text", "Workers", "names_of",
]

_YOURS = "For your own task write 'module:ATTRIBUTE' or the name of an entry point."

_MODELS = (
    "'pocket', 'chat', 'smollm2', or a transformers model by its folder, GGUF file or hub name. kvspec ships 'pocket'"
    " and 'chat'. Before you use 'smollm2', run `kvspec models fetch smollm2`."
)

Model = Annotated[str, typer.Option(help=f"Model: {_MODELS}")]
Models = Annotated[str, typer.Option("--models", "--model", help=f"Models, separated by commas: {_MODELS}")]
Tasks = Annotated[
    str, typer.Option(help="Comma-separated tasks (`kvspec tasks` lists the names). Write needle(depth=0.5) to set a"
                       f" constant. Write ruler-file:PATH to use the samples of a benchmark file. {_YOURS}"),
]
Lengths = Annotated[str, typer.Option("--lengths", "--length", help="Comma-separated context lengths in tokens.")]
Seeds = Annotated[str, typer.Option("--seeds", "--seed", help="Comma-separated random seeds of the samples.")]
Placements = Annotated[
    str, typer.Option("--placements", "--placement", help="Comma-separated placements of the question: after,"
                      " in_prompt, paper. With 'after' the model processes the question after eviction. With"
                      " 'in_prompt' the prompt contains the question, and the model processes the last prompt token"
                      " again after eviction. With 'paper' the prompt contains the question, and the first answer token"
                      " is computed with the full cache."),
]
Bare = Annotated[
    bool, typer.Option("--bare", help="Do not apply the chat template of the tokenizer to the prompts.")
]
TableFile = Annotated[Path | None, typer.Option("--table", help="File for the table of results: .csv, or .tex for"
                                                                " LaTeX.")]
Figure = Annotated[
    Path | None,
    typer.Option(help="File for the figure: .svg, .pdf or .png. Figures need pip install 'kvspec[plots]'.")
]
Questions = Annotated[
    Path | None,
    typer.Option(help="CSV or JSONL file with your own questions, in the columns question and answer. Optional columns:"
                 " text, and evidence (a passage of the text).")
]
Text = Annotated[
    Path | None,
    typer.Option(help="Text file that the --questions are about. Default: the column text of the --questions.")
]
Grade = Annotated[
    str,
    typer.Option(help="Grade of answers to the --questions: contains, exact, f1 or regex. With 'contains' the model's"
                 " answer must contain the words of the answer. With 'exact' the words must be equal. With 'f1' the"
                 " score is F1 of the words. With 'regex' the answer is a regular expression."),
]
Answers = Annotated[
    Path | None,
    typer.Option(help="CSV file for the answers to the --questions: one row for each policy, budget and question."),
]
Backend = Annotated[
    str, typer.Option(help="Backend that selects the tokens to keep: auto, numpy, numba, torch, triton or"
                 " 'module:ATTRIBUTE'.")
]
Device = Annotated[str, typer.Option(help="PyTorch device of the model, such as cpu, cuda or cuda:1.")]
Dtype = Annotated[
    str, typer.Option(help="dtype of the model: auto (as in the model file), float32, bfloat16, float16 or float64.")
]
Attention = Annotated[str, typer.Option("--attn", help="Attention implementation of transformers: auto, sdpa or"
                                                       " eager.")]
BatchSize = Annotated[
    int, typer.Option(help="Number of compacted caches that share a forward pass. The batch size does not change the"
                 " answers of the model.")
]

Workers = Annotated[
    int,
    typer.Option(help="Number of worker processes on this machine. To use several machines, add --engine ray.")
]
Engine = Annotated[
    str, typer.Option(help="Kind of workers: 'processes', or 'ray' for Ray actors. With --device cuda each Ray actor"
                           " uses one GPU.")
]
Address = Annotated[
    str, typer.Option(help="Address of a running Ray cluster. Default: start a Ray cluster on this machine.")
]
Budget = Annotated[str, typer.Option(
    help="Budget: a fraction of the prompt (0.3, 30%), a number of tokens (512), or memory of the kept tokens (64MiB)."
)]
Prompt = Annotated[Path, typer.Argument(metavar="PROMPT", help="Text file with the prompt.")]
_RESULTS = typer.Option(
    help="Folder for the results: study.jsonl (one line per sample) and report.html. If a run was stopped, the next run"
    " continues from study.jsonl."
)
Results = Annotated[Path, _RESULTS]
StudyResults = Annotated[Path | None, _RESULTS]
Again = Annotated[bool, typer.Option("--again", help="Run failed samples again, but not finished samples.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file that kvspec did not make.")]


_DECIMAL_COMMA = re.compile(r"(?<![\d.])0,\d+%?")
_SPACED = re.compile(r"[A-Za-z][^\s:/]*( +[A-Za-z][^\s:/]*)+|[\d.]+%?( +[\d.]+%?)+")
"""Names, or numbers, that are separated by spaces. Memory such as 64 MiB, and paths, can contain spaces."""


def names_of(option: str, text: str) -> tuple[str, ...]:
    """Split a comma-separated list. Commas inside parentheses do not separate entries.

    Raises:
        SpecError: if the list is empty, has an entry twice, or has a decimal comma or entries separated by spaces.
    """
    if option == "budgets" and (decimal := _DECIMAL_COMMA.search(text)):
        parse_budget(decimal[0], option)
    names = tuple(part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip())
    if not names:
        raise SpecError(option, text, "must have at least one entry; separate entries by commas")
    for name in names:
        if option != "model" and _SPACED.fullmatch(bare := re.sub(r"\([^)]*\)", "", name)):
            raise SpecError(option, name, f"separate entries by commas: {','.join(bare.split())}")
    check_once(option, names)
    return names
