"""`python -m conformance.assurance.style`: list the sentences of pages, help and docstrings that break a rule.

None may: the exit code is 1 if one does.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from typer.main import get_command

from conformance.assurance.style.rules import (
    Offence,
    Passage,
    of_docstrings,
    of_errors,
    of_help,
    of_options,
    of_page,
    offences,
)
from conformance.paths import ROOT
from conformance.verify.request import parser as verify
from models_integration.cli.app import app


def _pages(*patterns: str) -> Iterator[Passage]:
    return chain.from_iterable(of_page(path) for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def _errors() -> Iterator[Passage]:
    packages = ("spec", "reference", "accelerated", "models_integration", "conformance")
    return chain.from_iterable(of_errors(path) for name in packages for path in sorted(ROOT.glob(f"{name}/**/*.py")))


GROUPS = {
    "pages": lambda: _pages("README.md", "CONTRIBUTING.md", "docs/**/*.md"),
    "kvspec --help": lambda: chain(of_help(get_command(app)), of_options(verify(), verify)),
    "docstrings of kvspec": lambda: of_docstrings("kvspec"),
    "SpecError": _errors,
}


def found_in(group: str) -> list[Offence]:
    """The offences of a group, each once."""
    return list(dict.fromkeys(offences(GROUPS[group]())))


def main(arguments: list[str] | None = None) -> int:
    """Print offences and a table of their number; 1 if there is one."""
    argparse.ArgumentParser(prog="conformance.assurance.style", description=__doc__).parse_args(arguments)
    failed = False
    for group in GROUPS:
        found = found_in(group)
        failed |= bool(found)
        for one in found:
            print(one)
        rules = Counter(one.rule for one in found)
        print(f"{group}: {len(found)} ({', '.join(f'{rule} {number}' for rule, number in sorted(rules.items()))})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
