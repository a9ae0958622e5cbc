"""What users bring by name: found, told apart by version, and refused with the way out."""

import sys
from pathlib import Path

import pytest

from reference.policies.names import ENTRY_POINTS, check_name, constants_of, constants_of_model, make_policy, own_policy
from spec.errors import SpecError

pytestmark = [pytest.mark.spec("PO-RETAIN"), pytest.mark.usefixtures("reference_items")]

MODULE = """
from reference.policies import knorm, snapkv
MINE = knorm()
NUMBER = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's module; and another folder, in which a distribution is installed."""
    installed = tmp_path / "site" / "third_party-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntheirs = users_own:MINE\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "users_own.py").write_text(MODULE, encoding="utf-8")
    for name in ("users_own", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return work


@pytest.mark.parametrize("name", ["users_own:MINE", "theirs"])
def test_a_policy_is_found_by_attribute_and_by_entry_point(name: str, here: Path) -> None:
    folders = list(sys.path)
    policy = make_policy(check_name(name), {})
    assert policy is sys.modules["users_own"].MINE
    assert (policy.name, constants_of(name), constants_of_model(name)) == ("knorm", frozenset(), frozenset())
    assert sys.path == folders


def test_a_digest_is_of_the_code_that_runs(here: Path) -> None:
    """A file that changes while its code runs does not give the results of that code another name."""
    first = own_policy("users_own:MINE").digest
    (here / "users_own.py").write_text(MODULE + "\n# later, and longer\n", encoding="utf-8")
    assert own_policy("users_own:MINE").digest == own_policy("theirs").digest == first
    del sys.modules["users_own"]
    assert own_policy("users_own:MINE").digest != first


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("their", "did you mean theirs"), ("users_own:YOURS", "no attribute 'YOURS'"),
        ("nowhere:MINE", "No module named 'nowhere'"), ("users_own:NUMBER", "must be a Policy"),
        ("users_own:knorm", "policy_from_score"), ("wrong:MINE", "SyntaxError"), (":MINE", "cannot be loaded"),
    ],
)
def test_what_is_no_policy_is_one_line(name: str, words: str, here: Path) -> None:
    (here / "wrong.py").write_text("MINE = (", encoding="utf-8")
    with pytest.raises(SpecError, match=words) as caught:
        check_name(name, "policy")
    assert (caught.value.argument, caught.value.value) == ("policy", name)
    assert "\n" not in str(caught.value)
