"""Vectors made from the cases and the oracles, written as JSON, and compared with what is published."""

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from conformance.assurance.vector_writer.case import Case, Group, encoded
from conformance.assurance.vector_writer.cases import STAGES
from conformance.assurance.vector_writer.compact import made
from conformance.assurance.vector_writer.expected import OPERATIONS
from conformance.assurance.vector_writer.expected_large import LARGE_OPERATIONS, shortened
from conformance.assurance.vector_writer.flags import FLAGS
from conformance.vectors import files
from conformance.vectors.compact import expanded, is_compact
from conformance.vectors.json_values import Json, parameters_of
from spec import SPEC_VERSION

__all__ = ["built", "differences", "main", "repeated", "text_of", "written"]

WIDTH = 118
HEADER = [
    "A float is text: float.hex of an IEEE 754 double, nan, inf or -inf. Every other number is an integer.",
    "An object among inputs or results is compact: spec/vectors/README.md says what it stands for.",
    "Parameters are the paper's (Table 14), and what the group's parameters change.",
    "Results equal the expected ones bit for bit; those under 'bounded' lie within the bound of the test's items.",
    "An invalid test must be refused with an error that names expected.argument.",
    "A flag names the mistake that the test catches; a tcId is never reused, and a test never changes.",
]


def built(stage: str) -> Json:
    """The file of a stage, from its cases and the oracles: published groups in their order, then new ones."""
    published = list(tests_of(files.stored(stage)))
    places = {tcId: place for place, tcId in enumerate(published)}
    chosen = sorted(STAGES[stage], key=lambda group: min(places.get(case.tcId, len(places)) for case in group.cases))
    groups = [_group(group) for group in chosen]
    tests = [test for group in groups for test in group["tests"]]
    flags = sorted({flag for test in tests for flag in test["flags"]})
    return {
        "stage": stage, "specVersion": SPEC_VERSION, "schema": "schema.json",
        "generator": "conformance.assurance.vector_writer",
        "numberOfTests": len(tests), "header": HEADER,
        "notes": {flag: dict(zip(("bugType", "description"), FLAGS[flag], strict=True)) for flag in flags},
        "testGroups": groups,
    }


def _group(group: Group) -> Json:
    tests = [_test(group, case) for case in group.cases]
    return {"operation": group.operation, "parameters": encoded(group.parameters), "tests": tests}


def _test(group: Group, case: Case) -> Json:
    large = is_compact(list(case.inputs.values()))
    operation = (LARGE_OPERATIONS if large else OPERATIONS)[group.operation]
    items = list(case.items or operation.items or [group.operation])
    head = {"tcId": case.tcId, "comment": case.comment, "items": items, "flags": list(case.flags)}
    inputs = {"inputs": encoded(case.inputs), **({"made": digests} if (digests := made(case.inputs)) else {})}
    if case.refused:
        return {**head, **inputs, "result": "invalid", "expected": {"argument": case.refused},
                "confirmedBy": f"the MUST text of {items[0]}"}
    results = operation.results(expanded(case.inputs), parameters_of(group.parameters))
    bounded = [name for name in operation.bounded if name not in case.exact]
    if large:
        results = {name: shortened(x, case.bits if name in bounded else None) for name, x in results.items()}
    return {**head, **inputs, "result": "valid", "expected": encoded(results),
            **({"bounded": bounded} if bounded else {}), "confirmedBy": operation.oracle}


def text_of(value: Json, indent: int = 0, column: int = 0) -> str:
    """JSON in which whatever fits a line, from `column` on, stands in one."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or column + len(flat) <= WIDTH:
        return flat
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        named = [f"{json.dumps(name)}: " for name in value]
        values = [text_of(x, indent + 1, indent + 2 + len(name)) for name, x in zip(named, value.values(), strict=True)]
        inner = [name + text for name, text in zip(named, values, strict=True)]
        return "{" + pad + f",{pad}".join(inner) + pad[:-1] + "}"
    if any(isinstance(x, dict | list) or " " in str(x) for x in value):
        return "[" + pad + f",{pad}".join(text_of(x, indent + 1, indent + 2) for x in value) + pad[:-1] + "]"
    lines = textwrap.wrap(flat[1:-1], WIDTH - indent - 1, break_on_hyphens=False)
    return "[" + pad + pad.join(lines) + pad[:-1] + "]"


def tests_of(file: Json) -> dict[int, Json]:
    """Each test by its tcId, with its group's operation and parameters."""
    return {
        test["tcId"]: {**test, "operation": group["operation"], "parameters": group["parameters"]}
        for group in (file["testGroups"] if file else []) for test in group["tests"]
    }


def differences(old: Json, new: Json) -> Iterator[str]:
    """What a published file holds that the cases and oracles do not give: changed and lost tests."""
    now = tests_of(new)
    for tcId, test in tests_of(old).items():
        if tcId not in now:
            yield f"tcId {tcId}: published, but no case makes it; a tcId is never removed"
            continue
        for name in sorted(test.keys() | now[tcId].keys()):
            if test.get(name) != now[tcId].get(name):
                yield f"tcId {tcId}: {name} was {test.get(name)}, is {now[tcId].get(name)}"


def repeated(file: Json) -> list[str]:
    """tcIds that two cases claim."""
    ids = Counter(test["tcId"] for group in file["testGroups"] for test in group["tests"])
    return [f"tcId {tcId}: used {count} times" for tcId, count in ids.items() if count > 1]


def written(stages: Mapping[str, Sequence[Group]] = STAGES) -> list[str]:
    """Add new tests to the published files; what stands in the way, if anything does: then nothing is written."""
    new = {stage: built(stage) for stage in stages}
    problems = [
        f"{stage}: {problem}" for stage, file in new.items()
        for problem in [*repeated(file), *differences(files.stored(stage), file)]
    ]
    if not problems:
        for stage, file in new.items():
            files.path_of(stage).write_text(text_of(file) + "\n", encoding="utf-8")
    return problems


def checked() -> list[str]:
    """How the published files differ from what the cases and oracles give."""
    problems = []
    for stage in STAGES:
        old, new = files.stored(stage), built(stage)
        missing = sorted(tests_of(new).keys() - tests_of(old).keys())
        found = [*repeated(new), *differences(old, new)]
        found += [f"tcId {tcId}: not published; --write adds it" for tcId in missing]
        if not found and old != new:
            found.append("header or notes are stale; --write renews them")
        problems += [f"{stage}: {problem}" for problem in found]
    strangers = [stage for stage in files.stages() if stage not in STAGES]
    return problems + [f"{name}: a file that no stage makes" for name in strangers]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check spec/vectors, or write new tests; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="conformance.assurance.vector_writer", description=__doc__)
    parser.add_argument("--write", action="store_true", help="add new tests; a published one never changes")
    problems = written() if parser.parse_args(arguments).write else checked()
    number = sum(len(group.cases) for groups in STAGES.values() for group in groups)
    print("\n".join(problems) or f"vectors: {number} tests in {len(STAGES)} files, as the oracles have them")
    return int(bool(problems))
