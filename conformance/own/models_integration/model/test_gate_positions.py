"""The archive's gate refuses what a turned key alone cannot follow: distances in the attention, growing queries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from conformance.own.models_integration.session.families import _GQA, FAMILIES, TABLES, VOCABULARY, prepare
from models_integration.model import rotation
from models_integration.model.errors import UnknownModel
from models_integration.model.rotation import recognise

pytestmark = pytest.mark.law("as-it-is-described")

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}
_WIDTH: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48}


def growing_queries(beta: float = 0.1) -> Any:
    parameters = {**_YARN, "llama_4_scaling_beta": beta}
    return Ministral3ForCausalLM(Ministral3Config(**_GQA, head_dim=12, rope_parameters=parameters))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "MPT": (lambda: MptForCausalLM(MptConfig(vocab_size=VOCABULARY, d_model=48, n_heads=4, n_layers=3)), "ALiBi"),
    "Bloom": (lambda: BloomForCausalLM(BloomConfig(**_WIDTH, n_layer=3, n_head=4)), "ALiBi"),
    "Falcon": (
        lambda: FalconForCausalLM(
            FalconConfig(**_WIDTH, num_hidden_layers=3, num_attention_heads=4, alibi=True)
        ), "ALiBi",
    ),
    "one layer": (lambda: BloomForCausalLM(BloomConfig(**_WIDTH, n_layer=1, n_head=4)), "ALiBi"),
    "Ministral3": (growing_queries, "queries grow with their position"),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_a_turned_key_cannot_follow_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(UnknownModel, match=words):
        recognise(prepare(make()))


@pytest.mark.law("refused-before-anything-changes")
def test_growing_queries_are_seen_past_the_original_length_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the configuration calls them."""
    torch.manual_seed(0)
    monkeypatch.setattr(rotation, "_originals", lambda *_: [64])
    with pytest.raises(UnknownModel, match="keys prefilled at 128"):
        recognise(prepare(growing_queries()))


def test_without_them_the_same_model_is_served() -> None:
    torch.manual_seed(0)
    assert all(layer.slot == "keys" for layer in recognise(prepare(growing_queries(0.0))).layers)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in TABLES])
def test_the_served_families_pass(family: str) -> None:
    torch.manual_seed(0)
    assert len(recognise(prepare(FAMILIES[family]())).layers) >= 3


def test_a_model_in_which_order_is_nowhere_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """No positions at all: nothing has to be turned."""
    torch.manual_seed(0)
    model = prepare(FAMILIES["llama"]())
    assert isinstance(model, LlamaForCausalLM)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    assert all(layer.slot is None for layer in recognise(model).layers)
