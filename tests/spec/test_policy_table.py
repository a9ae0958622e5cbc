"""A test for each cell of the table: a yes is a property, a no has a counterexample. The page shows the same table."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks.promises import PROPERTIES
from conformance.paths import SPEC
from conformance.plugin import fewer_examples
from conformance.strategies.policy_inputs import KINDS, altered, drawn
from lab.policy_cases import CASES
from reference.policies.names import POLICIES
from spec.promises import promise_table

PAGE = SPEC / "policies.md"
TABLE = promise_table()
SEARCHED = sorted(range(100), key=lambda seed: seed not in (6, 15, 26))
"""Seeds of the search for counterexamples. The first three give almost all counterexamples."""
OTHER_NAMES = {
    "triattention-by-head": "triattention", "triattention-by-layer-and-head": "triattention",
    "blocks": "blocks(snapkv)", "blocks-of-h2o": "blocks(h2o)", "threshold": "score=snapkv:W=3:kernel=3/threshold=0.4",
    "diversity": "diverse(triattention)", "diversity-in-adakv": "diverse(adakv)",
}


def cells(answer: str) -> list[object]:
    """Return policy and property, with the mark of the policy's item."""
    return [
        pytest.param(name, promise, id=f"{name}-{promise.replace(' ', '-')}",
                     marks=pytest.mark.spec(CASES[name].item))
        for name, row in TABLE.items() for promise, cell in row.items() if cell.partition(":")[0] == answer
    ]


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("name", "promise"), cells("yes"))
@fewer_examples
@given(seed=st.integers(0, 2**32 - 2), B=st.integers(1, 30), keys=st.sampled_from(sorted(KINDS)))
def test_a_promise_holds(name: str, promise: str, seed: int, B: int, keys: str) -> None:
    assert PROPERTIES[promise].problem(CASES[name], altered(drawn(seed), keys, seed), B, seed) == ""


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("name", "promise"), cells("no"))
def test_what_is_not_promised_has_a_counterexample(name: str, promise: str) -> None:
    """Check keys or values of several kinds."""
    kinds = [*((keys, "normal") for keys in KINDS), ("normal", "equal"), ("normal", "few values")]
    assert any(
        PROPERTIES[promise].problem(CASES[name], altered(drawn(seed), keys, seed, values), B, seed)
        for seed in SEARCHED for keys, values in kinds for B in (1, 1 + seed % 20, 9, 11)
    )


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(CASES[name].item)) for name in TABLE])
def test_a_policy_bears_the_name_of_its_row(name: str) -> None:
    """Results of runs are stored under this name.

    A mode of a policy has no separate name, and a composition has the name of its host.
    """
    assert CASES[name].policy(drawn(1)).name == OTHER_NAMES.get(name, name)


def test_every_name_that_users_give_has_a_row_and_a_case() -> None:
    """Check all names except the full cache, and CrystalCache, which has separate pages."""
    assert set(TABLE) == set(CASES)
    assert set(POLICIES) - set(TABLE) == {"crystalcache", "fullcache"}
    assert set(TABLE) - set(POLICIES) == {
        "epicache", "blocks", "blocks-of-h2o", "diversity", "diversity-in-adakv", "threshold",
    }


def test_the_page_has_the_columns_that_are_tested_and_says_what_they_mean() -> None:
    assert all(list(row) == list(PROPERTIES) for row in TABLE.values())
    says = "\n".join(f"- **{name}**: {promise.says}." for name, promise in PROPERTIES.items())
    assert says in PAGE.read_text(encoding="utf-8")


def test_every_cell_has_a_known_answer_and_every_reason_a_use() -> None:
    actual = [cell.partition(": ") for row in TABLE.values() for cell in row.values()]
    assert {answer for answer, _, _ in actual} == {"yes", "no", "N/A"}
    explained = re.findall(r"^- \*(\w+)\*: ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {reason for answer, _, reason in actual if answer != "yes"} == set(explained)
    assert all(not reason for answer, _, reason in actual if answer == "yes")
