"""Commands and their options; the work is in modules of their own, imported when a command runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from models_integration.cli.archive import archive
from models_integration.cli.models import models
from models_integration.cli.options import (
    Address,
    Again,
    Attention,
    Backend,
    Bare,
    BatchSize,
    Device,
    Dtype,
    Engine,
    Figure,
    Lengths,
    Model,
    Models,
    Placements,
    Seeds,
    TableFile,
    Tasks,
    Workers,
    names_of,
)
from models_integration.cli.paper import paper
from spec import SPEC_VERSION

__all__ = ["app"]

_YOURS = "Your own: 'module:ATTRIBUTE', or the name of an entry point."

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    help="Evict tokens from the KV cache of transformers models, compare policies, and judge implementations.",
)

app.add_typer(archive, name="archive")
app.add_typer(models, name="models")
app.command()(paper)

_OUT = "Folder for study.jsonl (one line per sample) and report.html. A stopped run continues from study.jsonl."

_OF_GRIDS = ("grid", "budget", "tasks", "length", "samples", "seed", "model")
"""Options of a sweep over parameters; a file of rules has its own."""


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
    name: Annotated[str, typer.Argument(help="Name of a policy: print paper, constants and an example call.")] = "",
) -> None:
    """List the policies, with kept tokens, passes over the prompt, peak memory and supported uses."""
    from models_integration.cli.policies import show_policies, show_policy

    if name:
        show_policy(name)
    else:
        show_policies()


@app.command()
def tasks() -> None:
    """List the tasks, with question, metric, source of the contexts, placements and constants."""
    from models_integration.cli.policies import show_tasks

    show_tasks()


@app.command()
def compare(
    policies: Annotated[
        str,
        typer.Option(help="Comma-separated names of `kvspec policies`. snapkv(W=16) sets a constant. diverse-NAME adds"
                     f" set-conditioned selection. h2o@prompt evicts after the prompt only. {_YOURS}"),
    ] = "crystalcache,streamingllm,fullcache",
    budgets: Annotated[
        str, typer.Option(help="Comma-separated budgets: fractions (0.3, 30%) or numbers of tokens (512).")
    ] = "0.3,0.5",
    tasks: Tasks = "needle,delayed_association", length: Lengths = "1024",
    samples: Annotated[int, typer.Option(help="Samples per cell and seed.")] = 20,
    seed: Seeds = "42", placement: Placements = "after",
    controls: Annotated[bool, typer.Option(help="Also run controls: kept sets that must answer or must fail.")] = True,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file of the model, written by kvspec calibrate.")
    ] = None,
    write_rules: Annotated[
        Path | None, typer.Option(help="Rules file to write from these options, without a run.")
    ] = None,
    model: Models = "pocket", bare: Bare = False, backend: Backend = "auto", device: Device = "cpu",
    dtype: Dtype = "auto", attn: Attention = "auto", batch_size: BatchSize = 12, workers: Workers = 1,
    engine: Engine = "processes", address: Address = "", again: Again = False, table: TableFile = None,
    figure: Figure = None, out: Annotated[Path, typer.Option(help=_OUT)] = Path("results"),
) -> None:
    """Compare policies at several budgets on tasks, print tables and write a page. A second run skips stored results.

    Each policy scores the prompt of a sample once, for all budgets. Every policy gets the same budget.
    Exit code 1 if a control fails, because then the comparison does not measure retention.

    --write-rules writes the options as a rules file for kvspec sweep and study.
    """
    from models_integration.cli.compare import study_of

    study = study_of(
        "Comparison", names_of("policies", policies), budgets, tasks, length, samples, seed, placement, model,
        controls=controls, bare=bare, calibration=str(calibration.resolve()) if calibration else "",
    )
    if write_rules is not None:
        from models_integration.cli.compare import save_rules

        save_rules(study, write_rules)
        return
    from models_integration.cli.study import Running, run
    from models_integration.studies.evidence.rules import rules_of
    from models_integration.studies.subject import Loading
    from models_integration.studies.workers import Launch

    rules, running = rules_of(**study), Running(out, batch_size=batch_size, again=again, table=table, figure=figure)
    with Launch(workers, engine, address).started(out, device):
        run(rules, Loading("", backend, device, dtype, attn), running)


@app.command()
def demo(
    model: Model = "pocket",
    samples: Annotated[int, typer.Option(help="Samples per cell. Fewer are faster and less certain.")] = 20,
    backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    batch_size: BatchSize = 12, out: Annotated[Path, typer.Option(help=_OUT)] = Path("results"),
) -> None:
    """Compare CrystalCache, StreamingLLM and the full cache on the pocket model, with controls.

    This is `kvspec compare` without options. It takes a minute on two CPU cores and downloads nothing. Models other
    than the pocket models are asked for facts in running text.
    """
    shipped = "the small model that comes with kvspec" if model == "pocket" else f"the model {model}"
    print(
        f"kvspec demo: three policies on {shipped}, and controls that show that the tasks measure retention.\n"
        f"{'About a minute on two CPU cores; nothing' if model == 'pocket' else 'Nothing'} is downloaded. Results go to"
        f" {out}, and a second run goes on from there.", flush=True,
    )
    from models_integration.cli.compare import study_of
    from models_integration.cli.study import Running, run
    from models_integration.studies.evidence.rules import rules_of
    from models_integration.studies.subject import SHIPPED, Loading

    asked = "needle,delayed_association" if model in SHIPPED else "needle_in_prose,keys_in_prose_2"
    policies = ("crystalcache", "streamingllm", "fullcache")
    study = study_of(
        "Demo", policies, "0.3,0.5", asked, "1024", samples, "42", "after", model, controls=True, bare=False
    )
    run(rules_of(**study), Loading("", backend, device, dtype, attn), Running(out, batch_size=batch_size))


@app.command()
def sweep(
    context: typer.Context,
    rules: Annotated[
        Path | None,
        typer.Argument(metavar="SWEEP.toml", help="File of models, policies, budgets and tasks, as for kvspec study."),
    ] = None,
    grid: Annotated[
        str, typer.Option(help="Parameters: appendix-a (T_max, s, alpha) or extensions (essay, tiers, coverage, ...).")
    ] = "appendix-a",
    budget: Annotated[str, typer.Option(help="Budget: a fraction (0.3, 30%) or a number of tokens (512).")] = "0.3",
    tasks: Tasks = "needle,delayed_association", length: Lengths = "1024",
    samples: Annotated[int, typer.Option(help="Samples per variant and task, equal for all variants.")] = 10,
    seed: Seeds = "42", model: Models = "pocket", bare: Bare = False, backend: Backend = "auto",
    device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto", batch_size: BatchSize = 12,
    workers: Workers = 1, engine: Engine = "processes", address: Address = "", again: Again = False,
    table: TableFile = None, figure: Figure = None,
    status: Annotated[
        Path | None, typer.Option(help="Print the progress of all runs in this folder and exit.")
    ] = None,
    out: Annotated[Path, typer.Option(help=_OUT)] = Path("results"),
) -> None:
    """Run all cells of SWEEP.toml on all contexts. Without a file, vary one parameter of CrystalCache at a time.

    With the defaults this takes a minute on two CPU cores. A second run skips stored results.
    """
    if status is not None:
        from models_integration.studies.status import status as lines

        for line in lines(status):
            print(line)
        return
    from models_integration.cli.checks import check_defaults
    from models_integration.cli.compare import GRIDS, study_of
    from models_integration.cli.study import Running, run
    from models_integration.studies.evidence.rules import load_rules, rules_of
    from models_integration.studies.subject import Loading
    from models_integration.studies.workers import Launch
    from spec.validate import check_choices

    running = Running(out, batch_size=batch_size, again=again, table=table, figure=figure)
    if rules is None:
        check_choices("grid", (grid,), GRIDS)
        made = rules_of(**study_of(
            f"Grid {grid}", GRIDS[grid], budget, tasks, length, samples, seed, "after", model, controls=False, bare=bare
        ))
    else:
        check_defaults(context, _OF_GRIDS, rules)
        made, running = load_rules(rules), replace(running, file=rules)
        made = replace(made, bare=made.bare or bare)
    with Launch(workers, engine, address).started(out, device):
        run(made, Loading("", backend, device, dtype, attn), running)


@app.command()
def study(
    rules: Annotated[Path | None, typer.Option(help="TOML file with claims, model, tasks, policies, budgets.")] = None,
    out: Annotated[Path | None, typer.Option(help=_OUT)] = None,
    part: Annotated[str, typer.Option(help="Contexts: dev (a fifth), then confirm (for claims), or all.")] = "dev",
    audit: Annotated[Path | None, typer.Option(help="Folder of studies: print if git has rules before rows.")] = None,
    bare: Bare = False, batch_size: BatchSize = 12, device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", workers: Workers = 1, engine: Engine = "processes", address: Address = "",
    again: Again = False, table: TableFile = None, figure: Figure = None,
) -> None:
    """Measure kept evidence, likelihood of the gold answer, attention on evicted keys and answers, and decide claims.

    Each policy scores the prompt of a sample once, for all budgets. A second run continues a stopped one. A task is a
    name, 'module:ATTRIBUTE', or a file of a benchmark as 'KIND:PATH'. The kinds are ruler-file, ruler-lm-eval-file,
    scbench-file, scbench-turns-file, longbench-file, loogle-file, infinitebench-file and math-file.

    If the rules have claims, commit the rules and the calibration, run dev, and run confirm last.
    """
    from models_integration.cli.study import Running, print_audit, run
    from models_integration.studies.evidence.rules import load_rules
    from models_integration.studies.subject import Loading
    from models_integration.studies.workers import Launch

    if audit is not None:
        print_audit(audit)
        return
    if rules is None or out is None:
        missing = "'--rules'" if rules is None else "'--out'"
        raise typer.BadParameter("is needed: give --rules and --out, or --audit", param_hint=missing)
    made = load_rules(rules)
    made, loading = replace(made, bare=made.bare or bare), Loading("", device=device, dtype=dtype, attn=attn)
    running = Running(out, part, batch_size, again, rules, table, figure)
    with Launch(workers, engine, address).started(out, device):
        run(made, loading, running)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of results, --out of compare or study.")],
    rules: Annotated[
        list[Path] | None, typer.Option(help="Rules file of a study in the folder, for claims and stages. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Page to write. Default: report.html in the folder.")] = None,
    table: TableFile = None, figure: Figure = None,
) -> None:
    """Write the page of a folder of results: one file that any browser opens without network.

    The page begins with claims and the best policy by task and budget. Pictures with tables, controls, costs, warnings
    and the tables of the papers follow. Study, compare and sweep write this page too.
    """
    from models_integration.cli.report import run

    run(folder, rules or [], out, table, figure)


@app.command()
def calibrate(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="Text, rules of a study (.toml), .pt or .tsv.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("calibration.npz"),
    tokens: Annotated[int, typer.Option(help="Largest number of tokens to read.")] = 4096,
    threshold: Annotated[float | None, typer.Option(help="Least value of a full head in a .tsv.")] = None,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
) -> None:
    """Calibrate a model: compute average queries (for triattention) and KVzip scores of its heads (for kvzip-heads).

    The model runs three forward passes over the text. In one pass the model repeats the text.

    For a study run `kvspec calibrate rules.toml`, then write calibration = "calibration.npz" in the rules. This reads
    the first dev context only. The file records the context, so the study can check that no confirming text was used.
    TriAttention's statistics (.pt) and DuoAttention's head patterns (.tsv) are converted, without a check of weights.
    With --out stats.pt the file has TriAttention's format; else it stores a hash of the model and the rotation.
    Then: kvspec compare --policies triattention --calibration calibration.npz
    """
    from models_integration.cli.calibrate import run
    from models_integration.studies.subject import Loading

    run(text, out, tokens, Loading(model, device=device, dtype=dtype, attn=attn), threshold)


@app.command()
def compress(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="Text file to read.")],
    budget: Annotated[str, typer.Option(help="Budget: a fraction (0.3, 30%) or a number of tokens (512).")] = "0.5",
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto",
) -> None:
    """Compact one prompt with CrystalCache and print the kept text."""
    from models_integration.cli.compress import run
    from models_integration.studies.subject import Loading

    run(prompt, budget, Loading(model, backend, device, dtype, attn))


@app.command()
def keep(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="Text file to read.")],
    budget: Annotated[str, typer.Option(help="Budget: a fraction (0.3, 30%) or a number of tokens (512).")] = "0.3",
    policy: Annotated[str, typer.Option(help="Policy that reads the first layer only, as for kvspec compare.")] = (
        "crystalcache"
    ),
    form: Annotated[
        str, typer.Option("--format", help="Output: ranges, one per line (first, last + 1), or json.")
    ] = "ranges",
    model: Annotated[
        str, typer.Option(help="Model: 'pocket', 'chat', 'smollm2', or a folder of safetensors.")
    ] = "pocket",
    backend: Backend = "auto", dtype: Dtype = "auto",
) -> None:
    """Print the tokens of a prompt that a policy keeps, without a forward pass of the model.

    CrystalCache needs queries and keys of the first layer. Only the embeddings and the tensors of this layer are read
    from the file of the model. A session keeps the same tokens.
    """
    from models_integration.cli.keep import run

    run(prompt, budget, policy, form, model, backend, dtype)


@app.command()
def explain(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="Text file of at most 8192 tokens.")],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("explain.html"),
    budget: Annotated[str, typer.Option(help="Budget: a fraction (0.3, 30%) or a number of tokens (512).")] = "0.3",
    beside: Annotated[
        str | None, typer.Option(help="Second policy on the page, as the share of kept sets that contain a token.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="Calibration file, if --beside needs one.")] = None,
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto",
) -> None:
    """Write a page that shows which tokens of a prompt CrystalCache keeps, and why.

    Any browser opens the page without network. Sliders change the budget and the parameters, and the page computes the
    kept tokens again.
    """
    from models_integration.cli.explain.page import run
    from models_integration.studies.subject import Loading

    run(prompt, out, budget, Loading(model, backend, device, dtype, attn), beside, calibration)


class _PassedOn(TyperCommand):
    """A command whose whole line is read by another process, `--` and `--help` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@app.command(cls=_PassedOn)
def verify(context: typer.Context) -> None:
    """Judge your engine, policy or cache, and write a certificate. See kvspec verify --help."""
    from models_integration.cli.verify import run

    raise typer.Exit(run(context.args))


@app.command("lm-eval", cls=_PassedOn)
def lm_eval(context: typer.Context) -> None:
    """Run the command line of lm-evaluation-harness with a model that evicts.

    kvspec lm-eval run --model_args pretrained=pocket,policy=snapkv,budget=0.3 --tasks ...
    """
    from models_integration.studies.harness import command

    command(context.args)
