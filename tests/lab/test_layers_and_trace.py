"""The lints report planted errors. `nox` runs the lints on the tree too, but there a lint that finds nothing passes."""

import argparse
from pathlib import Path

import pytest

pytest.importorskip("proselint", reason="finds the words")
pytest.importorskip("griffe", reason="reads docstrings")
pytest.importorskip("typer", reason="has the help of the commands")

from griffe import Docstring

from lab import quick, style
from lab.layers import PACKAGES, forbidden_imports
from lab.style import docstrings_in, name_offences, of_markdown, of_options, offences, opener_offences
from lab.trace import accept, main, read_tree

SESSION = "models_integration/session"
FORBIDDEN = {
    "spec/a.py": ("import reference", "spec must not import reference"),
    "spec/b.py": ("from . import a", "an import names its module in full"),
    "reference/a.py": ("def f():\n    import torch", "reference needs NumPy and jaxtyping alone, not torch"),
    "accelerated/numba_cpu/a.py": ("import accelerated.triton_gpu", "numba_cpu must not import triton_gpu"),
    "conformance/plugin.py": ("import torch", "the suite must not import torch"),
    "conformance/notes.py": ("import numpy", "notes is no room of conformance"),
    f"{SESSION}/a.py": (
        "from models_integration import b", "models_integration is the users' door: inside, name the module",
    ),
    f"{SESSION}/b.py": (
        "if TYPE_CHECKING:\n    import models_integration.policies.a",
        "models_integration.session stands below policies and must not import it",
    ),
}
ALLOWED = {
    "models_integration/__init__.py": "", "models_integration/policies/a.py": "import models_integration.session.a",
    "reference/one/a.py": "from reference.two.b import x", "reference/one/c.py": "", "reference/two/b.py": "",
    "reference/two/d.py": "import reference.one.c", "tests/a.py": "def f():\n    from tests.b import x",
    "tests/b.py": "import tests.a",
}
CIRCLES = [
    "circle of modules: tests.a -> tests.b -> tests.a",
    "circle of rooms: reference.one -> reference.two -> reference.one",
]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_each_forbidden_import_and_circle_is_reported(tmp_path: Path) -> None:
    for name, text in {**ALLOWED, **{name: text for name, (text, _) in FORBIDDEN.items()}}.items():
        write(tmp_path, name, text)
    *imports, modules, packages = forbidden_imports(tmp_path)
    assert {line.split(":")[0]: line.split(": ", 1)[1] for line in imports} == {
        name: problem for name, (_, problem) in FORBIDDEN.items()
    }
    assert [modules, packages] == CIRCLES


FILES = {
    "spec/a.md": "# A\n\n### AB-SUM\n\n**MUST** be the sum.\n\n### AB-LONE\n\n**MUST** be alone.\n",
    "reference/a.py": 'def total() -> None:\n    """The sum.\n\n    Implements: AB-SUM, AB-NONE\n    """\n',
    "conformance/test_a.py": 'import pytest\n\n\n@pytest.mark.spec("AB-SUM", "AB-X")\ndef test_total() -> None: ...\n',
    "spec/vectors/a.json": '{"testGroups": [{"tests": [{"tcId": "T1", "items": ["AB-SUM", "AB-Y"]}]}]}',
    "lab/mutants/rows/a.toml": "".join(
        f'[[mutant]]\nitem = "AB-{item}"\nname = "{at}"\n\n' for at, item in enumerate(("SUM", "SUM", "Z"))
    ),
    "spec/implementing.md": "| sums | `add` | AB-SUM |\n", "accelerated/numba_cpu/a.py": "",
}
GAPS = {
    "AB-LONE: no reference function", "AB-LONE: no test", "AB-LONE: no vector", "AB-LONE: fewer than 2 mutants",
    "AB-SUM: no function in accelerated/numba_cpu", "AB-NONE: unknown id, implemented by reference/a.py:total",
    "AB-X: unknown id, tested by conformance/test_a.py:4", "AB-Y: unknown id, shown by spec/vectors/a.json:T1",
    "AB-Z: unknown id, mutated by lab/mutants/rows/a.toml:2",
}


def test_each_gap_of_an_item_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    accept(tmp_path, ["all"])
    assert set(read_tree(tmp_path).problems()) == GAPS
    lock = (tmp_path / "spec/items.lock").read_text(encoding="ascii").replace("AB-LONE", "AB-OLD")
    write(tmp_path, "spec/items.lock", lock)
    write(tmp_path, "spec/a.md", FILES["spec/a.md"].replace("be the sum", "be a sum") + "### AB-SUM\n\nAgain.\n")
    assert main([], tmp_path) == 1
    printed = capsys.readouterr().out
    for problem in (
        "AB-SUM: text changed; read it again, then --accept AB-SUM", "AB-OLD: locked, but no item",
        "AB-LONE: not in spec/items.lock; read it, then --accept AB-LONE", "AB-SUM: defined twice",
    ):
        assert problem in printed


def test_the_quick_session_runs_the_tests_of_a_changed_item() -> None:
    chosen = quick.judging({"reference/policies/budgets.py"})
    assert "tests/reference/test_selection.py" in chosen
    assert not [path for path in chosen if path.startswith(quick.NEED_A_SUBJECT)]
    with pytest.raises(SystemExit, match="nonsense"):
        quick.changed_files("nonsense")


BROKEN = {
    "length": "Each of the tokens that the policy keeps has a position, a key and a value for every layer and every"
              " head in all of the rows of a batch.",
    "parts": "It has two: keys; values.",
    "headless": "What evicts is named here.",
    "where": "Use it where memory is short.",
    "verbs": "The question stands at the end.",
    "private": "A saboteur fails.",
    "names": "The set comes from models_integration.sentence_ends(tokenizer).",
    "policy": "Choose your own method.",
}


def test_each_broken_rule_of_style_is_reported() -> None:
    for form in ("Good.\nGood. {}", "- item\n- {}", "| a | b |\n|---|---|\n| c | {} |"):
        page = "\n\n".join(form.format(text) for text in BROKEN.values()) + "\n\n```\nwhere it stands\n```\n"
        reported = [(one.rule, one.line) for one in offences(of_markdown(page, "page.md", 1))]
        assert [rule for rule, _ in reported] == list(BROKEN)
        assert [line for _, line in reported][:2] == [len(form.splitlines()) * (at + 1) + at for at in range(2)]
    parser = argparse.ArgumentParser(description="It says so.")
    parser.add_argument("--x", help="The number that it knows.")
    helped = list(offences(of_options(parser, test_each_broken_rule_of_style_is_reported)))
    assert [one.rule for one in helped] == ["verbs", "verbs"]
    texts = ["Whether a key is the tenant's.", "Of x, the tokens.", "What a layer gets.", "Its scores.", "Return x.",
             "Number of rows.", "Object of a tenant.", "Item of the specification."]
    openers = opener_offences([("a.py", Docstring(text, lineno=at)) for at, text in enumerate(texts, 1)])
    assert [(one.line, one.message.split(":")[0]) for one in openers] == [
        (1, "'Whether'"), (2, "'Of'"), (3, "'What'"), (4, "'Its'"),
    ]
    code = "def found(room, down): ...\nclass SaidSo: ...\nself.told_rows: int = 1\nimport a as _made\nf(own=known.x)"
    names = [one.message.partition(":")[0] for one in name_offences("a.py", code)]
    assert sorted(names) == ["SaidSo", "_made", "found", "room", "told_rows"]
    assert sum(1 for _ in docstrings_in("lab")) > 300


def test_the_style_of_every_package_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a private word as a name, and in a docstring that is not exported, to a file of each package."""
    monkeypatch.setattr(style, "ROOT", tmp_path)
    for package in PACKAGES:
        (tmp_path / package / "part").mkdir(parents=True)
        (tmp_path / package / "part" / "a.py").write_text('def _f(told):\n    """Return x. It says so."""\n')
    reported = style.offences_in(style.NAMES)
    assert sorted(one.source for one in reported) == sorted(f"{package}/part/a.py" for package in PACKAGES)
    for package in PACKAGES:
        assert [one.rule for one in style.offences_in(f"docstrings of {package}")] == ["verbs"]
