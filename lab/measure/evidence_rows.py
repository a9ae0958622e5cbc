"""Rows of the studies on real weights, and the names of tasks and policies on the pages about the studies."""

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from experiments.studies.evidence.rules import TEMPLATE
from experiments.studies.evidence.samples import Samples

__all__ = [
    "DELAYED", "FACT", "FACTS", "HOME", "KINDS", "NAMES", "NEEDLE", "PAIRS", "PLACES", "PROSE", "ROOT", "rows_of",
    "samples_of",
]

ROOT = Path(__file__).parents[2]
HOME = ROOT / "docs" / "results" / "smollm2"

FACTS = ("needle_in_prose", "keys_in_prose_2", "keys_in_prose_4")
PAIRS, PROSE = ("key_value_short",), ("prose_continuation",)
FACT = ("fact",)
NEEDLE, DELAYED = ("needle",), ("delayed_association",)
NAMES = {
    "fullcache": "full cache", "evidence": "evidence, then random", "random": "random tokens in each head",
    'crystalcache(k_heads=0, graph="zero", T_max=1)': "rarity alone", "nestedkv": "NestedKV",
    "crystalcache(observed_layer=-1)": "CrystalCache, last layer observed",
    "crystalcache(observed_layer=1)": "CrystalCache, second layer observed", "keydiff": "KeyDiff",
    'crystalcache(graph="zero")': "CrystalCache without D", "knorm": "Knorm", "chunkkv": "ChunkKV",
    "streamingllm": "StreamingLLM", "crystalcache": "CrystalCache", "expected-attention": "Expected Attention",
    "adakv": "Ada-KV", "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "kvzip": "KVzip", "kvzip-plus": "KVzip+",
    "lagkv": "LagKV", "kvzip-uniform": "KVzip, the same number in each head", "vase@prompt": "VaSE",
    "critical-adakv": "CriticalAdaKV", "cake": "CAKE", "criticalkv": "CriticalKV over SnapKV",
    "morphkv@prompt": "MorphKV", "h2o@prompt": "H2O", "tova@prompt": "TOVA", "vatp@prompt": "VATP",
    "kvzip-heads": "KVzip's full and streaming heads",
    "random-shared": "random tokens, one set for all heads", "random-trunks": "random trunks",
    "random-heads": "random heads",
    "crystalcache(observed_layer=-3)": "CrystalCache, third-last layer observed",
    'crystalcache(observed_layer=-3, graph="zero")': '`crystalcache(observed_layer=-3, graph="zero")`',
    'crystalcache(observed_layer=-3, graph="zero", T_max=1)': "tokens, no D, third-last layer observed",
    'crystalcache(observed_layer=-1, graph="zero")': "CrystalCache without D, last layer observed",
    'crystalcache(observed_layer=-1, rarity="reciprocal")': "CrystalCache, reciprocal rarity, last layer observed",
    'crystalcache(observed_layer=-1, impact="salience")': "CrystalCache without rarity, last layer observed",
    "kvcrush": "KVCrush, blocks of 16", "snapkv(block=16)": "SnapKV in blocks of 16",
}

KINDS = {
    PAIRS: "Pairs", PROSE: "Prose", DELAYED: "Delayed association",
    (*NEEDLE, *DELAYED): "Needle and delayed association",
}
PLACES = {"after": "after", "in_prompt": "in the prompt", "paper": "as in the paper"}


@cache
def rows_of(study: str) -> list[dict[str, Any]]:
    """Return the rows of a study."""
    with lzma.open(HOME / f"{study}.jsonl.xz") as file:
        return [json.loads(line) for line in file]


@cache
def samples_of(study: str, part: str = "confirm") -> Samples:
    """Return the samples of a study's part. Contexts of the same filler sentences differ only in their template."""
    clusters = TEMPLATE if study == "paper-tasks" else ""
    return Samples([row for row in rows_of(study) if row["part"] == part], clusters)
