"""Tests of the torch backend: kept sets equal the brute force, and float32 scores are near the scores of the oracle."""

import math
import pickle
import tomllib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch

from accelerated.torch_device import activation, attention, breath, hebbian, resonance, scores, segments
from accelerated.torch_device import coattention as s1
from accelerated.torch_device import diversity as greedy
from accelerated.torch_device.backend import BACKEND
from accelerated.torch_device.nestedkv import nestedkv_score
from accelerated.torch_device.records import Neighbours
from accelerated.torch_device.selection import adaptive_shares, kept_tokens
from conformance import tolerances
from conformance.checks import stage_checks
from conformance.strategies.numbers import keys
from conformance.strategies.policy_inputs import Inputs, decided, drawn, observation, with_sinks
from conformance.strategies.prompts import AttentionInputs
from conformance.strategies.trunks import csr_of_matrix
from conformance.tolerances import scores_agree
from lab.measure.gpu.counts import DeviceTensor, HostReads, Work
from lab.mutants.edits import Edit, replaced
from lab.policy_cases import CASES
from models_integration.cache.device_compaction import read_retentions
from models_integration.session.device_choice import choose, policy_on_device
from reference import policies
from reference.backend import BACKEND as REFERENCE
from reference.crystalcache import prefill
from reference.policies.keydiff import keydiff_score
from reference.policies.layers import is_layerwise, policy_of_layer
from reference.policies.names import with_twins
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import Dissolve
from spec.budget import Budget
from spec.decode import LiveTrunks
from spec.errors import SpecError
from spec.parameters import NESTEDKV, PAPER, TINY
from spec.policy import LayerView, Observation, Policy
from spec.records import CoAttention, CrystalRetention
from tests.models_integration.session import test_device as sessions

pytestmark = pytest.mark.usefixtures('reference_items')


TWINS = [
    pytest.param(name, marks=pytest.mark.spec(case.item)) for name, case in CASES.items()
    if with_twins(drawn_policy := case.policy(drawn(1)), BACKEND) is not drawn_policy
]


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("seed", range(30))
def test_kept_sets_are_those_of_brute_force(name: str, seed: int) -> None:
    case, inputs = CASES[name], with_sinks(drawn(seed), seed)
    if inputs.n < case.least:
        inputs = with_sinks(drawn(seed, n=case.least), seed)
    B = max(case.floor, (inputs.n + 1) // 2)
    assert decided(with_twins(case.policy(inputs), BACKEND), inputs, B) == case.expected(inputs, B)


ON_DEVICE = [
    pytest.param(name, marks=pytest.mark.spec(case.item)) for name, case in CASES.items()
    if is_layerwise(drawn_policy := case.policy(drawn(1))) and policy_on_device(drawn_policy, BACKEND) is not None
]


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("seed", range(20))
def test_kept_sets_that_are_chosen_on_the_device_are_those_of_brute_force(name: str, seed: int) -> None:
    """Decide each layer separately, as a session does, and check that the host reads only positions."""
    case, inputs = CASES[name], with_sinks(drawn(seed), seed)
    if inputs.n < case.least:
        inputs = with_sinks(drawn(seed, n=case.least), seed)
    policy, B = case.policy(inputs), max(case.floor, (inputs.n + 1) // 2)
    whole, L = observation(policy, of_type(inputs, torch.from_numpy)), len(inputs.layers)
    parts = {at: replace(whole, layers={at: view}, first=at * whole.groups // L) for at, view in whole.layers.items()}
    actual = [choose(policy_of_layer(policy, at, L), BACKEND, Budget(count=B), part) for at, part in parts.items()]
    layers = read_retentions([[one] for one in actual if one is not None], policy.granularity)
    assert [kept.group(g).tolist() for ((kept, _),) in layers for g in range(kept.groups)] == case.expected(inputs, B)


def of_type(inputs: Inputs, make: Callable[[Any], Any]) -> Inputs:
    """Return the layer with q, k, v and sinks of a different dtype."""
    layers = [
        replace(
            view, q=make(view.q), k=make(view.k), v=make(view.v),
            sinks=None if view.sinks is None else make(view.sinks),
        ) for view in inputs.layers
    ]
    return replace(inputs, layers=layers)


def values(policy: Policy, inputs: Inputs) -> Any:
    """Return the scores of both stages."""
    actual = policy.scorer(replace(observation(policy, inputs), B=9), policy.protection(inputs.n))
    return np.concatenate([actual.values, *([] if actual.second is None else [actual.second])])


def close(actual: Any, want: Any) -> bool:
    """Check scores to 2^-15 of the row's largest score. A sum in half precision differs by 2^-12 or more."""
    finite = np.isfinite(want)
    gap = np.abs(actual[finite] - want[finite]).max(initial=0.0)
    same = np.array_equal(actual[~finite], want[~finite], equal_nan=True)
    return same and bool(gap <= 2.0**-15 * np.abs(want[finite]).max(initial=0.0))


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("seed", range(20))
def test_tensors_are_scored_in_float32_where_they_are(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that bfloat16 tensors are converted to float32 before any arithmetic."""
    inputs = of_type(drawn(seed, n=21), lambda x: torch.from_numpy(x).bfloat16())
    wide = of_type(inputs, lambda x: x.double().numpy())
    policy = CASES[name].policy(wide)
    want = values(policy, wide)
    actual = values(with_twins(policy, BACKEND), inputs)
    assert all(close(got, row) for got, row in zip(actual, want, strict=True))
    for module in (attention, scores):
        monkeypatch.setattr(module, "block_rows", lambda x, columns: 2)
    again = values(with_twins(policy, BACKEND), inputs)
    assert all(close(got, row) for got, row in zip(again, actual, strict=True))


@pytest.mark.spec("CC-COATTENTION", "CC-KEY-NORM")
@pytest.mark.parametrize("seed", range(4))
def test_s1_of_tensors_lies_in_the_certified_box(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a later segment, in blocks of two queries."""
    rng, at = np.random.default_rng(seed), np.arange(5, 29)
    q, k = (torch.from_numpy(rng.standard_normal(shape)).bfloat16() for shape in ((4, 21, 4), (2, 24, 4)))
    inputs = AttentionInputs(q.double().numpy(), k.double().numpy(), at, TINY, 0.5, None)
    monkeypatch.setattr(s1, "block_rows", lambda x, columns: 2)
    actual = BACKEND.require_crystal().coattention(q, k, at, TINY, 0.5, None)
    assert not list(stage_checks.coattention(actual, inputs, "float32"))
    norms = REFERENCE.require_breath().inverse_key_norms(inputs.k)
    actual_norms = BACKEND.require_breath().inverse_key_norms(k)
    assert (np.abs(actual_norms - norms) <= tolerances.key_norm_error(2, 4) * norms).all()


@pytest.mark.spec("CC-COATTENTION")
def test_tensors_of_s1_are_checked_by_name() -> None:
    q, k = torch.ones(4, 6, 4), torch.ones(2, 6, 4)
    run = BACKEND.require_crystal().coattention
    wrong: list[tuple[str, Any, Any, Any]] = [
        ("q", q.int(), k, None), ("k", q, k[0], None), ("k", q, k.numpy(), None), ("q", q[:3], k, None),
        ("k", q, k[..., :3], None), ("q", q, k[:, :5], None), ("lse", q, k, torch.ones(4, 5)),
        ("k", q, k.clone().index_fill_(1, torch.tensor(3), torch.nan), None),
    ]
    for name, queries, given, lse in wrong:
        with pytest.raises(SpecError, match=f"^{name} "):
            run(queries, given, np.arange(6), TINY, 0.5, None, lse)


def test_a_twin_has_the_name_and_the_arguments_of_a_function_of_the_reference() -> None:
    modules = [import_module(f"{policies.__name__}.{module.name}") for module in iter_modules(policies.__path__)]
    for name, twin in BACKEND.scores.items():
        (function,) = {getattr(module, name) for module in modules if hasattr(module, name)}
        assert list(signature(function).parameters) == list(signature(twin).parameters)


def test_a_zero_key_has_no_direction() -> None:
    view = LayerView(np.ones((1, 1, 4)), np.zeros((1, 3, 4)), None, 1.0, None)
    with pytest.raises(SpecError, match="a zero key has no direction: KV head 0, token 0"):
        BACKEND.scores["keydiff_score"](view)


@pytest.mark.spec("PO-KEYDIFF")
@pytest.mark.parametrize(("kind", "exponent"), [("float32", -90), ("float32", 90), ("float64", -700), ("float64", 700)])
def test_lengths_of_keys_say_nothing(kind: str, exponent: int) -> None:
    """Check that keys multiplied by powers of two have the scores of the original keys."""
    k = keys(3, 2, 20)
    longer = k.astype(kind)
    longer[:, ::2] *= longer.dtype.type(2.0**exponent)
    view, scaled = (LayerView(np.ones((2, 1, 4), some.dtype), some, None, 1.0, None) for some in (k, longer))
    for score, precision in ((BACKEND.scores["keydiff_score"], kind), (keydiff_score, "float64")):
        pairs = zip(score(scaled), keydiff_score(view).tolist(), strict=True)
        assert all(scores_agree(got, row, precision) for got, row in pairs)


@pytest.mark.spec("PO-TOP-UNITS")
def test_of_ties_the_lower_index_is_kept() -> None:
    """Check scores with many ties, protected tokens and tokens without a score, for all sizes of shares."""
    rng = np.random.default_rng(1)
    values = rng.integers(-1, 2, (40, 9)) / np.where(rng.random((40, 9)) < 0.2, np.nan, 1.0)
    shares, pinned = rng.integers(0, 10, 40), rng.random((40, 9)) < 0.2
    marks = kept_tokens(*(torch.from_numpy(part) for part in (values, shares, pinned)))
    for row, share, held, actual in zip(values.tolist(), shares, pinned, marks.tolist(), strict=True):
        rank = [(not held[at], math.isnan(row[at]), -np.nan_to_num(row[at]), at) for at in range(9)]
        assert [at for at in range(9) if actual[at]] == sorted(at for *_, at in sorted(rank)[: max(share, sum(held))])


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-WHOLE-SHARES")
def test_equal_remainders_go_to_the_lower_heads() -> None:
    """Check equal remainders: the last of three heads wins all tokens, and a fifth of the tokens is divided evenly."""
    values = torch.tensor([[math.nan, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2 + [[math.nan, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for free, shares in ((1, [1, 1, 2]), (3, [1, 1, 4]), (5, [1 + 1, 1, 1 + 4])):
        assert adaptive_shares(values, free, 1, Fraction(1, 5)).tolist() == shares
    assert adaptive_shares(values, 5, 1, 1).tolist() == [1 + 2, 1 + 2, 1 + 1]


def expected(view: LayerView) -> torch.Tensor:
    """Return the scores of Expected Attention for all tokens of a layer."""
    n = view.k.shape[1]
    return attention.expected_weights(
        view.q, view.k, view.v, np.arange(n), np.arange(n, n + 512), np.ones(64), 1.0, view.scaling
    )


@pytest.mark.spec("PO-EXPECTED-ATTENTION", "NK-SCORE")
@pytest.mark.parametrize(("score", "operators", "gigabytes"), [
    (expected, 90, 8.5), (lambda view: nestedkv_score(view, BACKEND.require_nestedkv(), NESTEDKV), 230, 7.5),
])
def test_a_score_of_a_long_prompt_needs_few_operators_and_bytes(
    score: Callable[[LayerView], torch.Tensor], operators: int, gigabytes: float,
) -> None:
    """Check a layer of the shape of Llama-3.1-8B at 32 768 tokens. Work for each query head would exceed the bounds."""
    q, k, v = (torch.empty(heads, 32_768, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8))
    with Work() as work:
        assert score(LayerView(q, k, v, 0.1, None)).shape == (8, 32_768)
    assert work.operators <= operators
    assert work.bytes <= gigabytes * 1e9


VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"merge": "median"}, {"coverage": 0.3}, {"allocation": "tiers"}, {"T_max": 1}, {"T_max": 32, "N_min": 0},
    {"k_intra": 0, "k_cross": 0}, {"graph": "zero"}, {"impact": "unit", "trunk_impact": "unit", "coverage": 0.5},
)


@pytest.mark.spec("CC-DISSOLVE")
def test_a_selector_with_other_parameters_decides_again() -> None:
    """Check that a retention from the device is not used for different parameters or a different protection."""
    rng = np.random.default_rng(5)
    q, k, ids = rng.normal(size=(4, 60, 8)) * 2, rng.normal(size=(2, 60, 8)), rng.integers(0, 12, 60)
    seen = Observation(60, 1, ids, {0: LayerView(q, k, None, 8**-0.5, None)}, B=25)
    different = Dissolve(REFERENCE.require_crystal(), replace(TINY, allocation="tiers", coverage=0.4))
    kept = []
    for engine in (BACKEND, REFERENCE):
        policy = policies.crystalcache(frozenset({1, 2, 3}), TINY, engine)
        kept.append([
            policies.retain(one, Budget(count=25), seen).positions.tolist()
            for one in (policy, replace(policy, selector=different), replace(policy, protection=SinkAndRecent(0, 9)))
        ])
    assert kept[0] == kept[1]
    assert len({tuple(one) for one in kept[0]}) == 3


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_prompt_is_decided_on_the_device_with_one_wait(changes: dict[str, Any]) -> None:
    """Compare all results of S2 to S6 with the reference. The host reads the neighbours of S1 only if they are used."""
    p = replace(TINY, **changes)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 90))
        q, k, ids = rng.normal(size=(4, n, 8)) * 2, rng.normal(size=(2, n, 8)), rng.integers(0, 12, n)
        budget = float(rng.uniform(0.1, 1.0))
        want = prefill(q, k, ids, frozenset({1, 2, 3}), budget, p)
        at = np.arange(n)
        held = (at < p.N_sink) | (at >= n - p.W_recent)
        assert BACKEND.prefill is not None
        with HostReads() as reads:
            actual = BACKEND.prefill(
                *(DeviceTensor(torch.from_numpy(x)) for x in (q, k)), ids, np.isin(ids, [1, 2, 3]), held,
                want.budget, p, 8**-0.5, None,
            )
            assert sum(reads.counts.values()) == 1
            assert np.array_equal(actual.coattention.intra, want.coattention.intra)
            assert sum(reads.counts.values()) == 2
        pairs = [
            (actual.kept, want.kept), (actual.trunks.offsets, want.trunks.offsets), (actual.ratio, want.ratio),
            (actual.graph.indptr, want.graph.indptr), (actual.graph.indices, want.graph.indices),
            (actual.protected, want.protected), (actual.coattention.cross, want.coattention.cross),
        ]
        assert all(np.array_equal(x, y) for x, y in pairs)
        norms = REFERENCE.require_breath().inverse_key_norms(k)
        assert actual.inverse_norms is not None
        for x, y in (
            (actual.graph.weights, want.graph.weights), (actual.graph.degree, want.graph.degree),
            (actual.D, want.D), (actual.scores, want.scores), (actual.impact, want.impact),
            (actual.inverse_norms, norms), (actual.trunks.impact, want.trunks.impact),
        ):
            assert scores_agree(x, y.tolist())


@pytest.mark.spec("CC-PREFILL")
def test_a_prompt_with_nan_is_refused_after_the_wait() -> None:
    q, k = torch.ones(4, 6, 4), torch.ones(2, 6, 4).index_fill_(1, torch.tensor(3), torch.nan)
    with pytest.raises(SpecError, match=r"^k "):
        prefill_of(q, k)
    record = prefill_of(q, torch.ones(2, 6, 4)).coattention
    assert type(pickle.loads(pickle.dumps(record))) is CoAttention
    with pytest.raises(AttributeError, match="tokens"):
        record.tokens  # type: ignore[attr-defined]  # noqa: B018


def prefill_of(q: torch.Tensor, k: torch.Tensor) -> CrystalRetention:
    """Return the retention of six tokens."""
    assert BACKEND.prefill is not None
    mask = np.zeros(6, dtype=np.bool_)
    return BACKEND.prefill(q, k, np.arange(6), mask, mask, 3, TINY, 0.5, None)


@pytest.mark.spec(
    "CC-DECAY", "CC-ACTIVATION", "CC-ETA", "CC-RESONANCE", "CC-PULSE", "CC-HEBB", "CC-SEGMENT-GRAPH", "DV-GREEDY",
)
@pytest.mark.parametrize("seed", range(12))
def test_stages_of_decoding_and_diversity_read_nothing_from_the_device(seed: int) -> None:
    """Compare the stages with the reference: nine old trunks with gaps, and a segment of two trunks from 20 on."""
    rng, p = np.random.default_rng(seed), replace(PAPER, max_hops=3, gamma_hop=0.9, tau_edge=0.3, gamma_decay=0.5)
    pairs = np.triu((rng.random((9, 9)) < 0.3) * rng.uniform(0.3, 1.3, (9, 9)), 1)
    W, active, D, M_bar = csr_of_matrix(pairs + pairs.T), rng.random(9) < 0.5, rng.random(9), 4 * rng.random(9)
    sizes = np.append(rng.integers(1, 3, 9), [3, 3])
    bounds, offsets = np.append(2 * np.arange(9), [20, 23, 26]), np.append(0, sizes[:9].cumsum())
    norms = np.where(rng.random(offsets[-1]) < 0.3, np.inf, rng.random(offsets[-1]))
    near, far = (np.where(rng.random((6, 2)) < 0.3, -1, rng.integers(*span, (6, 2))) for span in ((20, 26), (0, 18)))
    S1 = CoAttention(20, np.ones(6), near, rng.random((6, 2)), far, rng.random((6, 2)))
    s, V = rng.random(9), rng.standard_normal((3, 4))[rng.integers(0, 3, 9)]

    def on_device(stage: Callable[..., Any], *given: Any) -> Any:
        return stage(*(DeviceTensor(torch.from_numpy(x)) if isinstance(x, np.ndarray) else x for x in given))

    with HostReads() as reads:
        neighbours = on_device(Neighbours, S1.salience, near, S1.intra_weight, far, S1.cross_weight)
        actual = [
            on_device(breath.decay, D, M_bar, p), on_device(activation.active_trunks, norms, offsets, 0.3),
            on_device(resonance.resonance, D, *W, np.flatnonzero(active), p),
            *on_device(hebbian.hebbian, *W, active, p),
            *on_device(segments.segment_graph, neighbours, 20, bounds, sizes, *W, 0.3)[:3],
            on_device(greedy.diverse, s, V, active, 7, 0.5),
        ]
        assert not sum(reads.counts.values())
    live, stages = LiveTrunks(np.arange(offsets[-1]), offsets, norms, norms, M_bar), REFERENCE.require_breath()
    want = [
        stages.decay(D, M_bar, p), stages.activation(live, p), stages.resonance(D, W, active, p),
        *stages.hebbian(W, active, p), *stages.segment_graph(S1, bounds, sizes, W, p),
        np.isin(np.arange(9), REFERENCE.require_diversity().diverse(s, V, active, 7, 0.5)),
    ]
    assert all(scores_agree(x.held.numpy()[: len(y)], y.tolist()) for x, y in zip(actual, want, strict=True))


MUTANTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))


def check(kind: str, name: str) -> None:
    """Run a test of this file, or a test of a session, for all of its seeds."""
    if kind == "ties":
        test_of_ties_the_lower_index_is_kept()
    elif kind == "s1":
        for seed in range(4):
            with pytest.MonkeyPatch.context() as patch:
                test_s1_of_tensors_lies_in_the_certified_box(seed, patch)
    elif kind == "prefill":
        for changes in VARIANTS:
            test_a_prompt_is_decided_on_the_device_with_one_wait(changes)
    elif kind == "decoding":
        for seed in range(12):
            test_stages_of_decoding_and_diversity_read_nothing_from_the_device(seed)
    elif kind == "shares":
        test_equal_remainders_go_to_the_lower_heads()
    elif kind == "padded":
        sessions.test_padded_rows_that_are_chosen_on_the_device_are_those_of_the_host(name, 0.3)
    else:
        for seed in range(20):
            if kind == "float32":
                with pytest.MonkeyPatch.context() as patch:
                    test_tensors_are_scored_in_float32_where_they_are(name, seed, patch)
            elif kind == "kept":
                test_kept_sets_are_those_of_brute_force(name, seed)
            else:
                test_kept_sets_that_are_chosen_on_the_device_are_those_of_brute_force(name, seed)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_found(name: str) -> None:
    kind, _, policy = MUTANTS[name]["check"].partition(" ")
    edit = {key: text for key, text in MUTANTS[name].items() if key not in ("why", "check")}
    with replaced(Edit(**edit)), pytest.raises((AssertionError, SpecError)):
        check(kind, policy)
