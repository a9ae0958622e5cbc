"""Runs of successive tokens, each of which is decided alone, by brute force (PO-PIECES)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from conformance.oracles.choices import Answer, surely
from conformance.strategies.policy_inputs import Inputs


def runs(n: int, c: int) -> list[range]:
    """Return runs of c successive tokens. The last run may be shorter."""
    return [range(start, min(start + c, n)) for start in range(0, n, c)]


def cut(inputs: Inputs, run: range) -> Inputs:
    """Return the tokens of a run as a whole sequence, with their positions in the text."""
    part = slice(run.start, run.stop)
    layers = [
        replace(x, q=x.q[:, part], k=x.k[:, part], v=None if x.v is None else x.v[:, part],
                hidden=None if x.hidden is None else x.hidden[part]) for x in inputs.layers
    ]
    return replace(
        inputs, layers=layers, token_ids=inputs.token_ids[part], positions=np.arange(run.start, run.stop), whole=inputs,
    )


def joined(kept: Answer, more: Sequence[int], first: int) -> Answer:
    """Return a kept set with the tokens of a further piece. Rounding may exchange tokens in one piece only."""
    open_: frozenset[int] = getattr(more, "open", frozenset())
    if open_:
        surely(kept)
    result = Answer([*kept, *(first + i for i in more)])
    result.open = kept.open | {first + i for i in open_}
    return result
