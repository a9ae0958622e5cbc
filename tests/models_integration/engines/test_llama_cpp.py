"""The example for llama.cpp answers as transformers with the evicted tokens masked.

`nox -s lab -- extra llamacpp` runs this.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the oracle is a model of transformers")
pytest.importorskip("llama_cpp", reason="llama-cpp-python: nox -s lab -- extra llamacpp runs this")
pytest.importorskip("gguf", reason="writes the models")

import torch
from gguf import GGMLQuantizationType
from typer.testing import CliRunner

from conformance.paths import ROOT
from kvspec.cli.app import app
from lab.measure.gguf_files import tiny_llama, write_gguf
from models_integration.model.gguf import read_gguf

pytestmark = pytest.mark.law("eviction-equals-masking")


def greedy(model: Any, ids: Sequence[int], evicted: Collection[int], prompt: int, new: int) -> list[int]:
    """Return new tokens. Queries after the prompt do not attend to the evicted tokens."""
    ids = list(ids)
    for _ in range(new):
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        mask[prompt:, sorted(evicted)] = -torch.inf
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[-new:]


def test_example_answers_as_masking(tmp_path: Path) -> None:
    """`kvspec keep` decides from a folder. The example reads, evicts and answers from a file of the same model."""
    model, file, folder = tiny_llama(), tmp_path / "f32.gguf", tmp_path / "folder"
    write_gguf(file, model, GGMLQuantizationType.F32)
    prompt, kept = tmp_path / "prompt.txt", tmp_path / "kept.json"
    read_model, tokenizer = read_gguf(file)
    read_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompt.write_text("The river runs past the old mill. The code is 7492. " * 8, encoding="utf-8")
    command = ["keep", str(prompt), "--model", str(folder), "--budget", "0.3", "--format", "json"]
    output = CliRunner().invoke(app, command).stdout
    kept.write_text(output, encoding="utf-8")
    example = [sys.executable, str(ROOT / "docs/examples/llama_cpp_answer.py"), str(file), str(prompt), str(kept)]
    done = subprocess.run([*example, " And 3?"], capture_output=True, check=False, cwd=ROOT, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    ids = tokenizer(prompt.read_text(encoding="utf-8")).input_ids
    evicted = set(range(len(ids))).difference(*(range(*pair) for pair in json.loads(output)["ranges"]))
    assert f"{len(evicted)} of {len(ids)} cells freed" in done.stderr
    # Compare the first of 32 tokens: the example's cells are float16, and a random model's tokens are about equally
    # likely.
    asked = [*ids, *tokenizer(" And 3?").input_ids]
    answer, full = (greedy(model, asked, hidden, len(ids), 8) for hidden in (evicted, set[int]()))
    assert answer != full
    assert done.stdout.startswith(str(tokenizer.decode(answer)))
