"""A name that is not known: the few that there are, or of many those that look like it."""

import pytest

from reference.policies.names import NAMES, check_name
from spec.errors import SpecError
from spec.validate import check_choices


@pytest.mark.parametrize(
    ("name", "near"), [("snapkw", "snapkv"), ("SnapKV", "snapkv"), ("crystal", "crystalcache"), ("ada-kv", "adakv")],
)
def test_an_unknown_policy_is_answered_with_its_nearest(name: str, near: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_name(name)
    assert f"did you mean {near}" in caught.value.bound
    assert len(str(caught.value)) < 160


def test_a_name_that_looks_like_none_has_no_suggestion() -> None:
    with pytest.raises(SpecError, match=rf"'zzzz': is none of the {len(NAMES)} known names \(your own"):
        check_name("zzzz")


def test_of_a_few_names_all_are_listed() -> None:
    with pytest.raises(SpecError, match=r"task = 'x': must be one of needle, delayed$"):
        check_choices("task", ("x",), ("needle", "delayed"))
