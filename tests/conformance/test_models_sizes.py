"""Tests that wrong policies that small inputs do not reveal fail on the fixed inputs of each run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from conformance.methods.method import METHODS, Method
from conformance.policy_suite import test_method, test_turn
from conformance.policy_suite.sizes import extent
from conformance.policy_suite.test_promises import OF_MODELS, Draw
from conformance.strategies.model_shapes import DECODED, LARGE_LOGITS, LONG_ANSWER, SHAPES, Shape
from conformance.strategies.policy_inputs import Inputs, decided, drawn, named
from reference import nestedkv
from reference.directions import unit_keys
from reference.policies.attention import group_mean, max_pool, observed_attention
from reference.policies.budgets import largest_remainder, spread
from reference.policies.cake import Preferred
from spec.parameters import NESTEDKV
from spec.policy import Cadence, LayerView, Needs, Observation, Policy, Scores

pytestmark = [pytest.mark.law("the-proof-has-teeth"), pytest.mark.usefixtures("reference_items")]

View = Callable[[LayerView, Observation], LayerView]
Table = Callable[[Any, Observation], Any]


@dataclass(frozen=True)
class Wrong:
    """Scorer with an error: it reads changed layers, or returns changed scores."""

    right: Any
    view: View
    table: Table

    @property
    def needs(self) -> Needs:
        return self.right.needs  # type: ignore[no-any-return]

    def __call__(self, seen: Observation, protected: Any, /) -> Scores:
        layers = seen.layers
        if self.needs.layers != "none":
            layers = {at: self.view(view, seen) for at, view in seen.layers.items()}
        actual: Scores = self.right(replace(seen, layers=layers), protected)
        return replace(actual, values=self.table(actual.values, seen))

    def step(self, records: Any, seen: Observation, /) -> Scores:
        return self.right.step(records, seen)  # type: ignore[no-any-return]

    def keep(self, records: Any, slots: Any, /) -> object:
        return self.right.keep(records, slots)


def late_queries(view: LayerView, seen: Observation) -> LayerView:
    """Return the layer with the queries of a later turn rotated by the number of evicted tokens."""
    if seen.positions is None:
        return view
    angles = (seen.seen - view.k.shape[1]) * drawn(0).inv_freq  # all drawn inputs have these frequencies
    a, b = np.split(np.asarray(view.q), 2, axis=-1)
    c, s = np.cos(angles), np.sin(angles)
    return replace(view, q=np.concatenate([a * c - b * s, b * c + a * s], axis=-1))


def same_view(view: LayerView, seen: Observation) -> LayerView:
    return view


def same_table(values: Any, seen: Observation) -> Any:
    return values


def group(view: LayerView) -> int:
    return len(view.q) // len(view.k)


def without_last_head(view: LayerView, seen: Observation, size: int = 4) -> LayerView:
    heads = view.q.reshape(len(view.k), group(view), *view.q.shape[1:])[:, :-1].reshape(-1, *view.q.shape[1:])
    sinks = None if view.sinks is None else view.sinks.reshape(len(view.k), -1)[:, :-1].ravel()
    return replace(view, q=heads, sinks=sinks) if group(view) == size else view


def of_last_chunk(view: LayerView, seen: Observation) -> LayerView:
    """Return the layer without the queries that a prefill in chunks of 512 tokens processes before the last chunk."""
    last = seen.seen % 512
    if seen.seen < 512 or last >= view.q.shape[1]:
        return view
    return replace(view, q=np.concatenate([np.zeros_like(view.q[:, last:]), view.q[:, -last:]], axis=1))


def as_half(view: LayerView, seen: Observation) -> LayerView:
    return replace(view, k=view.k.astype(np.float16).astype(np.float32)) if view.k.dtype == np.float32 else view


def first_keys(values: Any, seen: Observation) -> Any:
    """Return the similarity to the mean direction of the first 256 keys."""
    keys = np.concatenate([view.k for view in seen.layers.values()]).astype(np.float64)
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    return -(keys * keys[:, :256].mean(axis=1, keepdims=True)).sum(axis=2)


def of_last_query(values: Any, seen: Observation, dtype: type, beside: Callable[[Any], Any]) -> Any:
    """Return TOVA's scores with the exponential in a dtype, after `beside` of all logits is subtracted."""
    rows = []
    for view in seen.layers.values():
        logits = np.einsum("hd,hnd->hn", view.q[:, -1].astype(float), np.repeat(view.k, group(view), axis=0))
        logits = logits * view.scaling
        logits = logits if view.softcap is None else view.softcap * np.tanh(logits / view.softcap)
        sinks = np.full((len(logits), 1), -np.inf) if view.sinks is None else np.asarray(view.sinks)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            powers = np.exp((np.concatenate([logits, sinks], axis=1) - beside(logits)).astype(dtype))
            rows.append(np.nan_to_num(powers / powers.sum(axis=1, keepdims=True))[:, :-1].mean(axis=0))
    return np.array(rows)


def of_128(values: Any, seen: Observation) -> Any:
    """Return NestedKV's scores with episodes of 128 tokens, whatever the length of the prompt."""
    if seen.positions is not None:
        return values
    rows = []
    for view in seen.layers.values():
        unit = unit_keys(np.asarray(view.k, dtype=np.float64))
        memories = nestedkv.stable_memory(unit), nestedkv.episodic_memory(unit, 128), nestedkv.current_memory(
            unit, NESTEDKV.W)
        a = np.stack([nestedkv.min_max(nestedkv.anomalies(unit, memory)) for memory in memories])
        blended = nestedkv.blend(a, nestedkv.gap(a, NESTEDKV.p), NESTEDKV)
        rows.append(nestedkv.routed_score(a, blended, nestedkv.rectified_surprise(a), NESTEDKV))
    return np.where(np.arange(seen.seen) < NESTEDKV.N_sink, values, np.concatenate(rows))


def pooled_by_tile(values: Any, seen: Observation) -> Any:
    """Return SnapKV's scores with pools that do not cross a border of 2 048 tokens."""
    rows = []
    for view in seen.layers.values():
        past = observed_attention(view, 32)[:, :, :-32].sum(axis=1)
        tiles = [max_pool(past[:, at : at + 2048], 7) for at in range(0, past.shape[1], 2048)]
        rows.append(group_mean(np.concatenate(tiles, axis=1), len(view.k)))
    return np.concatenate([np.concatenate(rows), values[:, values.shape[1] - 32 :]], axis=1)


def by_name(values: Any, seen: Observation) -> Any:
    """Return the scores with the layers in the order of their indexes as text."""
    names = [str(at) for at, view in seen.layers.items() for _ in view.k]
    return values[np.argsort(names, kind="stable")]


WRONG: list[tuple[str, str, View, Table]] = [
    ("knorm", "of the first 4 channels", lambda view, seen: replace(view, k=view.k[..., :4]), same_table),
    ("knorm", "of sums of squares in float16", same_view, lambda values, seen: np.maximum(values, -(65_504.0**0.5))),
    ("vatp", "of values up to 64",
     lambda view, seen: replace(view, v=np.clip(np.asarray(view.v), -64, 64)), same_table),
    ("snapkv", "that ignores the scaling",
     lambda view, seen: replace(view, scaling=view.q.shape[-1] ** -0.5), same_table),
    ("snapkv", "with every softcap as 5", lambda view, seen: replace(view, softcap=view.softcap and 5.0), same_table),
    ("snapkv", "without the last query head of groups of 4", without_last_head, same_table),
    ("snapkv", "that forgets sinks with one KV head",
     lambda view, seen: replace(view, sinks=None if len(view.k) == 1 else view.sinks), same_table),
    ("snapkv", "of the queries in the last chunk of 512", of_last_chunk, same_table),
    ("tova", "that reads float32 keys as float16", as_half, same_table),
    ("tova", "with float32 powers that overflow", same_view,
     partial(of_last_query, dtype=np.float32, beside=lambda logits: 0.0)),
    ("tova", "with float64 powers that overflow", same_view,
     partial(of_last_query, dtype=np.float64, beside=lambda logits: 0.0)),
    ("tova", "that subtracts the largest logit of all heads", same_view,
     partial(of_last_query, dtype=np.float64, beside=np.max)),
    ("keydiff", "with the anchor of the first 256 keys", same_view, first_keys),
    ("keydiff", "that keeps the newest in a later turn", same_view,
     lambda values, seen: values if seen.positions is None else np.arange(values.shape[1]) + 0.0 * values),
    ("random-tokens", "with other numbers in a later turn", same_view,
     lambda values, seen: values if seen.positions is None else values[:, ::-1].copy()),
    ("leverage", "that keeps the newest in a later turn", same_view,
     lambda values, seen: values if seen.positions is None else np.arange(values.shape[1]) + 0.0 * values),
    ("expected-attention", "that turns the queries of a later turn back as if no token was missing", late_queries,
     lambda values, seen: values),
    ("keydiff", "with a mean of the layers if there are 3", same_view,
     lambda values, seen: values if len(seen.layers) != 3 else values[::-1].copy()),
    ("pyramidkv", "with the layers in the other order if there are 3", same_view,
     lambda values, seen: values if len(seen.layers) != 3 else values[::-1].copy()),
    ("streamingllm", "that keeps the oldest beyond 512 tokens", same_view,
     lambda values, seen: -values if seen.seen > 512 else values),
    ("streamingllm", "that ranks positions in float16", same_view,
     lambda values, seen: np.minimum(values, 2.0**15).astype(np.float16)),
    ("h2o", "that forgets the queries after 2 048", lambda view, seen: replace(
        view, q=np.where(np.arange(view.q.shape[1])[:, None] < 2048, np.asarray(view.q), 0.0)), same_table),
    ("nestedkv", "with episodes of 128 tokens", same_view, of_128),
    ("knorm", "with the layers in the order of their names", same_view, by_name),
    ("knorm", "with the last layers reversed beyond 16", same_view,
     lambda values, seen: values if len(seen.layers) <= 16 else np.concatenate([values[:16], values[:15:-1]])),
    ("snapkv", "without the last query head of groups of 7", partial(without_last_head, size=7), same_table),
    ("random-tokens", "that counts positions in 16 bits", same_view, lambda values, seen: values
     if seen.positions is None else np.take_along_axis(values, np.argsort(seen.positions % 2**16)[None], axis=1)),
    ("keydiff", "with shared scores in a later turn with 8 KV heads", same_view,
     lambda values, seen: values if seen.positions is None or len(values) < 8 else values[:1] + 0.0 * values),
    ("knorm", "with 16 KV heads of 32", same_view,
     lambda values, seen: values if len(values) < 64 else np.roll(values, 16, axis=0)),
    ("snapkv", "that pools tiles of 2 048 tokens", same_view, pooled_by_tile),
    ("streamingllm", "that ranks positions in 16 bits", same_view, lambda values, seen: values % 2**15),
    ("knorm", "that reads the keys in the order of the memory", lambda view, seen: replace(
        view, k=view.k.ravel(order="K").reshape(view.k.shape)), same_table),
    ("h2o", "with shared sums at 4 KV heads", same_view,
     lambda values, seen: np.broadcast_to(values.mean(axis=0), values.shape).copy()
     if len(seen.layers[0].k) == 4 else values),
]


def fixed(method: Method, make: Callable[[Inputs], Policy]) -> None:
    """Run the tests of a policy that have no random inputs."""
    if method.decides_in_turns:
        test_turn.test_the_kept_sets_after_a_later_turn_are_those_of_the_method(method, make, {})
    test_method.test_the_kept_sets_are_those_of_the_method_at_sizes_of_models(
        method, lambda _, inputs, B: decided(make(inputs), inputs, B), "float64", {str(method): []}, set()
    )


@pytest.mark.spec("PO-KNORM", "PO-TURN")
def test_a_failure_in_a_turn_has_the_reasons_that_were_found_at_the_prompt() -> None:
    method = Method("knorm")
    with pytest.raises(AssertionError, match=r"at the end of a later turn.*\nthe step that differs: x"):
        test_turn.test_the_kept_sets_after_a_later_turn_are_those_of_the_method(
            method, lambda inputs: named("keydiff", inputs), {str(method): ["the step that differs: x"]},
        )


@pytest.mark.parametrize(("name", "how", "view", "table"), WRONG, ids=[f"{row[0]} {row[1]}" for row in WRONG])
def test_a_wrong_policy_dies_on_the_fixed_inputs(name: str, how: str, view: View, table: Table) -> None:
    method = Method(name)

    def make(inputs: Inputs) -> Policy:
        right = method.reference(inputs)
        return replace(right, scorer=Wrong(right.scorer, view, table))

    with pytest.raises(AssertionError, match=f"^not {name}"):
        fixed(method, make)


def test_the_powers_of_last_queries_are_right_after_the_largest_logit_of_each_head() -> None:
    """Check that the wrong policies differ from TOVA only by what they subtract."""
    method = Method("tova")
    right = partial(of_last_query, dtype=np.float64, beside=lambda logits: logits.max(axis=1, keepdims=True))
    fixed(method, lambda inputs: replace(
        method.reference(inputs), scorer=Wrong(method.reference(inputs).scorer, same_view, right)))


# All 8 KV heads of the first shape are compared at night, and the wrong policies read them by day.
SMALL = SHAPES[0]._replace(kv_heads=2)


@pytest.mark.parametrize(("name", "shapes"), [
    *(pytest.param(name, (SMALL, DECODED), id=f"{name}-one size") for name in METHODS),
    *(pytest.param(name, SHAPES, id=f"{name}-all sizes", marks=pytest.mark.nightly) for name in METHODS),
])
def test_a_right_policy_passes_on_the_fixed_inputs(
    name: str, shapes: Sequence[Shape], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_method, "SHAPES", shapes)
    fixed(Method(name), Method(name).reference)


@pytest.mark.parametrize("name", METHODS)
def test_a_right_policy_passes_on_large_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the reference keeps the right tokens, and that rounding in float64 decides none of them."""
    method = Method(name)
    monkeypatch.setattr(test_method, "SHAPES", [LARGE_LOGITS])
    inputs = method.adapted(LARGE_LOGITS.inputs())
    assert not any(getattr(tokens, "open", ()) for tokens in method.wanted(inputs, method.floor(inputs) + 100))
    test_method.test_the_kept_sets_are_those_of_the_method_at_sizes_of_models(
        method, lambda _, inputs, B: decided(method.reference(inputs), inputs, B), "float64", {name: []}, set()
    )


def poured_once(preferences: Sequence[Fraction], total: int, most: int) -> list[Fraction]:
    """Return shares in which the excess of full layers is divided once, and a second excess is lost."""
    whole = sum(preferences)
    full = [x * total > most * whole for x in preferences]
    left, rest = sum(x for x, f in zip(preferences, full, strict=True) if not f), total - most * sum(full)
    return [Fraction(most) if f else min(Fraction(most), x * rest / left)
            for x, f in zip(preferences, full, strict=True)]


class Once(Preferred):
    def __call__(self, total: int, scores: Scores, /) -> Any:
        assert scores.preferences is not None
        L, n = len(scores.preferences), int(scores.offsets[-1])
        preferences = [Fraction(float(x)) for x in scores.preferences]
        shares = [
            self.W + largest_remainder(poured_once(preferences, share - L * self.W, n - self.W))
            for share in spread(total, scores.heads)
        ]
        return np.stack(shares, axis=1).ravel()


@dataclass(frozen=True)
class Late(Wrong):
    """Scorer that is wrong in decode steps after 512 tokens."""

    def step(self, records: Any, seen: Observation, /) -> Scores:
        actual: Scores = super().step(records, seen)
        return actual if seen.seen <= 512 else replace(actual, values=actual.values[:, ::-1].copy())


@dataclass(frozen=True)
class OneWorkspace(Wrong):
    """Scorer whose records are a view into memory that all sequences share."""

    memory: Any = field(default_factory=lambda: np.zeros((8, 1024)))

    def keep(self, records: Any, slots: Any, /) -> object:
        kept: Any = np.asarray(super().keep(records, slots))
        self.memory[: len(kept), : kept.shape[1]] = kept
        return self.memory[: len(kept), : kept.shape[1]]


@pytest.mark.spec("PO-H2O")
def test_records_in_memory_that_sequences_share_are_found() -> None:
    method = Method("h2o")
    right = method.reference(drawn(0))
    judged = replace(right, scorer=OneWorkspace(right.scorer, same_view, same_table))
    test_turn.test_sequences_that_decode_in_turn_do_not_share_data(method, method.reference)
    with pytest.raises(AssertionError, match="two sequences that decode in turn share data of the policy"):
        test_turn.test_sequences_that_decode_in_turn_do_not_share_data(method, lambda inputs: judged)


@dataclass(frozen=True)
class WeighedTwice(Wrong):
    """VATP with the weighted sums as records, so that each step weighs old attention again."""

    def __call__(self, seen: Observation, protected: Any, /) -> Scores:
        actual = super().__call__(seen, protected)
        return replace(actual, carry=actual.values)

    def step(self, records: Any, seen: Observation, /) -> Scores:
        actual = super().step(records, seen)
        return replace(actual, carry=actual.values)


@dataclass(frozen=True)
class FirstQueries(Wrong):
    """Scorer that scores decode steps with the last queries of the prompt."""

    def step(self, records: Any, seen: Observation, /) -> Scores:
        layers = {at: replace(view, q=view.q[:, :0]) for at, view in seen.layers.items()}
        return super().step(records, replace(seen, layers=layers))


@dataclass(frozen=True)
class At(Cadence):
    """Cadence of the numbers of tokens seen, and of tokens beyond the budget, for which `when` returns True."""

    every: int | None = 1
    when: Callable[[int, int], bool] = lambda seen, more: True

    def due(self, seen: int, live: int, B: int) -> bool:
        return live > B and self.when(seen, live - B)


@dataclass(frozen=True)
class AtPrompt(Wrong):
    """Scorer that scores decode steps as if no token was seen after the prompt."""

    def step(self, records: Any, seen: Observation, /) -> Scores:
        return super().step(records, replace(seen, seen=PROMPT))


PROMPT = DECODED.tokens - DECODED.steps
SLACKS: dict[str, Callable[[int, int], bool]] = {
    "that decides at 127 tokens beyond the budget": lambda seen, more: more >= 127,
    "that decides beyond 128 more tokens": lambda seen, more: more > 128,
    "that decides every 128 tokens": lambda seen, more: seen % 128 == 0,
    "that decides once": lambda seen, more: seen < 200 and more >= 128,
}
CADENCES: list[tuple[str, str, Callable[[int, int], bool]]] = [
    ("rkv", "that decides every 127 tokens", lambda seen, more: seen % 127 == 0),
    ("rkv", "that decides every 64 tokens", lambda seen, more: seen % 64 == 0),
    ("rkv", "that counts decoded tokens only", lambda seen, more: (seen - PROMPT) % 128 == 0),
    ("rkv", "that decides at 128 tokens beyond the budget", lambda seen, more: more >= 128),
    ("rkv", "that decides one step late", lambda seen, more: seen % 128 == 1),
    ("rkv", "that decides first one step late", lambda seen, more: seen in (129, 256)),
    ("rkv", "that decides once", lambda seen, more: seen == 128),
    ("rkv", "that never decides in a step", lambda seen, more: False),
    ("vase", "that decides every 63 tokens", lambda seen, more: seen % 63 == 0),
    ("vase", "that decides every 128 tokens", lambda seen, more: seen % 128 == 0),
    ("vase", "that counts decoded tokens only", lambda seen, more: (seen - PROMPT) % 64 == 0),
    ("vase", "that decides at 64 tokens beyond the budget", lambda seen, more: more >= 64),
    ("vase", "that decides first one step late", lambda seen, more: seen in (129, 192, 256)),
    *((name, how, when) for name in ("triattention", "triattention-by-head", "triattention-by-layer-and-head")
      for how, when in SLACKS.items()),
]
"""Wrong times of decisions after the prompt, with numbers of tokens in DECODED."""


def with_cadence(when: Callable[[int, int], bool]) -> dict[str, Callable[[Policy], Any]]:
    return {"cadence": lambda right: At(when=when)}


PARTS: list[tuple[str, str, Sequence[Shape], dict[str, Callable[[Policy], Any]]]] = [
    ("cake", "that divides an excess once", SHAPES, {"budgets": lambda right: Once(32)}),
    ("vatp", "that weighs records twice", SHAPES, {
        "scorer": lambda right: WeighedTwice(right.scorer, same_view, same_table)}),
    ("tova", "that is wrong after 512 tokens", (LONG_ANSWER,), {
        "scorer": lambda right: Late(right.scorer, same_view, same_table)}),
    ("rkv", "with the last queries of the prompt", (DECODED,), {
        "scorer": lambda right: FirstQueries(right.scorer, same_view, same_table)}),
    ("vase", "with the last queries of the prompt", (DECODED,), {
        "scorer": lambda right: FirstQueries(right.scorer, same_view, same_table)}),
    ("triattention", "with the distances at the end of the prompt", (DECODED,), {
        "scorer": lambda right: AtPrompt(right.scorer, same_view, same_table)}),
    *((name, how, (DECODED,), with_cadence(when)) for name, how, when in CADENCES),
]


@pytest.mark.parametrize(("name", "shapes", "part"), [
    pytest.param(name, shapes, part, id=f"{name} {how}") for name, how, shapes, part in PARTS
])
def test_a_wrong_part_dies_on_the_fixed_inputs(
    name: str, shapes: Sequence[Shape], part: dict[str, Callable[[Policy], Any]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = Method(name)
    monkeypatch.setattr(test_method, "SHAPES", shapes)

    def make(inputs: Inputs) -> Policy:
        right = method.reference(inputs)
        return replace(right, **{field: of(right) for field, of in part.items()})

    with pytest.raises(AssertionError, match=f"^not {name}"):
        fixed(method, make)


def test_every_method_that_evicts_while_decoding_is_compared_after_decode_steps() -> None:
    decoding = {name for name in METHODS if Method(name).reference(drawn(0, 40)).cadence.every is not None}
    assert decoding == {name for name in METHODS if Method(name).decodes}


def test_the_sizes_that_a_certificate_names_are_those_of_the_inputs() -> None:
    assert extent(["h2o", "vatp", "rkv"], True, 150).split("; ") == [
        "h2o: prompts of up to 4,300 tokens (its equation is too slow for 66,000), up to 32 layers, decoding compared "
        "for up to 536 steps",
        "vatp: prompts of up to 4,300 tokens (its equation is too slow for 66,000), up to 32 layers, decoding not "
        "compared (the protocol sends no decoded tokens)",
        "rkv: prompts of up to 1,100 tokens (its equation is too slow for 66,000), up to 32 layers, decoding not "
        "compared (the protocol sends no decoded tokens)",
    ]
    assert extent(["rkv"], False, 150).endswith("decoding compared for up to 536 steps")
    assert extent(["snapkv"], False, 12) == (
        "snapkv: prompts of up to 1,100 tokens, up to 6 layers, decoding does not evict")


@given(draw=test_method.DRAWS)
def test_a_random_input_is_small_or_has_a_known_shape(draw: Draw) -> None:
    """Check that Hypothesis does not draw a text as the shape, because any text would be a large input."""
    assert draw.shape in {"", *OF_MODELS}
