"""The lints find forbidden imports, and items without code, test or vector. `nox` runs the lints on the tree."""

import pytest

pytest.importorskip("proselint", reason="finds the words")
pytest.importorskip("griffe", reason="reads docstrings")
pytest.importorskip("typer", reason="has the help of the commands")

import argparse
from collections.abc import Callable
from pathlib import Path

from griffe import Docstring

from lab import quick
from lab.layers import forbidden_imports, read_modules
from lab.style import docstrings_in, name_offences, of_markdown, of_options, offences, opener_offences
from lab.trace import accept, main, read_tree


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


BELOW = ": {} stands below {} and must not import it"
SESSION = "models_integration/session"
CIRCLE = "circle of modules: " + " -> ".join(f"models_integration.session.{name}" for name in "abca")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ({"spec/a.py": "import reference"}, "spec must not import reference"),
        ({"reference/a.py": "from accelerated.numba_cpu import x"}, "reference must not import accelerated"),
        ({"accelerated/numba_cpu/a.py": "def f():\n    import reference"}, "accelerated must not import reference"),
        ({"accelerated/numba_cpu/a.py": "import accelerated.triton_gpu"}, "numba_cpu must not import triton_gpu"),
        ({f"{SESSION}/a.py": "import conformance"}, "models_integration must not import conformance"),
        ({f"{SESSION}/a.py": "import experiments.a"}, "models_integration must not import experiments"),
        ({"experiments/studies/a.py": "import kvspec.cli"}, "experiments must not import kvspec"),
        ({"conformance/verify/a.py": "import tests.a"}, "conformance must not import tests"),
        ({"kvspec/cli/a.py": "import lab.a"}, "kvspec must not import lab"),
        ({"reference/a.py": "import torch"}, "reference needs NumPy and jaxtyping alone, not torch"),
        ({"spec/a.py": "from . import b"}, "an import names its module in full"),
        ({"conformance/suite/test_a.py": "import torch"}, "the suite must not import torch"),
        ({"conformance/plugin.py": "def f():\n    import torch"}, "the suite must not import torch"),
        ({"conformance/checks/a.py": "import accelerated.x"}, "the suite must not import accelerated"),
        ({"conformance/oracles/a.py": "import models_integration"}, "the suite must not import models_integration"),
        ({"conformance/notes.py": "import numpy"}, "notes is no room of conformance"),
        ({"models_integration/notes/a.py": "import numpy"}, "notes is no room of models_integration"),
        ({f"{SESSION}/a.py": "from models_integration import b"}, "inside, name the module"),
        ({"experiments/tasks/a.py": "import experiments.studies.b", "experiments/studies/b.py": ""},
         BELOW.format("experiments.tasks", "studies")),
        ({f"{SESSION}/a.py": "if TYPE_CHECKING:\n    from models_integration.policies.b import B",
          "models_integration/policies/b.py": ""}, BELOW.format("models_integration.session", "policies")),
        ({"conformance/vectors/a.py": "import conformance.checks.b", "conformance/checks/b.py": ""},
         BELOW.format("conformance.vectors", "checks")),
        ({"conformance/verify/a.py": "import conformance.cache_suite.b", "conformance/cache_suite/b.py": ""},
         BELOW.format("conformance.verify", "cache_suite")),
        ({f"{SESSION}/a.py": "if TYPE_CHECKING:\n    from models_integration.session.b import B",
          f"{SESSION}/b.py": "def f() -> None:\n    from models_integration.session.c import x",
          f"{SESSION}/c.py": "from models_integration.session import a"}, CIRCLE),
        ({"reference/one/a.py": "from reference.two.b import x", "reference/one/c.py": "", "reference/two/b.py": "",
          "reference/two/d.py": "import reference.one.c"},
         "circle of rooms: reference.one -> reference.two -> reference.one"),
        ({"models_integration/policies/a.py": f"import {SESSION.replace('/', '.')}.b", f"{SESSION}/b.py": ""}, ""),
    ],
)
def test_a_forbidden_import_is_named(tmp_path: Path, text: dict[str, str], problem: str) -> None:
    """Check files with a forbidden import or a circle of imports in the first file. The last case has neither."""
    for name in ("models_integration/__init__.py", *text):
        write(tmp_path, name, text.get(name, ""))
    actual = forbidden_imports(tmp_path)
    if not problem:
        assert actual == []
        return
    assert len(actual) == 1
    assert actual[0].endswith(problem)
    assert actual[0].startswith((f"{next(iter(text))}:", "circle"))


PAGE = """# A method

### AB-SUM

**MUST** be the sum.

**Rationale** None.

## Appendix
"""
FUNCTION = 'def total() -> None:\n    """The sum.\n\n    Implements: AB-SUM\n    """\n'
TEST = 'import pytest\n\n\n@pytest.mark.spec("AB-SUM")\ndef test_total() -> None: ...\n'
VECTOR = '{"testGroups": [{"tests": [{"tcId": "T1", "items": ["AB-SUM"]}]}]}'
MUTANTS = '[[mutant]]\nitem = "AB-SUM"\nname = "a"\n\n[[mutant]]\nitem = "AB-SUM"\nname = "b"\n'
ROWS = "lab/mutants/rows/a.toml"
FILES = {
    "spec/a.md": PAGE, "reference/a.py": FUNCTION, "conformance/test_a.py": TEST, "spec/vectors/a.json": VECTOR,
    ROWS: MUTANTS,
}

Edit = Callable[[Path], None]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a complete project with one item."""
    for name, text in FILES.items():
        write(tmp_path, name, text)
    accept(tmp_path, ["all"])
    return tmp_path


def replaced(name: str, old: str, new: str) -> Edit:
    def edit(root: Path) -> None:
        text = (root / name).read_text(encoding="utf-8")
        assert old in text
        (root / name).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def moved_to_accelerated(root: Path) -> None:
    (root / "accelerated").mkdir()
    (root / "reference/a.py").rename(root / "accelerated/a.py")


def with_a_backend(root: Path) -> None:
    (root / "accelerated/numba_cpu").mkdir(parents=True)
    (root / "spec/implementing.md").write_text("| sums | `add` | AB-SUM |\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "problems"),
    [
        (replaced("reference/a.py", "Implements", "See"), ["AB-SUM: no reference function"]),
        (moved_to_accelerated, ["AB-SUM: no reference function"]),
        (replaced("conformance/test_a.py", "mark.spec", "mark.other"), ["AB-SUM: no test"]),
        (
            replaced("reference/a.py", "AB-SUM", "AB-SUM, AB-PRODUCT"),
            ["AB-PRODUCT: unknown id, implemented by reference/a.py:total"],
        ),
        (
            replaced("conformance/test_a.py", "def", '@pytest.mark.spec("AB-X")\ndef'),
            ["AB-X: unknown id, tested by conformance/test_a.py:5"],
        ),
        (
            replaced("spec/a.md", "be the sum", "be a sum"),
            ["AB-SUM: text changed; read it again, then --accept AB-SUM"],
        ),
        (
            lambda root: (root / "spec/items.lock").unlink(),
            ["AB-SUM: not in spec/items.lock; read it, then --accept AB-SUM"],
        ),
        (replaced("spec/items.lock", "AB-SUM", "AB-OLD 0\nAB-SUM"), ["AB-OLD: locked, but no item"]),
        (replaced("spec/a.md", "## Appendix", PAGE), ["AB-SUM: defined twice"]),
        (with_a_backend, ["AB-SUM: no function in accelerated/numba_cpu"]),
        (lambda root: (root / "spec/vectors/a.json").unlink(), ["AB-SUM: no vector"]),
        (
            replaced("spec/vectors/a.json", '["AB-SUM"]', '["AB-SUM", "AB-Y"]'),
            ["AB-Y: unknown id, shown by spec/vectors/a.json:T1"],
        ),
        (replaced(ROWS, 'name = "b"', 'name = "b"\nbeyond = "16"'), ["AB-SUM: fewer than 2 mutants"]),
        (
            replaced(ROWS, MUTANTS, MUTANTS + '\n[[mutant]]\nitem = "AB-Z"\nname = "c"\n'),
            [f"AB-Z: unknown id, mutated by {ROWS}:c"],
        ),
    ],
)
def test_a_gap_is_named(tree: Path, edit: Edit, problems: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    edit(tree)
    assert read_tree(tree).problems() == problems
    assert main([], tree) == 1
    assert problems[0] in capsys.readouterr().out


def test_what_changed_decides_what_the_quick_session_runs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check changed tests, tests that import a changed module, and tests of an item that the module implements.

    Tests of a policy that an option names are excluded.
    """
    write(tree, "tests/test_b.py", "from reference.a import total")
    write(tree, "conformance/policy_suite/test_b.py", "from reference.a import total")
    write(tree, "tests/test_c.py", "import reference")
    monkeypatch.setattr(quick, "_tree", lambda: (read_modules(tree), read_tree(tree)))
    assert quick.judging({"reference/a.py"}) == ["conformance/test_a.py", "tests/test_b.py"]
    assert quick.judging({"tests/test_c.py", "README.md"}) == ["tests/test_c.py"]
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


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_with_its_line(rule: str) -> None:
    page = f"# Heading\n\nA good sentence\non two lines. {BROKEN[rule]}\n\n```\nwhere it stands\n```\n"
    assert [(one.rule, one.line) for one in offences(of_markdown(page, "page.md", 1))] == [(rule, 4)]
    for cell in (f"- item\n- {BROKEN[rule]}", f"| a | b |\n|---|---|\n| c | {BROKEN[rule]} |"):
        assert [one.rule for one in offences(of_markdown(cell, "page.md", 1))] == [rule]


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(
    ("text", "opener"),
    [
        ("Whether a key is the tenant's.", "Whether"), ("Of x, the tokens at these places.", "Of"),
        ("What a layer gets.", "What"), ("Its scores.", "Its"), ("Return x.", None), ("Number of rows.", None),
        ("The page.", None), ("Object of a tenant.", None), ("Item of the specification.", None),
    ],
)
def test_a_docstring_begins_with_a_verb_or_a_noun(text: str, opener: str | None) -> None:
    broken = list(opener_offences([("a.py", Docstring(text, lineno=3))]))
    assert [(one.line, one.message.split(":")[0]) for one in broken] == ([(3, repr(opener))] if opener else [])


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("own = 1", ["own"]), ("def found(room): ...", ["found", "room"]), ("class SaidSo: ...", ["SaidSo"]),
        ("self.told_rows: int = 1", ["told_rows"]), ("import a as _made", ["_made"]), ("NO_ROOM = 1", ["NO_ROOM"]),
        ("lambda own: own", ["own"]), ("down = known = room_y = given", ["room_y"]), ("f(own=found.made)", []),
        ("def test_a_key_is_found(): ...", []),
    ],
)
def test_a_private_word_in_a_name_is_refused(code: str, names: list[str]) -> None:
    assert [one.message.partition(":")[0] for one in name_offences("a.py", code)] == names
    assert list(name_offences("conformance/oracles/s1.py", "own = 1")) == []


@pytest.mark.law("as-it-is-described")
def test_help_of_options_is_read() -> None:
    parser = argparse.ArgumentParser(description="It says so.")
    parser.add_argument("--x", help="The number that it knows.")
    actual = list(offences(of_options(parser, test_help_of_options_is_read)))
    assert [one.rule for one in actual] == ["verbs", "verbs"]
    assert actual[0].source == "tests/lab/test_layers_and_trace.py"


@pytest.mark.law("as-it-is-described")
def test_the_check_of_style_reads_the_docstrings_of_a_package() -> None:
    assert sum(1 for _ in docstrings_in("lab")) > 300
