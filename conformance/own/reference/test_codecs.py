"""Codecs against plain arithmetic and their error bounds; wrappers around a chunk, and where chunks are cut."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.item_vectors.adapters import vocabulary
from conformance.assurance.oracles import injection as oracle
from conformance.plugin import sparingly
from reference.injection.quantisers import ARMS, SCHEMES, codes, decoded, quantised_region, scale
from reference.injection.wrappers import CELLS, FORMS, Form, Marker, marker_id, slices, wrap
from spec.arrays import Cube
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")


SHAPES = {
    "per_tensor": (1, 1, 1), "per_head": (3, 1, 1), "per_channel": (3, 1, 4), "per_token": (3, 5, 1),
}


@st.composite
def tensors(draw: st.DrawFn) -> Cube:
    """(3, 5, 4) with an outlier channel, halves of a step, and sometimes a head of zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    x = rng.standard_normal((3, 5, 4))
    x[:, :, 2] *= draw(st.sampled_from([1.0, 50.0, 1000.0]), label="outlier")
    x = draw(st.sampled_from([x, np.rint(4 * x) / 2]), label="halves")
    if draw(st.booleans(), label="zero head"):
        x[1] = 0.0
    return x


def single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@pytest.mark.spec("IN-SCALE")
@pytest.mark.parametrize("scheme", SCHEMES)
@sparingly
@given(x=tensors(), bits=st.sampled_from([2, 4, 8]))
def test_scales_equal_the_brute_force(scheme: str, x: Cube, bits: int) -> None:
    step = scale(x, SCHEMES[scheme], bits)
    assert step.shape == SHAPES[scheme]
    whole = np.broadcast_to(step, x.shape)
    for at in np.ndindex(*step.shape):
        group = tuple(slice(None) if step.shape[axis] == 1 else at[axis] for axis in range(3))
        assert (whole[group] == single(oracle.scale_of(x[group].ravel().tolist(), bits))).all()


@pytest.mark.spec("IN-CODES")
@given(x=tensors(), scheme=st.sampled_from(sorted(SCHEMES)), bits=st.sampled_from([2, 4, 8]))
def test_codes_equal_the_brute_force(x: Cube, scheme: str, bits: int) -> None:
    step = np.broadcast_to(scale(x, SCHEMES[scheme], bits), x.shape)
    wanted = [oracle.code(*pair, bits) for pair in zip(x.ravel().tolist(), step.ravel().tolist(), strict=True)]
    assert codes(x, step, bits).ravel().tolist() == wanted


@pytest.mark.spec("IN-CODES")
def test_halves_go_to_even_and_the_range_is_symmetric() -> None:
    x = np.array([[[-3.0, -1.0, 1.0, 3.0, 5.0, -255.0, -256.0, 300.0]]])
    assert codes(x, np.full((1, 1, 1), 2.0), 8).tolist() == [[[-2, 0, 0, 2, 2, -127, -127, 127]]]


@pytest.mark.spec("IN-CODES")
def test_a_code_is_of_the_quotient() -> None:
    """The quotient is 14.5 to the bit; the product with the step's reciprocal is the float above."""
    x, step = float.fromhex("0x1.820c4a4p-3"), float.fromhex("0x1.a9fbe8p-7")
    assert x / step == 14.5 < x * (1 / step)
    assert codes(np.full((1, 1, 1), x), np.full((1, 1, 1), step), 8).tolist() == [[[14]]]


@pytest.mark.spec("IN-SCALE", "IN-CODES")
@given(x=tensors(), scheme=st.sampled_from(sorted(SCHEMES)), bits=st.sampled_from([2, 3, 4, 6, 8]))
def test_an_error_is_at_most_half_a_step(x: Cube, scheme: str, bits: int) -> None:
    """The step is rounded to float32, so the largest value may lie q 2^-24 steps outside the range."""
    step = scale(x, SCHEMES[scheme], bits)
    found = codes(x, step, bits)
    assert np.abs(found).max() <= 2 ** (bits - 1) - 1
    assert (np.abs(decoded(found, step) - x) <= step * (0.5 + 2.0**bits * 2.0**-24)).all()
    assert np.isfinite(decoded(found, step)).all()
    assert (decoded(found, step)[x == 0] == 0).all()


@pytest.mark.spec("IN-SCALE")
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "per_token"])
def test_a_region_without_tokens_has_a_scale(scheme: str) -> None:
    """A short chunk of `selective_per_head` has nothing between its first and its last tokens."""
    x = np.empty((2, 0, 3))
    step = scale(x, SCHEMES[scheme], 8)
    assert (step > 0).all()
    assert decoded(codes(x, step, 8), step).shape == x.shape


@pytest.mark.spec("IN-ARMS")
@pytest.mark.parametrize("name", ARMS)
@sparingly
@given(layers=st.integers(1, 9), n=st.integers(0, 20))
def test_regions_equal_the_brute_force(name: str, layers: int, n: int) -> None:
    arm = ARMS[name]
    found = [[run.start, run.stop] for run in quantised_region(arm, layers, n)]
    wanted = oracle.quantised_region(arm.half, arm.first, arm.last, layers, n)
    assert found[1] == wanted[1]
    assert list(range(*found[0])) == list(range(*wanted[0]))


@pytest.mark.spec("IN-ARMS")
@pytest.mark.parametrize("name", ARMS)
def test_an_arm_is_what_its_name_says(name: str) -> None:
    """A scheme of both, or of keys or values alone; KIVI has a scale per channel of keys, and per token of values."""
    arm, scheme = ARMS[name], name[name.rfind("per_") :]
    both = {"none": (None, None), "kivi": ("per_channel", "per_token")}.get(name, (scheme, scheme))
    assert arm.keys == (None if name.startswith("values") else both[0])
    assert arm.values == (None if name.startswith("keys") else both[1])
    assert arm.half == next((half for half in ("lower", "upper") if name.startswith(half)), "all")
    assert arm.first == arm.last == (4 if name.startswith("selective") else 0)


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
@pytest.mark.parametrize(
    ("name", "around"),
    [("raw", 0), ("markers", 3), ("markers_phi3", 2), ("markers_deepseek", 3), ("role", 2), ("closing", 3)],
)
def test_the_paper_counts_these_tokens(name: str, around: int) -> None:
    """Table 4 and Appendix A; "user" and its newline are two."""
    assert len(wrap(FORMS[name], [50], TOKENIZER).ids) - 1 == around


@pytest.mark.spec("IN-MARKER")
@pytest.mark.parametrize("text", ["<|unknown|>", "<|many|>"])
def test_a_marker_that_is_not_one_id_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must be one token id of this tokenizer"):
        marker_id(Marker(text), TOKENIZER)
    with pytest.raises(SpecError, match="must be one token id of this tokenizer"):
        wrap(Form((Marker(text),)), [50], TOKENIZER)


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
