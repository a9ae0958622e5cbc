"""Policies compared on the user's texts and questions: read once, answered as in a session, graded as requested."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("transformers", reason="the comparison drives transformers models")

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

import kvspec
from conformance.paths import ROOT
from experiments.studies.evidence.rules import load_rules
from experiments.studies.results import load_rows
from experiments.tasks import Placement, questions
from experiments.tasks.needle import QUESTION_FRAME
from kvspec import cli
from kvspec.cli.app import app
from models_integration import observe, policy_from_name
from models_integration.model.frame import decode, encode, opening_ids
from models_integration.pocket import load_pocket
from models_integration.policies.sizes import bytes_per_token
from spec.errors import SpecError
from spec.files import read_file
from tests.experiments.studies.experiments import Page, answer

pytestmark = pytest.mark.law("as-it-is-described")

FILLER = "The river runs past the old mill. "
AURORA = "The secret code for Project Aurora is 7492. "
TEXT = FILLER * 12 + AURORA + FILLER * 30
OTHER = FILLER * 30 + "The budget of the new library is 5310. " + FILLER * 30
CODE = {"question": "What is the secret code for Project Aurora?", "answer": "7492"}
MONTH = {"question": "What is the secret code for Project Borealis?", "answer": "1111", "evidence": "past the old mill"}
ASKED = [{**CODE, "evidence": AURORA.strip()}, MONTH]

Pocket = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return load_pocket()


def put(folder: Path, *rows: dict[str, Any], name: str = "q.csv", text: str = TEXT) -> list[str]:
    """Write a text file and a file of questions, and return the options that name them."""
    (folder / "t.txt").write_text(text, encoding="utf-8")
    if name.endswith(".csv"):
        pd.DataFrame(list(rows)).to_csv(folder / name, index=False)
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["--questions", name, *([] if rows and "text" in rows[0] else ["--text", "t.txt"])]


def ran(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", *arguments, "--backend", "numpy", "--policies", "streamingllm,snapkv"])
    assert result.exit_code == code, result.output
    return result.output


def test_a_text_and_questions_give_every_answer_a_table_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pocket: Pocket,
) -> None:
    """Check all questions, without a length or evidence. The command and the Python call give the same table."""
    monkeypatch.chdir(tmp_path)
    given = put(tmp_path, CODE, {**MONTH, "evidence": ""})
    outputs = ["--answers", "a.csv", "--table", "t.csv", "--figure", "f.svg", "--budgets", "0.3,200"]
    shown = ran(*given, *outputs)
    assert "streamingllm" in shown
    assert "Mean score of the full cache: 0.50; without the text: 0.00; 2 questions." in shown
    answers = pd.read_csv("a.csv", dtype={"budget": str, "expected": str})
    assert len(answers) == 2 * (2 * 2 + 2)
    assert answers["question"].unique().tolist() == [CODE["question"], MONTH["question"]]
    full = answers[answers["policy"] == "fullcache"]
    assert full["score"].tolist() == [1.0, 0.0]
    assert full["recovery"].tolist()[0] == 1.0
    assert answers["evidence_kept"].isna().all()
    assert set(answers["tokens_kept"][answers["budget"] == "200"]) == {200.0}
    counted = pd.read_csv("t.csv")
    assert (counted["n"] == 2).all()
    assert "q.csv (contains)" in Path("results/report.html").read_text(encoding="utf-8")
    assert "<!-- streamingllm -->" in Path("f.svg").read_text(encoding="utf-8")
    rows = load_rows(Path("results/study.jsonl"))
    ran(*given, *outputs)
    assert load_rows(Path("results/study.jsonl")) == rows  # No cell is measured twice.
    called = kvspec.compare(
        *pocket, "q.csv", Path("t.txt"), policies=["streamingllm", "snapkv"], budgets=[0.3, 200], backend="numpy"
    )
    pd.testing.assert_frame_equal(called.astype(answers.dtypes.to_dict()), answers)


@pytest.mark.law("figures-are-counted-right")
def test_the_report_and_the_table_have_the_recoveries_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check two questions about one text, which give no interval."""
    monkeypatch.chdir(tmp_path)
    shown = ran(*put(tmp_path, CODE, {**MONTH, "evidence": ""}), "--budgets", "0.3", "--table", "t.csv")
    printed = dict(re.findall(r"^ ?(\w+) +[\d.]+ +(-?\d\.\d\d) *$", shown.partition("Recovery of")[2], re.M))
    assert printed.keys() == {"streamingllm", "snapkv", "fullcache"}
    page = Page(Path("results/report.html").read_text(encoding="utf-8"))
    table = page.table("Table of recovery, q.csv (contains), question after, n = 2")
    for policy in ("streamingllm", "snapkv"):
        recovery, *interval = table.line(policy, "0.3")[3:]
        assert float(recovery) == pytest.approx(float(printed[policy]), abs=0.0056)
        assert interval == ["", ""]
    best = max(("streamingllm", "snapkv"), key=lambda policy: float(printed[policy]))
    (highest,) = page.table("Highest recovery").lines[1][1:]
    assert highest.startswith(f"{best} {printed[best]}one text, so no test")
    assert not any("no recovery" in note for note in page.notes)
    others = "Missing controls", "Part all", "pass the rules file", "Published results", "tasks that the full cache"
    assert not [words for words in others if words in page.text]
    answers = page.table(f"{CODE['question']} Expected: 7492 (text 0, question after)").lines[1:]
    assert [line[:2] for line in answers[:2]] == [["fullcache", "1.0"], ["blind", "0"]]
    assert {line[0] for line in answers} == {"fullcache", "blind", "streamingllm", "snapkv"}
    (full,) = (line for line in answers if line[0] == "fullcache")
    assert full[2:] == ["The secret code for Project Aurora is 7492.", "1.00"]
    counted = pd.read_csv("t.csv").set_index("policy")
    assert set(counted["task"]) == {"q.csv (contains)"}
    assert {policy: f"{value:.2f}" for policy, value in counted["recovery"].items()} == printed


@pytest.mark.parametrize(("policy", "budget"), [("snapkv", 0.3), ("streamingllm", 0.5), ("h2o", 0.4)])
def test_an_answer_is_that_of_a_session_that_reads_the_question_after_the_eviction(
    policy: str, budget: float, pocket: Pocket,
) -> None:
    model, tokenizer = pocket
    actual = kvspec.compare(model, tokenizer, ASKED, TEXT, policies=[policy], budgets=[budget])
    context = (*opening_ids(tokenizer), *encode(tokenizer, TEXT))
    ends = model.generation_config.eos_token_id
    stops = frozenset(ends if isinstance(ends, list) else [ends])
    for one in ASKED:
        asked = encode(tokenizer, "\n\n" + QUESTION_FRAME.format(question=one["question"]))
        answer_ids, kept = answer(
            model, policy_from_name(policy, budget), Placement("after", context, 0, asked), 50, stops
        )
        (line,) = actual[(actual["policy"] == policy) & (actual["question"] == one["question"])].to_dict("records")
        assert line["answer"] == decode(tokenizer, answer_ids.token_ids).strip()
        assert line["tokens_kept"] == np.mean([len(group) for group in kept])
        assert line["prompt_tokens"] == len(context)


def test_a_text_is_read_once_for_all_its_questions_and_policies(
    monkeypatch: pytest.MonkeyPatch, pocket: Pocket,
) -> None:
    """Check two texts. Neither is truncated or padded. Questions are grouped by text, in any order of the rows."""
    read = list[int]()

    def counted(model: PreTrainedModel, ids: Any, **rest: Any) -> Any:
        read.append(ids.shape[1])
        return observe(model, ids, **rest)

    monkeypatch.setattr("experiments.studies.evidence.kept.observe", counted)
    rows = [{**CODE, "text": TEXT}, {"text": OTHER, "question": "What is the budget?", "answer": ["5310", 9]},
            {**MONTH, "text": TEXT}]
    actual = kvspec.compare(*pocket, rows, policies=["snapkv", "knorm"], budgets=[0.5], backend="numpy")
    tokens = [len(opening_ids(pocket[1])) + len(encode(pocket[1], text)) for text in (TEXT, OTHER)]
    assert read == tokens
    each = actual.drop_duplicates("question")
    assert each["text"].tolist() == [0, 0, 1]
    assert each["prompt_tokens"].tolist() == [tokens[0], tokens[0], tokens[1]]
    assert each["expected"].tolist() == ["7492", "1111", "5310 | 9"]


def test_a_memory_is_a_budget_of_the_function(pocket: Pocket) -> None:
    memory = f"{90 * bytes_per_token(pocket[0])}B"
    actual = kvspec.compare(*pocket, ASKED, TEXT, policies=["streamingllm"], budgets=[memory], backend="numpy")
    assert set(actual[actual["policy"] == "streamingllm"]["tokens_kept"]) == {90}


@pytest.mark.law("figures-are-counted-right")
def test_recovery_and_kept_evidence_are_shares_of_the_full_cache(pocket: Pocket) -> None:
    actual = kvspec.compare(*pocket, ASKED, TEXT, policies=["streamingllm"], budgets=[0.2], backend="numpy")
    by_policy = actual[actual["question"] == CODE["question"]].set_index("policy")
    assert by_policy.loc[["fullcache", "blind"], "recovery"].tolist() == [1.0, 0.0]
    assert by_policy.loc[["fullcache", "blind", "streamingllm"], "evidence_kept"].tolist() == [1.0, 0.0, 0.0]
    assert by_policy.loc["streamingllm", "recovery"] < 0.5  # The code is evicted.
    many = actual[(actual["question"] == MONTH["question"]) & (actual["policy"] == "streamingllm")]
    assert 0 < many["evidence_kept"].item() < 1  # Every occurrence counts: some are among the newest tokens.


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(
    ("grade", "answer", "score"),
    [("contains", "7492", 1), ("contains", "749", 0), ("contains", "The 7492!", 1), ("exact", "7492", 0),
     ("f1", "code 7492", 4 / 9), ("regex", r"is \d{3}2\b", 1), ("regex", r"^7492", 0)],
)
def test_the_grade_is_the_one_asked_for(grade: str, answer: str, score: float, pocket: Pocket) -> None:
    """The answer of the pocket model is "The secret code for Project Aurora is 7492.", for all grades."""
    rows = [{**CODE, "answer": answer}]
    actual = kvspec.compare(*pocket, rows, TEXT, policies=[], budgets=[0.9], grade=grade)
    full = actual[actual["policy"] == "fullcache"]
    assert full["score"].item() == pytest.approx(score)
    assert bool(full["recovery"].isna().item()) is (grade == "regex")


Refusal = Callable[[list[str]], str]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a comparison that must end with exit code 2 before any work, and return its one line of output."""
    monkeypatch.chdir(tmp_path)

    def run(arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["kvspec", "compare", *arguments, "--policies", "snapkv,streamingllm"])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out) == (2, ""), printed
        assert printed.err.startswith("kvspec: ")
        assert printed.err.count("\n") == 1
        assert not (tmp_path / "results").exists()
        return printed.err

    return run


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"question,anwser\nWhat?,1\n", ("questions = 'q.csv, row 1'", "no column 'answer'", "'anwser'")),
        (b"question;answer\nWhat?;1\n", ("no column 'question'", "separate columns by commas")),
        (b"question\tanswer\nWhat, now?\t1\n", ("no column 'question'", "separate columns by commas")),
        (b"question\tanswer\n", ("no column 'question'", "separate columns by commas")),
        (b"What?,1\n", ("'q.csv': must have", "write question,answer as the first line, which is 'What?,1'")),
        (b"What?,1\nWhere?,2\nWho,\n", ("write question,answer as the first line, which is 'What?,1'",)),
        (b"Question,Answer\nWhat?,1\n", ("rename a column to 'question'",)),
        (b"", ("questions = 'q.csv': is empty", "header")), (b"question,answer\n", ("has no question", "write a row")),
        (b"question,answer\nWhat?,\n", ("row 1", "has an empty answer")),
        (b"question,answer\n ,1\n", ("empty question",)),
        (b"question,answer\nWh\xe4t?,1\n", ("is not UTF-8 (byte 0xe4 in line 2)", "save the file")),
        (b"question,answer\nWhat, now?,1\n", ("more cells than the header", "double quotes")),
        (
            b"question,answer,evidence\nWhat?,1,No such words\n",
            ("evidence = 'q.csv, row 1'", "'No such words' is not in"),
        ),
        (b"question,answer,text\nWhat?,1,x\n", ("text = 'q.csv, row 1'", "leave out --text")),
    ],
)
def test_a_file_of_questions_that_is_none_is_refused_with_its_row(
    data: bytes, words: tuple[str, ...], tmp_path: Path, refusal: Refusal,
) -> None:
    (tmp_path / "q.csv").write_bytes(data)
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    message = refusal(["--questions", "q.csv", "--text", "t.txt"])
    assert all(word in message for word in words), message


def test_a_wrong_column_is_refused_before_the_imports_that_take_seconds(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "q.csv").write_text("question,anwser\nWhat?,1\n", encoding="utf-8")
    run = (
        "import sys; from kvspec import cli; sys.argv[1:] = ['compare', '--questions', 'q.csv', '--text', 't.txt']\n"
        "try:\n    cli.main()\nfinally:\n    print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "[]\n"), ended
    assert "no column 'answer'" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--questions", "no.csv"], ("questions = 'no.csv': cannot be read (No such file or directory)",)),
        (["--questions", "t.txt"], ("must end in .csv or .jsonl",)),
        (["--questions", "q.csv"], ("has no column 'text', but 'question', 'answer': add --text FILE",)),
        (["--questions", "q.csv", "--text", "no.txt"], ("text = 'no.txt': cannot be read",)),
        (["--questions", "q.csv", "--text", "empty.txt"], ("text = 'empty.txt': is empty",)),
        (["--questions", "q.csv", "--text", "long.txt"], ("text = 'number 1 of", "the 8192 positions", "shorten")),
        (["--questions", "q.csv", "--text", "t.txt", "--grade", "bleu"], ("grade = 'bleu'", "contains, exact, f1")),
        (["--questions", "(.csv", "--text", "t.txt", "--grade", "regex"], ("answer = '(.csv, row 1'", "regular exp")),
        (["--questions", "q.csv", "--text", "t.txt", "--length", "99"], ("length = '99': cannot be used with --q",)),
        (["--questions", "q.csv", "--text", "t.txt", "--answers", "a.txt"], ("answers = 'a.txt': must end in .csv",)),
        (["--text", "t.txt"], ("text = 't.txt': needs your own questions",)),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_to_type(
    arguments: list[str], words: tuple[str, ...], tmp_path: Path, refusal: Refusal,
) -> None:
    put(tmp_path, CODE)
    put(tmp_path, {**CODE, "answer": "("}, name="(.csv")
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "long.txt").write_text(FILLER * 2000, encoding="utf-8")
    message = refusal(arguments)
    assert all(word in message for word in words), message


def test_a_spreadsheet_s_mark_and_quoted_commas_are_no_part_of_a_question(tmp_path: Path, pocket: Pocket) -> None:
    (tmp_path / "q.csv").write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"What is it, then?",007\r\n"A\nB",NA\r\n')
    actual = kvspec.compare(*pocket, tmp_path / "q.csv", TEXT, policies=[], budgets=[0.9])
    full = actual[actual["policy"] == "fullcache"]
    assert full["question"].tolist() == ["What is it, then?", "A\nB"]
    assert full["expected"].tolist() == ["007", "NA"]


@pytest.mark.parametrize("name", ["q.csv", "q.jsonl"])
def test_files_of_questions_are_read_once_and_again_after_a_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given, read = [*put(tmp_path, CODE, name=name), "--budgets", "0.3", "--no-controls"], list[str]()

    def counting(argument: str, path: Path) -> bytes:
        read.append(argument)
        return read_file(argument, path)

    monkeypatch.setattr(questions, "read_file", counting)
    ran(*given)
    assert read == ["questions", "text"]
    put(tmp_path, CODE, MONTH, name=name)
    assert "2 samples" in ran(*given, "--out", "again")
    assert read == ["questions", "text", "questions", "text"]


def test_a_comparison_of_own_questions_is_written_as_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran(*put(tmp_path, CODE, MONTH), "--grade", "f1", "--write-rules", "r.toml")
    rules = load_rules(tmp_path / "r.toml")
    assert rules.tasks == ('questions(file="q.csv", text="t.txt", grade="f1")',)
    assert (rules.contexts, rules.questions) == (1, 2)


USER_TASK = """
from experiments.tasks.context import joined

def DOORS(ground, length, index, seed):
    text = joined(ground, length - 30, index, seed, [ground.encode(" The door is red. The gate is blue.")])
    about, asked = {"task": "doors", "metric": "contains"}, (("Which door?", "red"), ("Which gate?", "blue"))
    return [ground.sample(text.ids, question, "", answer, (), **about) for question, answer in asked]
"""


def test_an_own_task_is_asked_all_its_questions_at_its_own_length_without_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doors.py").write_text(USER_TASK, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "doors", raising=False)
    shown = ran("--tasks", "doors:DOORS", "--length", "300", "--samples", "1", "--budgets", "0.5", "--table", "t.csv")
    assert "doors:DOORS" in shown
    rows = load_rows(tmp_path / "results" / "study.jsonl")
    assert [(row["question"], row["prompt_tokens"]) for row in rows] == [(0, 270), (1, 270)]
    assert (pd.read_csv("t.csv")["n"] == 2).all()


@pytest.mark.parametrize(("rows", "words"), [
    ([], "questions = []: must have at least one row"), (["What?"], "must be rows with question and answer"),
    ([{"question": "What?"}], "questions = 'row 1': has no key 'answer', but 'question': rename a key to 'answer'"),
    (pd.DataFrame([{"question": "What?"}]), "questions = 'row 1': has no column 'answer'"),
    ([{**CODE, "question": ["Which?", "What?"]}], "has 2 entries in 'question': write a row for each entry"),
])
def test_rows_that_are_none_are_refused_in_python(rows: Any, words: str, pocket: Pocket) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        kvspec.compare(*pocket, rows, TEXT)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
def test_a_missing_text_is_not_read_as_a_word(missing: object, pocket: Pocket) -> None:
    """Check that None is not an answer. A defect was to read None as the text "None"."""
    rows = [{**CODE, "text": TEXT}, {**MONTH, "text": missing, "evidence": ""}]
    with pytest.raises(SpecError, match="row 2': has an empty text"):
        kvspec.compare(*pocket, rows)


@pytest.mark.parametrize("answers", [("7492", "x"), np.array(["7492", "x"]), pd.Series(["7492", "x"]).to_numpy()])
def test_several_right_answers_come_in_any_sequence(answers: object, pocket: Pocket) -> None:
    """A data frame that was read from Parquet contains arrays.

    Check that an array is several answers. A defect was to use the text of the array as one answer.
    """
    rows = pd.DataFrame([{**CODE, "answer": answers}, {**MONTH, "answer": "1111", "evidence": None}]).convert_dtypes()
    budgets: Any = np.array([200])
    actual = kvspec.compare(*pocket, rows, TEXT, policies=[], budgets=budgets)
    assert actual["expected"].unique().tolist() == ["7492 | x", "1111"]
    assert actual[actual["policy"] == "fullcache"]["score"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("given", "words"), [
    ({"policies": "snapkv"}, "policies = 'snapkv': must be a list: type policies=['snapkv']"),
    ({"policies": [policy_from_name("snapkv", 0.3)]}, "policies = 'NamedPolicy': must be a list such as policies=['sn"),
    ({"budgets": 0.3}, "budgets = 0.3: must be a list: type budgets=[0.3]"),
    ({"budgets": "30%"}, "type budgets=['30%']"), ({"text": "t.txt"}, "type pathlib.Path('t.txt')"),
    ({"text": None}, "questions = 'row 1': has no key 'text', but 'question', 'answer': add text"),
    ({"text": " "}, "text = ' ': is empty"), ({"text": FILLER * 2000}, "text = 'number 1': "),
    ({"policies": ["snapvk"]}, "policies = 'snapvk': is none of"), ({"placement": "in"}, "placement = 'in': must be"),
    ({"budgets": ["1B"]}, "budgets = '1B': stores 0 tokens"), ({"batch_size": 0}, "batch_size = 0: must be at least 1"),
])
def test_slips_of_a_call_are_refused_with_what_to_type(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pocket: Pocket,
) -> None:
    """A path as text was once compared as a text of two words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(SpecError, match=re.escape(words)):
        kvspec.compare(*pocket, [CODE], **{"text": TEXT, **given})


def test_a_budget_below_what_a_policy_keeps_is_warned_of(pocket: Pocket) -> None:
    """The command warned, but the Python call did not."""
    with pytest.warns(UserWarning, match="budget 20 is 20 of .* tokens, but snapkv always keeps the last 32 tokens"):
        actual = kvspec.compare(*pocket, [CODE], TEXT, policies=["snapkv"], budgets=[20], backend="numpy")
    assert actual.set_index("policy").loc["snapkv", "tokens_kept"] == 32


def test_a_model_and_a_tokenizer_that_are_swapped_are_named(pocket: Pocket) -> None:
    model, tokenizer = pocket
    call: Any = kvspec.compare
    with pytest.raises(SpecError, match=re.escape("kvspec.compare(model, tokenizer, questions, text)")):
        call(tokenizer, model, [CODE], TEXT)
