"""Command `kvspec paper`. The command imports the module with the work when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from models_integration.cli.options import (
    Address,
    Again,
    Attention,
    Backend,
    BatchSize,
    Device,
    Dtype,
    Engine,
    Models,
    Workers,
    names_of,
)
from spec.errors import SpecError

__all__ = ["paper"]

INJECTION = "injection"
"""Name of the paper about archived chunks. The evaluation of this paper compares sessions instead of policies."""


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
        typer.Option(help="Benchmark file that a table needs, such as LongBench's hotpotqa.jsonl. Repeatable. Tables"
                     " whose benchmark file is missing are skipped."),
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
) -> None:
    """Run the evaluation of a paper on your model, and fill in the tables of the paper.

    Each table shows your results with 95 % intervals, and the published results. Each table also shows how much your
    results differ from the best baseline and from the full cache. Below each table is a list of missing results.
    Results that are stored in --out are not computed again.
    """
    from models_integration.studies.subject import Loading
    from models_integration.studies.workers import Launch

    folder = out or Path("results") / Path(name).stem
    if name == INJECTION:
        if workers != 1 or (file and len(file) > 1):
            raise SpecError("NAME", name, "needs --workers 1 and accepts at most one --file: locomo10.json")
        from models_integration.cli.paper_injection import run_injection

        loading = Loading("", backend, device, dtype, attn)
        run_injection(names_of("model", model), part, quick, dry_run, loading, folder, file[0] if file else None)
        return
    from models_integration.cli.paper_runs import Asked, plan, run

    asked = Asked(name, names_of("model", model), part, quick, tuple(file or ()), folder, batch_size, again)
    loading = Loading("", backend, device, dtype, attn)
    if dry_run:
        plan(asked, loading)
        return
    with Launch(workers, engine, address).started(folder, device):
        run(asked, loading)
