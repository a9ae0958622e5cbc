"""Files of TriAttention's repository and of DuoAttention are read without running them, and decide as ours do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conformance.own.models_integration.session.families import build, greedy, prompt
from conformance.own.models_integration.session.sessions import live_sets, read_prompt
from models_integration import Published
from models_integration.cli.app import app
from models_integration.policies.calibration import calibrate
from models_integration.policies.shared_calibration import read_head_pattern, read_statistics, write_statistics
from reference.calibration import load_calibration, save_calibration
from spec.errors import SpecError
from spec.retention import Retention

pytestmark = pytest.mark.law("as-it-is-described")
L, H, H_KV, HALF = 3, 4, 2, 6  # of the family llama


def published() -> dict[str, Any]:
    """A payload by the published shapes: for each head of each layer three rows of head_dim / 2 float32 numbers."""
    rng, pairs = np.random.default_rng(3), [(layer, head) for layer in range(L) for head in range(H)]
    stats = {}
    for layer, head in pairs:
        real, imaginary = rng.standard_normal((2, HALF))
        rows = {"q_mean_real": real, "q_mean_imag": imaginary, "q_abs_mean": np.hypot(real, imaginary) + 0.25}
        stats[f"layer{layer:02d}_head{head:02d}"] = {name: torch.tensor(x).float() for name, x in rows.items()}
    metadata = {"num_traces": 1, "head_dim": 2 * HALF, "rope_style": "half", "rope_type": "default",
                "dtype": "bfloat16", "sampled_heads": [[layer, head] for layer, head in pairs]}
    return {"metadata": metadata, "stats": stats}


@pytest.fixture
def payload() -> dict[str, Any]:
    return published()


@pytest.mark.spec("TA-CALIBRATION")
@pytest.mark.parametrize("name", ["triattention", "triattention-by-layer-and-head"])
def test_statistics_decide_as_our_file_does(name: str, payload: dict[str, Any], tmp_path: Path) -> None:
    model = build("llama")
    torch.save(payload, tmp_path / "stats.pt")
    found = read_statistics(tmp_path / "stats.pt", model)
    save_calibration(found, tmp_path / "mine.npz")
    sets = []
    for calibration in (found, load_calibration(tmp_path / "mine.npz"), calibrate(model, prompt(60))):
        with Published(name, 20, calibration=calibration)(model) as run:
            greedy(model, prompt(60), 4)
        assert isinstance(run.retention, Retention)
        sets.append(run.retention.positions.tolist())
    assert sets[0] == sets[1] != sets[2]


@pytest.mark.spec("TA-CALIBRATION")
def test_both_formats_hold_equal_numbers(payload: dict[str, Any], tmp_path: Path) -> None:
    """Read and written again, the payload is what it was; ours is read back as float32 has it."""
    model, path = build("llama"), tmp_path / "stats.pt"
    torch.save(payload, path)
    write_statistics(read_statistics(path, model), path)
    again = torch.load(path, weights_only=True)
    assert again["stats"].keys() == payload["stats"].keys()
    for key, rows in payload["stats"].items():
        assert all(torch.equal(again["stats"][key][part], row) for part, row in rows.items())
    shown = ("head_dim", "rope_style", "sampled_heads")
    assert [again["metadata"][name] for name in shown] == [payload["metadata"][name] for name in shown]
    taken = calibrate(model, prompt(60))
    write_statistics(taken, path)
    found = read_statistics(path, model)
    assert found.identity.rope == taken.identity.rope
    for name in ("mean", "magnitude"):
        assert np.array_equal(getattr(found, name), getattr(taken, name).astype(np.float32))


class Code:
    """Makes a folder when it is unpickled."""

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
        lambda payload, _: payload["stats"][HEAD].update(q_mean_imag=torch.full((6,), torch.inf)), "calibration.mean",
        "must be finite",
    ),
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


def pattern(path: Path, values: Any) -> Path:
    """As DuoAttention writes it, by numpy.savetxt."""
    np.savetxt(path, values, delimiter="\t")
    return path


SHARES = np.array([[-5.7e-5, 0.98], [0.25, 1.0], [0.75, 0.5]])


@pytest.mark.spec("PO-KVZIP-HEADS")
@pytest.mark.parametrize(("threshold", "full"), [(None, [3, 1]), (0.7, [1, 3]), (0.99, [3, 0])])
def test_a_head_pattern_names_the_full_heads(threshold: float | None, full: list[int], tmp_path: Path) -> None:
    """At half of 200 tokens two of six heads are full: by value, or the first ones from a threshold on."""
    model, n = build("llama"), 200
    found = read_head_pattern(pattern(tmp_path / "heads.tsv", SHARES), model, threshold)
    expected = np.clip(SHARES, 0, 1) if threshold is None else (np.clip(SHARES, 0, 1) >= threshold)
    assert found.head_scores is not None
    assert np.array_equal(found.head_scores, expected)
    save_calibration(found, tmp_path / "mine.npz")
    policy = Published("kvzip-heads", 0.5, calibration=tmp_path / "mine.npz", N_sink=2, N_recent=4)
    _, cache = read_prompt(model, policy, n)
    sets = [list(own) for heads in live_sets(cache).values() for own in heads]
    assert {g for g, own in enumerate(sets) if len(own) == n} == set(full)
    with pytest.raises(SpecError, match="has head scores alone"):
        Published("triattention", 20, calibration=found)(model)


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


@pytest.mark.spec("TA-CALIBRATION")
def test_the_command_converts_both_ways(tmp_path: Path) -> None:
    text, theirs, ours = tmp_path / "text.txt", tmp_path / "stats.pt", tmp_path / "mine.npz"
    text.write_text("The chair thanked the members. " * 4, encoding="utf-8")
    runner = CliRunner()
    for source, out in ((text, theirs), (theirs, ours)):
        made = runner.invoke(app, ["calibrate", str(source), "--out", str(out)])
        assert made.exit_code == 0, made.output
    stats = torch.load(theirs, weights_only=True)["stats"]
    found = load_calibration(ours)
    assert np.array_equal(found.magnitude[0, 1], stats["layer00_head01"]["q_abs_mean"].double().numpy())
    with pytest.raises(SpecError, match=r"kvspec calibrate stats.pt --model NAME"):
        load_calibration(theirs)
    wrong = runner.invoke(app, ["calibrate", str(theirs), "--threshold", "0.5", "--out", str(ours)])
    assert "can be used only with a head pattern" in str(wrong.exception)
