"""The suite on several engines in one process: `python -m conformance.own.engine.judge REPORT.json [NAME=COMMAND]...`.

The report has, of each planted backend and of each example's command, how many tests passed, and the items and the
message of each that failed.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.paths import ROOT

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
LEFT_OUT = ["--deselect", str(SUITE / "test_diversity.py::test_larger_sets_are_those_of_algorithm_1")]


class _Recorder:
    """What a run says of its tests."""

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
    """Judge the planted backends, the reference by all of their tests, and the examples."""
    serve = f"{sys.executable} -m conformance.engine.serve conformance.own.engine.planted:"
    found = {name: judged(serve + name, tests) for name, tests in SELECTED.items()}
    found["RIGHT"] = judged(f"{serve}RIGHT", [test for tests in SELECTED.values() for test in tests])
    for name, _, command in (argument.partition("=") for argument in arguments[1:]):
        found[name] = judged(command, EXAMPLES[name])
    Path(arguments[0]).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
