"""What the integration does on models, against the items of places and baselines."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from conformance.measure import injection_baselines as baselines
from conformance.own.models_integration.archive.test_baselines import PARTS, PREFIX, case_of
from conformance.own.models_integration.archive.test_splice import BOUND, SYSTEM
from conformance.own.models_integration.session.families import relative
from models_integration.model.rotation import plain_layers, prefilled
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
