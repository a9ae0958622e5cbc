"""Check or write the vectors, from their files and the oracles: `python -m lab.vector_writer`.

Drafts are completed, and published tests are computed again. `--package FOLDER` packs the files.
"""

import argparse
import hashlib
import json
import sys
import textwrap
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from conformance.checks.vector_checks import BOUNDED
from conformance.methods import brutes
from conformance.methods.brute import Brute, layers_of
from conformance.paths import ROOT, SPEC
from conformance.strategies.policy_inputs import gates_of, hidden_states, networks_of
from conformance.vectors import files
from conformance.vectors.codec import expanded, is_compact
from conformance.vectors.files import Json, decoded, parameters_of
from lab.vector_writer.brute_force import encoded
from lab.vector_writer.expected import OPERATIONS
from lab.vector_writer.expected_large import LARGE_OPERATIONS, generate, shortened
from reference.policies.describe import example_policy
from reference.policies.names import POLICIES
from spec import SPEC_VERSION

WIDTH = 118
KEPT = ("kept", "continuum", "adaptive", "both")
"""Names of results that are kept sets, including those of NestedKV's ablations."""
BITS = 20  # default grid of a long result
HEADER = [
    "A float is text: float.hex of an IEEE 754 double, nan, inf or -inf. Every other number is an integer.",
    "An object among inputs or results is compact: spec/vectors/README.md says what it stands for.",
    "Parameters are the paper's (Table 14), and what the group's parameters change.",
    "Results equal the expected ones bit for bit; those under 'bounded' lie within the bound of the test's items.",
    "An invalid test must be refused with an error that names expected.argument.",
    "A flag names the mistake that the test catches; a tcId is never reused, and a test never changes.",
]


def numbers(seed: int, *shape: int) -> Json:
    """Return nested lists of multiples of 1/16 in (-2, 2). All rows differ."""
    if len(shape) == 1:
        return [((seed * 37 + at * 11 + (seed + at) ** 2 * 7) % 61 - 30) / 16 for at in range(shape[0])]
    return [numbers(seed * 5 + at + 1, *shape[1:]) for at in range(shape[0])]


def seeded(seed: int, L: int = 1, H: int = 4, H_kv: int = 2, n: int = 10, d: int = 2) -> dict[str, Json]:
    return {
        "q": numbers(seed, L, H, n, d), "k": numbers(seed + 1, L, H_kv, n, d), "v": numbers(seed + 2, L, H_kv, n, d),
        "scaling": 0.75,
    }


FIRST_TESTS = [
    ("four of ten", "Plain", seeded(3), 4), ("seven of 15", "Plain", seeded(40, n=15), 7),
    ("three query heads on each KV head", "HeadSharing", seeded(40, H=6, n=18), 9),
]


def built(stage: str) -> Json:
    """Return the file of a stage, with results of the oracles for its inputs. Drafts become tests."""
    stored = files.stored(stage)
    drafts = new_methods() if stage == "policies" else []
    groups = [
        {"operation": group["operation"], "parameters": encoded(group["parameters"]),
         "tests": [completed(group, test) for test in group["tests"]]}
        for group in [*stored["testGroups"], *drafts]
    ]
    tests = [test for group in groups for test in group["tests"]]
    known = notes()
    return {
        "stage": stage, "specVersion": SPEC_VERSION, "schema": "schema.json",
        "generator": "lab.vector_writer", "numberOfTests": len(tests), "digest": digest_of(groups),
        "header": HEADER, "notes": {flag: known[flag] for flag in sorted({x for test in tests for x in test["flags"]})},
        "testGroups": groups,
    }


def notes() -> dict[str, Json]:
    """Return the meanings of the flags in all files."""
    return {flag: note for stage in files.stages() for flag, note in files.stored(stage)["notes"].items()}


def is_draft(test: Json) -> bool:
    return "result" not in test


def completed(group: Json, test: Json) -> Json:
    """Return a draft or a published test with the current results of its oracle."""
    inputs = decoded(test["inputs"])
    large = is_compact(list(inputs.values()))
    operation = (LARGE_OPERATIONS if large else OPERATIONS)[group["operation"]]
    items = list(test.get("items") or operation.items or [group["operation"]])
    head = {"tcId": test["tcId"], "comment": test["comment"], "items": items, "flags": test["flags"],
            "inputs": encoded(inputs), **({"made": digests} if (digests := generate(inputs)) else {})}
    if refused := test.get("refused") or test.get("expected", {}).get("argument"):
        return {**head, "result": "invalid", "expected": {"argument": refused},
                "confirmedBy": f"the MUST text of {items[0]}"}
    results = operation.results(expanded(inputs), parameters_of(decoded(group["parameters"])))
    bounded = bounds(group["operation"], test)
    if large:
        results = {
            name: shortened(x, bits_of(test, name) if name in bounded else None) if is_summary(group, test, name) else x
            for name, x in results.items()
        }
    return {**head, "result": "valid", "expected": encoded(results),
            **({"bounded": bounded} if bounded else {}), "confirmedBy": operation.oracle}


def bounds(operation: str, test: Json) -> list[str]:
    """Return the names of the results that are not exact."""
    if is_draft(test) and operation in BOUNDED:
        return [name for name in BOUNDED[operation].results if name not in test.get("exact", ())]
    return list(test.get("bounded", ()))


def is_summary(group: Json, test: Json, name: str) -> bool:
    """Return True if the result may be a summary.

    Kept sets of a policy are lists, unless they were published as a summary.
    """
    listed = isinstance(test.get("expected", {}).get(name, []), list)
    return not (listed and name in KEPT and group["operation"].startswith(("PO-", "NK-", "TA-")))


def bits_of(test: Json, name: str) -> int:
    return int(test.get("bits", BITS) if is_draft(test) else test["expected"][name]["bits"])


def new_methods() -> list[Json]:
    """Return a group of drafts for each policy without a vector, at the policy's small constants."""
    published = list(files.published())
    shown = {item for _, _, test in published for item in test.get("items", [])}
    tcId = max(test["tcId"] for stage, _, test in published if stage == "policies")
    missing = {brute.item: brute for brute in brutes() if brute.item not in shown}
    return [
        {"operation": item, "parameters": {}, "tests": first_tests(brute, tcId + 1 + len(FIRST_TESTS) * at)}
        for at, (item, brute) in enumerate(missing.items())
    ]


def first_tests(brute: Brute, first: int) -> list[Json]:
    constants: dict[str, Json] = {
        {"block": "b"}.get(name, name): str(x) if isinstance(x, Fraction) else x for name, x in brute.small.items()
    }
    if "inv_freq" in POLICIES[brute.name].model_constants:
        constants["inv_freq"] = [0.5]  # one pair of channels
    return [
        {"tcId": first + at, "comment": comment, "flags": [flag],
         "inputs": {**with_learned(brute.name, inputs), "B": max(B, brute.floor), **constants}}
        for at, (comment, flag, inputs, B) in enumerate(FIRST_TESTS)
    ]


def with_learned(policy: str, inputs: Json) -> Json:
    """Return the inputs. If the policy uses hidden states, return keys, hidden states and networks or gates."""
    if not example_policy(policy).scorer.needs.hidden:
        return inputs
    given = layers_of(inputs)
    learned = gates_of(given) if policy == "fast-kvzip" else networks_of(given)
    arrays = {name: x.round(3).tolist() for name, x in learned.arrays.items()}
    return {"k": inputs["k"], "hidden": [hidden_states(view).tolist() for view in given.layers], **arrays}


def digest_of(groups: Sequence[Json]) -> str:
    """Return a hash of all tests except drafts. It changes if somebody edits or removes a published test."""
    published = [
        {**group, "tests": tests} for group in groups
        if (tests := [test for test in group["tests"] if not is_draft(test)])
    ]
    return hashlib.sha256(json.dumps(published, sort_keys=True).encode()).hexdigest()[:16]


def text_of(value: Json, indent: int = 0, column: int = 0) -> str:
    """Return JSON in which each value that fits into a line after `column` is on one line."""
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
    """Return the tests by tcId."""
    return {test["tcId"]: test for group in file["testGroups"] for test in group["tests"]}


def differences(old: Json, new: Json) -> Iterator[str]:
    """Yield the differences between published tests and the results of the oracles, and any edit of these tests."""
    if old["digest"] != digest_of(old["testGroups"]):
        yield "a published test was changed or removed: `git diff` shows it; a test never changes, add another tcId"
    now = tests_of(new)
    for tcId, test in tests_of(old).items():
        for name in sorted(test.keys() | now[tcId].keys()) if not is_draft(test) else ():
            if test.get(name) != now[tcId].get(name):
                yield f"tcId {tcId}: {name} was {test.get(name)}, is {now[tcId].get(name)}"


def repeated(file: Json) -> list[str]:
    """Return a message for each tcId that several tests have."""
    ids = Counter(test["tcId"] for group in file["testGroups"] for test in group["tests"])
    return [f"tcId {tcId}: used {count} times" for tcId, count in ids.items() if count > 1]


def computed() -> Mapping[str, tuple[Json, list[str]]]:
    """Return for each stage the file as it should be, and the problems of its published tests."""
    new = {stage: built(stage) for stage in files.stages()}
    return {
        stage: (file, [*repeated(file), *differences(files.stored(stage), file)]) for stage, file in new.items()
    }


def written() -> list[str]:
    """Complete the drafts, and return the problems. If there is a problem, no file is written."""
    stages = computed()
    problems = [f"{stage}: {problem}" for stage, (_, wrong) in stages.items() for problem in wrong]
    if not problems:
        for stage, (file, _) in stages.items():
            files.path_of(stage).write_text(text_of(file) + "\n", encoding="utf-8")
    return problems


def checked() -> list[str]:
    """Return the differences between the published files and the results of the oracles."""
    problems = []
    for stage, (new, wrong) in computed().items():
        old = files.stored(stage)
        published = {tcId for tcId, test in tests_of(old).items() if not is_draft(test)}
        drafts = [f"tcId {tcId}: a draft; --write completes it" for tcId in sorted(tests_of(new).keys() - published)]
        stale = ["header or notes are stale; --write renews them"] if old != new and not wrong and not drafts else []
        problems += [f"{stage}: {problem}" for problem in [*wrong, *drafts, *stale]]
    return problems


README = """# kvspec vectors {version}

{tests} tests in {files} files: what published methods of KV-cache eviction must keep, for implementations in any
language. Begin with [vectors/README.md](vectors/README.md), and with the readers in `vectors/readers`, in C, JavaScript
and Python. The pages beside it have the text of each item. The licence is Apache 2.0.
"""
DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every member, so that equal contents give equal bytes."""


def contents() -> Mapping[str, bytes]:
    """Return the members by path: vectors, schema, readers, pages that name items, and the licence."""
    pages = [*SPEC.glob("*.md"), SPEC / "implementing.json", SPEC / "VERSION"]
    vectors = [path for path in files.HOME.rglob("*") if path.suffix in (".json", ".md", ".py", ".c", ".js")]
    numbers = [files.stored(stage)["numberOfTests"] for stage in files.stages()]
    readme = README.format(version=SPEC_VERSION, tests=sum(numbers), files=len(numbers))
    result = {path.relative_to(SPEC).as_posix(): path.read_bytes() for path in [*pages, *vectors]}
    licence = (ROOT / "LICENSE").read_bytes()
    return {**result, "README.md": readme.encode(), "LICENSE": licence}


def packed(folder: Path) -> Path:
    """Write the zip file, which is named after the version. Equal contents give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"kvspec-vectors-{SPEC_VERSION}"
    with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in sorted(contents().items()):
            archive.writestr(zipfile.ZipInfo(f"{name}/{path}", DATE), content, zipfile.ZIP_DEFLATED)
    return folder / f"{name}.zip"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check spec/vectors, complete drafts, or pack the files. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="lab.vector_writer", description=__doc__)
    parser.add_argument("--write", action="store_true", help="complete the drafts; a published test never changes")
    parser.add_argument(
        "--package", metavar="FOLDER", type=Path, nargs="?", const=ROOT / "build",
        help="write a zip file for readers in any language. Default: build",
    )
    asked = parser.parse_args(arguments)
    if asked.package:
        created = packed(asked.package)
        print(f"{created}: {created.stat().st_size // 1024} KiB, {len(contents())} files")
        return 0
    problems = written() if asked.write else checked()
    number = sum(files.stored(stage)["numberOfTests"] for stage in files.stages())
    print("\n".join(problems) or f"vectors: {number} tests in {len(files.stages())} files, as the oracles have them")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
