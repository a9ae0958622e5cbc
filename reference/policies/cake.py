"""CAKE: a layer's budget depends on the entropy and the variance of the last queries' attention in this layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from reference.policies.attention import average_pool, group_mean, observed_attention
from reference.policies.budgets import largest_remainder, spread
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import check_odd, check_positive, host_tables, stacked, with_window
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, Int64, IntVector, Matrix
from spec.composition import HEAD_SETS, Provided, Required
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["Cake", "Preferred", "cake", "cake_score", "layer_preference", "preferred_targets"]


def layer_preference(A: Float64[Cube, "H w past"], tau1: float, tau2: float) -> float:
    """Return a layer's preference H^(1 / tau1) V^(1 / tau2).

    A is the attention of the window's queries on earlier keys.

    H is the entropy of an attention row, summed over the queries and the query heads. V is the variance of a key's
    attention weight over the window's queries, summed over the keys and the query heads. In the entropy, 0 log 0 counts
    as 0. If the window has a single query, the variance is 0.

    Implements: PO-CAKE

    Source: CAKE, Section 4.1.
    """
    entropy = -(A * np.log(A, out=np.zeros_like(A), where=A > 0)).sum()
    variance = A.var(axis=1, ddof=min(1, A.shape[1] - 1)).sum()
    return float(max(0.0, entropy) ** (1 / tau1) * variance ** (1 / tau2))


def cake_score(A: Float64[Cube, "H w past"], gamma: float, kernel: int, H_kv: int) -> Float64[Matrix, "H_kv past"]:
    """Return the mean + gamma * variance of each key's attention weight over the window's queries.

    The sum mean + gamma * variance is average-pooled along the keys of each query head, then averaged over the query
    heads of each group.

    Implements: PO-CAKE

    Source: CAKE, Section 4.3. The pooling is from CAKE's official code.
    """
    indicator = A.mean(axis=1) + gamma * A.var(axis=1, ddof=min(1, A.shape[1] - 1))
    return group_mean(average_pool(indicator, kernel), H_kv)


def cake_layer(
    view: LayerView, W: int, kernel: int, gamma: float, tau1: float, tau2: float,
) -> tuple[Float64[Matrix, "H_kv n"], Float64[Matrix, "one one"]]:
    """Return the scores and the preference of a layer, computed from the last W queries' attention on earlier keys.

    Implements: PO-CAKE
    """
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]]
    scores = with_window(cake_score(past, gamma, kernel, len(view.k)), A.shape[2])
    return scores, np.array([[layer_preference(past, tau1, tau2)]])


@dataclass(frozen=True)
class Cake:
    """CAKE's scorer. All heads of a layer must store the same tokens, because a layer has one preference."""

    W: int
    kernel: int
    gamma: float
    tau1: float
    tau2: float
    accepts_tensor: Callable[[DeviceArray], bool] | None = None
    layer: Callable[..., tuple[DeviceArray, DeviceArray]] = cake_layer

    @property
    def needs(self) -> Needs:
        return Needs("all", self.W, accepts_tensor=self.accepts_tensor)

    @property
    def provided(self) -> Provided:
        return Provided(
            unscored=(0, self.W), preferences=True, preference_constants=frozenset({"tau1", "tau2"}),
            no_steps="decides once, after the prompt",
        )

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        constants = self.W, self.kernel, self.gamma, self.tau1, self.tau2
        by_layer = [self.layer(view, *constants) for view in observation.layers.values()]
        if not by_layer:
            return stacked(observation, [])
        rows, preferences = host_tables(*zip(*by_layer, strict=True))
        return replace(stacked(observation, np.split(rows, len(by_layer))), preferences=preferences[:, 0])


def preferred_targets(preferences: list[Fraction], total: Fraction, most: int) -> list[Fraction]:
    """Divide a total of tokens among layers in proportion to the layers' preferences, at most `most` tokens per layer.

    If a layer's share exceeds `most`, the excess is divided among the remaining layers, in proportion to the
    preferences of the remaining layers. If all preferences are 0, all shares are equal.

    Implements: PO-PREFERENCE-BUDGET
    """
    targets, open_ = [Fraction(most)] * len(preferences), list(range(len(preferences)))
    while open_:
        whole = sum((preferences[layer] for layer in open_), Fraction(0))
        parts = {layer: preferences[layer] / whole if whole else Fraction(1, len(open_)) for layer in open_}
        full = [layer for layer in open_ if parts[layer] * total > most]
        if not full:
            for layer in open_:
                targets[layer] = parts[layer] * total
            break
        total -= most * len(full)
        open_ = [layer for layer in open_ if layer not in full]
    return targets


@dataclass(frozen=True)
class Preferred:
    """CAKE's budgets: the window plus a share in proportion to the layer's preference. The budgets sum to the total."""

    W: int

    @property
    def required(self) -> Required:
        return Required(preferences=True, sets=HEAD_SETS, window=self.W, shares="preferences")

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the budget of each layer and head. The total is first divided among head indices, then among layers.

        Implements: PO-PREFERENCE-BUDGET

        Source: CAKE, Section 4.2.
        """
        if scores.preferences is None:
            raise SpecError("scores.preferences", None, "are needed: use the scorer of cake, or different budgets")
        L, n = len(scores.preferences), int(scores.offsets[-1])
        W, shares = min(self.W, n), np.empty((L, scores.heads), dtype=np.int64)
        preferences = [Fraction(float(preference)) for preference in scores.preferences]
        for head, share in enumerate(spread(total, scores.heads)):
            beyond = min(share - L * W, L * (n - W))
            if beyond < 0:
                raise SpecError(
                    "budget", total, f"must be at least the {W} tokens of the window in each layer and head"
                )
            shares[:, head] = W + largest_remainder(preferred_targets(preferences, Fraction(beyond), n - W))
        return shares.ravel()


@named(
    "cake", "Qin et al., CAKE (arXiv 2503.12491)",
    "tokens whose attention from the last queries has a high mean and variance; each layer has a separate budget",
)
def cake(W: int = 32, kernel: int = 5, gamma: float = 200.0, tau1: float = 1.0, tau2: float = 1.0) -> Policy:
    """Return CAKE: each KV head fills its layer's share with the last W tokens and the best-scored earlier tokens.

    The policy evicts once, at the end of the prompt, so the cache grows while tokens are decoded.

    The official code updates the layers' shares each time that a layer has processed the prompt. The final shares are
    the same as in kvspec, except that the official code rounds the shares down. If a share exceeds a layer's maximum,
    the official code spreads the excess evenly over other layers. If the excess also exceeds a second layer's maximum,
    the official code discards the rest. The official code does not evict from prompts of at most B + W tokens. The
    official code also evicts while decoding. For each model and budget the official code has tuned values of tau1 and
    tau2 (0.4 to 2.3). In kvspec the default of tau1 and tau2 is 1.

    Raises:
        SpecError: if the window or a temperature is not positive, if the kernel is even, or if gamma is negative.
    """
    for name, value in (("tau1", tau1), ("tau2", tau2)):
        if not 0 < value < math.inf:
            raise SpecError(name, value, "must be positive and finite")
    if not 0 <= gamma < math.inf:
        raise SpecError("gamma", gamma, "must be finite, and not negative")
    scorer = Cake(check_positive("W", W), check_odd(kernel), gamma, tau1, tau2)
    return Policy(
        "cake", scorer, Preferred(W), top_units, SinkAndRecent(0, W), granularity=Granularity.HEAD,
    )
