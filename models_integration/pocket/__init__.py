"""Two small Llama models with tokenizers: the pocket model and the chat model. Both are part of the package."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["ASSETS", "CHAT_ASSETS", "load_pocket", "load_pocket_tokenizer"]

ASSETS = Path(__file__).parent / "assets"
"""Folder of the pocket model."""
CHAT_ASSETS = Path(__file__).parent / "chat_assets"
"""Folder of the chat model, which was also trained on conversations."""


def load_pocket_tokenizer(folder: Path = ASSETS) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a folder, without the model."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def load_pocket(folder: Path = ASSETS) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model (float32, on the CPU, in evaluation mode) and the tokenizer."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model, load_pocket_tokenizer(folder)
