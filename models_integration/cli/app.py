"""Commands of `kvspec` and the options of each command. A command imports the module with the work when it runs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from models_integration.cli.archive import archive
from models_integration.cli.models import models
from models_integration.cli.options import (
    Address,
    Again,
    Attention,
    Backend,
    Bare,
    BatchSize,
    Budget,
    Device,
    Dtype,
    Engine,
    Figure,
    Lengths,
    Model,
    Models,
    Placements,
    Prompt,
    Results,
    Seeds,
    TableFile,
    Tasks,
    Workers,
    names_of,
)
from models_integration.cli.paper import paper
from models_integration.cli.verify import PassedOn, lm_eval, verify
from spec import SPEC_VERSION

__all__ = ["app"]

_YOURS = "For your own policy write 'module:ATTRIBUTE' or the name of an entry point."

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    help="Evict tokens from the KV cache of transformers models, compare policies, and test implementations.",
)

app.add_typer(archive, name="archive")
app.add_typer(models, name="models")
app.command()(paper)

_OF_GRIDS = ("grid", "budget", "tasks", "length", "samples", "seed", "model")
"""Options of a sweep over parameters, which cannot be combined with a rules file."""


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
    from models_integration.cli.policies import show_policies, show_policy

    if name:
        show_policy(name)
    else:
        show_policies()


@app.command()
def tasks() -> None:
    """List the tasks. Each entry has the question, the source of the text, the metric, the placements and constants."""
    from models_integration.cli.policies import show_tasks

    show_tasks()


@app.command()
def compare(
    policies: Annotated[
        str,
        typer.Option(help="Comma-separated policies (`kvspec policies` lists the names). Write snapkv(W=16) to set a"
                     " constant. Write diverse-NAME to add set-conditioned selection. If h2o must evict only after"
                     f" the prompt, write h2o@prompt. {_YOURS}"),
    ] = "crystalcache,streamingllm,fullcache",
    budgets: Annotated[
        str, typer.Option(help="Comma-separated budgets: fractions of the prompt (0.3, 30%) or token counts (512).")
    ] = "0.3,0.5",
    tasks: Tasks = "needle,delayed_association", length: Lengths = "1024",
    samples: Annotated[int, typer.Option(help="Number of samples per combination of task, length and seed.")] = 20,
    seed: Seeds = "42", placement: Placements = "after",
    controls: Annotated[
        bool, typer.Option(help="Also run controls: fixed sets of kept tokens, for which the right result is known.")
    ] = True,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file of the model, written by kvspec calibrate.")
    ] = None,
    write_rules: Annotated[
        Path | None, typer.Option(help="Rules file to write from the other options. The command then runs nothing.")
    ] = None,
    model: Models = "pocket", bare: Bare = False, backend: Backend = "auto", device: Device = "cpu",
    dtype: Dtype = "auto", attn: Attention = "auto", batch_size: BatchSize = 12, workers: Workers = 1,
    engine: Engine = "processes", address: Address = "", again: Again = False, table: TableFile = None,
    figure: Figure = None, out: Results = Path("results"),
) -> None:
    """Compare policies on tasks at several budgets, print tables, and write an HTML report.

    Each policy scores the tokens of a prompt once, and uses the same scores at every budget. All policies are compared
    at the same budgets. The exit code is 1 if a control fails. A failed control means that the task is not a valid test
    of the tokens that a policy keeps.

    A second run skips the results that are stored in --out. With --write-rules the command only writes a rules file for
    kvspec sweep or kvspec study.
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
    samples: Annotated[int, typer.Option(help="Number of samples per task. Few samples give uncertain results.")] = 20,
    backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    batch_size: BatchSize = 12, out: Results = Path("results"),
) -> None:
    """Compare CrystalCache, StreamingLLM and the full cache on the pocket model, and check the tasks with controls.

    `kvspec compare` without options runs the same comparison. The demo takes a minute on two CPU cores and downloads
    nothing. If --model is neither 'pocket' nor 'chat', the tasks ask for facts that are hidden in English prose.
    """
    shipped = "the small model that comes with kvspec" if model == "pocket" else f"the model {model}"
    print(
        f"kvspec demo: compares three policies on {shipped}, and checks the tasks with controls.\n"
        f"{'The demo takes about a minute on two CPU cores. ' if model == 'pocket' else ''}Nothing is downloaded."
        f" Results are written to {out}. A second run skips finished samples.", flush=True,
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
        typer.Argument(metavar="SWEEP.toml", help="Rules file with models, policies, budgets and tasks."),
    ] = None,
    grid: Annotated[
        str, typer.Option(help="Parameters to vary: appendix-a (T_max, s, alpha) or extensions (essay, ...).")
    ] = "appendix-a",
    budget: Budget = "0.3",
    tasks: Tasks = "needle,delayed_association", length: Lengths = "1024",
    samples: Annotated[int, typer.Option(help="Number of samples for each task and each variant.")] = 10,
    seed: Seeds = "42", model: Models = "pocket", bare: Bare = False, backend: Backend = "auto",
    device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto", batch_size: BatchSize = 12,
    workers: Workers = 1, engine: Engine = "processes", address: Address = "", again: Again = False,
    table: TableFile = None, figure: Figure = None,
    status: Annotated[
        Path | None, typer.Option(help="Folder (--out) of a run. The command only prints the progress of the run.")
    ] = None,
    out: Results = Path("results"),
) -> None:
    """Measure all samples of a rules file. Without a rules file, vary one parameter of CrystalCache at a time.

    The default sweep takes a minute on two CPU cores. Results that are stored in --out are not computed again.
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
    rules: Annotated[Path | None, typer.Option(help="Rules file that describes the study.")] = None,
    out: Results | None = None,
    part: Annotated[
        str, typer.Option(help="Samples to run: dev (a fifth of the samples), confirm (all other samples), or all.")
    ] = "dev",
    audit: Annotated[
        Path | None, typer.Option(help="Folder of studies. The command checks that git has rules before results.")
    ] = None,
    bare: Bare = False, batch_size: BatchSize = 12, device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", workers: Workers = 1, engine: Engine = "processes", address: Address = "",
    again: Again = False, table: TableFile = None, figure: Figure = None,
) -> None:
    """Run the study that a rules file describes, and decide whether the claims of the study hold.

    For each policy a study measures how much evidence is kept, and how much attention evicted keys receive. A study
    also measures the likelihood of the gold answer, and the quality of the answers. Each policy scores the tokens of a
    prompt once, and uses the same scores at every budget. In a rules file a task is a name, 'module:ATTRIBUTE', or
    'KIND:PATH' for a benchmark file. KIND is ruler-file, ruler-lm-eval-file, scbench-file, scbench-turns-file,
    longbench-file, loogle-file, infinitebench-file or math-file.

    If the rules file has claims, first commit the rules file and the calibration file to git. Then run kvspec study
    with --part dev. Finally run kvspec study with --part confirm.
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
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with results of kvspec compare, sweep or study.")
    ],
    rules: Annotated[
        list[Path] | None, typer.Option(help="Rules file whose claims the report shows. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: report.html in FOLDER.")] = None,
    table: TableFile = None, figure: Figure = None,
) -> None:
    """Write an HTML report about the results in a folder. The report needs no network.

    The report first shows the claims, and the best policy for each task and budget. The report then shows figures,
    tables, controls, costs and warnings. The commands compare, sweep and study write the same report.
    """
    from models_integration.cli.report import run

    run(folder, rules or [], out, table, figure)


@app.command()
def calibrate(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="Text file, rules file (.toml), TriAttention statistics"
                                                              " (.pt) or DuoAttention head pattern (.tsv).")],
    out: Annotated[Path, typer.Option(help="Calibration file to write.")] = Path("calibration.npz"),
    tokens: Annotated[int, typer.Option(help="Maximum number of tokens of the text to use.")] = 4096,
    threshold: Annotated[
        float | None,
        typer.Option(help="Threshold for a .tsv file. Values below the threshold become 0, and other values become 1."),
    ] = None,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
) -> None:
    """Write the calibration file that the policies triattention and kvzip-heads need for a model.

    For triattention the file has statistics of the queries. For kvzip-heads the file has a KVzip score for each head.

    Calibration takes three forward passes over the text. In one of the three passes the model repeats the text.

    To calibrate for a study, run `kvspec calibrate rules.toml`. Then write calibration = "calibration.npz" in the rules
    file. For a rules file, only the first context of the dev part is used, and the calibration file stores a hash of
    this context. `kvspec study` raises an error if a calibration file was made from a confirming context.

    The command also converts TriAttention's statistics (.pt) and DuoAttention's head patterns (.tsv). A .pt or .tsv
    file does not name a model, so kvspec cannot check whether the file belongs to your model. If --out ends in .pt, the
    calibration file has the format of TriAttention. If --out has a different suffix, the calibration file also stores a
    hash of the model and of the rotary embedding.

    To use the calibration file, run kvspec compare --policies triattention --calibration calibration.npz
    """
    from models_integration.cli.calibrate import run
    from models_integration.studies.subject import Loading

    run(text, out, tokens, Loading(model, device=device, dtype=dtype, attn=attn), threshold)


@app.command()
def compress(
    prompt: Prompt,
    budget: Budget = "0.5",
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto",
) -> None:
    """Evict tokens of one prompt with CrystalCache, and print the number of kept tokens and the freed memory."""
    from models_integration.cli.prompts import run_compress
    from models_integration.studies.subject import Loading

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
    """Print the positions of the prompt tokens that a policy keeps, without a forward pass of the whole model.

    CrystalCache needs only the queries and keys of the first layer. Therefore kvspec loads only the embeddings and the
    first layer of the model. The session `with policy(model)` keeps the same positions.
    """
    from models_integration.cli.prompts import run_keep

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
    attn: Attention = "auto",
) -> None:
    """Write an HTML page that shows which tokens of a prompt CrystalCache keeps, and why.

    The page needs no network. The page has sliders for the budget and the parameters. If you move a slider, the page
    computes the kept tokens again.
    """
    from models_integration.cli.explain.page import run
    from models_integration.studies.subject import Loading

    run(prompt, out, budget, Loading(model, backend, device, dtype, attn), beside, calibration)


app.command(cls=PassedOn)(verify)
app.command("lm-eval", cls=PassedOn)(lm_eval)
