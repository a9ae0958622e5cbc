"""What the registered rules of the paper on set-conditioned diversity decide of a run, as sentences."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from models_integration.policies.methods import spelled
from models_integration.studies.estimate import format_p
from reference.confirmation import BONFERRONI, Cell, branch_of, choose_lambda, paired_difference

__all__ = ["RULES", "decided"]

RULES = ("", "lambda", "branch")
"""What a table may be decided by: nothing, the choice of lambda, or Branches A to C."""


def decided(rule: str, paired: Mapping[tuple[str, str, str], Sequence[float]]) -> str:
    """The sentence of a rule; "" for no rule, and if nothing was measured.

    Args:
        rule: one of RULES.
        paired: differences of right answers with and without the penalty, by model, budget and policy.
    """
    if not rule or not paired:
        return ""
    cells = {
        key: paired_difference(np.array(each, dtype=np.float64), np.arange(len(each))) for key, each in paired.items()
    }
    return _chosen(cells) if rule == "lambda" else _branch(cells)


def _chosen(cells: Mapping[tuple[str, str, str], Cell]) -> str:
    by_lambda = dict[float, list[float]]()
    for (_, _, policy), cell in cells.items():
        by_lambda.setdefault(spelled(policy)[1].get("diversity", 0.5), []).append(cell.difference)
    means = ", ".join(f"{penalty:g}: {fmean(found):+.4f}" for penalty, found in by_lambda.items())
    return f"The registered rule chooses lambda {choose_lambda(by_lambda):g}; mean differences {means}."


def _branch(cells: Mapping[tuple[str, str, str], Cell]) -> str:
    models = list(dict.fromkeys(model for model, _, _ in cells))
    each = ", ".join(
        f"{model} {budget}: p {format_p(cell.p)}{' (passes Bonferroni)' * (cell.p < BONFERRONI)}"
        for (model, budget, _), cell in cells.items()
    )
    if len(models) != 2:
        return f"The registered rule needs two models and has {len(models)}; {each}."
    first, second = ([cell for (name, _, _), cell in cells.items() if name == model] for model in models)
    return f"The registered rule gives Branch {branch_of(first, second)}; {each}."
