"""TOVA: at each decode step, all heads of a layer keep the tokens that the last query attends to most."""

from functools import partial

from reference.policies.attention import received_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, Received
from reference.policies.selectors import top_tokens
from spec.arrays import Float64, Matrix
from spec.backend import Backend, resolve
from spec.composition import LAYER_SETS
from spec.policy import Cadence, LayerView, Needs, Policy
from spec.retention import Granularity

__all__ = ["tova", "tova_score"]


def tova_score(view: LayerView, received: Received = received_attention) -> Float64[Matrix, "one n"]:
    """Return the last query's attention on every key, averaged over all query heads. The query's own key is included.

    Implements: PO-TOVA

    Source: TOVA, Section 3.2.
    """
    last = view.q[:, view.q.shape[1] - 1 :]
    total: Matrix = received(last, view.k, view.scaling, view.softcap, view.sinks).sum(axis=0, keepdims=True)
    return total / len(view.q)


@named("tova", "Oren et al., TOVA (arXiv 2401.06104)", "tokens that the newest query attends to most")
def tova(backend: str | Backend = "numpy") -> Policy:
    """Return TOVA: at each decode step each layer keeps its B best-scored tokens. Even the newest token can be evicted.

    TOVA in kvpress decides once, after the prompt, and never evicts the last token.

    Raises:
        SpecError: if the backend is unknown.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family `policies`.
    """
    engine = resolve(backend)
    stages = engine.require_policies()
    score = partial(tova_score, received=stages.received_attention)
    return Policy(
        "tova", LayerScorer(Needs("all", 1, accepts_tensor=engine.accepts_tensor), score, sets=LAYER_SETS), even,
        partial(top_tokens, choose=stages.best_tokens), SinkAndRecent(0, 0), Cadence(every=1), Granularity.LAYER,
    )
