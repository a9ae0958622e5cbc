"""Tests of S1 at the sizes of real models: shapes of heads, far keys, fourth sources, ties over long lists."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from conformance.checks import scale_checks as checks
from conformance.oracles.scale import s1
from conformance.strategies.prompts import AttentionInputs
from conformance.strategies.scale_attention import Shape, addressed, laddered
from spec.backend import CrystalStages
from spec.parameters import ESSAY, PAPER
from spec.records import CoAttention

pytestmark = pytest.mark.usefixtures("compiled")

WIDE = replace(PAPER, C=256, k_heads=5, M_max=4096.0, M_min=0.125)
# Some shares equal these thresholds in float32, and exceed them in float64. A share equal to a threshold is not chosen.
AT_TAU = replace(WIDE, C=300, tau_cross=0.0625 * (1 - 2.0**-30), tau_intra=0.999999975)

ADDRESSED = [
    Shape("llama-3-8b", 32, 8, 128, 1500, replace(WIDE, C=512)),
    Shape("qwen2.5-7b", 28, 4, 128, 1100, WIDE),
    Shape("gemma-2-9b", 16, 8, 256, 1100, replace(WIDE, k_heads=16)),
    Shape("llama-3-70b", 64, 8, 128, 700, replace(WIDE, k_cross=39, tau_cross=0.0, k_heads=40)),
    Shape("smollm2-135m", 9, 3, 64, 1300, PAPER),
    Shape("smollm2-360m", 15, 5, 64, 900, replace(WIDE, C=300)),
    Shape("phi-3-medium", 40, 10, 128, 600, WIDE),
    Shape("sixteen-of-sixteen", 16, 16, 64, 800, replace(WIDE, k_intra=40, C=400)),
    Shape("qwen2.5-0.5b", 14, 2, 64, 900, WIDE),
    Shape("one-kv-head", 8, 1, 256, 1400, replace(WIDE, C=1500)),
    Shape("falcon-7b", 71, 1, 64, 300, WIDE),
    Shape("falcon-40b", 128, 8, 64, 300, replace(WIDE, k_heads=100)),
    Shape("llama-2-7b", 32, 32, 128, 300, WIDE),
    Shape("wide-heads", 4, 2, 512, 300, WIDE),
    Shape("chunk-of-3000", 4, 2, 64, 2800, replace(WIDE, C=3000)),
    Shape("chunks-of-four", 8, 4, 64, 1200, replace(WIDE, C=4)),
    Shape("single-chunks", 8, 2, 64, 300, replace(WIDE, C=1)),
    Shape("at-tau", 32, 4, 64, 600, AT_TAU),
    Shape("turn-on-70000-keys", 4, 2, 64, 130, replace(WIDE, C=64), before=70_000),
    Shape("turn-beyond-2^24", 8, 2, 64, 300, replace(WIDE, C=128), before=1100, start=2**24 - 900),
    Shape("turn-beyond-2^31", 12, 3, 64, 300, replace(WIDE, C=128), before=300, start=2**31 - 500),
    Shape("turn-beyond-2^32", 8, 8, 64, 300, replace(WIDE, C=64), before=150, start=2**32 + 7),
    Shape("turn-beyond-2^53", 8, 4, 96, 200, replace(WIDE, C=64), before=150, start=2**53 - 100),
]
LADDERED = [
    Shape("llama-3-8b", 32, 8, 128, 1300, replace(PAPER, C=512)),
    Shape("qwen2.5-7b", 28, 4, 128, 1000, replace(PAPER, C=512, k_heads=6, M_max=100.0)),
    Shape("smollm2-135m", 9, 3, 64, 1500, PAPER),
    Shape("mistral-24-of-6", 24, 6, 96, 900, replace(PAPER, C=400)),
    Shape("mean-of-20-heads", 20, 5, 80, 700, replace(ESSAY, C=256, k_heads=7, k_cross=4)),
    Shape("gemma-2-capped", 16, 8, 128, 900, replace(PAPER, C=450), softcap=30.0),
    Shape("gpt-oss-20b", 64, 8, 64, 300, replace(PAPER, C=128), sinks=True),
]


@dataclass(frozen=True)
class Case:
    """Inputs, result and expected result of the stage."""

    inputs: AttentionInputs
    actual: CoAttention
    want: s1.Scored
    strict: bool
    """True if salience and neighbours in the chunk have exactly one correct result, ties included."""
    whole_shares: bool
    """True if sources have exactly one correct result, because the mean over heads is exact."""

    def complaints(self, name: str) -> list[str]:
        """Return the errors of the neighbours in the chunk (`intra`) or of the sources (`cross`)."""
        p, strict = self.inputs.parameters, self.strict if name == "intra" else self.whole_shares
        return list(checks.neighbours(
            getattr(self.actual, name), getattr(self.actual, f"{name}_weight"), getattr(self.want, name),
            getattr(p, f"k_{name}"), getattr(p, f"tau_{name}"), strict,
        ))


def outcome(stages: CrystalStages, kind: str, shape: Shape, precision: str) -> Case:
    if kind == "addressed":
        inputs = addressed(shape)
        want = checks.exact(inputs, precision)
        return Case(inputs, inputs.run(stages), want, True, checks.is_power_of_two(shape.H))
    inputs = laddered(shape)
    return Case(inputs, inputs.run(stages), checks.boxed(inputs, precision), False, False)


def cases(kind: str, shapes: list[Shape]) -> Iterator[Any]:
    """Yield test parameters. The widest heads have a mark for backends that do not support them."""
    for shape in shapes:
        marks = [pytest.mark.beyond("triton")] if shape.d > 256 else []
        yield pytest.param((kind, shape), marks=marks, id=f"{kind}-{shape}")


@pytest.fixture(scope="module", params=[*cases("addressed", ADDRESSED), *cases("laddered", LADDERED)])
def case(request: pytest.FixtureRequest, stages: CrystalStages, precision: str) -> Case:
    kind, shape = request.param
    return outcome(stages, kind, shape, precision)


@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION", "CC-MEAN-SALIENCE")
@pytest.mark.parametrize("shape", [
    Shape("mean-of-24", 24, 8, 64, 300, replace(ESSAY, C=128, k_heads=7)),
    Shape("three", 9, 3, 64, 400, replace(PAPER, C=150)), Shape("five", 20, 5, 64, 400, replace(PAPER, C=150)),
    Shape("sixteen", 32, 16, 96, 300, replace(PAPER, C=128)),
], ids=str)
def test_given_denominators_of_every_head(stages: CrystalStages, precision: str, shape: Shape) -> None:
    """Check that a given lse of 9 to 32 heads changes the result only within the bound.

    The lse differs by head, so the lse of a different head would change the result by more.
    """
    inputs, p = laddered(shape), shape.parameters
    lse = s1.log_sum_exp(inputs.q, inputs.k, inputs.positions, inputs.scaling, inputs.softcap)
    actual = inputs.run(stages, lse.astype(precision))
    case = Case(inputs, actual, checks.boxed(inputs, precision), strict=False, whole_shares=False)
    assert not list(checks.salience(actual.salience, case.want, p, precision, strict=False))
    assert not case.complaints("intra")
    assert not case.complaints("cross")


@pytest.mark.spec("CC-COATTENTION")
def test_the_record(case: Case) -> None:
    """Check the start of the segment, and the shape and dtype of each array."""
    n, p = case.inputs.q.shape[1], case.inputs.parameters
    actual = case.actual
    assert actual.start == case.want.start
    assert (actual.intra.shape, actual.cross.shape) == ((n, p.k_intra), (n, p.k_cross))
    kinds = [x.dtype for x in (actual.salience, actual.intra, actual.intra_weight, actual.cross, actual.cross_weight)]
    assert kinds == [np.float64, np.int64, np.float64, np.int64, np.float64]


@pytest.mark.spec("CC-COATTENTION", "CC-SALIENCE", "CC-ATTENTION")
def test_salience_of_every_token(case: Case, precision: str) -> None:
    p = case.inputs.parameters
    assert not list(checks.salience(case.actual.salience, case.want, p, precision, case.strict))


@pytest.mark.spec("CC-COATTENTION", "CC-INTRA", "CC-ROW-NORM")
def test_neighbours_of_every_token(case: Case) -> None:
    assert not case.complaints("intra")


@pytest.mark.spec("CC-COATTENTION", "CC-CROSS")
def test_sources_of_every_token(case: Case) -> None:
    assert not case.complaints("cross")


@pytest.mark.spec("CC-INTRA", "CC-CROSS")
def test_the_inputs_leave_little_to_rounding(case: Case) -> None:
    """Check the inputs: rounding cannot change at least 95 % of the places in the lists.

    At least 50 lists have a candidate above the threshold directly after their last place.
    """
    p = case.inputs.parameters
    for want, k, tau, strict in (
        (case.want.intra, p.k_intra, p.tau_intra, case.strict),
        (case.want.cross, p.k_cross, p.tau_cross, case.strict),
    ):
        sure, places = checks.decided(want, k, tau)
        assert strict or sure >= checks.DECIDED * places > 0
        if not case.strict:
            assert (want.weight[:, k] > tau).sum() >= 50, "too few candidates above the threshold after the list"


@pytest.mark.nightly
@pytest.mark.spec("CC-COATTENTION", "CC-SALIENCE", "CC-INTRA", "CC-CROSS")
@pytest.mark.parametrize("kind", ["addressed", "laddered"])
def test_32_768_tokens_of_8_heads(stages: CrystalStages, kind: str, precision: str) -> None:
    """Check 32 chunks of the size in PAPER. The reference needs some minutes and 8 GB."""
    case = outcome(stages, kind, Shape("32k", 8, 2, 64, 32_768), precision)
    assert not list(checks.salience(case.actual.salience, case.want, PAPER, precision, case.strict))
    assert not case.complaints("intra")
    assert not case.complaints("cross")
