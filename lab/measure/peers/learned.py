"""Kept sets of policies with a calibration: random filters, statistics, networks and gates, for presses and kvspec."""

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from conformance.strategies.policy_inputs import random_gates, random_networks
from lab.measure.peers.differences import Kept, behind_sinks, budget, run, shared
from lab.measure.peers.inputs import Array, D, Inputs
from reference import policies
from reference.calibration import Calibration, Gates, Identity, Networks
from spec.policy import LayerView, Observation

RECENT = 1
"""Number of recent tokens that Fast KVzip keeps of at most 99 tokens."""


@dataclass(frozen=True)
class Learned:
    """Random calibration of all layers, and the hidden states of the prompt."""

    inputs: Inputs

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of layers, query heads and KV heads."""
        return self.inputs.constants.layers, len(self.inputs.raw_q), len(self.inputs.k)

    @cached_property
    def hidden(self) -> Array:
        """Hidden states (L, n, width). In the input's layer they are the queries before rotation, head by head."""
        L, H, _ = self.sizes
        result = np.random.default_rng(self.inputs.seed + 3).standard_normal((L, self.inputs.n, H * D))
        result[self.inputs.layer] = self.inputs.raw_q.transpose(1, 0, 2).reshape(self.inputs.n, -1)
        return result

    @cached_property
    def calibration(self) -> Calibration:
        (L, H, H_kv), rng = self.sizes, np.random.default_rng(self.inputs.seed + 4)
        roots = rng.standard_normal((L, H, D, D))
        return Calibration(
            self.identity, tuple(range(L)), rng.standard_normal((L, H, D)), np.empty((L, H, 0)),
            filters=rng.standard_normal((L, H_kv, D)), networks=self.networks,
            covariance=roots @ roots.swapaxes(2, 3) / D, gates=self.gates,
        )

    @property
    def identity(self) -> Identity:
        return Identity("", self.inputs.inv_freq)

    @property
    def networks(self) -> Networks:
        """Networks of KVzap: linear for an even number of tokens, else with 5 inner units."""
        L, H, H_kv = self.sizes
        return random_networks(L, H_kv, H * D, 5 if self.inputs.n % 2 else None)

    @property
    def gates(self) -> Gates:
        L, H, H_kv = self.sizes
        return random_gates(L, H_kv, H * D, H // H_kv)

    @cached_property
    def head_scores(self) -> Array:
        """Return the scores (L, H_kv) by which DuoAttention chooses full heads."""
        L, _, H_kv = self.sizes
        return np.random.default_rng(self.inputs.seed + 5).random((L, H_kv))

    @property
    def layer_calibration(self) -> Calibration:
        """Return the calibration of the input's layer alone, which is layer 0 of the comparison."""
        taken, at = self.calibration, [self.inputs.layer]
        assert taken.filters is not None
        assert taken.covariance is not None
        networks = Networks(**{name: x[at] for name, x in self.networks.arrays.items()})
        return Calibration(
            self.identity, (0,), taken.mean[at], taken.magnitude[at], filters=taken.filters[at], networks=networks,
            covariance=taken.covariance[at],
        )


def q_filters(inputs: Inputs, readings: Set[str]) -> Kept:
    known = Learned(inputs)
    return run(policies.q_filters(known.layer_calibration, known.identity), inputs, budget(inputs, readings))


def kvzap(inputs: Inputs, readings: Set[str]) -> Kept:
    known = Learned(inputs)
    policy = policies.kvzap(known.layer_calibration, known.identity)
    view = replace(inputs.view, hidden=known.hidden[inputs.layer])
    return run(policy, inputs, budget(inputs, readings), view)


def expected_attention_stats(inputs: Inputs, readings: Set[str]) -> Kept:
    known, given = Learned(inputs), inputs.constants
    host = policies.expected_attention_stats(known.layer_calibration, known.identity, given.sinks, given.future)
    return behind_sinks(host, inputs, readings)


def fast_kvzip(inputs: Inputs, readings: Set[str]) -> Kept:
    """Return the kept sets of all layers."""
    known, (L, _, H_kv), sinks = Learned(inputs), Learned(inputs).sizes, inputs.constants.sinks
    host = policies.fast_kvzip(known.calibration, known.identity, sinks, RECENT)
    views = {
        at: LayerView(inputs.raw_q[:, :0], inputs.k, None, 1.0, None, hidden=x) for at, x in enumerate(known.hidden)
    }
    protected = int(host.protection(inputs.n).sum())
    return shared(host, inputs, Observation(inputs.n, L * H_kv, None, views), readings, protected)
