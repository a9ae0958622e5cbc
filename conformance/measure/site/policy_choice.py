"""The table by which a policy is chosen: kept tokens, cost, supported uses."""

from conformance.assurance.strategies.policy_cases import CASES
from reference.policies.describe import PolicyDescription, list_policies

__all__ = ["table"]

HEADS = ("Policy", "Keeps", "Passes", "Peak memory", "Later turns", "Padded batches", "Evicts while decoding")
WORDS = {True: "yes", False: "no"}


def table() -> str:
    """Return the table in Markdown, a row for each name of `kvspec policies`."""
    lines = [HEADS, ["---"] * len(HEADS), *map(row, list_policies())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def row(one: PolicyDescription) -> list[str]:
    """Return the cells of a policy, whose name links to its item."""
    name = f"[{one.name}](../../spec/items/{CASES[one.name].item}.md)" if one.name in CASES else one.name
    peak = "budget" if one.layer_by_layer else "full cache"
    served = [WORDS[answer] for answer in (one.later_turns, one.padded_batches, one.decode_time)]
    return [name, one.keeps, str(one.passes), peak, *served]
