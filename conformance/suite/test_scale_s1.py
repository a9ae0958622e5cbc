"""S1 at the sizes of real models: every shape of heads, far keys, fourth sources, ties over wide lists."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import pytest

from conformance import tolerances as compare
from conformance.checks import scale_s1 as checks
from conformance.oracles.scale import s1
from conformance.strategies.attention import AttentionInputs
from conformance.strategies.scale_attention import Shape, addressed
from spec.backend import CrystalStages
from spec.parameters import PAPER
from spec.records import CoAttention

pytestmark = pytest.mark.usefixtures("compiled")

WIDE = replace(PAPER, C=256, k_heads=5, M_max=4096.0, M_min=0.125)
SHAPES = [
    Shape("llama-3-8b", 32, 8, 128, 1500, replace(WIDE, C=512)),
    Shape("qwen2.5-7b", 28, 4, 128, 1100, WIDE),
    Shape("gemma-2-9b", 16, 8, 256, 1100, replace(WIDE, k_heads=16)),
    Shape("llama-3-70b", 64, 8, 128, 700, replace(WIDE, k_cross=39, tau_cross=0.0, k_heads=40)),
    Shape("smollm2-135m", 9, 3, 64, 1300, PAPER),
    Shape("smollm2-360m", 15, 5, 64, 900, replace(WIDE, C=300)),
    Shape("phi-3-medium", 40, 10, 128, 600, WIDE),
    Shape("sixteen-of-sixteen", 16, 16, 64, 800, replace(WIDE, k_intra=40, C=400)),
    Shape("qwen2.5-0.5b", 14, 2, 64, 900, WIDE),
    Shape("one-kv-head", 8, 1, 256, 1200, replace(WIDE, C=1500)),
    Shape("chunks-of-four", 8, 4, 64, 1200, replace(WIDE, C=4)),
]


@dataclass(frozen=True)
class Case:
    """What the stage was given, what it gave, and what it should."""

    inputs: AttentionInputs
    found: CoAttention
    want: s1.Scored
    strict: bool


def no_error(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.zeros(q.shape[1])


@lru_cache(maxsize=1)
def judged(stages: CrystalStages, shape: Shape, precision: str) -> Case:
    inputs = addressed(shape)
    found = stages.coattention(inputs.q, inputs.k, inputs.positions, shape.parameters, inputs.scaling, None)
    mean_error = 0.0 if shape.H & (shape.H - 1) == 0 else compare.head_mean_error(shape.H, precision)
    cosines = partial(exact_cosine_error, H=shape.H, precision=precision)
    want = s1.coattention(
        inputs.q, inputs.k, inputs.positions, shape.parameters, inputs.scaling, None, no_error, cosines, mean_error
    )
    return Case(inputs, found, want, mean_error == 0)


def exact_cosine_error(error: np.ndarray, Q: int, *, H: int, precision: str) -> np.ndarray:
    return np.broadcast_to(compare.cosine_error(0.0, 0.0, Q, H, precision), (Q, Q))


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest, stages: CrystalStages, precision: str) -> Case:
    return judged(stages, request.param, precision)


@pytest.mark.spec(id="CC-SALIENCE")
def test_salience(case: Case, precision: str) -> None:
    p = case.inputs.parameters
    assert not list(checks.salience(case.found.salience, case.want, p.C, p, precision, exact=True))


@pytest.mark.spec(id="CC-INTRA")
def test_intra(case: Case, precision: str) -> None:
    p = case.inputs.parameters
    assert not list(checks.neighbours(
        case.found.intra, case.found.intra_weight, case.want.intra, p.k_intra, p.tau_intra, precision, strict=True
    ))


@pytest.mark.spec(id="CC-CROSS")
def test_cross(case: Case, precision: str) -> None:
    p = case.inputs.parameters
    assert not list(checks.neighbours(
        case.found.cross, case.found.cross_weight, case.want.cross, p.k_cross, p.tau_cross, precision, strict=case.strict
    ))
