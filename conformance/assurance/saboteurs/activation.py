"""Decode: wrong readings of key norms, activation, pulses and the Hebbian update."""

from dataclasses import replace

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.activation import active_trunks, inverse_key_norms, normalised_inverse_norms
from reference.crystalcache.hebbian import hebbian
from reference.crystalcache.resonance import hop, pulses, raised, resonance
from spec.decode import LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters

__all__: list[str] = []


@instead_of(inverse_key_norms, "CC-KEY-NORM")
def inverse_of_the_mean(k: Array) -> Array:
    """The inverse of the mean norm over heads."""
    norm = np.sqrt((k.astype(np.float64) ** 2).sum(axis=2)).mean(axis=0)
    with np.errstate(divide="ignore"):
        inverse: Array = 1.0 / norm
    return inverse


@instead_of(inverse_key_norms, "CC-KEY-NORM")
def norm_of_all_heads(k: Array) -> Array:
    """The heads' keys are one long key."""
    with np.errstate(divide="ignore"):
        inverse: Array = 1.0 / np.sqrt((k.astype(np.float64) ** 2).sum(axis=(0, 2)))
    return inverse


@instead_of(inverse_key_norms, "CC-KEY-NORM")
def in_the_keys_precision(k: Array) -> Array:
    """Squares are summed in the keys' own type."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse: Array = (1.0 / np.sqrt((k * k).sum(axis=2))).mean(axis=0).astype(np.float64)
    return inverse


@instead_of(inverse_key_norms, "CC-KEY-NORM")
def squares_beyond_float64(k: Array) -> Array:
    """No key is scaled: squares overflow, and underflow."""
    wide = k.astype(np.float64)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        inverse: Array = (1.0 / np.sqrt((wide * wide).sum(axis=2))).mean(axis=0)
    return inverse


@instead_of(normalised_inverse_norms, "CC-ETA")
def a_zero_key_is_never_active(inverse_norms: Array) -> Array:
    """A zero key has eta 0."""
    eta = normalised_inverse_norms(inverse_norms)
    return np.where(np.isinf(inverse_norms), 0.0, eta)


@instead_of(normalised_inverse_norms, "CC-ETA")
def not_normalised(inverse_norms: Array) -> Array:
    """Inverse norms are compared as they are."""
    return np.minimum(inverse_norms, 1.0)


@instead_of(active_trunks, "CC-ACTIVATION")
def half_is_enough(live: LiveTrunks, theta_act: float) -> Array:
    """Half of the members make a trunk active."""
    return np.add.reduceat(np.append(above(live, theta_act), 0), live.offsets)[:-1] * 2 >= live.sizes


@instead_of(active_trunks, "CC-ACTIVATION")
def the_mean_decides(live: LiveTrunks, theta_act: float) -> Array:
    """A trunk is active when its members' mean eta exceeds the threshold."""
    eta = np.append(normalised_inverse_norms(live.inverse_norms), 0.0)
    return np.add.reduceat(eta, live.offsets)[:-1] / live.sizes > theta_act


@instead_of(active_trunks, "CC-ACTIVATION")
def at_the_threshold_too(live: LiveTrunks, theta_act: float) -> Array:
    """eta equal to the threshold counts."""
    return active_trunks(live, float(np.nextafter(theta_act, -1.0)))


def above(live: LiveTrunks, theta_act: float) -> Array:
    return (normalised_inverse_norms(live.inverse_norms) > theta_act).astype(np.int64)


@instead_of(hop, "CC-PULSE")
def the_first_way_in(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: CrystalCacheParameters,
) -> dict[int, float]:
    """Of several senders the one that is found first counts."""
    reached: dict[int, float] = {}
    for g, pulse in frontier.items():
        for h, sent in hop({g: pulse}, visited, W, parameters).items():
            reached.setdefault(h, sent)
    return reached


@instead_of(hop, "CC-PULSE")
def all_ways_in(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: CrystalCacheParameters,
) -> dict[int, float]:
    """The pulses of several senders are added."""
    reached: dict[int, float] = {}
    for g, pulse in frontier.items():
        for h, sent in hop({g: pulse}, visited, W, parameters).items():
            reached[h] = reached.get(h, 0.0) + sent
    return reached


@instead_of(hop, "CC-PULSE")
def no_visited_set(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: CrystalCacheParameters,
) -> dict[int, float]:
    """A pulse returns to where it came from."""
    return hop(frontier, set(), W, parameters)


@instead_of(hop, "CC-PULSE")
def a_pulse_at_tau_ends(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: CrystalCacheParameters,
) -> dict[int, float]:
    """A pulse equal to tau_pulse is dropped."""
    return {h: x for h, x in hop(frontier, visited, W, parameters).items() if x > parameters.tau_pulse}


@instead_of(pulses, "CC-PULSE")
def the_source_receives_nothing(source: int, W: TrunkWeights, parameters: CrystalCacheParameters) -> Array:
    """An active trunk does not renew itself."""
    received = pulses(source, W, parameters)
    received[source] = 0.0
    return received


@instead_of(pulses, "CC-PULSE")
def a_weak_pulse_marks_its_trunk(source: int, W: TrunkWeights, parameters: CrystalCacheParameters) -> Array:
    """Whom a pulse below tau_pulse was meant for counts as visited."""
    received, frontier, visited = one_at(source, W), {source: 1.0}, {source}
    for _ in range(parameters.max_hops):
        met = hop(frontier, visited, W, replace(parameters, tau_pulse=0.0))
        frontier = hop(frontier, visited, W, parameters)
        visited.update(met)
        received[list(frontier)] = list(frontier.values())
    return received


@instead_of(pulses, "CC-PULSE")
def a_weak_pulse_arrives(source: int, W: TrunkWeights, parameters: CrystalCacheParameters) -> Array:
    """A pulse below tau_pulse is delivered, and only goes no further."""
    received, frontier, visited = one_at(source, W), {source: 1.0}, {source}
    for _ in range(parameters.max_hops):
        met = hop(frontier, visited, W, replace(parameters, tau_pulse=0.0))
        frontier = hop(frontier, visited, W, parameters)
        visited.update(frontier)
        for h, pulse in met.items():
            received[h] = max(pulse, received[h])
    return received


def one_at(source: int, W: TrunkWeights) -> Array:
    received = np.zeros(len(W.indptr) - 1)
    received[source] = 1.0
    return received


@instead_of(raised, "CC-RAISE")
def without_diminishing_returns(D: Array, pulse: Array, alpha_res: float) -> Array:
    """D rises by alpha_res p, whatever is missing."""
    return np.minimum(1.0, D + alpha_res * pulse)


@instead_of(raised, "CC-RAISE")
def towards_the_pulse(D: Array, pulse: Array, alpha_res: float) -> Array:
    """D is drawn towards the pulse where that is higher."""
    return np.where(pulse > D, D + alpha_res * (pulse - D), D)


@instead_of(resonance, "CC-RESONANCE")
def the_strongest_pulse_alone(
    D: Array, W: TrunkWeights, active: Array, parameters: CrystalCacheParameters,
) -> Array:
    """Eq. 38 is applied once, with the strongest of all pulses."""
    received = [pulses(source, W, parameters) for source in np.flatnonzero(active).tolist()]
    return raised(D, np.max(received, axis=0), parameters.alpha_res) if received else D


@instead_of(resonance, "CC-RESONANCE")
def one_search_for_all(D: Array, W: TrunkWeights, active: Array, parameters: CrystalCacheParameters) -> Array:
    """All sources share one visited set: what the first reached, the next does not."""
    taken = np.zeros(len(D), dtype=np.bool_)
    for source in np.flatnonzero(active).tolist():
        received = np.where(taken, 0.0, pulses(source, W, parameters))
        taken |= received > 0
        D = raised(D, received, parameters.alpha_res)
    return D


@instead_of(hebbian, "CC-HEBB")
def pruned_before_the_update(
    W: TrunkWeights, active: Array, parameters: CrystalCacheParameters,
) -> TrunkWeights:
    """Edges are pruned by the weight that they had."""
    return hebbian(W, active, replace(parameters, tau_edge=0.0))


@instead_of(hebbian, "CC-HEBB")
def one_active_end_is_enough(W: TrunkWeights, active: Array, parameters: CrystalCacheParameters) -> TrunkWeights:
    """An edge grows when either of its trunks is active."""
    row = np.repeat(np.arange(len(active)), np.diff(W.indptr))
    either = active[row] | active[W.indices]
    weights = np.where(either, np.minimum(1.0, W.weights + parameters.eta_Hebb), parameters.gamma_decay * W.weights)
    nobody = np.zeros_like(active)
    return hebbian(W._replace(weights=weights), nobody, replace(parameters, gamma_decay=1.0))


@instead_of(hebbian, "CC-HEBB")
def growth_above_one(W: TrunkWeights, active: Array, parameters: CrystalCacheParameters) -> TrunkWeights:
    """A weight above 1 stays above 1."""
    found = hebbian(W, active, replace(parameters, tau_edge=0.0))
    weights = np.where((W.weights > 1) & (found.weights == 1), W.weights, found.weights)
    return hebbian(found._replace(weights=weights), np.zeros_like(active), replace(parameters, gamma_decay=1.0))


@instead_of(hebbian, "CC-HEBB")
def an_edge_at_tau_stays(W: TrunkWeights, active: Array, parameters: CrystalCacheParameters) -> TrunkWeights:
    """Only what falls below tau_edge is pruned."""
    low = max(0.0, float(np.nextafter(parameters.tau_edge, -1.0)))
    return hebbian(W, active, replace(parameters, tau_edge=low))


@instead_of(hebbian, "CC-HEBB")
def an_edge_is_made(W: TrunkWeights, active: Array, parameters: CrystalCacheParameters) -> TrunkWeights:
    """Trunks that are active together are joined by a new edge of weight eta_Hebb."""
    m = len(active)
    dense = np.zeros((m, m))
    dense[np.repeat(np.arange(m), np.diff(W.indptr)), W.indices] = W.weights
    new = (dense == 0) & active[:, None] & active[None, :] & ~np.eye(m, dtype=np.bool_)
    if parameters.eta_Hebb == 0 or not new.any():
        return hebbian(W, active, parameters)
    row, column = np.nonzero((dense > 0) | new)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=m))]).astype(np.int64)
    return hebbian(TrunkWeights(indptr, column, dense[row, column]), active, parameters)


@instead_of(hebbian, "CC-HEBB")
def once_for_each_direction(W: TrunkWeights, active: Array, parameters: CrystalCacheParameters) -> TrunkWeights:
    """An edge is updated twice, from either end."""
    return hebbian(hebbian(W, active, replace(parameters, tau_edge=0.0)), active, parameters)
