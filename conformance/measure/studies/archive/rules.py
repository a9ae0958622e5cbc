"""The arms: each gives the session that a question is then read in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.measure.studies.archive import baselines
from conformance.measure.studies.archive.baselines import ARMS as BASELINES
from conformance.measure.studies.archive.baselines import Case
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import Chunk, computed, upper_half
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import CACHE
from models_integration.model.rotation import Rotary, angles_between, turned
from models_integration.pocket.training.chat import PROMPTS, turn
from models_integration.pocket.training.tokenizer import BOS
from reference.injection.quantisers import ARMS as CODECS
from reference.injection.quantisers import SCHEMES, codes, decoded, quantised_region, scale
from reference.injection.wrappers import CELLS, FORMS, Vocabulary, Wrapped, wrap

__all__ = ["ARMS", "Arm", "Scene", "Shelf"]

WRAPPERS = ("full", "full_hidden_preamble", "opening", "closing", "role", "markers")
ON_WRAPPED = ("no_shift", "prefix", "global_sink", "legolink_3", "cacheblend_15", "full_recompute")
FEW_BITS = ("per_tensor", "per_head", "per_channel", "per_token", "kivi")


class Shelf:
    """Chunks of one conversation, each computed once for each form."""

    def __init__(self, model: PreTrainedModel, rotary: Rotary, vocabulary: Vocabulary) -> None:
        self.model, self.rotary, self.vocabulary = model, rotary, vocabulary
        self._chunks: dict[tuple[tuple[int, ...], str], tuple[Wrapped, Chunk]] = {}

    def chunk(self, ids: tuple[int, ...], form: str) -> tuple[Wrapped, Chunk]:
        """A chunk in a form, with where everything stands in it."""
        if (ids, form) not in self._chunks:
            wrapped = wrap(FORMS[form], ids, self.vocabulary)
            made = computed(self.model, wrapped.ids, self.rotary, wrapped.hidden, wrapped.markers)
            self._chunks[ids, form] = wrapped, made
        return self._chunks[ids, form]


@dataclass(frozen=True)
class Scene:
    """What an arm may use: the chunks that were selected in their order, by cut, and filler."""

    shelf: Shelf
    chunks: Mapping[str, tuple[tuple[int, ...], ...]]
    fillers: tuple[tuple[int, ...], ...]
    talk: tuple[tuple[int, ...], ...]
    room: int

    def ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text."""
        return tuple(self.shelf.vocabulary.encode(text))

    def case(self, form: str = "full", cut: str = "turn", fillers: int = 0, prompt: str = PROMPTS[0]) -> Case:
        """The session has read a system prompt; behind it come the chunks, then fillers archived as they are."""
        chosen = (*self.chunks[cut], *self.fillers[:fillers])
        wrapped = [self.shelf.chunk(ids, form) for ids in chosen]
        first = wrapped[0][0]
        return Case(
            self.shelf.model, self.shelf.rotary, self.ids(BOS + turn("system", prompt)),
            tuple(self.shelf.chunk(ids, "raw")[1] for ids in chosen), tuple(chunk for _, chunk in wrapped),
            first.ids[: first.start], self.room,
        )


@dataclass(frozen=True)
class Arm:
    """How a session is made, what it is compared with, and how many unrelated turns it reads before the question."""

    family: str
    base: str
    make: Callable[[Scene], RetainedCache]
    talk: int = 0
    cut: str = "turn"

    def session(self, scene: Scene) -> RetainedCache:
        """The session before the question; call it without gradients."""
        cache = self.make(scene)
        ids = [token for turn_ids in scene.talk[: self.talk] for token in turn_ids]
        if ids:
            with layer_masks(scene.shelf.model, cache):
                scene.shelf.model(input_ids=torch.tensor([ids]), **{CACHE: cache}, logits_to_keep=1)
        return cache


def _of(
    baseline: str, form: str = "full", cut: str = "turn", fillers: int = 0, prompt: str = PROMPTS[0],
) -> Callable[[Scene], RetainedCache]:
    """A baseline of `conformance.measure.studies.archive.baselines`; what is wrapped in the form `raw` is raw."""
    return lambda scene: BASELINES[baseline](scene.case(form, cut, fillers, prompt))


def coded(scene: Scene, codec: str, bits: int) -> RetainedCache:
    """Wrapped chunks whose keys and values went through a codec with so many bits."""
    case = scene.case()
    depth = len(case.rotary.layers)
    return baselines.inject(replace(case, wrapped=tuple(_recoded(chunk, codec, bits, depth) for chunk in case.wrapped)))


def _recoded(chunk: Chunk, codec: str, bits: int, depth: int) -> Chunk:
    arm = CODECS[codec]
    chosen, tokens = quantised_region(arm, depth, len(chunk.ids))

    def through(x: Tensor, scheme: str | None) -> Tensor:
        if scheme is None:
            return x
        part = x[:, tokens.start : tokens.stop].double().numpy()
        step = scale(part, SCHEMES[scheme], bits)
        back = torch.from_numpy(decoded(codes(part, step, bits), step)).to(x.dtype)
        return torch.cat([x[:, : tokens.start], back, x[:, tokens.stop :]], 1)

    layers = {
        layer: (through(keys, arm.keys), through(values, arm.values)) if layer in chosen else (keys, values)
        for layer, (keys, values) in chunk.layers.items()
    }
    return replace(chunk, layers=layers)


def _half(layers: Mapping[int, tuple[Tensor, Tensor]], depth: int, half: str) -> dict[int, tuple[Tensor, Tensor]]:
    upper = upper_half(layers, depth)
    return upper if half == "upper" else {index: pair for index, pair in layers.items() if index not in upper}


def only_half(scene: Scene, half: str) -> RetainedCache:
    """Wrapped chunks of which one half of the layers was archived; the other layers do not see them."""
    case = scene.case()
    depth = len(case.rotary.layers)
    cut = tuple(replace(chunk, layers=_half(chunk.layers, depth, half)) for chunk in case.wrapped)
    return baselines.inject(replace(case, wrapped=cut))


def half_wrapped(scene: Scene, half: str) -> RetainedCache:
    """The paper's layer ablation: one half of the layers from the wrapped chunk, the others with the raw one's tokens.

    The wrapper's own tokens are those of the wrapped chunk in every layer, so that all layers have the same tokens.
    """
    case = scene.case()
    depth, mixed = len(case.rotary.layers), []
    for ids in scene.chunks["turn"]:
        (form, wrapped), (_, raw) = scene.shelf.chunk(ids, "full"), scene.shelf.chunk(ids, "raw")
        kept = _half(wrapped.layers, depth, half)
        layers = {
            index: pair if index in kept else _with_raw(wrapped, raw, form.start, index)
            for index, pair in wrapped.layers.items()
        }
        mixed.append(replace(wrapped, layers=layers))
    return baselines.inject(replace(case, wrapped=tuple(mixed)))


def _with_raw(wrapped: Chunk, raw: Chunk, start: int, index: int) -> tuple[Tensor, Tensor]:
    """One layer of the wrapped chunk with the raw chunk's tokens at `start`."""
    rule = raw.rotary.layers[index]
    keys, values = raw.layers[index]
    if rule.slot == "keys" and rule.buffer is not None and rule.style is not None:
        theta = raw.rotary.frequencies[rule.buffer]
        keys = turned(keys, angles_between(keys.shape[1], start, theta, theta), rule.style)
    stop, (outer_keys, outer_values) = start + keys.shape[1], wrapped.layers[index]
    return (
        torch.cat([outer_keys[:, :start], keys, outer_keys[:, stop:]], 1),
        torch.cat([outer_values[:, :start], values, outer_values[:, stop:]], 1),
    )


def _arms() -> dict[str, Arm]:
    arms = {
        "text": Arm("text", "raw", _of("text")),
        "text, full": Arm("text", "text", _of("text_wrapped")),
        "raw": Arm("wrapper", "", _of("inject_raw")),
        **{form: Arm("wrapper", "raw", _of("inject", form)) for form in WRAPPERS},
        **{name: Arm("baseline", "full", _of(name)) for name in ON_WRAPPED},
    }
    for bits, names in ((8, [name for name in CODECS if name != "none"]), (5, FEW_BITS), (4, FEW_BITS)):
        for name in names:
            arms[f"{name}, {bits} bits"] = Arm("codec", "full", partial(coded, codec=name, bits=bits))
    for half in ("upper", "lower"):
        arms[f"{half} half wrapped"] = Arm("layers", "raw", partial(half_wrapped, half=half))
        arms[f"{half} half alone"] = Arm("layers", "full", partial(only_half, half=half))
    for cell, (sentence, form) in CELLS.items():
        cut = "sentence" if sentence else "arbitrary"
        arms[cell] = Arm("2 x 2", "" if cell == "A" else "A", _of("inject", form, cut), cut=cut)
    for cut in ("arbitrary", "sentence"):
        arms[f"text, {cut}"] = Arm("2 x 2", "A" if cut == "arbitrary" else "C", _of("text", cut=cut), cut=cut)
    forms = (("raw", "inject", "raw"), ("full", "inject", "full"), ("text, full", "text_wrapped", "full"))
    for name, kind, form in forms:
        for count in (1, 2, 8):
            arms[f"{count} fillers: {name}"] = Arm("fillers", name, _of(kind, form, fillers=count))
        arms[f"coding prompt: {name}"] = Arm("drift", name, _of(kind, form, prompt=PROMPTS[1]))
        for count in (4, 12):
            arms[f"{count} turns: {name}"] = Arm("drift", name, _of(kind, form), talk=count)
    return arms


ARMS: Mapping[str, Arm] = _arms()
