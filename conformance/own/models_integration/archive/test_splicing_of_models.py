"""What the integration does on models, against the items of places, baselines and instruments."""

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from conformance import tolerances
from conformance.measure.studies.archive import baselines, diagnostics
from conformance.own.models_integration.archive.block_mask import ids
from conformance.own.models_integration.archive.models import build
from conformance.own.models_integration.archive.test_baselines import PARTS, PREFIX, case_of
from conformance.own.models_integration.archive.test_splice import BOUND, SYSTEM
from conformance.own.models_integration.session.families import relative
from models_integration.archive.splice import computed
from models_integration.model.rotation import plain_layers, prefilled, recognise
from reference.injection.diagnostics import entropy, key_cosine, sink_mass
from reference.injection.splicing import ARMS, held

pytestmark = pytest.mark.law("decided-as-the-reference")


@pytest.mark.law("as-it-is-described")
def test_the_arms_of_the_paper_are_all_there() -> None:
    assert set(ARMS) <= set(baselines.ARMS)


@pytest.mark.parametrize("arm", ARMS)
def test_a_session_holds_what_its_arm_says(arm: str) -> None:
    """First-layer keys know token and rotation alone; second-layer values also what the token has read."""
    case = case_of()
    chunks = [[*PREFIX, *part, 128] for part in PARTS]
    want, cache = held(arm, SYSTEM, PREFIX, PARTS, chunks), plain_layers(baselines.ARMS[arm](case))
    n = len(want.ids)
    assert cache[0].keys.shape[2] == n
    alone, at = DynamicCache(), torch.tensor(want.rotations)[:, None]
    with torch.no_grad():  # each token in a row of its own
        case.model(input_ids=torch.tensor(want.ids)[:, None], position_ids=at, past_key_values=alone)
    assert relative(cache[0].keys[0].transpose(0, 1), plain_layers(alone)[0].keys[:, :, 0]) < BOUND
    read = plain_layers(prefilled(case.model, want.ids))[1].values
    assert relative(cache[1].values[:, :, : want.live], read[:, :, : want.live]) < BOUND
    # The first token of a chunk has seen no session.
    assert want.live == n or relative(cache[1].values[:, :, want.live], read[:, :, want.live]) > 100 * BOUND


@pytest.mark.parametrize("family", ["Llama", "Glm"])
def test_the_probe_of_a_model_is_the_item_s(family: str) -> None:
    model, before, chunk = build(family, dtype=torch.float64), ids(9, 12), ids(6, 11)
    rotary = recognise(model)
    archived = computed(model, chunk, rotary)
    fresh = plain_layers(prefilled(model, [*before, *chunk]))
    for layer, probe in diagnostics.key_cosine(model, archived, before).items():
        rule = rotary.layers[layer]
        assert rule.style is not None
        want = key_cosine(
            archived.layers[layer][0].numpy(), fresh[layer].keys[0, :, 9:].numpy(), (np.arange(6), 9 + np.arange(6)),
            rotary.frequencies[str(rule.buffer)].double().numpy(), rule.style,
        )
        assert np.abs(probe.raw.numpy() - want[0]).max() < 1e-9
        assert np.abs(probe.unrotated.numpy() - want[1]).max() < 1e-5  # the twin rounds its angles as the model does


def test_instruments_on_tensors_are_the_items() -> None:
    """Attention with zeros, over a session in which positions are missing."""
    weights = torch.rand(3, 5, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = weights.masked_fill(weights < 0.3, 0)
    weights = weights / weights.sum(-1, keepdim=True)
    at = torch.tensor([0, 2, 3, 5, 6, 7, 11, 12, 20])
    found = diagnostics.attention_entropy(weights).flatten().numpy()
    assert tolerances.close("IN-ENTROPY", found, entropy(weights.numpy()).ravel())
    mass = diagnostics.sink_mass(weights, at).numpy()
    assert np.abs(mass - sink_mass(weights.numpy(), at.numpy())).max() < 1e-15
