"""S6: the budget and the protected set (Section 3.7)."""

from spec.arrays import Bool, BoolVector, Int64, IntVector
from spec.budget import Budget

__all__ = ["cut", "effective_budget", "protected_trunks"]


def protected_trunks(
    offsets: Int64[IntVector, " m_and_one"], n: int, N_sink: int, W_recent: int,
) -> Bool[BoolVector, " m"]:
    """Whole trunks that touch the sink [0, N_sink) or the recent window [n - W_recent, n).

    Implements: CC-PROTECTED

    Source: Section 3.7.
    """
    starts, stops = offsets[:-1], offsets[1:]
    protected: BoolVector = (starts < N_sink) | (stops > n - W_recent)
    return protected


def effective_budget(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """B in tokens: the share of n, or the count, but never below sink + recent.

    Implements: CC-BUDGET

    Source: Eq. 30; the ceiling is exact.
    """
    return max(N_sink + W_recent, budget.tokens(n))


def cut(sizes: Int64[IntVector, " m"], protected: Bool[BoolVector, " m"], B: int) -> int:
    """c_0: tokens to remove from the unprotected trunks, at most all of them.

    Implements: CC-CUT

    Source: Eq. 31.
    """
    B_prot = int(sizes[protected].sum())
    T_alive = int(sizes[~protected].sum())
    B_avail = B - B_prot
    return min(max(0, T_alive - B_avail), T_alive)
