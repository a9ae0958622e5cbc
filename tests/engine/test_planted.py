"""Tests of the examples and tables in spec/protocol.md, and of engines with planted errors.

The suite names the items that an error breaks. `python -m tests.engine.test_planted REPORT.json [NAME=COMMAND]...` runs
the suite on several engines in one process. For each planted backend and each command, the report has the number of
passed tests. For each failed test, the report has the items and the message.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.engine import ops
from conformance.engine.serve import answer
from conformance.engine.values import CLASSES, as_it_is, checked, decode, encode, sizes
from conformance.paths import DOCS, ROOT, SPEC
from conformance.strategies.numbers import NESTED
from lab.implementer_tables import FAMILIES
from lab.measure.certificates.__main__ import COMPILERS, compile_engine
from reference.backend import BACKEND
from spec import SPEC_VERSION
from spec.backend import Backend
from spec.errors import SpecError
from spec.parameters import ESSAY, NESTEDKV, PAPER, TINY
from tests.engine.planted import EVERY

pytestmark = pytest.mark.law("as-it-is-described")

SUITE = ROOT / "conformance" / "suite"
SELECTED: Mapping[str, Sequence[str]] = {
    "TIES": ["test_diversity.py::test_two_of_three"],
    "BUDGET": ["test_dissolution.py::test_the_branches_of_the_loop"],
    "FLOAT32": ["test_coattention.py::test_a_prompt_lies_in_the_certified_box"],
    "CRASHING": ["test_policy_stages.py::test_best_tokens"],
    "MANY_HEADS": [
        "test_scale_policies.py::test_every_query_of_a_long_prompt_is_counted[20-20-33]",
        "test_policy_stages.py::test_each_query_gives_one",
    ],
}
"""The tests that judge each planted backend."""
EXAMPLES: Mapping[str, Sequence[str]] = {
    "c": ["test_diversity.py", "test_vectors.py"],
    "javascript": [
        "test_coattention.py", "test_vectors.py", "test_calls.py::test_the_first_stage_refuses_bad_tensors_itself",
    ],
    "cpp": [
        "../policy_suite/test_method.py", "--kvspec-as=snapkv(W=3, kernel=3)", "--kvspec-as=pyramidkv(W=3, kernel=3)",
        "--kvspec-as=keydiff", "--kvspec-as=knorm", "--kvspec-as=streamingllm",
    ],
}
"""The tests that judge each engine in docs/examples, and the methods as which they do."""
# Its oracle alone takes two seconds; test_sets_of_thousands has larger sets.
LEFT_OUT = ["--deselect", "conformance/suite/test_diversity.py::test_larger_sets_are_those_of_algorithm_1"]


class _Recorder:
    """Return the outcomes of the tests of a run."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        if report.failed:
            items = sorted({name for mark in item.iter_markers("spec") for name in mark.args})
            self.failed[item.name] = {"items": items, "text": report.longreprtext}
        self.passed += report.when == "call" and report.passed
        return report


def judged(command: str, tests: Sequence[str]) -> Mapping[str, Any]:
    """One run of tests of the suite on the engine of a command."""
    recorder = _Recorder()
    arguments = ["-q", "-p", "no:cacheprovider", "--kvspec-profile", "few", "--kvspec-command", command, *LEFT_OUT]
    words = [test if test.startswith("--") else str((SUITE / test).resolve()) for test in tests]
    code = pytest.main([*arguments, *words], plugins=[recorder])
    return {"code": int(code), "passed": recorder.passed, "failed": recorder.failed}


def main(arguments: Sequence[str]) -> int:
    """Test the planted backends, the reference and the examples, each with the tests of all backends."""
    serve = f"{sys.executable} -m conformance.engine.serve tests.engine.planted:"
    actual = {name: judged(serve + name, tests) for name, tests in SELECTED.items()}
    actual["RIGHT"] = judged(f"{serve}RIGHT", [test for tests in SELECTED.values() for test in tests])
    for name, _, command in (argument.partition("=") for argument in arguments[1:]):
        actual[name] = judged(command, EXAMPLES[name])
    Path(arguments[0]).write_text(json.dumps(actual), encoding="utf-8")
    return 0


Reports = Mapping[str, Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Test all engines in one process, because the imports take longer than most tests."""
    home = tmp_path_factory.mktemp("engines")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    report, examples = home / "report.json", []
    for language, (compiler, *_) in COMPILERS.items():
        if shutil.which(compiler):
            compile_engine(language, home / language)
            examples.append(f"{language}={home / language}")
    if shutil.which("node"):
        examples.append(f"javascript={shlex.join(['node', str(DOCS / 'examples' / 'javascript' / 'engine.mjs')])}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.test_planted", str(report), *examples], cwd=ROOT, text=True,
        env={**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    actual: Reports = json.loads(report.read_text(encoding="utf-8"))
    return actual


@pytest.mark.law("the-proof-has-teeth")
def test_the_reference_passes_as_a_process(reports: Reports) -> None:
    """Every test that names a mistake below."""
    assert reports["RIGHT"]["failed"] == {}
    assert reports["RIGHT"]["passed"] >= sum(map(len, SELECTED.values()))
    assert reports["RIGHT"]["code"] == 0


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(
    ("engine", "item"),
    [("TIES", "DV-GREEDY"), ("BUDGET", "CC-ALLOCATE"), ("FLOAT32", "CC-ATTENTION"), ("CRASHING", "PO-TOP-UNITS"),
     ("MANY_HEADS", "PO-OBSERVED-ATTENTION")],
)
def test_a_mistake_is_named_by_its_item(reports: Reports, engine: str, item: str) -> None:
    failed = reports[engine]["failed"]
    assert failed
    assert all(item in test["items"] for test in failed.values())
    assert reports[engine]["code"] == 1


@pytest.mark.law("the-proof-has-teeth")
def test_a_crash_names_its_request_and_the_rest_is_judged(reports: Reports) -> None:
    """The engine is started again: of the calls, one in a hundred fails."""
    actual = reports["CRASHING"]
    calls = len(actual["failed"]) + actual["passed"]
    for test in actual["failed"].values():
        asked = rf'request: (\{{"id": {EVERY}, "op": "policies.best_tokens"|\S+ \(pipe it into the engine\))'
        for words in ("EngineCrash: ended with exit code 3", asked, "standard error: out of scratch memory"):
            assert re.search(words, test["text"])
    assert calls == 120
    assert 1 <= len(actual["failed"]) <= 2 * calls // EVERY


@pytest.mark.law("the-proof-has-teeth")
def test_what_is_wrong_in_many_heads_alone_is_right_in_few(reports: Reports) -> None:
    assert reports["MANY_HEADS"]["passed"] == 1


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(
    ("example", "needs", "tests"), [("c", "cc", 81), ("javascript", "node", 82), ("cpp", "g++", 5)],
)
def test_the_examples_conform(reports: Reports, example: str, needs: str, tests: int) -> None:
    """Check the number of passed tests: tests of the offered families, all their vectors, and the policies."""
    if example not in reports:
        pytest.skip(f"{needs} is not installed")
    assert reports[example]["failed"] == {}
    assert reports[example]["passed"] >= tests


PAGE = (SPEC / "protocol.md").read_text(encoding="utf-8")


def test_the_examples_of_the_page() -> None:
    """Check the requests to an engine with one family, and the answers. The test of a policy needs no family."""
    lines = re.findall(r"^([<>]) (.+)$", PAGE, re.MULTILINE)
    assert [mark for mark, _ in lines] == [">", "<"] * 4
    greedy = Backend("greedy", diversity=BACKEND.diversity)
    for (_, request), (_, wanted) in zip(lines[::2], lines[1::2], strict=True):
        actual, want = json.loads(answer(greedy, "float64", request)), json.loads(wanted)
        if "refusal" in want:
            assert want["refusal"].pop("bound")
            assert actual["refusal"].pop("bound")
        elif "op" in request and json.loads(request)["op"] == "hello":
            want["result"] |= {"spec": SPEC_VERSION, "version": SPEC_VERSION}
        assert actual == want


def test_every_stage_is_asked_as_it_is_declared() -> None:
    """Check the names and the order of families, stages and arguments."""
    declared = {
        f"{family}.{stage}": list(inspect.signature(getattr(protocol, stage)).parameters)[1:]
        for family, protocol in FAMILIES.items() for stage in vars(protocol)
        if not stage.startswith("_") and callable(getattr(protocol, stage))
    }
    assert {op: list(row.arguments) for op, row in ops.OPS.items()} == declared


@pytest.mark.parametrize("name", ops.RECORDS)
def test_a_record_has_its_members(name: str) -> None:
    """Check that a record has the fields that stages read. `records` of a selector is only for reports."""
    kind = CLASSES[name]
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)
    assert list(ops.RECORDS[name]) == [name_of_field for name_of_field in names if name_of_field != "records"]
    for member, text in ops.RECORDS[name].items():
        annotation, wanted = kind.__annotations__[member], ops.array_of(text)
        assert wanted is not None
        if hasattr(annotation, "dim_str"):
            assert annotation.dim_str.replace("_and_one", " + 1").replace("groups", "g") == " ".join(wanted.axes)
            assert annotation.dtypes[0].startswith(wanted.kind)


def test_every_type_is_known() -> None:
    for members in [*(row.arguments for row in ops.OPS.values()), *ops.RECORDS.values()]:
        assert all(kind in {*ops.RECORDS, *ops.PARAMETERS} or ops.array_of(kind) for kind in members.values())


def there_and_back(kind: str, value: Any) -> Any:
    return decode(kind, json.loads(json.dumps(encode("x", kind, value), allow_nan=False)), as_it_is)


ODD = [0.1, -0.0, 5e-324, 1.7976931348623157e308, np.nan, np.inf, -np.inf]


@pytest.mark.parametrize(("dtype", "values"), [
    (np.float64, ODD), (np.float32, [0.1, 2.0**-149, np.nan]), (np.float16, [0.1, 2.0**-24]), (np.bool_, [True, False]),
    (np.int64, [0, -1, 2**53, 2**53 + 1, -(2**63), 2**63 - 1]), (np.int32, [-(2**31), 5]),
])
@pytest.mark.parametrize("copies", [1, 40_000])
def test_arrays_come_back_to_the_bit(dtype: type, values: list[Any], copies: int) -> None:
    """Check that small arrays are lists and large arrays are bytes, and that every value is exact."""
    array: np.ndarray[Any, Any] = np.array(values * copies, dtype=dtype).reshape(copies, -1)
    actual = there_and_back("float[n, d]", array)
    assert actual.shape == array.shape
    assert actual.dtype.kind == array.dtype.kind
    assert np.array_equal(actual, array, equal_nan=array.dtype.kind == "f")
    assert actual.dtype.kind != "f" or np.array_equal(np.signbit(actual), np.signbit(array))
    assert isinstance(encode("x", "float[n, d]", array), list) == (copies == 1)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1, 0, 2)])
def test_an_empty_array_keeps_its_shape(shape: tuple[int, ...]) -> None:
    assert there_and_back("int[n]", np.zeros(shape, dtype=np.int64)).shape == shape


@pytest.mark.parametrize("p", [
    PAPER, ESSAY, replace(TINY, alpha=0, rarity="exponential"), NESTEDKV, NESTED, replace(NESTED, p=Fraction(1, 3)),
])
def test_parameters_come_back(p: Any) -> None:
    kind = "nestedkv" if "w0" in {field.name for field in fields(p)} else "crystalcache"
    assert there_and_back(kind, p) == p


@pytest.mark.parametrize("value", [[[0.0]], "k", np.array(["a"])])
def test_what_is_no_array_of_numbers_is_refused_before_it_is_sent(value: object) -> None:
    with pytest.raises(SpecError) as caught:
        encode("k", "float[n]", value)
    assert caught.value.argument == "k"


ARGUMENTS: Mapping[str, Any] = {
    "D": np.zeros(3), "impact": np.zeros(3), "protected": np.zeros(3, dtype=np.bool_), "parameters": TINY,
}


@pytest.mark.parametrize(("kind", "value", "complaint"), [
    ("float[m]", ["0x1p+0", 0.5, 1], None), ("float[m]", [0.5, 0.5], "shape [2]"), ("float[m]", [[0, 0, 0]], "shape"),
    ("float[m]", [0, 0, "nan"], "holds nan"), ("float[m] or nan", [0, 0, "nan"], None),
    ("float[m]", "abc", "no number"), ("float[m] or nan", [0, 0, "inf"], "holds inf"),
    ("float[m] or inf", [0, 0, "-inf"], "holds -inf"),
    ("float[m]", [0, 0, "1.5"], "no number"), ("float[m]", [0, 0, None], "no number"),
    ("float[m]", None, "type float"),
    ("float[m]", [True, False, True], "type float"), ("float[m]", [0, 0, True], "bools and other"),
    ("int[m]", [0, 1, 0.0], "type int"), ("int[m]", [0, 1, "9007199254740993"], None),
    ("bool[m]", [0, 1, 0], "type bool"), ("int[m]", [0, 1, 2**70], "int"),
    ("float[m]", [[0], 1, 2], "no number"), ("float[m]", {"shape": [3]}, "base64"),
    ("float[m]", {"dtype": "float32", "shape": [3], "base64": "AAAAAAAAAAAAAAAA"}, None),
    ("float[m]", {"dtype": "float32", "shape": [3], "base64": "AAAAAA=="}, "reshape"),
    ("Trunks", {"offsets": [0, 1, 2, 3], "impact": [1, 1, 1]}, None), ("Trunks", [0, 1], "object of offsets, impact"),
    ("Trunks", {"offsets": [0, 1, 3], "impact": [1, 1, 1]}, "offsets is of shape [3]"),
])
def test_a_result_is_checked(kind: str, value: Any, complaint: str | None) -> None:
    """Check the shape against the sizes of the arguments, here m = 3."""
    check = checked(sizes(ops.OPS["crystal.score"], ARGUMENTS))
    if complaint is None:
        decode(kind, value, check)
    else:
        with pytest.raises((ValueError, OverflowError), match=re.escape(complaint)):
            decode(kind, value, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
