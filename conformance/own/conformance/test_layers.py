"""The layer lint sees what it forbids, and the checkout is clean."""

from pathlib import Path

import pytest

from conformance.assurance.layers import forbidden_imports
from conformance.paths import ROOT


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("spec/a.py", "import reference", "spec must not import reference"),
        ("reference/a.py", "from accelerated.numba_cpu import x", "reference must not import accelerated"),
        ("accelerated/numba_cpu/a.py", "def f():\n    import reference", "accelerated must not import reference"),
        ("accelerated/numba_cpu/a.py", "import accelerated.triton_gpu", "numba_cpu must not import triton_gpu"),
        ("models_integration/cli/a.py", "import conformance", "models_integration must not import conformance"),
        ("reference/a.py", "import torch", "reference needs NumPy and jaxtyping alone, not torch"),
        ("spec/a.py", "from . import b", "an import names its module in full"),
        ("conformance/suite/test_a.py", "import torch", "the suite must not import torch"),
        ("conformance/plugin.py", "def f():\n    import torch", "the suite must not import torch"),
        ("conformance/checks/a.py", "import accelerated.x", "the suite must not import accelerated"),
        ("conformance/oracles/a.py", "import models_integration", "the suite must not import models_integration"),
        ("conformance/notes.py", "import numpy", "notes is no room of conformance"),
        ("models_integration/notes/a.py", "import numpy", "notes is no room of models_integration"),
        ("models_integration/cli/a.py", "from models_integration import b", "inside, name the module"),
    ],
)
def test_a_forbidden_import_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    write(tmp_path, "models_integration/__init__.py", "")
    write(tmp_path, name, text)
    (problem,) = forbidden_imports(tmp_path)
    assert problem.startswith(f"{name}:")
    assert problem.endswith(reason)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reference/a.py", "import numpy\nfrom spec.budget import Budget\nimport math"),
        ("accelerated/triton_gpu/a.py", "import accelerated.numba_cpu, torch"),
        ("spec/tables.py", "import pandera"),
        ("conformance/suite/test_a.py", "import pytest, hypothesis, numpy, jaxtyping, reference.a, spec.b, json"),
        ("conformance/own/test_a.py", "import torch, accelerated.a, models_integration.b"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert forbidden_imports(tmp_path) == []


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("models_integration.tasks", "models_integration.model"),
        ("models_integration.cache", "models_integration.cli"),
        ("models_integration.session", "models_integration.policies"),
        ("conformance.oracles", "conformance.suite"),
        ("conformance.vectors", "conformance.checks"),
        ("conformance.suite", "conformance.own"),
        ("conformance.plugin", "conformance.assurance"),
        ("conformance.assurance", "conformance.measure"),
        ("conformance.measure", "conformance.own"),
    ],
)
@pytest.mark.parametrize("form", ["import {}.b", "from {} import b", "if TYPE_CHECKING:\n    from {}.b import B"])
def test_a_room_imports_only_what_stands_below_it(tmp_path: Path, low: str, high: str, form: str) -> None:
    for module, other in ((low, high), (high, low)):
        write(tmp_path, f"{module.replace('.', '/')}/a.py", form.format(other))
        write(tmp_path, f"{module.replace('.', '/')}/b.py", "")
    (problem,) = forbidden_imports(tmp_path)
    room = high.partition(".")[2]
    assert problem.startswith(f"{low.replace('.', '/')}/a.py:")
    assert problem.endswith(f": {low} stands below {room} and must not import it")


@pytest.mark.parametrize("form", ["from {} import {}", "import {}.{}", "def f() -> None:\n    from {}.{} import x"])
def test_a_circle_of_modules_is_named(tmp_path: Path, form: str) -> None:
    """One room, and names that stand for annotations alone count."""
    home = "models_integration.session"
    write(tmp_path, "models_integration/session/a.py", f"if TYPE_CHECKING:\n    from {home}.b import B")
    write(tmp_path, "models_integration/session/b.py", form.format(home, "c"))
    write(tmp_path, "models_integration/session/c.py", form.format(home, "a"))
    assert forbidden_imports(tmp_path) == [f"circle of modules: {home}.a -> {home}.b -> {home}.c -> {home}.a"]


def test_a_circle_of_rooms_is_named_where_no_order_is_stated(tmp_path: Path) -> None:
    write(tmp_path, "reference/one/a.py", "from reference.two.b import x")
    write(tmp_path, "reference/one/c.py", "")
    write(tmp_path, "reference/two/b.py", "")
    write(tmp_path, "reference/two/d.py", "import reference.one.c")
    assert forbidden_imports(tmp_path) == ["circle of rooms: reference.one -> reference.two -> reference.one"]


def test_the_door_of_a_package_may_name_what_it_opens(tmp_path: Path) -> None:
    write(tmp_path, "models_integration/__init__.py", "if TYPE_CHECKING:\n    from models_integration.cli.a import A")
    write(tmp_path, "models_integration/cli/a.py", "import models_integration.tasks.b")
    write(tmp_path, "models_integration/tasks/b.py", "")
    assert forbidden_imports(tmp_path) == []


def test_this_checkout_is_clean() -> None:
    assert forbidden_imports(ROOT) == []
