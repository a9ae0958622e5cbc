"""Eviction in llama.cpp equals masking in transformers. `nox -s lab -- extra llamacpp` runs this."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the oracle is a model of transformers")
pytest.importorskip("llama_cpp", reason="llama-cpp-python: nox -s lab -- extra llamacpp runs this")
pytest.importorskip("gguf", reason="writes the models")

import llama_cpp as cpp
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from typer.testing import CliRunner

from conformance.paths import ROOT
from conformance.tolerances import MASKED_VISIBLE
from kvspec.cli.app import app
from lab.measure.gguf_files import tiny_llama, write_gguf
from lab.measure.llama_cpp import check_close, difference, masked, move_away, opened
from models_integration.engines.llama_cpp import LlamaSequence, retention_of
from models_integration.model.published_weights import read_gguf
from spec.errors import SpecError
from spec.retention import Granularity, Retention

pytestmark = pytest.mark.law("eviction-equals-masking")

CELLS, BATCH = 256, 32


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "f32.gguf"
    write_gguf(path, model, GGMLQuantizationType.F32)
    return path


def text(random: Random, tokens: int) -> list[int]:
    return [random.randrange(3, 262) for _ in range(tokens)]


def some(random: Random, sequence: LlamaSequence) -> Retention:
    """Return a retention of a third of the stored tokens, including the last token."""
    stored = sequence.positions.tolist()
    kept = sorted({*random.sample(stored, len(stored) // 3), sequence.seen - 1})
    return Retention.shared(np.array(kept, dtype=np.int64), sequence.seen)


def read(sequence: LlamaSequence, tokens: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(sequence.read(tokens))[None]


@pytest.mark.parametrize("seed", range(4))
def test_three_turns_through_fewer_cells_than_tokens(seed: int, model: Any, file: Path) -> None:
    random, ids, hidden = Random(seed), list[int](), list[tuple[int, list[int]]]()
    with opened(file, CELLS, BATCH) as context:
        sequence = LlamaSequence(context)
        for _ in range(3):
            for tokens in (text(random, random.randrange(80, 110)), text(random, 1), text(random, 30)):
                ids += tokens
                check_close(read(sequence, tokens), masked(model, ids, hidden))
            before, retention = set(sequence.positions.tolist()), some(random, sequence)
            hidden.append((len(ids), sorted(before - set(retention.positions.tolist()))))
            assert sequence.evict(retention) == len(hidden[-1][1]) > 0
        ids += [7]
        assert difference(masked(model, ids, []), masked(model, ids, hidden)) > MASKED_VISIBLE
        check_close(read(sequence, [7]), masked(model, ids, hidden))
        assert sequence.seen == len(ids) > CELLS


def test_sequences_that_share_cells_are_evicted_apart(model: Any, file: Path) -> None:
    random = Random(5)
    shared, own = text(random, 60), text(random, 12)
    with opened(file, CELLS, BATCH, sequences=2) as context:
        first = LlamaSequence(context)
        first.read(shared)
        cpp.llama_memory_seq_cp(cpp.llama_get_memory(context), 0, 1, -1, -1)
        second, retention = LlamaSequence(context, 1), some(random, first)
        first.evict(retention)
        gone = sorted(set(range(60)) - set(retention.positions.tolist()))
        check_close(read(second, own), masked(model, shared + own, []))
        check_close(read(first, own), masked(model, shared + own, [(60, gone)]))
        assert first.positions.tolist() == [*retention.positions.tolist(), *range(60, 72)]


def test_with_quantised_weights_cells_that_move_away_are_as_good_as_gone(model: Any, tmp_path: Path) -> None:
    """Compare bit for bit. A second sequence has filled the freed cells, and all sums run in the same order."""
    path, random = tmp_path / "q4_1.gguf", Random(6)
    write_gguf(path, model)
    prompt, question = text(random, 120), text(random, 9)
    found = []
    for move in (False, True):
        with opened(path, CELLS, BATCH, sequences=2) as context:
            sequence = LlamaSequence(context)
            sequence.read(prompt)
            retention = some(Random(7), sequence)
            gone = sorted(set(range(120)) - set(retention.positions.tolist()))
            if move:
                move_away(context, gone)
            else:
                LlamaSequence(context, 1).read(text(random, sequence.evict(retention)))
            found.append(torch.cat([read(sequence, [token]) for token in question]))
    assert torch.equal(*found)


def test_the_wrappers_own_generation_goes_on_behind_an_eviction(model: Any, file: Path) -> None:
    random = Random(8)
    prompt, question = text(random, 150), text(random, 10)
    kinds = {"type_k": cpp.GGML_TYPE_F32, "type_v": cpp.GGML_TYPE_F32}
    llama = cpp.Llama(str(file), n_ctx=CELLS, n_batch=BATCH, n_threads=1, n_threads_batch=1, verbose=False, **kinds)
    llama.eval(prompt)
    sequence = LlamaSequence(llama.ctx)
    retention = some(random, sequence)
    sequence.evict(retention)
    answer = list(islice(llama.generate(prompt + question, temp=0.0), 12))
    gone = sorted(set(range(150)) - set(retention.positions.tolist()))
    assert answer == greedy(model, [*prompt, *question], [(150, gone)], 12)
    llama.close()


def greedy(model: Any, ids: Sequence[int], hidden: Sequence[tuple[int, Sequence[int]]], new: int) -> list[int]:
    told = list(ids)
    for _ in range(new):
        told.append(int(masked(model, told, hidden).argmax()))
    return told[len(ids) :]


def test_from_a_prompt_to_an_answer(model: Any, file: Path, tmp_path: Path) -> None:
    """`kvspec keep` decides from a folder. The example reads, evicts and answers from a file of the same model."""
    folder, prompt, kept = tmp_path / "folder", tmp_path / "prompt.txt", tmp_path / "kept.json"
    read_model, tokenizer = read_gguf(file)
    read_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompt.write_text("The river runs past the old mill. The code is 7492. " * 8, encoding="utf-8")
    said = CliRunner().invoke(app, ["keep", str(prompt), "--model", str(folder), "--budget", "0.3", "--format", "json"])
    kept.write_text(said.stdout, encoding="utf-8")
    example = [sys.executable, str(ROOT / "docs/examples/llama_cpp_answer.py"), str(file), str(prompt), str(kept)]
    done = subprocess.run([*example, " And 3?"], capture_output=True, check=False, cwd=ROOT, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    decided = json.loads(said.stdout)
    retention = retention_of(decided["ranges"], decided["seen"])
    gone = sorted(set(range(retention.seen)) - set(retention.positions.tolist()))
    ids = tokenizer(prompt.read_text(encoding="utf-8")).input_ids
    assert f"{len(gone)} of {len(ids)} cells freed" in done.stderr
    # Compare the first of 32 tokens: the example's cells are float16, and a random model's tokens are about equally
    # likely.
    asked = [*ids, *tokenizer(" And 3?").input_ids]
    answer, full = (greedy(model, asked, hidden, 8) for hidden in ([(len(ids), gone)], []))
    assert answer != full
    assert done.stdout.startswith(str(tokenizer.decode(answer)))


@pytest.mark.law("as-it-is-described")
def test_it_needs_neither_torch_nor_transformers() -> None:
    imports = "import sys; from models_integration.engines import llama_cpp"
    said = f"{imports}; assert not {{'torch', 'transformers'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", said], check=True, cwd=ROOT)


REFUSED: Mapping[str, tuple[Any, str]] = {
    "sets of layers": (Retention(np.arange(40) % 20, np.array([0, 20, 40]), 20, Granularity.LAYER), "the same tokens"),
    "another prompt": (Retention.shared(np.array([3, 20]), 21), "must be 20, the number of tokens"),
    "without the last": (Retention.shared(np.array([0, 18]), 20), "must keep position 19"),
    "nothing": (Retention.shared(np.array([], dtype=np.int64), 20), "must keep position 19"),
    "evicted before": (Retention.shared(np.array([3, 4, 19]), 20), "4: must not be a position that was evicted"),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", REFUSED)
def test_a_set_that_cells_cannot_follow_is_named(name: str, file: Path) -> None:
    retention, words = REFUSED[name]
    with opened(file, CELLS, BATCH) as context:
        sequence = LlamaSequence(context)
        sequence.read(list(range(10, 30)))
        sequence.evict(retention_of([(0, 4), (5, 20)], 20))
        before = state(context)
        with pytest.raises(SpecError, match=words) as caught:
            sequence.evict(retention)
        assert caught.value.argument == "retention"
        assert state(context) == before
        assert len(sequence.positions) == 19


def state(context: Any) -> bytes:
    """Return all data of sequence 0 in a context."""
    data = (ctypes.c_uint8 * cpp.llama_state_seq_get_size(context, 0))()
    cpp.llama_state_seq_get_data(context, data, len(data), 0)
    return bytes(data)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("tokens", "words"), [
    ([], "one or more"), ([3, 262], r"ids in \[0, 262\)"), ([3, -1], "ids in"),
    ([3] * 237, "236 free cells of n_ctx = 256"),
])
def test_tokens_that_cannot_be_read_are_named(tokens: list[int], words: str, model: Any, file: Path) -> None:
    ids = list(range(10, 30))
    with opened(file, CELLS, BATCH) as context:
        sequence = LlamaSequence(context)
        sequence.read(ids)
        before = state(context)
        with pytest.raises(SpecError, match=words):
            sequence.read(tokens)
        assert state(context) == before
        check_close(read(sequence, [3] * 236), masked(model, ids + [3] * 236, []))


@pytest.mark.law("unusable-after-a-failure")
def test_a_text_whose_second_batch_fails_leaves_nothing(
    model: Any, file: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = list(range(10, 50))
    with opened(file, CELLS, BATCH, sequences=2) as context:
        LlamaSequence(context).read([5] * (CELLS - 50))
        second = LlamaSequence(context, 1)
        with pytest.raises(SpecError, match="other sequences use"):
            second.read([5] * 60)
        check_close(read(second, ids), masked(model, ids, []))
        monkeypatch.setattr(cpp, "llama_decode", lambda *_: -3)
        with pytest.raises(RuntimeError, match="-3"):
            second.read([5])
        monkeypatch.undo()
        check_close(read(second, [5]), masked(model, [*ids, 5], []))


@pytest.mark.law("refused-before-anything-changes")
def test_a_sequence_that_is_none_or_that_somebody_else_changed_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(file, CELLS, BATCH) as context:
        for seq_id in (-1, 1):
            with pytest.raises(SpecError, match=r"seq_id = .*\[0, 1\)"):
                LlamaSequence(context, seq_id)
        sequence, other = LlamaSequence(context), LlamaSequence(context)
        other.read([5, 6, 7])
        for refused in (lambda: sequence.read([5]), lambda: sequence.evict(retention_of([], 0))):
            with pytest.raises(SpecError, match="code outside kvspec"):
                refused()
        monkeypatch.setattr(cpp, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(SpecError, match="cannot remove"):
            other.evict(retention_of([(1, 3)], 3))
        monkeypatch.undo()
        other.evict(retention_of([(1, 3)], 3))
        with pytest.raises(SpecError, match="begins at position 1"):
            LlamaSequence(context)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    "ranges",
    [[(0, 3), (2, 5)], [(4, 5), (0, 2)], [(3, 3)], [(5, 2)], [(-1, 2)], [(0, 21)], [(0, 1, 2)], [(0, 1.5)], [7]],
)
def test_ranges_that_are_none_are_named(ranges: Any) -> None:
    with pytest.raises(SpecError) as caught:
        retention_of(ranges, 20)
    assert caught.value.argument == ("positions" if len(ranges) == 2 else "ranges")


LAYER = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
         "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
OTHERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]], str]] = {
    "cohere2": ({"attention.sliding_window": 16, "logit_scale": 1.0, "attention.layer_norm_epsilon": 1e-5},
                {f"{name}.weight": shape for name, shape in LAYER.items()}, "sliding window"),
    "mamba": ({"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.time_step_rank": 2,
               "attention.layer_norm_rms_epsilon": 1e-5},
              {"attn_norm.weight": (32,), "ssm_in.weight": (128, 32), "ssm_conv1d.weight": (64, 4),
               "ssm_conv1d.bias": (64,), "ssm_x.weight": (18, 64), "ssm_dt.weight": (64, 2), "ssm_dt.bias": (64,),
               "ssm_a": (64, 8), "ssm_d": (64,), "ssm_out.weight": (32, 64)}, "recurrent states"),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("family", OTHERS)
def test_a_model_without_a_cell_for_each_token_is_named(family: str, tmp_path: Path) -> None:
    sizes, layer, words = OTHERS[family]
    writer = GGUFWriter(tmp_path / "other.gguf", family)
    for name, value in {
        "block_count": 4, "context_length": 256, "embedding_length": 32, "feed_forward_length": 64, "vocab_size": 50,
        "attention.head_count": 4, "attention.head_count_kv": 2, **sizes,
    }.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{family}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    names = {f"blk.{index}.{name}": shape for index in range(4) for name, shape in layer.items()}
    for name, shape in (names | {"token_embd.weight": (50, 32), "output_norm.weight": (32,)}).items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with opened(tmp_path / "other.gguf", CELLS) as context, pytest.raises(SpecError, match=words) as caught:
        LlamaSequence(context)
    assert family in str(caught.value.value)
