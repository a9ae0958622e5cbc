"""Compute the kept evidence of a study again: `python -m lab.measure.separate --rules FILE --rows FILE --gguf FILE`.

A separate program reads the weights, runs the model and selects the tokens. Its modules import NumPy only, and share no
code with kvspec. Only this module uses kvspec: for the token ids of drawn samples, the place of the evidence and the
request of KVzip.

Exit code 1: a sample has a different number of kept tokens or of kept evidence in one of the sets of a policy.
"""

import argparse
import json
import lzma
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.evidence.rules import load_rules
from experiments.studies.evidence.run import Item, items
from experiments.studies.subject import Loading
from experiments.tasks import place
from lab.measure.separate.crystalcache import FORMS, Crystal
from lab.measure.separate.heads import kvzip, nestedkv, snapkv
from lab.measure.separate.llama import Layer, Llama
from lab.measure.separate.weights import read_weights, sentence_ends
from models_integration.policies.values import repeat_template

BEST = 'crystalcache(observed_layer=-3, graph="zero")'
LATE = {BEST: 'crystalcache(graph="zero")', "local-geometric-trunks": "local-geometric-trunks"}
"""Policies that observe the last layer but two, with the form of CrystalCache."""
HEADS = ("snapkv", "nestedkv", "kvzip")
STREAMING = "streamingllm(N_sink=60)"
BUDGET = "0.3"


def is_known(policy: str) -> bool:
    """Return True if this program can compute the sets of a policy with these constants."""
    return policy in (*FORMS, *LATE, *HEADS, STREAMING)


@dataclass
class Prompt:
    """Prompt with the layers that its policies need."""

    model: Llama
    ids: Sequence[int]
    ends: frozenset[int]
    template: Sequence[Sequence[int]]
    layers: Sequence[Layer]

    def kept(self, policy: str, budget: int) -> list[set[int]]:
        """Return the kept positions: one set, or one for each layer and KV head."""
        n = len(self.ids)
        if policy == STREAMING:
            return [{*range(60), *range(n - budget + 60, n)}]
        if policy == "kvzip":
            return kvzip(self.model, self.ids, self.layers, budget, self.template)
        if policy in HEADS:
            return {"snapkv": snapkv, "nestedkv": nestedkv}[policy](self.layers, budget)
        crystal = Crystal(self.layers[self.model.layers - 3 if policy in LATE else 0], self.ids, self.ends)
        return [crystal.kept(*FORMS[LATE.get(policy, policy)](crystal), budget)]


def layers_of(policies: Sequence[str], layers: int) -> int:
    """Return how many of the layers the policies need."""
    if set(HEADS) & set(policies):
        return layers
    return layers - 2 if set(LATE) & set(policies) else 1


def differing(kept: Sequence[set[int]], item: Item, cell: Mapping[str, Any]) -> int:
    """Return how many sets differ from a cell in the number of kept tokens or of kept evidence."""
    evidence = {at for start, stop in item.sample.evidence for at in range(start, stop)}
    actual = np.array([[len(one), len(one & evidence)] for one in kept])
    stored = np.stack([np.broadcast_to(cell[name], len(kept)) for name in ("kept", "evidence_kept")], axis=1)
    return int((actual != stored).any(axis=1).sum())


def drawn(rows: Sequence[dict[str, Any]], count: int, seed: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Return rows by sample and placement, spread evenly over tasks and placements."""
    draws, groups = np.random.default_rng(seed), defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for row in rows:
        groups[row["task"], row["placement"]].append(row)
    orders = [(some, draws.permutation(len(some))) for some in groups.values()]
    turns = [(turn, draws.random(), some[at]) for some, order in orders for turn, at in enumerate(order)]
    turns.sort(key=lambda one: one[:2])
    return {(row["sample"], row["placement"]): row for _, _, row in turns[:count]}


def agreement(given: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Return for each policy and sample the number of sets, and the number of sets that differ."""
    rules, weights = load_rules(given.rules), read_weights(given.gguf)
    subject, model, ends = Loading(rules.models[0]).subject(), Llama(weights), sentence_ends(weights.metadata)
    with lzma.open(given.rows) as file:
        wanted = drawn([json.loads(line) for line in file], given.count, given.seed)
    result, template = defaultdict[str, list[tuple[int, int]]](list), repeat_template(subject.tokenizer)
    for item in items(rules, subject, ("dev", "confirm")):
        if row := wanted.get((item.digest, item.placement)):
            cells = [cell for cell in row["cells"] if is_known(cell["policy"]) and cell["budget"] == BUDGET]
            ids, policies = place(item.sample, item.placement).prompt_ids, [cell["policy"] for cell in cells]
            prompt = Prompt(model, ids, ends, template, model.read(ids, layers_of(policies, model.layers)))
            for cell in cells:
                kept = prompt.kept(cell["policy"], ceil(Fraction(BUDGET) * len(ids)))
                result[cell["policy"]].append((len(kept), differing(kept, item, cell)))
    return result


def main(arguments: list[str] | None = None) -> int:
    """Print how many samples of each policy agree."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure.separate", description=__doc__)
    parser.add_argument("--rules", type=Path, required=True, help="rules of the study")
    parser.add_argument("--rows", type=Path, required=True, help="rows of the study, .jsonl.xz")
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file of the model in F32, Q8_0 and Q4_1")
    parser.add_argument("--count", type=int, default=20, help="number of samples to draw (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    result = agreement(parser.parse_args(arguments))
    print("policy\tsamples\tequal samples\tsets\tdifferent sets")
    for policy, some in result.items():
        sets, different = zip(*some, strict=True)
        print(policy, len(some), different.count(0), sum(sets), sum(different), sep="\t")
    return int(any(different for some in result.values() for _, different in some))


if __name__ == "__main__":
    sys.exit(main())
