"""The same operations on the reference's NestedKV."""

from collections.abc import Callable, Mapping
from typing import Any

from conformance.vectors.codec import floats
from conformance.vectors.files import Json, nestedkv_parameters
from reference import directions, policies
from reference import nestedkv as nk
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy

__all__ = ["NESTEDKV_ITEMS"]

Result = Mapping[str, object]


def head(rows: Json) -> Any:
    """One head as three axes."""
    return floats([rows])


def scales(i: Json) -> Any:
    """Three rows as (3, 1, n)."""
    return floats(i["a"])[:, None]


def kept(i: Json, policy: Policy) -> list[list[int]]:
    layers = {
        at: LayerView(k[:, :0], k, None, 1.0, None) for at, k in enumerate(floats(layer) for layer in i["k"])
    }
    H_kv, n = layers[0].k.shape[:2]
    found, _ = policies.retain(policy, Budget(count=i["B"]), Observation(n, H_kv * len(layers), None, layers))
    return [found.group(g).tolist() for g in range(found.groups)]


def episodic(i: Json) -> Result:
    p = nestedkv_parameters(i)
    b = nk.block_size(len(i["unit"]), p)
    return {"b": [nk.block_size(N, p) for N in i["N"]], "mu": nk.episodic_memory(head(i["unit"]), b)[0]}


def anomaly(i: Json) -> Result:
    return {"a": nk.anomalies(head(i["unit"]), head(i["mu"]))[0]}


def ablations(i: Json) -> Result:
    p = nestedkv_parameters(i)
    return {
        "continuum": kept(i, policies.nestedkv_without_continuum(p)),
        "adaptive": kept(i, policies.nestedkv_without_adaptive(p)), "both": kept(i, policies.nestedkv_without_both()),
    }


NESTEDKV_ITEMS: Mapping[str, Callable[[Any], Result]] = {
    "NK-UNIT-KEYS": lambda i: {"unit": directions.unit_keys(head(i["k"]))[0]},
    "NK-STABLE": lambda i: {"mu": nk.stable_memory(head(i["unit"]))[0, 0]},
    "NK-EPISODIC": episodic,
    "NK-CURRENT": lambda i: {"mu": nk.current_memory(head(i["unit"]), i["W"])[0]},
    "NK-ANOMALY": anomaly,
    "NK-MIN-MAX": lambda i: {"a": nk.min_max(floats([i["a"]]))[0]},
    "NK-GAP": lambda i: {"delta": nk.gap(scales(i), nestedkv_parameters(i).p)[:, 0]},
    "NK-BLEND": lambda i: {"blend": nk.blend(scales(i), floats(i["delta"])[:, None], nestedkv_parameters(i))[0]},
    "NK-SURPRISE": lambda i: {"s": nk.rectified_surprise(scales(i))[0]},
    "NK-ROUTE": lambda i: {
        "score": nk.routed_score(scales(i), floats([i["blend"]]), floats([i["s"]]), nestedkv_parameters(i))[0]
    },
    "NK-NESTEDKV": lambda i: {"kept": kept(i, policies.nestedkv(nestedkv_parameters(i)))},
    "NK-ABLATIONS": ablations,
}
