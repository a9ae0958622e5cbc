"""Model of a study: a model that comes with kvspec, or any causal language model of transformers."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from experiments.tasks import Sample
from models_integration.model.architecture import check_positions
from models_integration.model.gguf import read_gguf
from models_integration.model.hub import is_hub_name
from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.published_weights import WEIGHTS, located
from models_integration.pocket import SHIPPED, load_pocket_tokenizer
from models_integration.policies.methods import (
    CrystalCache,
    NamedPolicy,
    RetentionPolicy,
    constants_of,
    parse_policy,
    policy_from_name,
)
from models_integration.policies.values import repeat_template, sentence_ends
from reference.calibration import Calibration
from reference.policies.names import NAMES, home_of, user_policy
from spec.budget import Budget
from spec.errors import SpecError
from spec.validate import check_choices, did_you_mean

__all__ = [
    "ATTENTION", "AUTO", "DTYPES", "SHIPPED", "Loading", "Subject", "model_errors", "policy_in_rows", "policy_with",
    "subject_of", "versioned",
]

AUTO = "auto"
_CONFIGS = ("config.json", "adapter_config.json")
"""Files of which a folder with a model has at least one."""
DTYPES = (AUTO, "float32", "bfloat16", "float16", "float64")
ATTENTION = (AUTO, "sdpa", "eager")


@dataclass(frozen=True)
class Subject:
    """Model under test."""

    label: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sentence_ends: frozenset[int]
    backend: str
    stop_ids: frozenset[int]
    calibration: Calibration | None = None
    """Calibration of this model, or None."""

    @cached_property
    def identity(self) -> ModelIdentity:
        """Identity of the model. It is computed at the first use, because all parameters must be read."""
        return identify(self.model)

    @property
    def name(self) -> str:
        """Name of the model in rows of results."""
        return self.identity.named(self.label)

    def first_layers(self, layers: int | None) -> "Subject":
        """Return a subject whose model has only the first layers, with the same weights. None: all layers.

        Queries and keys of a layer do not depend on later layers.
        """
        if layers is None or layers >= self.model.config.num_hidden_layers:
            return self
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):  # transformers checks the length
            config.layer_types = config.layer_types[:layers]
        model, weights = type(self.model)(config), self.model.state_dict()
        model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
        nn.Module.eval(model)  # the annotation of transformers lacks a return type
        return replace(self, model=model)

    def check_positions(self, argument: str, tokens: int, behind: int = 0) -> None:
        """Check that the model has positions for `tokens` tokens of text and `behind` tokens of question and answer.

        Raises:
            SpecError: if the model has too few positions.
        """
        check_positions(self.model.config, argument, tokens, behind)

    def check_sample(self, argument: str, sample: Sample) -> None:
        """Check that the model has positions for a sample's context, question and answer.

        Raises:
            SpecError: if the model has too few positions. The message contains the length of the context.
        """
        answer = max(sample.max_new_tokens, len(sample.answer_ids))
        self.check_positions(argument, len(sample.context_ids), len(sample.question_ids) + answer)

    def policy(self, text: str, budget: int | str | Budget) -> RetentionPolicy:
        """Make a policy from text, with this model's sentence ends, backend, template and calibration if needed.

        Raises:
            SpecError: if the name, a constant or the budget is unknown, or if a needed calibration is missing.
        """
        known = constants_of(parse_policy(text)[0])
        policy = policy_with(
            text, budget, sentence_ends=self.sentence_ends, backend=self.backend, calibration=self.calibration,
            template=repeat_template(self.tokenizer) if "template" in known else None,
        )
        return policy.knowing(self.identity) if isinstance(policy, NamedPolicy) and "calibration" in known else policy


def policy_with(text: str, budget: int | str | Budget, **offered: Any) -> RetentionPolicy:
    """Make a policy from text. The policy gets those of the offered constants that it has and the text does not set.

    Raises:
        SpecError: if the name, a constant or the budget is unknown.
    """
    name, constants = parse_policy(text)
    known = constants_of(name)
    return policy_from_name(name, budget, **{key: offered[key] for key in offered if key in known} | constants)


def policy_in_rows(text: str, calibration: Calibration | None = None) -> str:
    """Return a policy's name in rows of results, with the digest of the calibration or of the policy's module file.

    Raises:
        SpecError: as in `parse_policy`.
    """
    name, _ = parse_policy(text)
    if home_of(name) not in NAMES:
        return versioned(text, user_policy(name).digest)
    used = calibration is not None and "calibration" in constants_of(name)
    return versioned(text, calibration.digest) if calibration is not None and used else text


def versioned(name: str, digest: str) -> str:
    """Return a name with a digest, for an object that can change under the same name."""
    return f"{name}@{digest}"


@dataclass(frozen=True)
class Loading:
    """Model to load, and options of loading.

    Attributes:
        model: "pocket", "chat", the name of a model downloaded by `kvspec models fetch`, or a causal language model by
            folder, GGUF file or hub name.
        backend: name of the backend for the policies.
        device: PyTorch device of the model.
        dtype: dtype of the parameters. "auto" means the stored dtype.
        attn: attention implementation of transformers. "auto" is the model's default. Others are part of the label.
    """

    model: str = "pocket"
    backend: str = AUTO
    device: str = "cpu"
    dtype: str = AUTO
    attn: str = AUTO

    def _check(self) -> None:
        """Check the options before the model is loaded."""
        check_choices("dtype", (self.dtype,), DTYPES)
        check_choices("attn", (self.attn,), ATTENTION)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            here = ", ".join(["cpu", *(f"cuda:{at}" for at in range(torch.cuda.device_count()))])
            raise SpecError("device", self.device, f"does not exist on this machine; choose from {here}") from error
        CrystalCache(sentence_ends={0}, backend=self.backend)  # raises if the backend cannot run here

    def subject(self) -> Subject:
        """Load the model and the tokenizer.

        Raises:
            SpecError: if dtype or attention is unknown, if the device does not exist, or if the model cannot be loaded
                or is not downloaded.
            BackendUnavailable: if the backend cannot run on this machine.
            ModuleNotFoundError: if a package for GGUF files is missing.
        """
        self._check()
        disable_progress_bar()  # type: ignore[no-untyped-call]  # it would break kvspec's progress bar
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each retry without network is a warning
        with model_errors(self.model):
            loaded, tokenizer = _loaded(self.model, self.dtype, self.attn)
        loaded.to(self.device)
        loaded.train(False)
        label = Path(self.model).name if self.attn == AUTO else f"{Path(self.model).name}+{self.attn}"
        return subject_of(label, loaded, tokenizer, self.backend)


def subject_of(
    label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, backend: str = AUTO,
    calibration: Calibration | None = None,
) -> Subject:
    """Return the subject for a loaded model and its tokenizer.

    Raises:
        BackendUnavailable: if the backend cannot run on this machine.
    """
    ends = model.generation_config.eos_token_id
    stop = ends if isinstance(ends, list) else [] if ends is None else [ends]
    sentences = sentence_ends(tokenizer)
    CrystalCache(sentence_ends=sentences, backend=backend)  # raises if the backend cannot run here
    return Subject(label, model, tokenizer, sentences, backend, frozenset(stop), calibration)


@contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Context manager for code that reads the files of a model. Any error becomes a `SpecError` with the command to
    type.

    Raises:
        SpecError: if the name is a file or folder without a model, or if the code in the block raises an error.
        ModuleNotFoundError: if a package for GGUF files is missing.
    """
    names = ", ".join(map(repr, (*SHIPPED, *WEIGHTS)))
    way_out = f"give {names}, a folder with a causal language model, a GGUF file, or its name on the hub"
    way_out += did_you_mean(model, (*SHIPPED, *WEIGHTS))
    path, known = Path(model), model in (*SHIPPED, *WEIGHTS)
    if not known and path.is_file() and path.suffix != ".gguf":
        raise SpecError("model", model, f"is a file, but not a GGUF file; {way_out}")
    if not known and path.is_dir() and not any((path / name).is_file() for name in _CONFIGS):
        raise SpecError("model", model, f"is a folder without config.json, and so no model; {way_out}")
    if not known and not path.exists() and not is_hub_name(model):
        raise SpecError("model", model, f"is no folder on this machine, and no name that the hub can have; {way_out}")
    if not known and path.is_dir() and (pipes := sorted(one.name for one in path.iterdir() if one.is_fifo())):
        raise SpecError("model", model, f"has the pipe {pipes[0]!r} in place of a file; {way_out}")
    try:
        yield
    except (SpecError, ModuleNotFoundError):
        raise
    except Exception as error:  # transformers, the hub, files and tokenizers can raise anything
        if not known and not path.exists():
            reason = "is no folder on this machine, and the hub cannot be reached or has no such model"
            raise SpecError("model", model, f"{reason}; {way_out}") from error
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SpecError("model", model, f"cannot be loaded ({first.strip()}); {way_out}") from error


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
