"""The pocket model: a small Llama model and its tokenizer, which come with the package and need no download."""

from models_integration.pocket.shipped import ASSETS, CHAT_ASSETS, load_pocket, load_pocket_tokenizer

__all__ = ["ASSETS", "CHAT_ASSETS", "load_pocket", "load_pocket_tokenizer"]
