"""Tests of the guide for users of kvpress: each press has a row, each policy exists, stars are measurements."""

import ast
import re
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

import pytest

from conformance.paths import DOCS, ROOT
from reference.policies.describe import describe_policy
from reference.policies.names import LEFT_OUT, check_name
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

_ROW = re.compile(r"^\| (\w+(?:Press|Pipeline))(\*?) \| (.*) \|$", re.MULTILINE)
WITH, WITHOUT = (
    _ROW.findall(part)
    for part in (DOCS / "guide" / "kvpress.md").read_text(encoding="utf-8").split("## Presses without a policy")
)
TEXTS = sorted({
    text for _, _, cell in WITH for text in re.findall(r"`([^`]+)`", cell)
    if not text.startswith(("budget=", "calibration=", "kvspec.", "layers=", "positions="))
})


def test_each_public_name_of_kvpress_has_one_row() -> None:
    names = [name for name, _, _ in WITH + WITHOUT]
    assert len(names) == len(set(names)) == 47
    if find_spec("kvpress") is not None:  # the environment of `python -m lab.measure.peers`
        assert set(names) == set(import_module("kvpress").__all__)


@pytest.mark.parametrize("text", TEXTS)
def test_each_policy_of_a_press_exists(text: str) -> None:
    one = describe_policy(text)
    assert one.name == text
    assert one.decode_time == ("/every=64" in text or text == "tova")


@pytest.mark.parametrize(("press", "cell"), [
    (name, cell) for name, _, cell in WITH + WITHOUT if name.endswith("Press")
])
def test_the_name_of_a_press_is_a_policy_or_says_what_to_type(press: str, cell: str) -> None:
    """Check that the name and the error agree with the row of the page."""
    with suppress(SpecError):
        assert re.search(rf"`{re.escape(check_name(press))}[`:/]", cell)
        return
    texts = [f"type {text!r}" for text in TEXTS if f"`{text}`" in cell]
    reason = LEFT_OUT.get(press.removesuffix("Press").lower())
    words = "|".join(map(re.escape, texts)) or (re.escape(reason) if reason else r"kvpress\.md has the way")
    with pytest.raises(SpecError, match=words):
        check_name(press)


def test_stars_are_the_presses_of_the_comparison() -> None:
    tree = ast.parse((ROOT / "lab" / "measure" / "peers" / "presses.py").read_text(encoding="utf-8"))
    (measured,) = (
        [ast.literal_eval(key) for key in node.value.keys if key is not None] for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        and isinstance(node.target, ast.Name) and node.target.id == "PRESSES"
    )
    actual = {name.removesuffix("Press") for name, star, _ in WITH if star}
    assert actual == {re.split(r"[ +]", name)[0] for name in measured}
