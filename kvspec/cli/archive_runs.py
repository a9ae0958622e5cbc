"""Implementation of the commands of `kvspec archive`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import typer

from experiments.studies.answers import answered, next_token
from experiments.studies.evidence.rules import check_budget
from experiments.studies.subject import Loading, Subject
from kvspec.cli.checks import calibration_of, check_counts
from models_integration.archive.errors import ForeignVersion, NoSuchChunk, OtherDtype, OtherFrequencies, WrongModel
from models_integration.archive.keyring import Keyring, read_master
from models_integration.archive.library import IDS, Library, recommended_form, vocabulary_of
from models_integration.archive.retrieval import dense, lexical, reranked, retrieved, static
from models_integration.archive.store import Archive
from models_integration.cache.retained_cache import RetainedCache
from spec.errors import SpecError
from spec.files import check_output_folder, read_text
from spec.printing import printable, printable_lines
from spec.validate import check_once

__all__ = ["existing", "file_name", "run_find", "run_get", "run_inject", "run_put", "run_verify"]

_CANDIDATES = 50
"""Number of best chunks of each ranking that are fused."""

def run_put(
    text: Path, wrapper: str, codec: str, upper: bool, policy: str | None, budget: str | None,
    calibration: Path | None, loading: Loading, tenant: str, folder: Path, master_key: Path | None,
) -> None:
    """Store one text file as a chunk, and print the key of the chunk."""
    chunk = read_text("TEXT", text)
    if not folder.is_dir():
        check_output_folder("archive", folder)
    if policy is None and budget is not None:
        raise SpecError("budget", budget, "needs a policy: give --policy too")
    if budget is not None:
        check_budget("budget", budget, memory=True)
    statistics = calibration_of([policy] if policy else [], calibration)
    subject = replace(loading.subject(), calibration=statistics)
    if wrapper == "auto":
        wrapper = recommended_form(vocabulary_of(subject.tokenizer))
    method = None if policy is None else subject.policy(policy, budget or "0.5")
    ids = _plain_ids(subject, chunk)
    if not ids:
        raise SpecError("TEXT", str(text), "must have at least one token")
    subject.check_positions("TEXT", len(ids))
    with Archive(folder, _keyring(folder, master_key)) as archive:
        print(_library(archive, subject, tenant).put(ids, wrapper, codec, upper, method))


def run_get(key: str, loading: Loading, tenant: str, folder: Path, master_key: Path | None) -> None:
    """Check one chunk, and print a description and the text of the chunk."""
    subject = loading.subject()
    with existing(folder, master_key) as archive:
        library = _library(archive, subject, tenant)
        chunk, stored = library.get(key), archive.get(key, tenant)
    if chunk is None or stored is None:
        raise NoSuchChunk(f"the archive has no undamaged chunk {key} of tenant {tenant!r}")
    about = stored.manifest
    lengths = {int((places >= 0).sum()) for layer in chunk.layers for places in chunk.places(layer)}
    kept = "" if chunk.kept is None else f", {' to '.join(map(str, sorted({min(lengths), max(lengths)})))} tokens kept"
    print(
        f"{about.tokens} tokens ({about.hidden} hidden){kept}, wrapper {about.form}, codec {about.codec},"
        f" layers {', '.join(map(str, about.layers))}, undamaged"
    )
    _print_text(str(subject.tokenizer.decode(list(chunk.ids[about.start : about.stop]))))


def run_find(
    query: str, top: int, encoder: str, rerank: Path | None, loading: Loading, tenant: str, folder: Path,
    master_key: Path | None,
) -> None:
    """Print the keys and texts of the chunks that match a query best."""
    check_counts(top=top)
    subject = loading.subject()
    with existing(folder, master_key) as archive:
        texts = dict(_texts(archive, subject, tenant))
    rankers = [lexical(texts)]
    if encoder:
        rankers.append(static(texts) if encoder == "wordllama" else dense(texts, Path(encoder)))
    result = retrieved(query, rankers, max(top, _CANDIDATES))
    if rerank is not None:
        result = reranked(texts, rerank)(query, result)
    for key in result[:top]:
        print(f"{key}  {printable(texts[key])}")


def _texts(archive: Archive, subject: Subject, tenant: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and texts of the tenant's chunks that fit the model."""
    for entry in archive.entries(tenant):
        try:
            stored = archive.get(entry.key, tenant, subject.identity, use=False)
        except (ForeignVersion, OtherDtype, OtherFrequencies, WrongModel):
            continue
        if stored is not None:
            about = stored.manifest
            yield entry.key, str(subject.tokenizer.decode(stored.tensors[IDS][about.start : about.stop].tolist()))


def run_inject(
    keys: list[str], ask: str, session: str, new_tokens: int, text: bool, loading: Loading, tenant: str, folder: Path,
    master_key: Path | None,
) -> None:
    """Print the answer of the model after inserted chunks. If `text` is True, also print the answer after the texts."""
    check_counts(new_tokens=new_tokens)
    check_once("KEY", keys)
    subject = loading.subject()
    before, after = subject.tokenizer(session).input_ids, _plain_ids(subject, ask)
    if not after:
        raise SpecError("ask", ask, "must have at least one token")
    subject.check_positions("session", len(before), len(after) + new_tokens)
    with existing(folder, master_key) as archive:
        library = _library(archive, subject, tenant)
        cache, start = _session(subject, before), perf_counter()
        library.inject(cache, keys, room=len(after) + new_tokens)
        answer = _answer(subject, cache, after, new_tokens, start)
        if not text:
            _print_text(answer[0])
            return
        ids = [token for key in keys if (chunk := library.get(key)) for token in chunk.visible]
    as_text = _answer(subject, _session(subject, before), [*ids, *after], new_tokens, perf_counter())
    for name, (words, seconds) in (("inserted", answer), ("as text", as_text)):
        _print_text(f"{name}, {1000 * seconds:.1f} ms to the first token: {words}")


def _print_text(text: str) -> None:
    """Print a text of other people. A terminal gets no control characters, and a file gets the text as it is."""
    print(printable_lines(text) if sys.stdout.isatty() else text)


def _session(subject: Subject, ids: Sequence[int]) -> RetainedCache:
    cache = RetainedCache(subject.model.config.get_text_config(decoder=True))
    if ids:
        next_token(subject.model, cache, ids)
    return cache


def _answer(
    subject: Subject, cache: RetainedCache, ids: Sequence[int], new_tokens: int, start: float,
) -> tuple[str, float]:
    """Return the greedy answer after `ids`, and the seconds from `start` to the first token."""
    answer, seconds = answered(subject.model, cache, ids, subject.stop_ids, new_tokens, start)
    return str(subject.tokenizer.decode(answer)).strip(), seconds


def run_verify(folder: Path, master_key: Path | None) -> None:
    """Check all objects and print the problems."""
    with existing(folder, master_key) as archive:
        report = archive.verify()
    print(f"{report.read} objects read")
    findings = {
        "damaged, now in quarantine": report.quarantined, "in quarantine": report.in_quarantine,
        "has a different version": report.foreign, "encrypted, but the key is missing": report.locked,
        "not encrypted, in an encrypted archive": report.clear, "not readable": report.unreadable,
        "does not belong to the archive": report.strays,
    }
    for what, names in findings.items():
        for name in names:
            print(f"{file_name(name)}  {what}")
    if not report.clean:
        raise typer.Exit(1)


def file_name(name: str) -> str:
    """Return a file name with unprintable characters escaped, so that every terminal prints one line."""
    return name if name.isprintable() else ascii(name)


def _library(archive: Archive, subject: Subject, tenant: str) -> Library:
    return Library(archive, subject.model, vocabulary_of(subject.tokenizer), tenant, subject.identity)


def _plain_ids(subject: Subject, text: str) -> list[int]:
    """Return the token ids of a text without a BOS token. Only the start of a session has a BOS token."""
    ids: list[int] = subject.tokenizer(text, add_special_tokens=False).input_ids
    return ids


def existing(folder: Path, master_key: Path | None = None, limit: int | None = None) -> Archive:
    """Open an archive that exists.

    Raises:
        SpecError: if the folder is not an archive, or if the master key is invalid.
    """
    if not (folder / "objects").is_dir():
        raise SpecError("archive", str(folder), "is not an archive; `kvspec archive put` creates an archive")
    return Archive(folder, _keyring(folder, master_key), limit)


def _keyring(folder: Path, master_key: Path | None) -> Keyring | None:
    if master_key is None:
        return None
    return Keyring(folder / "keys", read_master(master_key, folder))
