"""Tests of the errors of the command line: one line with the correct input, before any work."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the commands drive transformers models")

from rich.console import Console
from transformers import LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from experiments.studies.evidence.rules import rules_text
from experiments.studies.report import progress_bar
from experiments.studies.results import load_rows
from experiments.studies.subject import Loading
from kvspec import cli
from kvspec.cli import paper_injection, study_runs
from kvspec.cli.app import app
from kvspec.cli.checks import check_folder
from models_integration.model.architecture import check_positions
from spec.errors import SpecError

pytestmark = pytest.mark.law("one-line-with-the-way-out")

SHORT = ("--length", "200", "--samples", "1", "--tasks", "needle", "--budgets", "0.9", "--backend", "numpy")


Refusal = Callable[[list[str]], str]

MEMORY = "is a memory, whose number of tokens depends on the model: type a share such as 0.3, or the number that"


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command that must fail with exit code 2, and return its one line of output."""
    def run(arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["kvspec", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        assert stopped.value.code == 2, printed
        assert printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        assert printed.err.startswith("kvspec: ")
        return printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "/nowhere/at/all"), ("model = '/nowhere/at/all'", "'pocket', 'chat', 'smollm2', a folder")),
        (("--policies", ""), ("policies = ''", "at least one")), (("--budgets", " , "), ("budgets", "at least one")),
        (("--tasks", ","), ("tasks", "at least one")),
        (("--seeds", ""), ("seed = ''", "whole numbers")),
        (("--policies", "snapkw"), ("policy = 'snapkw'", "did you mean snapkv")),
        (("--tasks", "ruler-file:/nope.jsonl"), ("tasks = 'ruler-file:/nope.jsonl'", "has no file '/nope.jsonl'")),
        (("--policies", "mym.py:POLICY"), ("policy = 'mym.py:POLICY'", "mym.py is a file", "write", "mym:POLICY")),
        (("--tasks", "haystack"), ("task = 'haystack'", "known names, see `kvspec tasks`")),
        (("--tasks", "NEDLE"), ("task = 'NEDLE'", "did you mean needle?")),
        (("--tasks", "rulerfile:x"), ("task = 'rulerfile:x'", "named 'rulerfile'", "did you mean ruler-file")),
        (("--placements", "before"), ("placements = 'before'",)),
        (("--policies", "snapkv,triattention"), ("calibration", "triattention", "kvspec calibrate")),
        (("--policies", "snapkv,kvzap"), ("calibration", "kvzap", "kvspec calibrate KVzap/model.safetensors")),
        (("--policies", "fast-kvzip"), ("calibration", "fast-kvzip", "kvspec calibrate gates.safetensors")),
        (
            ("--policies", "triattention", "--calibration", "nowhere.npz"),
            ("nowhere.npz", "must be a file that kvspec calibrate wrote"),
        ),
        (("--length", "0"), ("lengths = 0: must be at least 1",)), (("--length", "long"), ("length = 'long'",)),
        (("--budgets", "1.5"), ("budgets = '1.5'",)),
        (("--length", "20000"), ("lengths = 20000: tokens are more than the 8192 positions of the model; give",)),
        (("--length", "100000000"), ("lengths = 100000000: tokens are more than the 8192 positions of the model",)),
        (("--length", "8190"), ("lengths = 8190: tokens and ", "of question and answer are more than the 8192",)),
        (("--budgets", "0.9,0.90"), ("budgets = '0.90'", "is 180 of 200 tokens, as is budget 0.9")),
        (("--device", "cuda:77"), ("device = 'cuda:77'", "choose from cpu")),
        (("--device", "toaster"), ("device = 'toaster'", "choose from cpu")),
        (("--dtype", "int8"), ("dtype = 'int8'", "must be one of auto, float32")),
        (("--attn", "flash_attention_2"), ("attn", "must be one of auto, sdpa, eager")),
        (("--batch-size", "0"), ("batch_size = 0", "at least 1")), (("--backend", "cobol"), ("cobol",)),
        (("--seed", "-1"), ("seed", "negative")), (("--samples", "0"), ("samples = 0: must be at least 1",)),
        (("--seed", "9" * 20), ("seeds = 99999999999999999999", "at most 9007199254740992")),
        (("--samples", "1000001"), ("contexts = 1000001: must be at most 1000000",)),
        (("--model", "a\udcff", "--write-rules", "r.toml"), ("write_rules = 'r.toml'", "a\\udcff", "is not UTF-8")),
        (("--budgets", "1"), ("budgets = '1'", "is one token: write 1.0")),
        (("--length", "9"), ("length = 9", "need")), (("--workers", "0"), ("workers = 0", "at least 1")),
        (("--engine", "slurm"), ("engine = 'slurm'",)), (("--address", "auto"), ("address = 'auto'",)),
        (("--table", "t.xls"), ("must end in .csv or .tex",)), (("--figure", "f.gif"), ("must end in .svg or .pdf",)),
        (("--table", f"{__file__}/t.csv"), ("table = ", "cannot be created as a folder")),
        (("--write-rules", f"{__file__}/r.toml"), ("write_rules = ", "cannot be created as a folder")),
        (("--write-rules", "r.toml", "--table", "t.csv"), ("table = 't.csv': cannot be used with --write-rules",)),
        (("--write-rules", "r.toml", "--again"), ("again = True: cannot be used with --write-rules",)),
    ],
)
def test_compare_refuses_before_any_work(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, refusal: Refusal,
) -> None:
    message = refusal(["compare", *SHORT, "--out", str(tmp_path / "new" / "out"), *arguments])
    assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare --polices x", ("--polices", "--policies", "kvspec compare --help")),
        ("compare --samples long", ("'--samples'", "integer", "kvspec compare --help")),
        ("nothing", ("'nothing'", "kvspec --help")), ("study", ("'--rules'", "kvspec study --help")),
        ("compare --grid b", ("grid = 'b'", "must be one of appendix-a, extensions")),
        ("compare --grid extensions --policies x", ("policies = 'x'", "cannot be used with --grid")),
        ("compare --budgets 0,3", ("budgets = '0,3'", "did you mean 0.3?")),
        ("compare --budgets 0.5,0,30%", ("budgets = '0,30%'", "did you mean 0.30%?")),
        (["compare", "--budgets", "30 %"], ("budgets = '30 %'", "did you mean 30%?")),
        (["compare", "--budgets", "0.3 0.5"], ("budgets = '0.3 0.5'", "separate entries by commas: 0.3,0.5")),
        (["compare", "--policies", "snapkv(W=16) h2o"], ("= 'snapkv(W=16) h2o'", "separate entries by commas")),
        ("compare --policies snapkv, h2o", ("unexpected extra argument", "(h2o)", "without spaces beside the commas")),
        ("compare --text --questions q.csv", ("(q.csv)", "type a value between --text and --questions")),
        ("compare --force x", ("(x)", "--option before the value")),
        ("keep x.txt --policy snapkv", ("use `with policy(model)`, or choose crystalcache, streamingllm")),
        ("tasks needel", ("task = 'needel'", "did you mean needle")),
        ("keep x.txt --model smolm2", ("model = 'smolm2'", "did you mean smollm2?")),
        ("compress x.txt --model ./smolm2", ("model = './smolm2'", "did you mean smollm2?")),
        ("keep x.txt --budget 1", ("budget = '1'", "is one token: write 1.0")),
        ("archive put x.txt --policy snapkv --budget 1", ("budget = '1'", "is one token: write 1.0")),
        ("archive put x.txt --archive x.txt", ("archive = 'x.txt'", "cannot be created as a folder (Not a directory)")),
        ("archive inject a b a --ask x", ("KEY = 'a'", "is given twice")),
        ("study --audit . --part all", ("part = 'all'", "cannot be used with --audit: leave out one of the two")),
        ("study --audit . --status .", ("status = '.'", "cannot be used with --audit")),
        ("study --status . --rules x.txt", ("rules = 'x.txt'", "cannot be used with --status")),
        ("study --status . --again", ("again = True", "cannot be used with --status")),
        ("calibrate heads.tsv --tokens 300", ("tokens = 300", "heads.tsv has none: leave it out")),
        ("compare --policies snapkv,h2o,snapkv", ("policies = 'snapkv'", "is given twice: leave out one of the two")),
        ("paper crystal", ("NAME = 'crystal'", "must be one of crystalcache, diversity, nestedkv, injection")),
    ],
)
def test_a_mistake_in_the_call_is_one_line_too(
    words: str | list[str], message: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
) -> None:
    (tmp_path / "x.txt").write_text("Some words.", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    actual = refusal(words.split() if isinstance(words, str) else words)
    assert all(part in actual for part in message), actual


VERIFY = (
    "import sys; from conformance.verify import __main__ as verify; sys.argv[1:] = ['--backend', 'numpy'];"
    "verify.judge = lambda request: print('verdict'); sys.exit(verify.main())"
)


@pytest.mark.parametrize("words", [
    ("-m", "kvspec", "--help"), ("-m", "kvspec", "tasks"), ("-m", "kvspec", "models", "fetch", "--help"),
    ("-c", VERIFY),
], ids=["help", "tasks", "fetch", "verify"])
def test_a_reader_that_ends_gets_no_message(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writer)
    assert ended.returncode in (1, 141), ended
    assert ended.stderr == ""


@pytest.mark.parametrize("command", ["keep", "explain", "compress", "calibrate", "archive put", "compare"])
@pytest.mark.parametrize(
    ("model", "words"),
    [("none", "is a folder without config.json"), ("x.txt", "is a file, but not a GGUF file"),
     ("pipe", "has the pipe 'tokenizer.json' in place of a file"),
     ("broken", "cannot be loaded ("), ("no/model", "is no folder on this machine"),
     ("./no", "is no folder on this machine")],
)
def test_a_model_that_is_none_is_named_with_what_to_type(
    command: str, model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal,
) -> None:
    """Check that every command has this check, and does not contact the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "x.txt").write_text("Some words.", encoding="utf-8")
    (tmp_path / "none").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "pipe").mkdir()
    for name in ("broken", "pipe"):
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    arguments = [*SHORT, "--out", "out"] if command == "compare" else ["x.txt"]
    message = refusal([*command.split(), *arguments, "--model", model])
    assert f"model = '{model}': {words}" in message
    assert "'pocket', 'chat', 'smollm2'" in message


@pytest.mark.parametrize("command", ["compare", "compress", "calibrate", "keep", "archive put"])
def test_a_text_beyond_the_models_positions_is_refused(command: str, tmp_path: Path, refusal: Refusal) -> None:
    text, out = tmp_path / "long.txt", str(tmp_path / "out")
    text.write_text("The river runs past the old mill. " * 1200, encoding="utf-8")
    arguments = {
        "compare": ["--length", "20000", "--samples", "1", "--out", out], "compress": [str(text)],
        "calibrate": [str(text), "--tokens", "9000", "--out", out], "keep": [str(text), "--policy", "streamingllm"],
        "archive put": [str(text), "--archive", out],
    }
    message = refusal([*command.split(), *arguments[command]])
    assert re.search(r"(lengths|PROMPT|tokens|token_ids|TEXT) = \d+: tokens are more than the 8192 positions", message)
    assert not list(tmp_path.glob("out/objects/*"))
    assert not (tmp_path / "out").is_file()


@pytest.mark.law("as-it-is-described")
def test_a_stretched_rotation_reaches_further() -> None:
    """Check a rotation like Qwen2.5's YaRN, whose files state the original range.

    Without a range, any length is accepted.
    """
    def config(**rope: Any) -> LlamaConfig:
        return LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})

    yarn = config(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    for rope, most in ((config(rope_type="default"), 64), (yarn, 256), (config(rope_type="linear", factor=2.0), 128)):
        check_positions(rope, "length", most - 10, 10)
        with pytest.raises(SpecError, match=rf"length = {most}: tokens and 1 of question .* give at most {most - 1}$"):
            check_positions(rope, "length", most, 1)
    check_positions(PretrainedConfig(), "length", 10**9)


@pytest.mark.law("as-it-is-described")
def test_a_policy_is_held_to_its_own_floor_alone(tmp_path: Path) -> None:
    """Check that each policy is compared only with its floor, for budgets of few tokens.

    A policy without a floor gets few tokens. A policy with a floor causes a warning.
    """
    asked = ["--length", "200", "--samples", "1", "--tasks", "needle", "--out", str(tmp_path), "--budgets", "0.1"]
    ran = CliRunner().invoke(app, ["compare", *asked, "--policies", "knorm,streamingllm,snapkv"])
    assert ran.exit_code in (0, 1), ran.output
    words = " ".join(ran.output.split())
    assert words.count("warning: budget 0.1 is 20 of 200 tokens") == 1
    assert "but snapkv always keeps the last 32 tokens" in words
    assert re.search(r"snapkv\W+0\.1\W+32 of 20", words)
    assert re.search(r"knorm\W+0\.1\W+20 of 20", words)
    rows = load_rows(tmp_path / "study.jsonl")
    kept = {cell["policy"]: cell["kept"] for row in rows for cell in row["cells"]}
    assert (kept["knorm"], kept["streamingllm"], kept["snapkv"], kept["window holds needle"]) == (20, 20, 32, 132)


@pytest.mark.parametrize("command", ["compare", "demo"])
def test_an_out_that_cannot_be_made_is_refused_first(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that the folder is checked before the model, which does not exist."""
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for out in (tmp_path / "file", tmp_path / "file" / "deep"):
        monkeypatch.setattr(sys, "argv", ["kvspec", command, "--out", str(out)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown, errors = capsys.readouterr()
        assert shown.startswith("kvspec demo: compares three policies" if command == "demo" else "")
        assert stopped.value.code == 2
        assert errors.startswith(f"kvspec: out = '{out}': cannot be created as a folder")
        assert errors.count("\n") == 1
    assert (tmp_path / "file").read_text(encoding="utf-8") == "x"


def test_a_look_at_a_folder_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a check creates no folder.

    Check against a defect: workers of one study removed each other's folders.
    """
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(os, "mkdir", lambda *given, **names: pytest.fail(f"made {given}"))
    check_folder("out", tmp_path / "a" / "b", "study.jsonl")
    for name in ("link", "x" * 300):
        with pytest.raises(SpecError, match="cannot be created as a folder"):
            check_folder("out", tmp_path / name, "study.jsonl")


def test_a_file_of_results_that_is_none_is_named_first(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "study.jsonl").write_text("no row\n", encoding="utf-8")
    message = refusal(["compare", *SHORT, "--out", str(tmp_path), "--model", "/nowhere"])
    assert "study.jsonl:1" in message


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_calibrating_on_nothing_keeps_the_old_statistics(text: str, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "empty.txt").write_text(text, encoding="utf-8")
    (tmp_path / "c.npz").write_bytes(b"old")
    message = refusal(["calibrate", str(tmp_path / "empty.txt"), "--out", str(tmp_path / "c.npz"), "--force"])
    assert "TEXT" in message
    assert "must not be empty" in message
    assert (tmp_path / "c.npz").read_bytes() == b"old"


def test_files_that_cannot_be_written_are_refused_first(tmp_path: Path, refusal: Refusal) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Some words. And more of them.", encoding="utf-8")
    for arguments in (
        ["calibrate", str(text), "--out", str(tmp_path)], ["calibrate", str(text), "--out", str(text / "x.npz")],
        ["explain", str(text), "--out", str(tmp_path)],
    ):
        message = refusal([*arguments, "--model", "/nowhere"])
        assert re.search("must be a file, but is a folder|cannot be created as a folder", message)
    message = refusal(["compress", str(tmp_path / "b.txt")])
    assert "cannot be read (No such file or directory): give the path of a file" in message


@pytest.mark.parametrize(("name", "content", "words"), [
    ("no.txt", None, "TEXT = '{}': cannot be read (No such file or directory): give the path of a file"),
    ("no.pt", None, "TEXT = '{}': cannot be read (No such file or directory): give the path of a file"),
    ("no.safetensors", None, "TEXT = '{}': cannot be read (No such file or directory): give the path of a file"),
    ("no.toml", None, "rules = '{}': cannot be read (No such file or directory): give the path of a file"),
    ("a.txt", b"one\ntw\xf6", "TEXT = '{}': is not UTF-8 (byte 0xf6 in line 2): save the file with the encoding UTF-8"),
    ("a.toml", b"\xf6", "rules = '{}': is not UTF-8 (byte 0xf6 in line 1): save the file with the encoding UTF-8"),
    ("a.npz", b"PK", "TEXT = '{}': is a calibration file, which this command writes; give the text to read"),
])
def test_a_wrong_file_to_calibrate_is_named_before_the_model_is_loaded(
    name: str, content: bytes | None, words: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    monkeypatch.setattr(Loading, "subject", lambda loading: pytest.fail("the model was loaded"))
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert words.format(path) in refusal(["calibrate", str(path), "--out", str(tmp_path / "c.npz")])


def test_a_head_pattern_that_is_no_table_is_named(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xf6")
    assert f"path = '{path}': is not UTF-8 (byte 0xf6 in line 1)" in refusal(["calibrate", str(path)])


@pytest.mark.parametrize("model", ["no/model", "./no", "/no", "no/such/model"])
def test_no_command_asks_the_hub_in_vain(model: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that does not exist was looked up on the hub, for 47 s without a network."""
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("the hub is asked"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("the hub"))
    for command in ["keep"] if model == "no/model" else ["keep", "compress"]:
        message = refusal([command, __file__, "--model", model])
        assert f"model = '{model}': is no folder on this machine" in message
        assert "'pocket', 'chat', 'smollm2', or a folder" in message or "'smollm2', a folder" in message


@pytest.mark.law("figures-are-counted-right")
def test_controls_that_fail_are_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all results are still printed and written."""
    monkeypatch.setattr("experiments.studies.evidence.measure.score", lambda *given: True)
    result = CliRunner().invoke(app, ["compare", *SHORT, "--policies", "fullcache", "--out", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert "controls FAIL: without needle (Needle)" in " ".join(result.output.split())
    assert (tmp_path / "report.html").exists()


def test_a_warning_of_a_command_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()

    def warned(**_: object) -> None:
        shown.append(warnings.formatwarning(UserWarning("a short budget,\nkept whole"), UserWarning, "app.py", 3))

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr("kvspec.cli.app.app", warned)
    with pytest.raises(SystemExit):
        cli.main()
    assert shown == ["warning: a short budget, kept whole\n"]


@pytest.mark.law("as-it-is-described")
def test_progress_is_lines_where_there_is_no_terminal() -> None:
    stream = StringIO()
    with progress_bar(Console(file=stream, width=30), 4, every=0.0, after=0.0) as progress:
        for at in range(4):
            progress(f"a long description of cell {at}")
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert [line.endswith(" to go") for line in lines] == [False, True, True, True]
    stream = StringIO()
    with progress_bar(Console(file=stream), 1000, every=60.0, after=0.0) as progress:
        for _ in range(1000):
            progress("x")
    assert len(stream.getvalue().splitlines()) == 2
    stream = StringIO()
    for terminal in (False, True):  # A run of less than two seconds shows nothing.
        with progress_bar(Console(file=stream, force_terminal=terminal), 2) as progress:
            progress("x")
            progress("x")
    assert stream.getvalue() == ""


@pytest.mark.law("figures-are-counted-right")
def test_the_time_to_go_leaves_out_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part includes loading and compilation: 60 s here, then 1 s for each part."""
    clock = iter([0.0, 60.0, 61.0, 62.0])
    monkeypatch.setattr("experiments.studies.report.time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = StringIO()
    with progress_bar(Console(file=stream), 100, every=0.0) as progress:
        for _ in range(3):
            progress("x")
    assert stream.getvalue().splitlines() == ["1/100  x", "2/100  x  0:01:38 to go", "3/100  x  0:01:37 to go"]


@pytest.mark.law("as-it-is-described")
def test_a_model_is_loaded_as_it_is_told() -> None:
    plain, other = Loading("pocket", "numpy").subject(), Loading("pocket", "numpy", "cpu", "float64", "eager").subject()
    assert other.model.dtype.itemsize == 8
    assert other.model.config._attn_implementation == "eager"
    assert other.name.startswith("pocket+eager@")
    assert plain.name.startswith("pocket@")
    assert plain.name.partition("@")[2] != other.name.partition("@")[2]


@pytest.mark.parametrize("name", ["crystalcache", "injection"])
def test_all_models_of_a_paper_are_loaded_before_a_sample_is_measured(
    name: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    for owner, function in ((study_runs.Work, "measure"), (paper_injection, "_measure")):
        monkeypatch.setattr(owner, function, lambda *_: pytest.fail("a sample was measured"))
    line = ["paper", name, "--quick", "--models", "pocket,/nowhere", "--out", str(tmp_path / "new")]
    assert "/nowhere" in refusal(line)


@pytest.mark.parametrize("line", [["explain", __file__], ["archive", "put", __file__]])
def test_a_calibration_that_no_policy_uses_is_named(line: list[str], refusal: Refusal) -> None:
    assert "calibration = 'c.npz': needs a policy that uses the file" in refusal([*line, "--calibration", "c.npz"])


@pytest.mark.parametrize(("words", "shown"), [
    (["--tasks", "haystack"], "task = 'haystack'"), (["--policies", "snapkw"], "policy = 'snapkw'"),
    (["--batch-size", "0"], "batch_size = 0"), (["--policies", "triattention"], "calibration = None"),
    (["--budgets", "64MiB,1.5"], "budgets = '1.5'"), (["--models", "pocket,chat"], "give one model"),
    (["--questions", "nowhere.csv"], "nowhere.csv"), (["--write-rules", "."], "write_rules = '.'"),
])
def test_a_memory_loads_the_model_after_all_other_checks(
    words: list[str], shown: str, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Loading, "subject", lambda loading: pytest.fail("the model was loaded"))
    budgets = [] if "--budgets" in words else ["--budgets", "64MiB"]
    assert shown in refusal(["compare", *budgets, *words])


def test_a_memory_is_a_budget_of_commands_that_load_the_model(
    tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test that the error of other commands has a budget to type."""
    text, out, rules = tmp_path / "text.txt", tmp_path / "page.html", tmp_path / "rules.toml"
    text.write_text("The river runs past the old mill. " * 40, encoding="utf-8")
    put = ["archive", "put", str(text), "--policy", "snapkv", "--archive", str(tmp_path / "archive")]
    for line in (["compress", str(text)], ["explain", str(text), "--out", str(out)], ["keep", str(text)], put):
        done = CliRunner().invoke(app, [*line, "--budget", "512KiB", "--backend", "numpy"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    table = {"models": ["pocket"], "contexts": 1, "questions": 1, "seeds": [0], "lengths": [200], "tasks": ["needle"]}
    table |= {"title": "t", "placements": ["after"], "policies": ["snapkv"], "budgets": ["64MiB"]}
    rules.write_text(rules_text(**table), encoding="utf-8")
    assert f"budgets = '64MiB': {MEMORY}" in refusal(["study", "--rules", str(rules), "--out", str(tmp_path)])
