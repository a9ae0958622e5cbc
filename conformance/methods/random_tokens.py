"""Random eviction by brute force: the uniform numbers of VaSE's brute force."""

from conformance.methods.brute import SEED, Brute, Parts
from conformance.methods.policies import Score, top
from conformance.methods.vase import uniforms
from conformance.strategies.policy_inputs import Inputs, Kept


def rows(inputs: Inputs, B: int, seed: int) -> list[Score]:
    places = inputs.places
    texts = (uniforms(seed, g, 0, places[-1] + 1) for g in range(len(inputs.layers) * inputs.H_kv))
    return [[numbers[at] for at in places] for numbers in texts]


def kept(inputs: Inputs, B: int, seed: int) -> Kept:
    return [top(row, B) for row in rows(inputs, B, seed)]


BRUTES = [
    Brute("PO-RANDOM", "random-tokens", kept, {"seed": SEED}, published={"seed": 0},
          parts=Parts("", rows=rows)),
]
