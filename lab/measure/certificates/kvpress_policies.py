"""Ten presses of kvpress as subjects of `kvspec verify --policy`: each decides as it is, layer by layer.

B of n tokens is asked of a press as the ratio 1 - B / n. What is promised is read from its docstrings: the ratio is
"the fraction of pairs to remove", the lowest scores "will be pruned", sinks and windows stay. Independence, and heads
that take their kept sets along, are of the methods' nature. Chunks and a pyramid promise no exact budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lab.measure.peers.inputs import SMALL, Inputs
from lab.measure.peers.presses import PRESSES, VERSION, kept_by_press, scores_by_press
from reference.policies.budgets import even
from reference.policies.protections import SinkAndRecent
from spec.arrays import BoolVector, IntVector, Matrix
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Promises, Scores, Selection
from spec.retention import Granularity

__all__ = [
    "adakv", "chunkkv", "expected_attention", "keydiff", "knorm", "observed_attention", "pyramidkv", "snapkv",
    "streaming_llm", "tova",
]

ALL = Promises(
    budget_exact="yes", protection_holds="yes", no_op_at_full_budget="yes", higher_score_never_loses="yes",
    row_independence="yes", head_permutation="yes", gqa="yes",
)


def _shown(view: LayerView, layer: int, layers: int) -> Inputs:
    """A layer as a press is given it; its rotary tables turn nothing, as queries come rotated."""
    idle = np.zeros(view.k.shape[2] // 2)
    return Inputs(0, "0", layer, view.q, view.k, np.asarray(view.v), idle, replace(SMALL, layers=layers))


@dataclass(frozen=True)
class PressScorer:
    """The press's scores, which its own `compress` computes again."""

    press: str
    needs: Needs = Needs("all", query_rows=None, values=True)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        views = list(observation.layers.values())
        inputs = [_shown(view, at, len(views)) for at, view in enumerate(views)]
        whole = observation.B is not None and observation.seen <= observation.B  # a press scores nothing then
        score = _unscored if whole else partial(_asked, scores_by_press, self.press)
        values = np.concatenate([score(one) for one in inputs])
        return Scores(values.astype(np.float64), np.arange(observation.seen + 1), carry=inputs)


@dataclass(frozen=True)
class PressSelector:
    """What the press keeps at the ratio of the budget."""

    press: str

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        inputs: Any = scores.carry
        ratio = max(0.0, 1 - int(budgets[0]) / len(protected))
        sets = [own for one in inputs for own in _asked(kept_by_press, self.press, one.at(repr(ratio)))]
        return Selection(np.concatenate([*map(_positions, sets)]), np.cumsum([0, *map(len, sets)]))


def _unscored(inputs: Inputs) -> Matrix:
    return np.zeros(inputs.k.shape[:2])


def _positions(kept: Sequence[int]) -> IntVector:
    return np.array(kept, dtype=np.int64)


def _asked(what: Any, press: str, inputs: Inputs) -> Any:
    make, eager = PRESSES[press]
    try:
        return what(make, inputs, eager)
    except AssertionError as refused:
        raise SpecError("budget", inputs.n, f"{press} refuses so few tokens: {refused}") from refused


def _policy(press: str, sinks: int = 0, recent: int = 0, **without: Any) -> Policy:
    holds = "yes" if sinks or recent else "N/A"
    return Policy(
        f"kvpress {VERSION} {press}", PressScorer(press), even, PressSelector(press), SinkAndRecent(sinks, recent),
        granularity=Granularity.HEAD, promises=replace(ALL, **{"protection_holds": holds, **without}),
    )


streaming_llm = _policy("StreamingLLM", sinks=SMALL.sinks)
snapkv = _policy("SnapKV", recent=SMALL.window)
pyramidkv = _policy("PyramidKV", recent=SMALL.window, budget_exact="no")
chunkkv = _policy("ChunkKV", budget_exact="no", higher_score_never_loses="no")
tova = _policy("TOVA", recent=1)
keydiff = _policy("KeyDiff")
knorm = _policy("Knorm")
adakv = _policy("AdaKV", recent=SMALL.window, higher_score_never_loses="no")
expected_attention = _policy("ExpectedAttention", sinks=SMALL.sinks)
observed_attention = _policy("ObservedAttention")
