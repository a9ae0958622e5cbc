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
from reference.policies.names import POLICIES
from spec import SPEC_VERSION
from spec.errors import SpecError

__all__ = ["app"]

_YOURS = "Your own: 'module:ATTRIBUTE', or the name of an entry point."

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    help="The executable specification of KV-cache retention: which cached keys and values a language model keeps.",
)

app.add_typer(archive, name="archive")
app.add_typer(models, name="models")

_OUT = "Folder of study.jsonl, a row a sample, from which a stopped run goes on, and of its page, report.html."

_OF_GRIDS = ("grid", "budget", "tasks", "length", "samples", "seed", "model")
"""Options of a sweep over parameters; a file of rules has its own."""


def _version(value: bool) -> None:
    if value:
        print(f"kvspec {SPEC_VERSION}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    pass


@app.command()
def policies(
    name: Annotated[str, typer.Argument(help="A policy, to see its paper, its constants and how to call it.")] = "",
) -> None:
    """List the policies: what each keeps, how often it reads the prompt, its peak memory, what it serves."""
    from models_integration.cli.policies import show_policies, show_policy

    if name:
        show_policy(name)
    else:
        show_policies()


@app.command()
def tasks() -> None:
    """List the tasks: what is asked, the metric, what contexts are made of, placements and constants."""
    from models_integration.cli.policies import show_tasks

    show_tasks()


@app.command()
def compare(
    policies: Annotated[
        str,
        typer.Option(help=f"Comma-separated: {', '.join(POLICIES)}. diverse-NAME is NAME with set-conditioned"
                     " selection, where it keeps single tokens; snapkv(W=16) is SnapKV with a constant of its own;"
                     f" h2o@prompt decides at the prompt's end alone. {_YOURS}"),
    ] = "crystalcache,streamingllm,fullcache",
    budgets: Annotated[str, typer.Option(help="Comma-separated: 0.3 or 30% is a fraction, 512 is tokens.")] = "0.3,0.5",
    tasks: Tasks = "needle,delayed_association", length: Lengths = "1024",
    samples: Annotated[int, typer.Option(help="Samples per cell and seed.")] = 20,
    seed: Seeds = "42", placement: Placements = "after",
    controls: Annotated[bool, typer.Option(help="Also run controls: kept sets that must answer, or must not.")] = True,
    calibration: Annotated[
        Path | None, typer.Option(help="This model's calibration; kvspec calibrate writes it.")
    ] = None,
    write_rules: Annotated[
        Path | None, typer.Option(help="File for the rules that these options stand for; nothing is run.")
    ] = None,
    model: Models = "pocket", bare: Bare = False, backend: Backend = "auto", device: Device = "cpu",
    dtype: Dtype = "auto", attn: Attention = "auto", batch_size: BatchSize = 12, workers: Workers = 1,
    engine: Engine = "processes", address: Address = "", again: Again = False, table: TableFile = None,
    figure: Figure = None, out: Annotated[Path, typer.Option(help=_OUT)] = Path("results"),
) -> None:
    """Run policies x budgets x tasks; print tables, write a page. A second run skips what is stored.

    Each sample's prompt is read once and scored once by each policy; all budgets are selected from that. Every policy
    gets the same number of tokens of the prompt. Exit code 1 where a control fails: the comparison then does not
    measure retention. The options are rules: --write-rules writes them for kvspec sweep and study.
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
    samples: Annotated[int, typer.Option(help="Samples per cell; fewer are faster, and say less.")] = 20,
    backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    batch_size: BatchSize = 12, out: Annotated[Path, typer.Option(help=_OUT)] = Path("results"),
) -> None:
    """Watch it work: CrystalCache, StreamingLLM and the full cache on the pocket model, with controls.

    The same as `kvspec compare` without options; about a minute on two CPU cores, nothing is downloaded. Another model
    is asked for facts in running text.
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
        typer.Argument(metavar="SWEEP.toml", help="Policies x budgets x tasks on models, as a study's rules."),
    ] = None,
    grid: Annotated[
        str, typer.Option(help="appendix-a (T_max, s, alpha), or extensions (the essay's, tiers, coverage, ...).")
    ] = "appendix-a",
    budget: Annotated[str, typer.Option(help="0.3 or 30% is a fraction, 512 is tokens.")] = "0.3",
    tasks: Tasks = "needle,delayed_association", length: Lengths = "1024",
    samples: Annotated[int, typer.Option(help="Samples per variant and task; the same ones for all variants.")] = 10,
    seed: Seeds = "42", model: Models = "pocket", bare: Bare = False, backend: Backend = "auto",
    device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto", batch_size: BatchSize = 12,
    workers: Workers = 1, engine: Engine = "processes", address: Address = "", again: Again = False,
    table: TableFile = None, figure: Figure = None,
    status: Annotated[
        Path | None, typer.Option(help="Say how far the runs in a folder are, by whomever, and nothing else.")
    ] = None,
    out: Annotated[Path, typer.Option(help=_OUT)] = Path("results"),
) -> None:
    """Measure what SWEEP.toml lists, as kvspec study does, on all contexts. Without a file vary CrystalCache's
    parameters one at a time, on the same samples: the paper's Appendix A, or the extensions.

    About a minute with the defaults on two CPU cores. A second run skips what is stored.
    """
    if status is not None:
        from models_integration.studies.status import status as lines

        for line in lines(status):
            print(line)
        return
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
        _check_none_of_grids(context, rules)
        made, running = load_rules(rules), replace(running, where=rules.parent, written=True)
        made = replace(made, bare=made.bare or bare)
    with Launch(workers, engine, address).started(out, device):
        run(made, Loading("", backend, device, dtype, attn), running)


def _check_none_of_grids(context: typer.Context, rules: Path) -> None:
    """Rules say by themselves what these options would."""
    for name in _OF_GRIDS:
        if getattr(context.get_parameter_source(name), "name", None) != "DEFAULT":
            reason = f"is decided by {rules}: leave the option out, or edit that file"
            raise SpecError(name, context.params[name], reason)


@app.command()
def study(
    rules: Annotated[
        Path, typer.Option(help="TOML: the claims, then model, tasks, policies and budgets. Its hash is in every row.")
    ],
    out: Annotated[Path, typer.Option(help=_OUT)],
    part: Annotated[
        str,
        typer.Option(help="'dev', a fifth of the contexts, to try things on; 'confirm', which decides claims; 'all'.")
    ] = "dev",
    bare: Bare = False, batch_size: BatchSize = 12, device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", workers: Workers = 1, engine: Engine = "processes", address: Address = "",
    again: Again = False, table: TableFile = None, figure: Figure = None,
) -> None:
    """Measure what eviction costs: evidence kept, likelihood of the gold answer, attention on evicted keys, answers.

    Each sample's prompt is read once and scored once by each policy; all budgets are selected from that. A second run
    goes on where the first was stopped. Tasks are names, 'module:ATTRIBUTE', or files of benchmarks as 'KIND:PATH', of
    the kinds ruler-file, ruler-lm-eval-file, scbench-file, scbench-turns-file and longbench-file.
    """
    from models_integration.cli.study import Running, run
    from models_integration.studies.evidence.rules import load_rules
    from models_integration.studies.subject import Loading
    from models_integration.studies.workers import Launch

    made = load_rules(rules)
    made, loading = replace(made, bare=made.bare or bare), Loading("", device=device, dtype=dtype, attn=attn)
    running = Running(out, part, batch_size, again, rules.parent, written=True, table=table, figure=figure)
    with Launch(workers, engine, address).started(out, device):
        run(made, loading, running)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The --out of study, compare or sweep.")],
    rules: Annotated[
        list[Path] | None, typer.Option(help="The rules of a study in it, for claims and stages; any number.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write; by default report.html in the folder.")] = None,
    table: TableFile = None, figure: Figure = None,
) -> None:
    """Write the page of a folder of results: one file that any browser opens without network.

    Answers first: claims, the best policy by task and budget. Then pictures, each with the table of its points;
    controls, cost, what is flagged or missing, the papers' own tables. Study, compare and sweep end with this page.
    """
    from models_integration.cli.report import run

    run(folder, rules or [], out, table, figure)


@app.command()
def calibrate(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file, any will do; or a study's rules, .toml.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("calibration.npz"),
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read, at most.")] = 4096,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
) -> None:
    """Make a model's calibration: its queries on average (TriAttention), and its heads' KVzip scores (kvzip-heads).

    Three forwards over a text, in one of which the model repeats it.

    For a study: `kvspec calibrate rules.toml` reads its first dev context and names it in the file, so that the study
    can tell that nothing of what confirms was seen; then calibration = "calibration.npz" in the rules.

    The file names the model, by a digest, and its rotation, and serves no other.
    Then: kvspec compare --policies triattention --calibration calibration.npz
    """
    from models_integration.cli.calibrate import run
    from models_integration.studies.subject import Loading

    run(text, out, tokens, Loading(model, device=device, dtype=dtype, attn=attn))


@app.command()
def compress(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="A text file.")],
    budget: Annotated[str, typer.Option(help="0.3 or 30% is a fraction of the prompt, 512 is tokens.")] = "0.5",
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto",
) -> None:
    """Compact one prompt with CrystalCache, and say what was kept."""
    from models_integration.cli.compress import run
    from models_integration.studies.subject import Loading

    run(prompt, budget, Loading(model, backend, device, dtype, attn))


@app.command()
def keep(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="A text file.")],
    budget: Annotated[str, typer.Option(help="0.3 or 30% is a fraction of the prompt, 512 is tokens.")] = "0.3",
    policy: Annotated[str, typer.Option(help="As for compare; of those that need the first layer alone.")] = (
        "crystalcache"
    ),
    form: Annotated[
        str, typer.Option("--format", help="ranges: a line for each, first and one behind the last; or json.")
    ] = "ranges",
    model: Annotated[str, typer.Option(help="'pocket', 'chat', 'smollm2', or a folder of safetensors.")] = "pocket",
    backend: Backend = "auto", dtype: Dtype = "auto",
) -> None:
    """Print which tokens of a prompt a policy keeps, without a forward of the model.

    CrystalCache reads the first layer's queries and keys: of the model's file, the embeddings and this layer's first
    tensors are read, and no others. What is kept is what a session keeps.
    """
    from models_integration.cli.keep import run

    run(prompt, budget, policy, form, model, backend, dtype)


@app.command()
def explain(
    prompt: Annotated[Path, typer.Argument(metavar="PROMPT", help="A text file, of at most 8192 tokens.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explain.html"),
    budget: Annotated[str, typer.Option(help="0.3 or 30% is a fraction of the prompt, 512 is tokens.")] = "0.3",
    beside: Annotated[
        str | None, typer.Option(help="Another policy, as for compare: the share of its sets that keep each token.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="As for compare, where --beside needs it.")] = None,
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto",
) -> None:
    """Write a page that shows which tokens of a prompt CrystalCache keeps, and why.

    One file that any browser opens without network. Its sliders change budget and parameters; what is kept is then
    computed again in the page.
    """
    from models_integration.cli.explain.command import run
    from models_integration.studies.subject import Loading

    run(prompt, out, budget, Loading(model, backend, device, dtype, attn), beside, calibration)


class _PassedOn(TyperCommand):
    """A command whose whole line is read by another process, `--` and `--help` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@app.command(cls=_PassedOn)
def verify(context: typer.Context) -> None:
    """Judge your own engine, policy or cache, row by row, with a certificate. See kvspec verify --help."""
    from models_integration.cli.verify import run

    raise typer.Exit(run(context.args))


@app.command("lm-eval", cls=_PassedOn)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with a policy: its own command line, whose --model is kvspec here.

    kvspec lm-eval run --model_args pretrained=pocket,policy=snapkv,budget=0.3 --tasks ...
    """
    from models_integration.studies.harness import command

    command(context.args)
