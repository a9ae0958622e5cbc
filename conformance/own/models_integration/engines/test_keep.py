"""Deciding from the first layer's tensors alone keeps what a session of the whole model keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from conformance.own.models_integration.session.families import ENDS, FAMILIES, SLIDING, build, prompt
from models_integration import CrystalCache, FullCache, Published, RetentionPolicy, StreamingLLM
from models_integration.cli.app import app
from models_integration.engines.keep import keep
from models_integration.pocket import ASSETS, load_pocket
from models_integration.policies.tokenizer_values import sentence_ends
from spec.errors import SpecError
from spec.parameters import TINY

CRYSTAL = CrystalCache(0.4, ENDS, TINY, backend="numpy")
FIRST = (
    "embed", "layers.0.input_layernorm", "layers.0.self_attn.q_", "layers.0.self_attn.k_", "layers.0.self_attn.qkv",
    "layers.0.attention.query_key_value", "wte", "wpe", "h.0.ln_1", "h.0.attn.c_attn",
)


def kept(folder: Path, policy: RetentionPolicy, ids: torch.Tensor) -> list[int]:
    found: list[int] = keep(folder, policy, ids[0].tolist()).positions.tolist()
    return found


def sessions(model: Any, policy: RetentionPolicy, ids: torch.Tensor) -> list[int]:
    with torch.no_grad(), policy(model) as run:
        model(ids)
    assert run.kept is not None
    found: list[int] = run.kept.tolist()
    return found


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize(("dtype", "backend"), [(torch.float32, "numba"), (torch.bfloat16, "numpy")])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SLIDING])
def test_the_first_layer_decides_as_a_session(
    family: str, dtype: torch.dtype, backend: str, tmp_path: Path,
) -> None:
    build(family, dtype=dtype).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).train(False)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if any(part in name for part in FIRST)}, file)
    policy = CrystalCache(0.4, ENDS, TINY, backend=backend)
    for seed, n in enumerate((2, 3, 40, 150)):
        assert kept(tmp_path, policy, prompt(n, seed)) == sessions(model, policy, prompt(n, seed))


@pytest.mark.law("refused-before-anything-changes")
def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "0.self_attn.k_" not in name}, file)
    with pytest.raises(SpecError, match=r"layers\.0\.self_attn\.k_proj\.weight.*files do not hold"):
        kept(tmp_path, CRYSTAL, prompt(20))


@pytest.mark.law("decided-as-the-reference")
def test_files_in_several_parts_and_policies_that_need_nothing(tmp_path: Path) -> None:
    model, ids = build("qwen2"), prompt(70)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert kept(tmp_path, CRYSTAL, ids) == sessions(model, CRYSTAL, ids)
    for part in tmp_path.glob("*.safetensors"):
        part.unlink()
    for policy in (StreamingLLM(0.3, N_sink=2), FullCache()):
        assert kept(tmp_path, policy, ids) == sessions(model, policy, ids)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Published("snapkv", 0.4, W=4), "needs a forward: keys of all layers, the last 4 query rows"),
        (Published("h2o", 0.4), "needs a forward: keys of all layers, all query rows"),
        (Published("caote", 0.4), "keys and values of all layers, the last 1 query rows, a set for each layer and KV"),
        (Published("expected-attention", 0.4), "needs factor, inv_freq of the whole model"),
        (CrystalCache(0.4, ENDS, replace(TINY, observed_layer=1), "numpy"), "queries and keys of layer 1"),
    ],
)
def test_a_policy_with_other_needs_says_them(policy: RetentionPolicy, words: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=words):
        kept(tmp_path, policy, prompt(20))


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("family", SLIDING)
def test_a_first_layer_with_a_window_is_named(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="needs queries and keys of layer 1"):
        kept(tmp_path, CRYSTAL, prompt(20))


@pytest.mark.law("refused-before-anything-changes")
def test_a_folder_without_tensors_and_ids_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"folder with model\.safetensors"):
        kept(tmp_path, CRYSTAL, prompt(20))
    build("llama").save_pretrained(tmp_path)
    for ids in ([5], [5, 131], [-1, 5]):
        with pytest.raises(SpecError, match="two or more"):
            keep(tmp_path, CRYSTAL, ids)


@pytest.mark.law("as-it-is-described")
def test_the_command_prints_what_a_session_of_the_pocket_model_keeps(tmp_path: Path) -> None:
    model, tokenizer = load_pocket()
    file = tmp_path / "prompt.txt"
    file.write_text("The river runs past the old mill. The code is 7492. " * 12)
    ids = tokenizer(file.read_text(), return_tensors="pt").input_ids
    expected = sessions(model, CrystalCache(0.3, sentence_ends(tokenizer)), ids)
    said = CliRunner().invoke(app, ["keep", str(file), "--budget", "0.3", "--format", "json"])
    found = json.loads(said.stdout)
    assert [position for first, end in found["ranges"] for position in range(first, end)] == expected
    assert (found["seen"], found["kept"]) == (ids.shape[1], len(expected))
    lines = CliRunner().invoke(app, ["keep", str(file), "--model", str(ASSETS), "--dtype", "float32"]).stdout
    assert [list(map(int, line.split())) for line in lines.splitlines()] == found["ranges"]
