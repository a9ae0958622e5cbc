"""Models in GGUF files: weights, dequantised by transformers, and the tokenizer with the file's split of digits."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_packages", "read_gguf"]

_NEEDED = ("gguf", "accelerate")
_DIGITS_APART = ("smollm",)
"""Values of `tokenizer.ggml.pre` whose tokenizers first split off every digit."""


def check_packages() -> None:
    """Check that the packages for GGUF files are installed. The error has the first missing package."""
    for name in _NEEDED:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def read_gguf(path: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of a file. 135 M parameters take about a minute, most of it the vocabulary.

    The model can be saved like any other model. `from_pretrained` alone would mark the model as quantised, although the
    values are dequantised.

    Args:
        path: path of the GGUF file.
        options: options of `from_pretrained`. The default dtype is float32, because GGUF blocks have no dtype.

    Raises:
        ModuleNotFoundError: as in `check_packages`.
        Exception: any exception of transformers, if the file cannot be read.
    """
    check_packages()
    given = {"dtype": "float32", **options}
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **given)
    config = read.config
    vars(config).pop("quantization_config", None)  # transformers before 5.17 does not set the entry
    model = type(read).from_pretrained(None, config=config, state_dict=read.state_dict(), **given)
    return model, _tokenizer(path)


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the file's split of digits. transformers reads only the vocabulary and the merges."""
    from gguf import GGUFReader

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    stated = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if stated is not None and stated.contents() in _DIGITS_APART:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer
