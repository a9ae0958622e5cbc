"""Injection: rotations, codecs and their error bounds, wrappers around a chunk, and definitions of some arms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.plugin import fewer_examples
from lab.item_vectors import vocabulary
from reference.injection.quantisers import ARMS, SCHEMES, codes, decoded, scale
from reference.injection.rotation import TURNS, rebase_angles, shift_angles
from reference.injection.splicing import most_deviating
from reference.injection.wrappers import CELLS, FORMS, Form, Marker, marker_id, slices, wrap
from spec.arrays import Cube, Matrix, Vector
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")


STYLES = [
    pytest.param("half_split", marks=pytest.mark.spec("IN-HALF-SPLIT")),
    pytest.param("interleaved", marks=pytest.mark.spec("IN-INTERLEAVED")),
]


@st.composite
def keys(draw: st.DrawFn) -> tuple[Cube, Vector]:
    """Draw keys with some channels that do not rotate, and inverse frequencies like those of models."""
    pairs = draw(st.integers(0, 4), label="pairs")
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 4)), 2 * pairs + draw(st.integers(1, 3), label="others"))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    theta = np.sort(rng.uniform(1e-4, 1.0, pairs))[::-1].astype(np.float32).astype(np.float64)
    return rng.standard_normal(shape), theta


def bits(x: Cube) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def near(actual: Cube, wanted: Cube, angles: Matrix, turns: int) -> bool:
    """Return whether values agree within the rounding of `turns` rotations and of angles of that size."""
    slack = tolerances.UNIT_ROUNDOFF["float64"] * (1 + np.abs(angles).max(initial=0.0))
    radius = turns * (tolerances.turn_radius(wanted) + 8 * slack * np.abs(wanted).max())
    return bool((np.abs(actual - wanted) <= radius).all())


@pytest.mark.spec("IN-SHIFT-ANGLES")
@pytest.mark.parametrize("style", STYLES)
@fewer_examples
@given(inputs=keys(), a=st.integers(-999, 4096), b=st.integers(-999, 4096))
def test_two_shifts_are_one(style: str, inputs: tuple[Cube, Vector], a: int, b: int) -> None:
    x, theta = inputs
    n = x.shape[1]
    twice = TURNS[style](TURNS[style](x, shift_angles(n, a, theta)), shift_angles(n, b, theta))
    assert near(twice, TURNS[style](x, shift_angles(n, a + b, theta)), shift_angles(n, abs(a) + abs(b), theta), 3)


@pytest.mark.parametrize("style", STYLES)
@fewer_examples
@given(inputs=keys(), start=st.integers(1, 4096))
def test_nothing_keeps_every_bit_and_others_keep_theirs(style: str, inputs: tuple[Cube, Vector], start: int) -> None:
    x, theta = inputs
    x[..., 0] = -0.0
    n, width = x.shape[1], 2 * len(theta)
    before = bits(x)
    assert bits(TURNS[style](x, shift_angles(n, 0, theta))) == before
    assert bits(TURNS[style](x, shift_angles(n, start, theta))[..., width:]) == bits(x[..., width:])
    assert bits(x) == before


@pytest.mark.spec("IN-REBASE-ANGLES")
@pytest.mark.parametrize("style", STYLES)
@fewer_examples
@given(inputs=keys(), start=st.integers(-64, 4096), factor=st.sampled_from([1.0, 4.0, 40.0]))
def test_rebasing_is_turning_back_and_turning_again(
    style: str, inputs: tuple[Cube, Vector], start: int, factor: float,
) -> None:
    """A key at position t with the archive's frequencies becomes the live session's key at start + t."""
    x, archived = inputs
    live, at = archived / factor, np.arange(x.shape[1], dtype=np.float64)[:, None]
    stored = TURNS[style](x, at * archived)
    actual = TURNS[style](stored, rebase_angles(x.shape[1], start, archived, live))
    assert near(actual, TURNS[style](x, (start + at) * live), (abs(start) + at) * archived, 4)


@pytest.mark.law("figures-are-counted-right")
def test_the_paper_s_rotation_of_scaled_keys_is_the_unit_rotation() -> None:
    """Check Appendix B, `(1 / mscale) R_scaled k`: cosine and sine of the module contain mscale, which cancels."""
    torch = pytest.importorskip("torch", reason="the module is of transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaled = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    rotary = llama.LlamaRotaryEmbedding(llama.LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=163840, rope_parameters=scaled,
    ))
    mscale, k = rotary.attention_scaling, torch.randn(1, 1, 5, 64, generator=torch.Generator().manual_seed(0))
    assert round(mscale, 4) == 1.3689
    cos, sin = rotary(k, torch.full((1, 5), 7))
    _, moved = llama.apply_rotary_pos_emb(k, k, cos, sin)
    angle = 7 * rotary.inv_freq.double().repeat(2)
    half = k.double().roll(32, -1) * torch.tensor([-1.0] * 32 + [1.0] * 32)
    unit = k.double() * angle.cos() + half * angle.sin()
    assert float((moved / mscale - unit).abs().max()) < 1e-5


@pytest.mark.spec("IN-CACHEBLEND")
def test_of_many_equal_deviations_the_first_are_computed_again() -> None:
    """Check enough equal values that an unstable sort would mix them."""
    rng = np.random.default_rng(0)
    spliced = rng.integers(0, 2, (1, 400, 1)).astype(np.float64)
    ones = np.flatnonzero(spliced[0, :, 0])
    actual = most_deviating(spliced, np.zeros_like(spliced), 7, 0.25)
    assert len(ones) > 100
    assert actual == (7 + ones[:100]).tolist()


@st.composite
def attentions(draw: st.DrawFn) -> Cube:
    """Draw attention (2, 3, n) whose rows sum to 1, including zeros and rows with a single 1."""
    rng, n = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.integers(1, 8))
    raw = rng.exponential(size=(2, 3, n)) * (rng.random((2, 3, n)) < 0.7)
    raw[..., 0] += 0.1
    raw[0, 0] = np.eye(n)[0]
    weights: Cube = raw / raw.sum(-1, keepdims=True)
    return weights


@st.composite
def tensors(draw: st.DrawFn) -> Cube:
    """Draw values (3, 5, 4) with an outlier channel, halves of a step, and sometimes a head of zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    x = rng.standard_normal((3, 5, 4))
    x[:, :, 2] *= draw(st.sampled_from([1.0, 50.0, 1000.0]), label="outlier")
    x = draw(st.sampled_from([x, np.rint(4 * x) / 2]), label="halves")
    if draw(st.booleans(), label="zero head"):
        x[1] = 0.0
    return x


@pytest.mark.spec("IN-CODES")
def test_halves_go_to_even_and_the_range_is_symmetric() -> None:
    x = np.array([[[-3.0, -1.0, 1.0, 3.0, 5.0, -255.0, -256.0, 300.0]]])
    assert codes(x, np.full((1, 1, 1), 2.0), 8).tolist() == [[[-2, 0, 0, 2, 2, -127, -127, 127]]]


@pytest.mark.spec("IN-CODES")
def test_a_code_is_of_the_quotient() -> None:
    """Check a quotient of exactly 14.5. The product with the reciprocal of the step is the next float above."""
    x, step = float.fromhex("0x1.820c4a4p-3"), float.fromhex("0x1.a9fbe8p-7")
    assert x / step == 14.5 < x * (1 / step)
    assert codes(np.full((1, 1, 1), x), np.full((1, 1, 1), step), 8).tolist() == [[[14]]]


@pytest.mark.spec("IN-SCALE", "IN-CODES")
@given(x=tensors(), scheme=st.sampled_from(sorted(SCHEMES)), bits=st.sampled_from([2, 3, 4, 6, 8]))
def test_an_error_is_at_most_half_a_step(x: Cube, scheme: str, bits: int) -> None:
    """The step is rounded to float32. Therefore the largest value may be q 2^-24 steps outside the range."""
    step = scale(x, SCHEMES[scheme], bits)
    actual = codes(x, step, bits)
    assert np.abs(actual).max() <= 2 ** (bits - 1) - 1
    assert (np.abs(decoded(actual, step) - x) <= step * (0.5 + 2.0**bits * 2.0**-24)).all()
    assert np.isfinite(decoded(actual, step)).all()
    assert (decoded(actual, step)[x == 0] == 0).all()


@pytest.mark.spec("IN-SCALE")
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "per_token"])
def test_a_region_without_tokens_has_a_scale(scheme: str) -> None:
    """Check a short chunk of `selective_per_head`, which has no tokens between its first and its last tokens."""
    x = np.empty((2, 0, 3))
    step = scale(x, SCHEMES[scheme], 8)
    assert (step > 0).all()
    assert decoded(codes(x, step, 8), step).shape == x.shape


@pytest.mark.spec("IN-ARMS")
@pytest.mark.parametrize("name", ARMS)
def test_an_arm_is_what_its_name_says(name: str) -> None:
    """Check schemes for both, for keys alone, and for values alone.

    KIVI has a scale per channel of keys and per token of values.
    """
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


@pytest.mark.spec("IN-WRAP")
@pytest.mark.parametrize(
    ("name", "around"),
    [("raw", 0), ("markers", 3), ("markers_phi3", 2), ("markers_deepseek", 3), ("role", 2), ("closing", 3)],
)
def test_the_paper_counts_these_tokens(name: str, around: int) -> None:
    """Check the counts of Table 4 and Appendix A. "user" and its newline are two tokens."""
    assert len(wrap(FORMS[name], [50], TOKENIZER).ids) - 1 == around


@pytest.mark.spec("IN-MARKER")
@pytest.mark.parametrize("text", ["<|unknown|>", "<|many|>"])
def test_a_marker_that_is_not_one_id_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must be one token id of the tokenizer"):
        marker_id(Marker(text), TOKENIZER)
    with pytest.raises(SpecError, match="must be one token id of the tokenizer"):
        wrap(Form((Marker(text),)), [50], TOKENIZER)


@pytest.mark.spec("IN-SLICES")
def test_the_four_cells_cross_boundary_and_markers() -> None:
    """Cell B adds only the wrapper, C only the sentence ends, and D both."""
    assert CELLS == {"A": (False, "raw"), "B": (False, "full"), "C": (True, "raw"), "D": (True, "full")}
    with pytest.raises(SpecError, match="at least 1 token"):
        slices([1, 2], frozenset(), 0)
