"""How subtle a saboteur is: on how many of 200 random inputs it does as the reference does, to the bit.

What a prefill calls is compared end to end: kept positions, ratios, scores and D. So are decode (a prompt, nine tokens,
a later turn) and the policies with their parts (kept sets). What none of these calls is compared on random inputs of
its own item.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import spec
from conformance.assurance.saboteurs import runs
from conformance.assurance.saboteurs.drawn_inputs import DRAWN, drawn_inputs
from conformance.assurance.saboteurs.install import install
from conformance.assurance.saboteurs.registry import Saboteur
from conformance.assurance.saboteurs.runs import Case
from conformance.assurance.strategies.policy_cases import CASES
from conformance.items import items_of

__all__ = ["INPUTS", "agreement", "outcomes", "subject_of"]

INPUTS = 200
# What only the forms of spec/crystalcache_essay.md call is compared where they are in use.
ESSAY_ITEMS = (
    "CC-MEAN-SALIENCE", "CC-UNIT-IMPACT", "CC-UNIT-TRUNK-IMPACT", "CC-TIER-COUNT", "CC-TIERS", "CC-RARITY-FORMS",
    "CC-ADAPTIVE-MERGE", "CC-COVERAGE",
)
# What a first prompt cannot tell apart: a later segment stands behind evicted tokens.
SEGMENT_ITEMS = ("CC-COATTENTION", "CC-EDGES", "CC-TRUNKS")
PARTS_IN_USE = (
    "snapkv", "pyramidkv", "chunkkv", "adakv", "h2o", "defensivekv", "nestedkv", "criticalkv", "cake", "vase", "kvzip",
    "kvcrush",
)
# Of a page's parts, the policies that are made of them.
WHOLES = {"DV": "DV-POLICY", "TA": "TA-POLICY", "NK": "NK-NESTEDKV"}
# What also shows while tokens are decoded.
STEPPED = {
    "PO-H2O": "h2o", "PO-VATP": "vatp", "PO-MORPHKV": "morphkv", "PO-VASE": "vase", "TA-RANKING": "triattention",
    "TA-POLICY": "triattention", "DV-POLICY": "diversity",
}


@dataclass(frozen=True)
class Subject:
    """What is run on which inputs; saboteurs of the same name share what the reference does."""

    name: str
    inputs: Callable[[int], list[Case]]
    run: Callable[[Case], Any]


LIFE = Subject("life", runs.prompts, runs.life)
PREFILL = Subject("prefill", runs.prompts, runs.prefilled)
ESSAY = Subject("essay", runs.essay_prompts, runs.prefilled)
OWN: Mapping[str, Subject] = {
    **{item: Subject(item, partial(drawn_inputs, item), partial(runs.alone, item)) for item in DRAWN},
    "PO-TURN": Subject("PO-TURN", runs.turn_seeds, runs.turn_kept),
    "PO-READ": Subject("PO-READ", runs.turn_seeds, runs.read_kept),
    "CC-COMPACT": Subject("CC-COMPACT", runs.caches, runs.compacted),
    "TA-CALIBRATION": Subject("TA-CALIBRATION", runs.identities, runs.calibration_read),
}


@cache
def of_decode() -> frozenset[str]:
    """The items of decode, which no prefill calls."""
    page = Path(spec.__file__).with_name("crystalcache_decode.md").read_text(encoding="utf-8")
    return frozenset(name for name, _ in items_of(page))


def subject_of(item: str) -> Subject:
    """What shows the item's work."""
    if item in OWN:
        return OWN[item]
    if item.startswith("IN-"):
        raise LookupError(f"{item}: conformance/assurance/saboteurs/drawn_inputs.py draws nothing for it")
    if not item.startswith("CC-"):
        return policies_of(item)
    if item in SEGMENT_ITEMS or item in of_decode():
        return LIFE
    return ESSAY if item in ESSAY_ITEMS else PREFILL


def policies_of(item: str) -> Subject:
    """The item's policy, or those that its part is in use in."""
    own = item if any(case.item == item for case in CASES.values()) else WHOLES.get(item[:2])
    names = tuple(name for name, case in CASES.items() if case.item == own) or PARTS_IN_USE
    steps = tuple(name for of, name in STEPPED.items() if of == item)
    return Subject(f"{' '.join(names)}; {' '.join(steps)}", runs.seeds, partial(runs.policy_kept, names, steps))


def outcomes(subject: Subject) -> list[str]:
    """What comes out for each input in this process, as text; an exception is an outcome too."""
    found = []
    for case in subject.inputs(INPUTS):
        try:
            found.append(repr(plain(subject.run(case))))
        except Exception as error:  # a saboteur may break anywhere
            found.append(type(error).__name__)
    return found


def plain(value: Any) -> Any:
    """Arrays as their type and lists, in every depth."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def agreement(saboteur: Saboteur, right: list[str]) -> int:
    """On how many inputs the saboteur has what the reference has; it stays in this process."""
    install(saboteur)
    return sum(map(str.__eq__, outcomes(subject_of(saboteur.item)), right))
