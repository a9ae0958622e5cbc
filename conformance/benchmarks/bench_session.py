"""What decode=True costs beside a model, as the difference against the policy off: 32K tokens seen, 1 024 live trunks.

`python -m conformance.benchmarks.bench_session`. Two caches of a tiny model hold the same 16 384 slots; one is read
inside the context, the other by the bare model, T_breath steps in turn. The best of many are compared. A breath's
gather grows with the model and is timed beside it: what is left is bookkeeping. Asked for: 0.1 ms a step, 5 a breath.
"""

import time
from dataclasses import replace

import torch

from conformance.benchmarks.bench_breath import ENDS, SEEN, state
from conformance.integration.families import build
from models_integration import CrystalCache, RetainedCache
from models_integration.cache import RetainedLayer
from models_integration.slots import Plan
from models_integration.states import RowStates
from models_integration.visibility import StoredRows
from spec.parameters import PAPER

__all__ = ["measured"]

ROUNDS = 5


def filled(cache: RetainedCache) -> RetainedCache:
    """As if 32K tokens had been read, of which half are stored."""
    known = state(0)
    kept = torch.tensor(known.stored)[None]
    for layer in cache.full_layers:
        tensor = torch.randn(1, 2, kept.shape[1], 12)
        layer.update(tensor, tensor.clone())
        layer.rows, layer.evicted = StoredRows(kept, torch.tensor([SEEN])), SEEN - kept.shape[1]
    cache.states = RowStates((replace(known, step=0),), SEEN)
    return cache


def measured() -> dict[str, float]:
    """Milliseconds of processor time: the differences of a step and of a breath, and the gather within the latter."""
    model, method = build("llama"), CrystalCache(0.5, ENDS, PAPER, "numba", decode=True)
    on, off = filled(RetainedCache(model.config)), filled(RetainedCache(model.config))
    gathers: list[float] = []
    follow = RetainedLayer.follow

    def timed(layer: RetainedLayer, plan: Plan) -> None:
        began = time.process_time()
        follow(layer, plan)
        gathers.append(time.process_time() - began)

    def steps(cache: RetainedCache) -> list[float]:
        spent = []
        for _ in range(PAPER.T_breath):
            ids, began = torch.tensor([[5]]), time.process_time()
            model(input_ids=ids, past_key_values=cache)
            spent.append(1e3 * (time.process_time() - began))
        return spent

    RetainedLayer.follow = timed  # type: ignore[method-assign, assignment]
    times: dict[str, list[float]] = {"on": [], "off": [], "breath": []}
    try:
        with torch.no_grad():
            for _ in range(ROUNDS):
                times["off"] += steps(off)
                with method(model):
                    *others, breath = steps(on)
                times["on"] += others
                times["breath"].append(breath)
    finally:
        RetainedLayer.follow = follow  # type: ignore[method-assign]
    layers = len(on.full_layers)
    gather = min(1e3 * sum(gathers[at : at + layers]) for at in range(0, len(gathers), layers))
    base = min(times["off"])
    return {"step": min(times["on"]) - base, "breath": min(times["breath"]) - base, "gather": gather, "model": base}


if __name__ == "__main__":
    for name, milliseconds in measured().items():
        print(f"{name}: {milliseconds:.3f} ms")
