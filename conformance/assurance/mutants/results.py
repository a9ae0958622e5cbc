"""What became of each mutant, as JSON lines that a later run goes on from."""

import json
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["PROFILES", "Result", "append", "forget", "read"]

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
    any_backend: bool = False

    @property
    def killed(self) -> bool:
        return self.outcome != "survived"

    @property
    def undecided(self) -> bool:
        """Whether it survived the cheap profile alone."""
        return not self.killed and self.profile != PROFILES[-1]


def append(folder: Path, result: Result) -> None:
    """Add one line; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def read(folder: Path, digests: Mapping[str, str]) -> dict[str, Result]:
    """The last verdict on each mutant that still has this digest; a line cut off by a kill is left out."""
    found, path = {}, folder / FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if digests.get(result.key) == result.digest:
            found[result.key] = result
    return found


def forget(folder: Path, keys: Container[str]) -> None:
    """Remove the verdicts on some mutants, which are then tried again."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    left = [line for line in lines if json.loads(line)["key"] not in keys]
    if lines:
        path.write_text("".join(left), encoding="utf-8")
