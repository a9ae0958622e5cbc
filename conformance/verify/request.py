"""What is asked: the options of `kvspec verify`."""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conformance.plugin import POSITIONS, PROFILES
from spec.errors import SpecError

__all__ = ["ENGINES", "KINDS", "PRECISIONS", "PROFILE", "Request", "parsed", "parser"]

ENGINES = ("backend", "command")
KINDS = (*ENGINES, "policy", "cache")
"""Of subjects."""
PRECISIONS = ("float64", "float32")
SEEDS = 2**32
"""Seeds are drawn below."""
_ONLY_FOR = {
    "timeout": ("command",), "precision": ENGINES, "exceptions": ENGINES, "model": ("cache",),
    "positions": ("cache",),
}

PROFILE = "ci"
"""The profile of a certificate that says nothing else."""

_ABOUT = """Judge an engine by the conformance suite, item by item of the specification; a policy by what it promises;
a cache by whether eviction equals masking.

Exit code 0: it conforms on what it offers or serves, or keeps its promises; 1: it does not, or an item that it offers
has no passed test, or --check finds a difference; 2: nothing was judged, and one line says why; 130 and 143: stopped.
The verdict is written as a certificate (spec/certificate.md). Arguments after -- are passed to pytest, whose output is
then shown as it is: a selection of tests is no verdict, and gets no certificate."""


@dataclass(frozen=True)
class Request:
    """A run of the suite, and where its results go."""

    backend: str | None
    command: str | None
    policy: str | None
    cache: str | None
    model: str | None
    positions: str | None
    timeout: float | None
    precision: str | None
    profile: str
    seed: int | None
    quick: bool
    exceptions: Path | None
    out: Path
    fail_fast: bool = False
    check: Path | None = None
    yes: bool = False
    pytest: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Of the subject."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def named(self) -> str:
        """The subject, as it was given."""
        return str(getattr(self, self.kind))

    @property
    def command_line(self) -> list[str]:
        """The words that ask for this run, on the same examples."""
        options = {
            f"--{self.kind}": self.named, "--model": self.model, "--positions": self.positions,
            "--timeout": self.timeout, "--precision": self.precision,
            "--profile": None if self.profile == PROFILE else self.profile, "--seed": self.seed,
        }
        words = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
        return ["kvspec", "verify", *words]

    def repeat(self, test: str) -> str:
        """The command line that runs one test again, on the same examples."""
        return shlex.join([*self.command_line, "--", test])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvspec: {message}; see kvspec verify --help; pytest's options go behind --\n")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = _Parser(
        prog="kvspec verify", description=_ABOUT, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter,
    )
    who = made.add_mutually_exclusive_group(required=True)
    who.add_argument("--backend", metavar="NAME", help="an engine in Python: a name, or module:ATTRIBUTE of a Backend")
    who.add_argument("--command", metavar="TEXT", help="an engine in any language: the command that starts it")
    who.add_argument("--policy", metavar="NAME", help="module:ATTRIBUTE of a Policy, by its promises")
    who.add_argument("--cache", metavar="NAME", help="module:ATTRIBUTE of a function, by what it says after eviction")
    who.add_argument("--check", type=Path, metavar="CERTIFICATE.toml",
                     help="is this certificate still true? The subject's files are compared,\n"
                          "the run is repeated, another one is made with a new seed (--seed),\n"
                          "and any difference is named (exit code 1). This runs the command,\n"
                          "or imports the module, that the certificate names: it is shown first")
    made.add_argument("--yes", action="store_true", help="with --check: run it without a question")
    made.add_argument("--model", metavar="FOLDER", help="of transformers, for --cache; default tiny random ones")
    made.add_argument("--positions", choices=POSITIONS,
                      help="of the tokens that the --cache keeps: absolute, the text's (default), or renumbered\n"
                           "from 0 in each KV head, with keys rotated again, and the next tokens behind them")
    made.add_argument("--timeout", type=float, metavar="S", help="seconds that the command may take for an answer")
    made.add_argument("--precision", choices=PRECISIONS,
                        help="what its S1 promises to compute in; default\n"
                             "float32, for numpy float64, for a command what it says")
    made.add_argument("--profile", choices=PROFILES,
                        help="how many examples each property sees; default KVSPEC_PROFILE, else ci")
    made.add_argument("--seed", type=int, metavar="N",
                      help="seed of the examples, from 0; default: a new one, which is recorded")
    made.add_argument("--quick", action="store_true",
                      help="profile few, without full sizes (the scale lane): quick.toml, no certificate")
    made.add_argument("--fail-fast", action="store_true",
                      help="stop at the first failure; then there is no certificate")
    made.add_argument("--exceptions", type=Path, metavar="FILE.toml",
                        help="known failures, each with reason, issue and expiry;\nconformance/exceptions.py says how")
    made.add_argument("--out", type=Path, default=Path("results/verify"), metavar="FOLDER",
                        help="of certificate.toml, certificate.html, badge.svg, summary.md (for a\n"
                             "pull request), junit.xml and log.txt; default results/verify")
    return made


def profile_of(option: str | None) -> str:
    """The option, else KVSPEC_PROFILE, else ci.

    Raises:
        SpecError: for a variable that names none.
    """
    chosen = option or os.environ.get("KVSPEC_PROFILE") or PROFILE
    if chosen not in PROFILES:
        raise SpecError("KVSPEC_PROFILE", chosen, f"must be one of {', '.join(PROFILES)}")
    return chosen


def parsed(arguments: Sequence[str]) -> Request:
    """What a command line asks.

    Raises:
        SpecError: for a KVSPEC_PROFILE that is none, and options that contradict each other.
        SystemExit: for an option that is wrong, or --help.
    """
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    found = parser().parse_args(list(arguments)[:at])
    given = any(getattr(found, name) is not None for name in (*_ONLY_FOR, "profile"))
    if found.check and (found.quick or found.fail_fast or given):
        bound = "repeats the run of the certificate: give no option but --seed, --yes and --out"
        raise SpecError("check", str(found.check), bound)
    if found.yes and not found.check:
        raise SpecError("yes", True, "is for --check")
    if found.seed is not None and found.seed < 0:
        raise SpecError("seed", found.seed, "must be 0 or more")
    for option, kinds in _ONLY_FOR.items():
        value = getattr(found, option)
        if value is not None and not any(getattr(found, kind) for kind in kinds):
            raise SpecError(option, value, f"is for {' and '.join(f'--{kind}' for kind in kinds)}")
    found.profile = profile_of(found.profile or ("few" if found.quick else None))
    return Request(**vars(found), pytest=tuple(arguments[at + 1 :]))
