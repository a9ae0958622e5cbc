"""Wrappers: ids around a chunk, and where chunks are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.item_vectors.adapters import vocabulary
from conformance.assurance.oracles import injection as oracle
from reference.injection.wrappers import CELLS, FORMS, Form, Marker, marker_id, slices, wrap
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")

WORDS = {
    "<|im_start|>": [7], "<|im_end|>": [8], "<|end|>": [9], "<|user|>": [10], "<｜User｜>": [11],
    "<｜end▁of▁sentence｜>": [12], "\n": [1], "user\n": [4, 1], "system\nYou are a helpful assistant.": [2, 3],
    "<|unknown|>": [0], "<|many|>": [5, 6],
}
TOKENIZER = vocabulary(WORDS)
CHUNKS = st.lists(st.integers(20, 99), min_size=1, max_size=9)


def parts(form: Form) -> list[list[tuple[bool, str]]]:
    return [
        [(isinstance(part, Marker), part.text if isinstance(part, Marker) else part) for part in side]
        for side in (form.prefix, form.suffix)
    ]


@pytest.mark.spec("IN-WRAP")
@pytest.mark.parametrize("name", FORMS)
@given(chunk=CHUNKS)
def test_a_form_equals_the_brute_force(name: str, chunk: list[int]) -> None:
    form = FORMS[name]
    before, after = parts(form)
    found = wrap(form, chunk, TOKENIZER)
    wanted = oracle.wrapped(before, chunk, after, form.hidden, WORDS)
    assert {**vars(found), "ids": list(found.ids), "markers": list(found.markers)} == wanted


@pytest.mark.spec("IN-WRAP")
@pytest.mark.parametrize("name", FORMS)
@given(chunk=CHUNKS)
def test_the_chunk_stands_where_it_is_said_to(name: str, chunk: list[int]) -> None:
    """Its ids are its own, markers are markers, and what is hidden stands before the first visible marker."""
    found = wrap(FORMS[name], chunk, TOKENIZER)
    assert list(found.ids[found.start : found.stop]) == chunk
    assert [found.ids[at] in (7, 8, 9, 10, 11, 12) for at in range(len(found.ids))] == [
        at in found.markers for at in range(len(found.ids))
    ]
    assert 0 <= found.hidden <= found.start


@pytest.mark.spec("IN-WRAP")
@pytest.mark.parametrize(
    ("name", "around"),
    [("raw", 0), ("markers", 3), ("markers_phi3", 2), ("markers_deepseek", 3), ("role", 2), ("closing", 3)],
)
def test_the_paper_counts_these_tokens(name: str, around: int) -> None:
    """Table 4 and Appendix A; "user" and its newline are two."""
    assert len(wrap(FORMS[name], [50], TOKENIZER).ids) - 1 == around


@pytest.mark.spec("IN-WRAP")
def test_a_hidden_preamble_is_not_spliced() -> None:
    full, hidden = (wrap(FORMS[name], [50], TOKENIZER) for name in ("full", "full_hidden_preamble"))
    assert full.ids == hidden.ids
    assert (full.hidden, hidden.hidden) == (0, 5)
    assert hidden.ids[hidden.hidden] == 7


@pytest.mark.spec("IN-WRAP")
def test_an_empty_chunk_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one token id"):
        wrap(FORMS["raw"], [], TOKENIZER)


@pytest.mark.spec("IN-MARKER")
@pytest.mark.parametrize("text", ["<|unknown|>", "<|many|>"])
def test_a_marker_that_is_not_one_id_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must be one token id of this tokenizer"):
        marker_id(Marker(text), TOKENIZER)
    with pytest.raises(SpecError, match="must be one token id of this tokenizer"):
        wrap(Form((Marker(text),)), [50], TOKENIZER)


@pytest.mark.spec("IN-MARKER")
@pytest.mark.parametrize("text", ["<|im_start|>", "<｜end▁of▁sentence｜>"])
def test_a_marker_is_its_id(text: str) -> None:
    assert [marker_id(Marker(text), TOKENIZER)] == WORDS[text]


@pytest.mark.spec("IN-SLICES")
@given(
    ids=st.lists(st.integers(0, 5), max_size=40), ends=st.frozensets(st.integers(0, 5), max_size=2),
    size=st.integers(1, 9),
)
def test_slices_equal_the_brute_force(ids: list[int], ends: frozenset[int], size: int) -> None:
    found = slices(ids, ends, size)
    assert [list(chunk) for chunk in found] == oracle.cuts(ids, sorted(ends), size)
    assert [at for chunk in found for at in range(*chunk)] == list(range(len(ids)))
    assert all(0 < stop - start <= size for start, stop in found)


@pytest.mark.spec("IN-SLICES")
def test_the_four_cells_cross_boundary_and_markers() -> None:
    """B adds the wrapper alone, C the sentence ends alone, D both."""
    assert CELLS == {"A": (False, "raw"), "B": (False, "full"), "C": (True, "raw"), "D": (True, "full")}
    with pytest.raises(SpecError, match="at least 1 token"):
        slices([1, 2], frozenset(), 0)
