"""Every policy at small constants with its brute-force answer.

Those with a name are listed by their oracles; then compositions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.methods import brutes, h2o
from conformance.methods.brute import BLOCK, KERNEL, SAFEGUARD, W, newest, newest_half, plain, shared
from conformance.methods.policies import Score, adaptive_shares, best_blocks, competition_shares, epicache, top
from conformance.methods.signatures import signatures
from conformance.methods.snapkv import snapkv
from conformance.methods.triattention import rows
from conformance.oracles import diversity as alpha_oracle
from conformance.strategies.policy_inputs import Inputs, Kept, calibrated, identity
from reference import policies
from reference.policies.budgets import Above
from reference.triattention import Mode
from spec.policy import Policy

LAM = 0.5


def triattention(inputs: Inputs, mode: Mode, pin_prompt: int = 0, slack: int = 128) -> Policy:
    return policies.triattention(calibrated(inputs), identity(inputs), mode, pin_prompt, slack)


def plain_values(inputs: Inputs) -> Any:
    return [np.asarray(view.v).tolist() for view in inputs.layers]


def alpha_kept(row: Score, V: Any, B: int, lam: float) -> list[int]:
    """The tokens without a score are kept already."""
    retained = [i for i, x in enumerate(row) if x is None]
    return alpha_oracle.alpha([0.0 if x is None else x for x in row], V, retained, min(B, len(row)), lam)


def diversity(inputs: Inputs, B: int) -> Kept:
    (row,) = rows(inputs, "global", lambda g: range(inputs.n), inputs.n, 0)
    (V,) = signatures(plain_values(inputs), "flat")
    return [alpha_kept(row, V, B, LAM)]


def diversity_heads(inputs: Inputs, B: int) -> Kept:
    V, found = signatures(plain_values(inputs), "head"), list[list[int]]()
    for view in inputs.layers:
        scores = snapkv(plain(view), W, KERNEL)
        for row, b in zip(scores, adaptive_shares(scores, B, SAFEGUARD), strict=True):
            found.append(alpha_kept(row, V[len(found)], b, LAM))
    return found


TAU = 0.4


@dataclass(frozen=True)
class Case:
    """A policy, and what it keeps of an input at B tokens, by brute force."""

    item: str
    policy: Callable[[Inputs], Policy]
    expected: Callable[[Inputs, int], Kept]
    floor: int = 0
    guaranteed: Callable[[int, int], set[int]] = field(default=lambda n, B: set())
    """Positions of n that every kept set of B tokens holds."""
    least: int = 1


CASES: dict[str, Case] = {
    **{
        one.name: Case(one.item, one.policy, one.expected, one.floor, one.guaranteed, one.least) for one in brutes()
    },
    "epicache": Case("PO-EPICACHE", lambda i: policies.epicache(), shared(epicache, competition_shares)),
    "threshold": Case(
        "PO-THRESHOLD", lambda i: replace(policies.snapkv(W, KERNEL), budgets=Above(TAU)), lambda i, B: [
            top(row, min(B, sum(x is None or x > TAU for x in row)))
            for view in i.layers for row in snapkv(plain(view), W, KERNEL)
        ], W, newest,
    ),
    "blocks": Case(
        "PO-BLOCKS", lambda i: policies.in_blocks(policies.snapkv(W, KERNEL), BLOCK), lambda i, B: [
            best_blocks(row, BLOCK, B) for view in i.layers for row in snapkv(plain(view), W, KERNEL)
        ], BLOCK, newest,
    ),
    "blocks-of-h2o": Case(
        "PO-BLOCKS", lambda i: policies.in_blocks(policies.h2o(), BLOCK),
        lambda i, B: [best_blocks(row, BLOCK, B) for row in h2o.rows(i, B)], BLOCK, newest_half,
    ),
    "diversity": Case("DV-POLICY", lambda i: policies.diverse(triattention(i, "global"), LAM), diversity),
    "diversity-in-adakv": Case(
        "DV-POLICY",
        lambda i: policies.diverse(policies.with_adaptive_budgets(policies.snapkv(W, KERNEL), SAFEGUARD), LAM, "head"),
        diversity_heads, W, newest,
    ),
}
"""The policies with a name, as their oracles list them; and compositions."""
