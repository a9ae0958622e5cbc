"""A policy in five parts: scorer, budgets, selector, protection, cadence.

Every method of the field is one record of these parts at one granularity, so that parts compose: any scorer under
any budgets, any selector over any scores. `reference.policies` holds the definitions.
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
    """How a prompt is rehearsed: behind it the model is asked to repeat its context, chunk by chunk.

    Raises:
        SpecError: for a template of other than three parts, an id below 0, or a number out of range.
    """

    template: Sequence[Sequence[int]] | None
    """Ids of the request for the first chunk, of that for each later one, and of what stands before an answer."""
    N_sink: int
    """First tokens of the prompt that are not repeated: a system prompt, or sinks."""
    N_recent: int
    """Last tokens of the prompt that are not repeated: a question, or the end of a chat's turn."""
    chunk: int
    """Tokens of a chunk."""
    overlap: int
    """Last tokens of the chunk before that the request for a later one ends with."""

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
        layers: full-attention layers that give keys and queries to the score: "none", "observed" (one layer) or "all".
        query_rows: number of queries that the score reads, counted from the end of the prompt. None for all queries.
        observed: if `layers` is "observed", index of the layer among the full-attention layers. -1 is the last layer.
        values: True if the score reads the values of the cache.
        token_ids: True if the score reads the ids of the prompt tokens.
        takes: function of a tensor that returns True if the score accepts the tensor on its device. None if the score
            accepts only NumPy arrays.
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
    """One layer's attention inputs after RoPE of the r tokens that repeat a chunk, the request for it included."""

    start: int
    """The chunk's first position in the prompt."""
    stop: int
    q: DeviceArray
    """(H, r, d)."""
    k: DeviceArray
    """(H_kv, r, d)."""
    norms: Float64[Vector, " r"]
    """L2 norms of the hidden states that the layer's attention read."""


@dataclass(frozen=True)
class LayerView:
    """One layer's attention inputs after RoPE: q (H, n_q, d), k (H_kv, n, d) and, if needed, v (H_kv, n, d).

    q holds the last n_q of the queries, in the order of their positions; k and v hold what is cached, in that order.
    lse (H, n_q), where the forward's attention has it: see `spec.backend.CrystalStages.coattention`.
    """

    q: DeviceArray
    k: DeviceArray
    v: DeviceArray | None
    scaling: float
    softcap: float | None
    lse: DeviceArray | None = None
    repeats: tuple[Repeat, ...] | None = None
    """Each chunk's, where the prompt was rehearsed."""
    sinks: DeviceArray | None = None
    """Logits of the query heads' attention sinks (H,), if the layer has some: see `CrystalStages.coattention`."""


@dataclass(frozen=True)
class Observation:
    """One sequence at the end of a segment or of a step, as far as the scorer needs it."""

    seen: int
    """Tokens seen: absolute positions run over range(seen)."""
    groups: int
    """Kept sets to decide at the policy's granularity."""
    token_ids: Int64[IntVector, " n"] | None
    layers: Mapping[int, LayerView]
    """In ascending order, which is the order of the groups."""
    B: int | None = None
    """Tokens that a group keeps on average, as `retain` knows them; for scores that depend on the budget."""
    positions: Int64[IntVector, " n"] | None = None
    """Absolute positions of the n cached tokens, where some were evicted before; None: n is `seen`."""
    first: int = 0
    """Number of the first group among all groups of the policy: above 0 where a later layer is decided alone."""


@dataclass(frozen=True)
class Scores:
    """Retention priorities over units: unit u holds positions offsets[u] to offsets[u + 1]. Higher is kept first.

    NaN marks a unit without a score: it is protected, or else the last to be kept.
    """

    values: Float64[Matrix, "g m"]
    offsets: Int64[IntVector, " m_and_one"]
    members: Float64[Matrix, "g n"] | None = None
    """Priorities of tokens inside one unit, for a selector that keeps units in part."""
    carry: object = None
    """The scorer's own records, handed on untouched."""
    heads: int = 1
    """Groups of one layer, side by side: the KV heads where each has its own kept set, else 1."""
    signatures: Float64[Cube, "s n d"] | None = None
    """Directions of the tokens, for a selector that compares them: one for all groups, or one for each s-th part."""
    second: Float64[Matrix, "g m"] | None = None
    """Priorities of a second stage, for a selector that has one."""
    preferences: Float64[Vector, " L"] | None = None
    """What each layer is worth, for budgets that share between layers by it."""


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
class SeparableScorer(Scorer, Protocol):
    """A scorer that may give each kept set its scores from that set's own queries, keys and values alone."""

    @property
    def separable(self) -> bool:
        """Whether it does: then it goes on where other sets have dropped other tokens."""
        ...


@runtime_checkable
class LayerwiseScorer(Scorer, Protocol):
    """A scorer whose scores of a layer may follow from the queries, keys and values of this layer alone."""

    @property
    def layerwise(self) -> bool:
        """Whether the scores do: then each layer may be decided as soon as it has attended."""
        ...


@runtime_checkable
class Budgets(Protocol):
    """Shares a total over the groups; the shares sum to it exactly wherever every group can hold its share."""

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]: ...


@runtime_checkable
class Selector(Protocol):
    """Picks positions, at most budgets[g] in group g unless protection alone exceeds it.

    The choice in a group depends on the scores of this group's layer alone.
    """

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection: ...


@runtime_checkable
class Protection(Protocol):
    """Marks the tokens, out of `seen`, that are never evicted."""

    def __call__(self, seen: int, /) -> BoolVector: ...


@dataclass(frozen=True)
class Cadence:
    """When a policy decides: at the end of each prompt and, where `every` is set, while tokens are decoded.

    Implements: PO-STEP
    """

    every: int | None = None
    """A step can be due where the number of tokens seen is a multiple of this; None: no step ever is."""
    excess: int = 1
    """And where a group holds at least this many tokens above its budget."""

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("excess", self.excess)):
            if value is not None and value < 1:
                raise SpecError(name, value, "must be at least 1")

    def due(self, seen: int, live: int, B: int) -> bool:
        """Whether a step that leaves `live` tokens in a group, out of `seen`, ends in a decision."""
        return self.every is not None and seen % self.every == 0 and live - B >= self.excess


SEGMENT_END = Cadence()


@dataclass(frozen=True)
class Running:
    """A policy between two steps: what is cached, and the scorer's records of it."""

    live: Int64[IntMatrix, "g n"]
    """Absolute positions, ascending; each group holds as many."""
    records: object


@runtime_checkable
class RunningScorer(Scorer, Protocol):
    """A scorer that goes on while tokens are decoded. Slots are columns of what is cached, the new token last."""

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Scores over the slots; `carry` holds the records with the new token in them."""
        ...

    def keep(self, records: object, slots: IntMatrix, /) -> object:
        """The records of the slots (g, kept) that stay."""
        ...


@runtime_checkable
class RecordingScorer(RunningScorer, Protocol):
    """A running scorer whose records do not follow from scores: a step that does not decide computes none."""

    def record(self, records: Any, observation: Observation, /) -> object:
        """The records with the new tokens in them, which are `carry` of `step`."""
        ...


@runtime_checkable
class JoiningScorer(RunningScorer, Protocol):
    """A running scorer whose records of a prompt may be made layer by layer."""

    def join(self, records: Sequence[Any], /) -> object:
        """The records of all layers, from those of each layer in ascending order."""
        ...


Promised = Literal["yes", "no", "N/A"]


@dataclass(frozen=True)
class Promises:
    """What a policy promises: the columns of the table in spec/policies.md. The default is that it does not.

    conformance.policy_suite tests each "yes" on drawn inputs. "N/A" is what makes no sense for the policy.
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
    """Tokens below which a budget is raised (Eq. 30: sink + recent)."""
    promises: Promises = NOTHING_PROMISED
    """Of this composition of parts: another one promises for itself."""
