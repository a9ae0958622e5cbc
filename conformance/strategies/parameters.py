"""Parameters: the two presets, and values small enough that every rule binds on a few dozen tokens."""

from dataclasses import replace

from hypothesis import strategies as st

from conformance.strategies.sizes import CHUNK, CROSS, HEADS_SUMMED, INTRA, TRUNK
from spec.parameters import CrystalCacheParameters

__all__ = ["ablations", "forms", "small_parameters"]


@st.composite
def small_parameters(draw: st.DrawFn) -> CrystalCacheParameters:
    """Every constant varies, its boundary values included."""
    def pick(name: str, values: list[float]) -> float:
        return draw(st.sampled_from(values), label=name)

    def count(name: str, low: int, high: int) -> int:
        return draw(st.integers(low, high), label=name)

    return CrystalCacheParameters(
        C=count("C", 1, CHUNK), k_heads=count("k_heads", 0, HEADS_SUMMED), k_intra=count("k_intra", 0, INTRA),
        tau_intra=pick("tau_intra", [0.3, 0.0, 0.5, 0.7]), k_cross=count("k_cross", 0, CROSS),
        tau_cross=pick("tau_cross", [0.02, 0.0, 0.25]), M_min=pick("M_min", [0.1, 0.0, 1.0]),
        M_max=pick("M_max", [20.0, 2.0, 1.0]), tau_merge=pick("tau_merge", [0.3, 0.0, 0.5, 1.0]),
        T_max=count("T_max", 1, TRUNK), tau_edge=pick("tau_edge", [0.05, 0.0, 0.25]), s=pick("s", [5.0, 2.0, 40.0]),
        alpha=pick("alpha", [1.0, 0.0, 0.5, 2.0]), N_sink=count("N_sink", 0, 4), W_recent=count("W_recent", 0, 5),
        N_min=count("N_min", 0, 6),
    )


@st.composite
def ablations(draw: st.DrawFn) -> CrystalCacheParameters:
    """Table 10's forms on small parameters."""
    p = draw(small_parameters(), label="parameters")
    return replace(
        p,
        impact=draw(st.sampled_from(["mixture", "salience", "uniform"]), label="impact"),
        graph=draw(st.sampled_from(["degree", "zero"]), label="graph"),
    )


@st.composite
def forms(draw: st.DrawFn) -> CrystalCacheParameters:
    """The essay's forms and the extensions in any combination, on small parameters."""
    p = draw(small_parameters(), label="parameters")
    return replace(
        p,
        heads=draw(st.sampled_from(["mean", "sum"]), label="heads"),
        impact=draw(st.sampled_from(["unit", "mixture"]), label="impact"),
        rarity=draw(st.sampled_from(["logarithm", "reciprocal", "exponential"]), label="rarity"),
        trunk_impact=draw(st.sampled_from(["unit", "mean"]), label="trunk impact"),
        merge=draw(st.sampled_from(["median", "fixed"]), label="merge"),
        allocation=draw(st.sampled_from(["tiers", "cut"]), label="allocation"),
        coverage=draw(st.sampled_from([0.0, 0.1, 0.25, 0.29, 1.0]), label="coverage"),
    )
