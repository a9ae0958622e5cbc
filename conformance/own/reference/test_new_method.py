"""A method is four files: from these alone its name, promises, cases, vectors, exports and trace follow."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.assurance.implementer_tables import exports
from conformance.assurance.trace import read_tree
from conformance.paths import ROOT, SPEC

pytestmark = pytest.mark.spec("PO-RETAIN")

ROW = "| loudkeys | yes | N/A: none | yes | yes | yes | yes | N/A: keys |"
ITEM = """### PO-LOUDKEYS

**Source** none. **Determinism** exact. **Formula** The score of a key is the sum of its magnitudes.
"""
SCORER = '''"""Loud keys stay."""
import numpy as np
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.policy import Needs, Policy
from spec.retention import Granularity
__all__ = ["loudkeys"]
def loudkeys_score(view):
    """Implements: PO-LOUDKEYS"""
    return np.abs(view.k).sum(axis=2)
@named("loudkeys", "A method of this test", "keys with the largest magnitudes")
def loudkeys() -> Policy:
    """Once, at the end of the prompt."""
    scorer = LayerScorer(Needs("all", 0), loudkeys_score)
    return Policy("loudkeys", scorer, even, top_units, SinkAndRecent(0, 0), granularity=Granularity.HEAD)
'''
ORACLE = '''"""Loud keys by brute force."""
from conformance.methods.brute import Brute, by_layer
def loudkeys(layer):
    return [[sum(map(abs, key)) for key in head] for head in layer["k"]]
BRUTES = [Brute("PO-LOUDKEYS", "loudkeys", by_layer(loudkeys))]
'''
TEST = '''
import pytest
from conformance.assurance.policy_cases import CASES
from conformance.strategies.policy_inputs import decided, drawn
@pytest.mark.spec("PO-LOUDKEYS")
def test_kept_sets_are_those_of_brute_force():
    for seed in range(20):
        case, inputs = CASES["loudkeys"], drawn(seed)
        assert decided(case.policy(inputs), inputs, 1 + seed) == case.expected(inputs, 1 + seed)
'''
FOUND = '''
import runpy, sys
import conformance.methods, reference.policies, spec.promises
from pathlib import Path
root = Path(sys.argv[1])
for package in (reference.policies, conformance.methods):
    package.__path__.append(str(root.joinpath(*package.__name__.split("."))))
spec.promises.PAGE = root / "spec" / "policies.md"

from conformance.assurance.item_vectors.items import ITEMS
from conformance.assurance.vector_writer.store import built, differences
from conformance.checks.promises import PROPERTIES
from conformance.strategies.policy_inputs import drawn, named
from conformance.vectors import files
from conformance.vectors.files import decoded, parameters_of
from reference.policies.describe import describe_policy
from reference.policies.names import NAMES
from spec.policy import Promises

assert {"loudkeys", "diverse-loudkeys"} <= set(NAMES)
assert describe_policy("loudkeys").paper == "A method of this test"
assert named("loudkeys", drawn(0)).promises == Promises("yes", "N/A", "yes", "yes", "yes", "yes", "N/A")

from conformance.own.spec import test_policy_table as table
for promise in ("budget exact", "higher score never loses", "head permutation"):
    case = table.CASES["loudkeys"]
    assert all(PROPERTIES[promise].holds(case, drawn(seed), 1 + seed, seed) for seed in range(20))
table.test_every_name_that_users_give_has_a_row_and_a_case()

made, stored = built("policies"), files.stored("policies")
assert list(differences(stored, made)) == []
assert made["testGroups"][:-1] == stored["testGroups"]
tests = made["testGroups"][-1]["tests"]
assert len({test["tcId"] for group in made["testGroups"] for test in group["tests"]}) == made["numberOfTests"]
assert [test["items"] for test in tests] == [["PO-LOUDKEYS"]] * 3
for test in tests:
    assert ITEMS["PO-LOUDKEYS"](decoded(test["inputs"]), parameters_of({})) == test["expected"]

test_file = root / "conformance" / "own" / "reference" / "test_loudkeys.py"
runpy.run_path(str(test_file))["test_kept_sets_are_those_of_brute_force"]()
if len(sys.argv) > 2:
    from models_integration.cli.app import app
    app(["policies"])
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The four files, where the repository has those of a method."""
    page = (SPEC / "policies.md").read_text(encoding="utf-8")
    first_row = next(line for line in page.splitlines() if line.startswith("| streamingllm |"))
    written = {
        "spec/policies.md": page.replace(first_row, f"{ROW}\n{first_row}") + "\n" + ITEM,
        "reference/policies/loudkeys.py": SCORER,
        "conformance/methods/loudkeys.py": ORACLE,
        "conformance/own/reference/test_loudkeys.py": TEST,
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.law("as-it-is-described")
def test_its_name_promises_cases_and_vectors_are_found(tree: Path) -> None:
    served = find_spec("transformers") is not None
    command = [sys.executable, "-c", FOUND, str(tree), *["policies"] * served]
    told = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert ("\nloudkeys" in told.stdout) is served


def test_commands_write_its_exports_and_trace_it(tree: Path) -> None:
    policies = tree / "reference" / "policies"
    (policies / "__init__.py").write_text('"""The methods."""\n\n', encoding="utf-8")
    assert "from reference.policies.loudkeys import loudkeys\n" in exports(policies)
    trace = read_tree(tree)
    assert trace.functions["PO-LOUDKEYS"] == ["reference/policies/loudkeys.py:loudkeys_score"]
    assert [place.split(":")[0] for place in trace.tests["PO-LOUDKEYS"]] == [
        "conformance/methods/loudkeys.py", "conformance/own/reference/test_loudkeys.py",
    ]
    assert not trace.lacks("PO-LOUDKEYS", "accelerated/numba_cpu")
