"""Policies by name: the table, the constants taken from a model, budgets as memory, and the errors."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

import kvspec
from experiments.studies.evidence.rules import rules_of
from kvspec.cli.app import app
from models_integration import (
    CrystalCache,
    FullCache,
    NamedPolicy,
    RetainedCache,
    StreamingLLM,
    calibrate,
    policy_from_name,
)
from models_integration.engines.keep import keep
from models_integration.model.architecture import describe
from models_integration.policies import sizes
from models_integration.policies.methods import parse_policy
from models_integration.policies.retention_policy import RetentionPolicy
from models_integration.policies.sizes import SizedPolicy, bytes_per_token, is_size, tokens_of_size
from models_integration.policies.values import output_projections
from reference import policies
from reference.policies import knorm
from reference.policies.names import DIVERSE, NAMES, POLICIES, make_policy
from spec.budget import Budget
from spec.errors import SpecError
from spec.parameters import ESSAY, TINY
from tests.models_integration.session.families import FAMILIES, build, prompt, relative
from tests.models_integration.session.sessions import CLASSES, PROMPT, read_prompt, small

pytestmark = pytest.mark.law("as-it-is-described")

PUBLISHED = tuple(name for name in POLICIES if name not in CLASSES)


def test_the_help_names_the_list_of_policies() -> None:
    text = " ".join(CliRunner().invoke(app, ["compare", "--help"]).output.split())
    assert "Comma-separated policies (`kvspec policies` lists the names)" in text
    assert "diverse-NAME" in text
    about = {"title": "t", "models": ["m"], "contexts": 1, "questions": 1, "seeds": [0], "lengths": [200]}
    every = rules_of(**about, placements=["after"], tasks=["needle"], budgets=["0.5"], controls=[],
                     policies=[name for name in NAMES if name != "fullcache"]).policies
    assert set(every) == set(NAMES) - {"fullcache"}


def test_every_name_but_chunks_and_h2o_takes_a_diverse_form() -> None:
    """A policy without a diverse form does not keep the best single tokens. SimLayerKV's lazy layers do not either."""
    for name in ("streamingllm", *PUBLISHED):
        if POLICIES[name].model_constants == frozenset() and name != "simlayerkv":
            if DIVERSE + name in NAMES:
                NamedPolicy(DIVERSE + name, 0.3, **small(name))
            else:
                with pytest.raises(SpecError, match="must keep single tokens"):
                    policies.diverse(POLICIES[name].make())


def test_a_name_gives_what_its_class_gives() -> None:
    ends = frozenset({1, 2})
    for backend in ("numpy", "auto"):
        by_name = policy_from_name("crystalcache", 0.3, sentence_ends=ends, backend=backend, decode=True)
        assert by_name == CrystalCache(0.3, ends, backend=backend, decode=True)
    assert policy_from_name("streamingllm", 100, N_sink=2) == StreamingLLM(100, N_sink=2)
    assert policy_from_name("fullcache", 0.3) == FullCache()
    assert policy_from_name("snapkv", 0.3, W=8) == NamedPolicy("snapkv", 0.3, W=8)
    other = policy_from_name("crystalcache", 0.3, sentence_ends=ends, parameters=TINY, alpha=0, impact="salience")
    assert other == CrystalCache(0.3, ends, replace(TINY, alpha=0, impact="salience"))
    essay = policy_from_name("crystalcache", 0.3, sentence_ends=ends, parameters="essay", alpha=2.0)
    assert essay == CrystalCache(0.3, ends, replace(ESSAY, alpha=2.0))
    for given in ("esay", 3):
        with pytest.raises(SpecError, match="must be 'paper' or 'essay'"):
            policy_from_name("crystalcache", 0.3, sentence_ends=ends, parameters=given)


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("text", "name", "constants"), [
    ("expected-attention", "expected-attention", {}),
    ("snapkv(W=16)", "snapkv", {"W": 16}),
    ('crystalcache(observed_layer=-1, impact="salience", alpha=0.5)', "crystalcache",
     {"observed_layer": -1, "impact": "salience", "alpha": 0.5}),
    ("diverse-snapkv( diversity = 0.25 )", "diverse-snapkv", {"diversity": 0.25}),
    ("knorm()", "knorm", {}),
    ('streamingllm(positions="renumbered", N_sink=2)', "streamingllm", {"positions": "renumbered", "N_sink": 2}),
    ('snapkv/layers=pyramid(positions="kept")', "snapkv/layers=pyramid", {"positions": "kept"}),
])
def test_a_policy_as_text_is_its_name_and_constants(text: str, name: str, constants: dict[str, Any]) -> None:
    assert parse_policy(text) == (name, constants)


@pytest.mark.parametrize(("text", "same"), [
    ("crystalcache:parameters=essay:alpha=2.0", 'crystalcache(parameters="essay", alpha=2.0)'),
    ("crystalcache:decode=true:breath_protection=none", 'crystalcache(decode=true, breath_protection="none")'),
    ("snapkv:w=16", "snapkv(w=16)"),
    ("streamingllm:N_sink=2:positions=renumbered", 'streamingllm(positions="renumbered", N_sink=2)'),
    ("snapkv:positions=renumbered/layers=pyramid", 'snapkv/layers=pyramid(positions="renumbered")'),
])
def test_both_forms_of_a_text_accept_the_same_constants(text: str, same: str) -> None:
    given = {"sentence_ends": frozenset({1, 2})} if "crystalcache" in text else {}
    both = map(parse_policy, (text, same))
    one, other = (policy_from_name(name, 0.3, **given, **constants) for name, constants in both)
    assert one == other
    assert one != policy_from_name(parse_policy(text)[0], 0.3, **given)
    assert policy_from_name(text, 0.3, **given) == policy_from_name(same, 0.3, **given) == one


NO_POLICY = "must be a policy name, or a policy name with constants"
BY_NAME = partial(policy_from_name, budget=0.3)
# Function, its arguments and constants, words of the error.
REFUSED: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
    (parse_policy, ("snapkw",), {}, "policy = 'snapkw'"),
    *((parse_policy, (text,), {}, NO_POLICY) for text in (
        "snapkv(W=16", "snapkv(16)", "snapkv(W=16}\nmore={)", "snapkv(W=16, W=8)",
    )),
    (parse_policy, ("snapkv:decode=true",), {}, "decode = True: snapkv has the constants"),
    (parse_policy, ("crystalcache:stream=maybe",), {}, "stream = 'maybe': must be a value such as false"),
    (parse_policy, ("snapkv(V=16)",), {}, "V = 16: snapkv has the constants"),
    (BY_NAME, ("epicache",), {}, "name = 'epicache'"),
    (BY_NAME, ("crystalcache",), {}, "sentence_ends = None"),
    (BY_NAME, ("crystalcache",), {"T": 3}, "T = 3: crystalcache has the constants C, D_c, M_max"),
    (BY_NAME, ("fullcache",), {"N_sink": 4}, "fullcache has the constants none"),
    (BY_NAME, ("snapkv(W=16",), {}, NO_POLICY),
    (BY_NAME, ("snapkv:W=16:w=8",), {}, "w = '8': is the constant W, which is also given"),
    *((BY_NAME, (name,), {written: 8}, rf"W = 8: is also in .{re.escape(name)}., with the value 16: leave out one")
      for name in ("snapkv:W=16", "snapkv(W=16)") for written in ("W", "window")),
    (BY_NAME, ("snapkv:positions=renumbered/every=8",), {"positions": "kept"}, "positions = 'kept': is also in"),
    (parse_policy, ("snapkv:W=16(W=8)",), {}, "W = 8: is also in 'snapkv:W=16'"),
    (make_policy, ("snapkv:W=16/layers=pyramid", {"W": 8}), {}, "W = 8: is also in 'snapkv:W=16/layers=pyramid'"),
    (NamedPolicy, ("snapkv(W=16)",), {}, r"must be a name; pass constants as .*\('snapkv', constant=value\)"),
    *((NamedPolicy, (name,), {}, f"name = '{name}': has a separate class; call kvspec.policy_from_name instead")
      for name in CLASSES),
    *((NamedPolicy, (name,), {}, f"name = '{name}'") for name in ("epicache", "scissorhands", "diverse-h2o")),
    *((BY_NAME, (name,), {"positions": "relative"}, 'positions = \'relative\': must be "kept" or "renumbered"')
      for name in ("snapkv", "streamingllm", "diverse-knorm", "snapkv/layers=pyramid")),
    (BY_NAME, ("fullcache",), {"positions": "renumbered"}, "fullcache has the constants none"),
    *((BY_NAME, (f"{prefix}nestedkv-without-{part}",), {key: 0.5}, f"{key} = 0.5: {prefix}nestedkv-without-{part} has ")
      for prefix in ("", "diverse-") for part, key in (("adaptive", "alpha_s"), ("continuum", "tau"))),
    (parse_policy, ("nestedkv-without-continuum:N_sink=8",), {}, "the constants are alpha_s, backend"),
    (NamedPolicy, ("snapkv",), {"pool": 8}, "snapkv has the constants W, backend, block, kernel"),
    (NamedPolicy, ("snapkv", 1.5), {}, "budget"),
    (NamedPolicy, ("expected-attention",), {"inv_freq": [1.0]}, "inv_freq"),
    (NamedPolicy, ("defensivekv",), {"W_o": {}}, "W_o"),
    (NamedPolicy, ("keydiff",), {"diversity": 0.5}, "keydiff has the constants backend, block"),
    (NamedPolicy, ("chunkkv",), {"block": 16}, "block = 16: chunkkv has the constants"),
    (NamedPolicy, ("diverse-keydiff",), {"block": 16}, "block = 16: diverse-keydiff has the constants"),
    (NamedPolicy, ("diverse-keydiff",), {"diversity": -1.0}, r"diversity = -1\.0"),
    (NamedPolicy, ("diverse-streamingllm",), {"signature": "head"}, "mode = 'head'"),
    (NamedPolicy, ("diverse-keydiff",), {"rule": "variant_a"}, "rule"),
    (NamedPolicy, ("kvzip",), {}, "template = None"),
    (NamedPolicy, ("kvzip",), {"template": [[1], [2]]}, "template = "),
    *((NamedPolicy, (name,), {}, "calibration = None") for name in ("triattention", "diverse-triattention")),
    (NamedPolicy, ("triattention",), {"calibration": "nowhere.npz"}, "calibration = 'nowhere.npz'"),
    *((NamedPolicy, ("triattention",), {name: given}, name) for name, given in (("served", None), ("mode", "head"))),
]


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("act", "arguments", "constants", "words"), REFUSED)
def test_a_name_with_bad_constants_is_refused(
    act: Callable[..., object], arguments: tuple[Any, ...], constants: dict[str, Any], words: str,
) -> None:
    with pytest.raises(SpecError, match=words):
        act(*arguments, **constants)


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_without_what_a_policy_needs_is_named() -> None:
    model = build("llama")
    attention = describe(model).attention[1]
    attention.o_proj = torch.nn.Sequential(attention.o_proj)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="has no output projection"):
        NamedPolicy("defensivekv", 0.3)(model)


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_projection_is_cut_into_heads(family: str) -> None:
    model = build(family)
    architecture = describe(model)
    for layer, W_o in output_projections(architecture).items():
        linear = next(
            part for name, part in architecture.attention[layer].named_children()
            if name in ("o_proj", "dense", "out_proj", "c_proj")
        )
        x = torch.randn(4, W_o.shape[1], generator=torch.Generator().manual_seed(layer))
        with torch.no_grad():
            whole = linear(x.flatten()) - (0 if linear.bias is None else linear.bias)
        parts = sum(head @ W for head, W in zip(x.double().numpy(), W_o, strict=True))
        assert relative(torch.from_numpy(parts), whole.double()) < 1e-5


def without_keys(model: PreTrainedModel) -> PreTrainedModel:
    """Set the keys of the first KV head of layer 1 to length 0."""
    model.model.layers[1].self_attn.k_proj.weight.data[:12] = 0.0
    return model


Change = Callable[[PreTrainedModel], PreTrainedModel]
NAN = float("nan")
# Name, budget, constants, change to the model, words of the error.
WRONG: dict[str, tuple[str, int, dict[str, Any], Change, str]] = {
    "a NaN among the queries of the observed layer": (
        "crystalcache", 20, {"sentence_ends": frozenset({1}), "parameters": TINY, "backend": "numpy"},
        lambda model: with_value(model, "layers.0.self_attn.q_proj", NAN), r"^q = .*nan.*: must be finite",
    ),
    "zero keys, NestedKV": ("nestedkv", 20, {}, without_keys, "k = "),
    "zero keys, KeyDiff": ("keydiff", 20, {}, without_keys, "score = 'NaN'"),
    "a pinned prompt above the budget": (
        "triattention", 20, {"pin_prompt": 21}, lambda model: model, "pin_prompt = 21: exceeds the budget of 20",
    ),
    "a NaN among the values": (
        "diverse-keydiff", 20, {}, lambda model: with_value(model, "layers.2.self_attn.v_proj", NAN), "V = ",
    ),
}


def with_value(model: PreTrainedModel, path: str, value: float) -> PreTrainedModel:
    model.get_parameter(f"model.{path}.weight").data[0, 0] = value
    return model


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("name", WRONG)
def test_it_is_named_and_the_cache_is_unusable(name: str) -> None:
    policy, budget, constants, change, words = WRONG[name]
    model = change(build("llama"))
    if policy == "triattention":
        constants = {**constants, "calibration": calibrate(model, prompt(256))}
    cache = RetainedCache(model.config)
    with policy_from_name(policy, budget, **constants)(model) as run, torch.no_grad():
        with pytest.raises(SpecError, match=words):
            model(input_ids=prompt(PROMPT), past_key_values=cache)
        assert run.retentions == ()
        with pytest.raises(SpecError, match="an unusable cache"):
            model(input_ids=prompt(1), past_key_values=cache)
    with pytest.raises(SpecError, match="an unusable cache"):
        cache.get_seq_length()


def stored_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for layer in cache.full_layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_per_token_are_those_of_the_full_attention_layers(family: str, dtype: torch.dtype) -> None:
    model: Any = build(family, dtype=dtype)
    _, cache = read_prompt(model, kvspec.FullCache(), 20)
    assert bytes_per_token(model) == stored_bytes(cache) // 20
    assert stored_bytes(cache) % 20 == 0


def test_layers_heads_width_and_dtype_count() -> None:
    model: Any = build("llama")
    config = model.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert bytes_per_token(model) == each
    assert tokens_of_size(f"{16 * each}B", each) == 16
    assert tokens_of_size(f"{16 * each - 1}B", each) == 15
    assert tokens_of_size("1MiB", each) == 2**20 // each
    assert tokens_of_size("0.5 MB", each) == 500_000 // each
    assert tokens_of_size(f" {each}B ", each) == 1


@pytest.mark.parametrize(("name", "constants"), [
    ("snapkv", {"W": 8}), ("adakv", {"W": 8}), ("tova", {}), ("streamingllm", {}), ("snapkv/layers=pyramid", {"W": 8}),
])
def test_a_prompt_keeps_what_the_memory_stores(name: str, constants: dict[str, Any]) -> None:
    model: Any = build("llama")
    each = bytes_per_token(model)
    run, cache = read_prompt(model, kvspec.policy_from_name(name, f"{20 * each + 5}B", **constants))
    plain, _ = read_prompt(model, kvspec.policy_from_name(name, 20, **constants))
    assert stored_bytes(cache) == 20 * each
    assert run.kept_tokens[0].budget == 20
    assert run.retentions[0].positions.tolist() == plain.retentions[0].positions.tolist()


def test_the_policy_of_a_memory_is_made_once() -> None:
    model, calls = build("llama"), list[object]()

    def make(budget: Budget) -> RetentionPolicy:
        calls.append(budget)
        return kvspec.policy_from_name("snapkv", budget, W=8)

    method = SizedPolicy(f"{20 * bytes_per_token(model)}B", make).on(model)
    assert (len(calls), method.budget) == (1, Budget(count=20))


def test_a_stream_has_a_memory_and_the_full_cache_ignores_it() -> None:
    model: Any = build("llama")
    size = f"{400 * bytes_per_token(model)}B"
    stream = kvspec.policy_from_name("crystalcache", size, sentence_ends=frozenset({1}), stream=True)
    assert stream.on(model).budget == Budget(count=400)
    assert kvspec.policy_from_name("fullcache", size).on(model).budget == kvspec.FullCache().on(model).budget


@pytest.mark.law("refused-before-anything-changes")
def test_a_memory_below_the_floor_is_refused() -> None:
    model: Any = build("llama")
    each = bytes_per_token(model)
    policy = kvspec.policy_from_name("snapkv", f"{20 * each}B", W=32)
    words = rf"stores 20 tokens of {each} bytes, .* at least 32: give at least {32 * each}B"
    with pytest.raises(SpecError, match=words):
        policy(model)
    assert read_prompt(model, kvspec.policy_from_name("snapkv", f"{32 * each}B", W=32))[0].kept_tokens[0].most == 32
    with pytest.raises(SpecError, match="stores 0 tokens"):
        kvspec.policy_from_name("knorm", "1B")(model)


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_counts_the_bytes_of_all_layers_without_their_weights(
    family: str, dtype: torch.dtype, tmp_path: Path,
) -> None:
    model, ids = build(family, dtype=dtype), prompt(60)
    model.save_pretrained(tmp_path)
    each, word = bytes_per_token(model), str(dtype).removeprefix("torch.")
    policy = kvspec.policy_from_name("streamingllm", f"{20 * each + 5}B")
    _, cache = read_prompt(model, policy, 60)
    assert keep(tmp_path, policy, ids[0].tolist(), word).positions.tolist() == cache.stored_positions().tolist()
    assert stored_bytes(cache) == 20 * each
    with pytest.raises(SpecError, match=f"stores 3 tokens of {each} bytes, .* at least 4: give at least {4 * each}B"):
        keep(tmp_path, kvspec.policy_from_name("streamingllm", f"{3 * each}B"), ids[0].tolist(), word)


def test_a_memory_of_a_model_that_needs_its_weights_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "read_tokens", Mock(side_effect=RuntimeError("meta")))
    with pytest.raises(SpecError, match=r"without weights \(meta\): give a share, or a number of tokens"):
        sizes.bytes_without_weights(copy.deepcopy(build("llama").config), torch.float32)


@pytest.mark.law("decided-as-the-reference")
def test_a_policy_without_tensors_accepts_a_window_in_the_first_layer(tmp_path: Path) -> None:
    model, policy, ids = build("gemma3"), kvspec.StreamingLLM(20, 2), prompt(60)
    model.save_pretrained(tmp_path)
    _, cache = read_prompt(model, policy, 60)
    assert keep(tmp_path, policy, ids[0].tolist()).positions.tolist() == cache.stored_positions().tolist()
    assert len(cache.stored_positions()) == 20


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize(("index", "words"), [
    ('{"weight_map": {"model.embed_tokens.weight": "../model.safetensors"}}', "must be a file in the folder of"),
    ('{"weight_map": {"model.embed_tokens.weight": "/model.safetensors"}}', "must be a file in the folder of"),
    ('{"weight_map": {"model.embed_tokens.weight": 1}}', "must be the index"),
    ('{"weight_map": []}', "must be the index"),
    ("[]", "must be the index"), ("[" * 100_000, "must be the index"), (
        '{"weight_map": {"model.embed_tokens.weight": "config.json"}}', "must be a safetensors file with model.embed"
    ),
])
def test_an_index_names_only_files_of_its_folder(index: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(SpecError, match=words):
        keep(folder, kvspec.policy_from_name("crystalcache", 0.5, sentence_ends=frozenset({1})), [5, 6, 7, 8])


@pytest.mark.law("refused-before-anything-changes")
def test_other_texts_and_wrong_names_are_refused_before_a_model_is_known() -> None:
    for text in ("64Mib", "64 M", "MiB", "-1MiB", "1e3B", ".5MiB", "64MiB/2", "9" * 64 + "B"):
        assert not is_size(text)
        with pytest.raises(SpecError, match="budget"):
            kvspec.policy_from_name("snapkv", text)
    with pytest.raises(SpecError, match="snapkw"):
        kvspec.policy_from_name("snapkw", "64MiB")
    with pytest.raises(SpecError, match="is a memory, whose number of tokens depends on the model: type a share"):
        kvspec.CustomPolicy(knorm(), "64MiB")
    with pytest.raises(SpecError, match="must be a number with a unit of memory"):
        tokens_of_size("64", 1)
