"""Published policies by name: the table, the constants taken from a model, and the errors."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

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
from models_integration.model.architecture import describe
from models_integration.policies.methods import parse_policy
from models_integration.policies.values import output_projections
from reference import policies
from reference.policies.names import DIVERSE, NAMES, POLICIES
from spec.errors import SpecError
from spec.parameters import ESSAY, TINY
from tests.models_integration.session.families import FAMILIES, build, prompt, relative
from tests.models_integration.session.sessions import CLASSES, PROMPT, small

pytestmark = pytest.mark.law("as-it-is-described")

PUBLISHED = tuple(name for name in POLICIES if name not in CLASSES)


def test_the_help_names_the_list_of_policies() -> None:
    text = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    assert "Comma-separated policies (`kvspec policies` lists the names)" in text
    assert "diverse-NAME" in text
    about = {"title": "t", "models": ["m"], "contexts": 1, "questions": 1, "seeds": [0], "lengths": [200]}
    every = rules_of(**about, placements=["after"], tasks=["needle"], budgets=["0.5"], controls=[],
                     policies=[name for name in NAMES if name != "fullcache"]).policies
    assert set(every) == set(NAMES) - {"fullcache"}


def test_every_name_but_chunks_and_h2o_takes_a_diverse_form() -> None:
    """Check that a policy without a diverse form raises an error: it does not keep the best single tokens.

    SimLayerKV keeps single tokens too, but it has no diverse form: its lazy layers keep fixed positions.
    """
    for name in ("streamingllm", *PUBLISHED):
        if POLICIES[name].of_model == frozenset() and name != "simlayerkv":
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
    ("streamingllm:N_sink=2:positions=renumbered", 'streamingllm(positions="renumbered", N_sink=2)'),
    ("snapkv:positions=renumbered/layers=pyramid", 'snapkv/layers=pyramid(positions="renumbered")'),
])
def test_both_forms_of_a_text_accept_the_same_constants(text: str, same: str) -> None:
    given = {"sentence_ends": frozenset({1, 2})} if "crystalcache" in text else {}
    both = map(parse_policy, (text, same))
    one, other = (policy_from_name(name, 0.3, **given, **constants) for name, constants in both)
    assert one == other
    assert one != policy_from_name(parse_policy(text)[0], 0.3, **given)
    assert policy_from_name(text, 0.3, **given) == one


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
    (BY_NAME, ("snapkv(W=16)",), {}, r"must be a name; pass constants as arguments, .*\('snapkv', constant=value\)"),
    *((NamedPolicy, (name,), {}, f"name = '{name}': has a separate class; call kvspec.policy_from_name instead")
      for name in CLASSES),
    *((NamedPolicy, (name,), {}, f"name = '{name}'") for name in ("epicache", "scissorhands", "diverse-h2o")),
    *((BY_NAME, (name,), {"positions": "relative"}, 'positions = \'relative\': must be "kept" or "renumbered"')
      for name in ("snapkv", "streamingllm", "diverse-knorm", "snapkv/layers=pyramid")),
    (BY_NAME, ("fullcache",), {"positions": "renumbered"}, "fullcache has the constants none"),
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


def as_it_is(model: PreTrainedModel) -> PreTrainedModel:
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
        "triattention", 20, {"pin_prompt": 21}, as_it_is, "pin_prompt = 21: exceeds the budget of 20",
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
