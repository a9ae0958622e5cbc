"""Mutants: versions of the reference with one error each, which a test of the mutated item must detect.

`written.MUTANTS` contains the mutants that are written by hand. Each row of rows/*.toml is a reading that the
specification rejects. Each row of sizes.toml is an error that has no effect up to a size.

`python -m lab.mutants` tries them. The suite is collected once, and each mutant is tested in a fork of that process.
The options `-p lab.mutants --mutant NAME` put one mutant into any run of pytest.
"""

import pytest

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("kvspec").addoption("--mutant", metavar="NAME", help="name of the mutant to put into the reference")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the mutant into the reference, and deselect the tests of all other items."""
    from conformance.exceptions import items_marked
    from lab.mutants.edits import function_of, replace_code
    from lab.mutants.written import MUTANTS

    name = config.getoption("--mutant")
    if name is None:
        return
    if name not in MUTANTS:
        raise pytest.UsageError(f"--mutant {name}: unknown; python -m lab.mutants list")
    mutant = MUTANTS[name]
    replace_code(function_of(mutant.edit.of), mutant.edit.code())
    others = [item for item in items if mutant.item not in items_marked(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if mutant.item in items_marked(item)]
