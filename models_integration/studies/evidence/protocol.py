"""Order of work for confirmatory claims: first the rules are committed, then dev rows, then confirming rows."""

import hashlib
import json
import lzma
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from models_integration.studies.evidence.kept import RANDOMS, control_of
from models_integration.studies.evidence.rules import Rules, load_rules
from models_integration.studies.results import Row
from models_integration.tasks.needle import CONFIRM, DEV
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["Audit", "audit", "check_controls", "check_order", "processor", "registered"]


def registered(rules: Rules, path: Path) -> str:
    """Return the commit that contains the present rules and calibration.

    Raises:
        SpecError: if a file is not in git, or has changed since the last commit.
    """
    for file in (path, *([path.parent / rules.calibration] if rules.calibration else [])):
        tracked = _git(file.parent, "ls-files", "--error-unmatch", "--", file.name)
        if tracked is None or _git(file.parent, "status", "--porcelain", "--", file.name) != "":
            reason = "has uncommitted changes: commit rules file and calibration before you run confirming samples"
            raise SpecError("rules", str(file), reason)
    return _git(path.parent, "rev-parse", "HEAD") or ""


def check_order(rules: Rules, rows: Iterable[Row], parts: Sequence[str]) -> None:
    """Check that the dev samples of claims are measured before the confirming samples.

    Raises:
        SpecError: if a run has both parts, or if dev samples follow confirming samples.
    """
    if not rules.claims or DEV not in parts:
        return
    if CONFIRM in parts:
        raise SpecError("part", "all", "must be dev, and confirm in a second run, because the rules file has claims")
    if any(row["part"] == CONFIRM and row["rules"] == rules.digest for row in rows):
        raise SpecError(
            "part", DEV, "must not follow the confirming samples: change the rules file to draw new samples"
        )


def check_controls(rules: Rules, policies: dict[str, Policy]) -> None:
    """Check that a claim about a random control names the control with the policy's granularity.

    Raises:
        SpecError: if the granularities differ.
    """
    for claim in rules.claims:
        if claim.second in RANDOMS and claim.first in policies:
            wanted = control_of(claim.first, policies[claim.first].granularity.value)
            if claim.second != wanted:
                raise SpecError(f"claim {claim.name!r}: second", claim.second, f"must be {wanted} for {claim.first}")


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@dataclass(frozen=True)
class Audit:
    """Result of the check of a study's git history.

    Attributes:
        study: path of the rules file, relative to the folder.
        rules: first commit with the rules of the rows, or "".
        rows: first commit with the rows, or "" if the rows are not committed.
        finding: text that says whether the claims are confirmatory.
    """

    study: str
    rules: str
    rows: str
    finding: str


def audit(folder: Path) -> list[Audit]:
    """Check all studies below a folder. A study has rules in NAME.toml and rows in NAME.jsonl.xz.

    Raises:
        SpecError: if the folder has no study, or is not in a git repository.
    """
    if _git(folder, "rev-parse", "HEAD") is None:
        raise SpecError("audit", str(folder), "must be a folder in a git repository")
    files = [path for path in sorted(folder.rglob("*.toml")) if path.with_suffix(".jsonl.xz").exists()]
    found = [_audited(path, folder) for path in files]
    if not found:
        raise SpecError(
            "audit", str(folder), "must have a rules file NAME.toml in the folder of the results NAME.jsonl.xz"
        )
    return found


def _audited(path: Path, folder: Path) -> Audit:
    results = path.with_suffix(".jsonl.xz")
    with lzma.open(results, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    digests, commits = {row["rules"] for row in rows}, {row.get("commit") for row in rows if row["part"] == CONFIRM}
    first_rows = next(iter(_history(results)), "")
    first_rules = next((commit for commit in _history(path) if _digest_at(path, commit) in digests), "")
    finding = _finding(path, first_rules, first_rows, commits)
    return Audit(str(path.relative_to(folder)), first_rules, first_rows, finding)


def _finding(path: Path, rules: str, rows: str, commits: set[str | None]) -> str:
    if not load_rules(path).claims:
        return "no claims"
    if not rules:
        return "exploratory: no commit has the rules of these rows"
    if not rows:
        return "open: the rows are not committed"
    if rules == rows or not _before(path, rules, rows):
        return "exploratory: rules and rows are of one commit"
    if None in commits:
        return "rules before rows; rows of before 0.4 do not name their commit"
    if any(not _before(path, str(commit), rows) or not _before(path, rules, str(commit)) for commit in commits):
        return "exploratory: a row names a commit without these rules"
    return "rules before rows, by the commit of every row"


def _history(path: Path) -> list[str]:
    """Return the commits that changed a file, oldest first."""
    return (_git(path.parent, "log", "--reverse", "--format=%H", "--", path.name) or "").split()


def _digest_at(path: Path, commit: str) -> str:
    """Return the digest of a version of a rules file, if all policies and tasks are built into kvspec."""
    command = ["git", "show", f"{commit}:./{path.name}"]
    shown = subprocess.run(command, cwd=path.parent, capture_output=True, check=False)
    return hashlib.sha256(shown.stdout).hexdigest()


def _before(path: Path, first: str, second: str) -> bool:
    """Return True if the first commit equals the second commit or is an ancestor of it."""
    return _git(path.parent, "merge-base", "--is-ancestor", first, second) is not None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
