"""Calibration of a model: query statistics for TriAttention, and head scores for KVzip."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import Attended, observing
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, describe, restored_rotation
from models_integration.model.cache_argument import cache_name
from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.layer_kinds import of_layer
from models_integration.policies.model_values import read_rotation
from models_integration.session.verbs import observe
from reference.calibration import Calibration, Identity
from reference.policies.attention import unrotated
from reference.policies.kvzip import kvzip
from reference.policies.kvzip_heads import head_scores
from reference.triattention import band_statistics
from spec.arrays import Float64, Matrix, Vector
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["calibrate", "heads_served_by", "served_by"]


def served_by(model: PreTrainedModel, identity: ModelIdentity | None = None) -> Identity:
    """Return the identity that a calibration must have for a model: name, hash of weights and config, RoPE.

    Args:
        model: model whose full-attention layers share one rotary embedding.
        identity: identity of the model, if known. Default: the identity is computed from all parameters of the model.

    Raises:
        SpecError: if kvspec does not support the model, if the full-attention layers do not share one rotary embedding
            of all channels in halves, or if the frequencies change with the length.
    """
    rotation = read_rotation(describe(model))
    made = identify(model) if identity is None else identity
    return Identity(f"{type(model).__name__}@{made.unrotated[:16]}", rotation["inv_freq"], rotation["factor"])


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


def calibrate(
    model: PreTrainedModel, input_ids: Tensor, identity: ModelIdentity | None = None,
    template: Sequence[Sequence[int]] | None = None,
) -> Calibration:
    """Measure a model, and return the calibration that the policies `triattention` and `kvzip-heads` need.

        found = kvspec.calibrate(model, input_ids, template=kvspec.repeat_template(tokenizer))
        policy = kvspec.policy_from_name("triattention", 0.3, calibration=found)

    To save the result in the format of `kvspec calibrate`, call `reference.calibration.save_calibration(found, path)`.

    Args:
        model: a causal language model.
        input_ids: token ids of a text, (1, n). Any text in a language of the model is suitable.
        identity: `ModelIdentity` of the model. Default: the identity is computed from all parameters of the model.
        template: `repeat_template(tokenizer)`. If `template` is given, the head scores of `kvzip-heads` are also
            measured.

    Returns:
        Statistics of the queries before rotary embedding. If `template` is given, the result also has head scores.

    Raises:
        SpecError: if `input_ids` does not have one row, or if the rotary embedding of the model is not supported and no
            template is given.
    """
    if input_ids.ndim != 2 or len(input_ids) != 1 or input_ids.shape[1] < 1:
        raise SpecError("input_ids", tuple(input_ids.shape), "must be one row of at least one token")
    architecture, host = describe(model), kvzip(template or ((), (), ()))
    rehearsed = template is not None and input_ids.shape[1] > host.floor
    served = (heads_served_by if rehearsed else served_by)(model, identity)
    taken = _statistics(architecture, served, input_ids)
    if not rehearsed:
        return taken
    return replace(taken, head_scores=_head_scores(model, input_ids, host).reshape(len(taken.layers), -1))


def _statistics(architecture: Architecture, served: Identity, input_ids: Tensor) -> Calibration:
    """Return statistics of the queries of a text. If the rotation is not supported, the statistics are empty."""
    if not len(served.inv_freq):
        H = of_layer(architecture.config, "num_attention_heads", architecture.full_layers[0])
        nothing = np.empty((len(architecture.full_layers), H, 0))
        return Calibration(served, architecture.full_layers, nothing, nothing)
    found, cache = _Statistics(served), RetainedCache(architecture.config)
    with (
        torch.no_grad(), restored_rotation(architecture.decoder),
        observing(architecture, cache, found, architecture.full_layers),
    ):
        architecture.decoder(input_ids=input_ids, use_cache=True, **{cache_name(architecture.decoder): cache})
    return found.calibration(architecture)


def _head_scores(model: PreTrainedModel, input_ids: Tensor, host: Policy) -> Float64[Vector, " g"]:
    with restored_rotation(model):
        observed = observe(model, input_ids, needs=host.scorer.needs)
    scores = host.scorer(observed.prompt(0, host.granularity), host.protection(input_ids.shape[1]))
    return head_scores([scores.values])


@dataclass
class _Statistics:
    """Compute the means of the queries of each layer during attention, without storing the queries."""

    identity: Identity
    layers: dict[int, list[tuple[Matrix, Matrix]]] = field(default_factory=dict)

    def wants_lse(self, layer: int) -> bool:
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        self.layers[seen.layer] = [self.head(one) for one in seen.query[0]]

    def head(self, q: Tensor) -> tuple[Float64[Matrix, "1 d"], Float64[Matrix, "1 half"]]:
        wide = q.detach().double().cpu().numpy()[None]
        bare = unrotated(wide, np.arange(wide.shape[1]), self.identity.inv_freq, self.identity.factor)
        return band_statistics(bare)

    def calibration(self, architecture: Architecture) -> Calibration:
        mean, magnitude = (
            np.stack([np.concatenate([head[part] for head in self.layers[at]]) for at in architecture.full_layers])
            for part in (0, 1)
        )
        return Calibration(self.identity, architecture.full_layers, mean, magnitude)
