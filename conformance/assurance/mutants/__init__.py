"""Mutants: the reference with one thing wrong, each of which a test of its item must notice.

`table.MUTANTS` are those that are written down: one for each reading that the specification rejects (rows/*.toml), and
those that are right up to a size (sizes.toml). `python -m conformance.assurance.mutants` tries them; `--operators`
tries small changes of syntax of the reference and of Numba's code. The suite is collected once, and each mutant is put
into a fork of that process. `-p conformance.assurance.mutants.plugin --mutant NAME` puts one into any run of pytest.
"""
