"""Mutants: versions of the reference with one error each, which a test of the mutated item must detect.

`written.MUTANTS` contains the mutants that are written by hand. Each row of rows/*.toml is a reading that the
specification rejects. Each row of sizes.toml is an error that has no effect up to a size.

`python -m lab.mutants` tries them. The suite is collected once, and each mutant is tested in a fork of that process.
"""
