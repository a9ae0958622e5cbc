"""Presentation of a certificate: terminal text, Markdown for a pull request, JUnit XML and an HTML page."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from conformance.checks.refusals import SubjectFailure
from conformance.verify.certificate import COMPARED, PARTIAL, PASSED, QUICK, excepted, scope
from conformance.verify.outcomes import ABSTAINED, COMPOSED, PROMISES, STATES, Verdicts, formula, must, so_far
from spec.errors import SpecError
from spec.printing import counted

_LINES, _WIDTH, _MOST = 12, 400, 12
_WIDEST = 1000
"""Largest number of characters of a line that has the expected and the observed value, or what to type."""
_ALWAYS = ("passed", "failed", "not run")
"""States whose number of tests the summary always shows, before the other states."""
_NUMBERS = re.compile(r"\d+")
_CRASH = f"{SubjectFailure.__name__}: "
_ERRORS = (_CRASH, f"{SpecError.__name__}: ")
"""First words of a failure if the code under test raised an error in place of a result."""
_NOT_COMPARED = "not compared, because the code under test raised an error in place of a result"


def headline(record: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence."""
    on, policy = scope(record), record["subject"]["kind"] == "policy"
    # A policy is named by its import path, because any policy can call itself snapkv.
    name = record["subject"]["named" if policy else "name"]
    who = " ".join(part for part in (name, record["subject"].get("version", "")) if part)
    methods, quick = ", ".join(record["run"].get("methods", ())), f"; {QUICK}" if record["verdict"] == QUICK else ""
    if record["verdict"] in PASSED:
        if methods:
            keeps = f" and keeps its {on}" if PROMISES in record["families"] else ""
            return f"{who} conforms to {methods}{keeps}{quick}"
        if policy:
            return f"{who} keeps its {on}; {COMPARED}{quick}"
        on += " with renumbered positions" if record["run"].get("positions") == "renumbered" else ""
        does = f"{QUICK} of" if record["verdict"] == QUICK else "conforms to"
        return f"{who} {does} kvspec {record['spec']} on {on}" + _excepted(record)
    if record["verdict"] == PARTIAL:
        unproven = ", ".join(record["unproven"])
        return f"{who} conforms in part to kvspec {record['spec']} on {on}: excepted, without a passed test: {unproven}"
    if record["undecided"] and not record["failing"] and not record["counts"]["failed"]:
        number = len(record["undecided"])
        items = f"{counted(number, 'item')} {'is' if number == 1 else 'are'} not decided"
        return f"{who} is not certified: no test fails, but {items}"
    wrong = _wrong(record)
    otherwise = "tests without an item fail" if record["counts"]["failed"] else "there was nothing to judge"
    if methods:
        return f"{who} does not conform to {methods}: {wrong or otherwise}"
    does_not = "does not keep its promises" if policy else f"does not conform to kvspec {record['spec']}"
    return f"{who} {does_not}: {wrong or otherwise}"


def _wrong(record: Mapping[str, Any]) -> str:
    """Return the failing items, and the number of items that are not decided. Empty if there are none."""
    failing, undecided = record["failing"], len(record["undecided"])
    words = [f"{', '.join(failing)} {'fails' if len(failing) == 1 else 'fail'}"] if failing else []
    return "; ".join([*words, *([f"{counted(undecided, 'item')} not decided"] if undecided else [])])


def _excepted(record: Mapping[str, Any]) -> str:
    number = sum(row["verdict"] == "excepted" for row in record["items"].values())
    return f", {counted(number, 'item')} excepted" if number else ""


def by_family(record: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the rows of each family and of the compositions, by item.

    A family that the subject does not offer has only the rows without a verdict. An item of two families is listed in
    each offered family.
    """
    there, result = (*record["families"], COMPOSED), dict[str, dict[str, Mapping[str, Any]]]()
    for item, row in record["items"].items():
        for family in row["families"]:
            rows = result.setdefault(family, {})
            if family in there or row["verdict"] in ABSTAINED:
                rows[item] = row
    return result


def summary(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the terminal output."""
    counts = record["counts"]
    numbers = {state: counts[state.replace(" ", "_")] for state in (*_ALWAYS, *STATES)}
    shown_states = ", ".join(f"{number} {state}" for state, number in numbers.items() if number or state in _ALWAYS)
    examples, seed = counted(counts["examples"], "example"), record["run"].get("seed")
    yield f"{counted(counts['tests'], 'test')}: {shown_states}; {examples}, --seed {seed}"
    if record["subject"].get("spec", record["spec"]) != record["spec"]:
        yield f"the engine was written for kvspec {record['subject']['spec']}, and is judged by {record['spec']}"
    for family, items in by_family(record).items():
        verdicts = Counter(row["verdict"] for row in items.values())
        totals = [f"{number} {verdict}" for verdict, number in sorted(verdicts.items())]
        yield f"  {family:13} {', '.join(totals) or 'not offered'}"
    yield from _crashes(record)
    shown: dict[str, str] = {}
    for item in record["failing"][:_MOST]:
        yield from _failing(item, record["items"][item], shown)
    if len(record["failing"]) > _MOST:
        yield f"\n... and {counted(len(record['failing']) - _MOST, 'more item')}"
    if at_once := record["run"].get("at_once"):
        yield f"  the server ran {at_once} of 32 requests at the same time (measured, without a verdict)"
    if record["undecided"]:
        yield f"\nnot decided, since a test was skipped or did not run: {', '.join(record['undecided'][:_MOST])}" + (
            " ..." if len(record["undecided"]) > _MOST else ""
        )
    yield from _reasons(record)
    if record["unneeded_exceptions"]:
        yield f"\nexceptions no longer needed: {', '.join(record['unneeded_exceptions'])}"
    yield f"\ncovers: {record['covers']}"
    yield f"\n{headline(record)}"
    yield from _promises(record)
    if record["judged"].endswith(COMPARED) and record["verdict"] in PASSED:
        yield "a promise does not test the score: a wrong SnapKV keeps its promises too. Add --as METHOD to compare the"
        yield "kept tokens with a published method, as in --as snapkv"


def stopped(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the terminal output of a run that was stopped: failing items, and items of which all tests ran."""
    tests, failing, decided = so_far(lines)
    done = sum("test" in line for line in lines)
    yield f"stopped after {done} of {counted(tests, 'test')}; the items decided so far:"
    for item, message in failing.items():
        yield f"  {item} fails: {_short((message.splitlines() or [''])[0], _WIDEST)[0]}"
    for verdict, items in decided.items():
        yield f"  {verdict}, in all tests of the item: {', '.join(items)}"
    if not failing and not decided:
        yield "  none"


def _reasons(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield each reason why rows are undecided, with these rows."""
    rows: dict[str, list[str]] = {}
    for item, row in record["items"].items():
        if row["verdict"] in ("not run", "pass") and row.get("found"):
            rows.setdefault(row["found"], []).append(item)
    for reason, items in list(rows.items())[:_MOST]:
        yield f"  {', '.join(items[:_MOST])}{' ...' if len(items) > _MOST else ''}: {reason}"


def _promises(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the properties that a policy promises and keeps, and the properties that the policy does not promise."""
    promised = {item: row["verdict"] for item, row in record["items"].items() if PROMISES in row["families"]}
    kept = [item for item, verdict in promised.items() if verdict == "pass"]
    others = [item for item, verdict in promised.items() if verdict in ABSTAINED]
    if others and record["verdict"] in PASSED:
        yield f"properties that the policy promises and keeps: {', '.join(kept)}"
        yield f"properties that the policy does not promise, or that do not apply: {', '.join(others)}"


def _crashes(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors that the code under test raised, each with an input. Numbers do not make errors different."""
    rows: dict[str, Mapping[str, Any]] = {}
    for row in (record["items"][item] for item in record["failing"]):
        if _raised(row):
            rows.setdefault(_NUMBERS.sub("", row["found"]), row)
    for row in list(rows.values())[:_MOST]:
        yield "\nthe code under test raised an error in place of a result:"
        yield "  " + "\n  ".join(_short(row["found"].removeprefix(_CRASH), _WIDEST))
        if row["input"]:
            yield "  input   " + "\n          ".join(_short(row["input"]))


def _raised(row: Mapping[str, Any]) -> bool:
    return str(row["found"]).startswith(_ERRORS)


def _failing(item: str, row: Mapping[str, Any], shown: dict[str, str]) -> Iterator[str]:
    yield f"\n{item} fails, in {_tests(row)}"
    first = shown.setdefault(row["test"], item)
    if first != item:
        yield f"  by the same test as {first}"
        return
    if _raised(row):
        yield "  not compared, because of the error above"
    else:
        yield f"  MUST    {must(item, row)}"
        if text := formula(item):
            yield f"  formula {text}"
        yield f"  test    {row['test']}"
        shown_input = row["input"] or "fixed, in the code of the test"
        for name, text, width in (("input", shown_input, _WIDTH), ("found", row["found"], _WIDEST)):
            yield f"  {name:7} " + "\n          ".join(_short(text, width))
    yield f"  repeat  {row['repeat']}"


def _tests(row: Mapping[str, Any]) -> str:
    return "its only test" if row["tests"] == 1 else f"{row['failed']} of its {row['tests']} tests"


def _rule(item: str, row: Mapping[str, Any]) -> str:
    """Return the violated rule of a failing row. No rule was compared if the code under test raised an error."""
    return _NOT_COMPARED if _raised(row) else f"MUST {must(item, row)}"


def _short(text: str, width: int = _WIDTH) -> list[str]:
    lines = [line if len(line) <= width else f"{line[:width]} ..." for line in text.splitlines()]
    return lines if len(lines) <= _LINES else [*lines[:_LINES], "..."]


_MARKS = re.compile(r"([\\`*_\[\]|~#>!])")


def _as_text(words: object) -> str:
    """Escape words of a subject for Markdown: no HTML, no markup, one line."""
    return _MARKS.sub(r"\\\1", escape(" ".join(str(words).split()), quote=False).replace("&gt;", ">"))


def markdown(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a comment on a pull request."""
    yield f"**kvspec: {_as_text(headline(record))}**"
    yield f"\nCovers: {_as_text(record['covers'])}\n"
    yield "| Family | Rows |"
    yield "| --- | --- |"
    for family, items in by_family(record).items():
        verdicts = Counter(row["verdict"] for row in items.values())
        counts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
        yield f"| {_as_text(family)} | {counts or 'not offered'} |"
    for item in record["failing"][:_MOST]:
        row = record["items"][item]
        shown = "\n".join(filter(None, (row["input"], row["found"], "", row["repeat"]))).replace("```", "` ` `")
        name = escape(" ".join(item.split()))
        yield f"\n<details><summary>{name} fails, in {_tests(row)}</summary>\n"
        yield f"{escape(_rule(item, row), quote=False)}\n\n```text\n{shown}\n```\n\n</details>"
    if len(record["failing"]) > _MOST:
        yield f"\nand {counted(len(record['failing']) - _MOST, 'more item')}"


def junit(verdicts: Verdicts) -> str:
    """Return the outcomes as JUnit XML for a CI server.

    A test that neither passed nor failed is skipped, with its state.
    """
    states = Counter(one.state for one in verdicts.outcomes)
    skipped = len(verdicts.outcomes) - states["passed"] - states["failed"]
    suite = ET.Element("testsuite", {
        "name": "kvspec", "tests": str(len(verdicts.outcomes)), "failures": str(states["failed"]),
        "skipped": str(skipped), "errors": "0",
    })
    for one in verdicts.outcomes:
        file, _, name = one.test.partition("::")
        case = ET.SubElement(suite, "testcase", {"classname": file.removesuffix(".py"), "name": name})
        if one.state == "failed":
            message = f"{', '.join(one.items)}: {one.found.partition(chr(10))[0]}"
            ET.SubElement(case, "failure", {"message": message}).text = f"{one.input}\n{one.found}"
        elif one.state != "passed":
            ET.SubElement(case, "skipped", {"message": ": ".join(filter(None, (one.state, one.reason)))})
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="kvspec">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvspec: {title}</title>
<style>
:root {{ color-scheme: light dark; --pass: #1a7f37; --fail: #cf222e; --other: #9a6700; --dim: #767676; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --pass: #3fb950; --fail: #ff7b72; --other: #d29922; --dim: #9a9a9a; }} }}
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 2.4rem; line-height: 1.2; margin: 0; }} h1::first-letter {{ text-transform: uppercase; }}
h1 + p {{ font-size: 1.1rem; margin-top: .3rem; }} h1 + p, code {{ overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
@media screen and (min-width: 40rem) {{ .items td:first-child, .items td:nth-child(3) {{ white-space: nowrap; }} }}
.facts td {{ overflow-wrap: anywhere; }} .facts td:first-child {{ white-space: nowrap; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .1rem .8rem .1rem 0; }}
td {{ border-top: 1px solid color-mix(in srgb, currentColor 15%, transparent); }}
@media (max-width: 40rem) {{ /* A rule is below its item. */
  .items tr {{ display: grid; grid-template-columns: 18fr 8fr 13fr 10fr; }}
  .items tr > :nth-child(5) {{ grid-column: 1 / -1; }}
  .items td:nth-child(5) {{ border: 0; padding-bottom: .5rem; }} .items th:nth-child(5) {{ display: none; }} }}
.pass {{ color: var(--pass); }} .fail {{ color: var(--fail); }} .excepted {{ color: var(--other); }}
.dim {{ color: var(--dim); }} .number {{ text-align: right; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem;
  background: color-mix(in srgb, currentColor 8%, transparent); }}
</style></head><body>
<h1 class="{verdict}">{word}</h1><p>{title}</p>
{body}
</body></html>
"""


def page(record: Mapping[str, Any]) -> str:
    """Return the HTML page of a certificate."""
    verdict = "pass" if record["verdict"] in PASSED else "excepted" if record["verdict"] == PARTIAL else "fail"
    parts = [*_facts(record), *_counterexamples(record), *_families(record), *_vectors(record), *_exceptions(record)]
    return _PAGE.format(
        title=escape(headline(record)), word=escape(record["verdict"]), verdict=verdict, body="\n".join(parts),
    )


def _row(*cells: object) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _facts(record: Mapping[str, Any]) -> Iterator[str]:
    named = {
        "verdict": "verdict", "judged": "judged by", "covers": "covers", "date": "date", "kvspec": "kvspec",
        "spec": "specification",
    }
    rows = {title: record[name] for name, title in named.items()}
    yield '<table class="facts">'
    yield from (_row(name, escape(str(value))) for name, value in rows.items())
    for name in ("subject", "run", "device", "counts"):
        facts = "; ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in record[name].items())
        yield _row(name, escape(facts))
    yield "</table>"
    option = f"--{record['subject']['kind']}"
    yield "<p>To repeat the run: <code>kvspec verify --check certificate.toml</code>. The subject was"
    yield f"<code>{option} {escape(record['subject']['named'])}</code>.</p>"


def _plain(value: object) -> str:
    """Return a value of a certificate as words, without Python's brackets and quotation marks."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)


def _counterexamples(record: Mapping[str, Any]) -> Iterator[str]:
    for item in record["failing"]:
        row = record["items"][item]
        yield f'<h2 id="{escape(item)}" class="fail">{escape(item)}</h2><p>{escape(_rule(item, row))}</p>'
        yield "<pre>" + escape("\n".join(filter(None, (row["input"], row["found"])))) + "</pre>"
        yield f"<p>To repeat the test: <code>{escape(row['repeat'])}</code></p>"


def _families(record: Mapping[str, Any]) -> Iterator[str]:
    for family, items in by_family(record).items():
        if not items:
            yield f"<h2>{escape(family)}: not offered</h2>"
            continue
        yield f'<h2>{escape(family)}</h2><div class="wide"><table class="items">'
        yield "<tr><th>item<th>verdict<th>tests passed<th>examples<th>rule</tr>"
        for item, row in items.items():
            name = f'<a href="#{escape(item)}">{escape(item)}</a>' if row["verdict"] == "fail" else escape(item)
            word = f'<span class="{escape(row["verdict"].replace(" ", "-"))}">{escape(row["verdict"])}</span>'
            text = f'<span class="dim">{escape(must(item))}</span>'
            yield _row(name, word, f"{row['passed']} of {row['tests']}", row["examples"], text)
        yield "</table></div>"


def _vectors(record: Mapping[str, Any]) -> Iterator[str]:
    if record["vectors"]:
        yield "<h2>vectors</h2>"
    yield '<table class="facts">'
    for verdict in dict.fromkeys(record["vectors"].values()):
        named = [name for name, outcome in record["vectors"].items() if outcome == verdict]
        yield _row(escape(verdict), len(named), f'<span class="dim">{escape(", ".join(named))}</span>')
    yield "</table>"


def _exceptions(record: Mapping[str, Any]) -> Iterator[str]:
    if record["exception"]:
        yield '<h2>exceptions</h2><div class="wide"><table>'
        for entry in record["exception"]:
            subject = excepted(entry)
            unneeded = "no longer needed" if subject in record["unneeded_exceptions"] else ""
            cells = (subject, entry["kind"], entry["reason"], entry["issue"], entry["expiry"], unneeded)
            yield _row(*(escape(str(cell)) for cell in cells))
        yield "</table></div>"
