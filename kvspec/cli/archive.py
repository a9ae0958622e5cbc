"""Commands of `kvspec archive`. A command imports the code that does its work only when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from kvspec.cli.options import Attention, Backend, Device, Dtype, Model
from reference.injection.quantisers import ARMS as CODECS
from reference.injection.wrappers import FORMS

__all__ = ["archive"]

archive = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    help="Store keys and values of texts, for use in later sessions.\n\n"
    "First run `kvspec archive put note.txt`. Then run `kvspec archive inject KEY --ask 'What is the code?'`.",
)

Folder = Annotated[Path, typer.Option("--archive", help="Folder of the archive. `kvspec archive put` creates it.")]
Tenant = Annotated[str, typer.Option(help="Tenant that owns the chunks. A tenant cannot read the chunks of a different"
                                          " tenant.")]
MasterKey = Annotated[
    Path | None,
    typer.Option(help="File with the master key: 32 random bytes, mode 600, outside the archive. With a master key,"
                 " kvspec encrypts the chunks of each tenant with a separate key."),
]
FOLDER = Path("archive")


@archive.command()
def put(
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="Text file to store as one chunk.")],
    wrapper: Annotated[
        str,
        typer.Option(help="Wrapper (tokens of the chat template that are stored around the text):"
                     f" {', '.join(FORMS)} or auto. With auto, kvspec uses the shortest wrapper that has role markers."
                     " For a model without role markers, auto means raw."),
    ] = "auto",
    codec: Annotated[
        str,
        typer.Option(help=f"Codec of the stored keys and values: {', '.join(CODECS)}. All codecs except none store"
                     " 8-bit integers. With per_head all numbers of a head share one scale."),
    ] = "none",
    upper: Annotated[bool, typer.Option("--upper", help="Store tensors of only the upper half of the layers.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy that selects the tokens to store. `kvspec policies` lists the names. Role markers are"
                     " always stored. Default: store all tokens."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Budget of --policy: a fraction of the text (0.5, 50%), a number of tokens, or memory of the"
                     " kept tokens (64MiB). Default: 0.5."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file that --policy needs, written by `kvspec calibrate`.")
    ] = None,
    model: Model = "pocket", backend: Backend = "auto", device: Device = "cpu", dtype: Dtype = "auto",
    attn: Attention = "auto", tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Store the attention keys and values of a text as one chunk. Print the KEY of the chunk.

    The model processes the text at positions 0, 1, 2 and so on. KEY is a hash of the tokens, wrapper, weights, rotary
    embedding, codec, tenant and kept tokens. If you store a text twice with the same options, the archive has one
    chunk.
    """
    from experiments.studies.subject import Loading
    from kvspec.cli.archive_runs import run_put

    loading = Loading(model, backend, device, dtype, attn)
    run_put(text, wrapper, codec, upper, policy, budget, calibration, loading, tenant, folder, master_key)


@archive.command()
def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="KEY of the chunk. `kvspec archive list` prints the KEYs.")],
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Print the text and a description of a chunk. The command also checks the hash of the chunk.

    If the chunk is damaged, the command moves the chunk to the quarantine folder and reports that the chunk is missing.
    If the chunk was made by a different model, the command fails.
    """
    from experiments.studies.subject import Loading
    from kvspec.cli.archive_runs import run_get

    run_get(key, Loading(model, "numpy", device, dtype, attn), tenant, folder, master_key)


@archive.command(name="list")
def list_chunks(
    tenant: Annotated[str | None, typer.Option(help="Tenant to list. Default: all tenants.")] = None,
    folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """List the chunks. Each line has the KEY, the number of bytes, the number of tokens and the tenant of a chunk.

    For an encrypted chunk the tokens and the tenant are shown only with --master-key. The command reads only the
    headers of the chunks. `kvspec archive verify` checks the chunks.
    """
    from kvspec.cli.archive_runs import existing
    from spec.printing import printable_lines

    with existing(folder, master_key) as opened:
        for entry in opened.entries(tenant):
            about = "encrypted" if entry.tenant is None else f"{entry.tokens} tokens  {entry.tenant}"
            print(printable_lines(f"{entry.key}  {entry.bytes} bytes  {about}"))


@archive.command()
def find(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Question or words to search for.")],
    top: Annotated[int, typer.Option(help="Number of chunks to print.")] = 3,
    dense: Annotated[
        str, typer.Option(help="Sentence encoder that ranks the chunks in addition to BM25: 'wordllama' (pip install"
                          " 'kvspec[wordllama]'), or a folder with a model. Default: rank by BM25 only.")
    ] = "",
    rerank: Annotated[
        Path | None, typer.Option(help="Folder with a cross-encoder model that reorders the best 50 chunks.")
    ] = None,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Search the chunks with a question. Print the KEYs and texts of the best chunks.

    The search ranks the chunks by BM25. With --dense, reciprocal rank fusion (k = 60) combines the ranking of BM25 with
    the ranking of a sentence encoder. Chunks that share no word with the query come last. Chunks that a different model
    made are skipped. For `kvspec archive gc`, a search does not count as a use of a chunk.
    """
    from experiments.studies.subject import Loading
    from kvspec.cli.archive_runs import run_find

    loading = Loading(model, "numpy", device, dtype, attn)
    run_find(query, top, dense, rerank, loading, tenant, folder, master_key)


@archive.command()
def inject(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="KEYs of the chunks to insert, in order.")],
    ask: Annotated[str, typer.Option(help="Text to process after the chunks, such as a question.")],
    session: Annotated[str, typer.Option(help="Text to process before the chunks.")] = "",
    new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate. Decoding is greedy.")] = 24,
    text: Annotated[
        bool, typer.Option("--text", help="Also generate an answer from the texts of the chunks, without stored"
                           " tensors. Print the time to the first token of each answer.")
    ] = False,
    model: Model = "pocket", device: Device = "cpu", dtype: Dtype = "auto", attn: Attention = "auto",
    tenant: Tenant = "default", folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Insert stored chunks into a session, and ask a question. Print the answer of the model.

    The model does not process the texts of the chunks again, because the stored keys are rotated to the new positions.
    """
    from experiments.studies.subject import Loading
    from kvspec.cli.archive_runs import run_inject

    loading = Loading(model, "numpy", device, dtype, attn)
    run_inject(keys, ask, session, new_tokens, text, loading, tenant, folder, master_key)


@archive.command()
def verify(folder: Folder = FOLDER, master_key: MasterKey = None) -> None:
    """Check the hash of every chunk. The exit code is 1 if the command finds a problem.

    The command reports chunks that are damaged, truncated, misnamed, of a different version, or encrypted with a
    missing key. The command also reports files that are not chunks, files in the quarantine folder, and unencrypted
    chunks in an encrypted archive. The command cannot detect deleted chunks. The hash of an unencrypted chunk does not
    prove who wrote the chunk.
    """
    from kvspec.cli.archive_runs import run_verify

    run_verify(folder, master_key)


@archive.command()
def gc(
    limit: Annotated[
        int,
        typer.Option(help="Maximum total size of the chunks and the quarantine folder, in bytes. The command first"
                     " removes the quarantined files, then the least recently used chunks."),
    ],
    folder: Folder = FOLDER,
) -> None:
    """Remove unfinished files older than an hour. Then remove chunks until the archive fits into --limit bytes."""
    from kvspec.cli.archive_runs import existing, file_name

    with existing(folder, limit=limit) as opened:
        gone = opened.gc()
    print("".join(f"{file_name(name)}  removed\n" for name in gone), end="")


@archive.command()
def forget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Tenant to delete.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    folder: Folder = FOLDER, master_key: MasterKey = None,
) -> None:
    """Delete the key of a tenant, and overwrite all chunks of the tenant. The deletion cannot be undone.

    If the archive is encrypted, give --master-key. Without the master key kvspec cannot find the chunks of the tenant.
    """
    from kvspec.cli.archive_runs import existing

    with existing(folder, master_key) as opened:
        if not yes:
            typer.confirm(f"Delete all chunks of tenant {tenant!r} in {folder}?", abort=True)
        print(f"{opened.forget(tenant)} objects of {tenant} erased")
