"""The pocket model: a small Llama and its tokenizer, shipped with the package, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from models_integration.pocket.assets_folder import ASSETS, CHAT_ASSETS

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["ASSETS", "CHAT_ASSETS", "load_pocket", "load_pocket_tokenizer"]


def load_pocket_tokenizer(folder: Path = ASSETS) -> PreTrainedTokenizerFast:
    """Load the tokenizer alone."""
    from transformers import PreTrainedTokenizerFast

    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def load_pocket(folder: Path = ASSETS) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the model (float32, on the CPU, in evaluation mode) and its tokenizer from the packaged files."""
    import torch
    from transformers import LlamaForCausalLM

    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model, load_pocket_tokenizer(folder)
