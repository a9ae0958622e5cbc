"""Implementation of the commands `kvspec policies` and `kvspec tasks`."""

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console

from experiments.tasks.registry import FILES, TABLE
from reference.policies.describe import PolicyDescription, describe_parts, describe_policy, list_policies
from reference.policies.grammar import is_composition
from spec.validate import check_choices

__all__ = ["show_policies", "show_policy", "show_tasks"]

_LAYERS = {"none": "no layer", "observed": "one layer", "all": "all layers"}
_YES = {True: "yes", False: "no"}
_LEGEND = """
passes: number of times that the model reads the prompt
peak budget: kvspec evicts from each layer before the next layer runs
peak full cache: the full cache is in memory until the model has read the whole prompt
evicts while decoding: the policy also evicts while the model generates tokens; otherwise generation enlarges the cache
evicts from later turns: the policy also evicts from later prompts that extend the same cache
padded batches: the prompts of a batch may have different lengths
renumbered in the paper: the paper renumbers the positions of the kept tokens, which kvspec keeps by default

This list shows when each policy evicts, but does not rank policies by quality. You can use every policy in a chat.
If a policy evicts from the first prompt only, read later turns inside `with run.reading():`.
diverse-NAME is the policy NAME with set-conditioned selection: a token similar to kept tokens has a lower score.
NAME(positions="renumbered") is the policy NAME with the kept tokens at the positions directly before the next token.
The paper on set-conditioned diversity calls triattention "1d" and diverse-triattention "1d_div".
`kvspec policies NAME` prints the paper, the constants, an example call and the parts of the policy NAME.
Parts of a policy can be changed: `snapkv/layers=pyramid/heads=adaptive`. spec/composition.md lists the parts."""

_TASK_LEGEND = """
text: text that the contexts consist of
placements: the model reads the question after the eviction (after), or with the prompt (in_prompt, paper)
constants: write needle(depth=0.5) to set a constant"""


def show_policies() -> None:
    """Print two lines for each policy, and the meaning of the terms."""
    for one in list_policies():
        served = [f"{one.passes} pass{'es' if one.passes > 1 else ''}", f"peak {_peak(one)}"]
        served += [word for word, serves in _served(one).items() if serves]
        _print(f"{one.name}: {one.keeps}\n    {', '.join(served)}")
    _print(_LEGEND)


def show_policy(name: str) -> None:
    """Print the description of one policy.

    Raises:
        SpecError: if the name is unknown.
    """
    one = describe_policy(name)
    for line in _lines(one, name if "(" in name or is_composition(name) else one.name):
        _print(line)
    _print(f"parts: {describe_parts(name)}")


def show_tasks(asked: str = "") -> None:
    """Print two lines for each task, or for the task that is asked for, and the meaning of the terms.

    Raises:
        SpecError: if the name is unknown.
    """
    check_choices("task", [asked] * bool(asked), TABLE)
    for name, entry in TABLE.items():
        if asked not in ("", name):
            continue
        more = [f"text: {entry.assembly}", f"metric: {entry.metric}", f"placements: {', '.join(entry.placements)}"]
        more += [f"constants: {', '.join(entry.constants)}"] if entry.constants else []
        _print(f"{name}: asks for {entry.about}\n    {'; '.join(more)}")
    _print(_TASK_LEGEND)
    _print(f"Benchmark files: {', '.join(f'{kind}:PATH' for kind in FILES)}. Your own task: 'module:ATTRIBUTE'.")


def _print(line: str) -> None:
    Console().print(line, highlight=False, markup=False, soft_wrap=True)


def _served(one: PolicyDescription) -> dict[str, bool]:
    return {
        "evicts while decoding": one.decode_time, "evicts from later turns": one.later_turns,
        "padded batches": one.padded_batches, "renumbered in the paper": one.positions == "renumbered",
    }


def _peak(one: PolicyDescription) -> str:
    return "budget" if one.layer_by_layer else "full cache"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def _lines(one: PolicyDescription, text: str) -> Iterator[str]:
    """Yield the lines about a policy. The examples have the text of the policy that the user typed."""
    yield f"{one.name}: keeps {one.keeps}"
    if one.paper:
        yield f"paper: {one.paper}"
    owner = "the whole model" if one.granularity == "model" else f"each {one.granularity}"
    yield f"the model reads the prompt {'once' if one.passes == 1 else 'twice'}; peak memory: {_peak(one)}"
    tensors = f"{_listed(one.tensors)} of {_LAYERS[one.layers]}" if one.tensors else "no tensors of the model"
    yield f"scores tokens from {tensors}; one set of kept tokens for {owner}"
    yield from (f"{word}: {_YES[serves]}" for word, serves in _served(one).items())
    yield 'positions of the kept tokens: "kept" (default) or "renumbered"'
    if one.model_constants:
        yield f"constants that kvspec reads from the model: {', '.join(one.model_constants)}"
    yield "constants:" if one.required or one.constants else "constants: none"
    yield from (f"  {key} (required): {one.meanings[key]}" for key in one.required)
    yield from (f"  {key} = {value}: {one.meanings[key]}" for key, value in one.constants.items())
    given = "".join(f", {key}=..." for key in one.required)
    yield f"in Python: kvspec.policy_from_name({text!r}, budget=0.3{given})"
    yield f"on the command line: kvspec compare --policies {shlex.quote(text)} --budgets 0.3"
