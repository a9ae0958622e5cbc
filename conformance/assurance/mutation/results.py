"""What became of each mutant, as JSON lines that a later run goes on from."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from conformance.assurance.mutation.mutants import source_files

__all__ = ["PROFILES", "Result", "append", "digest", "read"]

FILE = "results.jsonl"
PROFILES = ("dev", "ci")  # the cheap one first


@dataclass(frozen=True)
class Result:
    """One verdict. `outcome` is assertion, error (of another kind, raised in a test), timeout or survived."""

    key: str
    digest: str
    outcome: str
    profile: str
    test: str
    raised: str
    ran: int
    seconds: float

    @property
    def killed(self) -> bool:
        return self.outcome != "survived"

    @property
    def undecided(self) -> bool:
        """Whether it survived the cheap profile alone."""
        return not self.killed and self.profile != PROFILES[-1]


def digest(source: str) -> str:
    """Names a module's text: a verdict holds for one."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def append(folder: Path, result: Result) -> None:
    """Add one line; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def read(root: Path, folder: Path) -> dict[str, Result]:
    """The last verdict on each mutant of a module's present text; a line cut off by a kill is left out."""
    valid = {digest(path.read_text(encoding="utf-8")) for path in source_files(root)}
    found, path = {}, folder / FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if result.digest in valid:
            found[result.key] = result
    return found
