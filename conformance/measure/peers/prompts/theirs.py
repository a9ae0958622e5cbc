"""kvpress's half: what its presses keep of the same tokens, what its pipeline then says, which readings explain it."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from types import SimpleNamespace
from typing import Any

import kvpress  # type: ignore[import-not-found]
import numpy as np
import torch
from kvpress.utils import get_prerope_query_states  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from conformance.measure.peers.differences import FLOORED, OURS, TRUNCATED, needed
from conformance.measure.peers.inputs import Inputs
from conformance.measure.peers.presses import PRESSES, VERSION, kept_by_press
from conformance.measure.peers.prompts.plan import (
    COUNTERPARTS,
    MAX_NEW_TOKENS,
    MODEL,
    UNEXPLAINED,
    Plan,
    by_name,
    constants,
    ratio,
)
from conformance.measure.peers.sets import Array, digest, marked, packed, positions_of
from models_integration.model.published_weights import located
from models_integration.studies.results import Row, append_row

__all__ = ["run_theirs"]


@dataclass(frozen=True)
class Prefill:
    """A prompt that was read once with the full cache: what the hooks of any press are then given."""

    ids: Sequence[int]
    layers: Sequence[tuple[Any, Mapping[str, Any]]]
    """Each attention layer, with the arguments of its call."""
    cache: Any

    def keys(self, layer: int) -> Tensor:
        """Of all tokens (heads, n, d)."""
        keys: Tensor = self.cache.layers[layer].keys[0]
        return keys


@torch.no_grad()
def run_theirs(plan: Plan, progress: Callable[[str], None], model: str = MODEL) -> None:
    """Write what is not written yet of our half's prompts, one line each."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = AutoModelForCausalLM.from_pretrained(located(model))
    loaded.train(False)
    done, cells = plan.rows("theirs"), list(product(COUNTERPARTS, plan.budgets))
    for at, (prompt, ours) in enumerate(list(plan.rows("ours").items())[: plan.prompts]):
        if prompt not in done:
            start = time.process_time()
            row = {"prompt": prompt, "length": ours["length"], "budgets": ours["budgets"], **about(loaded)}
            row |= pressed_prompt(loaded, ours, cells, cells[at] if at < len(cells) else None)
            append_row(plan.file("theirs"), {**row, "seconds": time.process_time() - start})
            progress(f"{ours['task']} {ours['index']}")


def about(model: Any) -> Row:
    """What decided."""
    return {
        "attention": model.config._attn_implementation, "dtype": str(model.dtype),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"kvpress": VERSION, **{name: version(name) for name in ("transformers", "torch", "numpy")}},
    }


def pressed_prompt(
    model: Any, ours: Row, cells: Sequence[tuple[str, str]], checked: tuple[str, str] | None
) -> Row:
    """Every press and budget on one prefill; one of them also on a prefill of its own, which must keep the same."""
    prefill = read(model, ours["context"])
    row: Row = {
        "keys": [digest(prefill.keys(layer).numpy()) for layer in range(len(prefill.layers))],
        "full": answer(model, copied(prefill), ours)["ids"], "kept": {}, "answers": {},
    }
    for name, budget in cells:
        press = PRESSES[name][0](float(ratio(budget, ours["length"])), constants(len(prefill.layers)))
        cache = compressed(model, press, prefill)
        kept = kept_sets(prefill, cache)
        row["kept"].setdefault(name, {})[budget] = packed(kept)
        row["answers"].setdefault(name, {})[budget] = answer(model, cache, ours)
        if (name, budget) == checked:
            same = bool((kept == kept_sets(prefill, own_prefill(model, press, prefill.ids))).all())
            row["checked"] = {"press": name, "budget": budget, "equal": same}
    return {**row, "explained": explained(model, prefill, cells)}


def read(model: Any, ids: Sequence[int]) -> Prefill:
    """The prefill that kvpress's pipeline runs, with no press."""
    layers: list[tuple[Any, Mapping[str, Any]]] = []

    def note(module: Any, args: tuple[Any, ...], given: Mapping[str, Any], output: tuple[Any, ...]) -> None:
        assert not args
        assert output[1] is None
        layers.append((module, {name: value for name, value in given.items() if name != "past_key_values"}))

    hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in model.model.layers]
    cache = DynamicCache()
    model.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return Prefill(ids, layers, cache)


def copied(prefill: Prefill) -> Any:
    """A cache with all tokens, which may be written to."""
    cache = DynamicCache()
    for module, _ in prefill.layers:
        module.masked_key_indices = None
        layer = prefill.cache.layers[module.layer_idx]
        cache.update(layer.keys.clone(), layer.values.clone(), module.layer_idx)
    return cache


def compressed(model: Any, press: Any, prefill: Prefill) -> Any:
    """The cache that the press's own hooks leave, given what the layers of the prefill were called with."""
    with press(model):
        cache = copied(prefill)
        for module, given in prefill.layers:
            press.forward_hook(module, [], {**given, "past_key_values": cache}, [None, None])
    return cache


def own_prefill(model: Any, press: Any, ids: Sequence[int]) -> Any:
    """The cache after a prefill under the press."""
    cache = DynamicCache()
    with press(model):
        model.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache)
    return cache


def kept_sets(prefill: Prefill, cache: Any) -> Array:
    """Which tokens each layer and head keeps (layers * heads, n): those in the cache that are not masked."""
    found = []
    for at, (module, _) in enumerate(prefill.layers):
        keys = prefill.keys(at).numpy()
        kept = marked(positions_of(cache.layers[at].keys[0].numpy(), keys), len(prefill.ids))
        if module.masked_key_indices is not None:
            kept[module.masked_key_indices[1:]] = False
        found.append(kept)
    return np.concatenate(found)


def answer(model: Any, cache: Any, ours: Row) -> Row:
    """The greedy answer of kvpress's pipeline, and how it refuses the question.

    Where layers keep different numbers of tokens it fails on several tokens at once; all but the last of them are then
    read one by one, as the pipeline reads an answer.
    """
    question, seen, refused = ours["question"], ours["length"], ""
    if len({cache.get_seq_length(layer) for layer in range(len(cache))}) > 1:
        try:
            return {"ids": piped(model, deepcopy(cache), question, seen), "refused": ""}
        except RuntimeError as error:
            refused = str(error)
        for token in question[:-1]:
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[seen]]))
            seen += 1
        question = question[-1:]
    return {"ids": piped(model, cache, question, seen), "refused": refused}


def piped(model: Any, cache: Any, question: Sequence[int], seen: int) -> list[int]:
    """What the pipeline's own loop says. It gives decoded text; this tokenizer's text are the ids."""
    pipeline = SimpleNamespace(model=model, tokenizer=SimpleNamespace(decode=lambda ids, **_: ids.tolist()))
    ids = torch.tensor([list(question)])
    said: list[int] = json.loads(
        kvpress.KVPressTextGenerationPipeline.generate_answer(pipeline, ids, cache, seen, MAX_NEW_TOKENS)
    )
    return said


def explained(model: Any, prefill: Prefill, cells: Sequence[tuple[str, str]]) -> Row:
    """By press and budget: readings, and what ours keep under them on this prefill's tensors in float64.

    The fewest readings that explain the first layer; at a layer that these do not explain, the fewest that do.
    """
    layers, n = len(prefill.layers), len(prefill.ids)
    readings: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(cells, ())
    counts: dict[tuple[str, str], Counter[str]] = {cell: Counter() for cell in cells}
    kept: dict[tuple[str, str], list[Array]] = {cell: [] for cell in cells}
    for layer in range(layers):
        inputs = inputs_of(model, prefill, layer)
        for name, budget in cells:
            here = inputs.at(ratio(budget, n))
            theirs = kept_by_press(PRESSES[name][0], here, False)
            sets, some = explaining(name, here, theirs, readings[name, budget])
            readings[name, budget] = some or ()
            counts[name, budget].update([UNEXPLAINED] if some is None else some)
            kept[name, budget].append(marked(sets, n))
    return by_name({
        cell: {"layers": layers, "readings": dict(counts[cell]), "kept": packed(np.concatenate(kept[cell]))}
        for cell in cells
    })


def explaining(
    press: str, inputs: Inputs, theirs: list[list[int]], before: tuple[str, ...]
) -> tuple[list[list[int]], tuple[str, ...] | None]:
    """Our kept sets under the readings that make them the press's, and these; first those of the layer before."""
    ours, readings = OURS[press]
    if (kept := ours(inputs, frozenset(before))) == theirs:
        return kept, before
    # The ratio is exact, so that both sides have the same budget.
    readings = tuple(reading for reading in readings if reading not in (FLOORED, TRUNCATED))
    some = needed(press, inputs, theirs, readings)
    return ours(inputs, frozenset(readings if some is None else some)), some


def inputs_of(model: Any, prefill: Prefill, layer: int) -> Inputs:
    """A layer's tensors as both sides of the comparison on random inputs take them."""
    module, given = prefill.layers[layer]
    stored = prefill.cache.layers[layer]
    raw_q = get_prerope_query_states(module, given["hidden_states"])
    q, k, v = (tensor[0].double().numpy() for tensor in (raw_q, stored.keys, stored.values))
    inv_freq = model.model.rotary_emb.inv_freq.double().numpy()
    inputs = Inputs(0, "0", layer, q, k, v, inv_freq, constants(len(prefill.layers)))
    assert inputs.view.k is k  # made once, for all ratios
    return inputs
