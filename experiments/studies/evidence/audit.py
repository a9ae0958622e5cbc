"""Audit of committed studies: history of rules and rows, text in both parts, and claims that pool opposite signs."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.studies.evidence.claims import opposite_signs
from experiments.studies.evidence.protocol import commits_with_rules, git_output, is_before, text_at
from experiments.studies.evidence.rules import Rules, load_rules
from experiments.studies.evidence.run import merged
from experiments.studies.evidence.samples import Samples
from experiments.studies.results import Row, parse_rows
from experiments.studies.toml_records import is_list_of
from experiments.tasks.needle import CONFIRM, DEV
from experiments.tasks.registry import SENTENCES, TABLE
from spec.errors import SpecError
from spec.files import parse_toml, read_text

__all__ = ["KNOWN", "Audit", "audit", "shared_text"]


@dataclass(frozen=True)
class Audit:
    """Result of the check of a study's git history.

    Attributes:
        study: path of the rules file, relative to the folder.
        rules: first commit with the rules of the rows, or "".
        rows: first commit with the rows, or "" if the rows are not committed.
        finding: text that states whether the claims are confirmatory.
        failures: defects of the study that the file KNOWN does not list.
        known: defects that the file KNOWN lists.
    """

    study: str
    rules: str
    rows: str
    finding: str
    failures: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


KNOWN = "known-limits.toml"
"""File of a folder of studies with the defects that the pages about the studies state: lists of texts by study."""
_FALSE_COMMIT = "false commit: a row names a commit without these rules"


def audit(folder: Path) -> list[Audit]:
    """Check all studies below a folder. A study has rules in NAME.toml and rows in NAME.jsonl.xz.

    Defects are a row that names a commit without the rules, and text that dev and confirming samples share. A claim is
    a defect if its sign differs between places of the fact or between texts. No module that a rules file names is
    imported.

    Raises:
        SpecError: if the folder has no study, or is not in a git repository. Also if a rules file names a policy or
            task that is not part of kvspec.
    """
    if git_output(folder, "rev-parse", "HEAD") is None:
        raise SpecError("audit", str(folder), "must be a folder in a git repository")
    files = [path for path in sorted(folder.rglob("*.toml")) if path.with_suffix(".jsonl.xz").is_file()]
    result = [_audited(path, folder) for path in files]
    if not result:
        raise SpecError(
            "audit", str(folder), "must have a rules file NAME.toml in the folder of the results NAME.jsonl.xz"
        )
    return result


def _audited(path: Path, folder: Path) -> Audit:
    rows = _rows(path.with_suffix(".jsonl.xz"))
    rules, confirm = load_rules(path, plugins=False), [row for row in rows if row["part"] == CONFIRM]
    digests, commits = {row["rules"] for row in rows}, {row.get("commit") for row in confirm}
    first_rows = next(iter(_history(path.with_suffix(".jsonl.xz"))), "")
    first_rules = next((commit for commit in _history(path) if _digest_at(path, commit) in digests), "")
    finding = _finding(path, first_rules, first_rows, commits)
    false = bool(rules.claims and {*commits} - {None} - commits_with_rules(rules, confirm))
    shared = shared_text(rows) if rules.claims else ()
    defects = [*([_FALSE_COMMIT] if false else []), *shared, *_pooled(rules, rows)]
    stated = _stated(path)
    failures, known = ([one for one in defects if (one in stated) is kind] for kind in (False, True))
    return Audit(str(path.relative_to(folder)), first_rules, first_rows, finding, tuple(failures), tuple(known))


def _stated(path: Path) -> Sequence[str]:
    """Return the defects of a study that the file KNOWN lists.

    Raises:
        SpecError: if the file cannot be read, or if the value of the study is not a list of texts.
    """
    listed = path.parent / KNOWN
    if not listed.is_file():
        return ()
    text = read_text("audit", listed)
    try:
        stated = parse_toml(text).get(path.stem, [])
    except ValueError as error:
        raise SpecError("audit", str(listed), f"must be a TOML file: {error}") from error
    if not is_list_of(stated, str):
        reason = f"must be a list of texts in quotes: type {path.stem} = [\"...\"] (in {listed})"
        raise SpecError(path.stem, stated, reason)
    return stated


def _rows(path: Path) -> list[Row]:
    rows = parse_rows(read_text("audit", path), path)
    for number, row in enumerate(rows, 1):
        if not all(isinstance(row.get(name), str) for name in ("part", "rules")):
            raise SpecError("audit", f"{path}:{number}", "must be a row of a study, with part and rules")
    return rows


def shared_text(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many confirming samples share text with dev samples, if there are any.

    Tasks made of the same filler sentences always share text. All other samples share text if they have the same
    window, the same `group` in their metadata, or the same context.
    """
    asked = [row for row in rows if "metadata" in row and not row.get("control")]
    dev, confirm = ([_text_of(row) for row in asked if row["part"] == part] for part in (DEV, CONFIRM))
    if count := sum(text in dev for text in confirm):
        yield f"shared text: {count} of {len(confirm)} confirming samples share text with dev samples"


def _text_of(row: Row) -> object:
    about, name = row["metadata"], row["task"].partition("(")[0]
    if name in TABLE and TABLE[name].assembly == SENTENCES:
        return SENTENCES
    return (row["length"], about["window"]) if "window" in about else about.get("group", row["context"])


def _pooled(rules: Rules, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the claims whose sign differs between splits of the confirming samples."""
    asked = [row for row in rows if "cells" in row and row["part"] == CONFIRM and not row.get("control")]
    some = Samples(merged(asked))
    for claim in rules.claims:
        if some.rows and (result := opposite_signs(claim, some)):
            yield f"pooled claim: {claim.name}; opposite signs {result}"


def _finding(path: Path, rules: str, rows: str, commits: set[str | None]) -> str:
    if not load_rules(path, plugins=False).claims:
        return "no claims"
    if not rules:
        return "exploratory: no commit has the rules of these rows"
    if not rows:
        return "open: the rows are not committed"
    if rules == rows or not is_before(path, rules, rows):
        return "exploratory: rules and rows are of one commit"
    if None in commits:
        return "rules before rows; rows of before 0.4 do not name their commit"
    if any(not is_before(path, str(commit), rows) or not is_before(path, rules, str(commit)) for commit in commits):
        return "exploratory: a row names a commit without these rules"
    return "rules before rows, by the commit of every row"


def _history(path: Path) -> list[str]:
    """Return the commits that changed a file, oldest first."""
    return (git_output(path.parent, "rev-list", "--reverse", "HEAD", "--", path.name) or "").split()


def _digest_at(path: Path, commit: str) -> str:
    """Return the digest of a version of a rules file, if all policies and tasks are built into kvspec."""
    return hashlib.sha256(text_at(path, commit)).hexdigest()
