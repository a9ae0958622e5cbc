"""NestedKV: keeps keys that differ from the prompt's memories (mean keys); heads compete for the layer's budget."""

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
    """Return the tokens that each head keeps on average if the share r is evicted: floor((1 - r) N), computed exactly.

    A float is read as its decimal: 2 of 10 tokens are kept at r = 0.8, but float arithmetic would give 1.

    Implements: NK-TOKENS

    Source: Appendix A.

    Raises:
        SpecError: if r is outside [0, 1), or if the result is 0.
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
    """Return the score a* of a layer's keys, computed by the backend's stage."""
    return stages.anomaly_score(view.k, parameters)


@named(
    "nestedkv", "NestedKV",
    "keys that three memories (whole prompt, block, recent window) explain least; heads compete", family="nestedkv",
)
def nestedkv(parameters: NestedKVParameters = NESTEDKV, backend: str | Backend = "numpy") -> Policy:
    """Return NestedKV: each layer keeps the H_kv B best pairs of head and token, and each head at least a quota.

    The policy decides once, at the end of the prompt. Sinks count in all statistics. They are always kept, and count in
    the budget and in the quota. A budget below N_sink is an error: it is not increased, so a layer keeps exactly H_kv B
    tokens. The authors' code is not public. Their experiments use kvpress, which masks tokens instead of evicting them;
    the quota is the safeguard of kvpress's Ada-KV.

    Implements: NK-NESTEDKV

    Source: Section 2.5 and 2.6; Appendix A.

    Raises:
        SpecError: if the backend is unknown.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family nestedkv.
    """
    engine = resolve(backend)
    score = partial(nestedkv_score, stages=engine.require_nestedkv(), parameters=parameters)
    return Policy(
        "nestedkv", LayerScorer(Needs("all", 0, takes=engine.takes), score), Competition(parameters.alpha_s), top_units,
        SinkAndRecent(parameters.N_sink, 0), granularity=Granularity.HEAD,
    )


@named("nestedkv-without-continuum", "NestedKV, ablation", "KeyDiff's score under NestedKV's budgets")
def nestedkv_without_continuum(parameters: NestedKVParameters = NESTEDKV) -> Policy:
    """Return the ablation "w/o continuum": KeyDiff's score, without sinks, with NestedKV's budgets.

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
    """Return the ablation "w/o adaptive": NestedKV's score with the same budget for every head.

    Implements: NK-ABLATIONS

    Source: Table 2.

    Raises:
        SpecError: as in `nestedkv`.
        BackendUnavailable: as in `nestedkv`.
    """
    return replace(nestedkv(parameters, backend), name="nestedkv-without-adaptive", budgets=even)


@named("nestedkv-without-both", "NestedKV, ablation", "KeyDiff's score, the same number of tokens in each head")
def nestedkv_without_both() -> Policy:
    """Return both ablations together, which is KeyDiff. The paper's figures for it are those of KeyDiff.

    Implements: NK-ABLATIONS

    Source: Table 2.
    """
    return replace(keydiff(), name="nestedkv-without-both")
