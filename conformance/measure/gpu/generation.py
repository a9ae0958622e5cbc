"""Generation on the device: the kept set against the reference's, on the q and k that the model really made."""

import time
from typing import Any

import numpy as np
import torch

from conformance.measure.gpu.agreement import kept_complaints
from conformance.measure.gpu.measure import peak_bytes, say, synchronize
from conformance.measure.gpu.models import Subject
from conformance.measure.gpu.report import Report
from conformance.measure.gpu.scale import Scale
from conformance.measure.gpu.watch import Watch
from reference.crystalcache import prefill
from spec.backend import resolve
from spec.records import CrystalRetention

__all__ = ["generation"]


def generation(report: Report, scale: Scale, subject: Subject) -> None:
    """Prefill and decode under CrystalCache with `backend="triton"`, then check what was kept.

    Raises:
        AssertionError: when the kept set is none that certified S1 outputs lead to.
    """
    ids, watch = subject.prompt(scale.checked), Watch(resolve("triton"))
    results: list[CrystalRetention] = []

    def run() -> None:
        results.append(subject.generate(ids, watch.backend, scale, scale.new_tokens)[0])

    say(f"generation: {subject.name}, {scale.checked} prompt tokens, {scale.new_tokens} new ones")
    start = time.perf_counter()
    memory = peak_bytes(run)
    synchronize()
    report.add(f"generation of {scale.new_tokens} tokens, compilation included", time.perf_counter() - start, "s")
    report.add("its peak memory, weights included", None if memory is None else memory[1] / 1e9, "GB")
    (found,) = results
    report.notes.append(
        f"Generation handed S1 q and k as {_kind(watch.given[0])}. It kept {len(found.kept)} of {len(ids)} positions."
    )
    _check(report, scale, subject, ids, found, watch)


def _check(
    report: Report, scale: Scale, subject: Subject, ids: Any, found: CrystalRetention, watch: Watch,
) -> None:
    q, k = (_wide(x) for x in watch.given[:2])
    _, parameters, scaling, softcap = watch.given[2:6]
    arguments = {
        "token_ids": ids, "sentence_ends": subject.sentence_ends, "budget": 0.5, "parameters": parameters,
        "scaling": scaling, "softcap": softcap,
    }
    say("the reference on the same q and k, in float64")
    want = prefill(q, k, **arguments)
    differ = len(set(found.kept.tolist()) ^ set(want.kept.tolist()))
    report.add("kept positions that differ from the reference's own (near ties)", differ, "positions")
    complaints = list(kept_complaints(found, q, k, **arguments))
    report.notes.append(
        "The comparator accepts the kept set: S1 lies in the certified box, and the reference leads from it to the"
        " same positions." if not complaints else f"The comparator rejects the kept set: {complaints[:5]}"
    )
    if complaints:
        raise AssertionError(f"the kept set is rejected: {len(complaints)} complaints, first: {complaints[0]}")


def _kind(x: Any) -> str:
    return f"a tensor on {x.device} of {x.dtype}" if isinstance(x, torch.Tensor) else f"a NumPy array of {x.dtype}"


def _wide(x: Any) -> Any:
    return (x.double().cpu().numpy() if isinstance(x, torch.Tensor) else x).astype(np.float64)
