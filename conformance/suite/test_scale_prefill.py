"""Tests of whole prompts at full size: PAPER over several chunks, H n up to 131 072.

Each record is tested against the record before it. With `--kvspec-profile nightly`, there are also prompts of 8 192
and 32 768 tokens with 8 heads, H n up to 262 144.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks import scale_checks
from conformance.checks import scale_checks as scale_checks_module
from conformance.oracles import s6
from conformance.oracles.scale import s1
from conformance.oracles.scale import stages as oracle
from conformance.strategies.prompts import Prompt
from conformance.strategies.scale_attention import ENDS, Shape, addressed, laddered, text_of
from reference.crystalcache import prefill
from spec.backend import Backend
from spec.parameters import PAPER
from spec.records import CrystalRetention, Dissolution

pytestmark = pytest.mark.usefixtures("compiled")

# The cheapest is first. The reference would need 18 s and 4.4 GB for the last.
FULL = [
    ("laddered", Shape("smollm2-360m-3k", 15, 5, 64, 3000, replace(PAPER, M_max=400.0), seed=3), "0.14"),
    ("addressed", Shape("gemma-2-9b-3k", 16, 8, 256, 3100, seed=2), "0.3"),
    ("laddered", Shape("llama-3-8b-4k", 32, 8, 128, 4096), "0.5"),
]
OF_OTHERS = pytest.param(FULL[-1], marks=pytest.mark.beyond("numpy", "reference.backend:BACKEND"))
LONG = [
    pytest.param(("addressed", Shape(f"eight-heads-{n // 1024}k", 8, 2, 64, n), "0.3"), marks=pytest.mark.nightly)
    for n in (8192, 32_768)
]

Judged = tuple[Prompt, CrystalRetention, s1.Scored, bool]


def judge(backend: Backend, kind: str, shape: Shape, budget: str, precision: str) -> Judged:
    inputs = {"addressed": addressed, "laddered": laddered}[kind](shape)
    prompt = text_of(inputs, budget, shape.seed)
    result = prefill(**prompt.arguments, backend=backend)
    want = (scale_checks.exact if kind == "addressed" else scale_checks.boxed)(inputs, precision)
    return prompt, result, want, kind == "addressed"


@pytest.fixture(scope="module", params=[*FULL[:-1], OF_OTHERS, *LONG], ids=lambda case: f"{case[0]}-{case[1]}")
def outcome(request: pytest.FixtureRequest, backend: Backend, precision: str) -> Judged:
    kind, shape, budget = request.param
    return judge(backend, kind, shape, budget, precision)


@pytest.mark.spec("CC-SALIENCE", "CC-ATTENTION")
def test_salience(outcome: Judged, precision: str) -> None:
    prompt, actual, want, strict = outcome
    p = prompt.inputs.parameters
    assert not list(scale_checks.salience(actual.coattention.salience, want, p, precision, strict))


@pytest.mark.spec("CC-INTRA", "CC-ROW-NORM")
def test_neighbours(outcome: Judged) -> None:
    prompt, actual, want, strict = outcome
    p, S1 = prompt.inputs.parameters, actual.coattention
    assert not list(scale_checks.neighbours(S1.intra, S1.intra_weight, want.intra, p.k_intra, p.tau_intra, strict))


@pytest.mark.spec("CC-CROSS")
def test_sources(outcome: Judged) -> None:
    prompt, actual, want, strict = outcome
    p, S1 = prompt.inputs.parameters, actual.coattention
    strict = strict and scale_checks.is_power_of_two(len(prompt.inputs.q))
    assert not list(scale_checks.neighbours(S1.cross, S1.cross_weight, want.cross, p.k_cross, p.tau_cross, strict))


@pytest.mark.spec("CC-EDGES")
def test_edges(outcome: Judged) -> None:
    """Check the edges of the record: order, orientation and absolute positions."""
    actual = outcome[1].coattention
    for got, want in zip(actual.edges(), oracle.edge_columns(actual), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.spec("CC-IMPACT", "CC-COUNT")
def test_impact(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    S, c, p = actual.coattention.salience, oracle.counts(prompt.token_ids), prompt.inputs.parameters
    assert tolerances.close("CC-IMPACT", actual.impact, oracle.token_impact(S, c, p))


@pytest.mark.spec("CC-TRUNKS")
def test_trunks(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    ends = np.isin(prompt.token_ids, sorted(ENDS))
    want = oracle.trunks(ends, oracle.edge_columns(actual.coattention), 0, prompt.inputs.parameters)
    assert np.array_equal(actual.trunks.offsets, want)


@pytest.mark.spec("CC-TRUNK-IMPACT")
def test_trunk_impact(outcome: Judged) -> None:
    actual = outcome[1]
    assert actual.trunks.impact.tolist() == oracle.trunk_impact(actual.impact, actual.trunks.offsets).tolist()


@pytest.mark.spec("CC-TRUNK-EDGES", "CC-TRUNK-WEIGHT")
def test_pairs(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    parameters = prompt.inputs.parameters
    assert not list(scale_checks_module.pairs(actual.graph, actual.coattention, actual.trunks, parameters))


@pytest.mark.spec("CC-TRUNK-WEIGHT")
def test_weights(outcome: Judged) -> None:
    actual = outcome[1]
    assert not list(scale_checks_module.weights(actual.graph, actual.coattention, actual.trunks))


@pytest.mark.spec("CC-DEGREE")
def test_degrees(outcome: Judged) -> None:
    assert not list(scale_checks_module.degrees(outcome[1].graph))


@pytest.mark.spec("CC-CRYSTALLIZATION")
def test_D(outcome: Judged) -> None:
    assert not list(scale_checks_module.D(outcome[1].graph, outcome[0].inputs.parameters))


@pytest.mark.spec("CC-SCORE", "CC-NORMALISED-IMPACT")
def test_scores(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    p, shut = prompt.inputs.parameters, actual.protected
    want = oracle.score(actual.graph.D, actual.trunks.impact, shut, p)
    radius = p.alpha * tolerances.normalised_radius(actual.trunks.impact[~shut].tolist(), p.epsilon)
    assert np.isnan(actual.scores[shut]).all()
    assert (np.abs(actual.scores[~shut] - want[~shut]) <= radius).all()


@pytest.mark.spec("CC-PROTECTED")
def test_protected(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    want = oracle.protected(actual.trunks.offsets, len(prompt.token_ids), prompt.inputs.parameters)
    assert actual.protected.tolist() == want.tolist()


@pytest.mark.spec("CC-BUDGET")
def test_budget(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    n, p = len(prompt.token_ids), prompt.inputs.parameters
    assert actual.budget == s6.effective_budget(Fraction(prompt.budget), n, p.N_sink, p.W_recent)


@pytest.mark.spec("CC-DISSOLVE", "CC-PREFILL")
def test_kept(outcome: Judged) -> None:
    prompt, actual, _, _ = outcome
    want = oracle.dissolve(
        actual.scores, actual.trunks.offsets, actual.impact, actual.graph.D, actual.protected, actual.budget,
        prompt.inputs.parameters.N_min,
    )
    got = Dissolution(actual.kept, actual.ratio, actual.D)
    assert np.array_equal(got.kept, want.kept)
    assert np.array_equal(got.ratio, want.ratio)
    assert tolerances.close("CC-DISSOLVE-D", got.D, want.D)


@pytest.mark.spec("CC-PREFILL")
def test_the_prompts_are_rich(outcome: Judged) -> None:
    """Check that the inputs have merged sentences, hubs, far and fourth sources, and kept and evicted trunks."""
    prompt, actual, want, strict = outcome
    p = prompt.inputs.parameters
    for ranked, k, tau in ((want.intra, p.k_intra, p.tau_intra), (want.cross, p.k_cross, p.tau_cross)):
        sure, places = scale_checks.decided(ranked, k, tau)
        assert strict or sure >= scale_checks.DECIDED * places > 0, "rounding decides too many places"
    ends = oracle.sentences(np.isin(prompt.token_ids, sorted(ENDS)))
    inside = np.setdiff1d(ends, actual.trunks.offsets)
    assert len(inside) >= 15, "too few sentences merge"
    assert np.diff(actual.graph.indptr).max() > 16, "no trunk has many neighbours"
    cross = actual.coattention.cross
    assert (cross[:, 3] >= 0).sum() > 1_000, "too few fourth sources"
    far = np.arange(len(cross))[:, None] - cross
    assert ((cross >= 0) & (far > 1_024)).sum() > 1_000, "too few far sources"
    assert min((actual.ratio == 0).sum(), (actual.ratio == 1).sum()) > 20
