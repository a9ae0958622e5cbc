"""The model that a study is about: a shipped one, or any transformers causal model."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from models_integration.model.architecture import check_positions
from models_integration.model.gguf import read_gguf
from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.published_weights import WEIGHTS, located
from models_integration.pocket import ASSETS, CHAT_ASSETS, load_pocket_tokenizer
from models_integration.policies.methods import (
    CrystalCache,
    Published,
    RetentionPolicy,
    constants_of,
    policy_from_name,
    spelled,
)
from models_integration.policies.tokenizer_values import repeat_template, sentence_ends
from models_integration.tasks import Sample
from reference.calibration import Calibration
from reference.policies.names import NAMES, own_policy
from spec.budget import Budget
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "ATTENTION", "AUTO", "DTYPES", "SHIPPED", "Loading", "Subject", "policy_in_rows", "versioned",
]

SHIPPED = {"pocket": ASSETS, "chat": CHAT_ASSETS}
AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16", "float16", "float64")
ATTENTION = (AUTO, "sdpa", "eager")


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

    def check_positions(self, argument: str, tokens: int, behind: int = 0) -> None:
        """The model has positions for a text of so many tokens, and `behind` more of a question and its answer.

        Raises:
            SpecError: otherwise.
        """
        check_positions(self.model.config, argument, tokens, behind)

    def check_sample(self, argument: str, sample: Sample) -> None:
        """The model has positions for a sample's context, question and answer.

        Raises:
            SpecError: otherwise, about the context.
        """
        answer = max(sample.max_new_tokens, len(sample.answer_ids))
        self.check_positions(argument, len(sample.context_ids), len(sample.question_ids) + answer)

    def policy(self, text: str, budget: int | str | Budget) -> RetentionPolicy:
        """A policy as text, with those of this model's sentence ends, backend, template and calibration that it takes.

        Raises:
            SpecError: for an unknown name, constant or budget, or a calibration that is needed and not there.
        """
        name, constants = spelled(text)
        known = constants_of(name)
        offered = {
            "sentence_ends": self.sentence_ends, "backend": self.backend, "calibration": self.calibration,
            "template": repeat_template(self.tokenizer) if "template" in known else None,
        }
        constants = {key: value for key, value in offered.items() if key in known} | constants
        policy = policy_from_name(name, budget, **constants)
        return policy.knowing(self.identity) if isinstance(policy, Published) and "calibration" in known else policy


def policy_in_rows(text: str, calibration: Calibration | None = None) -> str:
    """What rows of results call a policy: with the digest of the statistics that it goes by, or of its module's file.

    Raises:
        SpecError: as `spelled`.
    """
    name, _ = spelled(text)
    if name not in NAMES:
        return versioned(text, own_policy(name).digest)
    used = calibration is not None and "calibration" in constants_of(name)
    return versioned(text, calibration.digest) if calibration is not None and used else text


def versioned(name: str, digest: str) -> str:
    """A name of what may change behind it."""
    return f"{name}@{digest}"


@dataclass(frozen=True)
class Loading:
    """Which model, and how it is loaded.

    Attributes:
        model: "pocket", "chat", a model that `kvspec models fetch` has fetched, or a causal language model by folder,
            GGUF file or hub name.
        backend: whose code decides.
        device: where PyTorch puts the model.
        dtype: of its parameters; "auto" as they are stored.
        attn: how transformers computes attention; "auto" as the model prefers. Another one is part of the label.
    """

    model: str = "pocket"
    backend: str = AUTO
    device: str = "cpu"
    dtype: str = AUTO
    attn: str = AUTO

    def _check(self) -> None:
        """Refuse what can be refused before the model is read."""
        check_choices("dtype", (self.dtype,), DTYPES)
        check_choices("attn", (self.attn,), ATTENTION)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            here = ", ".join(["cpu", *(f"cuda:{at}" for at in range(torch.cuda.device_count()))])
            raise SpecError("device", self.device, f"does not exist on this machine; choose from {here}") from error
        CrystalCache(sentence_ends={0}, backend=self.backend)

    def subject(self) -> Subject:
        """The model, with its tokenizer and what a comparison must know of both.

        Raises:
            SpecError: for an unknown dtype or attention, a device that is not here, or a model that cannot be loaded
                or is not fetched.
            BackendUnavailable: when the backend cannot run here.
            ModuleNotFoundError: for a GGUF file, where what reads it is not installed.
        """
        self._check()
        disable_progress_bar()  # type: ignore[no-untyped-call]  # it says nothing of ours, and would tear our own
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each retry without network is a warning
        try:
            loaded, tokenizer = _loaded(self.model, self.dtype, self.attn)
        except (SpecError, ModuleNotFoundError):
            raise
        except Exception as error:  # of transformers, the hub, files and tokenizers: all that can be wrong with a model
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            names = ", ".join(map(repr, (*SHIPPED, *WEIGHTS)))
            way_out = f"give {names}, a folder with a causal language model, a GGUF file, or its name on the hub"
            raise SpecError("model", self.model, f"cannot be loaded ({first.strip()}); {way_out}") from error
        loaded.to(self.device)
        loaded.train(False)
        ends = loaded.generation_config.eos_token_id
        stop = ends if isinstance(ends, list) else [] if ends is None else [ends]
        sentences = sentence_ends(tokenizer)
        chosen = CrystalCache(sentence_ends=sentences, backend=self.backend).backend
        label = Path(self.model).name if self.attn == AUTO else f"{Path(self.model).name}+{self.attn}"
        return Subject(label, loaded, tokenizer, sentences, chosen, frozenset(stop))


def _loaded(model: str, dtype: str, attn: str) -> tuple[Any, PreTrainedTokenizerBase]:
    given = {"dtype": dtype, "attn_implementation": attn}
    chosen = {name: value for name, value in given.items() if value != AUTO}
    if model in SHIPPED:
        folder = SHIPPED[model]
        shipped = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "float32", **chosen})
        return shipped, load_pocket_tokenizer(folder)
    if model.endswith(".gguf") and Path(model).is_file():
        return read_gguf(Path(model), **chosen)
    place = located(model)
    return AutoModelForCausalLM.from_pretrained(place, **chosen), AutoTokenizer.from_pretrained(place)
