"""S6: the budget and the set of protected trunks (Section 3.7)."""

from spec.arrays import Bool, BoolVector, Int64, IntVector
from spec.budget import Budget

__all__ = ["cut", "effective_budget", "protected_trunks"]


def protected_trunks(
    offsets: Int64[IntVector, " m_and_one"], n: int, N_sink: int, W_recent: int,
) -> Bool[BoolVector, " m"]:
    """Return a mask of the trunks that overlap the sinks [0, N_sink) or the recent window [n - W_recent, n).

    Implements: CC-PROTECTED

    Source: Section 3.7. In Algorithm 2 (line 55) the intervals are closed, which would protect one more sink.
    """
    starts, stops = offsets[:-1], offsets[1:]
    protected: BoolVector = (starts < N_sink) | (stops > n - W_recent)
    return protected


def effective_budget(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """Return B: the number of tokens that the budget keeps of n tokens, but at least N_sink + W_recent.

    Implements: CC-BUDGET

    Source: Eq. 30. The ceiling in Eq. 30 is computed in exact arithmetic.
    """
    return max(N_sink + W_recent, budget.tokens(n))


def cut(sizes: Int64[IntVector, " m"], protected: Bool[BoolVector, " m"], B: int) -> int:
    """Return c_0: how many tokens of the unprotected trunks must be evicted so that at most B tokens remain.

    Implements: CC-CUT

    Source: Eq. 31. If the protected trunks have more than B tokens, c_0 is the number of all unprotected tokens.
    """
    B_prot = int(sizes[protected].sum())
    T_alive = int(sizes[~protected].sum())
    B_avail = B - B_prot
    return min(max(0, T_alive - B_avail), T_alive)
