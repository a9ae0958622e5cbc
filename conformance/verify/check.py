"""Is a certificate still true? What it says, and what a run now says differently."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.verify.certificate import SCHEMA
from conformance.verify.request import KINDS, Request
from spec.errors import SpecError

__all__ = ["differences", "read", "repeated"]

_PARTS = {"subject": {"kind", "named", "digest"}, "run": {"profile"}, "items": set(), "vectors": set()}
_OPTIONS = ("timeout", "precision", "seed", "model")

# What another day, machine or version of Hypothesis may change without another verdict.
_FREE = ("date", "device", "counts.examples")
_ROW = re.compile(r"items\.[^.]+\.")


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
    if not whole or found.get("schema") != SCHEMA or found["subject"]["kind"] not in KINDS:
        raise SpecError("check", str(path), f"must be a certificate of schema {SCHEMA}")
    return found


def repeated(request: Request, path: Path, made: Mapping[str, Any]) -> Request:
    """The run that a certificate tells of; its exceptions are read from itself."""
    subject, run = made["subject"], made["run"]
    return replace(
        request, **{subject["kind"]: subject["named"]}, **{name: run.get(name) for name in _OPTIONS},
        profile=run["profile"], exceptions=path if made.get("exception") else None,
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """What two certificates say differently, a line each; of an item, its verdict alone."""
    found = []
    for name in dict.fromkeys([*there, *here]):
        a, b, path = there.get(name), here.get(name), f"{within}{name}"
        if path in _FREE or (_ROW.fullmatch(within) and name != "verdict"):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{path}.")
        elif (a or None) != (b or None):
            found.append(f"{path}: {_said(a)} in the certificate, {_said(b)} now")
    return found


def _said(value: Any) -> str:
    return "nothing" if not value else str(value.get("verdict", value) if isinstance(value, Mapping) else value)
