"""The certificate: what was judged, how, and with which verdicts; spec/certificate.md says what each part means."""

import platform
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np

from conformance.verify.request import ENGINES, Request
from conformance.verify.subject import Subject
from conformance.verify.texts import families_of
from conformance.verify.toml import written
from conformance.verify.verdicts import ABSTAINED, STATES, Outcome, Verdicts
from spec import SPEC_VERSION

__all__ = [
    "CERTIFIED", "COMPARED", "KEEPS", "PARTIAL", "PASSED", "QUICK", "SCHEMA", "certificate", "entries_of", "excepted",
    "judged_by", "scope", "write",
]

SCHEMA = 2
CERTIFIED, PARTIAL, NOT_CERTIFIED = "certified", "partial", "not certified"
KEEPS, QUICK, NOT_QUICK = "keeps its promises", "passes the quick profile", "does not pass the quick profile"
PASSED = (CERTIFIED, KEEPS, QUICK)
"""The verdicts whose exit code is 0."""
COMPARED = "not compared with any method"
"""What a policy's promises do not say: a policy may keep them all and be no SnapKV."""


def certificate(request: Request, subject: Subject, verdicts: Verdicts) -> dict[str, Any]:
    """The certificate of a run, as the table that is written."""
    who = {**asdict(subject), "name": verdicts.name or subject.name, "spec": verdicts.written_for}
    precision = verdicts.precision if request.kind in ENGINES else None
    run = {"precision": precision, "seed": request.seed, "timeout": request.timeout, "model": request.model,
           "positions": request.positions}
    entries = entries_of(request.exceptions)
    return {
        "schema": SCHEMA, "kvspec": _installed(), "spec": SPEC_VERSION, "date": date.today().isoformat(),
        "verdict": _verdict(request, verdicts), "judged": judged_by(request.kind), "families": verdicts.families,
        "failing": verdicts.failing, "undecided": verdicts.missing, "unproven": verdicts.unproven,
        "unneeded_exceptions": verdicts.unneeded,
        "subject": {name: value for name, value in who.items() if value},
        "run": {"profile": request.profile, **{name: value for name, value in run.items() if value is not None}},
        "device": device(request.kind), "counts": counts(verdicts),
        "items": {item: _item(item, request, verdicts) for item in verdicts.items},
        "vectors": verdicts.vectors, "exception": entries,
    }


def _verdict(request: Request, verdicts: Verdicts) -> str:
    if request.quick:
        return QUICK if verdicts.certified else NOT_QUICK
    if verdicts.certified:
        return KEEPS if request.kind == "policy" else CERTIFIED
    return PARTIAL if verdicts.unfailing else NOT_CERTIFIED


def judged_by(kind: str) -> str:
    """What such a subject is judged by."""
    if kind == "policy":
        return f"its promises; {COMPARED}"
    return "eviction equals masking" if kind == "cache" else "the items of its stages"


def _installed() -> str:
    try:
        return version("kvspec")
    except PackageNotFoundError:  # the packages lie in a folder
        return SPEC_VERSION


def device(kind: str) -> dict[str, str]:
    """The machine and the libraries that a run depends on."""
    models = ("torch", "transformers") if kind == "cache" else ()
    return {
        "platform": platform.platform(), "machine": platform.machine(), "python": platform.python_version(),
        "numpy": np.__version__, "hypothesis": hypothesis.__version__, **{name: version(name) for name in models},
    }


def counts(verdicts: Verdicts) -> dict[str, int]:
    """How many tests ended how, and how many examples the passed ones saw."""
    states = Counter(one.state for one in verdicts.outcomes)
    passed = sum(one.examples for one in verdicts.outcomes if one.state == "passed")
    named = {state.replace(" ", "_"): states[state] for state in STATES}
    return {"tests": len(verdicts.outcomes), **named, "examples": passed}


def _item(item: str, request: Request, verdicts: Verdicts) -> dict[str, Any]:
    tests = [one for one in verdicts.outcomes if item in one.items]
    passed = [one for one in tests if one.state == "passed"]
    row: dict[str, Any] = {
        "verdict": verdicts.items[item], "families": families_of(item), "tests": len(tests), "passed": len(passed),
        "failed": sum(one.state == "failed" for one in tests),
        "not_run": sum(one.state == "not run" for one in tests), "examples": sum(one.examples for one in passed),
    }
    return row if item not in verdicts.smallest else {**row, **_shown(verdicts.smallest[item], request)}


def _shown(outcome: Outcome, request: Request) -> dict[str, str]:
    shown = {"test": outcome.test, "input": outcome.input, "found": outcome.found}
    return {**shown, "repeat": request.repeat(outcome.test)}


def scope(made: Mapping[str, Any]) -> str:
    """What the verdict is about, in a few words: the families, and of how many rows where some abstained."""
    verdicts = [row["verdict"] for row in made["items"].values()]
    decided = sum(verdict not in ABSTAINED for verdict in verdicts)
    named = ", ".join(made["families"]) or "no family"
    return named if decided == len(verdicts) else f"{named} ({decided} of {len(verdicts)})"


def entries_of(exceptions: Path | None) -> list[dict[str, Any]]:
    """The entries of an exceptions file that was found right."""
    if exceptions is None:
        return []
    entries: list[dict[str, Any]] = tomllib.loads(exceptions.read_text(encoding="utf-8")).get("exception", [])
    return entries


def excepted(entry: Mapping[str, Any]) -> str:
    """What an entry of the exceptions is about."""
    return str(entry.get("item") or entry.get("test") or entry.get("vector"))


def write(made: Mapping[str, Any], path: Path) -> None:
    """Write a certificate."""
    path.write_text(written(made), encoding="utf-8")
