"""Shares by a table of weights, by brute force."""

from fractions import Fraction

from conformance.methods.policies import whole


def table_shares(shares: str, total: int, W: int, L: int, heads: int, n: int) -> list[int]:
    """Return the number of tokens of each kept set: W tokens, and a part of the rest in proportion to the weight.

    Tokens that do not fit into a set are divided among the remaining sets.
    """
    weights = [Fraction(weight) for weight in shares.split("_")]
    if len(weights) == L:
        weights = [weight for weight in weights for _ in range(heads)]
    most, rest = n - W, Fraction(min(total, n * len(weights)) - W * len(weights))
    parts = [Fraction(0)] * len(weights)
    while rest:
        open_ = [g for g, part in enumerate(parts) if part < most]
        known = sum(weights[g] for g in open_)
        first = {g: weights[g] / known if known else Fraction(1, len(open_)) for g in open_}
        # Pour until the first set is full.
        poured = min([rest, *((most - parts[g]) / x for g, x in first.items() if x)])
        for g, x in first.items():
            parts[g] += poured * x
        rest -= poured
    return [W + part for part in whole(parts)]
