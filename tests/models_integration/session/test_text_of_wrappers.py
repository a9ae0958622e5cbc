"""Generation from text alone with vision-language wrappers.

transformers 5.24 passes an empty dict of encodings.
"""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from conformance.cache_suite.oracle import Masked
from models_integration.model.architecture import describe
from spec.errors import SpecError
from tests.models_integration.session.families import SMALL, greedy, prepared, prompt
from tests.models_integration.session.masked import head_sets
from tests.models_integration.session.sessions import method

N, NEW = 40, 4

_SEEN: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}
_ROTATED = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {
        "text_config": _ROTATED, "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
        "image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10,
    }),
    "llava": ("LlavaForConditionalGeneration", {
        "vision_config": {"model_type": "clip_vision_model", **_SEEN},
        "text_config": {"model_type": "llama", **SMALL}, "image_token_index": 7,
    }),
    "gemma3": ("Gemma3ForConditionalGeneration", {
        "text_config": {
            **SMALL, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        },
        "vision_config": _SEEN, "mm_tokens_per_image": 4, "image_token_index": 7,
    }),
}


@cache
def build(name: str) -> PreTrainedModel:
    kind, sizes = WRAPPERS[name]
    return prepared(kind, **sizes)


def text(n: int, seed: int = 3) -> torch.Tensor:
    """Return ids without ids that mark an image."""
    ids = prompt(n, seed)
    return torch.where(ids < 11, ids + 20, ids)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("policy", ["snapkv", "streamingllm", "keydiff"])
def test_text_is_generated_in_two_turns(name: str, policy: str) -> None:
    model: Any = build(name)
    masked, ids = Masked(model), text(N)
    full, heads = describe(model).full_layers, SMALL["num_key_value_heads"]
    with method(policy)(model) as run:
        for number in range(2):
            new = greedy(model, ids, NEW, past_key_values=run.cache)
            assert torch.equal(masked.read(ids[:, masked.seen :])[:, -1].argmax(dim=-1), new[:, 0])
            masked.keep(list(head_sets(run.retentions[0], full, heads).values()))
            assert torch.equal(masked.read(new[:, :-1]).argmax(dim=-1), new[:, 1:])
            ids = torch.cat([ids, new, text(6, seed=number)], dim=1)
    assert run.bytes_freed > 0


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("nothing", [{}, {"image": None, "video": None}])
def test_nothing_is_no_image(nothing: Any) -> None:
    model: Any = build("llava")
    with method("snapkv")(model) as run, torch.no_grad():
        with pytest.raises(SpecError, match="mm_encoder_outputs = 'given': image tokens can attend to later tokens"):
            model.model(input_ids=text(N), mm_encoder_outputs={"image": {"pooler_output": torch.ones(1)}})
        model.model(input_ids=text(N), mm_encoder_outputs=nothing)
    assert run.seen == N
