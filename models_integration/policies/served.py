"""Identity that a calibration must have for a model."""

import numpy as np
from transformers import PreTrainedModel

from models_integration.model.architecture import describe
from models_integration.model.identity import ModelIdentity, identify
from models_integration.policies.values import read_rotation
from reference.calibration import Identity
from spec.errors import SpecError

__all__ = ["heads_served_by", "served_by"]


def served_by(model: PreTrainedModel, identity: ModelIdentity | None = None) -> Identity:
    """Return the identity that a calibration must have for a model: name, hash of weights and config, RoPE.

    Args:
        model: model whose full-attention layers share one rotary embedding.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if kvspec does not support the model, or if the frequencies change with the length. Also if the
            full-attention layers do not share one rotary embedding of all channels in halves.
    """
    rotation = read_rotation(describe(model))
    known = identify(model) if identity is None else identity
    return Identity(f"{type(model).__name__}@{known.unrotated[:16]}", rotation["inv_freq"], rotation["factor"])


def heads_served_by(model: PreTrainedModel, identity: ModelIdentity | None = None) -> Identity:
    """Return the identity that head scores must have for a model. The rotary embedding does not matter.

    Raises:
        SpecError: if kvspec does not support the model.
    """
    try:
        return served_by(model, identity)
    except SpecError:
        known = identify(model) if identity is None else identity
        return Identity(f"{type(model).__name__}@{known.unrotated[:16]}@{known.rotation[:16]}", np.empty(0))
