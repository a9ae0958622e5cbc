"""The model that a study is about: a shipped one, or any transformers causal model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.sentence_ends import sentence_ends
from models_integration.pocket import ASSETS, CHAT_ASSETS, load_pocket
from models_integration.policies.methods import CrystalCache, RetentionPolicy
from models_integration.policies.published import Published, constants_of, policy_from_name
from reference.calibration import Calibration

__all__ = ["Subject", "load_subject"]


SHIPPED = {"pocket": ASSETS, "chat": CHAT_ASSETS}


@dataclass(frozen=True)
class Subject:
    """A model under test."""

    label: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sentence_ends: frozenset[int]
    backend: str
    stop_ids: frozenset[int]
    calibration: Calibration | None = None
    """TriAttention's statistics of this model."""

    @cached_property
    def identity(self) -> ModelIdentity:
        """Made when a row or a file first needs it: it reads all parameters."""
        return identify(self.model)

    @property
    def name(self) -> str:
        """What rows of results call it."""
        return self.identity.named(self.label)

    def policy(self, name: str, budget: int | str) -> RetentionPolicy:
        """A policy by name, with those of this model's sentence ends, backend and calibration that it takes.

        Raises:
            SpecError: for an unknown name or budget, or a calibration that is needed and not there.
        """
        known = constants_of(name)
        offered = {
            "sentence_ends": self.sentence_ends, "backend": self.backend, "calibration": self.calibration,
        }
        policy = policy_from_name(name, budget, **{key: value for key, value in offered.items() if key in known})
        return policy.knowing(self.identity) if isinstance(policy, Published) and "calibration" in known else policy


def load_subject(model: str, backend: str) -> Subject:
    """The model by name or path, with its tokenizer and what a comparison must know of both."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # it says nothing of ours, and would tear our own
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
