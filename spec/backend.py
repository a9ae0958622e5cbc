"""Backends. A backend is a frozen record of optional stage families; `resolve` finds a backend by name.

The section "Calls" of spec/implementing.md has the rules for every stage: layouts, results, memory, threads.
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
    """Stages S1 to S6 of CrystalCache. The stages take arrays, return records, and change nothing in place.

    A stage without `Raises` may assume valid input: the public functions check the input first (spec/implementing.md).
    """

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None, /,
    ) -> CoAttention:
        """S1: co-attention. k (H_kv, live, d) are the cached keys at `positions` (live,), and q (H, n, d) the queries
        of the last n of these tokens.

        lse (H, n) is the natural logarithm of the sum of exp(logit) over the keys that a query attends to, including
        the query's own key. The logits are scaled and soft-capped. A backend may use lse to save work, or compute it
        again: the result is the same. The caller must pass the right values. An lse of a different q, k, scaling,
        softcap or mask scales all weights of a row by a wrong factor, and no check can detect this.

        sinks (H,) are the logits of the query heads' attention sinks, neither scaled nor soft-capped. A sink adds
        exp(sink) to the softmax denominator of every query; it is not a token. lse does not include the sinks.

        Raises:
            SpecError: if q, k, lse or sinks have a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """S3: return the impact M_i of each token, (n,)."""
        ...

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        """S2: return the trunks. `ends` (n,) marks the tokens that end a sentence."""
        ...

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        """S4 of a prompt: return the trunk graph. For later segments see `BreathStages.segment_graph`."""
        ...

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """S5: return the score of each trunk, (m,). Protected trunks have NaN."""
        ...

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        """S6: dissolve trunks. `impact` is per token, `protected` is per trunk, `budget` is B of Eq. 30 in tokens."""
        ...


@runtime_checkable
class BreathStages(Protocol):
    """Stages of decoding and of later segments, in addition to S1 to S6. The stages change nothing in place."""

    def inverse_key_norms(self, k: DeviceArray, /) -> Vector:
        """Return each token's mean of 1 / ||k|| over the KV heads, (n,), for keys k (H_kv, n, d). A zero key gives inf.

        Raises:
            SpecError: if the keys have a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, counts: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """S3 with given counts: return M_i (n,) of tokens whose ids occurred `counts` (n,) times so far."""
        ...

    def decay(self, D: Vector, trunk_impact: Vector, parameters: CrystalCacheParameters, /) -> Vector:
        """Return D (m,) after one decode step (Eq. 36)."""
        ...

    def activation(self, live: LiveTrunks, parameters: CrystalCacheParameters, /) -> BoolVector:
        """Return a mask (m,) of the active trunks (Section 3.8(a))."""
        ...

    def resonance(
        self, D: Vector, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """Return D (m,) after every active trunk has sent its pulse (Eq. 37 and 38)."""
        ...

    def hebbian(self, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /) -> TrunkWeights:
        """Return W after the Hebbian update and the pruning of weak edges (Eq. 39 and 40)."""
        ...

    def segment_graph(
        self, coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights,
        parameters: CrystalCacheParameters, /,
    ) -> TrunkWeights:
        """S4 of a later segment: return W with rows for the segment's trunks added at the end.

        `bounds` (m + 1,) holds the first live position of each trunk, older trunks first, and then the end. `sizes`
        (m,) holds the number of live tokens of each trunk.
        """
        ...

    def segment_crystallization(self, degree: Vector, old: int, parameters: CrystalCacheParameters, /) -> Vector:
        """Return D of the trunks after the first `old` ones, by Eq. 27 with the degrees of all trunks (m,)."""
        ...


@runtime_checkable
class DiversityStages(Protocol):
    """Set-conditioned selection. The stage takes and returns arrays, and changes nothing in place."""

    def diverse(self, s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float, /) -> IntVector:
        """Return k tokens (k,), ascending, by Algorithm 1 with scores s (n,) and signatures V (n, d).

        The tokens marked in `retained` (n,) are among the k.

        Raises:
            SpecError: if lam is negative or not finite, if k is above n or below the number of retained tokens, if the
                shapes do not match, or if a signature is not finite.
        """
        ...


@runtime_checkable
class NestedKVStages(Protocol):
    """NestedKV's score. The stage takes keys, returns scores, and changes nothing in place."""

    def anomaly_score(self, k: DeviceArray, parameters: NestedKVParameters, /) -> Matrix:
        """Return the score a* (H_kv, n) in [0, 1] of one layer's keys k (H_kv, n, d), by Eq. 3 to 15 and Appendix A.

        Attention sinks get no special score.

        Raises:
            SpecError: if the keys have a wrong shape, type or value, or if a key is zero.
        """
        ...


@runtime_checkable
class PolicyStages(Protocol):
    """The slow parts of the published policies. These stages take and return arrays, and change nothing in place."""

    def received_attention(
        self, q: DeviceArray, k: DeviceArray, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """Return the attention weight that each key receives, (H_kv, n), summed over queries and heads of the group.

        k (H_kv, n, d) are the keys of n tokens, and q (H, m, d) the queries of the last m of them. Attention is causal.
        sinks (H,) are as in `CrystalStages.coattention`.
        """
        ...

    def largest_attention(
        self, q: DeviceArray, k: DeviceArray, norms: Vector, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """Return the largest attention weight that each key receives from a query, divided by the query's norm, (H, n).

        k (H_kv, n, d) are the keys of n tokens, and q (H, m, d) the queries of the last m of them. Attention is causal.
        norms (m,) are positive. sinks (H,) are as in `CrystalStages.coattention`.
        """
        ...

    def expected_attention(
        self, q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector,
        factor: float, scaling: float, sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """Return each key's expected attention weight times the norm of its value, (H_kv, n), averaged over the group.

        q (H, m, d) are queries after RoPE at the positions `at` (m,). RoPE rotates the pairs of channels
        (i, i + d / 2) with the frequencies `inv_freq` (d / 2,) and the attention factor `factor`. Future queries get
        the mean rotation over the positions `ahead`. k and v are (H_kv, n, d). sinks (H,) are as in
        `CrystalStages.coattention`.
        """
        ...

    def best_tokens(self, values: Matrix, shares: IntVector, pinned: BoolMatrix, /) -> Selection:
        """Select `shares` (g,) tokens in the rows of `values` (g, n): first `pinned` tokens, then the highest values.

        On a tie the lower index is selected. NaN ranks below every value. All pinned tokens are kept, even if a row
        has more pinned tokens than its share.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """A backend: a name and the stage families that the backend implements. A missing family is None."""

    name: str
    crystal: CrystalStages | None = None
    breath: BreathStages | None = None
    diversity: DiversityStages | None = None
    nestedkv: NestedKVStages | None = None
    policies: PolicyStages | None = None
    takes: Callable[[DeviceArray], bool] | None = None
    """Function that returns True if the stages accept a tensor on its device. None: stages accept only NumPy arrays."""
    scores: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    """Score functions of published policies. A key is the name of a reference function with the same arguments."""
    tensors: Mapping[str, Callable[..., DeviceArray]] = field(default_factory=dict, hash=False)
    """Functions whose result stays on the device. The functions never copy values to the host.

    - Score functions of one layer, as in `scores`.
    - `top_units(score (g, n), shares (g,), protected (g, n))` returns a mask of the kept tokens.
    - `fill_units` is `top_units` with two more arguments after `score`: chunk size, and number of tokens in chunks.
    - `Adaptive` and `Competition` take a score (NaN for protected tokens), the number of tokens to share, the number of
      protected tokens of each set, and the safeguard. `Adaptive` and `Competition` return the share of each set."""

    def require_crystal(self) -> CrystalStages:
        """Return the CrystalCache stages.

        Raises:
            BackendUnavailable: if the backend lacks this family. The message names the families that the backend has.
        """
        return self._having("crystal", self.crystal)

    def require_breath(self) -> BreathStages:
        """Return the stages of decoding and later segments. Raises as `require_crystal`."""
        return self._having("breath", self.breath)

    def require_diversity(self) -> DiversityStages:
        """Return the stage of set-conditioned selection. Raises as `require_crystal`."""
        return self._having("diversity", self.diversity)

    def require_nestedkv(self) -> NestedKVStages:
        """Return the stage of NestedKV's score. Raises as `require_crystal`."""
        return self._having("nestedkv", self.nestedkv)

    def require_policies(self) -> PolicyStages:
        """Return the stages of the published policies. Raises as `require_crystal`."""
        return self._having("policies", self.policies)

    def _having(self, family: str, stages: Stages | None) -> Stages:
        if stages is None:
            has = [name for name in FAMILIES if getattr(self, name) is not None]
            raise BackendUnavailable(f"backend {self.name!r} has no stage family {family!r}; it has: {has or 'none'}")
        return stages


def resolve(backend: str | Backend) -> Backend:
    """Return the backend with the name `backend`. A `Backend` object is returned unchanged.

    A name is a built-in name ("numpy"), a target `module:ATTRIBUTE`, or an entry point in the group `kvspec.backends`.

    Raises:
        SpecError: if `backend` is neither a string nor a `Backend`, or if the name is unknown.
        BackendUnavailable: if the module cannot be imported. The message contains the reason.
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
