"""A tiny random model of each causal family that the installed transformers knows, made from its own config class."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conformance.measure.families.own_sizes import OWN, TINY

__all__ = ["Family", "NotBuilt", "families"]

MOST_PARAMETERS = 100_000_000


class NotBuilt(Exception):
    """No tiny model of a family can be made here."""


@dataclass(frozen=True)
class Family:
    """A model class, and one of the names that AutoModelForCausalLM has for it."""

    name: str
    model_class: str

    def build(self) -> PreTrainedModel:
        """Its tiny model, in float32 and eval mode, with weights so large that its attention is not uniform.

        Raises:
            NotBuilt: with the reason.
        """
        torch.manual_seed(0)
        try:
            model_class = getattr(transformers, self.model_class)
            config = _config(model_class.config_class, self.name)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                raise NotBuilt(f"{size:,} parameters in its smallest configuration here")
            model: PreTrainedModel = model_class(_config(model_class.config_class, self.name))
        except NotBuilt:
            raise
        except Exception as error:
            raise NotBuilt(f"{type(error).__name__}: {_one_line(str(error))}") from error
        return _drawn(model)


def families() -> list[Family]:
    """One for each model class, under the shortest of its names."""
    names: dict[str, str] = {}
    for name, model_class in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=lambda item: (len(item[0]), item)):
        names.setdefault(model_class, name)
    return sorted((Family(name, model_class) for model_class, name in names.items()), key=lambda family: family.name)


def _config(config_class: Any, name: str) -> Any:
    """The tiny sizes, in the fields that the class has; where layers slide, every second one."""
    given = {**_known(config_class), **OWN.get(name, {})}
    config = config_class(**given)
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        return config_class(**{**given, "sliding_window": None})
    if kinds is not None and set(kinds) == {"sliding_attention"}:
        return config_class(**{**given, "layer_types": ["sliding_attention", "full_attention"] * (len(kinds) // 2)})
    return config


def _known(config_class: Any) -> dict[str, Any]:
    names, other = {field.name for field in fields(config_class)}, getattr(config_class, "attribute_map", {})
    known = {other.get(name, name): value for name, value in TINY.items() if other.get(name, name) in names}
    parts: Mapping[str, Any] = getattr(config_class, "sub_configs", {})
    inner = {name: _known(part) for name, part in parts.items() if name in names and is_dataclass(part)}
    return {**known, **inner}


def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * (1.2 / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    model.train(False)
    return model


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]
