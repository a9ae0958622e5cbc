"""The cases, by stage: file of spec/vectors, and its groups."""

from collections.abc import Sequence

from conformance.assurance.vector_writer.case import Group
from conformance.assurance.vector_writer.cases import (
    breath,
    budgets,
    coattention,
    dissolution,
    diversity,
    essay,
    graph,
    impact,
    injection,
    large,
    nestedkv,
    policies,
    prefill,
    score,
    triattention,
    trunks,
)

__all__ = ["STAGES"]

SMALL: dict[str, Sequence[Group]] = {
    "budgets": budgets.GROUPS,
    "coattention": coattention.GROUPS,
    "trunks": trunks.GROUPS,
    "impact": impact.GROUPS,
    "graph": graph.GROUPS,
    "score": score.GROUPS,
    "dissolution": dissolution.GROUPS,
    "prefill": prefill.GROUPS,
    "breath": breath.GROUPS,
    "essay": essay.GROUPS,
    "injection": injection.GROUPS,
    "policies": policies.GROUPS,
    "nestedkv": nestedkv.GROUPS,
    "diversity": diversity.GROUPS,
    "triattention": triattention.GROUPS,
}

STAGES = {stage: [*groups, *large.LARGE.get(stage, [])] for stage, groups in SMALL.items()}
