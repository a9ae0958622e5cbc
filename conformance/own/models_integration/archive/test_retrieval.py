"""Retrieval: rankings in a total order, and weights that must be whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from models_integration.archive.retrieval import dense, lexical, measured, reranked, retrieved
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

CORPUS = {
    "a": "The lighthouse keeper painted the door green.", "b": "Our train to Lisbon leaves at noon.",
    "c": "The green door of the lighthouse is locked.", "d": "Nobody knows the password.",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in CORPUS.values() for word in text.split()})]


def saved(folder: Path, kind: type) -> Path:
    """A tiny model with its tokenizer."""
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        id2label={0: "relevant"},
    )
    kind(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    return folder


def test_bm25_finds_the_words() -> None:
    pytest.importorskip("bm25s")
    rank = lexical(CORPUS)
    assert rank("When does the train to Lisbon leave?")[0] == "b"
    assert set(rank("green lighthouse door")[:2]) == {"a", "c"}
    assert rank("nothing of this") == rank("nothing of this")
    assert sorted(rank("zzz")) == rank("zzz") == sorted(CORPUS)


@pytest.mark.parametrize("query", ["", "  ", "?!", "\u0301"])
def test_bm25_copes_with_nothing(query: str) -> None:
    """An empty query, an empty corpus, and one without a word."""
    pytest.importorskip("bm25s")
    assert lexical(CORPUS)(query) == sorted(CORPUS)
    assert lexical({})(query) == lexical({})("door") == []
    assert lexical({"b": "", "a": "..."})(query) == lexical({"b": "", "a": "..."})("door") == ["a", "b"]
    assert lexical({"a": "", "b": "door"})("door") == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("昨日、灯台守は扉を緑に塗った。", "緑の扉"),
        ("リスボン行きの列車は正午に出発する。", "列車はいつ出発しますか"),
        ("รหัสลับของโครงการคือเจ็ดสี่", "รหัสลับคืออะไร"), ("ລະຫັດລັບ", "ລະຫັດ"),
        ("ｶﾞﾗｽの門", "ガラス"), ("猫", "猫"), ("पासवर्ड किसी को नहीं पता", "पासवर्ड क्या है"),
    ],
)
def test_bm25_finds_words_of_every_script(text: str, query: str) -> None:
    """Without spaces, and with vowels that are marks, not letters."""
    pytest.importorskip("bm25s")
    others = {"a": "その他の文書です。", "b": "ข้อความ", "c": "ປະເທດ", "d": "और कुछ"}
    assert lexical({**others, "z": text})(query)[0] == "z"


def test_bm25_takes_an_accent_however_it_is_written() -> None:
    pytest.importorskip("bm25s")
    pairs = [("café", "cafe\u0301"), ("Ångström", "A\u030angstro\u0308m"), ("ﬁnal", "FINAL"), ("STRASSE", "straße")]
    for one, other in pairs:
        for corpus in ({"a": "other words", "z": f"the {one} door"}, {"a": "cafe angstrom", "z": other}):
            assert lexical(corpus)(one)[0] == lexical(corpus)(other)[0] == "z"


def test_no_corpus_and_no_text_are_ranked_by_every_encoder(tmp_path: Path) -> None:
    folder = saved(tmp_path, BertModel)
    assert dense({}, folder)("x") == []
    assert dense(CORPUS, folder)("") == sorted(CORPUS)
    assert sorted(dense({"a": "", "b": "password"}, folder)("password")) == ["a", "b"]


def test_an_encoder_without_a_download_knows_synonyms() -> None:
    """BM25 sees no common word; WordLlama's weights are in its wheel, and no name server is asked."""
    pytest.importorskip("wordllama")
    code = (
        "import json, logging, socket, sys;"
        "asks = ('socket.connect', 'socket.getaddrinfo');"
        "sys.addaudithook(lambda name, args: name in asks and sys.exit(3));"
        "from models_integration.archive.retrieval import static;"
        "handlers = list(logging.root.handlers);"
        f"corpus = {CORPUS!r};"
        "found = static(corpus)('Which railway departs at midday?'), static(corpus)(''), static({})('x');"
        "assert logging.root.handlers == handlers;"
        "print(json.dumps(found))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    first, empty, nothing = json.loads(made.stdout)
    assert first[0] == "b"
    assert empty == sorted(CORPUS)
    assert nothing == []


def test_an_encoder_ranks_every_chunk(tmp_path: Path) -> None:
    rank = dense(CORPUS, saved(tmp_path, BertModel))
    assert all(rank(text)[0] == name for name, text in CORPUS.items())
    assert sorted(rank("password")) == sorted(CORPUS)


def test_a_cross_encoder_orders_what_it_is_given(tmp_path: Path) -> None:
    order = reranked(CORPUS, saved(tmp_path, BertForSequenceClassification))
    assert sorted(order("password", ["c", "a"])) == ["a", "c"]
    assert order("password", ["c", "a"]) == order("password", ["a", "c"])


@pytest.mark.law("refused-before-anything-changes")
def test_a_head_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    """A bare encoder as a cross-encoder would get a random head, and another order in each run."""
    with pytest.raises(SpecError, match="classifier"):
        reranked(CORPUS, saved(tmp_path, BertModel))
    with pytest.raises(SpecError, match="must be a folder"):
        dense(CORPUS, tmp_path / "nowhere")


@pytest.mark.law("decided-as-the-reference")
def test_rankings_are_joined() -> None:
    assert retrieved("q", [lambda q: ["b", "a", "c"], lambda q: ["a", "b", "d"]], 3) == ["a", "b", "c"]


@pytest.mark.law("figures-are-counted-right")
def test_measures_count_before_and_after_reranking() -> None:
    truth = {"q": "a", "r": "b"}
    before = measured({"q": ["c", "d", "a"], "r": ["b", "a", "c"]}, truth)
    after = measured({"q": ["a", "c", "d"], "r": ["b", "a", "c"]}, truth)
    assert before == {"r@1": 0.5, "r@3": 1.0, "r@5": 1.0, "gt_in_top3": 1.0}
    assert after["r@1"] == 1.0
    assert after["gt_in_top3"] == before["gt_in_top3"]


@pytest.mark.law("refused-before-anything-changes")
def test_measures_of_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match="truth = 0"):
        measured({}, {})
    with pytest.raises(SpecError, match="selections = 'q'"):
        measured({}, {"q": "a"})
