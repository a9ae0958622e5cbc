"""A policy in five parts: scorer, budgets, selector, protection, cadence.

Every eviction policy is one record of these parts at one granularity. Parts of different policies can be combined:
any scorer with any budgets, and any selector with any scores. `reference.policies` defines the published policies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from spec.arrays import BoolVector, Cube, Float64, Int64, IntMatrix, IntVector, Matrix, Vector
from spec.errors import SpecError
from spec.retention import Granularity
from spec.validate import check_choices

__all__ = [
    "NOTHING_PROMISED", "SEGMENT_END", "Budgets", "Cadence", "DeviceArray", "JoiningScorer", "LayerView",
    "LayerwiseScorer", "Needs", "Observation", "Policy", "Promises", "Protection", "RecordingScorer", "Rehearsal",
    "Repeat", "Running", "RunningScorer", "Scorer", "Scores", "Selection", "Selector", "SeparableScorer",
]

# A NumPy array, or a tensor already on the backend's device.
DeviceArray: TypeAlias = Any


@dataclass(frozen=True)
class Rehearsal:
    """Settings of KVzip's repetition: after the prompt, the model is asked to repeat the context chunk by chunk.

    Raises:
        SpecError: if the template does not have three parts, if an id is below 0, or if a number is out of range.
    """

    template: Sequence[Sequence[int]] | None
    """Token ids of the request for the first chunk, the request for a later chunk, and the start of an answer."""
    N_sink: int
    """Number of first prompt tokens that are not repeated, such as a system prompt or attention sinks."""
    N_recent: int
    """Number of last prompt tokens that are not repeated, such as a question or the end of a chat turn."""
    chunk: int
    """Number of tokens in a chunk. The last chunk can be shorter."""
    overlap: int
    """Number of last tokens of a chunk that the request for the next chunk quotes."""

    def __post_init__(self) -> None:
        if self.template is None or len(self.template) != 3:
            reason = "must be token ids of two requests and of an answer's start: kvspec.repeat_template(tokenizer)"
            raise SpecError("template", self.template, reason)
        object.__setattr__(self, "template", tuple(tuple(part) for part in self.template))
        least = {"id": min((at for part in self.template for at in part), default=0), "N_sink": self.N_sink}
        least |= {"N_recent": self.N_recent, "overlap": self.overlap, "chunk": self.chunk - 1}
        for name, value in least.items():
            if value < 0:
                raise SpecError(name, value + (name == "chunk"), f"must be at least {int(name == 'chunk')}")


@dataclass(frozen=True)
class Needs:
    """Tensors that the score of a policy reads. kvspec captures only these tensors.

        needs = kvspec.Needs("all", query_rows=32, values=True)     # keys, values and the last 32 queries of all layers

    Attributes:
        layers: full-attention layers whose keys and queries the score reads: "none", "observed" (one layer) or "all".
        query_rows: number of queries that the score reads, counted from the end of the prompt. None means all.
        observed: index of the layer among the full-attention layers if `layers` is "observed". -1 is the last layer.
        values: True if the score reads the values of the cache.
        token_ids: True if the score reads the ids of the prompt tokens.
        takes: function that takes a tensor and returns True if the score accepts this tensor on its device. None if the
            score accepts only NumPy arrays.
        budget: True if the scores depend on the budget.
        rehearsal: how the model repeats the prompt, for KVzip. None if the model does not repeat the prompt.
    """

    layers: Literal["none", "observed", "all"] = "none"
    query_rows: int | None = 0
    observed: int = 0
    values: bool = False
    token_ids: bool = False
    takes: Callable[[DeviceArray], bool] | None = None
    budget: bool = False
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class Repeat:
    """Attention inputs of one layer, after RoPE, for r tokens: a request, an answer's start, and the repeated chunk."""

    start: int
    """Position of the chunk's first token in the prompt."""
    stop: int
    q: DeviceArray
    """Queries (H, r, d)."""
    k: DeviceArray
    """Keys (H_kv, r, d)."""
    norms: Float64[Vector, " r"]
    """L2 norm of each token's hidden state at the input of the layer's attention."""


@dataclass(frozen=True)
class LayerView:
    """Attention inputs of one layer, after RoPE: q (H, n_q, d), k (H_kv, n, d), and v (H_kv, n, d) or None.

    q contains the last n_q queries. k and v contain the n cached keys and values. All three are sorted by position.
    lse (H, n_q) is None if the model's attention does not return lse (see `spec.backend.CrystalStages.coattention`).
    """

    q: DeviceArray
    k: DeviceArray
    v: DeviceArray | None
    scaling: float
    softcap: float | None
    lse: DeviceArray | None = None
    repeats: tuple[Repeat, ...] | None = None
    """Attention inputs of each repeated chunk. None if the model did not repeat the prompt."""
    sinks: DeviceArray | None = None
    """Logit of each query head's attention sink (H,), or None (see `CrystalStages.coattention`)."""


@dataclass(frozen=True)
class Observation:
    """Data about one sequence that the scorer reads at the end of a segment or of a decode step."""

    seen: int
    """Number of tokens seen. Absolute positions of tokens run from 0 to seen - 1."""
    groups: int
    """Number of kept sets to decide at the policy's granularity."""
    token_ids: Int64[IntVector, " n"] | None
    layers: Mapping[int, LayerView]
    """Attention inputs by layer index, ascending. The groups have the same order of layers as this mapping."""
    B: int | None = None
    """Budget B: the average number of tokens that a group keeps. Scores that depend on the budget read B."""
    positions: Int64[IntVector, " n"] | None = None
    """Absolute positions of the n cached tokens. None means that no token was evicted, so n equals `seen`."""
    first: int = 0
    """Index of the first group among all groups of the policy. Above 0 if the policy decides a later layer alone."""


@dataclass(frozen=True)
class Scores:
    """Priorities of units. Unit u has the positions offsets[u] to offsets[u + 1] - 1. The highest units are kept first.

    A unit whose priority is NaN is either protected or the last unit to be kept.
    """

    values: Float64[Matrix, "g m"]
    offsets: Int64[IntVector, " m_and_one"]
    members: Float64[Matrix, "g n"] | None = None
    """Priorities of single tokens, for a selector that can keep a part of a unit."""
    carry: object = None
    """Records of the scorer. Budgets and selectors do not change these records."""
    heads: int = 1
    """Number of groups per layer: the number of KV heads if each KV head has a kept set, otherwise 1."""
    signatures: Float64[Cube, "s n d"] | None = None
    """Token signatures, for a selector that compares tokens. Of G groups, group g uses signatures[g * s // G]."""
    second: Float64[Matrix, "g m"] | None = None
    """Priorities for the second stage of a two-stage selector."""
    preferences: Float64[Vector, " L"] | None = None
    """Weight of each layer, for budgets that divide the tokens between layers by weight."""


@dataclass(frozen=True)
class Selection:
    """What a selector chose: positions ascending inside each group, and the groups' offsets."""

    positions: Int64[IntVector, " kept"]
    offsets: Int64[IntVector, " groups_and_one"]
    records: object = None
    """Further results of the selector, for reports."""


@runtime_checkable
class Scorer(Protocol):
    """Callable that scores units. Scores can be relative to the unprotected tokens, so `protected` is an argument."""

    @property
    def needs(self) -> Needs: ...

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores: ...


@runtime_checkable
class SeparableScorer(Scorer, Protocol):
    """A scorer that can score each kept set from the queries, keys and values of this kept set alone."""

    @property
    def separable(self) -> bool:
        """Return True if the scorer scores each kept set alone. Kept sets may then have evicted different tokens."""
        ...


@runtime_checkable
class LayerwiseScorer(Scorer, Protocol):
    """A scorer that can score each layer from the queries, keys and values of this layer alone."""

    @property
    def layerwise(self) -> bool:
        """Return True if the scorer scores each layer alone. A layer can then be decided right after its attention."""
        ...


@runtime_checkable
class Budgets(Protocol):
    """Callable that divides a total among the groups. The shares sum to the total if every group can hold its share."""

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]: ...


@runtime_checkable
class Selector(Protocol):
    """Callable that selects at most budgets[g] positions in group g, unless more than budgets[g] tokens are protected.

    The selection in a group depends only on the scores of the layer that contains the group.
    """

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection: ...


@runtime_checkable
class Protection(Protocol):
    """Callable that returns a mask (seen,) of the tokens that are never evicted."""

    def __call__(self, seen: int, /) -> BoolVector: ...


@dataclass(frozen=True)
class Cadence:
    """Times at which a policy decides what to keep: after each prompt and, if `every` is set, after decode steps.

    Implements: PO-STEP
    """

    every: int | None = None
    """A decode step is due only if the number of tokens seen is a multiple of `every`. None: no step is due."""
    excess: int = 1
    """A decode step is due only if a group holds at least `excess` tokens more than its budget."""

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("excess", self.excess)):
            if value is not None and value < 1:
                raise SpecError(name, value, "must be at least 1")

    def due(self, seen: int, live: int, B: int) -> bool:
        """Return True if the policy decides now: `seen` tokens were read, and a group stores `live` with budget B."""
        return self.every is not None and seen % self.every == 0 and live - B >= self.excess


SEGMENT_END = Cadence()


@dataclass(frozen=True)
class Running:
    """State of a policy between two decode steps: the cached positions and the scorer's records of these positions."""

    live: Int64[IntMatrix, "g n"]
    """Absolute positions of the cached tokens, ascending. All groups have the same number of tokens."""
    records: object


@runtime_checkable
class RunningScorer(Scorer, Protocol):
    """A scorer for decode steps. A slot is the index of a token in the cache. The new token has the last slot."""

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Return the scores of all slots. `Scores.carry` contains the records, including those of the new token."""
        ...

    def keep(self, records: object, slots: IntMatrix, /) -> object:
        """Return the records of the kept slots (g, kept)."""
        ...


@runtime_checkable
class RecordingScorer(RunningScorer, Protocol):
    """A running scorer that can update its records without scores. Steps without a decision then compute no scores."""

    def record(self, records: Any, observation: Observation, /) -> object:
        """Return the records, including those of the new tokens. `step` returns equal records in `Scores.carry`."""
        ...


@runtime_checkable
class JoiningScorer(RunningScorer, Protocol):
    """A running scorer that can make the records of a prompt layer by layer."""

    def join(self, records: Sequence[Any], /) -> object:
        """Return the records of all layers. The argument has the records of each layer in ascending order of layers."""
        ...


Promised = Literal["yes", "no", "N/A"]


@dataclass(frozen=True)
class Promises:
    """Properties that a policy promises: the columns of the table in spec/policies.md. The default is no promise.

    `conformance.policy_suite` tests each "yes" on random inputs. "N/A" marks a property that does not apply.
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
    """One eviction method."""

    name: str
    scorer: Scorer
    budgets: Budgets
    selector: Selector
    protection: Protection
    cadence: Cadence = SEGMENT_END
    granularity: Granularity = Granularity.MODEL
    floor: int = 0
    """Smallest budget in tokens. A smaller budget is raised to `floor` (Eq. 30: sink + recent)."""
    promises: Promises = NOTHING_PROMISED
    """Promises of this combination of parts. A combination with a different part needs separate promises."""
