"""Sessions with renumbered positions give the logits of an oracle that has an array of positions for each head."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration import (
    CrystalCache,
    RetainedCache,
    RetentionPolicy,
    StreamingLLM,
    compact,
    decide,
    observe,
    policy_from_name,
    save_cache,
)
from models_integration.archive.splice import computed, splice
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.renumbering import RENUMBERED, LayerNumbering, LayerTurn, Numbering
from models_integration.model.rotation import frequencies_at, recognise
from models_integration.session.verbs import EVERYTHING, read
from reference.positions import renumbered_positions, turn_keys
from spec.errors import SpecError
from spec.parameters import TINY
from tests.models_integration.session.families import (
    ENDS,
    FAMILIES,
    SMALL,
    TABLES,
    WHOLE,
    build,
    greedy,
    prepared,
    prompt,
    relative,
)
from tests.models_integration.session.position_oracle import Oracle
from tests.models_integration.session.sessions import batch, calibration, live_sets
from tests.models_integration.session.test_other_architectures import LATENT

pytestmark = pytest.mark.law("refused-before-anything-changes")

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
_NOPE = {**SMALL, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
_PARTLY = {"partial_rotary_factor": 0.5, "rope_theta": 1e4}
_OTHERS: dict[str, tuple[Callable[[], PreTrainedModel], bool]] = {
    "cohere": (partial(prepared, "Cohere", **SMALL), True),
    "glm": (partial(prepared, "Glm", **SMALL, head_dim=8), True),
    "ernie4_5": (partial(prepared, "Ernie4_5", **SMALL, head_dim=8), True),
    "glm4": (partial(prepared, "Glm4", **SMALL, head_dim=8), True),
    "helium": (partial(prepared, "Helium", **SMALL, head_dim=8), True),
    "smollm3, a layer without positions": (partial(prepared, "SmolLM3", **_NOPE), False),
    "granite": (partial(prepared, "Granite", **SMALL), False),
    "olmo": (partial(prepared, "Olmo", **SMALL), False),
    "phi": (partial(prepared, "Phi", **SMALL, rope_parameters=_PARTLY), False),
    "stablelm": (partial(prepared, "StableLm", **SMALL, rope_parameters=_PARTLY), False),
    "starcoder2": (partial(prepared, "Starcoder2", **SMALL, sliding_window=None), False),
    "arcee": (partial(prepared, "Arcee", **SMALL), False),
    "mixtral": (partial(prepared, "Mixtral", **SMALL, sliding_window=None, num_local_experts=2), False),
    "llama, yarn": (partial(prepared, "Llama", **SMALL, rope_parameters=_YARN), False),
    "llama, linear": (partial(prepared, "Llama", **SMALL, rope_parameters=_LINEAR), False),
    "llama, another base": (partial(prepared, "Llama", **SMALL, rope_parameters={"rope_theta": 77.0}), False),
}
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], bool]] = {
    **{name: (partial(build, name), False) for name in FAMILIES if name not in TABLES}, **_OTHERS,
}
POLICIES: dict[str, Callable[[], RetentionPolicy]] = {
    "streamingllm": lambda: StreamingLLM(17, N_sink=2, positions=RENUMBERED),
    "snapkv": lambda: policy_from_name("snapkv", 0.4, W=4, positions=RENUMBERED),
    "adakv": lambda: policy_from_name("adakv", 0.4, W=4, positions=RENUMBERED),
    "pyramidkv": lambda: policy_from_name("pyramidkv", 0.4, W=4, positions=RENUMBERED),
    "finch": lambda: policy_from_name("finch", 0.4, W=4, positions=RENUMBERED),
    "h2o": lambda: policy_from_name("h2o", 19, positions=RENUMBERED),
    "crystalcache": lambda: CrystalCache(0.5, ENDS, TINY, backend="numpy", positions=RENUMBERED),
}


def pieces() -> list[Tensor]:
    """Return a prompt, 20 tokens as decode steps, and two turns, each with decode steps after it."""
    ids = prompt(40 + 20 + 9 + 3 + 7 + 2)
    return list(torch.split(ids, [40, *[1] * 20, 9, *[1] * 3, 7, *[1] * 2], dim=1))


def pairs() -> list[Any]:
    """Return all pairs. A daily run tests all policies on one model, and one policy on each other model."""
    result = []
    for at, name in enumerate(MODELS):
        by_day = POLICIES if name == WHOLE[0] else {list(POLICIES)[at % len(POLICIES)]}
        for policy in POLICIES:
            marks = () if policy in by_day else pytest.mark.nightly
            result.append(pytest.param(name, policy, marks=marks, id=f"{name}-{policy}"))
    return result


@pytest.mark.spec("POS-RENUMBERED", "POS-TURN")
@pytest.mark.parametrize(("name", "policy"), pairs())
def test_a_session_equals_the_oracle(name: str, policy: str) -> None:
    """Check a prompt, 20 decode steps and two turns: the logits equal the logits of the oracle."""
    make, interleaved = MODELS[name]
    check_session(make(), policy, interleaved)


@pytest.mark.spec("POS-RENUMBERED", "POS-TURN")
@pytest.mark.parametrize("policy", ["streamingllm", "crystalcache"])
def test_of_the_latents_of_mla_the_rotated_channels_turn(policy: str) -> None:
    model = prepared("DeepseekV3", **LATENT["deepseek_v3"][1])
    check_session(model, policy, first=LATENT["deepseek_v3"][1]["qk_nope_head_dim"])


def check_session(model: PreTrainedModel, policy: str, interleaved: bool = False, first: int = 0) -> None:
    renumbered, kept = (Oracle(model, rule, interleaved, first) for rule in (RENUMBERED, "kept"))
    errors, differences, cache = [], [], None
    with torch.no_grad(), POLICIES[policy]()(model) as run:
        for ids in pieces():
            actual = model(ids, past_key_values=cache, use_cache=True)
            cache = actual.past_key_values
            wanted = renumbered.read(ids[0].tolist())
            errors.append(relative(actual.logits[0], wanted))
            differences.append(relative(kept.read(ids[0].tolist()), wanted))
            for oracle in (renumbered, kept):
                oracle.evict(live_sets(cache))
    assert run.positions == RENUMBERED
    assert max(errors) <= 1e-5
    assert max(differences) > 1e-2


@pytest.mark.spec("POS-RENUMBERED", "POS-TURN")
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "pyramidkv"])
def test_padded_rows_have_numbers_of_their_own(policy: str) -> None:
    """Each row of a padded batch equals an oracle of this row, before and after the rows change places."""
    model, rows = build("llama"), [prompt(40), prompt(31, seed=5)]
    ids, mask = batch(rows)
    oracles = [Oracle(model), Oracle(model)]
    with torch.no_grad(), POLICIES[policy]()(model):
        actual = model(ids, attention_mask=mask, use_cache=True)
        cache = actual.past_key_values
        for row, oracle in enumerate(oracles):
            oracle.read(rows[row][0].tolist())
            oracle.evict(live_sets(cache, row))
        for step in range(4):
            if step == 2:
                cache.reorder_cache(torch.tensor([1, 0]))
                oracles.reverse()
                mask = mask.flip(0)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            actual = model(torch.tensor([[7 + step], [90 - step]]), past_key_values=cache, attention_mask=mask)
            for row, oracle in enumerate(oracles):
                wanted = oracle.read([[7 + step], [90 - step]][row])
                assert relative(actual.logits[row], wanted) <= 1e-5


def stream_of(
    model: PreTrainedModel, policy: RetentionPolicy, tokens: int, chunk: int,
) -> tuple[RetainedCache, list[float], list[int]]:
    """Read a stream in forward passes of `chunk` tokens. Return the cache, relative errors, and largest positions."""
    oracle, errors, largest, cache = Oracle(model), list[float](), list[int](), None
    rotary = next(one for name, one in model.named_modules() if name.endswith("rotary_emb"))
    with torch.no_grad(), policy(model) as run:
        hook = rotary.register_forward_pre_hook(
            lambda _, __, given: largest.append(int(given["position_ids"].max())), with_kwargs=True
        )
        for ids in torch.split(prompt(tokens), chunk, dim=1):
            actual = model(ids, past_key_values=cache, use_cache=True)
            cache = actual.past_key_values
            errors.append(relative(actual.logits[0], oracle.read(ids[0].tolist())))
            oracle.evict(live_sets(cache))
    hook.remove()
    assert run.cache is not None
    return run.cache, errors, largest


@pytest.mark.spec("POS-BASE", "POS-RENUMBERED", "POS-TURN")
@pytest.mark.filterwarnings("error:the text has")
@pytest.mark.parametrize("policy", ["streamingllm", "h2o", "snapkv"])
def test_an_endless_text_stays_in_the_range_of_the_model(policy: str) -> None:
    """Check a text with five times the positions of the model against an oracle without a base."""
    model = prepared("Llama", **{**SMALL, "max_position_embeddings": 64})
    chosen = policy_from_name("snapkv", 16, W=2, positions=RENUMBERED) if policy == "snapkv" else POLICIES[policy]()
    cache, errors, largest = stream_of(model, chosen, 320, 4)
    assert max(errors) <= 1e-5
    assert max(largest) == 63
    assert cache.numbering is not None
    assert len(cache.numbering.bases) > 4


@pytest.mark.spec("POS-BASE")
@pytest.mark.filterwarnings("error:the text has")
def test_a_stream_of_crystalcache_renumbers_and_one_that_keeps_positions_warns() -> None:
    model = prepared("Llama", **{**SMALL, "max_position_embeddings": 64})
    kept, policy = (
        CrystalCache(20, ENDS, TINY, backend="numpy", stream=True, positions=rule) for rule in ("kept", RENUMBERED)
    )
    cache, errors, largest = stream_of(model, policy, 400, TINY.C)
    assert max(errors) <= 1e-5
    assert max(largest) <= 63
    assert cache.stored_length <= 20 + TINY.C
    with torch.no_grad(), pytest.raises(UserWarning, match="positions='renumbered'"), kept(model):
        model(prompt(80))


@pytest.mark.spec("POS-TURN")
def test_in_a_stream_the_sinks_alone_turn_and_the_stored_keys_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, turn, sizes = prepared("Llama", **SMALL), LayerNumbering.turned, list[int]()

    def noted(self: LayerNumbering, tensor: Tensor, *positions: Tensor) -> Tensor:
        sizes.append(tensor.shape[2])
        return turn(self, tensor, *positions)

    monkeypatch.setattr(LayerNumbering, "turned", noted)
    with torch.no_grad(), StreamingLLM(12, N_sink=3, positions=RENUMBERED)(model) as run:
        model(prompt(20))
        assert run.cache is not None
        before = run.cache.keys_of(0)[:, :, :3].clone()
        for seed in range(9):
            model(prompt(5, seed=seed), past_key_values=run.cache)
        assert sizes == [3] * (9 * SMALL["num_hidden_layers"])  # once in each turn and layer
        assert torch.equal(run.cache.keys_of(0)[:, :, :3], before)


@pytest.mark.spec("POS-TURN")
@pytest.mark.parametrize(("dtype", "v", "n"), [
    (torch.bfloat16, 2**-8, 10_016), (torch.float32, 2**-24, 1_016), (torch.float16, 2**-11, 1_016),
])
def test_after_thousands_of_evictions_a_key_has_the_error_of_one_rounding(
    dtype: torch.dtype, v: float, n: int,
) -> None:
    """A stream of 4 sinks and 12 newest tokens, one eviction for each new token: the turned keys are within v."""
    theta = (100.0 ** -(torch.arange(8) / 8)).float()
    layer = DenseLayer()
    layer.numbering = LayerNumbering(Numbering({}), LayerTurn("keys", "half_split", theta))
    raw = torch.randn(1, 2, n, 18, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.update(raw[:, :, :15], raw[:, :, :15])
    for seen in range(15, n):
        layer.update(raw[:, :, seen : seen + 1], raw[:, :, seen : seen + 1])
        layer.retain(torch.tensor([*range(4), *range(seen - 11, seen + 1)]))
        if seen % 100 == 0:
            layer.attended()
    kept = layer.stored_positions()[0].numpy()
    (assigned,), _ = renumbered_positions([kept], n, 0)
    stored = raw[0][:, kept]
    # As the model does, the angle of each position is rounded to float32.
    angles = [(torch.from_numpy(at).float()[:, None] * theta).double().numpy() for at in (assigned, kept)]
    wanted = np.concatenate([
        turn_keys(stored[:, at : at + 1].double().numpy(), np.array([0]), np.array([1]), angles[0][at] - angles[1][at],
                  "half_split") for at in range(len(kept))
    ], axis=1)
    error = np.abs(layer.attended()[0][0].double().numpy() - wanted)
    pairs = np.hypot(*stored[..., :16].double().numpy().reshape(2, 16, 2, 8).transpose(2, 0, 1, 3))
    assert (error[..., :16] <= v * (1 + 1e-6) * np.tile(pairs, 2)).all()
    assert (error[..., 16:] == 0).all()
    assert np.abs(wanted - stored.double().numpy())[:, :4].max() > 0.1


@pytest.mark.parametrize(("make", "reason"), [
    (partial(build, "gpt2"), "is not supported"),
    (partial(prepared, "Llama", **SMALL, rope_parameters={
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "change with the length .dynamic"),
    (partial(prepared, "Phi3", **SMALL, rope_parameters={
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4,
        "original_max_position_embeddings": 64}), "change with the length .longrope"),
], ids=["absolute", "dynamic", "longrope"])
def test_a_model_whose_keys_cannot_be_turned_is_refused(make: Callable[[], PreTrainedModel], reason: str) -> None:
    model = make()
    with pytest.raises(SpecError, match=reason) as caught:
        StreamingLLM(12, positions=RENUMBERED)(model)
    assert caught.value.argument == "positions"
    with StreamingLLM(12)(model) as run:
        model(prompt(20))
    assert run.positions == "kept"


def test_a_model_with_alibi_is_refused_under_both_rules() -> None:
    model = prepared("Bloom", vocab_size=131, hidden_size=32, n_layer=2, n_head=4)
    for rule in ("kept", RENUMBERED):
        with pytest.raises(SpecError, match="ALiBi"):
            StreamingLLM(12, positions=rule)(model)


def test_what_does_not_follow_the_rule_is_refused(tmp_path: Path) -> None:
    model = prepared("Llama", **{**SMALL, "max_position_embeddings": 64})
    with pytest.raises(SpecError, match="kept"):
        StreamingLLM(12, positions="relative")
    with torch.no_grad(), StreamingLLM(12, positions=RENUMBERED)(model) as run:
        for seed in range(8):
            model(prompt(10, seed=seed), past_key_values=run.cache)
    assert run.cache is not None
    assert run.cache.numbering is not None
    assert run.cache.numbering.base > 0
    with pytest.raises(SpecError, match="cannot be saved"):
        save_cache(run.cache, model, tmp_path / "cache")
    with pytest.raises(SpecError, match="cannot be cropped"):
        run.cache.crop(-1)
    with pytest.raises(SpecError, match="inside `with policy"):
        model(prompt(2), past_key_values=run.cache)
    with StreamingLLM(12)(model), pytest.raises(SpecError, match="positions='renumbered'"):
        model(prompt(2), past_key_values=run.cache)
    assert run.cache.get_seq_length() == 80


@pytest.mark.parametrize("name", [
    "expected-attention", "diverse-expected-attention", "triattention", "triattention-by-head", "diverse-triattention",
    "expected-attention-stats",
])
def test_a_policy_that_removes_the_rotation_of_keys_is_refused(name: str) -> None:
    """TriAttention has the frequencies in a calibration, and set-conditioned selection contains a scorer."""
    model = prepared("Llama", **SMALL)
    given = {"calibration": calibration(model)} if "triattention" in name or "stats" in name else {}
    policy = policy_from_name(name, 12, positions=RENUMBERED, **given)
    with pytest.raises(SpecError, match="removes the rotation of keys"):
        policy(model)
    policy_from_name(name, 12, **given)(model)


def test_a_chunk_is_not_spliced_into_renumbered_tokens() -> None:
    model = prepared("Llama", **SMALL)
    rotary = recognise(model)
    chunk = computed(model, prompt(7)[0].tolist(), rotary)
    with torch.no_grad(), StreamingLLM(12, positions=RENUMBERED)(model) as run:
        model(prompt(20))
    assert run.cache is not None
    with pytest.raises(SpecError, match="cannot be spliced into"):
        splice(run.cache, [chunk], frequencies_at(model, rotary, 40))
    assert (run.cache.get_seq_length(), run.cache.stored_length) == (20, 12)


@pytest.mark.spec("POS-RENUMBERED", "POS-BASE")
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "adakv", "q-filters"])
def test_one_observation_and_several_turns_follow_the_rule(policy: str) -> None:
    """Check `observe`, `decide`, `compact` and `read`, and the error for a policy with the other rule."""
    model, ids = prepared("Llama", **SMALL), prompt(40)
    constants = {"calibration": calibration(model)} if policy == "q-filters" else {}
    given = policy_from_name(policy, 12, positions=RENUMBERED, **constants) if constants else POLICIES[policy]()
    oracle, method = Oracle(model), given.on(model)
    observed = observe(model, ids)
    cache = compact(observed.cache, decide(method, observed))
    assert observed.cache.numbering is None
    oracle.read(ids[0].tolist())
    for seed, n in ((4, 9), (5, 3)):
        oracle.evict(live_sets(cache))
        later = read(model, cache, prompt(n, seed), EVERYTHING, last=n)
        assert later.logits is not None
        assert relative(later.logits[0], oracle.read(prompt(n, seed)[0].tolist())) <= 1e-5
        if policy != "adakv":
            cache = compact(cache, decide(method, later))
            with pytest.raises(SpecError, match="positions='renumbered'"):
                decide(StreamingLLM(12).on(model), later)


@pytest.mark.spec("POS-BASE")
def test_text_read_after_a_renumbered_stream_has_positions_of_the_stream() -> None:
    model = prepared("Llama", **{**SMALL, "max_position_embeddings": 64})
    oracle, cache = Oracle(model), None
    with torch.no_grad(), StreamingLLM(12, N_sink=2, positions=RENUMBERED)(model):
        for ids in torch.split(prompt(120), 10, dim=1):
            cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
            oracle.read(ids[0].tolist())
            oracle.evict(live_sets(cache))
    assert cache is not None
    assert cache.numbering.base > 0
    actual = read(model, cache, prompt(5, 8), last=5).logits
    assert actual is not None
    assert relative(actual[0], oracle.read(prompt(5, 8)[0].tolist())) <= 1e-5


@pytest.mark.spec("POS-RENUMBERED")
def test_generate_follows_the_rule_with_and_without_beams() -> None:
    """Check that a greedy answer equals the answer of the oracle, and that two equal beams give the same answer."""
    model, oracle = build("llama"), Oracle(build("llama"))
    with StreamingLLM(17, N_sink=2, positions=RENUMBERED)(model) as run:
        actual = greedy(model, prompt(40), 8)[0].tolist()
    logits, wanted = oracle.read(prompt(40)[0].tolist())[-1], list[int]()
    oracle.evict({layer: [torch.tensor(run.retentions[0].positions)] * 2 for layer in range(3)})
    for _ in range(8):
        wanted.append(int(logits.argmax()))
        logits = oracle.read(wanted[-1:])[-1]
    assert actual == wanted
    with StreamingLLM(17, N_sink=2, positions=RENUMBERED)(model):
        beams = greedy(model, prompt(40), 8, num_beams=3, early_stopping=True)
    assert beams.shape == (1, 8)
