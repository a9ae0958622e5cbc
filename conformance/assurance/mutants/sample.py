"""Which mutants are tried: as many of each module as it has of all, and at least one of every function.

The order inside a function is that of a hash of seed and key, so a new module or a moved line leaves the choice
elsewhere as it is.
"""

import hashlib
from collections.abc import Iterable

from conformance.assurance.mutants.sites import Mutant

__all__ = ["sample"]


def _place(seed: int, mutant: Mutant) -> bytes:
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()


def sample(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """At least `size` mutants (all, if there are fewer), stratified by module, with a floor of one per function."""
    strata: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda one: _place(seed, one)):
        strata.setdefault(mutant.path, []).append(mutant)
    total = sum(map(len, strata.values()))
    chosen = []
    for path in sorted(strata):
        stratum = strata[path]
        share = -(-size * len(stratum) // total)
        first = {mutant.function: mutant for mutant in reversed(stratum)}.values()
        rest = [mutant for mutant in stratum if mutant not in first]
        chosen += [*first, *rest][: max(share, len(first))]
    return sorted(chosen, key=lambda one: _place(seed, one))
