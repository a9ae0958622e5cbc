"""`python -m conformance.assurance.style`: list the sentences of pages, help and docstrings that break a rule.

The pages of a first visit, `--help` and the docstrings of `kvspec` must break none: exit code 1 if one does. Other
pages and errors are counted; `--all` lists them too.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from typer.main import get_command

from conformance.assurance.style.rules import Offence, Passage, offences
from conformance.assurance.style.texts import of_docstrings, of_errors, of_help, of_options, of_page
from conformance.paths import ROOT
from conformance.verify.request import parser as verify
from models_integration.cli.app import app

__all__ = ["GROUPS", "STRICT", "found_in", "main"]

STRICT = ("README.md, docs/guide, docs/trust.md", "kvspec --help", "docstrings of kvspec")
"""Groups that break no rule."""


def _pages(*patterns: str) -> Iterator[Passage]:
    return chain.from_iterable(of_page(path) for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def _errors() -> Iterator[Passage]:
    packages = ("spec", "reference", "accelerated", "models_integration")
    return chain.from_iterable(of_errors(path) for name in packages for path in sorted(ROOT.glob(f"{name}/**/*.py")))


GROUPS = {
    STRICT[0]: lambda: _pages("README.md", "docs/guide/*.md", "docs/trust.md"),
    STRICT[1]: lambda: chain(of_help(get_command(app)), of_options(verify(), verify)),
    STRICT[2]: lambda: of_docstrings("kvspec"),
    "docs": lambda: _pages("docs/[!t]*.md", "docs/results/**/*.md", "CONTRIBUTING.md"),
    "SpecError": _errors,
}


def found_in(group: str) -> list[Offence]:
    """The offences of a group, each once."""
    return list(dict.fromkeys(offences(GROUPS[group]())))


def main(arguments: list[str] | None = None) -> int:
    """Print offences and a table of their number; 1 if a strict group has one."""
    options = argparse.ArgumentParser(prog="conformance.assurance.style", description=__doc__)
    options.add_argument("--all", action="store_true", help="also list the offences of groups that may have some")
    listed_all, failed = options.parse_args(arguments).all, False
    for group in GROUPS:
        found = found_in(group)
        failed |= bool(found) and group in STRICT
        for one in found if listed_all or group in STRICT else ():
            print(one)
        rules = Counter(one.rule for one in found)
        print(f"{group}: {len(found)} ({', '.join(f'{rule} {number}' for rule, number in sorted(rules.items()))})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
