"""Constants of policies that kvspec reads from a model."""

from transformers import PreTrainedModel

from models_integration.model.architecture import describe, unwrapped
from models_integration.model.identity import ModelIdentity
from models_integration.policies.served import heads_served_by, served_by
from models_integration.policies.values import output_projections, read_rotation
from reference.policies import names

__all__ = ["learned_constants"]


def learned_constants(
    name: str, model: PreTrainedModel, identity: ModelIdentity | None, on_device: bool,
) -> dict[str, object]:
    """Return the constants of the policy that kvspec reads from the model."""
    architecture, wanted, model = describe(model), names.constants_of_model(name), unwrapped(model)
    home = names.home_of(name)
    learned: dict[str, object] = {}
    if "W_o" in wanted:
        learned["W_o"] = output_projections(architecture, on_device)
    if "inv_freq" in wanted:
        learned |= read_rotation(architecture)
    if "served" in wanted:
        unrotated = home.removeprefix(names.DIVERSE) in ("fast-kvzip", "kvzap", "kvzip-heads", "q-filters")
        learned["served"] = (heads_served_by if unrotated else served_by)(model, identity)
    return learned
