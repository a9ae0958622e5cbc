"""Order of work for confirmatory claims: first the rules are committed, then dev rows, then confirming rows."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.studies.evidence.kept import RANDOMS, control_of
from experiments.studies.evidence.rules import Rules
from experiments.studies.evidence.trunk_forms import TRUNK_FORMS
from experiments.studies.results import Row
from experiments.tasks.needle import CONFIRM, DEV
from spec.errors import SpecError
from spec.policy import Policy

__all__ = [
    "check_controls", "check_order", "commits_with_rules", "git_output", "is_before", "processor", "registered",
    "text_at",
]

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
"""Names of commits that rows may have. A different text could be an option of git, or a name such as HEAD."""


def registered(rules: Rules, path: Path) -> str:
    """Return the commit that contains the present rules and calibration.

    Raises:
        SpecError: if a file is not in git, or has changed since the last commit.
    """
    for file in (path, *([path.parent / rules.calibration] if rules.calibration else [])):
        if not _is_committed(file):
            reason = "has uncommitted changes: commit rules file and calibration before you run confirming samples"
            raise SpecError("rules", str(file), reason)
    return git_output(path.parent, "rev-parse", "HEAD") or ""


def _is_committed(file: Path) -> bool:
    """Return True if the last commit has exactly the bytes of a file."""
    try:
        done = _git(file.parent, "cat-file", "blob", f"HEAD:./{file.name}")
        return done.returncode == 0 and done.stdout == file.read_bytes()
    except OSError:  # git is not installed, or there is no such file
        return False


def commits_with_rules(rules: Rules, rows: Iterable[Row]) -> frozenset[str]:
    """Return the commits of rows that are ancestors of the present commit and contain the rules of these rows."""
    named = {(str(row["commit"]), str(row["rules"])) for row in rows if row.get("commit")}
    if not rules.source:
        return frozenset()
    return frozenset(commit for commit, digest in named if _has_rules(Path(rules.source), rules.digest, commit, digest))


def _has_rules(path: Path, present: str, commit: str, digest: str) -> bool:
    """Return True if a commit is before the present commit, and its rules file has the digest of a row.

    Args:
        path: rules file.
        present: digest of the present rules, with the user's modules.
        commit: commit that a row names.
        digest: digest of the row's rules.
    """
    if not is_before(path, commit, "HEAD"):
        return False
    text = text_at(path, commit)
    return hashlib.sha256(text).hexdigest() == digest or (present == digest and text == path.read_bytes())


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

    The controls of TRUNK_FORMS are not random, and any policy can be compared with them.

    Raises:
        SpecError: if the granularities differ.
    """
    for claim in rules.claims:
        if claim.second in RANDOMS and claim.second not in TRUNK_FORMS and claim.first in policies:
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


def text_at(path: Path, commit: str) -> bytes:
    """Return a version of a file, or nothing if the commit has no such file."""
    return _git(path.parent, "cat-file", "blob", f"{commit}:./{path.name}").stdout


def is_before(path: Path, first: str, second: str) -> bool:
    """Return True if the first commit equals the second commit or is an ancestor of it.

    Args:
        path: file in the repository.
        first: full hash of a commit. For all other texts, the result is False.
        second: full hash of a commit, or HEAD.
    """
    if not _COMMIT.fullmatch(first) or not (second == "HEAD" or _COMMIT.fullmatch(second)):
        return False
    return git_output(path.parent, "merge-base", "--is-ancestor", first, second) is not None


def git_output(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git fails or is not installed."""
    try:
        done = _git(folder, *arguments)
    except OSError:
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder whose .git/config may be of a stranger.

    All commands read only commits and stored files. Other commands run programs that .git/config names: commands that
    read the index or the files, such as `git status`, or that show commits, such as `git log`. Objects that a partial
    clone lacks are not fetched, because a fetch runs programs too. A name of a file, such as *.toml, is no pattern.
    """
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, check=False,
        env={**os.environ, "GIT_ALLOW_PROTOCOL": "", "GIT_LITERAL_PATHSPECS": "1"},
    )
