"""GGUF files are read as llama.cpp means them, by tests that unpack the blocks themselves."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
for needed in ("gguf", "accelerate"):
    pytest.importorskip(needed)

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel  # noqa: E402

from conformance.measure.gguf_files import tiny_llama, write_gguf  # noqa: E402
from conformance.own.models_integration.session.families import relative  # noqa: E402
from models_integration.model.gguf import read_gguf  # noqa: E402
from models_integration.studies.subject import Loading  # noqa: E402

pytestmark = pytest.mark.law("saved-is-what-was")

IDS = torch.arange(5, 45)[None]


def logits(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def source() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(source: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, source)
    return path


def test_the_model_computes_what_its_source_does(source: LlamaForCausalLM, file: Path) -> None:
    model, _ = read_gguf(file)
    expected = logits(source)
    assert expected.std() > 0.1
    assert relative(logits(model), expected) < 1e-5
    assert read_gguf(file, dtype="float64")[0].dtype == torch.float64


def test_it_can_be_saved_and_is_then_read_as_any_folder(source: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    model, tokenizer = read_gguf(file)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.generation_config.eos_token_id == source.config.eos_token_id
    text = "the  7492 theories, x9"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("the 749", ["the", "Ġ", "7", "4", "9"]), ("  7", ["ĠĠ", "7"]), ("  t", ["Ġ", "Ġ", "t"])],
)
def test_digits_are_split_off_first(text: str, tokens: list[str], file: Path) -> None:
    """Spaces before a digit are then a piece of their own; before a letter the last one belongs to it."""
    _, tokenizer = read_gguf(file)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens


@pytest.mark.law("as-it-is-described")
def test_a_file_is_a_model_of_the_command_line(file: Path) -> None:
    subject = Loading(str(file), "numpy", attn="eager").subject()
    assert subject.label == "tiny.gguf+eager"
    assert subject.model.config._attn_implementation == "eager"
    assert subject.stop_ids == {2}
