"""Two small Llama models with tokenizers: the pocket model and the chat model. Both are part of the package."""

from models_integration.pocket.shipped import ASSETS, CHAT_ASSETS, load_pocket, load_pocket_tokenizer

__all__ = ["ASSETS", "CHAT_ASSETS", "load_pocket", "load_pocket_tokenizer"]
