"""Commands of `kvspec` that measure samples.

A command imports the code that does its work only when the command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvspec.cli.options import (
    Address,
    Again,
    Answers,
    Attention,
    Backend,
    Bare,
    BatchSize,
    Device,
    Dtype,
    Engine,
    Figure,
    Force,
    Grade,
    Lengths,
    Model,
    Models,
    Placements,
    Questions,
    Results,
    Seeds,
    StudyResults,
    TableFile,
    Tasks,
    Text,
    Workers,
    names_of,
)

__all__ = ["calibrate", "compare", "demo", "paper", "report", "study"]

_YOURS = "For your own policy write 'module:ATTRIBUTE' or the name of an entry point."

_OF_TASKS = ("tasks", "length", "samples", "seed")
"""Options of `compare` about made samples, which cannot be combined with your own questions."""
_OF_QUESTIONS = ("text", "grade", "answers")
"""Options of `compare` that need your own questions."""
_OF_RUN = ("table", "figure", "answers", "again")
"""Options of `compare` that need a run."""


def paper(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Paper to evaluate: crystalcache, diversity, injection or nestedkv, or"
                            " a .toml file that describes a different evaluation.")
    ],
    part: Annotated[
        str, typer.Option(help="Name of one table to fill in, such as table-5. Default: all tables.")
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Use short contexts and few samples. A quick run takes minutes on a CPU.")
    ] = False,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Benchmark file that a table needs, such as LongBench's hotpotqa.jsonl."
                     " Repeatable. Tables whose benchmark file is missing are skipped."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print how many samples, tokens, bytes and hours the run would need.")
    ] = False,
    model: Models = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", batch_size: BatchSize = 12, workers: Workers = 1, engine: Engine = "processes",
    address: Address = "", again: Again = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results: study.jsonl, paper.html, tables.csv, a LaTeX file per"
                                  " table. Default: results/NAME. If a run was stopped, the next run continues from"
                                  " study.jsonl.")
    ] = None,
    force: Force = False,
) -> None:
    """Fill in the tables of a paper with results of your model.

    Each table shows your results with 95 % intervals, and the published results. Each table also shows how much your
    results differ from the best baseline and from the full cache. Below each table is a list of missing results.
    Results that are stored in --out are not computed again.
    """
    if dry_run:  # the imports and the model take many seconds
        print(
            f"kvspec paper {name}: loads {model}, measures one sample of each part, and prints what a run needs."
            " Nothing is stored.", flush=True,
        )
    from experiments.studies.subject import Loading
    from experiments.studies.workers import Launch
    from kvspec.cli.paper_runs import INJECTION, PaperOptions, run

    if name == INJECTION:
        from kvspec.cli.paper_injection import run
    folder = out or Path("results") / Path(name).stem
    files = tuple(file or ())
    asked = PaperOptions(name, names_of("model", model), part, quick, files, folder, batch_size, again, dry_run, force)
    run(asked, Loading("", backend, device, dtype, attn), Launch(workers, engine, address))


def compare(
    context: typer.Context,
    questions: Questions = None, text: Text = None, grade: Grade = "contains",
    policies: Annotated[
        str,
        typer.Option(help="Comma-separated policies (`kvspec policies` lists the names). Write snapkv(W=16) to set a"
                     " constant. Write diverse-NAME to add set-conditioned selection. If h2o must evict only after"
                     f" the prompt, write h2o@prompt. {_YOURS}"),
    ] = "crystalcache,streamingllm,fullcache",
    grid: Annotated[
        str, typer.Option(help="Instead of --policies: CrystalCache with one parameter changed at a time. Values:"
                          " appendix-a (T_max, s, alpha) or extensions (essay, allocation, ...).")
    ] = "",
    budgets: Annotated[
        str, typer.Option(help="Comma-separated budgets: fractions of the prompt (0.3, 30%), token counts (512), or"
                               " memory of the kept tokens (64MiB), which becomes a token count.")
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
    engine: Engine = "processes", address: Address = "", again: Again = False, answers: Answers = None,
    table: TableFile = None, figure: Figure = None, out: Results = Path("results"), force: Force = False,
) -> None:
    """Compare policies on your own questions or on tasks. Print tables, and write an HTML report.

    Example: kvspec compare --text report.txt --questions questions.csv --policies snapkv,kvzip --budgets 0.3

    The model reads each text once, and no text is cut. For each policy and budget, the model answers every question
    from the tokens that the policy keeps. No token is evicted while the model reads a question. Without --questions,
    the samples come from --tasks.

    Each policy scores the tokens of a prompt once, and uses the same scores at every budget. All policies are compared
    at the same budgets. The exit code is 1 if a control fails. A failed control means that the task is not a valid test
    of the tokens that a policy keeps.

    A second run skips the results that are stored in --out. With --write-rules the command only writes a rules file for
    kvspec study.
    """
    if questions is not None:  # the other imports take many seconds
        from experiments.tasks.questions import question_task

        question_task(str(questions), str(text or ""), grade)
    from experiments.studies.evidence.rules import rules_of
    from experiments.studies.own_texts import question_study
    from experiments.studies.subject import Loading
    from experiments.studies.workers import Launch
    from kvspec.cli.checks import check_defaults
    from kvspec.cli.study_runs import Running, budgets_in_tokens, grid_policies, run, save_rules, study_of

    loading = Loading("", backend, device, dtype, attn)
    if grid:
        check_defaults(context, ("policies",), "cannot be used with --grid: leave out one of the two")
    if write_rules is not None:
        check_defaults(context, _OF_RUN, "cannot be used with --write-rules: leave out one of the two")
    names = grid_policies(grid) if grid else names_of("policies", policies)
    calibrated = str(calibration.resolve()) if calibration else ""
    if questions is None:
        check_defaults(context, _OF_QUESTIONS, "needs your own questions: add --questions FILE.csv")
        study = study_of(
            "Comparison", names, budgets, tasks, length, samples, seed, placement, model, controls=controls, bare=bare,
            calibration=calibrated,
        )
    else:
        check_defaults(context, _OF_TASKS, "cannot be used with --questions: leave out one of the two")
        study = question_study(
            questions, text, grade, title="Comparison", policies=names, budgets=names_of("budgets", budgets),
            placements=names_of("placements", placement), models=names_of("model", model), bare=bare,
            controls=controls, calibration=calibrated,
        )
    running = Running(
        out, batch_size=batch_size, again=again, table=table, figure=figure, force=force, answers=answers
    )
    study = budgets_in_tokens(study, loading, running, write_rules)
    if write_rules is not None:
        save_rules(study, write_rules, force)
        return
    run(rules_of(**study), loading, running, Launch(workers, engine, address))


def demo(
    model: Model = "pocket",
    samples: Annotated[int, typer.Option(help="Number of samples per task. Few samples give uncertain results.")] = 20,
    backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    batch_size: BatchSize = 12, out: Results = Path("results"), force: Force = False,
) -> None:
    """Compare CrystalCache, StreamingLLM and the full cache. The demo runs on the pocket model, and also runs controls.

    `kvspec compare` without options runs the same comparison. The demo takes one to four minutes on two CPU
    cores and downloads nothing. If --model is neither 'pocket' nor 'chat', the tasks ask for facts that are hidden in
    English prose.
    """
    shipped = "the small model that comes with kvspec" if model == "pocket" else f"the model {model}"
    print(
        f"kvspec demo: compares three policies on {shipped}, and checks the tasks with controls.\n"
        f"{'The demo takes one to four minutes on two CPU cores. ' if model == 'pocket' else ''}Nothing is downloaded."
        f" Results are written to {out}. A second run skips finished samples.", flush=True,
    )
    from experiments.studies.evidence.rules import rules_of
    from experiments.studies.subject import SHIPPED, Loading
    from kvspec.cli.study_runs import Running, run, study_of

    asked = "needle,delayed_association" if model in SHIPPED else "needle_in_prose,keys_in_prose_2"
    policies = ("crystalcache", "streamingllm", "fullcache")
    study = study_of(
        "Demo", policies, "0.3,0.5", asked, "1024", samples, "42", "after", model, controls=True, bare=False
    )
    running = Running(out, batch_size=batch_size, force=force)
    run(rules_of(**study), Loading("", backend, device, dtype, attn), running)


def study(
    context: typer.Context,
    rules: Annotated[
        Path | None,
        typer.Option(help="Rules file that describes the study. A run needs --rules and --out. --status and --audit do"
                     " not need them."),
    ] = None,
    out: StudyResults = None,
    part: Annotated[
        str, typer.Option(help="Samples to run: dev (a fifth of the samples), confirm (all other samples), or all.")
    ] = "dev",
    status: Annotated[
        Path | None, typer.Option(help="Folder (--out) of a run. The command only prints the progress of the run.")
    ] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Folder of studies. The command checks their git history, texts and claims.")
    ] = None,
    bare: Bare = False, batch_size: BatchSize = 12, backend: Backend = "auto", device: Device = "cpu",
    dtype: Dtype = "auto", attn: Attention = "auto", workers: Workers = 1, engine: Engine = "processes",
    address: Address = "", again: Again = False, table: TableFile = None, figure: Figure = None, force: Force = False,
) -> None:
    """Run the study that a rules file describes. Decide whether the claims of the study hold.

    For each policy a study measures how much evidence is kept, and how much attention evicted keys receive. A study
    also measures the likelihood of the gold answer, and the quality of the answers. Each policy scores the tokens of a
    prompt once, and uses the same scores at every budget. In a rules file a task is a name, 'module:ATTRIBUTE', or
    'KIND:PATH' for a benchmark file. KIND is ruler-file, ruler-lm-eval-file, longbench-file, loogle-file,
    infinitebench-file or math-file.

    If the rules file has claims, first commit the rules file and the calibration file to git. Then run kvspec study
    with --part dev. Finally run kvspec study with --part confirm.

    With --audit the command checks that git has the rules before the results, and that each result names a commit with
    the rules. Dev and confirming samples must share no text. A claim about several places or texts must not combine a
    positive and a negative difference. If a check fails, the exit code is 1. The file known-limits.toml in the folder
    lists defects that are stated.
    """
    from experiments.studies.subject import Loading
    from experiments.studies.workers import Launch
    from experiments.studies.workers import status as progress_of
    from kvspec.cli.checks import check_defaults
    from kvspec.cli.study_runs import Running, print_audit, rules_in, run

    for option, folder in (("audit", audit), ("status", status)):
        if folder is not None:
            others = [name for name in context.params if name != option]
            check_defaults(context, others, f"cannot be used with --{option}: leave out one of the two")
    if audit is not None:
        raise typer.Exit(int(print_audit(audit)))
    if status is not None:
        print("\n".join(progress_of(status)))
        return
    if rules is None or out is None:
        missing = "'--rules'" if rules is None else "'--out'"
        raise typer.BadParameter("is needed: give --rules and --out, --audit or --status", param_hint=missing)
    running = Running(out, part, batch_size, again, rules, table, figure, force)
    loading = Loading("", backend, device, dtype, attn)
    run(rules_in(rules, bare), loading, running, Launch(workers, engine, address))


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with results of kvspec compare or study.")
    ],
    rules: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Rules file whose claims the report shows. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: report.html in FOLDER.")] = None,
    table: TableFile = None, figure: Figure = None, force: Force = False,
) -> None:
    """Write an HTML report about the results in a folder. The report needs no network.

    The report first shows the claims, and the best policy for each task and budget. The report then shows figures,
    tables, controls, costs and warnings. The commands compare and study write the same report.
    """
    from kvspec.cli.study_files import write_report

    write_report(folder, rules or [], out, table, figure, force)


def calibrate(
    context: typer.Context,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="Text file, rules file (.toml), TriAttention statistics"
                                                              " (.pt), DuoAttention head pattern (.tsv), or filters,"
                                                              " query statistics, networks or gates (.safetensors).")],
    out: Annotated[Path, typer.Option(help="Calibration file to write.")] = Path("calibration.npz"),
    tokens: Annotated[int, typer.Option(help="Maximum number of tokens of the text to use.")] = 4096,
    threshold: Annotated[
        float | None,
        typer.Option(help="Threshold for a .tsv file. Values below the threshold become 0, and other values become 1."),
    ] = None,
    covariance: Annotated[
        bool, typer.Option("--covariance", help="Also measure the covariance of the queries, for"
                                                " expected-attention-stats.")
    ] = False,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    force: Force = False,
) -> None:
    """Write the calibration file of a model. It is for triattention, q-filters, kvzip-heads, kvzap and fast-kvzip.

    For triattention the file has statistics of the queries, and for q-filters their main directions. For kvzip-heads
    the file has a KVzip score for each head. For kvzap the file has the networks of KVzap's model.safetensors, and for
    fast-kvzip the gates of a converted file. With --covariance the file also has the covariance of the queries, for
    expected-attention-stats.

    Calibration takes three forward passes over the text. In one of the three passes the model repeats the text.

    To calibrate for a study, run `kvspec calibrate rules.toml`. Then write calibration = "calibration.npz" in the rules
    file. For a rules file, only the first context of the dev part is used, and the calibration file stores a hash of
    this context. `kvspec study` raises an error if a calibration file was made from a confirming context.

    The command also converts TriAttention's statistics (.pt) and DuoAttention's head patterns (.tsv). A .safetensors
    file has filters of Q-Filters, query statistics of Expected Attention, networks of KVzap, or gates of Fast KVzip.
    These files do not name a model, so kvspec cannot check whether a file belongs to your model. If --out ends in .pt,
    the calibration file has the format of TriAttention. If --out has a different suffix, the calibration file also
    stores a hash of the model and of the rotary embedding.

    To use the calibration file, run kvspec compare --policies triattention --calibration calibration.npz
    """
    from experiments.studies.subject import Loading
    from kvspec.cli.checks import check_defaults
    from kvspec.cli.prompts import is_published_file, run_calibrate

    if is_published_file(text):
        check_defaults(context, ("tokens",), f"is the length of a text, but {text.name} has none: leave it out")
    loading = Loading(model, device=device, dtype=dtype, attn=attn)
    run_calibrate(text, out, tokens, loading, threshold, force, covariance)
