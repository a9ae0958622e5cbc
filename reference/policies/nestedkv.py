"""NestedKV: keys that no memory of the prompt explains are kept, and heads compete for the layer's budget."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

from reference.policies.budgets import Competition, even
from reference.policies.keydiff import keydiff
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.arrays import Float64, Matrix
from spec.backend import Backend, NestedKVStages, resolve
from spec.errors import SpecError
from spec.parameters import NESTEDKV, NestedKVParameters
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = [
    "eviction_budget", "nestedkv", "nestedkv_score", "nestedkv_without_adaptive", "nestedkv_without_both",
    "nestedkv_without_continuum",
]


def eviction_budget(r: float | int | str | Fraction, N: int) -> int:
    """Tokens that each head keeps on average where a share r is evicted: floor((1 - r) N), exactly.

    A float is read as its decimal: of 10 tokens at r = 0.8, 2 stay, where floats truncate to 1.

    Implements: NK-TOKENS

    Source: Appendix A.

    Raises:
        SpecError: for r outside [0, 1), or where no token would stay.
    """
    try:
        share = Fraction(str(r))
    except ValueError:
        raise SpecError("r", r, "must be a number in [0, 1)") from None
    if not 0 <= share < 1:
        raise SpecError("r", r, "must lie in [0, 1)")
    kept = math.floor((1 - share) * N)
    if kept < 1:
        raise SpecError("r", r, f"leaves none of {N} tokens")
    return kept


def nestedkv_score(
    view: LayerView, stages: NestedKVStages, parameters: NestedKVParameters,
) -> Float64[Matrix, "H_kv n"]:
    """a* of the layer's keys."""
    return stages.anomaly_score(view.k, parameters)


@named(
    "nestedkv", "NestedKV",
    "keys that three memories (whole prompt, block, recent window) explain least; heads compete", family="nestedkv",
)
def nestedkv(parameters: NestedKVParameters = NESTEDKV, backend: str | Backend = "numpy") -> Policy:
    """Per layer the H_kv B best pairs of head and token, once, at the end of the prompt; each head has its quota.

    Sinks take part in all statistics; then they are pinned, inside the budget and inside the quota. A budget below
    N_sink is refused: it is not raised, so that a layer keeps H_kv B exactly. The authors' code is not public; their
    runs rest on kvpress, which evicts by masks, and on its Ada-KV, whose safeguard is this quota.

    Implements: NK-NESTEDKV

    Source: Section 2.5 and 2.6; Appendix A.

    Raises:
        SpecError: when the backend is unknown.
        BackendUnavailable: when the backend cannot run here, or has no score of NestedKV.
    """
    engine = resolve(backend)
    score = partial(nestedkv_score, stages=engine.require_nestedkv(), parameters=parameters)
    return Policy(
        "nestedkv", LayerScorer(Needs("all", 0, takes=engine.takes), score), Competition(parameters.alpha_s), top_units,
        SinkAndRecent(parameters.N_sink, 0), granularity=Granularity.HEAD,
    )


@named("nestedkv-without-continuum", "NestedKV, ablation", "KeyDiff's score under NestedKV's budgets")
def nestedkv_without_continuum(parameters: NestedKVParameters = NESTEDKV) -> Policy:
    """The ablation "w/o continuum": KeyDiff's score, which has no sinks, under NestedKV's budgets.

    Implements: NK-ABLATIONS

    Source: Table 2.
    """
    return replace(keydiff(), name="nestedkv-without-continuum", budgets=Competition(parameters.alpha_s))


@named(
    "nestedkv-without-adaptive", "NestedKV, ablation", "NestedKV's score, the same number of tokens in each head",
    family="nestedkv",
)
def nestedkv_without_adaptive(
    parameters: NestedKVParameters = NESTEDKV, backend: str | Backend = "numpy",
) -> Policy:
    """The ablation "w/o adaptive": NestedKV's score, the same budget for every head.

    Implements: NK-ABLATIONS

    Source: Table 2.

    Raises:
        SpecError: as `nestedkv`.
        BackendUnavailable: as `nestedkv`.
    """
    return replace(nestedkv(parameters, backend), name="nestedkv-without-adaptive", budgets=even)


@named("nestedkv-without-both", "NestedKV, ablation", "KeyDiff's score, the same number of tokens in each head")
def nestedkv_without_both() -> Policy:
    """Both ablations: KeyDiff, whose figures the paper's are.

    Implements: NK-ABLATIONS

    Source: Table 2.
    """
    return replace(keydiff(), name="nestedkv-without-both")
