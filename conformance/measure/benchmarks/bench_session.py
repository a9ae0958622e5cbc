"""What decode=True costs beside a model, as the difference against the policy off: 32K tokens seen, 1 024 live trunks.

`python -m conformance.measure.benchmarks.bench_session`. Two caches of a tiny model hold the same 16 384 slots;
T_breath steps on the one inside the context and on the other by the bare model take turns, one by one, on one thread.
Processor time, the first rounds left out: they load compiled code. A breath is compared with the step of the bare model
beside it. Its gather of keys and values grows with the model and is timed by itself: what is left is bookkeeping, the
decay of the steps that have waited included. Asked for: 0.1 ms a step, 5 ms a breath.
"""

import time
from dataclasses import replace
from statistics import median

import torch

from conformance.measure.benchmarks.bench_breath import ENDS, SEEN, state
from conformance.measure.tiny_llama import tiny_llama
from models_integration import CrystalCache, RetainedCache
from models_integration.cache.crystal_states import CrystalStates
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.positions import Plan, StoredRows
from models_integration.model.cache_argument import CACHE
from spec.parameters import PAPER

__all__ = ["measured"]

WARM, ROUNDS = 2, 12


def filled(cache: RetainedCache) -> RetainedCache:
    """As if 32K tokens had been read, of which half are stored."""
    known = state(0)
    kept = torch.tensor(known.stored)[None]
    for layer in cache.full_layers:
        tensor = torch.randn(1, 2, kept.shape[1], 12)
        assert isinstance(layer, DenseLayer)
        layer.restore(tensor, tensor.clone(), StoredRows(kept, torch.tensor([SEEN])), SEEN - kept.shape[1])
    cache.continuation = CrystalStates((replace(known, step=0),), SEEN)
    return cache


def measured() -> dict[str, list[float]]:
    """Milliseconds: of the bare model's steps, of steps and breaths inside the context, and of gathers."""
    torch.set_num_threads(1)
    model, method = tiny_llama(), CrystalCache(0.5, ENDS, PAPER, "numba", decode=True)
    on, off = filled(RetainedCache(model.config)), filled(RetainedCache(model.config))
    times: dict[str, list[float]] = {name: [] for name in ("off", "step", "breath", "gather")}
    follow, gathers = DenseLayer.follow, list[float]()

    def timed(layer: DenseLayer, plan: Plan) -> None:
        began = time.process_time()
        follow(layer, plan)
        gathers.append(1e3 * (time.process_time() - began))

    def step(cache: RetainedCache) -> float:
        ids, began = torch.tensor([[5]]), time.process_time()
        model(input_ids=ids, **{CACHE: cache})
        return 1e3 * (time.process_time() - began)

    DenseLayer.follow = timed  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            for round_ in range(WARM + ROUNDS):
                if round_ == WARM:
                    times = {name: [] for name in times}
                gathers.clear()
                for number in range(1, PAPER.T_breath + 1):
                    times["off"].append(step(off))
                    with method(model):
                        times["breath" if number == PAPER.T_breath else "step"].append(step(on))
                times["gather"].append(sum(gathers))
    finally:
        DenseLayer.follow = follow  # type: ignore[method-assign]
    return times


if __name__ == "__main__":
    found = measured()
    for name, best in (("of the best", min), ("of the medians", median)):
        off, gather = best(found["off"]), best(found["gather"])
        one, breath = best(found["step"]) - off, best(found["breath"]) - off
        print(
            f"{name}: a step {one:.3f} ms, a breath {breath:.2f}, of which the gather {gather:.2f}, without it "
            f"{breath - gather:.2f}; the bare model's step {off:.2f}"
        )
