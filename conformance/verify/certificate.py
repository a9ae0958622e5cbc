"""Certificates: content, TOML text, comparison with a new run, and badge."""

import json
import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType
from typing import Any

import hypothesis
import numpy as np

from conformance.methods.method import method_of
from conformance.plugin import EXAMPLES, POSITIONS, PROFILES
from conformance.policy_suite.sizes import extent
from conformance.verify.outcomes import ABSTAINED, PROMISES, STATES, WORDS, Outcome, Verdicts, families_of
from conformance.verify.request import ENGINES, KINDS, PRECISIONS, Request
from conformance.verify.subject import Subject
from spec import SPEC_VERSION
from spec.errors import SpecError
from spec.files import parse_toml, read_bytes, replace_text
from spec.printing import counted
from spec.validate import MOST_SECONDS

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    """Return a TOML basic string. TOML has the escapes of JSON, but JSON does not escape DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(_lines(value))}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in table.items()]


def written(table: Mapping[str, Any]) -> str:
    """Return a table of texts, numbers, dates, lists and tables as TOML.

    A nested table below the first level is written on one line.
    """
    lines = _lines({name: value for name, value in table.items() if not isinstance(value, Mapping)})
    for name, value in table.items():
        lines += ["", f"[{_key(name)}]", *_lines(value)] if isinstance(value, Mapping) else []
    return "\n".join(lines) + "\n"


SCHEMA = 2
"""Version of the certificate's format. Schema 1 belongs to specifications before 0.4.0."""
CERTIFIED, PARTIAL, NOT_CERTIFIED = "certified", "partial", "not certified"
KEEPS, QUICK, NOT_QUICK = "keeps its promises", "passes the quick run", "does not pass the quick run"
PASSED = (CERTIFIED, KEEPS, QUICK)
"""Verdicts with exit code 0."""
COMPARED = "not compared with any method"
"""Limit of a verdict about promises: a policy named snapkv can keep all promises without being SnapKV."""


def certificate(request: Request, subject: Subject, verdicts: Verdicts) -> dict[str, Any]:
    """Return the certificate of a run as a table."""
    who = {**asdict(subject), "name": verdicts.name or subject.name, "spec": verdicts.written_for}
    precision = verdicts.precision if request.kind in (*ENGINES, "server") or request.method else None
    run = {"precision": precision, "seed": request.seed, "timeout": request.timeout, "model": request.model,
           "positions": request.positions, "methods": [str(method_of(text)) for text in request.method] or None,
           "scores": verdicts.scored or None, "at_once": verdicts.at_once or None}
    entries = entries_of(request.exceptions)
    return {
        "schema": SCHEMA, "kvspec": _installed(), "spec": SPEC_VERSION, "date": date.today().isoformat(),
        "verdict": _verdict(request, verdicts), "judged": judged_by(request.kind, bool(request.method)),
        "covers": covered(request, verdicts), "families": verdicts.families,
        "failing": verdicts.failing, "undecided": verdicts.missing, "unproven": verdicts.unproven,
        "unneeded_exceptions": verdicts.unneeded,
        "subject": {name: value for name, value in who.items() if value},
        "run": {"profile": request.profile, **{name: value for name, value in run.items() if value is not None}},
        "device": device(request.kind), "counts": counts(verdicts),
        "items": {item: _item(item, request, verdicts) for item in verdicts.items},
        "vectors": verdicts.vectors, "exception": entries,
    }


def covered(request: Request, verdicts: Verdicts) -> str:
    """Return which inputs were tested and how many rows are decided, with the names of the other rows."""
    rows: dict[str, list[str]] = {}
    for item, verdict in verdicts.items.items():
        rows.setdefault(verdict, []).append(item)
    decided = sum(len(rows.pop(word, ())) for word in (*WORDS.values(), "excepted"))
    words = f"profile {request.profile}"
    if request.kind in (*ENGINES, "policy"):
        words += f", at most {EXAMPLES[request.profile]} random examples of each property"
        words += ", no full-size inputs" if request.quick and not request.method and request.kind != "policy" else ""
    if request.method:
        words += f"; {extent(request.method, request.kind == 'command', EXAMPLES[request.profile])}"
    others = [
        f"{verdict}: {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" * (len(names) > _LISTED))
        for verdict, names in rows.items()
    ]
    return "; ".join([words, f"{decided} of {counted(len(verdicts.items), 'row')} decided", *others])


def _verdict(request: Request, verdicts: Verdicts) -> str:
    if request.quick:
        return QUICK if verdicts.certified else NOT_QUICK
    if verdicts.certified:
        return KEEPS if request.kind == "policy" and not request.method else CERTIFIED
    return PARTIAL if verdicts.unfailing else NOT_CERTIFIED


def judged_by(kind: str, method: bool = False) -> str:
    """Return the criteria of the verdict for this kind of subject."""
    if method:
        return "the equations of methods" + (", and its promises" if kind == "policy" else "")
    if kind == "policy":
        return f"its promises; {COMPARED}"
    about = {"cache": "eviction equals masking", "server": "its statements of what it evicted"}
    return about.get(kind, "the items of its stages")


def _installed() -> str:
    try:
        return version("kvspec")
    except PackageNotFoundError:  # the packages are in a folder and not installed
        return SPEC_VERSION


def device(kind: str) -> dict[str, str]:
    """Return the machine and the versions of the libraries that a run depends on."""
    models = ("torch", "transformers") if kind in ("cache", "server") else ()
    return {
        "platform": platform.platform(), "machine": platform.machine(), "python": platform.python_version(),
        "numpy": np.__version__, "hypothesis": hypothesis.__version__, **{name: version(name) for name in models},
    }


def counts(verdicts: Verdicts) -> dict[str, int]:
    """Return the number of tests in each state, and the number of examples of the passed tests."""
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
    if tokens := sum(one.answer_tokens for one in passed):
        row["answer_tokens"] = tokens
    if item in verdicts.smallest:
        return {**row, **_shown(verdicts.smallest[item], request)}
    skipped = next((one.reason for one in tests if one.state == "not run" and one.reason), "")
    return {**row, "found": skipped} if skipped else row


def _shown(outcome: Outcome, request: Request) -> dict[str, str]:
    shown = {"test": outcome.test, "input": outcome.input, "found": outcome.found}
    return {**shown, "repeat": request.repeat(outcome.test)}


def scope(record: Mapping[str, Any]) -> str:
    """Return the subject matter of the verdict in a few words.

    These are the families. If some rows have no verdict, the number of decided rows is added.
    """
    whole = record["subject"]["kind"] != "policy"
    verdicts = [row["verdict"] for row in record["items"].values() if whole or PROMISES in row["families"]]
    decided = sum(verdict not in ABSTAINED for verdict in verdicts)
    named = ", ".join(name for name in record["families"] if whole or name == PROMISES) or "no family"
    if decided == len(verdicts):
        return named
    return f"{named} ({decided} of {len(verdicts)})" if whole else counted(decided, "promise")


def entries_of(exceptions: Path | None) -> list[dict[str, Any]]:
    """Return the entries of a valid exceptions file."""
    if exceptions is None:
        return []
    entries: list[dict[str, Any]] = parse_toml(read_bytes(exceptions).decode()).get("exception", [])
    return entries


def excepted(entry: Mapping[str, Any]) -> str:
    """Return the item, test or vector that an entry of the exceptions file excepts."""
    return str(entry.get("item") or entry.get("test") or entry.get("vector"))


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a certificate to a file."""
    replace_text(path, written(record))


_Types = Mapping[str, tuple[type, ...]]
"""Types of the values of a table that `--check` reads. A value with NoneType may be missing."""
_TYPES: _Types = {
    "verdict": (str,), "failing": (list,), "subject": (dict,), "run": (dict,), "items": (dict,), "vectors": (dict,),
    "device": (dict,), "exception": (list, NoneType),
}
_SUBJECT: _Types = {"kind": (str,), "named": (str,), "digest": (str,)}
_OPTIONS: _Types = {
    "timeout": (int, float, NoneType), "precision": (str, NoneType), "seed": (int, NoneType), "model": (str, NoneType),
    "positions": (str, NoneType),
}
_RUN: _Types = {"profile": (str,), "methods": (list, NoneType), **_OPTIONS}
_ROW: _Types = {"verdict": (str,), "tests": (int,)}

_NAMED, _LISTED = 5, 12
"""Maximum numbers of names in an error, and of rows with the same verdict in a sentence."""

# A different day, machine or version of Hypothesis may change these values without changing a verdict.
_FREE = ("date", "device", "kvspec", "counts.examples", "run.at_once")
_FREE_OF_A_ROW = ("examples", "answer_tokens", "test", "input", "found", "repeat")


def read(path: Path) -> dict[str, Any]:
    """Read a certificate from a file.

    Raises:
        SpecError: if the file is not a certificate, has another schema, or is from an incomplete run.
    """
    try:
        result = parse_toml(read_bytes(path).decode())
    except OSError as error:
        bound = f"cannot be read ({error.strerror}); give the path of a certificate.toml of `kvspec verify`"
        raise SpecError("check", str(path), bound) from error
    except ValueError as error:
        raise SpecError("check", str(path), f"must be a certificate: {error}") from error
    if wrong := _wrong_types(result) or _wrong_values(result):
        names = ", ".join(wrong[:_NAMED])
        reason = f"must be a certificate of schema {SCHEMA}, but lacks valid values for {names}"
        raise SpecError("check", str(path), reason)
    if result["run"]["profile"] not in PROFILES or "quick" in result["verdict"]:
        raise SpecError(
            "check", str(path), "must be the certificate of a complete run, without --quick and --fail-fast"
        )
    return result


def _wrong_types(record: Mapping[str, Any]) -> list[str]:
    """Return the names of values that are missing or have a wrong type."""
    if wrong := _mistyped(record, _TYPES):
        return wrong
    tables = [(record["subject"], _SUBJECT, "subject."), (record["run"], _RUN, "run.")]
    tables += [(row, _ROW, f"items.{name}.") for name, row in record["items"].items()]
    return [name for table, types, within in tables for name in _mistyped(table, types, within)]


def _mistyped(table: Any, types: _Types, within: str = "") -> list[str]:
    if not isinstance(table, dict):
        return [within.removesuffix(".")]
    # `type` and not `isinstance`, because True is an int.
    return [f"{within}{name}" for name, allowed in types.items() if type(table.get(name)) not in allowed]


def _wrong_values(record: Mapping[str, Any]) -> list[str]:
    """Return the names of values that no certificate has. All types are right."""
    run = record["run"]
    right = {
        "schema": record.get("schema") in (1, SCHEMA), "subject.kind": record["subject"]["kind"] in KINDS,
        "run.methods": all(isinstance(method, str) for method in run.get("methods", ())),
        "run.precision": run.get("precision") in (None, *PRECISIONS), "run.seed": run.get("seed", 0) >= 0,
        "run.timeout": 0 < run.get("timeout", 1) <= MOST_SECONDS,
        "run.positions": run.get("positions") in (None, *POSITIONS),
        "exception": all(isinstance(entry, dict) for entry in record.get("exception", ())),
    }
    return [name for name, holds in right.items() if not holds]


def of_another_version(record: Mapping[str, Any]) -> str:
    """Return the reason why the verdicts cannot be repeated with this version of the specification, or ""."""
    if record.get("spec") == SPEC_VERSION:
        return ""
    return (
        f"the certificate is of specification {record.get('spec')}, this is {SPEC_VERSION}; nothing was run:"
        f" check it with kvspec {record.get('kvspec')}, or make a new one"
    )


def repeated(request: Request, path: Path, record: Mapping[str, Any]) -> Request:
    """Return the request of the run that the certificate describes.

    The exceptions are read from the certificate file.
    """
    subject, run = record["subject"], record["run"]
    return replace(
        request, **{subject["kind"]: subject["named"]}, method=tuple(run.get("methods", ())),
        **{name: run.get(name) for name in _OPTIONS},
        profile=run["profile"], exceptions=path if record.get("exception") else None,
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """Return the differences between two certificates, a line each.

    Of a row, compare verdict, families and numbers of tests.
    """
    result = []
    for name in dict.fromkeys([*there, *here]):
        a, b, path = there.get(name), here.get(name), f"{within}{name}"
        if path in _FREE or (within.startswith("items.") and name in _FREE_OF_A_ROW):
            continue
        if (path == "covers" and a is None) or (path == "subject.name" and there.get("kind") == "policy"):
            continue  # An older kvspec wrote no coverage, and as `name` the name that a policy calls itself.
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            result += differences(a, b, f"{path}.")
        elif (a or None) != (b or None):
            result.append(f"{path}: {_verdict_of(a)} in the certificate, {_verdict_of(b)} now")
    return result


def new_failures(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the items that fail on new examples but not in the certificate.

    Each item has the failing input and the command that repeats the test.
    """
    result = []
    for item in here["failing"]:
        if item not in there["failing"]:
            row = here["items"][item]
            result.append(f"{item} fails on other examples: {row['found']}\n{row['input']}\nrepeat: {row['repeat']}")
    if not result and there["verdict"] in PASSED and here["verdict"] not in PASSED:
        result.append(f"verdict: {there['verdict']} in the certificate, {here['verdict']} on other examples")
    return result


def _verdict_of(value: Any) -> str:
    return "nothing" if not value else str(value.get("verdict", value) if isinstance(value, Mapping) else value)


GREEN, YELLOW, RED = "#1a7f37", "#9a6700", "#cf222e"
_LETTER = 6.6
"""Approximate width of a letter at a font size of 11 pixels."""

_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{left}: {right}">
<rect width="{width}" height="20" rx="3" fill="{colour}"/>
<path d="M0 3a3 3 0 0 1 3-3h{edge}v20H3a3 3 0 0 1-3-3z" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{first}" y="14" textLength="{long}">{left}</text>
<text x="{second}" y="14" textLength="{longer}">{right}</text></g>
</svg>
"""


def badge(record: Mapping[str, Any]) -> str:
    """Return the badge as SVG.

    The badge is green for a passed run, and yellow for a run with exceptions or a partial verdict. A failed run has a
    red badge with the number of failing items.
    """
    exceptions = len(record["exception"])
    if record["verdict"] == PARTIAL:
        colour, right = YELLOW, f"{scope(record)} in part; {counted(len(record['unproven']), 'item')} unproven"
    elif record["verdict"] not in PASSED:
        colour, right = RED, f"not certified; {counted(len(record['failing']) + len(record['undecided']), 'item')}"
    elif methods := record["run"].get("methods"):
        colour, right = GREEN, f"conforms to {', '.join(methods)}"
    elif record["verdict"] == KEEPS:
        colour, right = GREEN, f"keeps its {scope(record)}; {COMPARED}"
    elif exceptions:
        colour, right = YELLOW, f"{scope(record)}; {counted(exceptions, 'exception')}"
    else:
        colour, right = GREEN, scope(record)
    left = f"kvspec {record['spec']}"
    long, longer = round(len(left) * _LETTER), round(len(right) * _LETTER)
    return _SVG.format(
        left=escape(left), right=escape(right), colour=colour, long=long, longer=longer, width=long + longer + 20,
        edge=long + 7, first=5 + long / 2, second=long + 15 + longer / 2,
    )
