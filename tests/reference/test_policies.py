"""Each policy compared with brute force: kept sets, and attention of the last queries."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conformance.methods import policies as oracle
from conformance.methods.brute import plain
from conformance.paths import ROOT, SPEC
from conformance.plugin import fewer_examples
from conformance.strategies.policy_inputs import decided, drawn, with_sinks
from conformance.tolerances import scores_agree
from lab.implementer_tables import exports
from lab.policy_cases import CASES
from lab.trace import read_tree
from reference.policies import attention
from reference.policies.caote import caote_error
from reference.policies.expected_attention import expected_logits
from reference.policies.rkv import rkv_redundancy

pytestmark = pytest.mark.usefixtures("reference_items")

SLOW = ("DV-", "PO-KVZIP", "TA-")
CLOSE = ("DV-", "NK-ABLATIONS", "TA-")
"""Items for which two tokens are equally far from their mean, so that rounding decides whether their scores tie."""


def compare_kept_sets(name: str, seed: int, B: int) -> None:
    case = CASES[name]
    inputs = with_sinks(drawn(seed, n=3 + seed % 20 if case.item.startswith(CLOSE) else None), seed)
    assume(inputs.n >= case.least)
    assert decided(case.policy(inputs), inputs, B) == case.expected(inputs, max(B, case.floor))


by_name = {slow: pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.spec(case.item)) for name, case in CASES.items()
    if case.item.startswith(SLOW) is slow
]) for slow in (False, True)}


@by_name[False]
@given(seed=st.integers(0, 2**32 - 1), B=st.integers(1, 30))
def test_kept_sets_are_those_of_brute_force(name: str, seed: int, B: int) -> None:
    compare_kept_sets(name, seed, B)


@by_name[True]
@fewer_examples
@given(seed=st.integers(0, 2**32 - 1), B=st.integers(1, 30))
def test_kept_sets_of_slow_policies_are_those_of_brute_force(name: str, seed: int, B: int) -> None:
    compare_kept_sets(name, seed, B)


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@given(seed=st.integers(0, 2**32 - 1), window=st.integers(1, 30))
def test_observed_attention_is_the_last_rows_of_the_softmax(seed: int, window: int) -> None:
    """The window's keys must count, and attention inside the window must be causal.

    All rows together must give the accumulated sum.
    """
    inputs = drawn(seed)
    view = inputs.layers[0]
    brute = oracle.last_rows(plain(view), window)
    A = attention.observed_attention(view, window)
    assert A.shape == (len(view.q), min(window, inputs.n), inputs.n)
    assert all(scores_agree(a, b) for head, rows in zip(A, brute, strict=True) for a, b in zip(head, rows, strict=True))
    total = attention.accumulated_attention(view)
    whole = oracle.last_rows(plain(view), inputs.n)
    for row, head in zip(total, whole, strict=True):
        assert scores_agree(row, [float(sum(column)) for column in zip(*head, strict=True)])


@pytest.mark.spec("PO-CAOTE")
def test_the_error_of_caote_is_the_change_of_the_output() -> None:
    """Two keys of weight 1/2 have equal errors. A key with all the weight cannot be evicted."""
    v = np.array([[[0.0, 0.0], [3.0, 4.0]]])
    assert caote_error(np.array([[0.5, 0.5]]), v).tolist() == [[2.5, 2.5]]
    assert caote_error(np.array([[1.0, 0.0]]), v).tolist() == [[np.inf, 0.0]]


@pytest.mark.spec("PO-RKV")
def test_redundancy_spares_the_last_similar_key() -> None:
    """Check three equal keys: rows 0 and 1 exempt column 2, and row 2 exempts column 1. Column 0 is most redundant.

    Orthogonal keys have only zeros, so all are equal.
    """
    equal = rkv_redundancy(np.array([[1.0, 0.0]] * 3))[0]
    assert equal[0] > equal[1] > equal[2]
    assert rkv_redundancy(np.eye(4))[0].tolist() == [0.25] * 4


@pytest.mark.spec("PO-RKV")
def test_similar_is_a_question_of_float32() -> None:
    """A cosine of 1/2 + 1e-9 is 1/2 in float32.

    Therefore only column 0 is exempt, and column 1 keeps its redundancy.
    """
    c = 0.5 + 1e-9
    barely = rkv_redundancy(1e4 * np.array([[1.0, 0.0], [c, np.sqrt(1 - c * c)]]))[0]
    assert barely[1] > barely[0]


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
def test_expected_logits_are_the_moment_generating_function() -> None:
    """Compare E exp(q.k) of a Gaussian with quadrature on one channel."""
    mean, variance, k = 0.3, 0.5, 0.8
    nodes, weights = np.polynomial.hermite.hermgauss(40)
    q = mean + np.sqrt(2 * variance) * nodes
    expected = float((weights * np.exp(q * k)).sum() / np.sqrt(np.pi))
    z = expected_logits(
        np.array([[mean]]), np.array([[[variance]]]), np.array([[[k]]]), 1.0
    )
    assert scores_agree([float(np.exp(z[0, 0]))], [expected])


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
from lab.policy_cases import CASES
from conformance.strategies.policy_inputs import decided, drawn
@pytest.mark.spec("PO-LOUDKEYS")
def test_kept_sets_are_those_of_brute_force():
    for seed in range(20):
        case, inputs = CASES["loudkeys"], drawn(seed)
        assert decided(case.policy(inputs), inputs, 1 + seed) == case.expected(inputs, 1 + seed)
'''
DISCOVERY = '''
import runpy, sys
import conformance.methods, reference.policies, spec.promises
from pathlib import Path
root = Path(sys.argv[1])
for package in (reference.policies, conformance.methods):
    package.__path__.append(str(root.joinpath(*package.__name__.split("."))))
spec.promises.PAGE = root / "spec" / "policies.md"

from lab.item_vectors import ITEMS
from lab.vector_writer import __main__ as store
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

from tests.spec import test_policy_table as table
for promise in ("budget exact", "higher score never loses", "head permutation"):
    case = table.CASES["loudkeys"]
    assert not any(PROPERTIES[promise].problem(case, drawn(seed), 1 + seed, seed) for seed in range(20))
table.test_every_name_that_users_give_has_a_row_and_a_case()

complete = store.completed  # of what is published another test shows that the oracles give it
store.completed = lambda group, test: complete(group, test) if store.is_draft(test) else test
made, stored = store.built("policies"), files.stored("policies")
assert list(store.differences(stored, made)) == []
assert made["testGroups"][:-1] == stored["testGroups"]
tests = made["testGroups"][-1]["tests"]
assert len({test["tcId"] for group in made["testGroups"] for test in group["tests"]}) == made["numberOfTests"]
assert [test["items"] for test in tests] == [["PO-LOUDKEYS"]] * 3
for test in tests:
    assert ITEMS["PO-LOUDKEYS"](decoded(test["inputs"]), parameters_of({})) == test["expected"]

test_file = root / "tests" / "reference" / "test_loudkeys.py"
runpy.run_path(str(test_file))["test_kept_sets_are_those_of_brute_force"]()
if len(sys.argv) > 2:
    from kvspec.cli.app import app
    app(["policies"])
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write the four files of a method into the folders of the repository."""
    page = (SPEC / "policies.md").read_text(encoding="utf-8")
    first_row = next(line for line in page.splitlines() if line.startswith("| streamingllm |"))
    written = {
        "spec/policies.md": page.replace(first_row, f"{ROW}\n{first_row}") + "\n" + ITEM,
        "reference/policies/loudkeys.py": SCORER,
        "conformance/methods/loudkeys.py": ORACLE,
        "tests/reference/test_loudkeys.py": TEST,
    }
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.spec("PO-RETAIN")
@pytest.mark.law("as-it-is-described")
def test_its_name_promises_cases_and_vectors_are_found(tree: Path) -> None:
    served = find_spec("transformers") is not None
    command = [sys.executable, "-c", DISCOVERY, str(tree), *["policies"] * served]
    completed = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert ("\nloudkeys" in completed.stdout) is served


@pytest.mark.spec("PO-RETAIN")
def test_commands_write_its_exports_and_trace_it(tree: Path) -> None:
    policies = tree / "reference" / "policies"
    (policies / "__init__.py").write_text('"""The methods."""\n\n', encoding="utf-8")
    assert "from reference.policies.loudkeys import loudkeys\n" in exports(policies)
    trace = read_tree(tree)
    assert trace.functions["PO-LOUDKEYS"] == ["reference/policies/loudkeys.py:loudkeys_score"]
    assert [place.split(":")[0] for place in trace.tests["PO-LOUDKEYS"]] == [
        "conformance/methods/loudkeys.py", "tests/reference/test_loudkeys.py",
    ]
    assert not trace.lacks("PO-LOUDKEYS", "accelerated/numba_cpu")
