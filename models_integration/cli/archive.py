"""The commands of `kvspec archive`; the work is in a module of its own, imported when a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from models_integration.cli.options import Attention, Backend, Device, Dtype, Model
from reference.injection.quantisers import ARMS as CODECS
from reference.injection.wrappers import FORMS

__all__ = ["archive"]

archive = typer.Typer(
    no_args_is_help=True,
    help="Archive the keys and values of a text, and go on from them in another session without reading it again.\n\n"
    "Try: echo 'The secret code for Project Aurora is 7492.' > note.txt;"
    " kvspec archive put note.txt;"
    " kvspec archive inject KEY --ask ' Question: What is the secret code for Project Aurora? Answer:'",
)

Folder = Annotated[Path, typer.Option("--archive", help="Folder of the archive; made when something is put.")]
Tenant = Annotated[str, typer.Option(help="Whose chunks. Nobody reads another tenant's.")]
MasterKey = Annotated[
    Path | None,
    typer.Option(help="File of 32 random bytes, outside the archive, of mode 600: objects are encrypted per tenant."),
]
FOLDER = Path("archive")


@archive.command()
def put(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file: the chunk.")],
    wrapper: Annotated[
        str,
        typer.Option(help=f"The chat template's tokens around it: {', '.join(FORMS)}. Every marker must be one token of"
                     " the model."),
    ] = "raw",
    codec: Annotated[
        str,
        typer.Option(help=f"{', '.join(CODECS)}: 8-bit integers, by what shares a scale."),
    ] = "none",
    upper: Annotated[bool, typer.Option("--upper", help="Only the upper half of the layers.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(help="Store only what this policy keeps, a name of `kvspec compare --policies`. Markers always"
                     " stay."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Tokens that --policy keeps: a fraction (0.5, 50%) or a number of tokens. Default: 0.5."),
    ] = None,
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Compute a text's keys and values at positions from 0, store them, and print the chunk's key.

    The key is a hash of tokens, wrapper, weights, rotation, codec, tenant and what was evicted: putting a text twice
    stores it once, and a compacted chunk has another key than the full one.
    """
    from models_integration.cli.archive_runs import run_put
    from models_integration.studies.subject import Loading

    loading = Loading(model, backend, device, dtype, attn)
    run_put(text, wrapper, codec, upper, policy, budget, loading, tenant, folder, master_key)


@archive.command()
def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="As put and list print it.")],
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Read a chunk, check its bytes against their hash, and print what it is, with its text.

    A damaged chunk is put into quarantine and counts as missing; another model's is refused.
    """
    from models_integration.cli.archive_runs import run_get
    from models_integration.studies.subject import Loading

    run_get(key, Loading(model, "numpy", device, dtype, attn), tenant, folder, master_key)


@archive.command(name="list")
def list_chunks(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's; all of them if left out.")] = None,
    folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """List the chunks: key, bytes, tokens, tenant. Of an encrypted one, only its tenant's key tells the last two.

    Only the files' headers are read: `verify` proves the chunks.
    """
    from models_integration.cli.archive_runs import run_list

    run_list(tenant, folder, master_key)


@archive.command()
def inject(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Chunks, in the order of insertion.")],
    ask: Annotated[str, typer.Option(help="The text that is read after the chunks.")],
    session: Annotated[str, typer.Option(help="The text that the session has read before them.")] = "",
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, greedily.")] = 24,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Insert stored chunks after what a session has read, ask a question, and print the model's answer.

    The chunks' tokens are not computed again: their keys are rotated to their new positions.
    """
    from models_integration.cli.archive_runs import run_inject
    from models_integration.studies.subject import Loading

    loading = Loading(model, "numpy", device, dtype, attn)
    run_inject(keys, ask, session, new_tokens, loading, tenant, folder, master_key)


@archive.command()
def verify(folder: Folder = FOLDER, master_key: MasterKey = None) -> None:
    """Check every chunk's bytes against their hash. Exit code 1 if anything is amiss.

    Named are damaged, truncated and misnamed chunks, chunks of another version or without their key, chunks in the
    clear in an encrypted archive, files that are no chunks, and files in the quarantine, where damaged chunks go.
    A chunk that was deleted is not missed, and an unencrypted chunk's hash does not tell who wrote it.
    """
    from models_integration.cli.archive_runs import run_verify

    run_verify(folder, master_key)


@archive.command()
def gc(
    limit: Annotated[
        int,
        typer.Option(help="Bytes that the chunks and the quarantine may have. The quarantine goes first, then the least"
                     " recently used chunks, by the times of their files."),
    ],
    folder: Folder = FOLDER,
) -> None:
    """Remove files that were left unfinished over an hour ago, and the least recently used chunks beyond a size."""
    from models_integration.cli.archive_runs import run_gc

    run_gc(limit, folder)


@archive.command()
def forget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Destroy a tenant's key and overwrite every byte of its objects. Nothing brings them back.

    An encrypted archive needs its --master-key, which alone tells whose the objects are.
    """
    from models_integration.cli.archive_runs import run_forget

    if not yes:
        typer.confirm(f"Destroy everything of tenant {tenant!r} in {folder}?", abort=True)
    run_forget(tenant, folder, master_key)
