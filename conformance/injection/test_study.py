"""The study: questions that have one answer, selections that are pinned, and tables that count right."""

import pytest

pytest.importorskip("bm25s")

from models_integration.archive.rope import recognise
from models_integration.archive.study import CHUNKS, arms, ask, case_of, draw_queries, pinned, report
from models_integration.pocket import load_pocket
from models_integration.pocket.facts import is_held_out_value


def test_a_value_is_unique_to_the_true_chunk() -> None:
    queries = draw_queries(10, 7)
    assert queries == draw_queries(10, 7)
    for query in queries:
        assert len(query.chunks) == CHUNKS
        assert [name for name, text in query.chunks.items() if query.value in text] == [query.truth]
        assert is_held_out_value(int(query.value))


def test_selections_are_pinned() -> None:
    queries = draw_queries(5, 7)
    pins = pinned(queries, lambda text: [ord(letter) for letter in text])
    assert pins == pinned(queries, lambda text: [ord(letter) for letter in text])
    assert pins.digest != pinned(queries, lambda text: [len(text)]).digest
    for at, query in enumerate(queries):
        chosen = pins.chosen[str(at)]
        assert len(set(chosen)) == 3
        assert set(chosen) <= set(query.chunks)
        assert chosen[0] == query.truth  # the only chunk with the question's own subject


def test_a_table_counts_pairs() -> None:
    lines = report({"text": [True, True, False, True], "other": [False, True, True, False]}, "text", 1).splitlines()
    assert lines[2].startswith("| text | 0.750 | 0.30 to 0.95 | 0, 0 | 1.000 | +0.000 [+0.000 +0.000]")
    assert lines[3].startswith("| other | 0.500 | 0.15 to 0.85 | 2, 1 | 1.000 | -0.250 [")


def test_arms_answer_with_the_true_chunk_and_not_without_it() -> None:
    model, tokenizer = load_pocket()
    (query,) = draw_queries(1, 7)
    chosen = arms(3)
    assert {"inject", "text", "raw kivi", "raw upper half"} <= set(chosen)
    true = [query.chunks[query.truth]]
    others = [text for name, text in query.chunks.items() if name != query.truth][:2]
    for texts, found in ((true + others, True), (others, False)):
        case = case_of(model, tokenizer, recognise(model), texts, 60)
        for name in ("inject", "inject_raw", "text", "raw kivi"):
            assert (query.value in ask(model, tokenizer, chosen[name](case), query.question)) == found, name
