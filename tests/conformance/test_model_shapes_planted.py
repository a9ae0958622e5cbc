"""Backends that are wrong only at shapes of real models.

A test of the suite detects each error, in most cases in a quick run.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from conformance.suite import test_model_shapes as quick
from conformance.suite import test_policy_stages as stages
from conformance.suite import test_scale_policies as scale
from conformance.suite.test_scale_policies import SOFT
from reference import nestedkv as nk
from reference.backend import BACKEND
from reference.directions import unit_keys
from tests.engine.planted import Over

pytestmark = pytest.mark.law("the-proof-has-teeth")


class ShortPrompts(Over):
    """NestedKV with int16 positions of the keys."""

    def anomaly_score(self, k: Any, p: Any, /) -> Any:
        actual = self._right.anomaly_score(k, p)
        return np.where(np.arange(k.shape[1]) < 2**15, actual, 0.0)


class HalfSums(Over):
    """Backend that sums 64 and more queries in float16."""

    def received_attention(self, q: Any, k: Any, scaling: float, softcap: Any, sinks: Any = None, /) -> Any:
        if q.shape[1] < 64:
            return self._right.received_attention(q, k, scaling, softcap, sinks)
        rows = [self._right.largest_attention(q[:, : at + 1][:, -1:], k[:, : k.shape[1] - q.shape[1] + at + 1],
                                              np.ones(1), scaling, softcap, sinks) for at in range(q.shape[1])]
        actual = np.zeros((len(q), k.shape[1]), np.float16)
        for row in rows:
            actual[:, : row.shape[1]] += row.astype(np.float16)
        return actual.reshape(len(k), -1, k.shape[1]).sum(axis=1).astype(np.float64)


class GroupsOfPowersOfTwo(Over):
    """Backend with groups of query heads that are rounded up to a power of two."""

    def received_attention(self, q: Any, k: Any, *given: Any) -> Any:
        group = 1 << (len(q) // len(k) - 1).bit_length()
        shared = np.minimum(np.arange(len(q)) // group, len(k) - 1)
        each = self._right.received_attention(q, k[shared], *given)
        return np.stack([each[shared == head].sum(axis=0) for head in range(len(k))])


class FourKVHeads(Over):
    """Backend in which KV heads after the fourth have the scores of the fourth."""

    def anomaly_score(self, k: Any, p: Any, /) -> Any:
        return self._right.anomaly_score(k, p)[np.minimum(np.arange(len(k)), 3)]


class RunningSums(Over):
    """NestedKV whose windows are differences of running sums in float32."""

    def anomaly_score(self, k: Any, p: Any, /) -> Any:
        unit = unit_keys(np.asarray(k, np.float64))
        sums = np.cumsum(unit, axis=1, dtype=np.float32)
        window = np.concatenate([sums[:, : p.W], sums[:, p.W :] - sums[:, : -p.W]], axis=1).astype(np.float64)
        memories = (nk.stable_memory(unit), nk.episodic_memory(unit, nk.block_size(k.shape[1], p)), window)
        a = np.stack([nk.min_max(nk.anomalies(unit, memory)) for memory in memories])
        return nk.routed_score(a, nk.blend(a, nk.gap(a, p.p), p), nk.rectified_surprise(a), p)


class WholeBlocks(Over):
    """Backend in which the last key of a whole block has the score of the previous key."""

    def anomaly_score(self, k: Any, p: Any, /) -> Any:
        actual = self._right.anomaly_score(k, p)
        if k.shape[1] % 128 == 0:
            actual[:, -1] = actual[:, -2]
        return actual


class Narrow(Over):
    """Backend that ignores channels after the 64th."""

    def expected_attention(self, q: Any, k: Any, v: Any, *given: Any) -> Any:
        return self._right.expected_attention(q, k, v[:, :, :64], *given)


class LargestOfAll(Over):
    """Backend that subtracts the largest logit of all queries and heads before the exponential."""

    def received_attention(self, q: Any, k: Any, scaling: float, softcap: Any, sinks: Any = None, /) -> Any:
        shared = np.repeat(k, len(q) // len(k), axis=0)
        S = scaling * np.matmul(q, shared.transpose(0, 2, 1)).astype(np.float64)
        powers = np.where(np.tri(S.shape[1], S.shape[2], S.shape[2] - S.shape[1]) > 0, np.exp(S - S.max()), 0.0)
        with np.errstate(invalid="ignore"):
            weights = powers / powers.sum(axis=2, keepdims=True)
        return weights.sum(axis=1).reshape(len(k), -1, k.shape[1]).sum(axis=1)


class Overflowing(Over):
    """Backend that subtracts nothing before the exponential. The frequencies of the inputs are nearly 0."""

    def expected_attention(self, q: Any, k: Any, v: Any, *given: Any) -> Any:
        logits = np.matmul(q, np.repeat(k, len(q) // len(k), axis=0).transpose(0, 2, 1)).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            powers = np.exp(logits.mean(axis=1) + logits.var(axis=1) / 2)
            weights = powers / powers.sum(axis=1, keepdims=True)
        return weights.reshape(len(k), -1, k.shape[1]).mean(axis=1) * np.linalg.norm(v, axis=2)


class Drifting(Over):
    """Backend that increases the last score slightly after 2 000 calls."""

    calls = itertools.count(1)

    def anomaly_score(self, k: Any, p: Any, /) -> Any:
        actual = self._right.anomaly_score(k, p)
        actual[:, -1] += 1e-12 if next(self.calls) > 2_000 else 0.0
        return actual


ATTENTION: Callable[..., None] = partial(quick.test_attention_that_keys_receive, softcap=None, precision="float32")
NESTEDKV: Callable[..., None] = partial(quick.test_nestedkv, precision="float32")
DETECTED: dict[str, tuple[Callable[..., None], Any]] = {
    "NestedKV beyond 32 767 tokens": (
        partial(scale.test_scores_of_thousands_of_keys, precision="float32", shape=(2, 33_100, 16), p=SOFT),
        ShortPrompts(BACKEND.nestedkv),
    ),
    "sums in float16": (partial(ATTENTION, H=32, H_kv=8, d=64, n=300), HalfSums(BACKEND.policies)),
    "groups of three": (partial(ATTENTION, H=9, H_kv=3, d=64, n=300), GroupsOfPowersOfTwo(BACKEND.policies)),
    "four KV heads": (partial(NESTEDKV, H_kv=8, d=64, n=300), FourKVHeads(BACKEND.nestedkv)),
    "running sums": (
        partial(quick.test_windows_after_a_long_prefix, precision="float32"), RunningSums(BACKEND.nestedkv),
    ),
    "whole blocks": (partial(NESTEDKV, H_kv=1, d=128, n=512), WholeBlocks(BACKEND.nestedkv)),
    "narrow values": (
        partial(quick.test_attention_that_is_expected, precision="float32", H=8, H_kv=1, d=128, n=256),
        Narrow(BACKEND.policies),
    ),
    "the largest logit of all queries": (
        stages.test_each_query_and_head_has_its_own_largest_logit, LargestOfAll(BACKEND.policies),
    ),
    "powers of a mean that overflow": (
        partial(stages.test_expected_logits_of_a_thousand, spread=False), Overflowing(BACKEND.policies),
    ),
    "powers of a spread that overflow": (
        partial(stages.test_expected_logits_of_a_thousand, spread=True), Overflowing(BACKEND.policies),
    ),
}


@pytest.mark.parametrize("mistake", DETECTED)
def test_a_mistake_at_a_shape_of_models_is_found(mistake: str) -> None:
    """Check that the reference passes the test and that the wrong backend fails it."""
    test, wrong = DETECTED[mistake]
    test(wrong._right)
    with pytest.raises(AssertionError):
        test(wrong)


def test_a_result_that_drifts_is_found() -> None:
    drifting = replace(BACKEND, name="drifting", nestedkv=Drifting(BACKEND.nestedkv))
    with pytest.raises(AssertionError, match="call 2001 differs from the first"):
        quick.test_a_result_is_the_same_after_thousands_of_calls(drifting, "nestedkv.anomaly_score")
