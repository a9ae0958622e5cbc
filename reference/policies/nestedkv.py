"""NestedKV keeps keys that differ from mean keys of the prompt. The heads of a layer compete for the layer's budget."""

import math
from dataclasses import fields, replace
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
    """Return floor((1 - r) N): how many of N tokens each head keeps on average if the fraction r is evicted.

    A float r means the decimal number that Python prints for r. For r = 0.8 and N = 10 the result is 2, although
    floor((1 - 0.8) * 10) in float arithmetic is 1.

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
        raise SpecError("r", r, f"evicts all {N} tokens; use a smaller r")
    return kept


def nestedkv_score(
    view: LayerView, stages: NestedKVStages, parameters: NestedKVParameters,
) -> Float64[Matrix, "H_kv n"]:
    """Return the score a* of each key of a layer. The backend's stage `anomaly_score` computes the scores."""
    return stages.anomaly_score(view.k, parameters)


@named(
    "nestedkv", "NestedKV",
    "tokens whose keys differ most from the mean keys of prompt, block and window; heads of a layer share one budget",
    family="nestedkv",
)
def nestedkv(parameters: NestedKVParameters = NESTEDKV, backend: str | Backend = "numpy") -> Policy:
    """Return NestedKV: each layer keeps its H_kv B best-scored (head, token) pairs, with a quota for each head.

    The policy decides once, at the end of the prompt. The quota is the smallest number of tokens that each head keeps.
    The sinks are always kept. The statistics, the budget and the quota include the sinks. A layer keeps exactly H_kv B
    tokens. A budget B below N_sink is raised to N_sink. The authors' code is not public. The paper's experiments use
    kvpress, which masks tokens instead of evicting them. The quota is computed like the safeguard of Ada-KV in kvpress.

    Implements: NK-NESTEDKV

    Source: Sections 2.5 and 2.6, and Appendix A.

    Raises:
        SpecError: if the backend is unknown.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family `nestedkv`.
    """
    engine = resolve(backend)
    # alpha_s is a constant of the budgets alone. Scorers with different alpha_s are equal.
    scoring = replace(parameters, alpha_s=NESTEDKV.alpha_s)
    score = partial(nestedkv_score, stages=engine.require_nestedkv(), parameters=scoring)
    needs = Needs("all", query_rows=0, accepts_tensor=engine.accepts_tensor)
    scorer = LayerScorer(needs, score, unscored=(parameters.N_sink, 0))
    return Policy(
        "nestedkv", scorer, Competition(parameters.alpha_s), top_units, SinkAndRecent(parameters.N_sink, 0),
        granularity=Granularity.HEAD,
    )


@named(
    "nestedkv-without-continuum", "NestedKV, ablation",
    "tokens with the best KeyDiff scores; the heads of a layer share one budget",
    unused=frozenset(one.name for one in fields(NestedKVParameters)) - {"alpha_s"},
)
def nestedkv_without_continuum(parameters: NestedKVParameters = NESTEDKV) -> Policy:
    """Return the ablation "w/o continuum": NestedKV with KeyDiff's score and no protected sinks.

    Implements: NK-ABLATIONS

    Source: Table 2.
    """
    return replace(keydiff(), name="nestedkv-without-continuum", budgets=Competition(parameters.alpha_s))


@named(
    "nestedkv-without-adaptive", "NestedKV, ablation",
    "tokens with the best NestedKV scores; each head keeps the same number of tokens", family="nestedkv",
    unused=frozenset({"alpha_s"}),
)
def nestedkv_without_adaptive(
    parameters: NestedKVParameters = NESTEDKV, backend: str | Backend = "numpy",
) -> Policy:
    """Return the ablation "w/o adaptive": NestedKV with an equal budget for each head.

    Implements: NK-ABLATIONS

    Source: Table 2.

    Raises:
        SpecError: as in `nestedkv`.
        BackendUnavailable: as in `nestedkv`.
    """
    return replace(nestedkv(parameters, backend), name="nestedkv-without-adaptive", budgets=even)


@named("nestedkv-without-both", "NestedKV, ablation", "the same tokens as keydiff")
def nestedkv_without_both() -> Policy:
    """Return KeyDiff, which equals NestedKV with both ablations. The paper prints equal results for the two policies.

    Implements: NK-ABLATIONS

    Source: Table 2.
    """
    return replace(keydiff(), name="nestedkv-without-both")
