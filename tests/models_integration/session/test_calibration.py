"""Calibrations and hidden states: statistics of queries, head scores, networks, gates, and files of other projects.

Such files are read without executing code, and give the same decisions as kvspec's files.
"""

import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import kvspec
from conformance.methods import expected_attention, fast_kvzip
from conformance.methods import kvzip as kvzip_oracle
from conformance.methods import triattention as tri_oracle
from conformance.methods.brute import rehearsed
from conformance.methods.kvzap import rows as scores_of_networks
from conformance.methods.policies import top
from conformance.strategies.policy_inputs import Inputs, random_gates, random_networks
from conformance.tolerances import scores_agree
from experiments.studies.results import load_rows
from kvspec.cli.app import app
from models_integration import CustomPolicy, NamedPolicy, RetainedCache, policy_from_name
from models_integration.attention.capture import AttentionInputs, Recorder
from models_integration.attention.hidden import hidden_of
from models_integration.cache.retained_cache import storage_bytes
from models_integration.engines.keep import keep
from models_integration.engines.vllm.arguments import RequestPolicy
from models_integration.model.architecture import describe
from models_integration.pocket import load_pocket
from models_integration.policies.calibration import (
    PARTS,
    calibrate,
    read_head_pattern,
    read_statistics,
    read_tensors,
    write_statistics,
)
from models_integration.policies.networks import read_gates, read_networks
from models_integration.session.verbs import EVERYTHING, observe
from reference.calibration import Gates, Networks, load_calibration, save_calibration
from reference.policies import full_cache, kvzip, triattention
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import LayerView, Needs
from spec.retention import Granularity
from tests.models_integration.archive.block_mask import ROTATIONS
from tests.models_integration.archive.block_mask import build as rotated
from tests.models_integration.session import test_other_architectures as architectures
from tests.models_integration.session.families import _GQA, at_once, build, greedy, prepared, prompt
from tests.models_integration.session.sessions import (
    REHEARSED,
    Looking,
    batch,
    check_continuation,
    live_sets,
    method_of,
    outputs_of,
    prompts,
    read_prompt,
    shown,
)

pytestmark = pytest.mark.law("as-it-is-described")


N = 60
LEAST = 256  # Smallest number of tokens of a calibration.
# The capture holds float32 queries after RoPE. Removing the rotation adds an error of a few times 6e-8.
BOUND = 2e-6


def hooked(model: Any, ids: Tensor) -> list[Tensor]:
    """Return each layer's queries (H, n, d) before the rotation, after the norm of the queries if there is one."""
    layers = [layer.self_attn for layer in model.model.layers]
    with outputs_of(getattr(one, "q_norm", one.q_proj) for one in layers) as seen, torch.no_grad():
        model(input_ids=ids)
    return [q.view(ids.shape[1], -1, one.head_dim).transpose(0, 1) for q, one in zip(seen, layers, strict=True)]


@pytest.mark.spec("TA-STATISTICS")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_statistics_are_those_of_queries_before_their_rotation(family: str) -> None:
    """Check statistics after the norm of the queries, as the specification requires for models with such a norm."""
    model, ids = build(family), prompt(LEAST)
    actual = calibrate(model, ids)
    for at, q in enumerate(hooked(model, ids)):
        bands = torch.complex(q[:, :, :6].double(), q[:, :, 6:].double())
        assert np.abs(actual.mean[at] - q.double().mean(dim=1).numpy()).max() < BOUND * float(q.abs().max())
        assert np.abs(actual.magnitude[at] - bands.abs().mean(dim=1).numpy()).max() < BOUND * float(q.abs().max())


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("name", ["triattention", "triattention-by-layer-and-head", "diverse-triattention-by-head"])
def test_a_file_serves_its_own_model_and_rotation_only(name: str, tmp_path: Path) -> None:
    """Check that a different model, and the same weights with a different rotation, raise an error."""
    model, other, turned, trained = build("llama"), build("qwen2"), build("llama"), build("llama")
    with torch.no_grad():
        next(trained.parameters())[:] += 1.0
    save_calibration(calibrate(model, prompt(LEAST)), tmp_path / "mine.npz")
    turned.model.rotary_emb.inv_freq[1] *= 1.5
    chosen = NamedPolicy(name, 20, calibration=tmp_path / "mine.npz")
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
def test_the_command_makes_and_converts_files_that_compare_takes(tmp_path: Path) -> None:
    text, theirs, file, out = (tmp_path / name for name in ("text.txt", "stats.pt", "mine.npz", "results"))
    text.write_text("The chair thanked the members. The special magic number is 1516. " * 20, encoding="utf-8")
    runner = CliRunner()
    for source, written in ((text, file), (text, theirs), (theirs, file)):
        result = runner.invoke(app, ["calibrate", str(source), "--out", str(written)])
        assert result.exit_code == 0, result.output
        assert written == theirs or load_calibration(file).digest in result.output
    stats, taken = torch.load(theirs, weights_only=True)["stats"], load_calibration(file)
    assert np.array_equal(taken.magnitude[0, 1], stats["layer00_head01"]["q_abs_mean"].double().numpy())
    with pytest.raises(SpecError, match=r"kvspec calibrate stats.pt --model NAME"):
        load_calibration(theirs)
    wrong = runner.invoke(app, ["calibrate", str(theirs), "--threshold", "0.5", "--out", str(file)])
    assert "can be used only with a head pattern" in str(wrong.exception)
    policies = "triattention,diverse-triattention-by-head"
    asked = ["--policies", policies, "--budgets", "160", "--tasks", "needle", "--samples", "1", "--length", "400"]
    actual = runner.invoke(app, ["compare", *asked, "--no-controls", "--calibration", str(file), "--out", str(out)])
    assert actual.exit_code == 0, actual.output
    (row,) = load_rows(out / "study.jsonl")
    assert [cell["policy"] for cell in row["cells"]] == policies.split(",")
    assert row["calibration"] == {"digest": taken.digest, "controlled": False}
    missing = runner.invoke(app, ["compare", *asked, "--no-controls", "--out", str(out)])
    assert "`kvspec calibrate " in str(missing.exception)


@pytest.mark.spec("TA-STATISTICS")
@pytest.mark.parametrize("shape", [(2, 500), (1, 0), (500,), (1, LEAST - 1)])
def test_ids_that_are_not_one_text_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError) as caught:
        calibrate(build("llama"), torch.ones(shape, dtype=torch.int64))
    assert caught.value.argument == "input_ids"


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotations_of_fixed_frequencies_are_served(kind: str) -> None:
    """Check both policies that remove a rotation, including YaRN's factor."""
    model, ids = rotated("Llama", rope_parameters=dict(ROTATIONS[kind])), prompt(LEAST)
    actual = calibrate(model, ids)
    assert (actual.identity.factor != 1) == (kind == "yarn")
    for at, q in enumerate(hooked(model, ids)):
        assert np.abs(actual.mean[at] - q.double().mean(dim=1).numpy()).max() < BOUND * float(q.abs().max())
    served: dict[str, Any] = {"calibration": actual}
    for name, constants in (("triattention", served), ("expected-attention", {})):
        with NamedPolicy(name, 20, **constants, backend="numpy")(model) as run:
            greedy(model, ids[:, :N], 2)
        assert run.cache is not None


@pytest.mark.spec("TA-CALIBRATION", "PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_refused(kind: str) -> None:
    model = rotated("Llama", rope_parameters=dict(ROTATIONS[kind]))
    for refused in (lambda: calibrate(model, prompt(LEAST)), lambda: NamedPolicy("expected-attention", 20)(model)):
        with pytest.raises(SpecError, match=rf"change with the length \({kind}\)"):
            refused()


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("PO-EXPECTED-ATTENTION", "TA-POLICY")
@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "gemma3"])
def test_queries_are_rotated_back_whatever_the_code_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has no `rotate_half` and uses YaRN's factor. LFM2 has a state. Gemma 3 has a wrapper."""
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
        actual, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        inv_freq = actual.double().numpy()
    inputs = Inputs([*views.values()], inv_freq, [], ids[0].numpy(), factor)
    kept["expected-attention"] = expected_attention.kept(inputs, 20, 4, 5)
    layers = [replace(view, q=q) for view, q in zip(views.values(), bare[-len(views) :], strict=True)]
    brute = tri_oracle.of_prompt("layer and head")
    kept["triattention-by-layer-and-head"] = brute(replace(inputs, layers=layers), 20, 0)
    # Brute force is slow, so the calibration is short.
    monkeypatch.setattr("models_integration.policies.calibration.LEAST_TOKENS", N)
    learned: dict[str, Any] = {"pin_prompt": 0, "calibration": calibrate(model, ids)}
    future: dict[str, Any] = {"N_future": 5}
    for (policy, expected), constants in zip(kept.items(), (future, learned), strict=True):
        cache = RetainedCache(config)
        with NamedPolicy(policy, 20, **constants)(model):
            at_once(model, ids, cache)
        assert [positions for heads in live_sets(cache).values() for positions in heads] == expected


@pytest.mark.spec("PO-HEAD-SCORES", "PO-KVZIP-HEADS")
@pytest.mark.parametrize(("make", "words"), [
    (lambda: rotated("Cohere"), "rotates neighbouring channels"),
    (partial(prepared, "SmolLM3", **_GQA, no_rope_layers=[1, 1, 0]), "layer without rotary positions"),
    (lambda: build("gpt_neox"), "must rotate all 12 channels of a head, but rotates 6"),
])
def test_head_scores_need_no_one_rotation(make: Callable[[], Any], words: str, tmp_path: Path) -> None:
    """Check head scores of models whose rotations other policies cannot remove."""
    model, other, ids = make(), make(), prompt(LEAST, seed=9)
    for refused in (lambda: calibrate(model, ids), lambda: NamedPolicy("expected-attention", 20)(model)):
        with pytest.raises(SpecError, match=words):
            refused()
    save_calibration(calibrate(model, ids, template=REHEARSED["template"]), tmp_path / "mine.npz")
    chosen = NamedPolicy("kvzip-heads", 0.5, calibration=tmp_path / "mine.npz", N_sink=2, N_recent=4)
    _, cache = read_prompt(model, chosen, 100)
    assert len({len(kept) for heads in live_sets(cache).values() for kept in heads}) > 1
    turned = next(buffer for name, buffer in other.named_buffers() if name.endswith("inv_freq"))
    turned[1] *= 1.5
    for wrong in (other, build("llama")):
        with pytest.raises(SpecError, match="was made for a different model"):
            chosen(wrong)
    taken = load_calibration(tmp_path / "mine.npz")
    with pytest.raises(SpecError, match="has no query statistics"):
        triattention(taken, taken.identity)


@pytest.mark.spec("PO-HEAD-SCORES")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_head_scores_are_the_largest_of_a_rehearsal(family: str) -> None:
    """Compare the scores of each head with brute force over the attention of the model while it repeats the text."""
    model, ids = build(family), prompt(LEAST, seed=9)
    actual = calibrate(model, ids, template=REHEARSED["template"])
    needs = kvzip(template=REHEARSED["template"]).scorer.needs
    views = observe(model, ids, needs=needs).prompt(0, Granularity.HEAD).layers
    brute = [kvzip_oracle.scores(rehearsed(view), 4) for view in views.values()]
    assert actual.head_scores is not None
    assert all(map(scores_agree, actual.head_scores, [kvzip_oracle.head_means([rows]) for rows in brute]))
    assert calibrate(model, ids).head_scores is None


def check_full_heads(model: Any, calibration: Any, full: Sequence[int]) -> None:
    """Check a budget of half of 200 tokens: two of six heads keep all tokens, and four heads share 200 tokens."""
    n = 200
    policy = NamedPolicy("kvzip-heads", 0.5, calibration=calibration, N_sink=2, N_recent=4)
    run, cache = read_prompt(model, policy, n)
    sets = [list(kept) for heads in live_sets(cache).values() for kept in heads]
    assert sets == [list(range(n)) if g in full else [0, 1, *range(n - 48, n)] for g in range(6)]
    assert run.bytes_freed == 2 * 6 * n * 12 * 4 - storage_bytes(cache.layers) == 6 * n * 12 * 4


@pytest.mark.law("freed-memory")
@pytest.mark.spec("PO-KVZIP-HEADS")
def test_full_heads_hold_all_and_the_others_a_window() -> None:
    model = build("llama")
    taken = calibrate(model, prompt(LEAST, seed=9), template=REHEARSED["template"])
    assert taken.head_scores is not None
    check_full_heads(model, taken, np.argsort(-taken.head_scores.ravel(), kind="stable")[:2].tolist())


L, H, HALF = 3, 4, 6  # Number of layers, heads and channel pairs of the family llama.


@pytest.fixture
def payload() -> dict[str, Any]:
    """Return the published shapes: three rows of head_dim / 2 float32 numbers for each head."""
    rng, pairs = np.random.default_rng(3), [(layer, head) for layer in range(L) for head in range(H)]
    stats = {}
    for layer, head in pairs:
        real, imaginary = rng.standard_normal((2, HALF))
        rows = {"q_mean_real": real, "q_mean_imag": imaginary, "q_abs_mean": np.hypot(real, imaginary) + 0.25}
        stats[f"layer{layer:02d}_head{head:02d}"] = {name: torch.tensor(x).float() for name, x in rows.items()}
    metadata = {"num_traces": 1, "head_dim": 2 * HALF, "rope_style": "half", "rope_type": "default",
                "dtype": "bfloat16", "sampled_heads": [[layer, head] for layer, head in pairs]}
    return {"metadata": metadata, "stats": stats}


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("name", ["triattention", "triattention-by-layer-and-head"])
def test_statistics_decide_as_our_file_does(name: str, payload: dict[str, Any], tmp_path: Path) -> None:
    model, file, out = build("llama"), tmp_path / "stats.pt", tmp_path / "mine.npz"
    torch.save(payload, file)
    actual = read_statistics(file, model)
    save_calibration(actual, out)
    sets = []
    for calibration in (actual, load_calibration(out), file, str(file), calibrate(model, prompt(LEAST))):
        with NamedPolicy(name, 20, calibration=calibration)(model) as run:
            greedy(model, prompt(60), 4)
        sets.append(run.retentions[0].positions.tolist())
    assert sets[0] == sets[1] == sets[2] == sets[3] != sets[4]
    with pytest.raises(SpecError, match=r"pass calibration='stats.pt' to policy_from_name"):
        load_calibration(file)
    with pytest.raises(SpecError, match=r"absent\.pt"):
        NamedPolicy(name, 20, calibration=tmp_path / "absent.pt")(model)


@pytest.mark.spec("TA-CALIBRATION")
def test_both_formats_hold_equal_numbers(payload: dict[str, Any], tmp_path: Path) -> None:
    """Check that a payload is unchanged after reading and writing. A file of kvspec is read back in float32."""
    model, path = build("llama"), tmp_path / "stats.pt"
    torch.save(payload, path)
    write_statistics(read_statistics(path, model), path)
    again = torch.load(path, weights_only=True)
    assert again["stats"].keys() == payload["stats"].keys()
    for key, rows in payload["stats"].items():
        assert all(torch.equal(again["stats"][key][part], row) for part, row in rows.items())
    shown = ("head_dim", "rope_style", "sampled_heads")
    assert [again["metadata"][name] for name in shown] == [payload["metadata"][name] for name in shown]
    taken = calibrate(model, prompt(LEAST))
    write_statistics(taken, path)
    actual = read_statistics(path, model)
    assert actual.identity.rope == taken.identity.rope
    for name in ("mean", "magnitude"):
        assert np.array_equal(getattr(actual, name), getattr(taken, name).astype(np.float32))


class Code:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


def code_in(payload: dict[str, Any], tmp_path: Path) -> None:
    payload["stats"]["layer00_head00"] = Code(tmp_path / "was run")


def edit(key: str, part: str, value: Any) -> Callable[[dict[str, Any], Path], None]:
    return lambda payload, tmp_path: payload[key].__setitem__(part, value)


HEAD = "layer02_head03"
WRONG: dict[str, tuple[Callable[[dict[str, Any], Path], Any], str, str]] = {
    "code": (code_in, "path", "it contains code, which is not run"),
    "no statistics": (lambda payload, _: payload.pop("stats"), "path", "must have `metadata` and `stats`"),
    "style": (edit("metadata", "rope_style", "interleaved"), "rope_style", "must be 'half'"),
    "head": (lambda payload, _: payload["stats"].pop(HEAD), f"{HEAD}.q_mean_real", "is missing in"),
    "part": (lambda payload, _: payload["stats"][HEAD].pop("q_abs_mean"), f"{HEAD}.q_abs_mean", "is missing in"),
    "layer": (edit("stats", "layer03_head00", {}), "stats", "does not have"),
    "shape": (
        lambda payload, _: payload["stats"][HEAD].update(q_mean_imag=torch.zeros(8)), f"{HEAD}.q_mean_imag",
        r"\(8,\).*must have the shape \(6,\)",
    ),
    "infinite": (
        lambda payload, _: payload["stats"][HEAD].update(q_mean_imag=torch.full((6,), torch.inf)),
        f"{HEAD}.q_mean_imag", "must be finite",
    ),
    "list": (lambda payload, _: payload["stats"].update({HEAD: [1]}), f"{HEAD}.q_mean_real", "is missing in"),
    "number": (edit("stats", "layer00_head00", dict.fromkeys(PARTS, 1.0)), "layer00_head00.q_mean_real", "of floats"),
    "keys": (lambda payload, _: payload["stats"].update({1: {}}), "stats", "must have only keys such as 'layer00_head"),
    "style of two": (edit("metadata", "rope_style", torch.ones(2)), "rope_style", "must be 'half'"),
    **{
        name: (edit("stats", HEAD, dict.fromkeys(PARTS, one)), f"{HEAD}.q_mean_real", "a dense tensor of floats")
        for name, one in {
            "complex": torch.ones(6, dtype=torch.complex64), "integers": torch.ones(6, dtype=torch.int32),
            "bool": torch.ones(6) > 0, "sparse": torch.ones(6).to_sparse(), "meta": torch.ones(6, device="meta"),
        }.items()
    },
}


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused_and_not_run(name: str, payload: dict[str, Any], tmp_path: Path) -> None:
    change, argument, words = WRONG[name]
    change(payload, tmp_path)
    torch.save(payload, tmp_path / "stats.pt")
    with pytest.raises(SpecError, match=words) as caught:
        read_statistics(tmp_path / "stats.pt", build("llama"))
    assert caught.value.argument == argument
    assert not (tmp_path / "was run").exists()


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("as_key", [True, False])
def test_a_tuple_of_itself_many_times_takes_no_time(as_key: bool, payload: dict[str, Any], tmp_path: Path) -> None:
    """Sixty tuples, each with the one before twice. As a key of a dict, the last has 2^60 items to hash."""
    pairs = b"".join(b"q%ch%c\x86" % (at, at) for at in range(60))
    program = b"\x80\x02}(" + b")" + pairs + b"K\x01u." if as_key else b"\x80\x02)" + pairs + b"."
    torch.save(payload, tmp_path / "base.pt")
    with zipfile.ZipFile(tmp_path / "base.pt") as base, zipfile.ZipFile(tmp_path / "stats.pt", "w") as changed:
        for name in base.namelist():
            changed.writestr(name, program if name.endswith("data.pkl") else base.read(name))
    with pytest.raises(SpecError, match="its tuples have more than 10000000 items"):
        read_statistics(tmp_path / "stats.pt", build("llama"))


@pytest.mark.spec("TA-CALIBRATION")
def test_statistics_that_need_gradients_are_read(payload: dict[str, Any], tmp_path: Path) -> None:
    torch.save(payload, tmp_path / "a.pt")
    payload["stats"][HEAD] = {part: torch.nn.Parameter(row) for part, row in payload["stats"][HEAD].items()}
    torch.save(payload, tmp_path / "b.pt")
    first, second = (read_statistics(tmp_path / name, build("llama")) for name in ("a.pt", "b.pt"))
    assert first.digest == second.digest


def pattern(path: Path, values: Any) -> Path:
    """Write a head pattern as DuoAttention does, with numpy.savetxt."""
    np.savetxt(path, values, delimiter="\t")
    return path


SHARES = np.array([[-5.7e-5, 0.98], [0.25, 1.0], [0.75, 0.5]])


@pytest.mark.spec("PO-KVZIP-HEADS")
@pytest.mark.parametrize(("threshold", "full"), [(None, [3, 1]), (0.7, [1, 3]), (0.99, [3, 0])])
def test_a_head_pattern_names_the_full_heads(threshold: float | None, full: list[int], tmp_path: Path) -> None:
    """Check full heads by value, or the first heads at or above a threshold."""
    model = build("llama")
    actual = read_head_pattern(pattern(tmp_path / "heads.tsv", SHARES), model, threshold)
    expected = np.clip(SHARES, 0, 1) if threshold is None else (np.clip(SHARES, 0, 1) >= threshold)
    assert actual.head_scores is not None
    assert np.array_equal(actual.head_scores, expected)
    save_calibration(actual, tmp_path / "mine.npz")
    check_full_heads(model, tmp_path / "mine.npz", full)
    with pytest.raises(SpecError, match="has no query statistics"):
        NamedPolicy("triattention", 20, calibration=actual)(model)


@pytest.mark.spec("PO-KVZIP-HEADS")
@pytest.mark.parametrize("streaming", [1, 3, 5])
def test_a_head_pattern_decides_as_duoattention(streaming: int, tmp_path: Path) -> None:
    """Compare with kvpress's rule, at the budget of the guide for users of kvpress."""
    n, sink, recent = 204, 2, 4
    budget = 1 - streaming / 6 * (1 - (sink + recent) / n)
    low = np.argsort(np.clip(SHARES, 0, 1), axis=None)[:streaming].tolist()
    file = pattern(tmp_path / "heads.tsv", SHARES)
    policy = NamedPolicy("kvzip-heads", round(budget * n), calibration=file, N_sink=sink, N_recent=recent)
    _, cache = read_prompt(build("llama"), policy, n)
    kept = [list(positions) for heads in live_sets(cache).values() for positions in heads]
    assert kept == [[0, 1, *range(n - recent, n)] if g in low else list(range(n)) for g in range(6)]


@pytest.mark.spec("PO-KVZIP-HEADS")
@pytest.mark.parametrize("values", [SHARES[:2], SHARES.T, SHARES[:, :1], SHARES * np.nan])
def test_a_pattern_of_another_model_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="3 layers of 2 KV heads") as caught:
        read_head_pattern(pattern(tmp_path / "heads.tsv", values), build("llama"))
    assert caught.value.argument == "path"
    (tmp_path / "heads.tsv").write_text("1.0\tmuch\n", encoding="utf-8")
    with pytest.raises(SpecError, match="must be lines of numbers"):
        read_head_pattern(tmp_path / "heads.tsv", build("llama"))
    with pytest.raises(SpecError, match="must be between 0 and 1"):
        read_head_pattern(tmp_path / "heads.tsv", build("llama"), threshold=1.5)


@pytest.mark.spec("PO-Q-FILTERS")
@pytest.mark.parametrize("make", [partial(build, "llama"), partial(build, "gpt_neox"), partial(rotated, "Cohere")])
def test_filters_are_those_of_queries_after_their_rotation(make: Callable[[], Any]) -> None:
    """Check a rotation of all channels, of some channels, and of neighbouring channels."""
    model, ids = make(), prompt(LEAST, seed=9)
    actual = calibrate(model, ids, template=REHEARSED["template"])
    views = observe(model, ids, needs=Needs("all", None)).prompt(0, Granularity.HEAD).layers
    assert actual.filters is not None
    for filters, view in zip(actual.filters, views.values(), strict=True):
        q = np.asarray(view.q, dtype=np.float64)
        main = np.array([np.linalg.svd(head, full_matrices=False)[2][0] for head in q])
        main *= np.sign(np.einsum("hmd,hd->h", q, main))[:, None]
        assert np.abs(filters - main.reshape(len(view.k), -1, main.shape[1]).mean(axis=1)).max() < 1e-6


@pytest.mark.spec("PO-Q-FILTERS")
def test_a_file_of_the_authors_keeps_what_the_calibration_keeps(tmp_path: Path) -> None:
    """Check that the published sign is changed, by the file itself and by the command that converts the file."""
    model, file, out = build("llama"), tmp_path / "model.safetensors", tmp_path / "mine.npz"
    taken = calibrate(model, prompt(LEAST, seed=9))
    assert taken.filters is not None
    save_file({"q_filters": -torch.from_numpy(taken.filters)}, file)
    sets = []
    for given in (taken, file, str(file), read_tensors(file, model)):
        run, _ = read_prompt(model, policy_from_name("q-filters", 0.5, calibration=given), 40)
        sets.append([one.positions.tolist() for one in run.retentions])
    assert sets[0] == sets[1] == sets[2] == sets[3]
    config: Any = load_pocket()[0].config
    save_file({"q_filters": torch.ones(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)}, file)
    result = CliRunner().invoke(app, ["calibrate", str(file), "--out", str(out)])
    assert result.exit_code == 0, result.output
    read: Any = load_calibration(out)
    assert (read.filters == -1).all()
    with pytest.raises(SpecError, match="has no query statistics"):
        triattention(read, read.identity)
    with pytest.raises(SpecError, match=r"pass calibration='model.safetensors' to policy_from_name"):
        load_calibration(file)


@pytest.mark.spec("PO-EXPECTED-ATTENTION-STATS")
def test_covariances_are_those_of_queries_before_their_rotation(tmp_path: Path) -> None:
    """Check a calibration, its file, and the same numbers in a file of the authors."""
    model, ids, out = build("llama"), prompt(LEAST, seed=9), tmp_path / "mine.npz"
    actual = calibrate(model, ids, covariance=True)
    assert calibrate(model, ids).covariance is None
    assert actual.covariance is not None
    for covariance, q in zip(actual.covariance, hooked(model, ids), strict=True):
        wanted = np.stack([np.cov(head.T, bias=True) for head in q.double().numpy()])
        assert np.abs(covariance - wanted).max() < 10 * BOUND * float(q.abs().max()) ** 2
    save_calibration(actual, out)
    file = tmp_path / "model.safetensors"
    mean, spread = (torch.from_numpy(x).contiguous() for x in (actual.mean, actual.covariance))
    save_file({"query_mean": mean, "query_cov": spread}, file)
    sets = []
    for given in (actual, out, file, read_tensors(file, model)):
        run, _ = read_prompt(model, policy_from_name("expected-attention-stats", 0.5, calibration=given), 40)
        sets.append([one.positions.tolist() for one in run.retentions])
    assert sets[0] == sets[1] == sets[2] == sets[3]
    save_file({"query_mean": mean, "query_cov": spread[:, :, :3].contiguous()}, file)
    with pytest.raises(SpecError, match=r"query_cov = .*must have 3 layers of 4 query heads of 12 channels"):
        policy_from_name("expected-attention-stats", 0.5, calibration=file)(model)


@pytest.mark.spec("PO-EXPECTED-ATTENTION-STATS")
def test_the_command_measures_covariances_of_a_text(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "mine.npz"
    text.write_text("The chair thanked the members. The special magic number is 1516. " * 20, encoding="utf-8")
    result = CliRunner().invoke(app, ["calibrate", str(text), "--covariance", "--tokens", "256", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert load_calibration(out).covariance is not None
    (tmp_path / "x.pt").write_bytes(b"no statistics")
    published = ["calibrate", str(tmp_path / "x.pt"), "--covariance", "--out", str(tmp_path / "other.npz")]
    wrong = CliRunner().invoke(app, published)
    assert "is measured on a text, not read from x.pt" in str(wrong.exception)


TEXT = 48
HIDDEN = Needs("all", 0, hidden=True)


def normed(model: Any, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Return the output (rows, n, width) of the input norm of each layer."""
    with outputs_of(layer.input_layernorm for layer in model.model.layers) as states, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
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
    return [top(row, B) for row in scores_of_networks(inputs, B)]


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("PO-KVZAP")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_hidden_states_are_the_input_of_the_attention(family: str) -> None:
    """Compare with the output of the input norm, for one forward pass and for a prompt in pieces."""
    model: Any = build(family)
    states = normed(model, prompt(TEXT))
    whole = shown(model, prompt(TEXT), HIDDEN)
    assert all(np.array_equal(np.asarray(view.hidden), states[at][0].numpy()) for at, view in whole.layers.items())
    scorer, cache = Looking(HIDDEN), RetainedCache(model.config)
    with method_of(scorer)(model) as run, run.prompt():
        for piece in torch.split(prompt(TEXT), 20, dim=1):
            at_once(model, piece, cache)
    for at, view in scorer.shown[-1].layers.items():
        assert np.abs(view.hidden - states[at][0].numpy()).max() < 1e-5
    assert all(hidden_of(module) is None for module in model.modules())


@pytest.mark.law("decided-as-the-reference")
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


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("PO-KVZAP")
@pytest.mark.parametrize("m", [None, 6])
def test_a_safetensors_file_decides_as_the_brute_force(m: int | None, tmp_path: Path) -> None:
    """Read both forms of the file, and their conversion. Eviction equals masking."""
    model: Any = build("llama")
    given, B = random_networks(3, 2, model.config.hidden_size, m), 15
    file = written(tmp_path / "model.safetensors", given, torch.float64)
    save_calibration(read_networks(file, model), tmp_path / "own.npz")
    expected = of_brute([x[0] for x in normed(model, prompt(TEXT))], given, B)
    assert len(set(map(tuple, expected))) == 6
    for calibration in (str(file), file, tmp_path / "own.npz", read_networks(file, model)):
        _, cache = read_prompt(model, kvspec.policy_from_name("kvzap", B, calibration=calibration), TEXT)
        assert [kept for heads in live_sets(cache).values() for kept in heads] == expected
    check_continuation(model, NamedPolicy("kvzap", B, calibration=file))
    half = written(tmp_path / "half.safetensors", given, torch.bfloat16)
    run, _ = read_prompt(model, kvspec.policy_from_name("kvzap", B, calibration=half), TEXT)
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


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("PO-FAST-KVZIP")
def test_a_file_of_gates_decides_as_the_brute_force(tmp_path: Path) -> None:
    """Read the file and its conversion. Eviction equals masking."""
    model: Any = build("llama")
    given, B = random_gates(3, 2, model.config.hidden_size), 15
    constants: dict[str, Any] = {"N_sink": 2, "N_recent": 3}
    file = written_gates(tmp_path / "gates.safetensors", given)
    save_calibration(read_gates(file, model), tmp_path / "own.npz")
    views = [
        LayerView(np.zeros((4, TEXT, 1)), np.zeros((2, TEXT, 1)), None, 1.0, None, hidden=x[0].double().numpy())
        for x in normed(model, prompt(TEXT))
    ]
    inputs = Inputs(views, np.ones(1), [], np.zeros(TEXT, np.int64), gates=given)
    expected = fast_kvzip.kept(inputs, B, **constants)
    assert len(set(map(len, expected))) > 1
    for calibration in (file, tmp_path / "own.npz"):
        chosen = kvspec.policy_from_name("fast-kvzip", B, calibration=calibration, **constants)
        _, cache = read_prompt(model, chosen, TEXT)
        assert [positions for heads in live_sets(cache).values() for positions in heads] == expected
    check_continuation(model, NamedPolicy("fast-kvzip", B, calibration=file, **constants))


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.spec("PO-KVZAP", "PO-THRESHOLD")
def test_the_threshold_of_the_paper_keeps_what_exceeds_it(tmp_path: Path) -> None:
    model: Any = build("llama")
    given = random_networks(3, 2, model.config.hidden_size, 6)
    file = written(tmp_path / "model.safetensors", given, torch.float64)
    run, _ = read_prompt(model, kvspec.policy_from_name("kvzap/threshold=0.5/recent=4", 1.0, calibration=file), TEXT)
    hidden = shown(model, prompt(TEXT), HIDDEN).layers
    views = [replace(view, k=np.zeros((2, TEXT, 1))) for view in hidden.values()]
    scores = scores_of_networks(Inputs(views, np.ones(1), [], np.zeros(TEXT, np.int64), networks=given), TEXT)
    for g, row in enumerate(scores):
        kept = [i for i, x in enumerate(row) if i >= TEXT - 4 or (x is not None and x > 0.5)]
        assert run.retentions[0].group(g).tolist() == kept
        assert 4 < len(kept) < TEXT


@pytest.mark.law("refused-before-anything-changes")
def test_missing_hidden_states_are_refused(tmp_path: Path) -> None:
    """Check that turns, blocks, steps, observations without hidden states, `kvspec keep` and vLLM raise an error."""
    model: Any = build("llama")
    networks = random_networks(3, 2, model.config.hidden_size, 6)
    policy = NamedPolicy("kvzap", 0.5, calibration=with_networks(model, networks))
    cache = RetainedCache(model.config)
    with policy(model) as run:
        at_once(model, prompt(TEXT), cache)
        with pytest.raises(SpecError, match="policy = 'kvzap': evicts from the first prompt only"):
            at_once(model, prompt(7), cache)
        with run.reading():
            at_once(model, prompt(7), cache)
    with pytest.raises(SpecError, match="evicts from one whole prompt only"):
        kvspec.prefill(model, policy, prompt(TEXT), block=16)
    with pytest.raises(SpecError, match=r"lacks tensors that the policy needs; .*hidden=True"):
        kvspec.decide(policy, kvspec.observe(model, prompt(TEXT)))
    observed = kvspec.observe(model, prompt(TEXT), needs=replace(EVERYTHING, hidden=True))
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
    assert shown(seen, prompt(TEXT), Needs("all")).seen == TEXT


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
    ("q-filters", {"q_filters": torch.ones(2, 2, 12)}, r"q_filters = \(2, 2, 12\): must have 3 layers of 2 KV heads"),
    ("q-filters", {"other": torch.ones(3, 2, 12)}, r"q_filters = \(0,\)"),
    ("q-filters", {"q_filters": torch.full((3, 2, 12), torch.nan)}, r"calibration\.filters"),
    ("q-filters", b"nothing", r"must be a \.safetensors file"),
])
def test_a_file_that_does_not_fit_the_model_is_refused(
    name: str, content: dict[str, Tensor | None] | bytes | None, words: str, tmp_path: Path,
) -> None:
    model: Any = build("llama")
    file, width = tmp_path / "model.safetensors", model.config.hidden_size
    if isinstance(content, dict):
        whole: dict[str, Tensor] = {}
        if name == "kvzap":
            whole = load_file(written(file, random_networks(3, 2, width, None)))
        elif name == "fast-kvzip":
            whole = load_file(written_gates(file, random_gates(3, 2, width)))
        save_file({key: x for key, x in (whole | content).items() if x is not None}, file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=words):
        NamedPolicy(name, 0.5, calibration=file).on(model)
