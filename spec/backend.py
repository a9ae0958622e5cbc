"""Backends. A `Backend` contains the stages that a backend implements. `resolve` returns the backend with a given name.

The section "Calls" of spec/implementing.md specifies array layouts, results, memory and threads for all stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from spec.arrays import BoolMatrix, BoolVector, IntVector, Matrix, Vector
from spec.decode import LiveTrunks, TrunkWeights
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.plugins import load, load_from_folder, target_of
from spec.policy import DeviceArray, Selection
from spec.records import CoAttention, CrystalRetention, Dissolution, TrunkGraph, Trunks

__all__ = [
    "BUILT_IN", "ENTRY_POINTS", "Backend", "BreathStages", "CrystalStages", "DiversityStages", "NestedKVStages",
    "PolicyStages", "owner_of", "resolve",
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
    """Stages S1 to S6 of CrystalCache. The stages take arrays, return records, and change no argument in place.

    A stage whose docstring has no section `Raises` may assume valid input, because the public functions check the
    input first (spec/implementing.md). Stages of kvspec's backends check that the arguments fit each other.
    """

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None, /,
    ) -> CoAttention:
        """Stage S1: compute the salience and the neighbours of each token from the attention of one layer.

        k (H_kv, live, d) contains the keys of the cached tokens, and `positions` (live,) the positions of these
        tokens. q (H, n, d) contains the queries of the last n cached tokens.

        lse (H, n) is the natural logarithm of the sum of exp(logit) over the keys that a query attends to. The key of
        the query's token is included. The logits in lse are scaled and soft-capped. lse is float32 or float64, whatever
        the dtype of q and k. A backend may use the given lse or compute lse again. Both ways give the same result. The
        caller must compute the given lse from the q, k, scaling, softcap and mask of this call. If lse belongs to
        different inputs, the attention weights of a row are scaled by a wrong factor, and no check detects the error.

        sinks (H,) contains one learned logit for each query head. The logit is neither scaled nor soft-capped, and
        belongs to no token. The softmax denominator of every query includes exp(sink). lse excludes the sinks.

        Raises:
            SpecError: if q, k, lse or sinks have a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """Stage S3: return the impact M_i of each token, (n,)."""
        ...

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        """Stage S2: return the trunks. The mask `ends` (n,) is True for each token that ends a sentence."""
        ...

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        """Stage S4 for a prompt: return the trunk graph. For a later segment see `BreathStages.segment_graph`."""
        ...

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """Stage S5: return the score of each trunk, (m,). The score of a protected trunk is NaN."""
        ...

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        """Stage S6: evict tokens from the unprotected trunks with the lowest scores, until `budget` tokens are kept.

        `impact` has one value for each token, and `protected` one value for each trunk. `budget` is the number B of
        tokens (Eq. 30).
        """
        ...


@runtime_checkable
class BreathStages(Protocol):
    """Stages of CrystalCache for decoding and for later segments. The stages change no argument in place."""

    def inverse_key_norms(self, k: DeviceArray, /) -> Vector:
        """Return the mean of 1 / ||k|| over the KV heads for each token, (n,). The keys are k (H_kv, n, d).

        The mean is inf if a key of the token is zero.

        Raises:
            SpecError: if the keys have a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, counts: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """Stage S3: return the impact M_i of each token, (n,), whose id has occurred `counts` (n,) times so far."""
        ...

    def decay(self, D: Vector, trunk_impact: Vector, parameters: CrystalCacheParameters, /) -> Vector:
        """Return D of each trunk, (m,), after the decay of one decode step (Eq. 36)."""
        ...

    def activation(self, live: LiveTrunks, parameters: CrystalCacheParameters, /) -> BoolVector:
        """Return a mask (m,) that is True for each active trunk (Section 3.8(a))."""
        ...

    def resonance(
        self, D: Vector, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """Return D of each trunk, (m,), after every active trunk has sent a pulse (Equations 37 and 38)."""
        ...

    def hebbian(self, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /) -> TrunkWeights:
        """Return W after the Hebbian update and after the removal of weak edges (Equations 39 and 40)."""
        ...

    def segment_graph(
        self, coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights,
        parameters: CrystalCacheParameters, /,
    ) -> TrunkWeights:
        """Stage S4 for a later segment: return W with one more row at the end for each trunk of the segment.

        `bounds` (m + 1,) contains the first live position of each trunk, oldest trunk first. The last entry of `bounds`
        is the position after the last token. `sizes` (m,) contains the number of live tokens of each trunk.
        """
        ...

    def segment_crystallization(self, degree: Vector, old: int, parameters: CrystalCacheParameters, /) -> Vector:
        """Return D (Eq. 27) of all trunks except the first `old` trunks. `degree` (m,) contains all trunks' degrees."""
        ...


@runtime_checkable
class DiversityStages(Protocol):
    """Set-conditioned selection. The stage takes and returns arrays, and changes no argument in place."""

    def diverse(self, s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float, /) -> IntVector:
        """Return ascending indices of the k tokens that Algorithm 1 selects. s (n,) are scores, V (n, d) signatures.

        The k tokens always include the tokens for which `retained` (n,) is True.

        Raises:
            SpecError: if lam is negative or not finite, or if k is outside [number of retained tokens, n]. Also if the
                shapes do not match, or if a signature is not finite.
        """
        ...


@runtime_checkable
class NestedKVStages(Protocol):
    """NestedKV's score. The stage takes keys, returns scores, and changes no argument in place."""

    def anomaly_score(self, k: DeviceArray, parameters: NestedKVParameters, /) -> Matrix:
        """Return the score a* (H_kv, n), in [0, 1], of one layer's keys k (H_kv, n, d).

        The score is defined by Equations 3 to 15 and Appendix A. The formula is the same for the first tokens of the
        prompt (attention sinks) and for all later tokens.

        Raises:
            SpecError: if the keys have a wrong shape, type or value, or if a key is zero.
        """
        ...


@runtime_checkable
class PolicyStages(Protocol):
    """Slow parts of the published policies. The stages take and return arrays, and change no argument in place."""

    def received_attention(
        self, q: DeviceArray, k: DeviceArray, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """Return each key's attention weight, (H_kv, n), summed over queries and over the query heads of the KV head.

        k (H_kv, n, d) contains the keys of n tokens, and q (H, m, d) the queries of the last m tokens. Attention is
        causal. For sinks (H,) see `CrystalStages.coattention`.
        """
        ...

    def largest_attention(
        self, q: DeviceArray, k: DeviceArray, norms: Vector, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """Divide each attention weight by the norm of the query's token. Return each key's largest quotient, (H, n).

        k (H_kv, n, d) contains the keys of n tokens, and q (H, m, d) the queries of the last m tokens. Attention is
        causal. norms (m,) contains the positive norms of the last m tokens. For sinks (H,) see
        `CrystalStages.coattention`.
        """
        ...

    def expected_attention(
        self, q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector,
        factor: float, scaling: float, sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        """Return the expected attention weight of each token's key times the norm of the token's value, (H_kv, n).

        The expected weight is first averaged over the query heads of the KV head, then multiplied by the norm. q
        (H, m, d) contains queries after RoPE at the positions `at` (m,). RoPE rotates the pairs of channels
        (i, i + d / 2) with the frequencies `inv_freq` (d / 2,) and the attention factor `factor`. Future queries are
        rotated by the mean rotation over the positions `ahead`. k and v are (H_kv, n, d). For sinks (H,) see
        `CrystalStages.coattention`.
        """
        ...

    def best_tokens(self, values: Matrix, shares: IntVector, pinned: BoolMatrix, /) -> Selection:
        """Select `shares[r]` tokens in each row r of `values` (g, n): first the pinned tokens, then the highest values.

        If two values are equal, the token with the lower index is selected first. NaN ranks below every value. All
        pinned tokens are selected, even if a row has more than `shares[r]` pinned tokens.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """A backend: a name, and one field for each family of stages. The field is None if the backend lacks the family."""

    name: str
    crystal: CrystalStages | None = None
    breath: BreathStages | None = None
    diversity: DiversityStages | None = None
    nestedkv: NestedKVStages | None = None
    policies: PolicyStages | None = None
    accepts_tensor: Callable[[DeviceArray], bool] | None = None
    """Function that returns True if the stages accept a given tensor without a copy to the host.

    If `accepts_tensor` is None, the stages accept only NumPy arrays.
    """
    scores: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    """Score functions of published policies, by name. A reference function has the same name and arguments."""
    tensors: Mapping[str, Callable[..., DeviceArray]] = field(default_factory=dict, hash=False)
    """Functions whose result stays on the device. The functions never copy values to the host.

    - Functions that score one layer. The names are names of `scores`.
    - `inverse_key_norms` returns the result of `BreathStages.inverse_key_norms`.
    - `top_units(score (g, n), shares (g,), protected (g, n))` returns a mask of the kept tokens.
    - `fill_units(score, c, past, shares, protected)` also returns such a mask. Chunks of c tokens cover `past` tokens.
    - `Adaptive` and `Competition` take a score (NaN for protected tokens), the number of tokens to divide among the
      sets, the number of protected tokens in each set, and the safeguard. Both functions return the share of each
      set."""
    prefill: Callable[..., CrystalRetention] | None = None
    """Function that runs the stages S1 to S6 on a prompt and reads the device once, or None.

    The arguments are q, k, token_ids (n,), a mask `ends` (n,) of the tokens that end a sentence, a mask `protected`
    (n,) of the protected tokens, the budget B in tokens, and then parameters, scaling, softcap, lse and sinks as for
    `CrystalStages.coattention`. The stages of `crystal` give the
    same retention: if you replace stages of `crystal`, replace `prefill` too, or set it to None. `inverse_norms` of the
    retention has the results of `BreathStages.inverse_key_norms`. The function may have an attribute `rows`: a function
    of the arguments of several prompts that returns all retentions and reads the device once."""
    decoding: "Backend | None" = None
    """Backend that sessions use for data of the host, or None if sessions use this backend for that data too.

    Between two decisions, the state of a sequence is on the host, and so are the signatures of set-conditioned
    selection. Stages that copy such arrays to a device make the host wait at each stage. A backend of such stages gives
    here a backend whose stages S2 to S6, `breath` and `diversity` run on the host. If you replace stages of `crystal`,
    `breath` or `diversity`, replace `decoding` too, or set it to None."""

    def for_decoding(self) -> "Backend":
        """Return the backend of decode steps, later segments and set-conditioned selection: `decoding` or itself."""
        return self if self.decoding is None else self.decoding

    def require_crystal(self) -> CrystalStages:
        """Return the CrystalCache stages.

        Raises:
            BackendUnavailable: if the backend lacks the CrystalCache stages. The message lists the backend's families.
        """
        return self._having("crystal", self.crystal)

    def require_breath(self) -> BreathStages:
        """Return the stages for decoding and segments. Raises BackendUnavailable if the backend lacks the stages."""
        return self._having("breath", self.breath)

    def require_diversity(self) -> DiversityStages:
        """Return the stage of set-conditioned selection. Raises BackendUnavailable if the backend lacks the stage."""
        return self._having("diversity", self.diversity)

    def require_nestedkv(self) -> NestedKVStages:
        """Return the stage of NestedKV's score. Raises BackendUnavailable if the backend lacks the stage."""
        return self._having("nestedkv", self.nestedkv)

    def require_policies(self) -> PolicyStages:
        """Return the stages of the published policies. Raises BackendUnavailable if the backend lacks the stages."""
        return self._having("policies", self.policies)

    def _having(self, family: str, stages: Stages | None) -> Stages:
        if stages is None:
            has = [name for name in FAMILIES if getattr(self, name) is not None]
            raise BackendUnavailable(f"backend {self.name!r} has no stage family {family!r}; it has: {has or 'none'}")
        return stages


def owner_of(function: Callable[..., Any], other: str = "") -> str:
    """Return the name of the built-in backend that contains a function or class. For all other code, return `other`."""
    while isinstance(function, partial):
        function = function.func
    module = f"{getattr(function, '__module__', '')}."
    for name, target in BUILT_IN.items():
        if module.startswith(target.partition(":")[0].removesuffix("backend")):
            return name
    return other


def resolve(backend: str | Backend) -> Backend:
    """Return the backend with the given name. If `backend` is a `Backend` object, the object is returned unchanged.

    A name is a built-in name ("numpy"), a target `module:ATTRIBUTE`, or an entry point in the group `kvspec.backends`.

    Raises:
        SpecError: if `backend` is neither a string nor a `Backend`, or if the name is unknown.
        BackendUnavailable: if the backend's module cannot be imported. The message contains the reason.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise SpecError("backend", backend, "must be a name, 'module:ATTRIBUTE' or a spec.backend.Backend")
    target = BUILT_IN.get(backend) or target_of("backend", backend, ENTRY_POINTS, BUILT_IN)
    try:
        engine = (load if backend in BUILT_IN else load_from_folder)(target).value
    except ImportError as error:
        remedy = f"; pip install 'kvspec[{backend}]' brings what it needs" if backend in BUILT_IN else ""
        raise BackendUnavailable(f"backend {backend!r} ({target}) cannot be loaded here: {error}{remedy}") from error
    if not isinstance(engine, Backend):
        raise SpecError("backend", backend, f"must be a spec.backend.Backend; the type is {type(engine).__name__}")
    return engine
