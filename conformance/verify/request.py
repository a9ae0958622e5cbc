"""Command-line options of `kvspec verify`."""

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from conformance.plugin import POSITIONS, PROFILES
from spec.errors import SpecError
from spec.validate import check_once, check_seconds

ENGINES = ("backend", "command")
KINDS = (*ENGINES, "policy", "cache", "server")
"""Kinds of subjects."""
PRECISIONS = ("float64", "float32", "bfloat16")
SEEDS = 2**32
"""Upper bound of drawn seeds, exclusive."""
_ONLY_FOR = {
    "timeout": ("command",), "method": (*ENGINES, "policy"), "precision": (*ENGINES, "server"), "exceptions": ENGINES,
    "model": ("cache", "server"), "positions": ("cache",),
}

PROFILE = "ci"
"""Default profile of a certificate."""

_METHODS = re.compile(r",(?![^(]*\))\s*")
"""Comma between two methods, not between two constants of a method."""

_ABOUT = """Test an engine, a policy, a cache or a server, and write the verdict as a
certificate (spec/certificate.md).

An engine must compute the items of the specification. A policy must have the
properties that the policy guarantees, such as an exact budget. A cache must
give the same logits as the full cache with the evicted tokens masked. A server
must state what it evicted (spec/witness.md), and its answers must be those of
the stated eviction. With --as METHOD an engine or a policy must also keep the
same tokens as a published method.

Exit codes:

    0         every test passes, and every item that the tested code offers has
              a passed test
    1         a test fails, an offered item has no passed test, or --check finds
              a difference
    2         kvspec tested nothing (one line on standard error has the reason)
    130, 143  Ctrl-C or SIGTERM stopped the run

Arguments after -- are passed to pytest, and pytest's output is shown. A run
with arguments for pytest writes no certificate."""


@dataclass(frozen=True)
class Request:
    """Options of one run of `kvspec verify`."""

    backend: str | None
    command: str | None
    policy: str | None
    cache: str | None
    server: str | None
    method: tuple[str, ...]
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
    force: bool = False
    pytest: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return the kind of the subject."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def named(self) -> str:
        """Return the subject as it was given on the command line."""
        return str(getattr(self, self.kind))

    @property
    def command_line(self) -> list[str]:
        """Return the command line that repeats this run on the same examples."""
        options = {
            f"--{self.kind}": self.named, "--model": self.model, "--positions": self.positions,
            "--timeout": self.timeout, "--precision": self.precision,
            "--profile": None if self.profile == PROFILE else self.profile, "--seed": self.seed,
        }
        words = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
        words += [word for method in self.method for word in ("--as", method)]
        return ["kvspec", "verify", *words]

    def repeat(self, test: str) -> str:
        """Return the command line that runs one test again on the same examples."""
        return shlex.join([*self.command_line, "--", test])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvspec: {message}; kvspec verify --help lists the options; write options of pytest after --\n")


def parser(complete: bool = True) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        complete: if False, the parser has no --help, and does not require a subject.
    """
    created = _Parser(
        prog="kvspec verify", description=_ABOUT, allow_abbrev=False, add_help=complete,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    who = created.add_mutually_exclusive_group(required=complete)
    who.add_argument("--backend", metavar="NAME",
                     help="engine in Python: name of a backend, or module:ATTRIBUTE of a spec.backend.Backend")
    who.add_argument("--command", metavar="TEXT", help="engine in any language: the command that starts the engine")
    who.add_argument("--policy", metavar="NAME", help="policy in Python: module:ATTRIBUTE of a spec.policy.Policy")
    who.add_argument("--cache", metavar="NAME",
                     help="Python function that evicts tokens and returns logits, as module:ATTRIBUTE")
    who.add_argument("--server", metavar="URL",
                     help="running server that evicts, such as http://127.0.0.1:8000. Needs --model: kvspec "
                          "reads the server's answers again with the same weights")
    created.add_argument("--as", dest="method", action="append", metavar="METHOD",
                      help='published method, or text of a policy, that must keep the same tokens, '
                           'such as "snapkv(W=16, kernel=5)" or snapkv:W=16/layers=pyramid. An engine can be '
                           "compared with several methods, such as snapkv,h2o. `kvspec policies NAME` lists "
                           "the constants of a method")
    who.add_argument("--check", type=Path, metavar="CERTIFICATE.toml",
                     help="certificate to check. First kvspec prints the command that the certificate "
                          "contains, and checks the hashes of the files that the certificate lists. Then kvspec "
                          "runs the tests with the seed of the certificate and with a new seed (--seed). If the "
                          "results differ from the certificate, kvspec prints the difference and exits with 1")
    created.add_argument("--yes", action="store_true",
                      help="for --check: run the command of the certificate without confirmation")
    created.add_argument("--model", metavar="FOLDER",
                      help="for --cache: folder of the transformers model. Default: tiny random models. "
                           "For --server: folder or name of the weights that the server runs")
    created.add_argument("--positions", choices=POSITIONS,
                      help="for --cache: rule of the positions of the kept tokens, either kept (positions "
                           "of the text, default) or renumbered (from 0 in each KV head). A cache with "
                           "renumbered positions must also rotate the keys to the new positions")
    created.add_argument("--timeout", type=float, metavar="S",
                      help="for --command: maximum number of seconds that the engine may take to answer. "
                           "Default: 60")
    created.add_argument("--precision", choices=PRECISIONS,
                        help="precision of stage S1 (co-attention). Default: float64 for the numpy backend, "
                             "otherwise float32. An engine of --command reports its precision. For --policy: "
                             "float64 (default) or float32. For --server: dtype in which the server computes, "
                             "float32 (default) or bfloat16")
    created.add_argument("--profile", choices=PROFILES,
                        help="number of random examples of each property: few (12), dev (50), ci (150) or nightly "
                             "(20 000). The certificate states the profile. Default: the environment variable "
                             "KVSPEC_PROFILE, or ci if the variable is not set")
    created.add_argument("--seed", type=int, metavar="N",
                      help="random seed of the examples, 0 or more. Default: a new seed, which the "
                           "certificate records")
    created.add_argument("--quick", action="store_true",
                      help="for use while you develop: profile few, and for an engine no full-size inputs. A quick "
                           "run writes quick.toml instead of a certificate. For a certificate with few examples, "
                           "use --profile few without --quick")
    created.add_argument("--fail-fast", action="store_true",
                      help="stop at the first failed test. A stopped run writes no certificate")
    created.add_argument("--exceptions", type=Path, metavar="FILE.toml",
                        help="TOML file of known failures. Each failure has a reason, an issue and an expiry "
                             "date (see docs/guide/judge.md)")
    created.add_argument("--out", type=Path, default=Path("results/verify"), metavar="FOLDER",
                        help="folder for certificate.toml, certificate.html, badge.svg, summary.md, "
                             "junit.xml and log.txt. Default: results/verify")
    created.add_argument("--force", action="store_true",
                      help="replace files in the folder --out that kvspec did not make, and the certificate of a "
                           "different subject")
    return created


def _check_options(words: list[str]) -> None:
    """Name an unknown option and a similar one. argparse would name only the missing subject of `--polcy NAME`."""
    partial = parser(complete=False)
    _, unknown = partial.parse_known_args(words)
    stem = unknown[0].removesuffix(".py") if unknown else ""
    if not unknown or {"-h", "--help"} & set(unknown):
        return
    if not unknown[0].startswith("-") and ":" not in unknown[0] and Path(f"{stem}.py").is_file():
        partial.error(f"unrecognized arguments: {' '.join(unknown)}; write --policy {stem}:POLICY, or a different kind")
    near = get_close_matches(unknown[0], re.findall(r"--[a-z-]+", partial.format_usage()), n=1)
    partial.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else ""))


def profile_of(option: str | None) -> str:
    """Return the option, otherwise the environment variable KVSPEC_PROFILE, otherwise ci.

    Raises:
        SpecError: if the chosen profile does not exist.
    """
    chosen = option or os.environ.get("KVSPEC_PROFILE") or PROFILE
    if chosen not in PROFILES:
        raise SpecError("KVSPEC_PROFILE", chosen, f"must be one of {', '.join(PROFILES)}")
    return chosen


def parsed(arguments: Sequence[str]) -> Request:
    """Return the request of a command line.

    Raises:
        SpecError: if options contradict each other, or KVSPEC_PROFILE is not a profile.
        SystemExit: after --help, or if an option is invalid.
    """
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    _check_options(list(arguments)[:at])
    result = parser().parse_args(list(arguments)[:at])
    given = any(getattr(result, name) is not None for name in (*_ONLY_FOR, "profile"))
    if result.check and (result.quick or result.fail_fast or given):
        bound = "can be combined only with --seed, --yes, --force and --out"
        raise SpecError("check", str(result.check), bound)
    if result.yes and not result.check:
        raise SpecError("yes", True, "can be given only with --check")
    if result.seed is not None and result.seed < 0:
        raise SpecError("seed", result.seed, "must be 0 or more")
    if result.timeout is not None:
        check_seconds("timeout", result.timeout)
    for option, kinds in _ONLY_FOR.items():
        value = getattr(result, option)
        if option == "precision" and result.method:
            continue
        if value is not None and not any(getattr(result, kind) for kind in kinds):
            named, shown = ("as", ",".join(value)) if option == "method" else (option, value)
            raise SpecError(named, shown, f"can be given only with {' or '.join(f'--{kind}' for kind in kinds)}")
    result.method = tuple(one for text in result.method or () for one in _METHODS.split(text))
    check_once("as", result.method)
    dtypes = PRECISIONS[1:] if result.server else PRECISIONS[:2]
    if result.precision not in (None, *dtypes):
        raise SpecError("precision", result.precision, f"must be one of {', '.join(dtypes)} for this subject")
    if result.server and not result.model:
        raise SpecError("model", None, "is needed with --server: folder or name of the weights that the server runs")
    if result.policy and len(result.method) > 1:
        raise SpecError("as", ",".join(result.method), "must be one method: a policy is compared with one method only")
    result.profile = profile_of(result.profile or ("few" if result.quick else None))
    return Request(**vars(result), pytest=tuple(arguments[at + 1 :]))
