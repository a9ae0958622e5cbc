"""The table by which a policy is chosen: what each one is shown of a model, how it stores, what it promises."""

from conformance.assurance.strategies.policy_cases import CASES
from conformance.strategies.policy_inputs import drawn, named
from reference.policies.names import POLICIES
from spec.policy import Needs
from spec.promises import promise_table

__all__ = ["table"]

HEADS = ("policy", "layers", "queries", "also", "a kept set for each", "decides while decoding", "does not promise")
ROWS = {None: "all", 0: "none"}


def table() -> str:
    """In Markdown; a row for each name that a user may give, but for the diverse ones."""
    lines = [HEADS, ["---"] * len(HEADS), *map(row, POLICIES)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def row(name: str) -> list[str]:
    policy = named(name, drawn(1))
    needs = policy.scorer.needs
    shown = f"[{name}](../../spec/items/{CASES[name].item}.md)" if name in CASES else name
    queries = ROWS.get(needs.query_rows, "the last")
    again = "no" if policy.cadence.every is None else "yes"
    return [shown, needs.layers, queries, also(name, needs), policy.granularity.value, again, not_promised(name)]


def not_promised(name: str) -> str:
    """Columns of the table of spec/policies.md where it does not say yes, with the reason."""
    cells = [(promise, answer.partition(": ")) for promise, answer in promise_table().get(name, {}).items()]
    return ", ".join(f"{promise} ({reason})" for promise, (answer, _, reason) in cells if answer != "yes")


def also(name: str, needs: Needs) -> str:
    """What it is given beside queries and keys."""
    wanted = {"values": needs.values, "token ids": needs.token_ids, "budget": needs.budget}
    wanted |= {"a rehearsal": needs.rehearsal is not None}
    of_model = [f"`{word}`" for word in sorted(POLICIES[name].of_model)]
    return ", ".join([word for word, needed in wanted.items() if needed] + of_model)
