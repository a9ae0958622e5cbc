"""All mutants that are written down, by name."""

from conformance.assurance.mutants.rows import ROWS, WrittenMutant, read_rows
from conformance.assurance.mutants.sizes import sized_mutants

__all__ = ["MUTANTS"]

_WRITTEN = [mutant for path in sorted(ROWS.glob("*.toml")) for mutant in read_rows(path)]
MUTANTS: dict[str, WrittenMutant] = {mutant.name: mutant for mutant in [*_WRITTEN, *sized_mutants()]}
