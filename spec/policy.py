"""Eviction policies. A policy has five parts: scorer, budgets, selector, protection and cadence.

Every eviction policy is a `Policy` object that contains the five parts and a granularity. Parts of different policies
can be combined: any scorer with any budgets, and any selector with any scores. `reference.policies` defines the
published policies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from spec.arrays import BoolVector, Cube, Float64, Int64, IntMatrix, IntVector, Matrix, Vector
from spec.composition import check_parts
from spec.errors import SpecError
from spec.printing import short
from spec.retention import Granularity
from spec.validate import check_choices

__all__ = [
    "NOTHING_PROMISED", "SEGMENT_END", "Budgets", "Cadence", "DeviceArray", "JoiningScorer", "LayerView",
    "LayerwiseScorer", "Needs", "Observation", "Policy", "Promises", "Protection", "RecordingScorer", "Rehearsal",
    "Repeat", "Running", "RunningScorer", "Scorer", "Scores", "Selection", "Selector", "SeparableScorer",
]

_LAYERS = ("none", "observed", "all")
# A NumPy array, or a tensor already on the backend's device.
DeviceArray: TypeAlias = Any


@dataclass(frozen=True)
class Rehearsal:
    """Settings for KVzip. After the prompt, KVzip asks the model to repeat the prompt chunk by chunk.

    Raises:
        SpecError: if the template does not have three parts, if an id is below 0, or if a number is out of range.
    """

    template: Sequence[Sequence[int]] | None
    """Three lists of token ids: request for the first chunk, request for a later chunk, and start of the answer."""
    N_sink: int
    """Number of tokens at the start of the prompt that are not repeated, such as a system prompt or attention sinks."""
    N_recent: int
    """Number of tokens at the end of the prompt that are not repeated, such as a question or the end of a chat turn."""
    chunk: int
    """Number of tokens in a chunk of the prompt. The last chunk can be shorter."""
    overlap: int
    """Number of tokens at the end of a chunk that the request for the next chunk quotes."""

    def __post_init__(self) -> None:
        if self.template is None or len(self.template) != 3:
            reason = "must be token ids of two requests and of an answer's start: pass tokenizer= to policy_from_name"
            raise SpecError("template", self.template, reason)
        object.__setattr__(self, "template", tuple(tuple(part) for part in self.template))
        least = {"id": min((at for part in self.template for at in part), default=0), "N_sink": self.N_sink}
        least |= {"N_recent": self.N_recent, "overlap": self.overlap, "chunk": self.chunk - 1}
        for name, value in least.items():
            if value < 0:
                raise SpecError(name, value + (name == "chunk"), f"must be at least {int(name == 'chunk')}")


@dataclass(frozen=True)
class Needs:
    """Tensors that a policy needs to compute scores. kvspec captures only the tensors that are declared here.

        needs = kvspec.Needs("all", query_rows=32, values=True)     # keys, values and the last 32 queries of all layers

    Attributes:
        layers: full-attention layers whose keys and queries the score uses: "none", "observed" (one layer) or "all".
        query_rows: number of queries at the end of the prompt that the score uses. None means all queries.
        observed: if `layers` is "observed", index of that layer among the full-attention layers. -1 is the last layer.
        values: True if the score uses the cached values.
        token_ids: True if the score uses the ids of the prompt tokens.
        accepts_tensor: function that returns True if the score accepts a given tensor without a copy to the host. None
            if the score accepts only NumPy arrays.
        budget: True if the scores depend on the budget.
        rehearsal: settings for KVzip's repetition of the prompt. None if the model does not repeat the prompt.
        hidden: True if the score uses the hidden states at the input of each layer's attention. Hidden states exist
            only for tokens of the forward pass, so the policy evicts from the first prompt only.

    Raises:
        SpecError: if a field has a value that its description does not allow.
    """

    layers: Literal["none", "observed", "all"] = "none"
    query_rows: int | None = 0
    observed: int = 0
    values: bool = False
    token_ids: bool = False
    accepts_tensor: Callable[[DeviceArray], bool] | None = None
    budget: bool = False
    rehearsal: Rehearsal | None = None
    hidden: bool = False

    def __post_init__(self) -> None:
        check_choices("layers", (self.layers,), _LAYERS)
        rows = self.query_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, Integral) or rows < 0):
            raise SpecError("query_rows", rows, "must be a number of queries such as 32, or None for all queries")
        if isinstance(self.observed, bool) or not isinstance(self.observed, Integral):
            raise SpecError("observed", self.observed, "must be the index of a layer, such as 0 or -1")
        for name in ("values", "token_ids", "budget", "hidden"):
            if not isinstance(value := getattr(self, name), bool):
                raise SpecError(name, value, "must be True or False")
        if self.accepts_tensor is not None and not callable(self.accepts_tensor):
            raise SpecError("accepts_tensor", self.accepts_tensor, "must be a function of a tensor, or None")
        if self.rehearsal is not None and not isinstance(self.rehearsal, Rehearsal):
            raise SpecError("rehearsal", self.rehearsal, "must be a spec.policy.Rehearsal, or None")


@dataclass(frozen=True)
class Repeat:
    """Attention inputs of one layer after RoPE, recorded while the model repeats one chunk of the prompt.

    The r tokens are the request, the start of the answer, and the repeated chunk.
    """

    start: int
    """Position in the prompt of the chunk's first token."""
    stop: int
    q: DeviceArray
    """Queries (H, r, d)."""
    k: DeviceArray
    """Keys (H_kv, r, d)."""
    norms: Float64[Vector, " r"]
    """L2 norm of the hidden state of each token at the input of the layer's attention."""


@dataclass(frozen=True)
class LayerView:
    """Attention inputs of one layer, after RoPE: q (H, n_q, d), k (H_kv, n, d), and v (H_kv, n, d) or None.

    A scorer must not change the arrays in place, because k and v can be the tensors of the cache.

    q contains the last n_q queries. k and v contain the n cached keys and values. q, k and v are sorted by position.
    lse (H, n_q) is described in `spec.backend.CrystalStages.coattention`, and is None if the model's attention does not
    return lse.
    """

    q: DeviceArray
    k: DeviceArray
    v: DeviceArray | None
    scaling: float
    softcap: float | None
    lse: DeviceArray | None = None
    repeats: tuple[Repeat, ...] | None = None
    """For policies such as KVzip, which let the model read the prompt twice: one entry for each chunk of the second
    reading. None for all other policies."""
    sinks: DeviceArray | None = None
    """One logit for the attention sink of each query head, (H,), or None (see `CrystalStages.coattention`)."""
    hidden: DeviceArray | None = None
    """Hidden states (n, width) that the layer's attention reads, after the layer's input norm. None if not declared."""


@dataclass(frozen=True)
class Observation:
    """Data of one sequence that a scorer uses at the end of a segment or of a decode step."""

    seen: int
    """Number of tokens processed so far. The absolute positions of the tokens are 0 to seen - 1."""
    groups: int
    """Number of groups. Each group has a separate set of kept tokens."""
    token_ids: Int64[IntVector, " n"] | None
    layers: Mapping[int, LayerView]
    """Attention inputs by layer index, ascending. Groups are also in ascending order of layers."""
    B: int | None = None
    """Budget B, the average number of tokens that a group keeps, for scores that depend on the budget."""
    positions: Int64[IntVector, " n"] | None = None
    """Absolute positions of the n cached tokens. None means that no token was evicted and that n equals `seen`."""
    first: int = 0
    """If layers are decided one by one: index of this observation's first group among all groups of the policy."""


@dataclass(frozen=True)
class Scores:
    """Priorities of units (tokens, chunks or trunks). The units with the highest priorities are kept first.

    Unit u consists of the positions offsets[u] to offsets[u + 1] - 1. A unit whose priority is NaN ranks
    lowest, unless the unit is protected.
    """

    values: Float64[Matrix, "g m"]
    offsets: Int64[IntVector, " m_and_one"]
    members: Float64[Matrix, "g n"] | None = None
    """Priorities of single tokens, for a selector that can keep a part of a unit."""
    carry: object = None
    """Records of the scorer. Budgets and selectors do not change these records."""
    heads: int = 1
    """Number of groups per layer: the number of KV heads if each KV head has a separate set of kept tokens, else 1."""
    signatures: Float64[Cube, "s n d"] | None = None
    """Token signatures, for a selector that compares tokens. Group g of all G groups uses signatures[g * s // G]."""
    second: Float64[Matrix, "g m"] | None = None
    """Priorities for the second stage of a two-stage selector."""
    preferences: Float64[Vector, " L"] | None = None
    """Weight of each layer, for budgets that divide the total in proportion to the weights."""


@dataclass(frozen=True)
class Selection:
    """Result of a selector: the selected positions, ascending inside each group, and the offsets of the groups."""

    positions: Int64[IntVector, " kept"]
    offsets: Int64[IntVector, " groups_and_one"]
    records: object = None
    """Further results of the selector, for reports."""


@runtime_checkable
class Scorer(Protocol):
    """Callable that returns the scores of units.

    The mask `protected` is an argument because scores can be relative to the unprotected tokens.
    """

    @property
    def needs(self) -> Needs: ...

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores: ...


@runtime_checkable
class SeparableScorer(Scorer, Protocol):
    """A scorer that can score each group from the queries, keys and values of this group alone."""

    @property
    def separable(self) -> bool:
        """Return True if each group is scored from data of this group alone. Groups may then evict different tokens."""
        ...


@runtime_checkable
class LayerwiseScorer(Scorer, Protocol):
    """A scorer that can score each layer from the queries, keys and values of this layer alone."""

    @property
    def layerwise(self) -> bool:
        """Return True if each layer is scored from data of this layer alone. Eviction can then run layer by layer."""
        ...


@runtime_checkable
class Budgets(Protocol):
    """Callable that divides the total budget among the groups.

    The shares sum to the total if no group receives more tokens than the group contains.
    """

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]: ...


@runtime_checkable
class Selector(Protocol):
    """Callable that selects the positions to keep: at most budgets[g] in group g, but always all protected tokens.

    The selection in a group depends only on the scores of the layer to which the group belongs.
    """

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection: ...


@runtime_checkable
class Protection(Protocol):
    """Callable that returns a mask (seen,) that is True for each token that must not be evicted."""

    @property
    def size(self) -> int:
        """Return the number of protected tokens of a long prompt."""
        ...

    def __call__(self, seen: int, /) -> BoolVector: ...


@dataclass(frozen=True)
class Cadence:
    """Times at which a policy evicts tokens: after each prompt and, if `every` is set, after some decode steps.

    Implements: PO-STEP
    """

    every: int | None = None
    """The policy evicts after a decode step only if `seen` is a multiple of `every`, and never if `every` is None."""
    excess: int = 1
    """The policy evicts after a decode step only if a group contains at least `excess` tokens more than the budget."""

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("excess", self.excess)):
            if value is not None and value < 1:
                raise SpecError(name, value, "must be at least 1")

    def due(self, seen: int, live: int, B: int) -> bool:
        """Return True if the policy evicts after `seen` tokens from a group that has `live` tokens and the budget B."""
        return self.every is not None and seen % self.every == 0 and live - B >= self.excess


SEGMENT_END = Cadence()


@dataclass(frozen=True)
class Running:
    """State of a policy between two decode steps: the positions of the cached tokens, and the scorer's records."""

    live: Int64[IntMatrix, "g n"]
    """Absolute positions of the cached tokens of each group, ascending. All groups have the same number of tokens."""
    records: object


@runtime_checkable
class RunningScorer(Scorer, Protocol):
    """A scorer for decode steps. A slot is the index of a token in the cache. The newest token has the last slot."""

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Return the scores of all slots. `Scores.carry` contains the records of all slots, including the newest."""
        ...

    def keep(self, records: object, slots: IntMatrix, /) -> object:
        """Return the records of the slots (g, kept) that are kept."""
        ...


@runtime_checkable
class RecordingScorer(RunningScorer, Protocol):
    """A running scorer that can update records without computing scores.

    Scores are then computed only at decode steps after which the policy evicts.
    """

    def record(self, records: Any, observation: Observation, /) -> object:
        """Return the same records as `step` returns in `Scores.carry`, including the records of the newest token."""
        ...


@runtime_checkable
class JoiningScorer(RunningScorer, Protocol):
    """A running scorer that can compute the records of a prompt layer by layer."""

    def join(self, records: Sequence[Any], /) -> object:
        """Return the records of all layers, joined from the records of each layer in ascending order of layers."""
        ...


Promised = Literal["yes", "no", "N/A"]


@dataclass(frozen=True)
class Promises:
    """Properties that a policy guarantees, with one field for each column of the table in spec/policies.md.

    "yes" means that the policy guarantees the property, and `conformance.policy_suite` tests the property on random
    inputs. "no" (the default) means no guarantee. "N/A" means that the property does not apply to the policy.
    """

    budget_exact: Promised = "no"
    protection_holds: Promised = "no"
    no_op_at_full_budget: Promised = "no"
    higher_score_never_loses: Promised = "no"
    row_independence: Promised = "no"
    head_permutation: Promised = "no"
    gqa: Promised = "no"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_choices(name, (value,), get_args(Promised))


NOTHING_PROMISED = Promises()


@dataclass(frozen=True)
class Policy:
    """An eviction policy: a name, the five parts, a granularity, the smallest budget and the guarantees.

    Raises:
        SpecError: if two parts do not fit together (see `spec.composition`).
    """

    name: str
    scorer: Scorer
    budgets: Budgets
    selector: Selector
    protection: Protection
    cadence: Cadence = SEGMENT_END
    granularity: Granularity = Granularity.MODEL
    least: int | None = 0
    """Smallest budget in tokens, if larger than the number of protected tokens. None means that no budget is raised."""
    promises: Promises = NOTHING_PROMISED
    """What this combination of parts guarantees. A combination with a different part may guarantee less."""

    def __post_init__(self) -> None:
        check_parts(self)

    def __repr__(self) -> str:
        parts = {"scorer": self.scorer, "budgets": self.budgets, "selector": self.selector}
        shown = ", ".join(f"{name}={short(part)}" for name, part in parts.items())
        return f"Policy({self.name!r}, {shown}, protection={short(self.protection)}, granularity={self.granularity})"

    @property
    def floor(self) -> int:
        """Return the number of tokens to which a smaller budget is raised. In Equation 30 it is sink + recent."""
        return 0 if self.least is None else max(self.protection.size, self.least)
