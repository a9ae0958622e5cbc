"""Errata of the injection and the diversity paper, computed again from the papers' own numbers."""

import math

import numpy as np
import pytest

from conformance.paths import ROOT

scipy_stats = pytest.importorskip("scipy.stats", reason="exact p values are scipy's")

pytestmark = pytest.mark.law("figures-are-counted-right")


def exact(lost: int, won: int) -> float:
    return float(scipy_stats.binomtest(lost, lost + won).pvalue)


def asymptotic(lost: int, won: int) -> float:
    return float(scipy_stats.chi2.sf((won - lost) ** 2 / (won + lost), 1))


def power(n: int, discordant: float, difference: float) -> float:
    """The exact test of n pairs at 0.05: the sum over all numbers of lost and won pairs."""
    lost, won = (discordant - difference) / 2, (discordant + difference) / 2
    found = 0.0
    for m in range(1, n + 1):
        b = np.arange(m + 1)
        p = np.minimum(1, 2 * scipy_stats.binom.cdf(np.minimum(b, m - b), m, 0.5))
        rejected = scipy_stats.binom.pmf(b, m, lost / (lost + won))[p <= 0.05].sum()
        found += float(scipy_stats.binom.pmf(m, n, discordant) * rejected)
    return found


def interval(lost: int, won: int, n: int) -> tuple[float, float]:
    """Normal, of a mean of paired differences."""
    mean = (won - lost) / n
    half = 1.96 * math.sqrt(((won + lost) / n - mean**2) / n)
    return round(mean - half, 3), round(mean + half, 3)


def paired(points: float, n: int) -> bool:
    """Whether so many points are a difference of right answers on n problems, to a digit."""
    return any(round(100 * k / n, 1) == points for k in range(-n, n + 1))


def apart(points: float, right: int, n: int, baseline: int = 201) -> list[int]:
    """Right answers of n whose share differs by so many points from `right` of the baseline's problems."""
    return [k for k in range(n + 1) if round(100 * (k / n - right / baseline), 1) == points]


PROBE = {0.5: (0.5, 4.0, 0.0, -1.5), 1.0: (-1.0, 1.0, 0.0, -2.0), 1.5: (2.5, 1.0, -1.9, 0.0)}
"""Table 3 of the diversity paper, points by lambda; its last cell alone has all problems at 1.5."""

RECOMPUTED = {
    "I1": ([3 / 15, round(2 / 11, 2)], [0.20, 0.18]),
    "I2": ([15 / 3], [5.0]),
    "I3": ([round(0.5625 - 0.5375, 4), round(0.5625 - 0.5500, 4)], [0.025, 0.0125]),
    "I4": ([(41 - 40) / 80, (39 - 40) / 80, round(41 / 80, 3), round(39 / 80, 3)], [0.0125, -0.0125, 0.512, 0.487]),
    "I5": ([*interval(35, 61, 467)], [0.015, 0.096]),
    "I6": ([round(exact(35, 61), 4)], [0.0103]),
    "I7": (
        [round(f(b, c), 4) for b, c in [(9, 23), (8, 22)] for f in (asymptotic, exact)],
        [0.0133, 0.0201, 0.0106, 0.0161],
    ),
    "I8": ([round(power(385, 96 / 467, 26 / 467), 2)], [0.64]),
    "I9": ([4096 * 28 * 4 * 128 * 2 * 2 / 2**20], [224.0]),
    "S1": (sorted(PROBE, key=lambda lam: -PROBE[lam][3]), [1.5, 0.5, 1.0]),
    "S2": (
        [paired(1.0, 164), paired(-1.9, 196), apart(1.0, 31, 164), apart(-1.9, 15, 196),
         round(25 * (21 / 200 - 16 / 201 + 27 / 164 - 31 / 201 + 11 / 196 - 15 / 201), 2), sum(PROBE[1.5]) / 4],
        [False, False, [27], [11], 0.43, pytest.approx(0.40)],
    ),
}


@pytest.mark.parametrize("erratum", RECOMPUTED)
def test_an_erratum_recomputes(erratum: str) -> None:
    found, wanted = RECOMPUTED[erratum]
    assert found == pytest.approx(wanted) if erratum != "S2" else found == wanted


def test_no_counts_give_both_p_values_of_phi_3() -> None:
    """14 more right answers of 200: no numbers of lost and won pairs give 0.013 and, exactly, 0.019."""
    both = [
        (b, b + 14) for b in range(93)
        if round(asymptotic(b, b + 14), 3) == 0.013 and round(exact(b, b + 14), 3) == 0.019
    ]
    assert both == []
    assert [b for b in range(93) if round(asymptotic(b, b + 14), 3) == 0.013] == [9]


def test_the_paper_s_rotation_of_scaled_keys_is_the_unit_rotation() -> None:
    """Appendix B, `(1 / mscale) R_scaled k`: the module's cosine and sine hold mscale, which cancels."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    torch = pytest.importorskip("torch", reason="the module is of transformers")
    scaled = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    rotary = LlamaRotaryEmbedding(LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=163840, rope_parameters=scaled,
    ))
    mscale, k = rotary.attention_scaling, torch.randn(1, 1, 5, 64, generator=torch.Generator().manual_seed(0))
    assert mscale == pytest.approx(1.3689, abs=1e-4)
    cos, sin = rotary(k, torch.full((1, 5), 7))
    _, moved = apply_rotary_pos_emb(k, k, cos, sin)
    angle = 7 * rotary.inv_freq.double().repeat(2)
    half = k.double().roll(32, -1) * torch.tensor([-1.0] * 32 + [1.0] * 32)
    unit = k.double() * angle.cos() + half * angle.sin()
    assert float((moved / mscale - unit).abs().max()) < 1e-5


NAMES = ("1d_div", "`1d`", "variant_b", "diversity-signature-mode", "λ", "per_ch", "pt_asym", "mscale")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_paper_is_found_in_the_specification(name: str) -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "spec").glob("*.md")}
    assert [page for page in ("diversity.md", "injection.md") if name in pages[page]], name


def test_every_erratum_that_is_computed_is_listed() -> None:
    text = (ROOT / "spec" / "errata.md").read_text(encoding="utf-8")
    for erratum in RECOMPUTED:
        assert f"| {erratum} |" in text
