"""One call in each direction: a chunk from a library equals a chunk that was just computed."""

import logging
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from lab.item_vectors import vocabulary
from models_integration.archive.errors import NoSuchChunk, OtherDtype, OtherFrequencies, WrongModel
from models_integration.archive.library import Library, recommended_form
from models_integration.archive.retrieval import dense, lexical, reranked, retrieved, static
from models_integration.archive.store import Archive
from models_integration.model.rotation import plain_layers, prefilled
from reference.injection.quantisers import ARMS
from reference.injection.wrappers import FORMS, wrap
from spec.errors import SpecError
from tests.models_integration.archive.block_mask import CHAT, ROTATIONS, block_masked, build, ids
from tests.models_integration.archive.test_splice import BOUND, QUERY, SYSTEM, read
from tests.models_integration.session.families import relative

pytestmark = pytest.mark.law("as-it-is-described")

PARTS = [ids(7, 3), ids(6, 5)]


@pytest.mark.parametrize(("markers", "form"), [
    ({"<|im_start|>": [7], "<|im_end|>": [8], "<|end|>": [9]}, "markers"),
    ({"<|im_end|>": [8], "<|end|>": [9]}, "markers_phi3"),
    ({"<｜User｜>": [5], "<｜end▁of▁sentence｜>": [6]}, "markers_deepseek"), ({"<|end|>": [9, 9]}, "raw"),
])
def test_the_recommended_wrapper_has_markers_of_the_model(markers: dict[str, list[int]], form: str) -> None:
    others = {name: [1, 2] for name in ("<|im_start|>", "<|im_end|>", "<|end|>", "<｜User｜>", "<｜end▁of▁sentence｜>")}
    assert recommended_form(vocabulary({**others, **markers})) == form


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize(("family", "form"), [
    *(("Llama", form) for form in ("raw", "full_hidden_preamble", "markers")),
    ("Gemma3Text", "full_hidden_preamble"), ("DeepseekV2", "markers"),
])
def test_put_and_inject_equal_the_block_mask(archive: Archive, family: str, form: str) -> None:
    model = build(family)
    library = Library(archive, model, CHAT, "alice")
    keys = [library.put(part, form) for part in PARTS]
    assert len(archive.entries("alice")) == 2
    assert [library.put(part, form) for part in PARTS] == keys
    cache, markers = library.inject(read(model, SYSTEM)[1], keys)
    wrapped = [wrap(FORMS[form], part, CHAT) for part in PARTS]
    tokens = SYSTEM + [token for one in wrapped for token in one.ids[one.hidden :]]
    assert [tokens[at] in (127, 128) for at in range(len(tokens))] == [at in markers for at in range(len(tokens))]
    oracle = block_masked(model, SYSTEM, [(list(one.ids), one.hidden) for one in wrapped], QUERY)
    assert relative(read(model, QUERY, cache)[0], oracle.logits) < BOUND


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.law("saved-is-what-was")
@pytest.mark.parametrize("codec", ARMS)
def test_every_codec_comes_back_within_its_step(archive: Archive, codec: str) -> None:
    model = build("Llama")
    library = Library(archive, model, CHAT, "alice")
    chunk = library.get(library.put(PARTS[0], codec=codec))
    assert chunk is not None
    for (keys, values), layer in zip(chunk.layers.values(), plain_layers(prefilled(model, PARTS[0])), strict=True):
        for actual, computed in ((keys, layer.keys[0]), (values, layer.values[0])):
            assert relative(actual, computed) <= (0 if codec == "none" else 1 / 127)
    assert chunk.ids == tuple(PARTS[0])


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.law("an-identity-tells-apart")
def test_half_of_the_layers_and_each_input_make_another_key(archive: Archive) -> None:
    library = Library(archive, build("Llama"), CHAT, "alice")
    other = Library(archive, build("Llama"), CHAT, "bob")
    keys = {
        library.put(PARTS[0]), library.put(PARTS[1]), library.put(PARTS[0], "markers"),
        library.put(PARTS[0], codec="kivi"), library.put(PARTS[0], upper=True), other.put(PARTS[0]),
    }
    assert len(keys) == 6
    half = library.get(library.put(PARTS[0], upper=True))
    assert half is not None
    assert sorted(half.layers) == [1]
    with pytest.raises(SpecError, match="upper half of the model has no full-attention layer"):
        Library(archive, build("Gemma3Text", layer_types=["full_attention", "sliding_attention"]), CHAT, "a").put(
            PARTS[0], upper=True
        )


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.law("refused-before-anything-changes")
def test_a_chunk_of_another_model_or_tenant_is_refused_by_name(archive: Archive) -> None:
    model = build("Llama")
    library = Library(archive, model, CHAT, "alice")
    key = library.put(PARTS[0])
    cache = read(model, SYSTEM)[1]
    with pytest.raises(NoSuchChunk, match="bob"):
        Library(archive, model, CHAT, "bob").inject(cache, [key])
    other = build("Llama")
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    for wrong in (other, build("Llama", rms_norm_eps=1e-3)):
        with pytest.raises(WrongModel):
            Library(archive, wrong, CHAT, "alice").inject(cache, [key])
    with pytest.raises(OtherFrequencies):
        Library(archive, build("Llama", rope_parameters=ROTATIONS["yarn"]), CHAT, "alice").inject(cache, [key])
    rounded = build("Llama")
    inner = rounded.get_submodule("model.rotary_emb")
    inner.register_buffer("inv_freq", inner.get_buffer("inv_freq").bfloat16(), persistent=False)
    with pytest.raises(OtherDtype, match="rounds the buffer"):
        Library(archive, rounded, CHAT, "alice").inject(cache, [key])
    assert cache.get_seq_length() == len(SYSTEM)


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.law("refused-before-anything-changes")
def test_names_and_markers_are_checked(archive: Archive) -> None:
    library = Library(archive, build("Llama"), CHAT, "alice")
    with pytest.raises(SpecError, match="form = 'E'"):
        library.put(PARTS[0], "E")
    with pytest.raises(SpecError, match="codec = 'int8'"):
        library.put(PARTS[0], codec="int8")
    with pytest.raises(SpecError, match="must be one token id"):
        library.put(PARTS[0], "markers_deepseek")
    with pytest.raises(SpecError, match="at least one token"):
        library.put([])
    assert archive.entries() == []


@pytest.mark.law("a-splice-equals-a-block-mask")
def test_a_long_chunk_is_archived_under_the_long_frequencies(archive: Archive) -> None:
    """Check longrope: a chunk beyond the first range is re-based into a shorter session."""
    model = build("Llama", rope_parameters=dict(ROTATIONS["longrope"]))
    library = Library(archive, model, CHAT, "alice")
    long = ids(70, 6)
    key = library.put(long)
    cache, _ = library.inject(None, [key], room=len(QUERY))
    assert relative(read(model, QUERY, cache)[0], block_masked(model, [], [(long, 0)], QUERY).logits) < BOUND
    chunk = library.get(key)
    assert chunk is not None
    (name,) = library.rotary.used()
    assert not torch.equal(chunk.rotary.frequencies[name], library.rotary.frequencies[name])


CORPUS = {
    "a": "The lighthouse keeper painted the door green.", "b": "Our train to Lisbon leaves at noon.",
    "c": "The green door of the lighthouse is locked.", "d": "Nobody knows the password.",
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in CORPUS.values() for word in text.split()})]


def saved(folder: Path, kind: type) -> Path:
    """Save a tiny model with its tokenizer."""
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
    """Check an empty query, an empty corpus, and a corpus without words."""
    pytest.importorskip("bm25s")
    assert lexical(CORPUS)(query) == sorted(CORPUS)
    assert lexical({})(query) == lexical({})("door") == []
    assert lexical({"b": "", "a": "..."})(query) == lexical({"b": "", "a": "..."})("door") == ["a", "b"]
    assert lexical({"a": "", "b": "door"})("door") == ["b", "a"]


@pytest.mark.parametrize(("text", "query"), [
    ("昨日、灯台守は扉を緑に塗った。", "緑の扉"),
    ("リスボン行きの列車は正午に出発する。", "列車はいつ出発しますか"),
    ("รหัสลับของโครงการคือเจ็ดสี่", "รหัสลับคืออะไร"), ("ລະຫັດລັບ", "ລະຫັດ"),
    ("ｶﾞﾗｽの門", "ガラス"), ("猫", "猫"), ("पासवर्ड किसी को नहीं पता", "पासवर्ड क्या है"),
])
def test_bm25_finds_words_of_every_script(text: str, query: str) -> None:
    """Check scripts without spaces, and scripts with vowels that are marks instead of letters."""
    pytest.importorskip("bm25s")
    others = {"a": "その他の文書です。", "b": "ข้อความ", "c": "ປະເທດ", "d": "और कुछ"}
    assert lexical({**others, "z": text})(query)[0] == "z"


def test_bm25_takes_an_accent_however_it_is_written() -> None:
    pytest.importorskip("bm25s")
    pairs = [("café", "cafe\u0301"), ("Ångström", "A\u030angstro\u0308m"), ("ﬁnal", "FINAL"), ("STRASSE", "straße")]
    for one, other in pairs:
        for corpus in ({"a": "other words", "z": f"the {one} door"}, {"a": "cafe angstrom", "z": other}):
            assert lexical(corpus)(one)[0] == lexical(corpus)(other)[0] == "z"


def test_an_encoder_without_a_download_knows_synonyms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no server is contacted, because the weights are in the wheel, and that no log handler is added."""
    pytest.importorskip("wordllama")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wordllama"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(logging.root, "handlers", [])
    for holder, name in ((socket.socket, "connect"), (socket, "getaddrinfo")):
        monkeypatch.setattr(holder, name, lambda *_: pytest.fail("a server was asked"))
    assert static(CORPUS)("Which railway departs at midday?")[0] == "b"
    assert static(CORPUS)("") == sorted(CORPUS)
    assert static({})("x") == []
    assert logging.root.handlers == []


def test_an_encoder_ranks_every_chunk(tmp_path: Path) -> None:
    """Check an empty corpus and chunks without text. If the query has no text, the chunks are sorted by name."""
    rank = dense(CORPUS, folder := saved(tmp_path, BertModel))
    assert all(rank(text)[0] == name for name, text in CORPUS.items())
    assert sorted(rank("password")) == rank("") == sorted(CORPUS)
    assert dense({}, folder)("x") == []
    assert sorted(dense({"a": "", "b": "password"}, folder)("password")) == ["a", "b"]


def test_a_cross_encoder_orders_what_it_is_given(tmp_path: Path) -> None:
    order = reranked(CORPUS, saved(tmp_path, BertForSequenceClassification))
    assert sorted(order("password", ["c", "a"])) == ["a", "c"]
    assert order("password", ["c", "a"]) == order("password", ["a", "c"])


@pytest.mark.law("as-it-is-described")
@pytest.mark.law("refused-before-anything-changes")
def test_a_head_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    """Check a bare encoder as a cross-encoder. It would get a random head and a different order in each run."""
    with pytest.raises(SpecError, match="classifier"):
        reranked(CORPUS, saved(tmp_path, BertModel))
    with pytest.raises(SpecError, match="must be a folder"):
        dense(CORPUS, tmp_path / "nowhere")


@pytest.mark.law("as-it-is-described")
@pytest.mark.law("decided-as-the-reference")
def test_rankings_are_joined() -> None:
    assert retrieved("q", [lambda q: ["b", "a", "c"], lambda q: ["a", "b", "d"]], 3) == ["a", "b", "c"]
