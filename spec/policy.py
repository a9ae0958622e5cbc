"""A policy in five parts: scorer, budgets, selector, protection, cadence.

Every method of the field is one record of these parts at one granularity, so that parts compose: any scorer under
any budgets, any selector over any scores. `reference.policies` holds the definitions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from spec.arrays import BoolVector, Float64, Int64, IntVector, Matrix, Vector
from spec.retention import Granularity

__all__ = [
    "Budgets", "Cadence", "DeviceArray", "LayerView", "Needs", "Observation", "Policy", "Protection", "Scorer",
    "Scores", "Selection", "Selector",
]

# A NumPy array, or a tensor already on the backend's device.
DeviceArray: TypeAlias = Any


@dataclass(frozen=True)
class Needs:
    """What a scorer must be shown of a segment; nothing else is captured for it."""

    layers: Literal["none", "observed", "all"] = "none"
    """Whose q and k: nobody's, the first full-attention layer's, or every full-attention layer's."""
    query_rows: int | None = 0
    """How many of the segment's last query rows; None means all of them."""
    values: bool = False
    token_ids: bool = False
    takes: Callable[[DeviceArray], bool] | None = None
    """Whether it reads a device's tensor as it is; None means that it reads NumPy arrays only."""


@dataclass(frozen=True)
class LayerView:
    """One layer's attention inputs after RoPE: q (H, n_q, d), k (H_kv, n, d) and, if needed, v (H_kv, n, d).

    lse (H, n_q), where the forward's attention has it: see `spec.backend.CrystalStages.coattention`.
    """

    q: DeviceArray
    k: DeviceArray
    v: DeviceArray | None
    scaling: float
    softcap: float | None
    lse: DeviceArray | None = None


@dataclass(frozen=True)
class Observation:
    """One sequence at the end of a segment, as far as the scorer needs it."""

    seen: int
    """Tokens seen: absolute positions run over range(seen)."""
    groups: int
    """Kept sets to decide at the policy's granularity."""
    token_ids: Int64[IntVector, " n"] | None
    layers: Mapping[int, LayerView]


@dataclass(frozen=True)
class Scores:
    """Retention priorities over units: unit u holds positions offsets[u] to offsets[u + 1]. Higher is kept first."""

    values: Float64[Matrix, "g m"]
    offsets: Int64[IntVector, " m_and_one"]
    members: Float64[Vector, " n"] | None = None
    """Priorities of tokens inside one unit, for a selector that keeps units in part."""
    carry: object = None
    """The scorer's own records, handed on untouched."""


@dataclass(frozen=True)
class Selection:
    """What a selector chose: positions ascending inside each group, and the groups' offsets."""

    positions: Int64[IntVector, " kept"]
    offsets: Int64[IntVector, " groups_and_one"]
    records: object = None
    """What the selector has to say beside the set, for reports."""


@runtime_checkable
class Scorer(Protocol):
    """Gives each unit a priority; `protected` marks tokens, for scores that are relative to the rest."""

    @property
    def needs(self) -> Needs: ...

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores: ...


@runtime_checkable
class Budgets(Protocol):
    """Shares a total over the groups; the shares sum to it exactly wherever every group can hold its share."""

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]: ...


@runtime_checkable
class Selector(Protocol):
    """Picks positions, at most budgets[g] in group g unless protection alone exceeds it."""

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection: ...


@runtime_checkable
class Protection(Protocol):
    """Marks the tokens, out of `seen`, that are never evicted."""

    def __call__(self, seen: int, /) -> BoolVector: ...


class Cadence(Enum):
    """When a policy decides."""

    SEGMENT_END = "at the end of each prompt"


@dataclass(frozen=True)
class Policy:
    """One eviction method."""

    name: str
    scorer: Scorer
    budgets: Budgets
    selector: Selector
    protection: Protection
    cadence: Cadence = Cadence.SEGMENT_END
    granularity: Granularity = Granularity.MODEL
    floor: int = 0
    """Tokens below which a budget is raised (Eq. 30: sink + recent)."""
