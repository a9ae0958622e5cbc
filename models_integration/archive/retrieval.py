"""Finding chunks: BM25, WordLlama, any sentence encoder and any cross-encoder by path, and their rankings joined."""

import logging
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from reference.injection.fusion import fused
from spec.errors import SpecError

__all__ = ["Ranker", "dense", "lexical", "reranked", "retrieved", "static"]

Ranker = Callable[[str], list[str]]
"""Names of all chunks for a query, best first."""

# How Unicode's names of letters begin, in scripts that put no spaces between words.
_UNSPACED = (
    "BOPOMOFO", "CJK", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "IDEOGRAPHIC", "YI ", "THAI", "LAO", "KHMER",
    "MYANMAR", "TIBETAN", "TAI ", "NEW TAI LUE", "JAVANESE", "BALINESE",
)


def _ordered(names: Sequence[str], scores: Sequence[float]) -> list[str]:
    """Return the names by descending score. Names with equal scores, up to rounding, are sorted."""
    pairs = sorted((-round(float(score), 6), name) for name, score in zip(names, scores, strict=True))
    return [name for _, name in pairs]


def lexical(corpus: Mapping[str, str]) -> Ranker:
    """Return a ranking by BM25 over words. In scripts without spaces, terms are letters and pairs of letters.

    BM25 needs no weights. Case and Unicode's different forms of one letter make no difference. If no chunk has a term
    of the query, the chunks are sorted by name.
    """
    import bm25s

    names = sorted(corpus)
    terms = [_terms(corpus[name]) for name in names]
    if not any(terms):
        return lambda query: list(names)
    index = bm25s.BM25()
    index.index(terms, show_progress=False)

    def rank(query: str) -> list[str]:
        asked = _terms(query)
        return _ordered(names, index.get_scores(asked)) if asked else list(names)

    return rank


def _terms(text: str) -> list[str]:
    """Return the terms for BM25: words, and letters and pairs of letters in scripts without spaces."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return [term for kind, letters in groupby(folded, _kind) if kind for term in _cut(kind, "".join(letters))]


def _cut(kind: str, run: str) -> Iterator[str]:
    if kind == "word":
        yield run
    else:
        yield from run
        yield from map("".join, pairwise(run))


@lru_cache(maxsize=65536)
def _kind(letter: str) -> str:
    """Return "word", "unspaced", or "" for a separator. Marks belong to their letters."""
    if unicodedata.name(letter, "").startswith(_UNSPACED) and unicodedata.category(letter)[0] in "LMN":
        return "unspaced"
    return "word" if letter.isalnum() or unicodedata.category(letter)[0] == "M" else ""


def static(corpus: Mapping[str, str]) -> Ranker:
    """Return a ranking by cosines of WordLlama's mean token vectors.

    The wheel of the extra `wordllama` contains the weights, so nothing is downloaded. The vectors are static: synonyms
    have similar vectors, and the order of words makes no difference.
    """
    encoder = _wordllama()

    def embedded(text: str) -> Tensor:
        return torch.nn.functional.normalize(torch.from_numpy(encoder.embed(text)[0]), dim=0)

    return _cosines(corpus, embedded)


def _wordllama() -> Any:
    """Load the encoder from the folder of the installed package. WordLlama looks there only for weights."""
    handlers, level = list(logging.root.handlers), logging.root.level
    import wordllama

    # The import of wordllama calls logging.basicConfig, which would change the log of the user's program.
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    return wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)


def _cosines(corpus: Mapping[str, str], embedded: Callable[[str], Tensor]) -> Ranker:
    names = sorted(corpus)
    if not names:
        return lambda query: []
    matrix = torch.stack([embedded(corpus[name]) for name in names])
    return lambda query: _ordered(names, (matrix @ embedded(query)).tolist())


def dense(corpus: Mapping[str, str], path: Path) -> Ranker:
    """Return a ranking by cosines of mean-pooled states of a sentence encoder.

    The encoder processes one text at a time, so that no score depends on a batch.

    Raises:
        SpecError: if the folder lacks weights of the model.
    """
    model, tokenizer = _loaded(AutoModel, path)

    def embedded(text: str) -> Tensor:
        tokens = tokenizer(text, return_tensors="pt", truncation=True)
        if not tokens["input_ids"].numel():
            return torch.zeros(model.config.hidden_size, device="cpu")
        with torch.no_grad():
            states = model(**tokens).last_hidden_state[0]
        return torch.nn.functional.normalize(states.float().mean(0), dim=0)

    return _cosines(corpus, embedded)


def reranked(corpus: Mapping[str, str], path: Path) -> Callable[[str, Sequence[str]], list[str]]:
    """Return a function that ranks chunks with a cross-encoder, in float32 and one pair at a time.

    Raises:
        SpecError: if the folder lacks weights of the model, because an untrained head ranks at random.
    """
    model, tokenizer = _loaded(AutoModelForSequenceClassification, path)

    def score(query: str, name: str) -> float:
        with torch.no_grad():
            logits = model(**tokenizer(query, corpus[name], return_tensors="pt", truncation=True)).logits[0]
        return float(logits[-1])

    return lambda query, names: _ordered(names, [score(query, name) for name in names])


def _loaded(kind: Any, path: Path) -> tuple[Any, Any]:
    if not Path(path).is_dir():
        raise SpecError("path", str(path), "must be a folder with a model and a tokenizer")
    model, info = kind.from_pretrained(path, output_loading_info=True, dtype=torch.float32, local_files_only=True)
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise SpecError("path", str(path), f"must contain all weights of the model; missing are {', '.join(missing)}")
    model.train(False)
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def retrieved(query: str, rankers: Sequence[Ranker], candidates: int) -> list[str]:
    """Return the first candidates of the joined rankings."""
    return [name for name, _ in fused([ranker(query)[:candidates] for ranker in rankers])][:candidates]
