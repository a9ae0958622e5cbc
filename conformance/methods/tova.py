"""TOVA by brute force: the attention of the last query, as a mean over the heads."""

from functools import partial

from conformance.methods.brute import Brute, plain
from conformance.methods.policies import DECODE, Layer, Score, decoded, seen_by, top
from conformance.oracles.boxes import fsum
from conformance.strategies.policy_inputs import Inputs, Kept


def tova(layer: Layer, at: int, live: list[int], last: str = "free") -> Score:
    rows = seen_by(layer, at, live)
    scores: Score = [fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    return [*scores[:-1], None] if last == "kept" else scores


def kept(inputs: Inputs, B: int, last: str = "free", decode: str = DECODE[0]) -> Kept:
    """At the end of the prompt, and in every step."""
    found, prompt = Kept(), inputs.n - inputs.steps
    for layer in map(plain, inputs.layers):
        score = partial(tova, layer, last=last)
        first = top(score(prompt - 1, [*range(prompt)]), B)
        found.append(decoded(first, range(prompt, inputs.n), B, score, decode))
    return found


BRUTES = [
    Brute("PO-TOVA", "tova", kept, readings={"last": ("free", "kept"), "decode": DECODE}),  # kvpress: the last is kept
]
