"""Every published policy at small constants, with its brute-force answer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from conformance.assurance.brute import BLOCK, KERNEL, SAFEGUARD, W, newest, newest_half, plain, shared
from conformance.assurance.oracles import brutes, h2o
from conformance.assurance.oracles.blocks import best_blocks
from conformance.assurance.oracles.policies import competition_shares, epicache, top
from conformance.assurance.oracles.snapkv import snapkv
from conformance.assurance.strategies.policy_expected import LAM, diversity, diversity_heads, triattention
from conformance.strategies.policy_inputs import Inputs, Kept
from reference import policies
from reference.policies.budgets import Above
from spec.policy import Policy

__all__ = ["CASES", "Case"]

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
