"""Commands: `kvspec` starts without the packages of its models, and `kvspec archive` runs on the pocket model."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from conformance.paths import ROOT
from conformance.verify.request import parser
from kvspec.cli import BROUGHT_BY, main
from kvspec.cli.app import PassedOn, app, verify_here
from models_integration.archive.errors import ArchiveError, KeyUnavailable, NoSuchChunk, WrongModel
from models_integration.archive.store import Archive
from spec.errors import BackendUnavailable, SpecError
from tests.models_integration.archive.fault_cases import chunk

pytestmark = pytest.mark.law("one-line-with-the-way-out")

START = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.argv = {command!r}
from kvspec.cli import main
main()
"""
OURS = {"spec", "reference", "accelerated", "conformance", "models_integration", "experiments", "kvspec"}
MODELS = ["torch", "transformers", "safetensors", "tokenizers", "pandas", "numba"]
# No extra contains these packages. A build of vLLM is for one device. Therefore `kvspec serve` uses the user's vLLM and
# its dependencies.
READER_PACKAGES = {"vllm", "prometheus_client"}


def started(command: str, missing: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which these packages are missing."""
    code = START.format(missing=missing, command=["kvspec", *command.split()])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.law("as-it-is-described")
def test_the_first_session_says_what_it_does_before_it_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the message: creating the environment takes minutes, and pip prints nothing."""
    noxfile = importlib.import_module("noxfile")
    messages: list[str] = []

    class Session:
        def log(self, text: str) -> None:
            messages.append(text)

    monkeypatch.setattr(noxfile, "SHARED", tmp_path)
    monkeypatch.setattr(noxfile, "new_environment", lambda *given: messages.append("made"))
    noxfile.shared_python(Session())
    assert len(messages) == 2
    assert f"making the shared environment of all sessions in {tmp_path}" in messages[0]


@pytest.mark.law("as-it-is-described")
def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help was once a table of rich, which cut defaults and summaries, and read [wordllama] as markup."""
    monkeypatch.setenv("COLUMNS", "80")
    pages: dict[tuple[str, ...], str] = {("verify",): parser().format_help()}
    pending = [(get_command(app), tuple[str, ...]())]
    for command, words in pending:
        pending += [(inner, (*words, name)) for name, inner in getattr(command, "commands", {}).items()]
        if not isinstance(command, PassedOn):
            pages[words] = CliRunner().invoke(app, [*words, "--help"]).output
    for words, page in pages.items():
        assert all(len(line) <= 80 for line in page.splitlines()), words
        assert "\u2026" not in page, words
        summaries = page.partition("\nCommands:\n")[2].splitlines()
        assert all(re.search(r"[^.]\.$", line) for line in summaries if line), summaries
    assert len(pages) > 20
    assert "'kvspec[wordllama]'" in pages["archive", "find"]
    assert "'kvspec[plots]'" in pages["compare",]


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("command", "missing", "words"), [
    ("--help", MODELS, "verify"), ("lm-eval --help", ["lm_eval"], "pretrained=pocket"),
])
def test_help_needs_no_other_package(command: str, missing: list[str], words: str) -> None:
    actual = started(command, missing)
    assert actual.returncode == 0, actual.stderr
    assert words in actual.stdout


@pytest.mark.law("as-it-is-described")
@pytest.mark.law("figures-are-counted-right")
def test_a_backend_is_judged_without_a_model(tmp_path: Path) -> None:
    """Check a backend without a model package. The process collects one test only, and prints the number of tests."""
    one = "test_nestedkv.py::test_equal_keys_score_zero"
    actual = started(f"verify --backend numpy --out {tmp_path} -- -q --collect-only {one}", MODELS)
    assert actual.returncode == 0, actual.stderr
    assert "1 test collected" in actual.stdout


@pytest.mark.law("as-it-is-described")
@pytest.mark.law("one-line-with-the-way-out")
def test_a_package_that_hides_ours_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec").mkdir()
    monkeypatch.setattr("kvspec.cli.app.judge", lambda command: 0)
    assert verify_here(["--help"]) == 0  # A folder of texts hides no package.
    Path("spec/__init__.py").touch()
    with pytest.raises(SpecError, match=f"{tmp_path}/spec/__init__.py.*hides the package 'spec' of kvspec"):
        verify_here(["--help"])


@pytest.mark.law("as-it-is-described")
@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("demo", "torch", "models"), ("--help", "typer", "conformance"),
        ("verify --backend numpy", "pytest", "conformance"), ("verify --backend numpy", "hypothesis", "conformance"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(command: str, missing: str, extra: str) -> None:
    actual = started(command, [missing])
    assert actual.returncode == 2
    assert actual.stderr.endswith(f"kvspec: {missing} is missing; pip install 'kvspec[{extra}]'\n")


def test_serve_without_vllm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("sys.argv", ["kvspec", "serve", "model", "--policy", "snapkv", "--budget", "0.3"])
    with pytest.raises(SystemExit, match="2"):
        main()
    message = capsys.readouterr().err
    assert message.startswith("kvspec: vllm")
    assert message.count("\n") == 1
    assert message.endswith("is not installed; install vLLM 0.30 to 0.32 for your device in this environment\n")


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("models fetch smollm2", "gguf", "weights"),
        ("archive put {file} --archive {folder}/a --master-key {file}", "cryptography", "archive"),
    ],
)
def test_what_is_missing_once_a_model_is_loaded_is_named(
    command: str, missing: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(32)))
    (tmp_path / "file").chmod(0o600)
    for name in {missing, *(name for name in sys.modules if name.startswith(f"{missing}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("sys.argv", ["kvspec", *command.format(file=tmp_path / "file", folder=tmp_path).split()])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"kvspec: {missing} is missing; pip install 'kvspec[{extra}]'\n"


@pytest.mark.law("as-it-is-described")
@pytest.mark.law("one-line-with-the-way-out")
def test_every_package_that_a_command_imports_has_an_extra() -> None:
    """Check imports outside of kvspec, the standard library and the dependencies of kvspec."""
    paths = [path for package in ("models_integration", "spec") for path in (ROOT / package).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    others = {name.partition(".")[0] for name in named} - sys.stdlib_module_names - OURS - {"numpy", "jaxtyping"}
    assert {"torch", "transformers", "pandas", "gguf"} <= others
    assert others - set(BROUGHT_BY) == READER_PACKAGES
    assert BROUGHT_BY["transformers"] == "models"


FACTS = (" The secret code for Project Aurora is 7492.", " The secret code for Project Falcon is 3058.")
QUESTION = " Question: What is the secret code for Project Aurora? Answer:"


def archived(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["archive", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def refused(*arguments: str) -> Exception:
    result = CliRunner().invoke(app, ["archive", *arguments])
    assert isinstance(result.exception, SpecError | ArchiveError | BackendUnavailable), result.exception
    return result.exception


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    actual = []
    for at, fact in enumerate(FACTS):
        (tmp_path / f"{at}.txt").write_text(fact, encoding="utf-8")
        actual.append(archived("put", str(tmp_path / f"{at}.txt"), "--archive", str(tmp_path / "a")).strip())
    return actual


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.law("saved-is-what-was")
def test_a_fact_is_put_listed_got_and_answered(keys: list[str], tmp_path: Path) -> None:
    here = ("--archive", str(tmp_path / "a"))
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert [line.split()[0] for line in archived("list", *here).splitlines()] == keys
    assert "undamaged\n The secret code for Project Aurora is 7492." in archived("get", keys[0], *here)
    session = "The following report summarizes recent activity."
    asked = ("--ask", QUESTION, "--session", session)
    assert archived("inject", *keys, *here, *asked) == f"{FACTS[0].strip()}\n"
    assert archived("inject", *reversed(keys), *here, *asked) == f"{FACTS[0].strip()}\n"
    assert "7492" not in archived("inject", keys[1], *here, *asked)
    both = archived("inject", *keys, *here, *asked, "--text").splitlines()
    for line, name in zip(both, ("inserted", "as text"), strict=True):
        assert re.fullmatch(rf"{name}, \d+\.\d ms to the first token: {re.escape(FACTS[0].strip())}", line)
    used = (tmp_path / "a").glob("objects/*/*")
    before = {path: path.stat().st_mtime_ns for path in used}
    actual = archived("find", "Which code has Project Aurora?", *here, "--top", "2").splitlines()
    assert actual == [f"{key}  {fact.strip()}" for key, fact in zip(keys, FACTS, strict=True)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert archived("verify", *here) == "2 objects read\n"
    os.utime(next((tmp_path / "a").glob(f"objects/*/{keys[1]}.*")), (1, 1))
    removed = archived("gc", "--limit", "20000", *here)
    assert removed.split() == [keys[1], "removed"]
    assert archived("forget", "default", "--yes", *here) == "1 objects of default erased\n"
    assert archived("list", *here) == ""
    assert not list((tmp_path / "a").glob("objects/*/*"))


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.law("an-object-proves-itself")
def test_damage_is_said(keys: list[str], tmp_path: Path) -> None:
    here = ("--archive", str(tmp_path / "a"))
    (path,) = (tmp_path / "a").glob(f"objects/*/{keys[0]}.safetensors")
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(bytes(data))
    assert f"{keys[0]}  damaged, now in quarantine" in archived("verify", *here, code=1)
    assert isinstance(refused("inject", keys[0], *here, "--ask", "x"), NoSuchChunk)
    assert isinstance(refused("get", keys[0], *here), NoSuchChunk)


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.law("saved-is-what-was")
def test_what_a_policy_keeps_is_put_and_answered(keys: list[str], tmp_path: Path) -> None:
    """Check that a chunk with a policy has a different key, and that an unknown policy or budget stores nothing."""
    here = ("--archive", str(tmp_path / "a"))
    kept = archived("put", str(tmp_path / "0.txt"), "--policy", "snapkv", "--budget", "0.9", *here).strip()
    assert kept not in keys
    assert re.search(r"^(\d+) tokens \(0 hidden\), (\d+) tokens kept, wrapper raw", archived("get", kept, *here))
    assert archived("inject", kept, *here, "--ask", QUESTION, "--new-tokens", "2")
    assert archived("verify", *here) == "3 objects read\n"
    error = refused("put", str(tmp_path / "0.txt"), "--policy", "nobody", *here)
    assert "policy = 'nobody'" in str(error)
    error = refused("put", str(tmp_path / "0.txt"), "--policy", "snapkv", "--budget", "1.5", *here)
    assert "budget" in str(error)
    error = refused("put", str(tmp_path / "0.txt"), "--policy", "triattention", *here)
    assert "calibration" in str(error)
    file = str(tmp_path / "c.npz")
    (tmp_path / "long.txt").write_text(FACTS[0] * 40, encoding="utf-8")
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "long.txt"), "--tokens", "256", "--out", file])
    assert result.exit_code == 0, result.output
    again = archived("put", str(tmp_path / "0.txt"), "--policy", "triattention", "--calibration", file, *here)
    assert again.strip() not in (kept, *keys)


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.law("as-it-is-described")
def test_the_model_is_loaded_as_it_is_told(tmp_path: Path) -> None:
    """The dtype is a part of a chunk's identity, so a chunk with a different dtype is refused."""
    (tmp_path / "note.txt").write_text(FACTS[0], encoding="utf-8")
    here, loading = ("--archive", str(tmp_path / "a")), ("--device", "cpu", "--dtype", "float64", "--attn", "eager")
    key = archived("put", str(tmp_path / "note.txt"), "--backend", "numpy", *loading, *here).strip()
    (path,) = (tmp_path / "a").glob("objects/*/*")
    assert '"dtype":"F64","shape":[2,' in path.read_bytes()[:4000].decode("latin-1")
    assert "undamaged\n The secret code for Project Aurora is 7492." in archived("get", key, *loading, *here)
    assert archived("inject", key, "--ask", QUESTION, *loading, *here) == f"{FACTS[0].strip()}\n"
    assert isinstance(refused("get", key, *here), WrongModel)


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.law("nothing-readable-without-the-key")
def test_an_encrypted_chunk_needs_its_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "note.txt").write_text(FACTS[0], encoding="utf-8")
    (tmp_path / "master").write_bytes(bytes(range(32)))
    (tmp_path / "master").chmod(0o600)
    here = ("--archive", str(tmp_path / "a"))
    locked = (*here, "--master-key", str(tmp_path / "master"))
    key = archived("put", str(tmp_path / "note.txt"), "--wrapper", "raw", "--codec", "kivi", "--upper", *locked).strip()
    assert archived("inject", key, *locked, "--ask", QUESTION, "--new-tokens", "2")
    assert isinstance(refused("get", key, *here), KeyUnavailable)
    archived("forget", "default", "--yes", *locked)
    assert isinstance(refused("get", key, *locked), KeyUnavailable | NoSuchChunk)


@pytest.mark.parametrize("device", ["/dev/urandom", "a FIFO", "a long file"])
def test_a_master_key_is_read_from_a_regular_file_of_32_bytes(tmp_path: Path, device: str) -> None:
    """Check that at most 33 bytes are read."""
    pytest.importorskip("cryptography")
    (folder := tmp_path / "a" / "objects").mkdir(parents=True)
    path = Path(device)
    if device == "a FIFO":
        os.mkfifo(path := tmp_path / "fifo", 0o600)
    if device == "a long file":
        (path := tmp_path / "long").touch(mode=0o600)
        os.truncate(path, 1 << 40)
    words = "but has more" if device == "a long file" else "must be a readable file"
    assert words in str(refused("list", "--archive", str(folder.parent), "--master-key", str(path)))


def test_an_empty_text_and_a_budget_of_no_policy_are_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("", encoding="utf-8")
    here = ("put", str(tmp_path / "note.txt"), "--archive", str(tmp_path / "a"))
    assert "must have at least one token" in str(refused(*here))
    for budget in ("rubbish", "0.5"):
        message = str(refused(*here, "--budget", budget))
        assert f"budget = '{budget}': needs a policy: give --policy too" in message
    assert not (tmp_path / "a").exists()


def test_a_folder_whose_name_is_no_utf_8_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    with Archive(folder) as archive:
        archive.put(*chunk(1))
    assert archived("verify", "--archive", str(folder)) == "1 objects read\n"
    (folder / "objects" / os.fsdecode(b"\xff")).touch()
    expected = "1 objects read\n'objects/\\udcff'  does not belong to the archive\n"
    assert archived("verify", "--archive", str(folder), code=1) == expected


def test_a_tenant_s_name_is_shown_as_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    error = refused("list", "--archive", str(tmp_path), "--tenant", "a\nb")
    assert str(error).startswith(r"tenant = 'a\nb': must be 1 to 256 printable characters")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("put", "nowhere.txt"), "TEXT = 'nowhere.txt'"),
        (("list",), "is not an archive"),
        (("inject", "0" * 64, "--ask", "x", "--new-tokens", "0"), "new_tokens = 0"),
        (("get", "0" * 64, "--model", "/nowhere"), "model = '/nowhere'"),
        (("put", __file__, "--device", "cuda:77"), "device = 'cuda:77'"),
        (("put", __file__, "--backend", "cobol"), "cobol"),
        (("get", "0" * 64, "--dtype", "int8"), "dtype = 'int8'"),
        (("inject", "0" * 64, "--ask", "x", "--attn", "flash_attention_2"), "attn = 'flash_attention_2'"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert words in str(refused(*arguments, "--archive", str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_forgetting_asks_first(keys: list[str], tmp_path: Path) -> None:
    here = ("--archive", str(tmp_path / "a"))
    assert CliRunner().invoke(app, ["archive", "forget", "default", *here], input="n\n").exit_code == 1
    assert len(archived("list", *here).splitlines()) == len(keys)
