"""The written budget and units of several tokens by brute force; nothing is shared with the reference."""

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["asked", "best_units"]

DIGITS = frozenset("0123456789")


def asked(text: str, seen: int) -> int | None:
    """CC-BUDGET-FORMS: the tokens that a text asks for; None where it must be refused."""
    body = text.strip(" ")
    number = body.removesuffix("%")
    whole, point, part = number.partition(".")
    if len(text) > 64 or not whole + part or not DIGITS.issuperset(whole + part):
        return None
    if not point and number == body:
        return int(whole) if 0 < int(whole) < 2**63 else None
    hundredths = 100 if number != body else 1
    share = Fraction(int(whole + part), 10 ** len(part) * hundredths)
    return -(-share.numerator * seen // share.denominator) if 0 < share <= 1 else None


def best_units(values: Sequence[float], bounds: Sequence[int], pinned: Sequence[bool], B: int) -> list[int]:
    """PO-TOP-UNITS: pinned units, then one by one the best that is left, until it does not fit; NaN is the worst."""
    units = list(range(len(values)))
    sizes = [bounds[u + 1] - bounds[u] for u in units]
    kept = {u for u in units if pinned[u]}
    left = [u for u in units if not pinned[u]]
    while left:
        best = max(left, key=lambda u: (values[u] == values[u], values[u] if values[u] == values[u] else 0.0, -u))
        if sum(sizes[u] for u in kept) + sizes[best] > B:
            break
        kept.add(best)
        left.remove(best)
    return [i for u in sorted(kept) for i in range(bounds[u], bounds[u + 1])]
