"""StreamingLLM by brute force: positions decide alone."""

from conformance.methods.brute import SINK, Brute, sinks
from conformance.strategies.policy_inputs import Inputs, Kept


def kept(inputs: Inputs, B: int, N_sink: int) -> Kept:
    n = inputs.n
    return [sorted({*range(min(N_sink, n)), *range(max(0, n - (B - N_sink)), n)})]


BRUTES = [
    Brute("PO-STREAMINGLLM", "streamingllm", kept, {"N_sink": SINK}, SINK, sinks, published={"N_sink": 4}),
]
