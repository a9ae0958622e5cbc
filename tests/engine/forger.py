"""Engine that fails every request and tries to forge the verdict: `python forger.py`.

The engine searches for the outcomes of the tests. It reads the argument lists, the environment and the open files of
the processes that started it, and all inherited files. It replaces each outcome by a passed test. According to
spec/certificate.md, an engine that is started by a command cannot do this.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HELLO = {
    "protocol": 1, "spec": "0.4.0", "name": "forger", "version": "1", "precision": "float64",
    "families": {"diversity": ["diverse"]},
}


def ancestors() -> Iterator[Path]:
    """Yield the folders in /proc of the parent process and of its parent."""
    number = os.getppid()
    for _ in range(2):
        yield Path(f"/proc/{number}")
        number = int(Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def named_files() -> Iterator[Path]:
    """Yield the files that are named in the arguments or the environment of the parent processes."""
    for process in ancestors():
        for source in ("cmdline", "environ"):
            words = (process / source).read_bytes().decode(errors="replace").split("\0")
            for word in words:
                path = Path(re.sub(r"^[-\w]*=", "", word))
                if path.suffix in (".jsonl", ".fifo") and path.exists():
                    yield path


def forged(lines: list[dict[str, Any]]) -> bytes:
    """Return the lines with each outcome replaced by a passed test."""
    collected = next((line for line in lines if "collected" in line), {"collected": {
        "test_tiny.py::test_known[a]": {"items": ["DV-GREEDY", "DV-COSINE"], "exceptions": []},
    }})
    record = {"state": "passed", "reason": "", "examples": 9, "name": "forger", "families": ["diversity"],
            "failure": None, "scored": []}
    rows = [row for test in collected["collected"] for row in ({"began": test}, {"test": test, **record})]
    return b"".join(json.dumps(row).encode() + b"\n" for row in [collected, *rows])


def forge() -> None:
    """Write forged outcomes to every file and file descriptor that may contain outcomes."""
    for path in named_files():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        path.rename(path.with_suffix(".old"))
        path.write_bytes(forged(lines))
    for number in range(3, 256):
        with suppress(OSError):
            os.write(number, forged([]))
    for opened in (next(ancestors()) / "fd").iterdir():
        with suppress(OSError):
            if opened.name not in ("0", "1", "2"):
                os.write(os.open(opened, os.O_WRONLY | os.O_NONBLOCK), forged([]))


if __name__ == "__main__":
    for text in sys.stdin:
        asked = json.loads(text)
        if asked["op"] == "hello":
            print(json.dumps({"id": asked["id"], "result": HELLO}), flush=True)
            continue
        with suppress(OSError, ValueError):
            forge()
        print(json.dumps({"id": asked["id"], "error": "forged"}), flush=True)
