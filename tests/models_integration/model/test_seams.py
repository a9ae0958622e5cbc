"""Private names of transformers exist in the installed release, and only one module uses them."""

import ast
import inspect
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packaging.specifiers import SpecifierSet  # noqa: E402
from transformers import GenerationMixin, LlamaConfig, PretrainedConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward  # noqa: E402

from conformance.paths import ROOT  # noqa: E402
from models_integration.model import seams  # noqa: E402

pytestmark = pytest.mark.law("as-it-is-described")

PACKAGE = ROOT / "models_integration"
HOME = PACKAGE / "model" / "seams.py"
VLLM_HOME = PACKAGE / "engines" / "vllm" / "seams.py"
VLLM_NAMES = {"_compute_inv_freq", "_ensure_registered", "_preempt_request"}
"""Private names of vLLM. Only the module of vLLM's private names uses them, and it uses none of transformers."""
OTHERS = {
    *vars(torch.nn.Module()), "_DropoutNd", "_fused_sdp_choice", "_global_forward_hooks", "_global_forward_pre_hooks",
    "_orig_mod", "_version",  # torch
    "_asdict", "_current_frames", "_getframe", "_replace",  # Python
    "_loglikelihood_tokens", "_model_generate",  # lm_eval
}
"""Underscored names that belong to other libraries."""


def private(name: str | None) -> bool:
    """Return whether a name has exactly one leading underscore."""
    return name is not None and name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines: functions, fields, and attributes of `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            yield node.attr


def foreign_uses(sources: dict[Path, ast.Module]) -> list[str]:
    """Return uses of underscored names that neither kvspec nor a listed library defines. Names in strings count too."""
    defined = set(chain.from_iterable(map(defined_names, sources.values())))
    actual, named = [], {seams.ATTENTION, seams.EXPERTS, "eager_attention_forward"}
    for path, tree in sources.items():
        known = defined | OTHERS | (VLLM_NAMES if path == VLLM_HOME else set())
        for node in ast.walk(tree):
            used = node.attr if isinstance(node, ast.Attribute) else None
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
            if path != HOME and ((private(used) and used not in known) or text in named):
                actual.append(f"{path.name}: {used or text}")
    return actual


def test_no_other_module_uses_a_private_name_of_transformers() -> None:
    sources = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert foreign_uses(sources) == []
    assert foreign_uses({**sources, Path("new.py"): ast.parse("config._attn_implementation")}) == [
        "new.py: _attn_implementation"
    ]


def test_vllm_is_imported_by_one_module() -> None:
    """vLLM itself calls `plugin.register`, in processes in which nothing else of vLLM may be imported yet."""
    at = {path.name: set(imports_of(path)) for path in VLLM_HOME.parent.glob("*.py") if path != VLLM_HOME}
    assert {name: modules for name, modules in at.items() if modules} == {"plugin.py": {"vllm.engine.arg_utils"}}
    assert "vllm" in imports_of(VLLM_HOME)


def imports_of(path: Path) -> list[str]:
    """Return the modules of vLLM that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return [name for name in names if name.split(".")[0] == "vllm"]


def test_the_installed_release_has_every_name() -> None:
    code = inspect.unwrap(GenerationMixin.generate).__code__
    assert set(seams.LOCALS) <= set(code.co_varnames)
    assert isinstance(inspect.getattr_static(PretrainedConfig, seams.ATTENTION), property)
    assert isinstance(inspect.getattr_static(PretrainedConfig, seams.EXPERTS), property)
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
    seams.replace_attention(config, "eager")
    assert seams.attention_of(config) == "eager"
    seams.choose_attention(config, "sdpa")
    assert seams.attention_of(config) == "sdpa"
    assert seams.eager_attention(LlamaAttention(config, 0)) is eager_attention_forward
    assert seams.eager_attention(torch.nn.Linear(1, 1)) is None


def test_the_range_of_versions_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (stated,) = [need for need in project["optional-dependencies"]["models"] if need.startswith("transformers")]
    assert SpecifierSet(stated.removeprefix("transformers")) == SpecifierSet(seams.VERSIONS)
    assert SpecifierSet(seams.VERSIONS).contains(transformers.__version__)
