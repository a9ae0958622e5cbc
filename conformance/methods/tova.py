"""TOVA by brute force: the attention of the last query, as a mean over the heads."""

from functools import partial

from conformance.methods.brute import Brute, Parts, plain
from conformance.methods.policies import DECODE, GROUPS, Layer, Score, decoded, over_group, seen_by, top
from conformance.strategies.policy_inputs import Inputs, Kept


def tova(layer: Layer, at: int, live: list[int], last: str = "free", heads: str = GROUPS[0]) -> Score:
    rows = seen_by(layer, at, live)
    scores: Score = list(over_group(rows, heads))
    return [*scores[:-1], None] if last == "kept" else scores


def last_query(layer: Layer) -> list[Score]:
    """Return the scores of the keys by the last query."""
    return [tova(layer, -1, [*range(len(layer["k"][0]))])]


def kept(
    inputs: Inputs, B: int, last: str = "free", decode: str = DECODE[0], heads: str = GROUPS[0],
) -> Kept:
    """Return the kept sets, decided at the end of the prompt and in every decode step."""
    result, prompt = Kept(), inputs.n - inputs.steps
    for layer in map(plain, inputs.layers):
        score = partial(tova, layer, last=last, heads=heads)
        first = top(score(prompt - 1, [*range(prompt)]), B)
        result.append(decoded(first, range(prompt, inputs.n), B, score, decode))
    return result


BRUTES = [
    Brute("PO-TOVA", "tova", kept, readings={"last": ("free", "kept"), "decode": DECODE},
          slips={"heads": GROUPS}, parts=Parts("every=1", last_query)),  # kvpress keeps the last token
]
