"""S6: wrong readings of protection, the budget, its written forms and the cut."""

import math
from fractions import Fraction

from conformance.assurance.saboteurs.registry import Array, instead_of, method_instead_of
from reference.crystalcache.protection import cut, effective_budget, protected_trunks
from spec.budget import Budget, parse_budget

__all__: list[str] = []


@instead_of(protected_trunks, "CC-PROTECTED")
def closed_sink(offsets: Array, n: int, N_sink: int, W_recent: int) -> Array:
    """The sink is the closed interval [0, N_sink] of line 55 of Algorithm 2."""
    protected: Array = (offsets[:-1] <= N_sink) | (offsets[1:] > n - W_recent)
    return protected


@instead_of(protected_trunks, "CC-PROTECTED")
def window_of_one_more(offsets: Array, n: int, N_sink: int, W_recent: int) -> Array:
    """The window begins one token early: a trunk that ends right before it is protected."""
    protected: Array = (offsets[:-1] < N_sink) | (offsets[1:] >= n - W_recent)
    return protected


@instead_of(protected_trunks, "CC-PROTECTED")
def trunks_inside(offsets: Array, n: int, N_sink: int, W_recent: int) -> Array:
    """Only trunks that lie wholly in the sink or the window are protected."""
    protected: Array = (offsets[1:] <= N_sink) | (offsets[:-1] >= n - W_recent)
    return protected


@instead_of(effective_budget, "CC-BUDGET")
def floor_for_fractions_alone(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """A number of tokens is taken as it is, below sink and window too."""
    return budget.tokens(n) if budget.count else effective_budget(budget, n, N_sink, W_recent)


@instead_of(effective_budget, "CC-BUDGET")
def rounded_down(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """The share is rounded down."""
    share = budget.tokens(n) if budget.fraction is None else math.floor(budget.fraction * n)
    return max(N_sink + W_recent, share)


@instead_of(effective_budget, "CC-BUDGET")
def at_most_n(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """B is held to n."""
    return min(n, effective_budget(budget, n, N_sink, W_recent))


@instead_of(effective_budget, "CC-BUDGET")
def floor_of_the_window(budget: Budget, n: int, N_sink: int, W_recent: int) -> int:
    """The floor is the larger of sink and window, not their sum."""
    return max(N_sink, W_recent, budget.tokens(n))


@instead_of(parse_budget, "CC-BUDGET-FORMS")
def the_exact_double(budget: object, argument: str = "budget") -> Budget:
    """A float is the rational that the double holds."""
    found = parse_budget(budget, argument)
    return Budget(fraction=Fraction(budget)) if isinstance(budget, float) else found


@instead_of(parse_budget, "CC-BUDGET-FORMS")
def one_is_everything(budget: object, argument: str = "budget") -> Budget:
    """The int 1 is the whole prompt."""
    found = parse_budget(budget, argument)
    return Budget(fraction=Fraction(1)) if isinstance(budget, int) and budget == 1 else found


@instead_of(parse_budget, "CC-BUDGET-FORMS")
def a_bool_is_a_number(budget: object, argument: str = "budget") -> Budget:
    """True is one token."""
    return parse_budget(int(budget) if isinstance(budget, bool) else budget, argument)


@instead_of(parse_budget, "CC-BUDGET-FORMS")
def nothing_is_a_budget(budget: object, argument: str = "budget") -> Budget:
    """0 is admitted and keeps what is protected."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget != 0:
        return parse_budget(budget, argument)
    none = Budget(count=1)
    object.__setattr__(none, "count", 0)  # past the record's own check
    return none


@instead_of(parse_budget, "CC-BUDGET-FORMS")
def digits_of_every_script(budget: object, argument: str = "budget") -> Budget:
    """Text is read with the digits of any script."""
    if isinstance(budget, str):
        budget = "".join(str(int(letter)) if letter.isdecimal() else letter for letter in budget)
    return parse_budget(budget, argument)


@method_instead_of(Budget, "tokens", "CC-BUDGET-FORMS")
def ceiling_of_a_float(self: Budget, seen: int) -> int:
    """The share is math.ceil(beta n) in float64."""
    return math.ceil(float(self.fraction) * seen) if self.fraction is not None else self.count or 0


@instead_of(cut, "CC-CUT")
def more_than_there_is(sizes: Array, protected: Array, B: int) -> int:
    """c_0 is not held to T_alive."""
    return max(0, int(sizes.sum()) - B)


@instead_of(cut, "CC-CUT")
def below_zero(sizes: Array, protected: Array, B: int) -> int:
    """c_0 is not held to 0 where the trunks fit."""
    return min(int(sizes.sum()) - B, int(sizes[~protected].sum()))


@instead_of(cut, "CC-CUT")
def budget_of_the_unprotected(sizes: Array, protected: Array, B: int) -> int:
    """B is for the unprotected trunks alone; the protected ones come on top."""
    T_alive = int(sizes[~protected].sum())
    return min(max(0, T_alive - B), T_alive)


@instead_of(cut, "CC-CUT")
def budget_never_negative(sizes: Array, protected: Array, B: int) -> int:
    """A protected set above B still leaves the other trunks one token."""
    T_alive = int(sizes[~protected].sum())
    B_avail = max(min(1, T_alive), B - int(sizes[protected].sum()))
    return min(max(0, T_alive - B_avail), T_alive)
