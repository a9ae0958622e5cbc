"""How sure a share of successes is."""

from statistics import NormalDist

__all__ = ["wilson"]


def wilson(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a share: it stays inside [0, 1] and is wide where n is small."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return centre - half, centre + half
