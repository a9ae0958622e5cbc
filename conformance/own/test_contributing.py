"""Every example of CONTRIBUTING.md runs, and what it asserts holds."""

import re

import pytest

from conformance.paths import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
SECTIONS = ("A policy", "A backend", "A spec item", "A model family", "A codec")

_EXAMPLE = re.compile(r"^## (.+?)$.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """The Python of each section."""
    return dict(_EXAMPLE.findall(PAGE.read_text(encoding="utf-8")))


def test_every_kind_of_contribution_has_an_example_that_asserts_something() -> None:
    found = examples()
    assert tuple(found) == SECTIONS
    assert PAGE.read_text(encoding="utf-8").count("```python") == len(SECTIONS)
    assert all(re.search(r"^ *assert ", code, re.MULTILINE) for code in found.values())


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_holds(section: str) -> None:
    code = examples()[section]
    for package in ("torch", "transformers"):
        if f"import {package}" in code or f"from {package}" in code:
            pytest.importorskip(package)
    exec(compile(code, f"CONTRIBUTING.md, {section}", "exec"), {"__name__": "contributing"})
