"""LongBench v1's own files: the sixteen English and code data sets."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground
from models_integration.tasks.jsonl import Row, read_json, read_rows, texts
from models_integration.tasks.samples import Sample
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["LONGBENCH", "load_longbench"]

LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "qa_f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "rouge_l"),
    "trec": "classification", "triviaqa": "qa_f1 of a line", "samsum": "rouge_l of a line",
    "passage_count": "count", "passage_retrieval_en": "retrieval",
    "lcc": "code_similarity", "repobench-p": "code_similarity",
}
"""The data sets that are served, and LongBench's metric of each."""
_NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")


def load_longbench(ground: Ground, folder: Path, dataset: str) -> Iterator[tuple[Sample, ...]]:
    """The contexts of a data set, one question each, in the file's order.

    Read are `FOLDER/data/DATASET.jsonl` (a row has `input`, `context`, `answers` and `all_classes`), and from
    LongBench's repository `FOLDER/config/dataset2prompt.json` and `dataset2maxlen.json`. What the prompt
    has behind the context is the question. As in LongBench no chat template stands around few-shot and code prompts.
    Nothing is cut from the middle, and no evidence is known.

    Args:
        ground: tokenizer and frame.
        folder: as described.
        dataset: one of `LONGBENCH`.

    Raises:
        SpecError: for an unknown data set, a file or a row that is not as described.
    """
    check_choices("dataset", (dataset,), LONGBENCH)
    settings = (folder / "config" / f"dataset2{name}.json" for name in ("prompt", "maxlen"))
    prompt, new_tokens = (_setting(path, dataset) for path in settings)
    if str(prompt).count("{context}") != 1:
        raise SpecError("prompt", prompt, "must hold {context} once")
    framed = replace(ground, frame=bare(ground.tokenizer)) if dataset in _NO_CHAT else ground
    rows = read_rows(folder / "data" / f"{dataset}.jsonl", ("input", "context", "answers", "all_classes"))
    return ((_sample(framed, row, number, dataset, str(prompt), int(new_tokens)),) for number, row in enumerate(rows))


def _setting(path: Path, dataset: str) -> str | int:
    settings = read_json(path)
    if not isinstance(settings, dict) or not isinstance(settings.get(dataset), str | int):
        raise SpecError("path", str(path), f"must be an object with an entry for {dataset}")
    found: str | int = settings[dataset]
    return found


def _sample(ground: Ground, row: Row, number: int, dataset: str, prompt: str, new_tokens: int) -> Sample:
    before, _, behind = (part.replace("{input}", row["input"]) for part in prompt.partition("{context}"))
    references = texts(row["answers"])
    return ground.sample(
        (*ground.frame.opening, *ground.encode(before + row["context"])), behind, "", references[0], (), gap="",
        task=dataset, dialect="longbench-v1", metric=LONGBENCH[dataset], references=references,
        max_new_tokens=new_tokens, choices=tuple(row["all_classes"] or ()), metadata={"row": number},
    )
