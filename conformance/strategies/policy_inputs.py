"""Random attention inputs of policies, observations as a session makes them, and the resulting kept sets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.engine.methods import decoded as decoded_sets
from reference.calibration import Calibration, Gates, Identity, Networks
from reference.policies import retain, retain_turn
from reference.policies.grammar import is_composition
from reference.policies.kvzip import rehearsal_chunks
from reference.policies.names import ENTRY_POINTS, NAMES, check_name, constants_of, constants_of_model, make_policy
from reference.triattention import band_statistics
from spec.budget import Budget
from spec.errors import SpecError
from spec.plugins import find_plugin
from spec.policy import LayerView, Observation, Policy, Rehearsal, Repeat
from spec.retention import Granularity, Retention

Kept = list[list[int]]
"""Kept positions of each kept set."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a policy: q, k and v of each layer, and the token ids.

    Rotary frequencies and output projections are needed by two policies.
    """

    layers: Sequence[LayerView]
    inv_freq: Array
    W_o: Sequence[Array]
    token_ids: Array
    factor: float = 1.0
    steps: int = 0
    """Number of last tokens that are decoded one by one."""
    positions: Array | None = None
    """Positions of the tokens in the text. None: 0 to n - 1."""
    whole: "Inputs | None" = None
    """Inputs of which these tokens are a part. A calibration is made from all tokens."""
    networks: Networks | None = None
    """Networks of KVzap. None: those of `networks_of`."""
    gates: Gates | None = None
    """Gates of Fast KVzip. None: those of `gates_of`."""
    indexes: Sequence[int] = ()
    """Indexes of the layers in the model. Empty: 0 to L - 1."""

    @property
    def of_model(self) -> list[int]:
        """Indexes of the layers in the model."""
        return list(self.indexes or range(len(self.layers)))

    @property
    def places(self) -> list[int]:
        """Positions of the tokens in the text."""
        return list(range(self.n)) if self.positions is None else [int(at) for at in self.positions]

    @property
    def n(self) -> int:
        return int(self.layers[0].k.shape[1])

    @property
    def H_kv(self) -> int:
        return len(self.layers[0].k)

    def cut(self, run: range) -> "Inputs":
        """Return consecutive tokens as a sequence, with their positions in the text."""
        part = slice(run.start, run.stop)
        layers = [
            replace(x, q=x.q[:, part], k=x.k[:, part], v=None if x.v is None else x.v[:, part],
                    hidden=None if x.hidden is None else x.hidden[part]) for x in self.layers
        ]
        places = np.arange(run.start, run.stop)
        return replace(self, layers=layers, token_ids=self.token_ids[part], positions=places, whole=self)


def drawn(seed: int, n: int | None = None, L: int | None = None, heads: tuple[int, int] | None = None) -> Inputs:
    """Return normal q, k and v of 1 to 26 tokens and 1 to 3 layers.

    A layer has 1 to 3 KV heads with 1 or 2 query heads each. A quarter of the seeds has a softcap.
    """
    rng = np.random.default_rng(seed)
    n = n or int(rng.integers(1, 27))
    L = L or int(rng.integers(1, 4))
    H_kv, G = heads or (int(rng.integers(1, 4)), int(rng.integers(1, 3)))
    d = 4
    softcap = None if seed % 4 else 5.0

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape)

    layers = [
        LayerView(2 * normal(H_kv * G, n, d), normal(H_kv, n, d), normal(H_kv, n, d), d**-0.5, softcap)
        for _ in range(L)
    ]
    W_o = [normal(H_kv * G, d, 3) for _ in range(L)]
    return Inputs(layers, np.array([1.0, 0.25]), W_o, rng.integers(0, 7, n), factor=1.0 + (seed % 3) / 4)


def with_sinks(inputs: Inputs, seed: int) -> Inputs:
    """Return the inputs. For a third of the seeds, the layers have attention sinks."""
    rng, H = np.random.default_rng(seed), len(inputs.layers[0].q)
    layers = [replace(view, sinks=2 * rng.standard_normal(H)) for view in inputs.layers]
    return inputs if seed % 3 else replace(inputs, layers=layers)


def without_sinks(inputs: Inputs) -> Inputs:
    return replace(inputs, layers=[replace(view, sinks=None) for view in inputs.layers])


def few_values(k: Array, seed: int) -> Array:
    """Return keys of nine directions in a plane, so that tokens tie. No key is zero."""
    result = np.zeros_like(k)
    result[..., :2] = np.random.default_rng(seed).integers(-1, 2, (*k.shape[:-1], 2)) + np.array([0, 3])
    return result


def same_keys(k: Array, seed: int) -> Array:
    """Return keys in which every KV head has the keys of the first head, in a different order for each head.

    Heads tie.
    """
    rng = np.random.default_rng(seed)
    return np.stack([k[0, rng.permutation(k.shape[1])] for _ in k])


def axes(k: Array, seed: int) -> Array:
    """Return unit vectors along an axis. Products with these vectors are exact, so equal keys tie in any arithmetic."""
    result = np.zeros_like(k)
    at = np.random.default_rng(seed).integers(0, k.shape[-1], k.shape[:-1])
    np.put_along_axis(result, at[..., None], 1.0, axis=-1)
    return result


KINDS: Mapping[str, Callable[[Array, int], Array]] = {
    "normal": lambda k, seed: k, "few values": few_values, "nearly equal": lambda k, seed: 1 + 1e-3 * k,
    "same keys": same_keys, "axes": axes, "long": lambda k, seed: 30 * k,
    "equal": lambda k, seed: np.broadcast_to(k[:, :1], k.shape).copy(), "short": lambda k, seed: k / 1024,
}
"""Functions that return keys, values or queries of a different kind, from normal ones and a seed."""


def altered(inputs: Inputs, kind: str, seed: int, values: str = "normal", queries: str = "normal") -> Inputs:
    """Return the inputs with keys, values and queries of different kinds."""
    layers = [
        replace(
            view, q=KINDS[queries](view.q, seed + at + 2), k=KINDS[kind](view.k, seed + at),
            v=KINDS[values](np.asarray(view.v), seed + at + 1),
        )
        for at, view in enumerate(inputs.layers)
    ]
    return replace(inputs, layers=layers)


def another(inputs: Inputs, seed: int) -> Inputs:
    """Return the inputs of a different sequence, with the same number of tokens and the same model."""
    rng = np.random.default_rng(seed)

    def normal(x: Any, size: float = 1.0) -> Array:
        result: Array = size * rng.standard_normal(np.shape(x))
        return result

    layers = [replace(x, q=normal(x.q, 2.0), k=normal(x.k), v=normal(x.v), repeats=None) for x in inputs.layers]
    return replace(inputs, layers=layers, token_ids=rng.permutation(inputs.token_ids))


def resized(inputs: Inputs, size: float) -> Inputs:
    """Return the inputs with queries, keys and values multiplied by `size`."""
    layers = [replace(x, q=size * x.q, k=size * x.k, v=size * np.asarray(x.v)) for x in inputs.layers]
    return replace(inputs, layers=layers)


def identity(inputs: Inputs) -> Identity:
    return Identity("drawn", inputs.inv_freq, inputs.factor)


def filters(inputs: Inputs) -> Array:
    """Return a filter for each layer and KV head, (L, H_kv, d): the first query of the head's group."""
    layers = (inputs.whole or inputs).layers
    return np.stack([view.q[:: len(view.q) // len(view.k), 0] for view in layers])


def hidden_states(view: LayerView) -> Any:
    """Return the hidden states (n, width) of a layer. Without any, the keys of all KV heads, joined for each token."""
    return view.k.swapaxes(0, 1).reshape(view.k.shape[1], -1) if view.hidden is None else view.hidden


def random_networks(L: int, H_kv: int, width: int, m: int | None) -> Networks:
    """Return networks of KVzap with random weights: with m inner units, or linear if m is None."""
    rng = np.random.default_rng([L, H_kv, width])
    if m is None:
        return Networks(rng.standard_normal((L, H_kv, width)), rng.standard_normal((L, H_kv)))
    W_1, b_1 = rng.standard_normal((L, m, width)), rng.standard_normal((L, m))
    return Networks(rng.standard_normal((L, H_kv, m)), rng.standard_normal((L, H_kv)), W_1, b_1)


def networks_of(inputs: Inputs) -> Networks:
    """Return networks that fit the inputs: linear maps if the number of tokens is even, else two maps with GELU."""
    if inputs.networks is not None:
        return inputs.networks
    width = hidden_states(inputs.layers[0]).shape[1]
    return random_networks(len(inputs.layers), inputs.H_kv, width, 5 if inputs.n % 2 else None)


def random_gates(L: int, H_kv: int, width: int, G: int = 2, r: int = 4, s: int = 3) -> Gates:
    """Return gates of Fast KVzip with random weights: r channels, s base keys, and G query heads on each KV head."""
    rng = np.random.default_rng([L, H_kv, width, G])
    shapes = {
        "W_q": (L, H_kv * G, r, width), "b_q": (L, H_kv * G, r), "W_k": (L, H_kv, r, width), "norm_q": (L, r),
        "norm_k": (L, r), "base": (L, H_kv, s, r), "bias": (L, H_kv * G),
    }
    return Gates(**{name: rng.standard_normal(shape) for name, shape in shapes.items()})


def gates_of(inputs: Inputs) -> Gates:
    """Return gates that fit the inputs."""
    if inputs.gates is not None:
        return inputs.gates
    width, G = hidden_states(inputs.layers[0]).shape[1], len(inputs.layers[0].q) // inputs.H_kv
    return random_gates(len(inputs.layers), inputs.H_kv, width, G)


def calibrated(inputs: Inputs) -> Calibration:
    """Return a calibration, as if the queries of the inputs were the unrotated queries of a calibration text."""
    if inputs.networks is not None or inputs.gates is not None:
        nothing = np.empty((len(inputs.layers), 1, 0))
        return Calibration(
            identity(inputs), tuple(inputs.of_model), nothing, nothing, networks=inputs.networks, gates=inputs.gates,
        )
    result = [band_statistics(view.q) for view in inputs.layers]
    mean, magnitude = (np.stack([pair[at] for pair in result]) for at in (0, 1))
    of_heads = np.stack([np.abs(view.k).max(axis=(1, 2)) for view in inputs.layers])
    layers = tuple(inputs.of_model)
    covariance = np.stack([[np.cov(q.T, bias=True) for q in view.q] for view in inputs.layers])
    shape = (*mean.shape, mean.shape[2])
    return Calibration(
        identity(inputs), layers, mean, magnitude, of_heads, filters=filters(inputs), networks=networks_of(inputs),
        covariance=covariance.reshape(shape), gates=gates_of(inputs),
    )


SENTENCE_ENDS = frozenset({0})
"""Token ids that end a sentence."""
TEMPLATE = ((1, 2, 3), (4, 5), (6,))
"""Token ids of the template of a rehearsal."""

_OF_MODEL: Mapping[str, Callable[[Inputs], Any]] = {
    "W_o": lambda inputs: dict(zip(inputs.of_model, inputs.W_o, strict=False)),
    "inv_freq": lambda inputs: inputs.inv_freq, "factor": lambda inputs: inputs.factor, "served": identity,
    "calibration": calibrated,
    "sentence_ends": lambda inputs: SENTENCE_ENDS, "template": lambda inputs: TEMPLATE,
}


def model_constants(name: str, inputs: Inputs) -> dict[str, Any]:
    """Return the constants of a policy that depend on the model, from the inputs."""
    taken = (constants_of(name) | constants_of_model(name)) & _OF_MODEL.keys()
    return {constant: _OF_MODEL[constant](inputs) for constant in taken}


def named(name: str, inputs: Inputs, method: str = "") -> Policy:
    """Return a policy by its name or `module:ATTRIBUTE`. Constants that depend on the model are taken from the inputs.

    If `method` is given, the attribute may be a function. The function receives the method's model constants and
    returns the policy.

    Raises:
        SpecError: if the name is unknown, the module cannot be loaded, or the function returns no policy.
    """
    if method and name not in NAMES and not is_composition(name):
        created = find_plugin("policy", name, ENTRY_POINTS, NAMES).value
        if callable(created) and not isinstance(created, Policy):
            result = created(**model_constants(method, inputs))
            if isinstance(result, Policy):
                return result
            raise SpecError("policy", name, f"must return a Policy; returns a {type(result).__name__}")
    return make_policy(check_name(name, "policy"), model_constants(name, inputs))


def groups_of(policy: Policy, inputs: Inputs) -> int:
    """Return the number of kept sets of the policy."""
    L = len(inputs.layers)
    return {Granularity.MODEL: 1, Granularity.LAYER: L, Granularity.HEAD: L * inputs.H_kv}[policy.granularity]


def until_step(inputs: Inputs, step: int) -> Inputs:
    """Return the inputs at the end of decode step `step`, or at the end of the prompt if `step` is 0."""
    n = inputs.n - inputs.steps + step
    layers = [replace(x, q=x.q[:, :n], k=x.k[:, :n], v=None if x.v is None else x.v[:, :n]) for x in inputs.layers]
    return replace(inputs, layers=layers, token_ids=inputs.token_ids[:n], steps=step)


def repeats(inputs: Inputs, view: LayerView, rehearsal: Rehearsal) -> tuple[Repeat, ...]:
    """Return the repetitions of the prompt, chunk by chunk, for a layer without any.

    The queries of the repeated tokens are queries of some tokens of the prompt. The keys are twice the keys of these
    tokens.
    """
    if view.repeats is not None:
        return view.repeats
    result = []
    for start, stop, ids in rehearsal_chunks(inputs.token_ids, rehearsal):
        like = (start + 5 * np.arange(len(ids)) + ids) % inputs.n
        result.append(Repeat(start, stop, view.q[:, like], 2.0 * view.k[:, like], (1 + like).astype(np.float64)))
    return tuple(result)


def in_chunks(inputs: Inputs, rehearsal: Rehearsal) -> Inputs:
    """Return the inputs with repetitions of the prompt in the chunks of this rehearsal.

    The chunks of a policy may differ.
    """
    layers = [replace(view, repeats=repeats(inputs, view, rehearsal)) for view in inputs.layers]
    return replace(inputs, layers=layers)


def observation(policy: Policy, inputs: Inputs) -> Observation:
    """Return the observation that a session would make: the layers, query rows and ids that the scorer needs."""
    needs, layers = policy.scorer.needs, inputs.of_model
    by_index = dict(zip(layers, inputs.layers, strict=True))
    first = 0 if needs.query_rows is None else max(0, inputs.n - needs.query_rows - inputs.steps)
    watched = {"all": layers, "observed": layers[needs.observed :][:1], "none": ()}[needs.layers]
    views = {at: replace(by_index[at], q=by_index[at].q[:, first:]) for at in watched}
    if needs.rehearsal is not None:
        views = {
            at: replace(view, repeats=repeats(inputs, by_index[at], needs.rehearsal)) for at, view in views.items()
        }
    if needs.hidden:
        views = {at: replace(view, hidden=hidden_states(view)) for at, view in views.items()}
    ids = inputs.token_ids if needs.token_ids else None
    return Observation(inputs.n, groups_of(policy, inputs), ids, views)


def decided_in_turn(policy: Policy, inputs: Inputs, live: Array, seen: int, B: int) -> Kept:
    """Return the kept positions at the end of a later turn.

    Every kept set stores the tokens `live` of the inputs before the decision.
    """
    rows = policy.scorer.needs.query_rows
    shown = observation(policy, inputs)
    asking = inputs.layers[0].q.shape[1]
    first = 0 if rows is None else max(0, asking - rows)
    layers = {at: replace(view, q=inputs.layers[at].q[:, first:]) for at, view in shown.layers.items()}
    result = retain_turn(
        policy, Budget(count=B), [live] * shown.groups, [replace(shown, seen=seen, layers=layers, positions=live)],
    )
    return [result.group(g).tolist() for g in range(result.groups)]


def retained(policy: Policy, inputs: Inputs, B: int) -> Retention:
    """Return the decision at the end of the prompt."""
    return retain(policy, Budget(count=B), observation(policy, inputs))


def decoding(policy: Policy, inputs: Inputs, B: int) -> Iterator[Kept]:
    """Yield the kept sets after the prompt and after each decode step."""
    return decoded_sets(policy, inputs.layers, groups_of(policy, inputs), B, inputs.n - inputs.steps)


def decided(policy: Policy, inputs: Inputs, B: int) -> Kept:
    """Return the kept sets, after the decode steps if the inputs have steps."""
    if inputs.steps:
        *_, last = decoding(policy, inputs, B)
        return last
    result = retained(policy, inputs, B)
    return [result.group(g).tolist() for g in range(result.groups)]
