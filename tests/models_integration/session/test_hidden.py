"""Hidden states of a session: the input of each layer's attention, and networks and gates from safetensors files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvspec
from conformance.methods import fast_kvzip
from conformance.methods.kvzap import rows
from conformance.methods.policies import top
from conformance.strategies.policy_inputs import Inputs, random_gates, random_networks
from models_integration import CustomPolicy, NamedPolicy, RetainedCache
from models_integration.attention.capture import AttentionInputs, Recorder
from models_integration.attention.hidden import hidden_of
from models_integration.engines.keep import keep
from models_integration.engines.vllm.arguments import RequestPolicy
from models_integration.model.architecture import describe
from models_integration.policies.networks import read_gates, read_networks
from models_integration.session.verbs import EVERYTHING
from reference.calibration import Gates, Networks, load_calibration, save_calibration
from reference.policies import full_cache
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import LayerView, Needs
from spec.retention import Granularity
from tests.models_integration.session.families import at_once, build, prompt
from tests.models_integration.session.sessions import (
    Looking,
    batch,
    check_continuation,
    live_sets,
    method_of,
    prompts,
    shown,
)

pytestmark = pytest.mark.law("decided-as-the-reference")

N = 48
HIDDEN = Needs("all", 0, hidden=True)


def normed(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Return the output (rows, n, width) of the input norm of each layer."""
    states = list[Tensor]()
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda module, given, output: states.append(output))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return states


def written(path: Path, given: Networks, dtype: torch.dtype = torch.float32) -> Path:
    """Write networks under the names of kvpress's KVzapModel."""
    names = {"W_2": "weight", "b_2": "bias"} if given.W_1 is None else {
        "W_1": "0.weight", "b_1": "0.bias", "W_2": "2.weight", "b_2": "2.bias",
    }
    save_file({
        f"layers.{at}.{names[key]}": torch.tensor(x[at], dtype=dtype)
        for key, x in given.arrays.items() for at in range(len(x))
    }, path)
    return path


def of_brute(states: list[Tensor], given: Networks, B: int) -> list[list[int]]:
    """Return the kept sets by brute force, from the states of one row of each layer."""
    H_kv = given.W_2.shape[1]
    views = [
        LayerView(None, np.zeros((H_kv, len(x), 1)), None, 1.0, None, hidden=x.double().numpy()) for x in states
    ]
    inputs = Inputs(views, np.ones(1), [], np.zeros(len(states[0]), np.int64), networks=given)
    return [top(row, B) for row in rows(inputs, B)]


@pytest.mark.spec("PO-KVZAP")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_hidden_states_are_the_input_of_the_attention(family: str) -> None:
    """Compare with the output of the input norm, for one forward pass and for a prompt in pieces."""
    model: Any = build(family)
    states = normed(model, prompt(N))
    whole = shown(model, prompt(N), HIDDEN)
    assert all(np.array_equal(np.asarray(view.hidden), states[at][0].numpy()) for at, view in whole.layers.items())
    scorer, cache = Looking(HIDDEN), RetainedCache(model.config)
    with method_of(scorer)(model) as run, run.prompt():
        for piece in torch.split(prompt(N), 20, dim=1):
            at_once(model, piece, cache)
    for at, view in scorer.shown[-1].layers.items():
        assert np.abs(view.hidden - states[at][0].numpy()).max() < 1e-5
    assert all(hidden_of(module) is None for module in model.modules())


@pytest.mark.spec("PO-KVZAP")
def test_rows_of_a_padded_batch_have_the_states_of_their_tokens() -> None:
    model: Any = build("llama")
    given, B = random_networks(3, 2, model.config.hidden_size, 6), 12
    calibration = with_networks(model, given)
    ids, mask = batch(prompts())
    with NamedPolicy("kvzap", B, calibration=calibration)(model) as run:
        at_once(model, ids, RetainedCache(model.config), attention_mask=mask)
    for row, text in enumerate(prompts()):
        kept = [run.retentions[row].group(g).tolist() for g in range(6)]
        assert kept == of_brute([x[0] for x in normed(model, text)], given, B)


def with_networks(model: Any, given: Networks) -> Any:
    """Return a calibration with these networks, for this model."""
    return replace(kvspec.calibrate(model, prompt(256)), networks=given)


@pytest.mark.spec("PO-KVZAP")
@pytest.mark.parametrize("m", [None, 6])
def test_a_safetensors_file_decides_as_the_brute_force(m: int | None, tmp_path: Path) -> None:
    """Read both forms of the file, and their conversion. Eviction equals masking."""
    model: Any = build("llama")
    given, B = random_networks(3, 2, model.config.hidden_size, m), 15
    file = written(tmp_path / "model.safetensors", given, torch.float64)
    save_calibration(read_networks(file, model), tmp_path / "own.npz")
    expected = of_brute([x[0] for x in normed(model, prompt(N))], given, B)
    assert len(set(map(tuple, expected))) == 6
    for calibration in (str(file), file, tmp_path / "own.npz", read_networks(file, model)):
        cache = RetainedCache(model.config)
        with kvspec.policy_from_name("kvzap", B, calibration=calibration)(model):
            at_once(model, prompt(N), cache)
        assert [own for heads in live_sets(cache).values() for own in heads] == expected
    check_continuation(model, NamedPolicy("kvzap", B, calibration=file))
    half = written(tmp_path / "half.safetensors", given, torch.bfloat16)
    with kvspec.policy_from_name("kvzap", B, calibration=half)(model) as run:
        at_once(model, prompt(N), RetainedCache(model.config))
    assert len(run.retentions[0].positions) == 6 * B
    with pytest.raises(SpecError, match=r"pass calibration='model\.safetensors' to policy_from_name"):
        load_calibration(file)


def written_gates(path: Path, given: Gates) -> Path:
    """Write gates under the names of docs/guide/kvpress.md, with the shapes of kvpress's FastKVzipGate."""
    L, H, r, width = given.W_q.shape
    H_kv = given.W_k.shape[1]
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "W_q": ("q_proj.weight", (H * r, width)), "b_q": ("q_proj.bias", (H * r,)),
        "base": ("k_base", (H_kv, 1, -1, r)),
        "W_k": ("k_proj.weight", (H_kv * r, width)), "norm_q": ("q_norm.weight", (r,)),
        "norm_k": ("k_norm.weight", (r,)), "bias": ("b", (H_kv, 1, H // H_kv)),
    }
    save_file({
        f"gates.{at}.{name}": torch.tensor(given.arrays[key][at]).reshape(shape)
        for key, (name, shape) in shapes.items() for at in range(L)
    }, path)
    return path


@pytest.mark.spec("PO-FAST-KVZIP")
def test_a_file_of_gates_decides_as_the_brute_force(tmp_path: Path) -> None:
    """Read the file and its conversion. Eviction equals masking."""
    model: Any = build("llama")
    given, B = random_gates(3, 2, model.config.hidden_size), 15
    constants: dict[str, Any] = {"N_sink": 2, "N_recent": 3}
    file = written_gates(tmp_path / "gates.safetensors", given)
    save_calibration(read_gates(file, model), tmp_path / "own.npz")
    views = [
        LayerView(np.zeros((4, N, 1)), np.zeros((2, N, 1)), None, 1.0, None, hidden=x[0].double().numpy())
        for x in normed(model, prompt(N))
    ]
    inputs = Inputs(views, np.ones(1), [], np.zeros(N, np.int64), gates=given)
    expected = fast_kvzip.kept(inputs, B, **constants)
    assert len(set(map(len, expected))) > 1
    for calibration in (file, tmp_path / "own.npz"):
        cache = RetainedCache(model.config)
        with kvspec.policy_from_name("fast-kvzip", B, calibration=calibration, **constants)(model):
            at_once(model, prompt(N), cache)
        assert [own for heads in live_sets(cache).values() for own in heads] == expected
    check_continuation(model, NamedPolicy("fast-kvzip", B, calibration=file, **constants))


@pytest.mark.spec("PO-KVZAP", "PO-THRESHOLD")
def test_the_threshold_of_the_paper_keeps_what_exceeds_it(tmp_path: Path) -> None:
    model: Any = build("llama")
    given = random_networks(3, 2, model.config.hidden_size, 6)
    file = written(tmp_path / "model.safetensors", given, torch.float64)
    with kvspec.policy_from_name("kvzap/threshold=0.5/recent=4", 1.0, calibration=file)(model) as run:
        at_once(model, prompt(N), RetainedCache(model.config))
    hidden = shown(model, prompt(N), HIDDEN).layers
    views = [replace(view, k=np.zeros((2, N, 1))) for view in hidden.values()]
    scores = rows(Inputs(views, np.ones(1), [], np.zeros(N, np.int64), networks=given), N)
    for g, row in enumerate(scores):
        kept = [i for i, x in enumerate(row) if i >= N - 4 or (x is not None and x > 0.5)]
        assert run.retentions[0].group(g).tolist() == kept
        assert 4 < len(kept) < N


@pytest.mark.law("refused-before-anything-changes")
def test_missing_hidden_states_are_refused(tmp_path: Path) -> None:
    """Check that turns, blocks, steps, observations without hidden states, `kvspec keep` and vLLM raise an error."""
    model: Any = build("llama")
    networks = random_networks(3, 2, model.config.hidden_size, 6)
    policy = NamedPolicy("kvzap", 0.5, calibration=with_networks(model, networks))
    cache = RetainedCache(model.config)
    with policy(model) as run:
        at_once(model, prompt(N), cache)
        with pytest.raises(SpecError, match="policy = 'kvzap': evicts from the first prompt only"):
            at_once(model, prompt(7), cache)
        with run.reading():
            at_once(model, prompt(7), cache)
    with pytest.raises(SpecError, match="evicts from one whole prompt only"):
        kvspec.prefill(model, policy, prompt(N), block=16)
    with pytest.raises(SpecError, match=r"lacks tensors that the policy needs; .*hidden=True"):
        kvspec.decide(policy, kvspec.observe(model, prompt(N)))
    observed = kvspec.observe(model, prompt(N), needs=replace(EVERYTHING, hidden=True))
    assert kvspec.decide(policy, observed).retentions[0].positions.tolist() == run.retentions[0].positions.tolist()
    with pytest.raises(SpecError, match=r"/every=4: .*uses hidden states, .*leave the cadence out"):
        NamedPolicy("kvzap/every=4", 0.5, calibration=policy.constants["calibration"]).on(model)
    model.save_pretrained(tmp_path / "model")
    probe = replace(full_cache(), scorer=Looking(Needs("observed", 0, hidden=True)), granularity=Granularity.MODEL)
    with pytest.raises(SpecError, match="keys and hidden states of observed layers"):
        keep(tmp_path / "model", CustomPolicy(probe, parse_budget(1.0)), list(range(3, 40)))
    request = RequestPolicy("kvzap", {}, parse_budget(0.5), "0.5", policy.on(model).policy)
    assert request.unserved == "kvzap reads hidden states, and vLLM shows a policy only queries, keys and values"


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_that_shows_no_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the refusal when the policy is applied, and later if the attention shows no hidden states any more."""
    words, seen = "the attention shows no hidden states", build("llama")
    module = describe(seen).attention[0]
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(SpecError, match=words):
        Recorder(HIDDEN).record(module, AttentionInputs(0, tensor, tensor, tensor, None, None, {}))
    monkeypatch.setattr("models_integration.attention.capture.hidden_of", lambda module: None)
    with pytest.raises(SpecError, match=words):
        method_of(Looking(HIDDEN))(seen)
    assert shown(seen, prompt(N), Needs("all")).seen == N


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("name", "content", "words"), [
    ("fast-kvzip", {"gates.1.b": None}, "lacks gates.1.b: pass the gates.safetensors of Fast KVzip for a model of 3"),
    ("fast-kvzip", {"gates.3.b": torch.ones(2)}, "has also gates.3.b"),
    ("fast-kvzip", {f"gates.{at}.b": torch.ones(2, 1, 3) for at in range(3)},
     "shapes or numbers are wrong: .*must have the shapes"),
    ("fast-kvzip", {"gates.2.k_base": torch.ones(5)}, "shapes or numbers are wrong"),
    ("fast-kvzip", {"gates.0.b": torch.full((2, 1, 2), torch.nan)}, "must be finite"),
    ("fast-kvzip", {f"gates.{at}.{name}": torch.ones(rows, 5) for at in range(3) for name, rows in (
        ("q_proj.weight", 16), ("k_proj.weight", 8))}, "has networks from 5 channels to 2 KV heads; the model has"),
    ("kvzap", {"layers.1.bias": None}, "lacks layers.1.bias: pass the model.safetensors of KVzap for"),
    ("kvzap", {"layers.3.bias": torch.ones(2)}, "has also layers.3.bias"),
    ("kvzap", {f"layers.{at}.weight": torch.ones(2, 5) for at in range(3)}, "from 5 channels"),
    ("kvzap", {"layers.2.weight": torch.ones(2, 5)}, "shapes or numbers are wrong"),
    ("kvzap", {"layers.2.bias": torch.full((2,), torch.nan)}, "shapes or numbers are wrong: .*must be finite"),
    *(("kvzap", content, r"must be a \.safetensors file") for content in (None, b"", b"PK pickle")),
])
def test_a_file_that_does_not_fit_the_model_is_refused(
    name: str, content: dict[str, Tensor | None] | bytes | None, words: str, tmp_path: Path,
) -> None:
    model: Any = build("llama")
    file, width = tmp_path / "model.safetensors", model.config.hidden_size
    if isinstance(content, dict):
        if name == "kvzap":
            written(file, random_networks(3, 2, width, None))
        else:
            written_gates(file, random_gates(3, 2, width))
        save_file({key: x for key, x in (load_file(file) | content).items() if x is not None}, file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=words):
        NamedPolicy(name, 0.5, calibration=file).on(model)
