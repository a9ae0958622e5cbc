"""The pocket model: a small Llama and its tokenizer, shipped with the package, so that nothing is downloaded."""

from models_integration.pocket.shipped import ASSETS, CHAT_ASSETS, load_pocket, load_pocket_tokenizer

__all__ = ["ASSETS", "CHAT_ASSETS", "load_pocket", "load_pocket_tokenizer"]
