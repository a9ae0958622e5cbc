"""SimLayerKV by brute force: the attention of the last query decides whether a layer keeps all tokens."""

from conformance.methods.brute import SINK, Brute, W, both_ends, plain
from conformance.methods.policies import last_rows
from conformance.oracles.boxes import fsum, over, row
from conformance.strategies.policy_inputs import Inputs, Kept


def simlayerkv(inputs: Inputs, B: int, threshold: float, N_sink: int, N_recent: int) -> Kept:
    result, n = Kept(), inputs.n
    held = [i for i in range(n) if i < N_sink or i >= n - N_recent]
    for view in inputs.layers:
        heads = [list(row(rows[-1])) for rows in last_rows(plain(view), 1)]
        mass = fsum(over([weights[i] for weights in heads for i in held], len(heads)))
        others = [i for i in range(n) if i not in held][::-1]
        more = [] if mass > threshold else others[: max(0, B - len(held))]
        result.append(sorted([*held, *more]))
    return result


BRUTES = [
    Brute("PO-SIMLAYERKV", "simlayerkv", simlayerkv, {"threshold": 0.6, "N_sink": SINK, "N_recent": W}, SINK + W,
          both_ends, published={"threshold": 0.9, "N_sink": 4, "N_recent": 1024}, scored=False),
]
