"""StreamingLLM by brute force: positions decide alone."""

from conformance.methods.brute import SINK, Brute, Parts, sinks
from conformance.methods.policies import Score
from conformance.strategies.policy_inputs import Inputs, Kept


def kept(inputs: Inputs, B: int, N_sink: int) -> Kept:
    n = inputs.n
    return [sorted({*range(min(N_sink, n)), *range(max(0, n - (B - N_sink)), n)})]


def positions(inputs: Inputs, B: int) -> list[Score]:
    return [[float(at) for at in range(inputs.n)]]


BRUTES = [
    Brute("PO-STREAMINGLLM", "streamingllm", kept, {"N_sink": SINK}, SINK, sinks, published={"N_sink": 4},
          parts=Parts("sink=N_sink", rows=positions, unscored="")),
]
