"""The shipped models and their tokenizers, from the packaged files."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["ASSETS", "CHAT_ASSETS", "load_pocket", "load_pocket_tokenizer"]

ASSETS = Path(__file__).parent / "assets"
"""The folder of the pocket model."""
CHAT_ASSETS = Path(__file__).parent / "chat_assets"
"""The folder of its sibling that has seen conversations."""


def load_pocket_tokenizer(folder: Path = ASSETS) -> PreTrainedTokenizerFast:
    """The tokenizer alone."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def load_pocket(folder: Path = ASSETS) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model (float32, on the CPU, in evaluation mode) and its tokenizer."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model, load_pocket_tokenizer(folder)
