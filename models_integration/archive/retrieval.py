"""Finding chunks: BM25, any sentence encoder and any cross-encoder by path, and their rankings joined."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from reference.injection.fusion import fused, recall
from spec.errors import SpecError

__all__ = ["Ranker", "dense", "lexical", "measured", "reranked", "retrieved"]

Ranker = Callable[[str], list[str]]
"""Names of all chunks for a query, best first."""
DEPTHS = (1, 3, 5)


def _ordered(names: Sequence[str], scores: Sequence[float]) -> list[str]:
    """A total order: equal scores, up to rounding, by name."""
    pairs = sorted((-round(float(score), 6), name) for name, score in zip(names, scores, strict=True))
    return [name for _, name in pairs]


def lexical(corpus: Mapping[str, str]) -> Ranker:
    """BM25 over lower-case words; needs no weights."""
    import bm25s

    names = sorted(corpus)
    index = bm25s.BM25()
    index.index([_words(corpus[name]) for name in names], show_progress=False)
    return lambda query: _ordered(names, index.get_scores(_words(query)))


def _words(text: str) -> list[str]:
    kept = "".join(letter if letter.isalnum() else " " for letter in text.lower())
    return kept.split()


def dense(corpus: Mapping[str, str], path: Path) -> Ranker:
    """Cosines of mean-pooled states of a sentence encoder, one text at a time: no batch changes a score.

    Raises:
        SpecError: when weights are missing or left over.
    """
    model, tokenizer = _loaded(AutoModel, path)

    def embedded(text: str) -> Tensor:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt", truncation=True)).last_hidden_state[0]
        return torch.nn.functional.normalize(states.float().mean(0), dim=0)

    names = sorted(corpus)
    matrix = torch.stack([embedded(corpus[name]) for name in names])
    return lambda query: _ordered(names, (matrix @ embedded(query)).tolist())


def reranked(corpus: Mapping[str, str], path: Path) -> Callable[[str, Sequence[str]], list[str]]:
    """A cross-encoder's order of some chunks, in float32 and one pair at a time.

    Raises:
        SpecError: when weights are missing: a head that was never trained orders at random.
    """
    model, tokenizer = _loaded(AutoModelForSequenceClassification, path)

    def score(query: str, name: str) -> float:
        with torch.no_grad():
            logits = model(**tokenizer(query, corpus[name], return_tensors="pt", truncation=True)).logits[0]
        return float(logits[-1])

    return lambda query, names: _ordered(names, [score(query, name) for name in names])


def _loaded(kind: Any, path: Path) -> tuple[Any, Any]:
    if not Path(path).is_dir():
        raise SpecError("path", str(path), "must be a folder with a model and its tokenizer")
    model, info = kind.from_pretrained(path, output_loading_info=True, dtype=torch.float32, local_files_only=True)
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise SpecError("path", str(path), f"must hold all weights of the model; missing: {', '.join(missing)}")
    model.train(False)
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def retrieved(query: str, rankers: Sequence[Ranker], candidates: int) -> list[str]:
    """The first candidates of the joined rankings."""
    return [name for name, _ in fused([ranker(query)[:candidates] for ranker in rankers])][:candidates]


def measured(selections: Mapping[str, Sequence[str]], truth: Mapping[str, str]) -> dict[str, float]:
    """r@1, r@3 and r@5 over queries; gt_in_top3 is r@3 under the paper's name."""
    found = {
        f"r@{k}": sum(recall(selections[query], truth[query], k) for query in truth) / len(truth) for k in DEPTHS
    }
    return {**found, "gt_in_top3": found["r@3"]}
