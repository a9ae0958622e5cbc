"""Two small Llama models with tokenizers: the pocket model and the chat model. Both are part of the package."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models_integration.model.published_weights import located

__all__ = ["ASSETS", "CHAT_ASSETS", "SHIPPED", "load_pocket", "load_pocket_tokenizer", "model_folder"]

ASSETS = Path(__file__).parent / "assets"
"""Folder of the pocket model."""
CHAT_ASSETS = Path(__file__).parent / "chat_assets"
"""Folder of the chat model, which was also trained on conversations."""
SHIPPED = {"pocket": ASSETS, "chat": CHAT_ASSETS}
"""Folders of the models in the package, by name."""


def model_folder(model: str) -> str | Path:
    """Return the argument of `from_pretrained`: the folder of a model that kvspec has, or for other names `model`.

    Raises:
        SpecError: if `model` is the name of a model that is not downloaded yet.
    """
    return SHIPPED.get(model) or located(model)


def load_pocket_tokenizer(folder: Path = ASSETS) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a folder, without the model."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def load_pocket(folder: Path = ASSETS) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model (float32, on the CPU, in evaluation mode) and the tokenizer."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model, load_pocket_tokenizer(folder)
