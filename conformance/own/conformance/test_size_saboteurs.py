"""Saboteurs by size: each differs from the reference beyond its size, and on small inputs none does."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from conformance.assurance.saboteurs.install import private_reference, standing_in
from conformance.assurance.saboteurs.registry import BY_SIZE, REGISTRY, Beyond, Saboteur
from conformance.assurance.saboteurs.runs import Case
from conformance.assurance.saboteurs.size_inputs import attended
from conformance.assurance.saboteurs.subtlety import Subject, plain, subject_of
from conformance.items import known_items
from conformance.oracles.scale import selectors as oracle
from conformance.suite import test_scale_selectors as lane
from reference import nestedkv
from reference.crystalcache import coattention
from spec.backend import resolve
from spec.parameters import PAPER, NestedKVParameters

SMALL = 26
DRAWN = 120  # of which the first FEW of at most SMALL tokens are run
FEW = 20

# The least number of each part of the pipeline.
PARTS = {
    "S1": ("CC-ATTENTION", "CC-SALIENCE", "CC-ROW-NORM", "CC-INTRA", "CC-CROSS", "CC-EDGES", "CC-COATTENTION"),
    "S2": ("CC-SENTENCES", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNKS", "CC-ADAPTIVE-MERGE"),
    "S3": ("CC-COUNT", "CC-RARITY", "CC-IMPACT", "CC-TRUNK-IMPACT", "CC-UNIT-IMPACT", "CC-UNIT-TRUNK-IMPACT"),
    "S4": ("CC-TRUNK-EDGES", "CC-TRUNK-WEIGHT", "CC-DEGREE", "CC-CRYSTALLIZATION"),
    "S5": ("CC-NORMALISED-IMPACT", "CC-SCORE"),
    "S6": ("CC-BUDGET", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT", "CC-DISSOLVE-D", "CC-DISSOLVE", "CC-COMPACT"),
    "decode": ("CC-PULSE", "CC-RESONANCE", "CC-ETA", "CC-HEBB", "CC-ACTIVATION", "CC-SEEN-COUNT", "CC-TAIL", "CC-STEP"),
    "policies": (
        "PO-TOP-UNITS", "PO-FILL-UNITS", "PO-H2O", "PO-ADAPTIVE-BUDGET", "PO-WHOLE-SHARES", "PO-PYRAMID-BUDGET",
        "DV-GREEDY", "PO-OBSERVED-ATTENTION",
    ),
}


def listed(value: Any) -> Any:
    """Records as their fields, in every depth."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: listed(inner) for name, inner in vars(value).items()}
    return plain(value)


def small(case: Case) -> bool:
    """Few tokens, and no parameter beyond those of small inputs."""
    tokens = len(case["token_ids"]) if "token_ids" in case else case.get("n", 0)
    return bool(tokens <= SMALL)


def narrowed(case: Case) -> Case:
    """PAPER's k_cross is one of the sizes."""
    if "parameters" not in case:
        return case
    p = case["parameters"]
    return {**case, "parameters": replace(p, k_cross=min(3, p.k_cross))}


def run(subject: Subject) -> list[str]:
    """What comes out of the small ones of the subject's inputs."""
    cases = [narrowed(case) for case in subject.inputs(DRAWN) if small(case)][:FEW]
    return [repr(plain(subject.run(case))) for case in cases]


@cache
def right(item: str) -> list[str]:
    """The reference's."""
    return run(subject_of(item))


def by_size() -> Iterator[tuple[Saboteur, Beyond]]:
    for saboteur in BY_SIZE.values():
        assert saboteur.beyond is not None
        yield saboteur, saboteur.beyond


@pytest.mark.parametrize("name", BY_SIZE)
def test_it_differs_beyond_its_size(name: str) -> None:
    """An exception would be a crash, which says nothing of a reading."""
    beyond = BY_SIZE[name].beyond
    assert beyond is not None
    found, wrong = map(listed, beyond.outcomes())
    assert repr(found) != repr(wrong)


@pytest.mark.parametrize("name", BY_SIZE)
def test_it_does_as_the_reference_on_small_inputs(name: str) -> None:
    saboteur = BY_SIZE[name]
    expected = right(saboteur.item)
    assert len(expected) >= 10
    with standing_in(saboteur):
        assert run(subject_of(saboteur.item)) == expected


def test_what_stood_in_is_gone_afterwards() -> None:
    q, k, *rest = attended(6, 6, 3)
    name = "CC_ATTENTION_THREE_KV_HEADS_INTERLEAVED"
    before = coattention.attention(q, k, *rest)
    with standing_in(BY_SIZE[name]):
        assert (coattention.attention(q, k, *rest) != before).any()
    assert (coattention.attention(q, k, *rest) == before).all()


def test_there_are_five_of_every_part() -> None:
    """And of the whole as many as the field test asked for."""
    items = Counter(saboteur.item for saboteur in BY_SIZE.values())
    assert items.keys() <= known_items()
    assert {part: number for part in PARTS if (number := sum(items[item] for item in PARTS[part])) < 5} == {}
    assert len(BY_SIZE) >= 60


def test_each_says_what_it_gets_wrong_and_up_to_which_size_it_is_right() -> None:
    both: Mapping[str, Saboteur] = {**REGISTRY, **BY_SIZE}
    assert len(both) == len(REGISTRY) + len(BY_SIZE)
    assert len({saboteur.reading for saboteur in both.values()}) == len(both)
    assert all(saboteur.reading.endswith((".", "?")) and beyond.size for saboteur, beyond in by_size())


@pytest.mark.parametrize("name", [name for name in BY_SIZE if name.startswith("NK_")])
def test_the_lane_catches_it_in_single_precision_too(name: str) -> None:
    """NestedKV's certified radius is the widest of the lane's."""
    with standing_in(BY_SIZE[name]):
        assert any(map(beyond_the_radius_of_float32, lane.CASES))


def beyond_the_radius_of_float32(case: tuple[tuple[int, int, int], NestedKVParameters]) -> bool:
    shape, p = case
    head = lane.keys(*shape)[:1]
    want = oracle.nestedkv(head[0], p)
    radius = lane.nestedkv_radius(want, shape, p, "float32")
    return bool(np.abs(nestedkv.anomaly_score(head, p)[0] - want.score).max() > radius)


def test_a_method_is_replaced_in_a_private_copy_too() -> None:
    name = "CC_COATTENTION_LSE_OF_THREE_KV_HEADS_INTERLEAVED"
    copy = private_reference(BY_SIZE[name]).backend
    beyond = BY_SIZE[name].beyond
    assert beyond is not None
    _, *arguments = beyond.arguments()
    found, wrong = (resolve(backend).require_crystal().coattention(*arguments) for backend in ("numpy", copy))
    assert (found.salience != wrong.salience).any()
    assert found.salience.shape == wrong.salience.shape
    assert arguments[3].k_heads == PAPER.k_heads
