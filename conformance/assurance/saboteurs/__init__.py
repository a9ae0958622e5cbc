"""Saboteurs: the reference with one item wrong, one for each reading that the specification rejects.

`python -m conformance.assurance.saboteurs` runs each against the tests of its item, which must kill it by an assertion.
Those by size (the modules size_*) do as the reference does on small inputs: the scale lane must kill them.
`--backend conformance.assurance.saboteurs:NAME` judges one as anybody's backend. Items that no stage holds (a budget's
forms, protection, memory, compaction, the pipeline) leave a backend's stages as they are:
`-p conformance.assurance.saboteurs.plugin --saboteur NAME` puts any of them into the process where the suite runs.
"""

from conformance.assurance.saboteurs import (
    activation,
    blocks,
    breaths,
    cake,
    decode,
    diversity,
    essay,
    injection,
    kvcrush,
    kvzip,
    morphkv,
    nestedkv,
    policies,
    policy_parts,
    s1,
    s1_selection,
    s2,
    s3,
    s4,
    s5,
    s6,
    s6_protection,
    size_blind,
    size_blind_second,
    size_decode,
    size_policies,
    size_s1,
    size_s2_s3,
    size_s4_s5,
    size_s6,
    statistics,
    triattention,
    vase,
    weighed,
    whole,
)
from conformance.assurance.saboteurs.install import private_reference
from conformance.assurance.saboteurs.registry import BY_SIZE, REGISTRY
from spec.backend import Backend

__all__ = ["SABOTEURS"]

SABOTEURS = {**REGISTRY, **BY_SIZE}
STAGES = (
    s1, s1_selection, s2, s3, s4, s5, s6, s6_protection, whole, activation, decode, breaths, essay, policies,
    policy_parts, injection, statistics, nestedkv, diversity, triattention, size_s1, size_s2_s3, size_s4_s5, size_s6,
    size_decode, size_policies, size_blind, size_blind_second,
    weighed, cake, morphkv, blocks, vase, kvzip, kvcrush,
)


def __getattr__(name: str) -> Backend:
    if name not in SABOTEURS:
        raise AttributeError(f"module {__name__!r} has no saboteur {name!r}")
    return private_reference(SABOTEURS[name]).backend
