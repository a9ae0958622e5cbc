"""What set-conditioned selection keeps, by brute force, and the small constants of all policies."""

from typing import Any

import numpy as np

from conformance.assurance.brute import HALF, KERNEL, N_SINK, SAFEGUARD, SINK, W, plain
from conformance.assurance.oracles.policies import Score, adaptive_shares
from conformance.assurance.oracles.signatures import signatures
from conformance.assurance.oracles.snapkv import snapkv
from conformance.assurance.oracles.triattention import rows
from conformance.oracles import diversity as alpha_oracle
from conformance.strategies.policy_inputs import Inputs, Kept, calibrated, identity
from reference import policies
from reference.triattention import Mode
from spec.policy import Policy

__all__ = [
    "HALF", "KERNEL", "LAM", "N_SINK", "SINK", "W", "alpha_kept", "diversity", "diversity_heads", "plain_values",
    "triattention",
]

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
