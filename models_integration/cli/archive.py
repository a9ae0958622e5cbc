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
    help="Store the keys and values of a text, and insert them into other sessions without reading the text again.\n\n"
    "Begin with `kvspec archive put note.txt`, then `kvspec archive inject KEY --ask 'What is the code?'`.",
)

Folder = Annotated[Path, typer.Option("--archive", help="Folder of the archive. put creates it.")]
Tenant = Annotated[str, typer.Option(help="Owner of the chunks. A tenant cannot read chunks of different tenants.")]
MasterKey = Annotated[
    Path | None,
    typer.Option(help="File of 32 random bytes outside the archive, mode 600. Objects are then encrypted per tenant."),
]
FOLDER = Path("archive")


@archive.command()
def put(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="Text file to store as one chunk.")],
    wrapper: Annotated[
        str,
        typer.Option(help=f"Tokens of the chat template around the text: auto, {', '.join(FORMS)}. Default: auto, the"
                     " shortest wrapper with markers of the model. A model without markers gets raw."),
    ] = "auto",
    codec: Annotated[
        str,
        typer.Option(help=f"Codec: {', '.join(CODECS)}. All except none store 8-bit integers. per_head: the values of a"
                     " head share a scale."),
    ] = "none",
    upper: Annotated[bool, typer.Option("--upper", help="Store the upper half of the layers only.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy that selects the stored tokens, see `kvspec policies`. Markers are always kept."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Budget of --policy: a fraction (0.5, 50%) or a number of tokens. Default: 0.5."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file of `kvspec calibrate`, if --policy needs one.")
    ] = None,
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Compute keys and values of a text at positions from 0, store them, and print the key of the chunk.

    The key is a hash of tokens, wrapper, weights, rotation, codec, tenant and kept set. If you put a text twice, it is
    stored once.
    """
    from models_integration.cli.archive_runs import run_put
    from models_integration.studies.subject import Loading

    loading = Loading(model, backend, device, dtype, attn)
    run_put(text, wrapper, codec, upper, policy, budget, calibration, loading, tenant, folder, master_key)


@archive.command()
def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of a chunk, as put and list print it.")],
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Read a chunk, check its hash, and print its description and text.

    A damaged chunk is moved to the quarantine and counts as missing. A chunk of a different model raises an error.
    """
    from models_integration.cli.archive_runs import run_get
    from models_integration.studies.subject import Loading

    run_get(key, Loading(model, "numpy", device, dtype, attn), tenant, folder, master_key)


@archive.command(name="list")
def list_chunks(
    tenant: Annotated[str | None, typer.Option(help="Tenant whose chunks are listed. Default: all.")] = None,
    folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """List key, bytes, tokens and tenant of each chunk. Tokens and tenant of an encrypted chunk need its key.

    Only headers are read. Use `verify` to check the chunks.
    """
    from models_integration.cli.archive_runs import run_list

    run_list(tenant, folder, master_key)


@archive.command()
def find(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Question or words to look for.")],
    top: Annotated[int, typer.Option(help="Number of chunks to print.")] = 3,
    dense: Annotated[
        str, typer.Option(help="Sentence encoder whose ranking is fused with that of BM25: 'wordllama' (pip install"
                          " 'kvspec[wordllama]'), or a folder with a model. Default: BM25 alone.")
    ] = "",
    rerank: Annotated[
        Path | None, typer.Option(help="Folder with a cross-encoder, which orders the best 50 chunks again.")
    ] = None,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Print keys and texts of the chunks that answer a question best, by BM25, an encoder and a cross-encoder.

    Rankings are fused by reciprocal ranks (k = 60). Chunks that share no word with the query come last. Chunks of other
    models are left out. The search reads all chunks and does not count as a use of them.
    """
    from models_integration.cli.archive_runs import run_find
    from models_integration.studies.subject import Loading

    loading = Loading(model, "numpy", device, dtype, attn)
    run_find(query, top, dense, rerank, loading, tenant, folder, master_key)


@archive.command()
def inject(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of the chunks, in the order of insertion.")],
    ask: Annotated[str, typer.Option(help="Text to read after the chunks.")],
    session: Annotated[str, typer.Option(help="Text to read before the chunks.")] = "",
    new_tokens: Annotated[int, typer.Option(help="Largest number of tokens to generate, greedily.")] = 24,
    text: Annotated[
        bool, typer.Option("--text", help="Also answer with the chunks read as text, and print the time to the first"
                           " token of both answers.")
    ] = False,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Insert stored chunks into a session, ask a question, and print the answer of the model.

    The chunks are not read again: their keys are rotated to the new positions.
    """
    from models_integration.cli.archive_runs import run_inject
    from models_integration.studies.subject import Loading

    loading = Loading(model, "numpy", device, dtype, attn)
    run_inject(keys, ask, session, new_tokens, text, loading, tenant, folder, master_key)


@archive.command()
def verify(folder: Folder = FOLDER, master_key: MasterKey = None) -> None:
    """Check the hash of every chunk. Exit code 1 if there is a problem.

    Problems are damaged, truncated and misnamed chunks, chunks of a different version or without a key, foreign files,
    and files in the quarantine. Unencrypted chunks in an encrypted archive are a problem too. Deleted chunks cannot be
    detected. The hash of an unencrypted chunk does not show who wrote the chunk.
    """
    from models_integration.cli.archive_runs import run_verify

    run_verify(folder, master_key)


@archive.command()
def gc(
    limit: Annotated[
        int,
        typer.Option(help="Largest size of chunks and quarantine in bytes. The quarantine is removed first, then the"
                     " least recently used chunks."),
    ],
    folder: Folder = FOLDER,
) -> None:
    """Remove unfinished files older than an hour, and the least recently used chunks beyond a size."""
    from models_integration.cli.archive_runs import run_gc

    run_gc(limit, folder)


@archive.command()
def forget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Tenant to erase.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Destroy the key of a tenant and overwrite all objects of the tenant. This cannot be undone.

    For an encrypted archive give --master-key: without it the objects of a tenant cannot be found.
    """
    from models_integration.cli.archive_runs import run_forget

    if not yes:
        typer.confirm(f"Destroy everything of tenant {tenant!r} in {folder}?", abort=True)
    run_forget(tenant, folder, master_key)
