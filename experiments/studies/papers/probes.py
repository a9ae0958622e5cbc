"""Conversations, diagnostics and activation patching (Table 13) of the paper on cross-session injection.

Conversations are generated, or are those of LoCoMo. Diagnostics are the attention of a question, and keys of archived
and fresh text. Patching replaces the residuals of the markers layer by layer.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.tasks.metrics import LOCOMO_F1, LOCOMO_PARTS, judge
from experiments.tasks.needle import DEFAULT_FILLER, generator
from models_integration.archive.splice import Chunk
from models_integration.model.architecture import restored_rotation
from models_integration.model.rotation import plain_layers, prefilled
from models_integration.model.seams import attention_of
from reference.injection.diagnostics import bands, entropy, key_cosine, sink_mass
from reference.injection.wrappers import Wrapped
from spec.errors import SpecError
from spec.files import read_bytes

__all__ = [
    "PATCHES", "TURNS", "Talk", "attention_figures", "draw_talk", "eager", "key_figures", "patched_layers",
    "patched_residuals", "read_locomo",
]

TURNS = 18
"""Number of turns of a generated conversation."""
_SEVERAL_SESSIONS, _INFERENCE, _ADVERSARIAL = 1, 3, 5
"""LoCoMo's categories: questions about several sessions, inferences, and questions without an answer.

The paper does not use the last category.
"""
_ROLES = ("Agent", "Project", "Doctor", "Captain", "Mission", "Station")
_NAMES = (
    "Adler", "Amber", "Apollo", "Atlas", "Beacon", "Blaine", "Briar", "Cedar", "Comet", "Coral", "Echo",
    "Ember", "Fox", "Galaxy", "Garnet", "Gideon", "Harbor", "Hawk", "Iris", "Ivory", "Lotus", "Lynx", "Maple",
    "Nova", "Olive", "Orion", "Pearl", "Quartz", "Robin", "Ruby", "Shadow", "Tempest", "Velvet", "Willow",
    "Winter", "Zenith",
)
_QUANTITIES = ("secret code", "access key", "serial number", "room number", "badge number", "reference number")


@dataclass(frozen=True)
class Talk:
    """Conversation: texts of turns and of unrelated turns, a question about one turn, the right value, and a metric."""

    turns: Sequence[str]
    fillers: Sequence[str]
    question: str
    value: str
    metric: str = "qa_f1"


def draw_talk(index: int) -> Talk:
    """Return conversation `index`. Each turn states one fact with the same subject or quantity as some different facts.

    In conversations with odd index, the turn with the answer names the subject only in the first sentence.
    """
    rng = generator((0, index))
    role, names = str(rng.choice(_ROLES)), [str(name) for name in rng.choice(_NAMES, TURNS // 2, replace=False)]
    quantities = [str(one) for one in rng.choice(_QUANTITIES, 2, replace=False)]
    order = [int(at) for at in rng.permutation(TURNS)]
    facts = [(f"{role} {names[at // 2]}", quantities[at % 2], str(1000 + int(rng.integers(9000)))) for at in order]
    plain = [DEFAULT_FILLER[int(at)] for at in rng.integers(len(DEFAULT_FILLER), size=2 * TURNS + 4)]
    turns = [
        f"{plain[2 * at]} The {quantity} for {name} is {value}. {plain[2 * at + 1]}"
        for at, (name, quantity, value) in enumerate(facts)
    ]
    asked = int(rng.integers(TURNS))
    name, quantity, value = facts[asked]
    if index % 2:
        turns[asked] = f"The board reviewed {name}. Its {quantity} is {value}. {plain[0]}"
    fillers = [" ".join(plain[start : start + 2]) for start in (2 * TURNS, 2 * TURNS + 2)]
    return Talk(turns, fillers, f"What is the {quantity} for {name}?", value)


def read_locomo(path: Path) -> list[Talk]:
    """Return the questions of a file `locomo10.json` without adversarial questions, alternating between conversations.

    A turn has the form "(date) speaker: text". `value` is the gold answer. The metrics are those of LoCoMo.

    Raises:
        SpecError: if the file does not have the format of LoCoMo's repository, or if nltk is missing.
    """
    judge(LOCOMO_F1, "", [""])
    try:
        conversations = [_talks(sample) for sample in json.loads(read_bytes(path))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError("file", str(path), f"must be LoCoMo's locomo10.json: {error!r}") from error
    longest = max(map(len, conversations), default=0)
    return [talks[at] for at in range(longest) for talks in conversations if at < len(talks)]


def _talks(sample: Mapping[str, Any]) -> list[Talk]:
    """Return a conversation with each of its questions."""
    held, turns, number = sample["conversation"], list[str](), 1
    while (session := held.get(f"session_{number}")) is not None:
        date = held[f"session_{number}_date_time"]
        turns += [f"({date}) {turn['speaker']}: {turn['text']}" for turn in session]
        number += 1
    return [_talk(turns, asked) for asked in sample["qa"] if asked["category"] != _ADVERSARIAL]


def _talk(turns: Sequence[str], asked: Mapping[str, Any]) -> Talk:
    """Return a conversation with a question. The answer of an inference ends before the first semicolon."""
    answer, category = str(asked["answer"]), asked["category"]
    if category == _INFERENCE:
        answer = answer.split(";")[0].strip()
    metric = LOCOMO_PARTS if category == _SEVERAL_SESSIONS else LOCOMO_F1
    return Talk(turns, (), str(asked["question"]), answer, metric)


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """Context manager inside which the model computes attention weights."""
    stock = attention_of(model.config)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(stock)


def attention_figures(weights: Sequence[Tensor], layers: Sequence[int], queries: int) -> dict[str, list[float]]:
    """Return entropy (nats) and attention to positions 0 to 3, by layer, averaged over heads and the last queries."""
    figures: dict[str, list[float]] = {"entropy": [], "sinks": []}
    for layer in layers:
        A = weights[layer][0, :, -queries:].double().cpu().numpy()
        figures["entropy"].append(float(entropy(A).mean()))
        figures["sinks"].append(float(sink_mass(A, np.arange(A.shape[-1])).mean()))
    return figures


def key_figures(
    model: PreTrainedModel, before: Sequence[int], chunks: Sequence[Chunk], texts: Sequence[range],
) -> dict[str, list[float]]:
    """Return mean cosines of archived and fresh keys of the same text after `before`, by layer, with and without RoPE.

    Args:
        texts: indices of the measured tokens in each chunk.
    """
    starts = np.cumsum([len(before), *(len(chunk.ids) for chunk in chunks)])
    places = [np.array(text, dtype=np.int64) for text in texts]
    old, new = np.concatenate(places), np.concatenate([start + at for start, at in zip(starts, places, strict=False)])
    with restored_rotation(model):
        fresh = plain_layers(prefilled(model, [*before, *(token for chunk in chunks for token in chunk.ids)]))
    figures: dict[str, list[float]] = {"cosine": [], "unrotated": []}
    for layer in sorted(chunks[0].layers):
        rule, frequencies = chunks[0].rotary.layers[layer], np.zeros(0)
        if rule.buffer is not None:
            frequencies = chunks[0].rotary.frequencies[rule.buffer].double().cpu().numpy()
        slot = int(rule.slot == "values")
        stored = torch.cat([chunk.layers[layer][slot][:, at] for chunk, at in zip(chunks, places, strict=True)], 1)
        again = (fresh[layer].keys, fresh[layer].values)[slot][0, :, new]
        archived, live = (x.double().cpu().numpy() for x in (stored, again))
        cosines = key_cosine(archived, live, (old, new), frequencies, rule.style or "half_split")
        for name, each in zip(figures, cosines, strict=True):
            figures[name].append(float(each.mean()))
    return figures


PATCHES = ("early", "mid", "upper", "all", "random", "noise")
"""Bands of `reference.injection.diagnostics.bands`, random layers (as many as in `upper`), and `upper` with noise."""
_SEED = 0


def patched_layers(patch: str, depth: int) -> tuple[Collection[int], float]:
    """Return the layers of a patch, and the standard deviation of its noise in units of the residuals' deviation."""
    name = patch if patch in bands(depth) else "upper"
    layers = range(*bands(depth)[name])
    if patch == "random":
        drawn = torch.randperm(depth, generator=torch.Generator().manual_seed(_SEED))
        return set(drawn[: len(layers)].tolist()), 0.0
    return layers, float(patch == "noise")


@contextmanager
def patched_residuals(
    model: PreTrainedModel, wrapped: Wrapped, layers: Collection[int], noise: float,
) -> Iterator[None]:
    """Context manager in which the markers' inputs of each decoder layer are those of an unpatched run, or zeros.

    Args:
        layers: layers with the residuals of the unpatched run. All other layers have zeros.
        noise: normal noise added to these residuals, in standard deviations of the residuals.

    Raises:
        SpecError: if the decoder of the model has no list of layers.
    """
    decoder, at = _decoder_layers(model), list(wrapped.markers)
    result = dict[int, Tensor]()
    with _hooked(decoder, lambda index, x: result.__setitem__(index, x[:, at].clone())), restored_rotation(model):
        prefilled(model, wrapped.ids)
    random = torch.Generator().manual_seed(_SEED)

    def write(index: int, x: Tensor) -> None:
        given = result[index] if index in layers else torch.zeros_like(result[index])
        if index in layers and noise:
            given = given + noise * given.std() * torch.randn(given.shape, generator=random).to(given)
        x[:, at] = given

    with _hooked(decoder, write):
        yield


def _decoder_layers(model: Any) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise SpecError("model", type(model).__name__, "has no list of decoder layers whose residuals can be patched")
    return layers


@contextmanager
def _hooked(layers: nn.ModuleList, act: Any) -> Iterator[None]:
    """Context manager in which `act` can change a copy of each layer's inputs. `act` receives layer index and copy."""
    def hook(index: int) -> Any:
        def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = given[0].clone()
            act(index, hidden)
            return (hidden, *given[1:])
        return before

    # A model of transformers 5.24 passes the hidden states to a layer as the first positional argument.
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(hook(index)).remove)
        yield
