"""The same operations on the reference's diversity and TriAttention."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conformance.vectors.codec import floats
from conformance.vectors.files import Json
from reference import diversity, policies
from reference.calibration import Calibration, Identity
from reference.policies.diversity import TowardMean
from reference.triattention import distance_score, joined, z_scores
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["DIVERSITY_ITEMS"]

Result = Mapping[str, object]


def kept(i: Json, policy: Policy) -> Result:
    """What the policy keeps of keys and values at B tokens."""
    layers = {
        at: LayerView(floats(k), floats(k), floats(v), 1.0, None)
        for at, (k, v) in enumerate(zip(i["k"], i["v"], strict=True))
    }
    L, H_kv, n = np.shape(i["k"])[:3]
    groups = {Granularity.MODEL: 1, Granularity.LAYER: L, Granularity.HEAD: L * H_kv}[policy.granularity]
    found, _ = policies.retain(policy, Budget(count=i["B"]), Observation(n, groups, None, layers))
    return {"kept": [found.group(g).tolist() for g in range(found.groups)]}


def cosines(i: Json) -> Result:
    V = diversity.unit_rows(floats(i["u"]))
    return {"V": V, "cosines": diversity.cosines(V)}


def variant_b(i: Json) -> Result:
    V, n = floats(i["V"]), len(i["s"])
    scores = Scores(floats([i["s"]]), np.arange(n + 1), signatures=V[None])
    found = TowardMean(i["lam"])(scores, np.array([i["B"]]), np.zeros(n, dtype=np.bool_))
    return {"prior": diversity.toward_mean(V), "kept": found.positions}


def rope(i: Json) -> Result:
    """The calibration's fingerprint, once it was accepted here."""
    taken, here = (
        Identity(i[of + "model"], floats(i[of + "inv_freq"]), i[of + "factor"]) for of in ("", "served_")
    )
    half = len(taken.inv_freq)
    Calibration(taken, (0,), np.zeros((1, 1, 2 * half)), np.zeros((1, 1, half))).check(here)
    return {"rope": taken.rope}


def score(i: Json) -> Result:
    return {"score": distance_score(
        floats(i["k"]), i["t"], floats(i["mean"]), floats(i["magnitude"]), floats(i["inv_freq"]), i["factor"],
    )}


def ranking(i: Json) -> Result:
    open_ = ~np.array(i["pinned"], dtype=np.bool_)
    best = np.stack([[z_scores(floats(group), open_).max(axis=0) for group in layer] for layer in i["X"]])
    return {"rows": joined(best, i["mode"])}


def triattention(i: Json) -> Result:
    identity = Identity("vector", floats(i["inv_freq"]))
    layers = tuple(range(len(i["k"])))
    found = Calibration(identity, layers, floats(i["mean"]), floats(i["magnitude"]))
    return kept(i, policies.triattention(found, identity, i["mode"], i["pin_prompt"]))


DIVERSITY_ITEMS: Mapping[str, Callable[[Any], Result]] = {
    "DV-COSINE": cosines,
    "DV-SIGNATURE": lambda i: {"signatures": diversity.signatures([floats(v) for v in i["values"]], i["mode"])},
    "DV-POLICY": lambda i: kept(i, policies.diverse(policies.knorm(), i["lam"], i["mode"])),
    "DV-VARIANT-B": variant_b,
    "TA-CALIBRATION": rope,
    "TA-SCORE": score,
    "TA-RANKING": ranking,
    "TA-POLICY": triattention,
}
