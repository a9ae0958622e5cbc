"""Repeat cells of a study with independent code: `python -m lab.measure.repeat --rules RULES.toml --rows FILE`.

The command draws cells of stored rows and measures them again. The brute forces of the policies decide which tokens to
keep, from the queries and keys that the attention of transformers gets. The answer is read from a full cache in which
the evicted tokens are masked. Samples and sentence ends are those of the study.

Exit code 1: a likelihood differs by more than 1e-4 nats, or the number of kept tokens or of kept evidence differs.
"""

import argparse
import json
import lzma
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conformance.cache_suite.oracle import Masked
from conformance.methods import brutes
from conformance.oracles.pipeline import prefill
from conformance.strategies.policy_inputs import Inputs, Kept
from experiments.studies.evidence.kept import BLIND, FULL
from experiments.studies.evidence.rules import load_rules
from experiments.studies.evidence.run import Item, items
from experiments.studies.subject import Loading, Subject
from experiments.tasks import place
from models_integration.policies.methods import parse_policy
from spec.parameters import CrystalCacheParameters
from spec.policy import LayerView

BOUND = 1e-4
"""Largest difference of two log-likelihoods of an answer, in nats."""
CONTROLS = (FULL, BLIND)
POLICIES = ("crystalcache", "streamingllm", "knorm", "keydiff", "snapkv", "chunkkv", "nestedkv")
"""Policies that can be repeated, with any constants: their brute force takes minutes at most, and needs no
calibration."""


class Repeated(NamedTuple):
    """Cell of a row, and the result of the independent code."""

    policy: str
    budget: str
    context: int
    stored: float
    """Log-likelihood in the row, or NaN if the study reads no answers."""
    likelihood: float
    same_counts: bool

    @property
    def agrees(self) -> bool:
        """True if the likelihoods agree, or if the study reads no answers."""
        return bool(np.isnan(self.stored)) or abs(self.stored - self.likelihood) <= BOUND


_RECORDS: dict[int, LayerView] = {}


def _recording(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any,
) -> Any:
    q, k, v = (np.asarray(x[0].double().cpu()) for x in (query, key, value))
    _RECORDS[cast(int, module.layer_idx)] = LayerView(q, k, v, options["scaling"], None)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)


@torch.no_grad()
def recorded(model: PreTrainedModel, prompt: Tensor) -> Inputs:
    """Return the inputs of each layer's attention while a plain model reads a prompt (1, n)."""
    AttentionInterface.register("recording", _recording)
    AttentionMaskInterface.register("recording", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    stock = model.config._attn_implementation
    model.set_attn_implementation("recording")
    try:
        model(input_ids=prompt, use_cache=False)
        layers = [_RECORDS[at] for at in sorted(_RECORDS)]
    finally:
        model.set_attn_implementation(stock)
        _RECORDS.clear()
    return Inputs(layers, np.empty(0), [], prompt[0].numpy())


def sets(policy: str, budget: str, inputs: Inputs, sentence_ends: frozenset[int]) -> Kept:
    """Return the kept positions by brute force: one set, one for each layer, or one for each KV head of each layer."""
    if policy == FULL:
        return [list(range(inputs.n))]
    name, constants = parse_policy(policy)
    if name == "crystalcache":
        parameters = CrystalCacheParameters(**constants)
        view = inputs.layers[parameters.observed_layer]
        q, k, ids = view.q.tolist(), view.k.tolist(), inputs.token_ids.tolist()
        return [prefill(q, k, ids, sentence_ends, Fraction(budget), parameters, view.scaling).eviction.kept]
    (brute,) = (one for one in brutes() if one.name == name)
    B = ceil(Fraction(budget) * inputs.n)
    return brute.kept(inputs, B, **{**brute.small, **brute.published, **constants})


def _for_layers(kept: Kept, inputs: Inputs) -> list[Kept]:
    """Return the sets of each layer: one for all KV heads of the layer, or one for each."""
    L = len(inputs.layers)
    if len(kept) == 1:
        return [kept] * L
    each = len(kept) // L
    return [kept[at * each : (at + 1) * each] for at in range(L)]


@torch.no_grad()
def repeated(subject: Subject, item: Item, cell: Mapping[str, Any]) -> Repeated:
    """Repeat a cell of the row of an item with brute force and masks."""
    placement, gold = place(item.sample, item.placement), item.sample.answer_ids
    masked, blind = Masked(subject.model), cell["policy"] == BLIND
    prompt, same, columns = torch.tensor([placement.prompt_ids]), True, list[Tensor]()
    if not blind:
        inputs, seen = recorded(subject.model, prompt), prompt.shape[1] - placement.dropped_slots
        decided = sets(cell["policy"], cell["budget"], inputs, subject.sentence_ends)
        kept = [[position for position in positions if position < seen] for positions in decided]
        evidence = {at for start, stop in item.sample.evidence for at in range(start, stop)}
        counts = [len(one) for one in kept], [len(evidence.intersection(one)) for one in kept]
        # A row has one number if all sets have the same number of tokens.
        same = [one[0] if len(set(one)) == 1 else one for one in counts] == [cell["kept"], cell["evidence_kept"]]
        columns.append(masked.read(prompt[:, :seen])[:, -1:])
        masked.keep(_for_layers(kept, inputs))
    fed = item.sample.question_ids if blind else placement.fed_ids
    columns.append(masked.read(torch.tensor([[*fed, *gold[:-1]]])))
    log_probabilities = torch.cat(columns, dim=1)[0, -len(gold) :].double().log_softmax(dim=-1)
    likelihood = float(log_probabilities.gather(1, torch.tensor(gold)[:, None]).sum())
    return Repeated(cell["policy"], cell["budget"], item.index, cell.get("likelihood", float("nan")), likelihood, same)


def _is_known(policy: str) -> bool:
    return policy in CONTROLS or policy.partition("(")[0] in POLICIES


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    stored = path.read_bytes()
    yield from map(json.loads, (lzma.decompress(stored) if path.suffix == ".xz" else stored).splitlines())


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each repeated cell."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure.repeat", description=__doc__)
    parser.add_argument("--rules", type=Path, required=True, help="rules of the study")
    parser.add_argument("--rows", type=Path, required=True, help="rows of the study, .jsonl or .jsonl.xz")
    parser.add_argument("--count", type=int, default=10, help="number of cells to draw (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    given = parser.parse_args(arguments)
    rules = load_rules(given.rules)
    subject = Loading(rules.models[0], dtype="float32").subject()
    rows = [row for row in _lines(given.rows) if row["model"] == subject.name]
    subject = replace(subject, backend=rows[0]["backend"] if rows else subject.backend)
    every = [(row, cell) for row in rows for cell in row["cells"] if _is_known(cell["policy"])]
    drawn = np.random.default_rng(given.seed).permutation(len(every))[: given.count]
    of_rows = {(item.digest, item.placement): item for item in items(rules, subject, ("dev", "confirm"))}
    print("policy\tbudget\tcontext\tstored\trepeated\tdifference\tsame numbers of kept tokens", flush=True)
    result = []
    for at in drawn:
        row, cell = every[at]
        result.append(one := repeated(subject, of_rows[row["sample"], row["placement"]], cell))
        read = [one.stored, one.likelihood, one.likelihood - one.stored]
        shown = [""] * 3 if np.isnan(one.stored) else [f"{read[0]:.6f}", f"{read[1]:.6f}", f"{read[2]:+.1e}"]
        print(one.policy, one.budget, one.context, *shown, "yes" if one.same_counts else "NO", sep="\t", flush=True)
    likelihoods, counts = sum(one.agrees for one in result), sum(one.same_counts for one in result)
    print(f"{likelihoods} of {len(result)} likelihoods agree within {BOUND} nats, {counts} numbers of kept tokens")
    return 0 if likelihoods == counts == len(result) else 1


if __name__ == "__main__":
    sys.exit(main())
