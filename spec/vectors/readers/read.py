"""Read all vectors and check PO-KNORM with Python's standard library. Usage: `python read.py vectors/*.json`."""

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

M = 2**64 - 1


def word(seed: int, t: int) -> int:
    """Return word t of the SplitMix64 generator with this seed."""
    z = seed + t * 0x9E3779B97F4A7C15 & M
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M
    return z ^ z >> 31


def floats(x: Any) -> Any:
    """Convert an input of floats: text, nested lists of text, or the compact form `choice`."""
    if isinstance(x, str):
        return float.fromhex(x)
    if isinstance(x, list):
        return [floats(inner) for inner in x]
    of, shape = floats(x["of"]), x["shape"]
    flat = [of[word(x["seed"], t) % len(of)] for t in range(1, prod(shape) + 1)]
    for size in shape[:0:-1]:
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


def knorm(heads: Any, B: int) -> list[list[int]]:
    """Return the positions of the B smallest keys of each head (PO-KNORM). At ties the lower position wins."""
    squares = [[sum(x * x for x in key) for key in head] for head in heads]
    return [sorted(sorted(range(len(row)), key=lambda at: row[at])[:B]) for row in squares]


if __name__ == "__main__":
    read, checked, wrong = 0, 0, 0
    for group in (group for path in sys.argv[1:] for group in json.loads(Path(path).read_text())["testGroups"]):
        read += len(group["tests"])
        for test in group["tests"] if group["operation"] == "PO-KNORM" else ():
            checked += 1
            heads = [head for layer in floats(test["inputs"]["k"]) for head in layer]
            if knorm(heads, test["inputs"]["B"]) != test["expected"]["kept"]:
                wrong += 1
                print(f"tcId {test['tcId']} is wrong: {test['comment']}")
    print(f"{read} vectors read, {checked} of PO-KNORM checked, {wrong} wrong")
    sys.exit(wrong > 0)
