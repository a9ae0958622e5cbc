"""What each policy promises: the table of spec/policies.md, and one test per cell is made from it."""

from collections.abc import Mapping

from conformance.assurance.strategies.policy_cases import CASES
from conformance.checks.promises import PROPERTIES

__all__ = ["REASONS", "TABLE", "rendered"]

REASONS: Mapping[str, str] = {
    "blocks": "blocks stay or go whole: a share's rest stays empty, and a good token in a weak block loses",
    "chunks": "a chunk's tokens stand or fall together, so a good token in a weak chunk loses",
    "safeguard": "a part of every head's share is its own, so a weak head keeps tokens that score less",
    "ties": "heads that tie are served in order, the lower one first",
    "stages": "in its second stage a token with a small value loses to one that scores less",
    "sample": "each kept set draws its own numbers, and a token that scores less can arrive first",
    "threshold": "what scores too little goes, however much room there is",
    "none": "no token is protected",
    "set": "a token like one that is kept loses to another that scores less",
    "positions": "it looks at positions alone",
    "keys": "it looks at keys, or keys and values, and at no query",
}

_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "streamingllm": {"head permutation": "N/A: positions", "GQA": "N/A: positions"},
    "chunkkv": {"higher score never loses": "no: chunks"},
    "chunkkv-described": {"higher score never loses": "no: chunks", "protection holds": "N/A: none"},
    "tova": {"protection holds": "N/A: none"},
    "keydiff": {"protection holds": "N/A: none", "GQA": "N/A: keys"},
    "knorm": {"protection holds": "N/A: none", "GQA": "N/A: keys"},
    "lagkv": {"GQA": "N/A: keys"},
    "caote": {"protection holds": "N/A: none"},
    "epicache": {"protection holds": "N/A: none"},
    "defensivekv": {"head permutation": "no: ties"},
    "nestedkv": {"higher score never loses": "no: safeguard", "head permutation": "no: ties", "GQA": "N/A: keys"},
    "nestedkv-without-continuum": {
        "protection holds": "N/A: none", "higher score never loses": "no: safeguard", "GQA": "N/A: keys",
    },
    "nestedkv-without-adaptive": {"GQA": "N/A: keys"},
    "nestedkv-without-both": {"protection holds": "N/A: none", "GQA": "N/A: keys"},
    "adakv": {"higher score never loses": "no: safeguard", "head permutation": "no: ties"},
    "criticalkv": {"higher score never loses": "no: stages"},
    "critical-adakv": {"higher score never loses": "no: stages", "head permutation": "no: ties"},
    "kvzip-heads": {"head permutation": "N/A: positions", "GQA": "N/A: positions"},
    "vase": {"higher score never loses": "no: sample", "head permutation": "no: sample"},
    "threshold": {"budget exact": "no: threshold", "no-op at full budget": "no: threshold"},
    "blocks": {"budget exact": "no: blocks", "higher score never loses": "no: blocks"},
    "kvcrush": {"budget exact": "no: blocks", "higher score never loses": "no: blocks"},
    "blocks-of-h2o": {"budget exact": "no: blocks", "higher score never loses": "no: blocks"},
    "triattention": {"protection holds": "N/A: none"},
    "triattention-by-head": {"protection holds": "N/A: none"},
    "triattention-by-layer-and-head": {"protection holds": "N/A: none"},
    "diversity": {"protection holds": "N/A: none", "higher score never loses": "no: set"},
    "diversity-in-adakv": {"higher score never loses": "no: set", "head permutation": "no: ties"},
}

TABLE: Mapping[str, Mapping[str, str]] = {
    name: {promise: _OTHERWISE.get(name, {}).get(promise, "yes") for promise in PROPERTIES} for name in CASES
}


def rendered() -> str:
    """The table in Markdown, then what its columns and reasons mean."""
    rows = [["policy", *PROPERTIES], ["---"] * (len(PROPERTIES) + 1)]
    rows += [[name, *cells.values()] for name, cells in TABLE.items()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"- **{name}**: {promise.says}." for name, promise in PROPERTIES.items())]
    lines += ["", *(f"- *{name}*: {why}." for name, why in REASONS.items())]
    return "\n".join(lines)
