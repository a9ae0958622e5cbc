"""Stage S3: impact M_i of each token, from salience and rarity (Section 3.4), and the impact of each trunk."""

import torch
from torch import Tensor

from spec.parameters import CrystalCacheParameters
from spec.parameters.crystalcache import RarityForm

__all__ = ["impact", "rarity", "token_counts", "trunk_impact", "unit_trunk_impact"]

K_MEMBERS = 3  # fixed by Eq. 23


def token_counts(ids: Tensor) -> Tensor:
    """Return how often the id of each token occurs, (n,). The ids are sorted once.

    Implements: CC-COUNT
    """
    ascending = ids.sort().values
    return torch.searchsorted(ascending, ids, right=True) - torch.searchsorted(ascending, ids)


def rarity(counts: Tensor, form: RarityForm) -> Tensor:
    """Return the rarity U of each count of occurrences. `form` selects the formula.

    Implements: CC-RARITY, CC-RARITY-FORMS
    """
    c = counts.double()
    return torch.exp(-c) if form == "exponential" else 1.0 / (1.0 + (torch.log1p(c) if form == "logarithm" else c))


def impact(salience: Tensor, counts: Tensor, parameters: CrystalCacheParameters) -> Tensor:
    """Return M_i (n,) from salience and the counts of the token ids. `parameters.impact` selects the formula.

    Implements: CC-IMPACT, CC-UNIT-IMPACT
    """
    p = parameters
    if p.impact == "uniform":
        return torch.ones_like(salience)
    if p.impact == "salience":
        return salience.clone()
    U = rarity(counts, p.rarity)
    if p.impact == "unit":
        peak = salience.max()
        return 0.5 * torch.where(peak > 0, salience / peak, 0.0) + 0.5 * U
    return (p.M_max * (0.5 * (salience / p.M_max) + 0.5 * U)).clamp(p.M_min, p.M_max)


def trunk_impact(descending: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean of each trunk's three largest M_i. In `descending` the M_i of each trunk are sorted.

    Implements: CC-TRUNK-IMPACT
    """
    sizes, rank = offsets.diff(), torch.arange(K_MEMBERS, device=offsets.device)
    at = (offsets[:-1, None] + rank).clamp(max=len(descending) - 1)
    first, second, third = descending[at].masked_fill(rank >= sizes[:, None], 0.0).unbind(1)
    return (first + second + third) / sizes.clamp(1, K_MEMBERS)


def unit_trunk_impact(M_bar: Tensor, sizes: Tensor, epsilon: float) -> Tensor:
    """Return the impact Mbar of each trunk, min-max normalised over all trunks that have tokens.

    Implements: CC-UNIT-TRUNK-IMPACT
    """
    low = M_bar.masked_fill(sizes == 0, torch.inf).min()
    high = M_bar.masked_fill(sizes == 0, -torch.inf).max()
    return (M_bar - low) / (high - low + epsilon)
