"""Checks of the device: the conformance suite, and the kept set of a generation on the model's q and k."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch

from conformance import tolerances
from conformance.checks import scale_checks
from conformance.oracles.scale.s1 import coattention
from conformance.paths import ROOT
from lab.measure.gpu.measure import Report, Watch, peak_bytes, say, synchronize
from lab.measure.gpu.models import Scale, Subject
from reference.backend import BACKEND
from reference.crystalcache import prefill
from spec.arrays import Matrix, Vector
from spec.backend import Backend, CrystalStages, resolve
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, CrystalRetention

Array = np.ndarray[Any, Any]


def following(result: CoAttention) -> Backend:
    """Return the reference with this S1 instead of its S1."""

    class Following:
        def __getattr__(self, name: str) -> Any:
            return getattr(BACKEND.require_crystal(), name)

        def coattention(self, *_: Any) -> CoAttention:
            return result

    return replace(BACKEND, name="following", crystal=cast(CrystalStages, Following()))


def kept_complaints(result: CrystalRetention, q: Array, k: Array, **arguments: Any) -> Iterator[str]:
    """Yield the errors in a float32 result of `prefill`, given float64 q and k and the other arguments of `prefill`."""
    p, scaling = arguments["parameters"], arguments["scaling"]
    yield from coattention_complaints(result.coattention, q, k, p, scaling, arguments["softcap"], "float32")
    want = prefill(q, k, backend=following(result.coattention), **arguments)
    if result.kept.tolist() != want.kept.tolist():
        yield f"{len(set(result.kept.tolist()) ^ set(want.kept.tolist()))} kept positions differ after S1"


def coattention_complaints(
    result: CoAttention, q: Array, k: Array, p: CrystalCacheParameters, scaling: float, softcap: float | None,
    precision: str,
) -> Iterator[str]:
    """Yield the errors in S1 of one segment from position 0, compared with the full-size oracle.

    The tolerances are the certified errors of these inputs.
    """
    H, n = q.shape[:2]

    def weights(q: Array, k: Array) -> Vector:
        return tolerances.attention_error(q, k, scaling, softcap, precision)

    def cosines(error: Vector, Q: int) -> Matrix:
        result: Matrix = tolerances.cosine_error(error[:, None], error, Q, H, precision)
        return result

    mean_error = tolerances.head_mean_error(H, precision)
    want = coattention(q, k, np.arange(n), p, scaling, softcap, weights, cosines, mean_error, behind=n)
    yield from scale_checks.salience(result.salience, want, p, precision, strict=False)
    intra, cross = (p.k_intra, p.tau_intra), (p.k_cross, p.tau_cross)
    yield from scale_checks.neighbours(result.intra, result.intra_weight, want.intra, *intra, strict=False)
    yield from scale_checks.neighbours(result.cross, result.cross_weight, want.cross, *cross, strict=False)


def generation(report: Report, scale: Scale, subject: Subject) -> None:
    """Run prefill and decode under CrystalCache with `backend="triton"`, then check the kept set.

    Raises:
        AssertionError: if no certified S1 output leads to the kept set.
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
    (result,) = results
    report.notes.append(
        f"Generation handed S1 q and k as {_kind(watch.given[0])}. It kept {len(result.kept)} of {len(ids)} positions."
    )
    _check(report, scale, subject, ids, result, watch)


def _check(
    report: Report, scale: Scale, subject: Subject, ids: Any, result: CrystalRetention, watch: Watch,
) -> None:
    q, k = (_wide(x) for x in watch.given[:2])
    _, parameters, scaling, softcap = watch.given[2:6]
    arguments = {
        "token_ids": ids, "sentence_ends": subject.sentence_ends, "budget": 0.5, "parameters": parameters,
        "scaling": scaling, "softcap": softcap,
    }
    say("the reference on the same q and k, in float64")
    want = prefill(q, k, **arguments)
    differ = len(set(result.kept.tolist()) ^ set(want.kept.tolist()))
    report.add("kept positions that differ from the reference's own (near ties)", differ, "positions")
    complaints = list(kept_complaints(result, q, k, **arguments))
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


WORKERS = 16  # compilation takes most of the time, and each worker compiles on a separate core


def conformance(report: Report, scale: Scale) -> None:
    """Run pytest for each selection in the scale.

    Raises:
        AssertionError: if a test fails.
    """
    spread = ["-n", str(min(WORKERS, os.cpu_count() or 1))] if find_spec("xdist") else []
    for chosen in scale.tests:
        # A warning from a different library version is not a failure of a kernel.
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--kvspec-profile", "few", *spread, *chosen]
        say(" ".join(command[1:]))
        code, last = _followed(command)
        report.notes.append(f"`pytest {' '.join(chosen)}`: {last}")
        if code:
            raise AssertionError(f"conformance is not green: {last}")


def _followed(command: list[str]) -> tuple[int, str]:
    """Return the exit code and the last line of a command, and print its output as it arrives."""
    last = "no output"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        try:
            for line in running.stdout:
                print(f"    {line}", end="", flush=True)
                last = line.strip("= \n") or last
            code = running.wait()
        finally:  # the time limit of the part interrupts the loop
            running.kill()
    return code, last
