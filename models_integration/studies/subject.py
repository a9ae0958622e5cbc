"""Loading a model to test: a shipped one, or any transformers causal model."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from models_integration.model.sentence_ends import sentence_ends
from models_integration.pocket import ASSETS, CHAT_ASSETS, load_pocket
from models_integration.policies.methods import CrystalCache
from models_integration.studies.compare.compare import Subject

__all__ = ["load_subject"]


SHIPPED = {"pocket": ASSETS, "chat": CHAT_ASSETS}


def load_subject(model: str, backend: str) -> Subject:
    """The model by name or path, with its tokenizer and what a comparison must know of both."""
    loaded: Any
    tokenizer: Any
    if model in SHIPPED:
        loaded, tokenizer = load_pocket(SHIPPED[model])
    else:
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    loaded.eval()
    ends = loaded.generation_config.eos_token_id
    stop = ends if isinstance(ends, list) else [] if ends is None else [ends]
    sentences = sentence_ends(tokenizer)
    chosen = CrystalCache(sentence_ends=sentences, backend=backend).backend
    return Subject(Path(model).name, loaded, tokenizer, sentences, chosen, frozenset(stop))
