"""`kvspec` starts without what only its models need, and names the extra that brings what a command misses."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.paths import ROOT
from models_integration.cli import BROUGHT_BY
from models_integration.cli.verify import run
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

START = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.argv = {command!r}
from models_integration.cli import main
main()
"""
OURS = {"spec", "reference", "accelerated", "conformance", "models_integration"}
MODELS = ["torch", "transformers", "safetensors", "tokenizers", "pandas", "numba"]


def started(command: str, missing: list[str]) -> subprocess.CompletedProcess[str]:
    """A process in which these packages are not there."""
    code = START.format(missing=missing, command=["kvspec", *command.split()])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_first_session_says_what_it_does_before_it_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Making the environment takes minutes, and pip is quiet."""
    noxfile = importlib.import_module("noxfile")
    said: list[str] = []

    class Session:
        def log(self, text: str) -> None:
            said.append(text)

    monkeypatch.setattr(noxfile, "SHARED", tmp_path)
    monkeypatch.setattr(noxfile, "new_environment", lambda *given: said.append("made"))
    noxfile.shared_python(Session())
    assert len(said) == 2
    assert f"making the environment of all sessions in {tmp_path}" in said[0]


def test_help_needs_no_model() -> None:
    found = started("--help", MODELS)
    assert found.returncode == 0, found.stderr
    assert "verify" in found.stdout


@pytest.mark.law("figures-are-counted-right")
def test_a_backend_is_judged_without_a_model(tmp_path: Path) -> None:
    """Its process is told to collect nothing, and says how many tests there were."""
    command = f"verify --backend numpy --out {tmp_path} -- -q --collect-only -k test_equal_keys_score_zero"
    found = started(command, MODELS)
    assert found.returncode == 0, found.stderr
    assert "1/" in found.stdout


@pytest.mark.law("one-line-with-the-way-out")
def test_a_package_that_hides_ours_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec").mkdir()
    monkeypatch.setattr("models_integration.cli.verify.judge", lambda command: 0)
    assert run(["--help"]) == 0  # a folder of texts hides nothing
    Path("spec/__init__.py").touch()
    with pytest.raises(SpecError, match=f"{tmp_path}/spec/__init__.py.*hides kvspec's own package 'spec'"):
        run(["--help"])


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("demo", "torch", "models"), ("compress a.txt", "transformers", "models"), ("--help", "typer", "conformance"),
        ("models fetch smollm2", "gguf", "weights"), ("verify --backend numpy", "pytest", "conformance"),
        ("verify --backend numpy", "hypothesis", "conformance"),
        ("archive put {file} --archive {folder}/a --master-key {file}", "cryptography", "archive"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(command: str, missing: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(32)))
    (tmp_path / "file").chmod(0o600)
    found = started(command.format(file=tmp_path / "file", folder=tmp_path), [missing])
    assert found.returncode == 2
    assert found.stderr.endswith(f"kvspec: {missing} is missing; pip install 'kvspec[{extra}]'\n")


@pytest.mark.law("one-line-with-the-way-out")
def test_every_package_that_a_command_imports_has_an_extra() -> None:
    """What is not ours, not Python's and not installed with kvspec itself."""
    paths = [path for room in ("models_integration", "spec") for path in (ROOT / room).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    others = {name.partition(".")[0] for name in named} - sys.stdlib_module_names - OURS - {"numpy", "jaxtyping"}
    assert {"torch", "transformers", "pandas", "gguf"} <= others
    assert others <= set(BROUGHT_BY), others - set(BROUGHT_BY)
