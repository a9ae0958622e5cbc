"""Is a certificate still true? What it says, and what a run now says differently."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.plugin import PROFILES
from conformance.verify.certificate import CERTIFIED, KEEPS, PASSED, SCHEMA, judged_by
from conformance.verify.request import KINDS, Request
from spec import SPEC_VERSION
from spec.errors import SpecError

__all__ = ["converted", "differences", "new_failures", "of_another_version", "read", "repeated"]

_PARTS = {
    "subject": {"kind", "named", "digest"}, "run": {"profile"}, "items": set(), "vectors": set(), "device": set(),
}
_OF_A_ROW = {"verdict", "tests"}
_OPTIONS = ("timeout", "precision", "seed", "model", "positions")

# What another day, machine or version of Hypothesis may change without another verdict.
_FREE = ("date", "device", "kvspec", "counts.examples")
_FREE_OF_A_ROW = ("examples", "test", "input", "found", "repeat")


def read(path: Path) -> dict[str, Any]:
    """A certificate.

    Raises:
        SpecError: for a file that is none, or one of another schema.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError("check", str(path), f"must be a certificate: {error}") from error
    whole = all(isinstance(found.get(part), dict) and names <= found[part].keys() for part, names in _PARTS.items())
    whole = whole and isinstance(found.get("failing"), list) and all(
        isinstance(row, dict) and row.keys() >= _OF_A_ROW for row in found["items"].values()
    )
    if not whole or found.get("schema") not in (1, SCHEMA) or found["subject"]["kind"] not in KINDS:
        raise SpecError("check", str(path), f"must be a certificate of schema {SCHEMA}")
    if found["run"]["profile"] not in PROFILES or "quick profile" in str(found.get("verdict")):
        raise SpecError("check", str(path), "must be a certificate of a whole run: --quick and --fail-fast make none")
    return found if found["schema"] == SCHEMA else converted(found)


def converted(made: Mapping[str, Any]) -> dict[str, Any]:
    """A certificate of schema 1 in the words of this one. The digest of a command's files was another one then."""
    kind, passed = made["subject"]["kind"], made.get("verdict") == CERTIFIED
    rows = {item: {**row, "not_run": row["tests"] if row["verdict"] == "not run" else 0}
            for item, row in made["items"].items()}
    verdict = {"verdict": KEEPS} if passed and kind == "policy" else {}
    return {
        **made, **verdict, "schema": SCHEMA, "judged": judged_by(kind), "unproven": [], "items": rows,
    }


def of_another_version(made: Mapping[str, Any]) -> str:
    """Why its verdicts cannot be repeated here; nothing where they can."""
    if made.get("spec") == SPEC_VERSION:
        return ""
    return (
        f"the certificate is of specification {made.get('spec')}, this is {SPEC_VERSION}; nothing was run:"
        f" check it with kvspec {made.get('kvspec')}, or make a new one"
    )


def repeated(request: Request, path: Path, made: Mapping[str, Any]) -> Request:
    """The run that a certificate tells of; its exceptions are read from itself."""
    subject, run = made["subject"], made["run"]
    return replace(
        request, **{subject["kind"]: subject["named"]}, **{name: run.get(name) for name in _OPTIONS},
        profile=run["profile"], exceptions=path if made.get("exception") else None,
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """What two certificates say differently, a line each; of a row, its verdict, families and numbers of tests."""
    found = []
    for name in dict.fromkeys([*there, *here]):
        a, b, path = there.get(name), here.get(name), f"{within}{name}"
        if path in _FREE or (within.startswith("items.") and name in _FREE_OF_A_ROW):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{path}.")
        elif (a or None) != (b or None):
            found.append(f"{path}: {_said(a)} in the certificate, {_said(b)} now")
    return found


def new_failures(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What fails on other examples and does not in the certificate; each with the input, and how to repeat it."""
    found = []
    for item in here["failing"]:
        if item not in there["failing"]:
            row = here["items"][item]
            found.append(f"{item} fails on other examples: {row['found']}\n{row['input']}\nrepeat: {row['repeat']}")
    if not found and there["verdict"] in PASSED and here["verdict"] not in PASSED:
        found.append(f"verdict: {there['verdict']} in the certificate, {here['verdict']} on other examples")
    return found


def _said(value: Any) -> str:
    return "nothing" if not value else str(value.get("verdict", value) if isinstance(value, Mapping) else value)
