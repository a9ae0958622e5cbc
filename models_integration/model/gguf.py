"""Models in GGUF files, as llama.cpp writes them: read whole, with their tokenizer, and dequantised."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_gguf", "read_gguf"]

_NEEDED = ("gguf", "accelerate")
_DIGITS_APART = ("smollm",)
"""Values of `tokenizer.ggml.pre` whose tokenizers split every digit off before anything else."""


def check_gguf() -> None:
    """What reads GGUF files is installed.

    Raises:
        ModuleNotFoundError: for the first package that is not.
    """
    for name in _NEEDED:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def read_gguf(path: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of one file; a minute for 135 M parameters, most of it for the vocabulary.

    The model is an ordinary one, which can be saved: what `from_pretrained` makes of the file counts as quantised,
    although its values are not.

    Args:
        path: of the file.
        options: for `from_pretrained`; its dtype is float32 where none is given, since blocks have none.

    Raises:
        ModuleNotFoundError: as `check_gguf`.
        Exception: of transformers, for a file that it cannot read.
    """
    check_gguf()
    given = {"dtype": "float32", **options}
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **given)
    config = read.config
    vars(config).pop("quantization_config", None)  # transformers before 5.17 leaves it out
    model = type(read).from_pretrained(None, config=config, state_dict=read.state_dict(), **given)
    return model, _tokenizer(path)


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """With the split that the file states: transformers reads its vocabulary and merges, and not this."""
    from gguf import GGUFReader

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    stated = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if stated is not None and stated.contents() in _DIGITS_APART:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer
