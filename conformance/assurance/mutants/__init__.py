"""Mutants: the reference with one thing wrong, each of which a test of its item must notice.

`written.MUTANTS` are those that are written down: one for each reading that the specification rejects (rows/*.toml),
and those that are right up to a size (sizes.toml). `python -m conformance.assurance.mutants` tries them; `--operators`
tries small changes of syntax of the reference and of Numba's code. The suite is collected once, and each mutant is put
into a fork of that process. `-p conformance.assurance.mutants --mutant NAME` puts one into any run of pytest.
"""

import pytest

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("kvspec").addoption("--mutant", metavar="NAME", help="which mutant is in the reference")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the mutant in, and keep the tests of its item."""
    from conformance.assurance.mutants.edits import function_of, replace_code
    from conformance.assurance.mutants.written import MUTANTS
    from conformance.exceptions import items_marked

    name = config.getoption("--mutant")
    if name is None:
        return
    if name not in MUTANTS:
        raise pytest.UsageError(f"--mutant {name}: unknown; python -m conformance.assurance.mutants list")
    mutant = MUTANTS[name]
    replace_code(function_of(mutant.edit.of), mutant.edit.code())
    others = [item for item in items if mutant.item not in items_marked(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if mutant.item in items_marked(item)]
