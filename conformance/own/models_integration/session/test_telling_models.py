"""Models in which every field of the config matters, and what only they show.

In the tiny models of `families`, Gemma's own scaling is 1 / sqrt(d).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from conformance.own.models_integration.session.families import (
    ENDS,
    VOCABULARY,
    at_once,
    prepare,
    prompt,
    relative,
)
from conformance.own.models_integration.session.sessions import Looking, method_of
from models_integration import CrystalCache, prefill
from models_integration.model.architecture import attention_modules
from reference.crystalcache import prefill as decided
from reference.crystalcache.coattention import attention
from spec.parameters import TINY
from spec.policy import LayerView, Needs

Patch = pytest.MonkeyPatch
Fields = Mapping[str, Any]

N = 40
# Long enough, and prompts enough, that another scaling moves a kept set.
DECIDED = 120
SEEDS = range(4)
TOLERANCE = 1e-5
VISIBLE_EFFECT = 1e-2
# Three query heads to a KV head, and a head dimension that is not hidden_size / heads.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
_ALTERNATING = {
    **_SIZES, "head_dim": 12, "query_pre_attn_scalar": 256, "sliding_window": 16, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Rotary positions with a base of their own."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def gemma3_rope(local: float, full: float) -> dict[str, Any]:
    """A base for each kind of layer."""
    kinds = {"sliding_attention": local, "full_attention": full}
    return {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in kinds.items()}}


# Configs, and by field what it would be in a model of which it says nothing.
TELLING: dict[str, tuple[Callable[[Fields], PreTrainedModel], Fields, Mapping[str, Fields]]] = {
    "gemma2": (
        lambda fields: Gemma2ForCausalLM(Gemma2Config(**fields)),
        {**_ALTERNATING, "attn_logit_softcapping": 0.2, **rope(300.0)},
        {
            "scaling": {"query_pre_attn_scalar": 12}, "softcap": {"attn_logit_softcapping": 50.0},
            "theta": rope(10_000.0),
        },
    ),
    "gemma3": (
        lambda fields: Gemma3ForCausalLM(Gemma3TextConfig(**fields)),
        {**_ALTERNATING, **gemma3_rope(40.0, 300.0)},
        {
            "scaling": {"query_pre_attn_scalar": 12}, "local theta": gemma3_rope(10_000.0, 300.0),
            "theta": gemma3_rope(40.0, 1_000_000.0),
        },
    ),
    "granite": (
        lambda fields: GraniteForCausalLM(GraniteConfig(**fields)),
        {**_SIZES, "head_dim": 8, "attention_multiplier": 1.1, "embedding_multiplier": 3.0, **rope(300.0)},
        {"scaling": {"attention_multiplier": 8**-0.5}, "theta": rope(10_000.0)},
    ),
    "gpt_neox": (
        lambda fields: GPTNeoXForCausalLM(GPTNeoXConfig(**fields)),
        {**_SIZES, "num_attention_heads": 3, **rope(30.0, partial_rotary_factor=0.25)},
        {
            "partial rotary": rope(30.0, partial_rotary_factor=1.0),
            "theta": rope(10_000.0, partial_rotary_factor=0.25),
        },
    ),
    "phi3": (
        lambda fields: Phi3ForCausalLM(Phi3Config(**fields)),
        {**_SIZES, "sliding_window": None, **rope(300.0, partial_rotary_factor=0.5)},
        {
            "partial rotary": rope(300.0, partial_rotary_factor=1.0),
            "theta": rope(10_000.0, partial_rotary_factor=0.5),
        },
    ),
    "llama": (
        lambda fields: LlamaForCausalLM(LlamaConfig(**fields)),
        {**_SIZES, "head_dim": 20, "attention_bias": True, **rope(300.0)},
        {"theta": rope(10_000.0)},
    ),
}


def build(family: str, changes: Fields | None = None) -> PreTrainedModel:
    """The telling model, or the same weights under other fields. Eager, where a soft cap is served too."""
    torch.manual_seed(0)
    make, fields, _ = TELLING[family]
    return prepare(make({**fields, **(changes or {})}), attention="eager")


def shown(model: PreTrainedModel, ids: Tensor) -> tuple[int, LayerView]:
    """The observed layer as a scorer sees it."""
    scorer = Looking(Needs("observed", None))
    with method_of(scorer)(model):
        at_once(model, ids, DynamicCache(config=model.config))
    (observation,) = scorer.shown
    ((layer, view),) = observation.layers.items()
    return layer, view


def check_shown(model: PreTrainedModel) -> None:
    """What a scorer is shown gives the attention that the layer itself has."""
    layer, view = shown(model, prompt(N))
    places = np.arange(N)
    found = attention(view.q.astype(np.float64), view.k.astype(np.float64), places, places, view.scaling, view.softcap)
    with torch.no_grad():
        weights = model(input_ids=prompt(N), output_attentions=True).attentions[layer][0]
    assert relative(torch.from_numpy(found).float(), weights) < TOLERANCE


def check_decided(model: PreTrainedModel) -> None:
    """Kept sets are those of q and k under the module's own scaling and cap."""
    cap = getattr(model.config, "attn_logit_softcapping", None)
    for seed in SEEDS:
        ids = prompt(DECIDED, seed)
        layer, view = shown(model, ids)
        scaling = float(attention_modules(model)[layer].scaling)  # type: ignore[arg-type]
        expected = decided(view.q, view.k, ids[0].numpy(), ENDS, 0.3, TINY, scaling=scaling, softcap=cap)
        kept = prefill(model, CrystalCache(0.3, ENDS, TINY, backend="numpy"), ids).cache.stored_positions()
        assert kept.tolist() == expected.kept.tolist()


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(("family", "field"), [(family, field) for family in TELLING for field in TELLING[family][2]])
def test_every_field_matters(family: str, field: str) -> None:
    """Under the value that it would have by default, the model's own logits are others."""
    right, other = build(family), build(family, TELLING[family][2][field])
    ids = prompt(N)
    logits = [at_once(model, ids, DynamicCache(config=model.config)) for model in (right, other)]
    assert relative(logits[1], logits[0]) > VISIBLE_EFFECT


@pytest.mark.parametrize("family", TELLING)
@pytest.mark.spec("CC-ATTENTION")
def test_what_a_scorer_is_shown_gives_the_layer_s_attention(family: str) -> None:
    check_shown(build(family))


@pytest.mark.parametrize("family", TELLING)
@pytest.mark.spec("CC-PREFILL")
def test_the_decision_is_that_of_the_model_s_own_scaling_and_cap(family: str) -> None:
    check_decided(build(family))
