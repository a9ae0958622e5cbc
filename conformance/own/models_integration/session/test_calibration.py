"""Which rotations the archive's gate and calibration take; queries before their rotation, and the policy at work."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from conformance.methods import expected_attention
from conformance.methods import kvzip as kvzip_oracle
from conformance.methods import triattention as tri_oracle
from conformance.methods.brute import rehearsed
from conformance.own.models_integration.archive.block_mask import ROTATIONS
from conformance.own.models_integration.archive.block_mask import build as rotated
from conformance.own.models_integration.session import test_other_architectures as architectures
from conformance.own.models_integration.session.families import (
    _GQA,
    VOCABULARY,
    at_once,
    build,
    greedy,
    prepared,
    prompt,
)
from conformance.own.models_integration.session.sessions import REHEARSED, live_sets, read_prompt
from conformance.strategies.policy_inputs import Inputs
from conformance.tolerances import scores_agree
from models_integration import Published, RetainedCache
from models_integration.cache.retained_cache import storage_bytes
from models_integration.cli.app import app
from models_integration.model import rotation
from models_integration.model.architecture import describe
from models_integration.model.errors import UnknownModel
from models_integration.model.rotation import recognise
from models_integration.policies.calibration import calibrate
from models_integration.session.verbs import observe
from models_integration.studies.results import load_rows
from reference.calibration import load_calibration, save_calibration
from reference.policies import kvzip, triattention
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity

pytestmark = pytest.mark.law("as-it-is-described")


N = 60
# The capture holds float32 queries after RoPE; turning them back errs by a few of its 6e-8.
BOUND = 2e-6


def hooked(model: Any, ids: Tensor) -> list[Tensor]:
    """Each layer's queries (H, n, d) as they enter the rotation: q_proj's output, or its norm's where there is one."""
    found: list[Tensor] = []

    def note(module: Any, given: Any, output: Tensor) -> None:
        found.append(output.view(1, N, -1, 12)[0].transpose(0, 1))

    handles = []
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        handles.append(getattr(attention, "q_norm", attention.q_proj).register_forward_hook(note))
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.spec("TA-STATISTICS")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_statistics_are_those_of_queries_before_their_rotation(family: str) -> None:
    """MUST be taken after a norm of queries, where the model has one."""
    model, ids = build(family), prompt(N)
    found = calibrate(model, ids)
    for at, q in enumerate(hooked(model, ids)):
        bands = torch.complex(q[:, :, :6].double(), q[:, :, 6:].double())
        assert np.abs(found.mean[at] - q.double().mean(dim=1).numpy()).max() < BOUND * float(q.abs().max())
        assert np.abs(found.magnitude[at] - bands.abs().mean(dim=1).numpy()).max() < BOUND * float(q.abs().max())


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("name", ["triattention", "triattention-by-layer-and-head", "diverse-triattention-by-head"])
def test_a_file_serves_its_own_model_and_rotation_only(name: str, tmp_path: Path) -> None:
    """In a session by name: refused before anything is read, also for the same weights under another rotation."""
    model, other, turned, trained = build("llama"), build("qwen2"), build("llama"), build("llama")
    with torch.no_grad():
        next(trained.parameters())[:] += 1.0
    save_calibration(calibrate(model, prompt(N)), tmp_path / "mine.npz")
    turned.model.rotary_emb.inv_freq[1] *= 1.5
    chosen = Published(name, 20, calibration=tmp_path / "mine.npz")
    with chosen(model) as run:
        greedy(model, prompt(N), 4)
    assert run.cache is not None
    refused = ((other, "was made for a different model"), (trained, "was made for a different model"),
               (turned, "made with different rotary frequencies"))
    for wrong, words in refused:
        with pytest.raises(SpecError, match=words) as caught:
            chosen(wrong)
        assert caught.value.argument == "calibration"


@pytest.mark.spec("TA-CALIBRATION")
def test_the_command_makes_a_file_that_compare_takes(tmp_path: Path) -> None:
    text, file, out = tmp_path / "text.txt", tmp_path / "mine.npz", tmp_path / "results"
    text.write_text("The chair thanked the members. The special magic number is 1516.", encoding="utf-8")
    runner = CliRunner()
    made = runner.invoke(app, ["calibrate", str(text), "--out", str(file)])
    assert made.exit_code == 0, made.output
    digest = load_calibration(file).digest
    assert digest in made.output
    policies = "triattention,diverse-triattention-by-head"
    asked = ["--policies", policies, "--budgets", "160", "--tasks", "needle", "--samples", "1", "--length", "400"]
    found = runner.invoke(app, ["compare", *asked, "--no-controls", "--calibration", str(file), "--out", str(out)])
    assert found.exit_code == 0, found.output
    (row,) = load_rows(out / "study.jsonl")
    assert [cell["policy"] for cell in row["cells"]] == policies.split(",")
    assert row["calibration"] == {"digest": digest, "controlled": False}
    missing = runner.invoke(app, ["compare", *asked, "--no-controls", "--out", str(out)])
    assert "`kvspec calibrate " in str(missing.exception)


@pytest.mark.spec("TA-STATISTICS")
@pytest.mark.parametrize("shape", [(2, 5), (1, 0), (5,)])
def test_ids_that_are_not_one_text_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError) as caught:
        calibrate(build("llama"), torch.ones(shape, dtype=torch.int64))
    assert caught.value.argument == "input_ids"


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotations_of_fixed_frequencies_are_served(kind: str) -> None:
    """By both policies that take a rotation off; with YaRN's factor."""
    model, ids = rotated("Llama", rope_parameters=dict(ROTATIONS[kind])), prompt(N)
    found = calibrate(model, ids)
    assert (found.identity.factor != 1) == (kind == "yarn")
    attention: Any = model.model.layers[1].self_attn
    queries: list[Tensor] = []
    handle = attention.q_proj.register_forward_hook(lambda module, given, output: queries.append(output))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    expected = queries[0].view(N, 4, -1).double().mean(dim=0).numpy()
    assert np.abs(found.mean[1] - expected).max() < BOUND * float(queries[0].abs().max())
    for name, constants in (("triattention", {"calibration": found}), ("expected-attention", {})):
        with Published(name, 20, **constants)(model) as run:
            greedy(model, ids, 2)
        assert run.cache is not None


@pytest.mark.spec("TA-CALIBRATION", "PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_refused(kind: str) -> None:
    model = rotated("Llama", rope_parameters=dict(ROTATIONS[kind]))
    for refused in (lambda: calibrate(model, prompt(N)), lambda: Published("expected-attention", 20)(model)):
        with pytest.raises(SpecError, match=rf"change with the length \({kind}\)"):
            refused()


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("PO-EXPECTED-ATTENTION", "TA-POLICY")
@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "gemma3"])
def test_queries_are_rotated_back_whatever_the_code_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By brute force: gpt-oss has no `rotate_half` and YaRN's factor, LFM2 a state, Gemma 3 a wrapper."""
    model, ids, kept = architectures.build(name), prompt(N), dict[str, Any]()
    ids = ids.where(ids != architectures.IMAGE, 9)
    attention = describe(model).attention
    module, bare = sys.modules[type(attention[max(attention)]).__module__], list[Any]()
    stock: Any = module.apply_rotary_pos_emb

    def noted(q: Tensor, *rest: Any) -> Any:
        bare.append(q[0].numpy())
        return stock(q, *rest)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", noted)
    views = observe(model, ids, needs=Needs("all", None, values=True)).prompt(0, Granularity.HEAD).layers
    monkeypatch.undo()
    config = model.config.get_text_config()
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    inv_freq, factor = 1 / rope["rope_theta"] ** (np.arange(0, 8, 2) / 8), 1.0
    if rope["rope_type"] == "yarn":
        found, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        inv_freq = found.double().numpy()
    inputs = Inputs([*views.values()], inv_freq, [], ids[0].numpy(), factor)
    kept["expected-attention"] = expected_attention.kept(inputs, 20, 4, 5)
    layers = [replace(view, q=q) for view, q in zip(views.values(), bare[-len(views) :], strict=True)]
    brute = tri_oracle.of_prompt("layer and head")
    kept["triattention-by-layer-and-head"] = brute(replace(inputs, layers=layers), 20, 0)
    learned: dict[str, Any] = {"pin_prompt": 0, "calibration": calibrate(model, ids)}
    future: dict[str, Any] = {"N_future": 5}
    for (policy, expected), constants in zip(kept.items(), (future, learned), strict=True):
        cache = RetainedCache(config)
        with Published(policy, 20, **constants)(model):
            at_once(model, ids, cache)
        assert [own for heads in live_sets(cache).values() for own in heads] == expected


@pytest.mark.spec("PO-HEAD-SCORES", "PO-KVZIP-HEADS")
@pytest.mark.parametrize(("make", "words"), [
    (lambda: rotated("Cohere"), "rotates neighbouring channels"),
    (partial(prepared, "SmolLM3", **_GQA, no_rope_layers=[1, 1, 0]), "layer without rotary positions"),
    (lambda: build("gpt_neox"), "must rotate all 12 channels of a head, but rotates 6"),
])
def test_head_scores_need_no_one_rotation(make: Callable[[], Any], words: str, tmp_path: Path) -> None:
    """They are of the model and its rotations all the same, and serve nothing that turns queries back."""
    model, other, ids = make(), make(), prompt(N, seed=9)
    for refused in (lambda: calibrate(model, ids), lambda: Published("expected-attention", 20)(model)):
        with pytest.raises(SpecError, match=words):
            refused()
    save_calibration(calibrate(model, ids, template=REHEARSED["template"]), tmp_path / "mine.npz")
    chosen = Published("kvzip-heads", 0.5, calibration=tmp_path / "mine.npz", N_sink=2, N_recent=4)
    _, cache = read_prompt(model, chosen, 100)
    assert len({len(own) for heads in live_sets(cache).values() for own in heads}) > 1
    turned = next(buffer for name, buffer in other.named_buffers() if name.endswith("inv_freq"))
    turned[1] *= 1.5
    for wrong in (other, build("llama")):
        with pytest.raises(SpecError, match="was made for a different model"):
            chosen(wrong)
    taken = load_calibration(tmp_path / "mine.npz")
    with pytest.raises(SpecError, match="has head scores alone"):
        triattention(taken, taken.identity)


@pytest.mark.spec("PO-HEAD-SCORES")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_head_scores_are_the_largest_of_a_rehearsal(family: str) -> None:
    """Of each head, by brute force over what the model attends with while it repeats the text."""
    model, ids = build(family), prompt(N, seed=9)
    found = calibrate(model, ids, template=REHEARSED["template"])
    needs = kvzip(template=REHEARSED["template"]).scorer.needs
    views = observe(model, ids, needs=needs).prompt(0, Granularity.HEAD).layers
    brute = [kvzip_oracle.scores(rehearsed(view), 4) for view in views.values()]
    assert found.head_scores is not None
    assert all(map(scores_agree, found.head_scores, [kvzip_oracle.head_means([rows]) for rows in brute]))
    assert calibrate(model, ids[:, :4], template=REHEARSED["template"]).head_scores is None
    assert calibrate(model, ids).head_scores is None


@pytest.mark.law("freed-memory")
@pytest.mark.spec("PO-KVZIP-HEADS")
def test_full_heads_hold_all_and_the_others_a_window() -> None:
    """At half of 200 tokens in six heads: two full heads, and 200 tokens for four others."""
    model, n = build("llama"), 200
    taken = calibrate(model, prompt(N, seed=9), template=REHEARSED["template"])
    assert taken.head_scores is not None
    policy = Published("kvzip-heads", 0.5, calibration=taken, N_sink=2, N_recent=4)
    run, cache = read_prompt(model, policy, n)
    best = np.argsort(-taken.head_scores.ravel(), kind="stable")[:2]
    sets = [list(own) for heads in live_sets(cache).values() for own in heads]
    for g, own in enumerate(sets):
        assert own == (list(range(n)) if g in best else [0, 1, *range(n - 48, n)])
    full = 2 * 6 * n * 12 * 4
    assert run.bytes_freed == full - storage_bytes(cache.layers) == full / 2


_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}
_WIDTH: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48}


def growing_queries(beta: float = 0.1) -> Any:
    parameters = {**_YARN, "llama_4_scaling_beta": beta}
    return prepared("Ministral3", **_GQA, head_dim=12, rope_parameters=parameters)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "MPT": (partial(prepared, "Mpt", vocab_size=VOCABULARY, d_model=48, n_heads=4, n_layers=3), "ALiBi"),
    "Bloom": (partial(prepared, "Bloom", **_WIDTH, n_layer=3, n_head=4), "ALiBi"),
    "Falcon": (partial(prepared, "Falcon", **_WIDTH, num_hidden_layers=3, num_attention_heads=4, alibi=True), "ALiBi"),
    "one layer": (partial(prepared, "Bloom", **_WIDTH, n_layer=1, n_head=4), "ALiBi"),
    "Ministral3": (growing_queries, "queries are scaled with the position"),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_a_turned_key_cannot_follow_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UnknownModel, match=words):
        recognise(make())


@pytest.mark.law("refused-before-anything-changes")
def test_growing_queries_are_seen_past_the_original_length_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the configuration calls them."""
    monkeypatch.setattr(rotation, "_originals", lambda *_: [64])
    with pytest.raises(UnknownModel, match="into the keys at position 128"):
        recognise(growing_queries())


def test_without_them_the_same_model_is_served() -> None:
    assert all(layer.slot == "keys" for layer in recognise(growing_queries(0.0)).layers)


def test_a_model_in_which_order_is_nowhere_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """No positions at all: nothing has to be turned."""
    model = build("llama")
    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    assert all(layer.slot is None for layer in recognise(model).layers)
