"""Defaults of policies, the backends that they accept, and input for which they raise an error with the argument."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from conformance.methods import brutes
from conformance.methods.brute import Brute
from conformance.strategies.policy_inputs import TEMPLATE, calibrated, decided, drawn, identity, observation
from lab.policy_cases import CASES
from reference import policies
from reference.backend import BACKEND
from reference.injection.diagnostics import bands, key_cosine
from reference.injection.quantisers import Arm, quantised_region
from reference.injection.splicing import first_tokens, held, most_deviating, placed
from reference.injection.wrappers import FORMS, Vocabulary, wrap
from reference.policies import policy_from_score
from reference.policies.adakv import with_adaptive_budgets
from reference.policies.attention import received_attention
from reference.policies.budgets import Adaptive, Competition, Pyramid, pyramidkv_official
from reference.policies.criticalkv import with_critical_selection
from reference.policies.diversity import Diverse, diverse, toward_mean_values
from reference.policies.keydiff import keydiff_score
from reference.policies.kvcrush import with_representatives
from reference.policies.kvzip_heads import FullHeads, head_scores
from reference.policies.lagkv import lagkv_score
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import fill_units
from reference.policies.vatp import with_value_norms
from reference.statistics import draws, mcnemar, mcnemar_power
from reference.triattention import band_statistics
from spec.backend import Backend, resolve
from spec.budget import Budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import NESTEDKV
from spec.policy import Cadence, LayerView, Observation, Policy, Scores

pytestmark = pytest.mark.usefixtures("reference_items")


INV_FREQ = np.array([1.0, 0.5])
ONE, KEYS = np.ones((1, 2, 2)), np.ones((1, 1, 2))
CHUNKS, STEPS = policies.chunkkv(), policies.h2o()
SHOWN = dict(enumerate(drawn(5, n=20, L=2, heads=(3, 1)).layers))


def scores(H: int, n: int, pinned: int) -> Scores:
    values = np.zeros((H, n))
    values[:, :pinned] = np.nan
    return Scores(values, np.arange(n + 1), heads=H)


KVZIP: list[tuple[str, dict[str, Any]]] = [
    ("template", {"template": None}), ("template", {"template": ((1,), (2,))}), ("id", {"template": ((1,), (-2,), ())}),
    ("N_sink", {"N_sink": -1}), ("N_recent", {"N_recent": -1}), ("chunk", {"chunk": 0}), ("overlap", {"overlap": -1}),
]
SHARES: list[Any] = [1, 1.5, -0.1, float("nan"), float("inf"), "many"]
NESTED: list[tuple[str, Any]] = [
    ("w0", (0.5, 0.5, 0.0)), ("w0", (1.0, 1.0)), ("blocks", 0), ("b_min", 0), ("b_max", 127), ("W", 0), ("W", 2.0),
    ("p", Fraction(0)), ("p", Fraction(3, 2)), ("beta", -1.0), ("tau", float("nan")), ("kappa", float("inf")),
    ("N_sink", -1), ("alpha_s", Fraction(6, 5)),
]


PLACES = (("hidden", 3, [0]), ("hidden", -1, [0]), ("kept", 0, [1, 1]), ("kept", 0, [0, 3]), ("kept", 0, [-1, 0]))


def triattention(**constants: Any) -> Policy:
    inputs = drawn(1)
    return policies.triattention(calibrated(inputs), identity(inputs), **constants)


def refused(item: str, make: Callable[[], object], argument: str) -> Any:
    return pytest.param(make, argument, marks=pytest.mark.spec(item))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        refused("PO-SNAPKV", lambda: policies.snapkv(0), "W"),
        refused("PO-SNAPKV", lambda: policies.snapkv(8, 4), "kernel"),
        refused("PO-SNAPKV", lambda: policies.snapkv(8, -1), "kernel"),
        refused("PO-PYRAMIDKV", lambda: policies.pyramidkv(8, 7, 0), "beta"),
        refused("PO-PYRAMIDKV-DESCRIBED", lambda: policies.pyramidkv_described(8, 0), "beta"),
        refused("PO-PYRAMIDKV-DESCRIBED", lambda: policies.pyramidkv_described(0), "W"),
        refused("PO-CHUNKKV", lambda: policies.chunkkv(0), "c"),
        refused("PO-CHUNKKV", lambda: policies.chunkkv(10, 0), "W"),
        refused("PO-CHUNKKV", lambda: policies.chunkkv(10, 8, 0), "N_reuse"),
        refused("PO-CHUNKKV-DESCRIBED", lambda: policies.chunkkv_described(0), "c"),
        refused("PO-H2O-DESCRIBED", lambda: policies.h2o_described(0), "W"),
        refused("PO-RKV", lambda: policies.rkv(0), "W"),
        refused("PO-RKV", lambda: policies.rkv(8, 2), "kernel"),
        refused("PO-RKV", lambda: policies.rkv(lam=1.5), "lam"),
        refused("PO-RKV", lambda: policies.rkv(lam=float("nan")), "lam"),
        refused("PO-RKV", lambda: policies.rkv(lam=-0.5), "lam"),
        refused("PO-RKV", lambda: policies.rkv(every=0), "every"),
        refused("PO-LAGKV", lambda: policies.lagkv(-1), "sink"),
        refused("PO-LAGKV", lambda: policies.lagkv(lag=0), "lag"),
        refused("PO-ADAKV", lambda: policies.adakv(safeguard=Fraction(3, 2)), "safeguard"),
        refused("PO-ADAKV", lambda: policies.adakv(8, 4), "kernel"),
        refused("PO-ADAPTIVE-BUDGET", lambda: with_adaptive_budgets(policies.knorm(), Fraction(-1)), "safeguard"),
        refused("PO-DEFENSIVEKV", lambda: policies.defensivekv({}, 0), "W"),
        refused("PO-DEFENSIVEKV", lambda: policies.defensivekv({}, 8, 4), "kernel"),
        refused("PO-EXPECTED-ATTENTION", lambda: policies.expected_attention(INV_FREQ, N_sink=-1), "N_sink"),
        refused("PO-EXPECTED-ATTENTION", lambda: policies.expected_attention(INV_FREQ, N_future=0), "N_future"),
        refused("PO-EXPECTED-ATTENTION", lambda: policies.expected_attention(INV_FREQ, factor=0.0), "factor"),
        refused("PO-STREAMINGLLM", lambda: policies.streaming_llm(-1), "N_sink"),
        refused("PO-STREAMINGLLM", lambda: SinkAndRecent(-1, 0), "sink"),
        refused("PO-STREAMINGLLM", lambda: SinkAndRecent(0, -1), "recent"),
        refused("PO-COMPETITION-BUDGET", lambda: Competition(Fraction(2)), "safeguard"),
        refused("PO-PYRAMID-OFFICIAL", lambda: pyramidkv_official(128, 8, 1, 4096), "L"),
        refused("PO-PYRAMID-OFFICIAL", lambda: pyramidkv_official(8, 8, 4, 4096), "capacity"),
        refused("PO-BLOCKS", lambda: policies.in_blocks(policies.knorm(), 0), "block"),
        refused("PO-KVCRUSH", lambda: policies.kvcrush(block=0), "block"),
        refused("PO-KVCRUSH", lambda: policies.kvcrush(share=1.5), "share"),
        refused("PO-KVCRUSH", lambda: policies.kvcrush(share=float("nan")), "share"),
        refused("PO-KVCRUSH", lambda: policies.kvcrush(anchor="random"), "anchor"),
        refused("PO-STEP", lambda: Cadence(0, 1), "every"),
        refused("PO-STEP", lambda: Cadence(-3, 1), "every"),
        refused("PO-STEP", lambda: Cadence(1, 0), "excess"),
        refused("PO-MORPHKV", lambda: policies.morphkv(0), "W"),
        refused("PO-MORPHKV", lambda: policies.morphkv(fusion="mean"), "fusion"),
        refused("PO-VASE", lambda: policies.vase(0), "W"),
        refused("PO-VASE", lambda: policies.vase(share=Fraction(2)), "share"),
        refused("PO-VASE", lambda: policies.vase(seed=-1), "seed"),
        refused("PO-VASE", lambda: policies.vase(N_sink=-1), "sink"),
        refused("PO-VATP", lambda: policies.vatp(-1), "N_sink"),
        refused("PO-CRITICALKV", lambda: with_critical_selection(policies.snapkv(), {}, Fraction(3, 2)), "share"),
        refused("PO-CAKE", lambda: policies.cake(0), "W"),
        refused("PO-CAKE", lambda: policies.cake(kernel=4), "kernel"),
        refused("PO-CAKE", lambda: policies.cake(gamma=-1.0), "gamma"),
        refused("PO-CAKE", lambda: policies.cake(tau1=0.0), "tau1"),
        refused("PO-CAKE", lambda: policies.cake(tau2=float("nan")), "tau2"),
        refused("DV-POLICY", lambda: policies.diverse(policies.knorm(), -0.1), "lam"),
        refused("DV-POLICY", lambda: policies.diverse(policies.knorm(), float("nan")), "lam"),
        refused("DV-POLICY", lambda: policies.diverse(policies.knorm(), float("inf")), "lam"),
        refused("DV-POLICY", lambda: Diverse(resolve("numpy").require_diversity(), -1.0), "lam"),
        refused("DV-VARIANT-B", lambda: policies.toward_mean_values(policies.knorm(), -0.1), "lam"),
        refused("DV-SCHEDULE", lambda: policies.scheduled(8, 1, 0), "rounds"),
        refused("DV-SCHEDULE", lambda: policies.scheduled(8, 4, 8), "tilt"),
        refused("DV-SCHEDULE", lambda: policies.scheduled(8, 4, -8), "tilt"),
        refused("TA-POLICY", lambda: triattention(mode="per_head"), "mode"),
        refused("TA-POLICY", lambda: triattention(pin_prompt=-1), "pin_prompt"),
        refused("TA-POLICY", lambda: triattention(slack=0), "slack"),
        *(
            refused("PO-KVZIP", partial(make, **{"template": TEMPLATE, **given}), argument)
            for make in (policies.kvzip, policies.kvzip_uniform, partial(policies.kvzip_plus, {}))
            for argument, given in KVZIP
        ),
        *(refused("NK-TOKENS", partial(policies.eviction_budget, r, 100), "r") for r in SHARES),
        *(refused("NK-SCORE", partial(replace, NESTEDKV, **{name: value}), name) for name, value in NESTED),
        # Hosts that keep more than single tokens, or that decide in steps, and signatures finer than the kept sets.
        refused("PO-BLOCKS", lambda: policies.in_blocks(CHUNKS, 16), "host"),
        refused("PO-BLOCKS", lambda: policies.in_blocks(policies.crystalcache(frozenset({0})), 16), "host"),
        refused("PO-BLOCKS", lambda: policies.in_blocks(policies.diverse(policies.knorm()), 16), "host"),
        refused("PO-BLOCKS", lambda: policies.in_blocks(policies.in_blocks(policies.knorm(), 16), 16), "host"),
        refused("PO-BLOCKS", lambda: policies.diverse(policies.in_blocks(policies.knorm(), 16)), "host"),
        refused("PO-KVCRUSH", lambda: policies.with_representatives(CHUNKS), "host"),
        refused("PO-KVCRUSH", lambda: policies.with_representatives(STEPS), "host"),
        refused("PO-KVCRUSH", lambda: policies.with_representatives(policies.tova()), "host"),
        refused("PO-KVCRUSH", lambda: policies.with_representatives(policies.streaming_llm()), "host"),
        refused("PO-VATP", lambda: policies.with_value_norms(CHUNKS), "host"),
        refused("PO-CRITICALKV", lambda: policies.with_critical_selection(policies.tova(), {}), "host"),
        refused("PO-CRITICALKV", lambda: policies.with_critical_selection(STEPS, {}), "host"),
        refused("PO-CRITICALKV", lambda: policies.with_critical_selection(policies.caote(), {}), "host"),
        refused("DV-POLICY", lambda: policies.diverse(STEPS), "host"),
        refused("DV-POLICY", lambda: policies.diverse(CHUNKS), "host"),
        refused("DV-POLICY", lambda: policies.diverse(policies.diverse(policies.knorm())), "host"),
        refused("DV-POLICY", lambda: policies.diverse(policies.tova(), mode="head"), "mode"),
        refused("DV-POLICY", lambda: policies.diverse(policies.streaming_llm(), mode="layer"), "mode"),
        refused("DV-POLICY", lambda: policies.diverse(policies.knorm(), mode="learned"), "mode"),
        # Scores and observations that do not match.
        refused("DV-POLICY", lambda: policies.diverse(policies.knorm()).selector(
            scores(1, 2, 0), np.array([1]), np.zeros(2, bool)), "scores.signatures"),
        refused("PO-FILL-UNITS", lambda: fill_units(
            Scores(np.zeros((1, 2)), np.array([0, 2, 4])), np.array([3]), np.zeros(4, bool)), "scores.members"),
        *(refused("PO-HEAD-SCORES", partial(head_scores, given), "contexts") for given in (
            [], [np.full((2, 3), np.nan)], [np.zeros((2, 0))],
        )),
        refused("PO-FULL-HEADS", lambda: FullHeads(np.ones(3), 2)(8, scores(2, 5, 0)), "calibration"),
        refused("PO-THRESHOLD", lambda: policy_from_score(lambda seen: KEYS[0], threshold=float("nan")), "threshold"),
        refused("PO-RETAIN", lambda: policies.retain(
            policies.snapkv(3, 3), Budget(count=5), Observation(20, 5, None, SHOWN)), "groups"),
        refused("PO-RETAIN", lambda: policies.retain(
            policies.adakv(3, 3), Budget(count=5), Observation(20, 6, None, {})), "layers"),
        # Functions of injection, of statistics and of calibrations.
        *(
            refused("IN-PLACES", partial(placed, 3, hidden, 0, np.array(kept)), argument)
            for argument, hidden, kept in PLACES
        ),
        refused("IN-LEGOLINK", lambda: first_tokens(0, [3], -1), "k"),
        refused("IN-CACHEBLEND", lambda: most_deviating(ONE, ONE, 0, -0.1), "r"),
        refused("IN-CACHEBLEND", lambda: most_deviating(ONE, ONE, 0, 1.1), "r"),
        refused("IN-BANDS", lambda: bands(0), "depth"),
        refused("IN-BASELINES", lambda: held("cond2", [1], [], [], []), "arm"),
        refused(
            "IN-KEY-COSINE", lambda: key_cosine(KEYS, KEYS, (np.arange(1), np.arange(1)), np.ones(1), "neox"), "style"
        ),
        refused("IN-MCNEMAR", lambda: mcnemar(-1, 2), "b"),
        refused("IN-MCNEMAR", lambda: mcnemar(2, -1), "c"),
        refused("IN-BOOTSTRAP", lambda: draws(0, 5, 1), "units"),
        refused("IN-BOOTSTRAP", lambda: draws(5, 0, 1), "resamples"),
        refused("IN-BOOTSTRAP", lambda: draws(5, 5, -1), "seed"),
        refused("IN-POWER", lambda: mcnemar_power(-1, 0.2, 0.1), "n"),
        refused("IN-POWER", lambda: mcnemar_power(5, 0.0, 0.0), "discordance"),
        refused("IN-POWER", lambda: mcnemar_power(5, 1.5, 0.1), "discordance"),
        refused("IN-POWER", lambda: mcnemar_power(5, 0.2, -0.3), "difference"),
        refused("IN-POWER", lambda: mcnemar_power(5, 0.5, 0.1, 1.0), "alpha"),
        refused("IN-POWER", lambda: mcnemar_power(5, 0.5, 0.1, 0.0), "alpha"),
        refused("IN-ARMS", lambda: quantised_region(Arm("per_head", "per_head", half="middle"), 4, 4), "half"),
        refused("IN-WRAP", lambda: wrap(FORMS["raw"], [], Vocabulary(lambda text: [7], lambda ids: "x")), "chunk"),
        refused("TA-STATISTICS", lambda: band_statistics(np.zeros((1, 0, 4))), "q"),
        refused("TA-STATISTICS", lambda: band_statistics(np.zeros((1, 3, 5))), "q"),
    ],
)
def test_a_constant_host_or_argument_is_refused_by_name(make: Callable[[], object], argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.spec("PO-KEYDIFF")
def test_a_zero_key_has_no_direction() -> None:
    """Check that the message names the head and the token."""
    k = np.ones((2, 3, 2))
    k[1, 2] = 0.0
    with pytest.raises(SpecError, match="KV head 1, token 2"):
        keydiff_score(LayerView(k, k, None, 1.0, None))


@pytest.mark.spec("NK-SCORE")
def test_a_key_that_float64_does_not_hold_is_refused() -> None:
    with pytest.raises(SpecError, match="must be finite"):
        BACKEND.require_nestedkv().anomaly_score(np.full((1, 2, 2), 2 * np.longdouble(1.7e308)), NESTEDKV)


@pytest.mark.spec("PO-KEYDIFF")
def test_a_zero_anchor_scores_nothing() -> None:
    """Two opposite keys have no mean direction, so both scores are 0."""
    k = np.array([[[1.0, 0.0], [-1.0, 0.0]]])
    assert keydiff_score(LayerView(k, k, None, 1.0, None)).tolist() == [[0.0, 0.0]]


@pytest.mark.spec("PO-RETAIN")
@pytest.mark.parametrize("name", ["knorm", "tova", "keydiff"])
def test_a_pinned_prompt_above_the_budget_is_refused(name: str) -> None:
    """A share cannot hold this protection. The error names the budget, before any token is kept."""
    inputs = drawn(7, n=12, L=2, heads=(2, 1))
    host: Policy = vars(policies)[name]()
    pinned = Policy(
        name, host.scorer, host.budgets, host.selector, SinkAndRecent(6, 0), granularity=host.granularity, least=None,
    )
    with pytest.raises(SpecError, match="at least 6, the number of tokens") as caught:
        policies.retain(pinned, Budget(count=5), observation(pinned, inputs))
    assert caught.value.argument == "budget"
    assert len(policies.retain(pinned, Budget(count=6), observation(pinned, inputs)).group(0)) == 6


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET", "PO-PYRAMID-BUDGET")
@pytest.mark.parametrize("budgets", [Adaptive(Fraction(1, 5)), Competition(Fraction(1, 5)), Pyramid(4)])
def test_heads_that_cannot_hold_what_is_theirs_are_refused(budgets: Adaptive | Competition | Pyramid) -> None:
    """Two heads with 4 protected tokens each do not fit into 7."""
    with pytest.raises(SpecError) as caught:
        budgets(7, scores(2, 10, 4))
    assert caught.value.argument == "budget"


@pytest.mark.parametrize("name", [
    pytest.param("caote", marks=pytest.mark.spec("PO-CAOTE")),
    pytest.param("expected_attention", marks=pytest.mark.spec("PO-EXPECTED-ATTENTION")),
    pytest.param("defensivekv", marks=pytest.mark.spec("PO-DEFENSIVEKV")),
    pytest.param("lagkv", marks=pytest.mark.spec("PO-LAGKV")),
    pytest.param("diverse", marks=pytest.mark.spec("DV-POLICY")),
])
def test_values_that_were_not_captured_are_missed(name: str) -> None:
    """A policy that weighs by values must receive the values of every layer."""
    inputs = drawn(9, n=12, L=2, heads=(1, 1))
    arguments: dict[str, list[Any]] = {
        "expected_attention": [INV_FREQ], "diverse": [policies.knorm()],
        "defensivekv": [dict(enumerate(inputs.W_o)), 3],
    }
    policy = vars(policies)[name](*arguments.get(name, []))
    seen = observation(policy, inputs)
    blind = {**seen.layers, 1: replace(seen.layers[1], v=None)}
    with pytest.raises(SpecError, match="v = None"):
        policies.retain(policy, Budget(count=6), type(seen)(seen.seen, seen.groups, None, blind))


@pytest.mark.spec("PO-LAGKV")
def test_one_channel_has_no_spread() -> None:
    view = drawn(9, n=12, L=1, heads=(1, 1)).layers[0]
    with pytest.raises(SpecError, match="d = 1"):
        lagkv_score(replace(view, v=np.asarray(view.v)[:, :, :1]), 0, 3)


@pytest.mark.spec("PO-DEFENSIVEKV")
def test_a_token_without_output_has_no_share() -> None:
    inputs = drawn(9, n=12, L=1, heads=(2, 1))
    np.asarray(inputs.layers[0].v)[:, 4] = 0.0
    policy = policies.defensivekv({0: inputs.W_o[0]}, 3)
    with pytest.raises(SpecError, match="token 4"):
        policies.retain(policy, Budget(count=6), observation(policy, inputs))


def item(name: str) -> pytest.MarkDecorator:
    return pytest.mark.spec(name)


def defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults in a signature, except the default of the backend."""
    given = inspect.signature(make).parameters.values()
    return {one.name: one.default for one in given if one.default is not one.empty and one.default != "numpy"}


@pytest.mark.parametrize("brute", [pytest.param(one, id=one.name, marks=item(one.item)) for one in brutes()])
def test_the_constants_are_the_published_ones(brute: Brute) -> None:
    """Check that the signature contains the constants, so that a call without arguments is documented."""
    assert defaults(brute.make) == brute.published


@pytest.mark.parametrize(
    ("compose", "constants"),
    [
        pytest.param(Pyramid, {"beta": 20}, marks=item("PO-PYRAMID-BUDGET")),
        pytest.param(with_adaptive_budgets, {"safeguard": Fraction(1, 5)}, marks=item("PO-ADAPTIVE-BUDGET")),
        pytest.param(with_value_norms, {"N_sink": 4}, marks=item("PO-VATP")),
        pytest.param(
            with_representatives, {"block": 16, "share": Fraction(1, 4), "anchor": "alternating"},
            marks=item("PO-KVCRUSH"),
        ),
        pytest.param(with_critical_selection, {"share": Fraction(1, 2)}, marks=item("PO-CRITICALKV")),
        pytest.param(diverse, {"lam": 0.5, "mode": "flat"}, marks=item("DV-POLICY")),
        pytest.param(toward_mean_values, {"lam": 0.5, "mode": "flat"}, marks=item("DV-VARIANT-B")),
    ],
)
def test_a_composition_has_the_published_constants(compose: Callable[..., Any], constants: dict[str, Any]) -> None:
    assert defaults(compose) == constants


MAKERS: list[Any] = [
    pytest.param("h2o", lambda i, **on: policies.h2o(**on), marks=pytest.mark.spec("PO-H2O")),
    pytest.param("tova", lambda i, **on: policies.tova(**on), marks=pytest.mark.spec("PO-TOVA")),
    pytest.param("vatp", lambda i, **on: policies.vatp(1, **on), marks=pytest.mark.spec("PO-VATP")),
    pytest.param(
        "h2o-described", lambda i, **on: policies.h2o_described(3, **on), marks=pytest.mark.spec("PO-H2O-DESCRIBED")
    ),
    pytest.param(
        "chunkkv-described", lambda i, **on: policies.chunkkv_described(2, **on),
        marks=pytest.mark.spec("PO-CHUNKKV-DESCRIBED"),
    ),
    pytest.param(
        "expected-attention",
        lambda i, **on: policies.expected_attention(i.inv_freq, i.factor, 2, 5, **on),
        marks=pytest.mark.spec("PO-EXPECTED-ATTENTION"),
    ),
]


@pytest.mark.parametrize(("family", "make"), [
    *(("policies", row.values[1]) for row in MAKERS), ("nestedkv", lambda i, **on: policies.nestedkv(**on)),
    ("diversity", lambda i, **on: policies.diverse(policies.knorm(), **on)),
])
def test_a_backend_without_the_family_is_named(family: str, make: Callable[..., Policy]) -> None:
    with pytest.raises(BackendUnavailable, match=f"no stage family '{family}'; it has: none"):
        make(drawn(1), backend=Backend("bare"))


@pytest.mark.parametrize(("name", "make"), MAKERS)
def test_numba_keeps_what_the_reference_keeps(name: str, make: Callable[..., Policy]) -> None:
    """Check inputs whose scores differ clearly, in float32 too."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    for seed in range(30):
        inputs = drawn(seed)
        B = max(CASES[name].floor, (inputs.n + 1) // 2)
        assert decided(make(inputs, backend="numba"), inputs, B) == decided(make(inputs), inputs, B)


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("floats", [1, 200, 2**20])
def test_blocks_and_threads_say_nothing(monkeypatch: pytest.MonkeyPatch, floats: int) -> None:
    """Check blocks of one query and of all queries. One thread and three threads must give the same bits."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    from accelerated.numba_cpu import attention

    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(6, 150, 8)).astype(np.float32), rng.normal(size=(2, 170, 8)).astype(np.float32)
    want = received_attention(q, k, 0.35, None)
    monkeypatch.setattr(attention, "FLOATS", floats)
    actual = []
    for threads in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        actual.append(attention.received_attention(q, k, 0.35, None))
    assert np.array_equal(actual[0], actual[1])
    assert np.abs(actual[0] - want).max() < 1e-5 * want.max()
