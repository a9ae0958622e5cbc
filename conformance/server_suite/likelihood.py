"""Comparison of each known fault with the statements of a server, by the likelihood of the answers of a group.

In bfloat16, rounding can move an answer as far as a fault does. A fault moves all answers of a group in a way that the
witness can compute, and rounding does not.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from conformance.server_suite.faults import hypotheses
from conformance.server_suite.reading import Reader, computing_in
from conformance.server_suite.witness import Reading
from conformance.witness.statement import MalformedStatement

__all__ = ["likelier_fault"]

MISFIT = 1.2
"""Faults are tried if answers differ from the statements by this multiple of the differences of a copy with noise."""
DECISIVE = 20.0
"""Log-likelihood ratio that accuses a server. An answer adds at most half of it, so two answers must agree."""
TRIED = 4
"""Number of faults that are compared in all answers. The answer with the most power chooses them."""


@lru_cache(maxsize=1)  # all answers of a group have the same result
def likelier_fault(readings: tuple[Reading, ...]) -> str:
    """Return the fault that makes the answers much likelier than the statements do, or an empty string.

    The rounding errors of an answer are taken as independent, with Laplace's density. A copy of the model with noise
    computes in the dtype of the server. The scale of the density is the mean difference between the witness and this
    copy. If more is left under the fault, the scale is the mean difference that is left.

    Args:
        readings: the readings of a group.
    """
    compared = [one for one in readings if _is_comparable(one)]
    scales = _scales(compared) if len(compared) > 1 else []
    misfits = [_mean(one.masked, one.stated_logprobs) / scale for one, scale in zip(compared, scales, strict=False)]
    if sum(misfits) <= MISFIT * len(misfits):
        return ""
    pairs = sorted(zip(compared, scales, strict=True), key=lambda pair: _mean(pair[0].masked, pair[0].full) / pair[1])
    first = _ratios(*pairs.pop())
    chosen = sorted(first, key=first.__getitem__)[-TRIED:]
    ratios = [first, *(_ratios(*pair, chosen) for pair in pairs)]
    capped = {name: sum(min(one.get(name, 0.0), DECISIVE / 2) for one in ratios) for name in chosen}
    decisive = [name for name in chosen if capped[name] >= DECISIVE]
    return max(decisive, key=lambda name: sum(one.get(name, 0.0) for one in ratios), default="")


def _is_comparable(reading: Reading) -> bool:
    try:
        return reading.answer.stated is not None and bool(reading.events) and len(reading.stated_logprobs) > 1
    except MalformedStatement:
        return False


def _scales(readings: Sequence[Reading]) -> list[float]:
    """Return the mean difference of each answer that noise and the dtype of the server cause."""
    witness = readings[0].witness
    (changed,) = islice(witness.noisy(), 1)
    copy = Reader(computing_in(getattr(torch, witness.dtype), changed))
    read = [copy.logprobs(one.statement.ids, len(one.statement.prompt_ids), one.events, one.statement.positions)
            for one in readings]
    return [_mean(noisy, one.masked) for noisy, one in zip(read, readings, strict=True)]


def _mean(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def _ratios(reading: Reading, scale: float, names: Sequence[str] | None = None) -> Mapping[str, float]:
    """Return the log-likelihood ratio of each fault and the statement for one answer, by the name of the fault.

    Of several faults with one name, such as the sets of different requests, the likeliest counts.
    """
    actual, result = reading.stated_logprobs, dict[str, float]()
    for one in hypotheses(reading.events, reading.statement.positions, reading.witness.others(reading)):
        if names is None or one.name in names:
            left = _mean(reading.read(one.events, one.rule, one.excepted), actual)
            ratio = len(actual) * (_mean(reading.masked, actual) - left) / max(scale, left)
            result[one.name] = max(ratio, result.get(one.name, ratio))
    return result
