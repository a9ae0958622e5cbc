"""Engines: a frozen record of optional stage families, found by name, by `module:ATTRIBUTE`, or given as it is.

What holds of every call of a stage (layouts, results, memory, threads): spec/implementing.md, "Calls".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from spec.arrays import BoolMatrix, BoolVector, IntVector, Matrix, Vector
from spec.decode import LiveTrunks, TrunkWeights
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.plugins import load, load_own, target_of
from spec.policy import DeviceArray, Selection
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks

__all__ = [
    "BUILT_IN", "ENTRY_POINTS", "Backend", "BreathStages", "CrystalStages", "DiversityStages", "NestedKVStages",
    "PolicyStages", "resolve",
]

BUILT_IN = {
    "numpy": "reference.backend:BACKEND",
    "numba": "accelerated.numba_cpu.backend:BACKEND",
    "torch": "accelerated.torch_device.backend:BACKEND",
    "triton": "accelerated.triton_gpu.backend:BACKEND",
}
ENTRY_POINTS = "kvspec.backends"
FAMILIES = ("crystal", "breath", "diversity", "nestedkv", "policies")
Stages = TypeVar("Stages")


@runtime_checkable
class CrystalStages(Protocol):
    """S1 to S6 of CrystalCache. Arrays in, records out; nothing is changed in place.

    A stage may assume checked input where its text raises nothing: doors check (spec/implementing.md).
    """

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None, /,
    ) -> CoAttention:
        """S1. q (H, n, d) are the last n of the tokens whose keys are k (H_kv, live, d) at `positions` (live,).

        lse (H, n): the natural logarithm of the sum of exp(logit) over the keys that a query sees, the query's own
        included and no other; logits scaled and soft-capped. It saves work and changes nothing: a backend may compute
        it again instead. The caller answers for it. An lse that belongs to other q, k, scaling, softcap or
        visibility scales every weight of a row by one wrong factor, which no check can tell from a right one.

        sinks (H,): the logit of each query head's attention sink, neither scaled nor capped. A sink is one more key of
        every query, which gets weight and is no token. lse does not include it.

        Raises:
            SpecError: for q, k, lse or sinks of a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """S3: M_i (n,)."""
        ...

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        """S2; `ends` (n,) marks the tokens that end a sentence."""
        ...

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        """S4 of a prompt: every edge lies inside the trunks. That of a later segment is `segment_graph`."""
        ...

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """S5 per trunk (m,); NaN where protected."""
        ...

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        """S6; `impact` is per token, `protected` per trunk, `budget` is B of Eq. 30."""
        ...


@runtime_checkable
class BreathStages(Protocol):
    """What decode and later segments need beside S1 to S6. Arrays in, arrays out; nothing is changed in place."""

    def inverse_key_norms(self, k: DeviceArray, /) -> Vector:
        """Mean over KV heads of 1 / ||k|| per token (n,), of k (H_kv, n, d); infinite where a key is zero.

        Raises:
            SpecError: for keys of a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, counts: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """S3 with given counts: M_i (n,) of tokens whose ids were seen `counts` (n,) times."""
        ...

    def decay(self, D: Vector, trunk_impact: Vector, parameters: CrystalCacheParameters, /) -> Vector:
        """Eq. 36: D (m,) after one step."""
        ...

    def activation(self, live: LiveTrunks, parameters: CrystalCacheParameters, /) -> BoolVector:
        """Section 3.8(a): which trunks (m,) are active."""
        ...

    def resonance(
        self, D: Vector, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """Eq. 37 and 38: D (m,) after every active trunk has sent its pulse."""
        ...

    def hebbian(self, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /) -> TrunkWeights:
        """Eq. 39 and 40: W after the update and its prune."""
        ...

    def segment_graph(
        self, coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights,
        parameters: CrystalCacheParameters, /,
    ) -> TrunkWeights:
        """S4 of a later segment: W, and behind its rows those of the segment's trunks.

        `bounds` (m + 1,) holds the first live position of each trunk, older ones first, and the end; `sizes` (m,)
        their live tokens.
        """
        ...

    def segment_crystallization(self, degree: Vector, old: int, parameters: CrystalCacheParameters, /) -> Vector:
        """Eq. 27 over the degrees of all trunks (m,): D of those behind the first `old` ones."""
        ...


@runtime_checkable
class DiversityStages(Protocol):
    """Set-conditioned selection. Arrays in, arrays out; nothing is changed in place."""

    def diverse(self, s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float, /) -> IntVector:
        """Algorithm 1: k tokens (k,), ascending, the `retained` (n,) among them, by scores s (n,), signatures V (n, d).

        Raises:
            SpecError: for lam below 0 or not finite, k above n or below the number retained, shapes that do not fit,
                or a signature that is not finite.
        """
        ...


@runtime_checkable
class NestedKVStages(Protocol):
    """NestedKV's score. Keys in, scores out; nothing is changed in place."""

    def anomaly_score(self, k: DeviceArray, parameters: NestedKVParameters, /) -> Matrix:
        """Eq. 3 to 15 and Appendix A: a* (H_kv, n), in [0, 1], of one layer's keys k (H_kv, n, d). No sink is pinned.

        Raises:
            SpecError: for keys of a wrong shape, type or value, and for a zero key.
        """
        ...


@runtime_checkable
class PolicyStages(Protocol):
    """Parts of the published policies that take time. Arrays in, arrays out; nothing is changed in place."""

    def received_attention(
        self, q: DeviceArray, k: DeviceArray, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """The attention that each key receives, (H_kv, n), summed over the queries and the heads of its group.

        q (H, m, d) are the last m of the tokens whose keys are k (H_kv, n, d); each sees the keys up to its own. sinks
        (H,) are as in `CrystalStages.coattention`.
        """
        ...

    def largest_attention(
        self, q: DeviceArray, k: DeviceArray, norms: Vector, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """The largest weight that each key gets of one query, (H, n), where a query's weights are over its norm.

        q (H, m, d) are the last m of the tokens whose keys are k (H_kv, n, d); each sees the keys up to its own. norms
        (m,) are above 0. sinks (H,) are as in `CrystalStages.coattention`.
        """
        ...

    def expected_attention(
        self, q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector,
        factor: float, scaling: float, sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """The expected weight on each key times its value's norm, (H_kv, n), averaged over the heads of a group.

        q (H, m, d) were rotated at positions `at` (m,), in pairs of halves by `inv_freq` (d / 2,) and `factor`; queries
        to come are rotated as on average at `ahead`. k and v are (H_kv, n, d); sinks (H,) are as in
        `CrystalStages.coattention`.
        """
        ...

    def best_tokens(self, values: Matrix, shares: IntVector, pinned: BoolMatrix, /) -> Selection:
        """Of each row of `values` (g, n) its `pinned` tokens, then the best others, up to `shares` (g,) in all.

        The lower index first on a tie; NaN is below every score. Pinned tokens stay where they alone exceed the share.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """An engine and the stage families that it has."""

    name: str
    crystal: CrystalStages | None = None
    breath: BreathStages | None = None
    diversity: DiversityStages | None = None
    nestedkv: NestedKVStages | None = None
    policies: PolicyStages | None = None
    takes: Callable[[DeviceArray], bool] | None = None
    """Whether its device stages read this tensor where it is; None means that they read NumPy arrays only."""
    scores: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    """Scores of published policies, by the name of the reference's function and with its arguments."""
    tensors: Mapping[str, Callable[..., DeviceArray]] = field(default_factory=dict, hash=False)
    """Functions that leave their result on the device and read none of its values: scores of a layer, as in `scores`;
    `top_units`: a score (g, n), shares (g,) and marks of protected tokens (g, n) give marks of kept ones; `fill_units`
    takes the size of a chunk and the number of tokens in chunks after the score; `Adaptive` and `Competition`: a score,
    NaN for protected tokens, the tokens to share, the protected ones of each set and the safeguard give shares."""

    def require_crystal(self) -> CrystalStages:
        """The CrystalCache stages.

        Raises:
            BackendUnavailable: when this backend has none; the message names the families that it has.
        """
        return self._having("crystal", self.crystal)

    def require_breath(self) -> BreathStages:
        """The stages of decode and of later segments, or the error of `require_crystal`."""
        return self._having("breath", self.breath)

    def require_diversity(self) -> DiversityStages:
        """The stage of set-conditioned selection, or the error of `require_crystal`."""
        return self._having("diversity", self.diversity)

    def require_nestedkv(self) -> NestedKVStages:
        """NestedKV's score, or the error of `require_crystal`."""
        return self._having("nestedkv", self.nestedkv)

    def require_policies(self) -> PolicyStages:
        """The stages of the published policies, or the error of `require_crystal`."""
        return self._having("policies", self.policies)

    def _having(self, family: str, stages: Stages | None) -> Stages:
        if stages is None:
            has = [name for name in FAMILIES if getattr(self, name) is not None]
            raise BackendUnavailable(f"backend {self.name!r} has no stage family {family!r}; it has: {has or 'none'}")
        return stages


def resolve(backend: str | Backend) -> Backend:
    """Find a backend: an instance, a built-in name, `module:ATTRIBUTE`, or a name under `kvspec.backends`.

    Raises:
        SpecError: when `backend` is neither text nor a Backend, or no such name is known.
        BackendUnavailable: when the module cannot be imported here; the message says why.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise SpecError("backend", backend, "must be a name, 'module:ATTRIBUTE' or a spec.backend.Backend")
    target = BUILT_IN.get(backend) or target_of("backend", backend, ENTRY_POINTS, BUILT_IN)
    try:
        found = (load if backend in BUILT_IN else load_own)(target).value
    except ImportError as error:
        remedy = f"; pip install 'kvspec[{backend}]' brings what it needs" if backend in BUILT_IN else ""
        raise BackendUnavailable(f"backend {backend!r} ({target}) cannot be loaded here: {error}{remedy}") from error
    if not isinstance(found, Backend):
        raise SpecError("backend", backend, f"{target} is a {type(found).__name__}, not a spec.backend.Backend")
    return found
