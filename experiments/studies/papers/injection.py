"""Study of the paper on cross-session injection: sessions with chunks of conversations, and answers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experiments.studies.answers import answered, next_token
from experiments.studies.papers.probes import (
    PATCHES,
    Talk,
    attention_figures,
    eager,
    key_figures,
    patched_layers,
    patched_residuals,
)
from experiments.studies.subject import Subject
from experiments.tasks.assembly import joiner
from experiments.tasks.metrics import judge
from models_integration.archive.blend import blend
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.library import recommended_form, vocabulary_of
from models_integration.archive.retrieval import lexical
from models_integration.archive.splice import Chunk, computed, splice, upper_half
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import cache_name
from models_integration.model.frame import encode, opening_ids
from models_integration.model.rotation import angles_between, frequencies_at, recognise, turned
from reference.injection.quantisers import ARMS as CODECS
from reference.injection.quantisers import SCHEMES, codes, decoded, quantised_region, scale
from reference.injection.splicing import SINKS
from reference.injection.wrappers import FORMS, Form, Marker, slices, wrap
from spec.errors import SpecError

__all__ = [
    "ASYMMETRIC", "NEW_TOKENS", "PATCHES", "TEMPLATES", "Scene", "Session", "Template", "asymmetric",
    "template_of",
]

SELECTED, SLICE, NEW_TOKENS = 3, 48, 16
"""Number of chunks per question, tokens per slice, and tokens per answer."""
ASYMMETRIC = "asymmetric"
"""Codec `pt_asym` of Table 10, which the archive does not support."""
_PROMPTS = ("You are a helpful assistant.", "You are a coding assistant.")


@dataclass(frozen=True)
class Template:
    """Chat template: texts of a session and a question, and the wrappers of Table 4 or 5 by name of the arm."""

    system: str
    question: str
    wrappers: Mapping[str, Form]

    @property
    def full(self) -> Form:
        """Return the wrapper with the whole template."""
        return next(iter(self.wrappers.values()))

    @property
    def short(self) -> Form:
        """Return the E-wrapper."""
        return list(self.wrappers.values())[-1]


_SYSTEM, _USER, _END = Marker("<|system|>"), Marker("<|user|>"), Marker("<|end|>")
TEMPLATES: Mapping[str, Template] = {
    "markers": Template(
        "<|im_start|>system\n{}<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        {"A_full": FORMS["full"], "B_opening_only": FORMS["opening"], "C_closing_only": FORMS["closing"],
         "D_role_name_only": FORMS["role"], "E_markers_no_role": FORMS["markers"]},
    ),
    "markers_phi3": Template(
        "<|system|>\n{}<|end|>\n", "<|user|>\n{}<|end|>\n<|assistant|>\n",
        {"A_full_phi3": Form((_SYSTEM, _PROMPTS[0], _END, _USER), (_END,)), "E_markers_phi3": FORMS["markers_phi3"]},
    ),
}


def template_of(subject: Subject) -> Template:
    """Return the chat template whose markers are tokens of the model.

    Raises:
        SpecError: if the model has neither ChatML's nor Phi-3's markers.
    """
    name = recommended_form(vocabulary_of(subject.tokenizer))
    if name not in TEMPLATES:
        raise SpecError(
            "model", subject.label, "must have the tokens <|im_start|> and <|im_end|>, or <|end|>; use --model chat"
        )
    return TEMPLATES[name]


@dataclass(frozen=True)
class Session:
    """Contents of a session before the question.

    Attributes:
        wrapper: wrapper of the chunks: "raw", "full", "short" or the name of an arm of Table 4 or 5.
        cut: ends of the chunks: "turn", "arbitrary" or "sentence".
        codec: codec of keys and values, or ASYMMETRIC.
        half: half of the layers with wrapped chunks, "upper" or "lower". "" means all layers.
        fillers: number of unrelated chunks after the selected chunks.
        prompt: index of the system prompt.
        text: True if the chunks are processed as text.
        every: True if the session contains all chunks, not only the selected chunks.
        before: contents before the chunks. "" is the system prompt, and "sinks" its first four tokens. "prefix" is the
            system prompt and the start of the full wrapper.
        patch: band of PATCHES in which the markers of wrapped chunks have residuals. "" means all layers.
        probe: True if attention and keys are measured by layer instead of an answer.
        blend: share of the inserted tokens that CacheBlend recomputes.
    """

    wrapper: str = "raw"
    cut: str = "turn"
    codec: str = "none"
    half: str = ""
    fillers: int = 0
    prompt: int = 0
    text: bool = False
    every: bool = False
    before: str = ""
    patch: str = ""
    probe: bool = False
    blend: float = 0.0

    @property
    def name(self) -> str:
        """Name in rows: all values that differ from the defaults."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != getattr(Session(), key)})


class Scene:
    """Conversation with a model. Chunks are selected once for each cut, and computed once for each wrapper."""

    def __init__(self, subject: Subject, talk: Talk) -> None:
        self.subject, self.talk, self.template = subject, talk, template_of(subject)
        self._rotary, self._vocabulary = recognise(subject.model), vocabulary_of(subject.tokenizer)
        self._chunk = lru_cache(maxsize=None)(self._compute)
        self._selected = lru_cache(maxsize=None)(self._select)

    @torch.no_grad()
    def measure(self, session: Session) -> dict[str, Any]:
        """Return the measurements of a session: of an answer or of a probe."""
        return self._probe(session) if session.probe else self._answer(session)

    def _answer(self, session: Session) -> dict[str, Any]:
        """Return the greedy answer, whether it contains the value, the F1 of words, and seconds to the first token.

        The clock begins when the system prompt is read and the chunks are computed, except chunks that are read as
        text.
        """
        cache, ids, start = self._opened(session)
        answer, seconds = answered(self.subject.model, cache, ids, self.subject.stop_ids, NEW_TOKENS, start)
        text, value = str(self.subject.tokenizer.decode(answer)), self.talk.value
        f1 = judge(self.talk.metric, text, [value])
        return {"answer": text, "right": value in text, "f1": f1, "seconds": seconds}

    def _probe(self, session: Session) -> dict[str, list[float]]:
        """Return the attention of the question's tokens, and cosines of the chunks' keys with keys of the same text."""
        cache, ids, _ = self._opened(session)
        chunks = [self.chunk_of(one, session) for one in self._chosen(session)]
        wrapped = [wrap(self._form(session), one, self._vocabulary) for one in self._chosen(session)]
        with layer_masks(self.subject.model, cache), eager(self.subject.model):
            given = torch.tensor([ids], device=self.subject.model.device)
            names: dict[str, Any] = {cache_name(self.subject.model): cache}
            weights = self.subject.model(input_ids=given, use_cache=True, output_attentions=True, **names).attentions
        return attention_figures(weights, sorted(chunks[0].layers), len(self._question())) | key_figures(
            self.subject.model, self.session_ids(session), chunks, [range(one.start, one.stop) for one in wrapped]
        )

    def _opened(self, session: Session) -> tuple[RetainedCache, list[int], float]:
        """Return the cache before the question, the ids that remain to be read, and the start of the clock."""
        before, ids = self.session_ids(session), self._question()
        cache = RetainedCache(self.subject.model.config.get_text_config(decoder=True))
        next_token(self.subject.model, cache, before)
        chosen = self._chosen(session)
        chunks = [] if session.text else [self.chunk_of(one, session) for one in chosen]
        start = perf_counter()
        if session.text:
            ids = [token for one in chosen for token in wrap(self._form(session), one, self._vocabulary).ids] + ids
        length = self.tokens(session) + NEW_TOKENS
        splice(cache, chunks, frequencies_at(self.subject.model, self._rotary, length))
        if session.blend:
            every = [*before, *(token for chunk in chunks for token in chunk.visible)]
            blend(self.subject.model, cache, every, len(before), session.blend)
        return cache, ids, start

    def _question(self) -> list[int]:
        return list(encode(self.subject.tokenizer, self.template.question.format(self.talk.question)))

    def chunk_of(self, ids: tuple[int, ...], session: Session) -> Chunk:
        """Return a chunk as inserted into a session: with the wrapper, for half of the layers, after the codec."""
        chunk = self._patched(ids, session) if session.patch else self._chunk(ids, self._form(session))
        if session.half:
            chunk = self._mixed(ids, chunk, session)
        return chunk if session.codec == "none" else _through(chunk, session.codec, len(self._rotary.layers))

    def tokens(self, session: Session) -> int:
        """Return the number of tokens of a session before the answer."""
        wrapped = [wrap(self._form(session), one, self._vocabulary) for one in self._chosen(session)]
        chunks = sum(len(one.ids) - (0 if session.text else one.hidden) for one in wrapped)
        return len(self.session_ids(session)) + chunks + len(self._question())

    def token_bytes(self) -> float:
        """Return the number of bytes of a cached token."""
        chunk = self.chunk_of(self._selected("turn")[0], Session())
        return sum(x.nbytes for pair in chunk.layers.values() for x in pair) / len(chunk.ids)

    def session_ids(self, session: Session) -> list[int]:
        """Return the ids that the session processes before the chunks."""
        encoded = encode(self.subject.tokenizer, self.template.system.format(_PROMPTS[session.prompt]))
        system = [*opening_ids(self.subject.tokenizer), *encoded]
        opening = wrap(Form(self.template.full.prefix), system, self._vocabulary)
        return {"": system, "prefix": [*system, *opening.ids[: opening.start]], "sinks": system[:SINKS]}[session.before]

    def _form(self, session: Session) -> Form:
        named = {"raw": FORMS["raw"], "full": self.template.full, "short": self.template.short}
        return {**self.template.wrappers, **named}[session.wrapper]

    def _chosen(self, session: Session) -> list[tuple[int, ...]]:
        more = [self._ids(text) for text in self.talk.fillers[: session.fillers]]
        return [*(self._pieces(session.cut) if session.every else self._selected(session.cut)), *more]

    def _ids(self, text: str) -> tuple[int, ...]:
        return encode(self.subject.tokenizer, joiner(self.subject.tokenizer) + text)

    def _pieces(self, cut: str) -> list[tuple[int, ...]]:
        turns = [self._ids(text) for text in self.talk.turns]
        if cut == "turn":
            return turns
        stream = [token for ids in turns for token in ids]
        ends = self.subject.sentence_ends if cut == "sentence" else frozenset[int]()
        return [tuple(stream[start:stop]) for start, stop in slices(stream, ends, SLICE)]

    def _select(self, cut: str) -> list[tuple[int, ...]]:
        """Return the best chunks by BM25, in the order of the conversation."""
        pieces = self._pieces(cut)
        corpus = {f"{at:03}": self._vocabulary.decode(ids) for at, ids in enumerate(pieces)}
        ranked = lexical(corpus)(self.talk.question)
        return [pieces[int(name)] for name in sorted(ranked[:SELECTED])]

    def _compute(self, ids: tuple[int, ...], form: Form) -> Chunk:
        wrapped = wrap(form, ids, self._vocabulary)
        return computed(self.subject.model, wrapped.ids, self._rotary, wrapped.hidden, wrapped.markers)

    def _patched(self, ids: tuple[int, ...], session: Session) -> Chunk:
        """Return the wrapped chunk. In some layers its markers have their residuals, and in all other layers zeros."""
        wrapped, model = wrap(self._form(session), ids, self._vocabulary), self.subject.model
        layers, scale = patched_layers(session.patch, len(self._rotary.layers))
        with patched_residuals(model, wrapped, layers, scale):
            return computed(model, wrapped.ids, self._rotary, wrapped.hidden, wrapped.markers)

    def _mixed(self, ids: tuple[int, ...], chunk: Chunk, session: Session) -> Chunk:
        """Return a chunk with half of the layers from the wrapped chunk, and the raw chunk's tokens in all others."""
        upper = upper_half(chunk.layers, len(self._rotary.layers))
        kept = set(upper) if session.half == "upper" else set(chunk.layers) - set(upper)
        raw, start = self._chunk(ids, FORMS["raw"]), wrap(self._form(session), ids, self._vocabulary).start
        return replace(chunk, layers={
            index: pair if index in kept else _with_raw(chunk, raw, start, index)
            for index, pair in chunk.layers.items()
        })


def _with_raw(wrapped: Chunk, raw: Chunk, start: int, index: int) -> tuple[Tensor, Tensor]:
    """Return one layer of the wrapped chunk, with the tokens of the raw chunk from `start` on."""
    rule, (keys, values) = raw.rotary.layers[index], raw.layers[index]
    if rule.slot == "keys" and rule.buffer is not None and rule.style is not None:
        theta = raw.rotary.frequencies[rule.buffer]
        keys = turned(keys, angles_between(keys.shape[1], start, theta, theta), rule.style)
    stop = start + keys.shape[1]
    first, second = (
        torch.cat([outer[:, :start], inner, outer[:, stop:]], 1)
        for outer, inner in zip(wrapped.layers[index], (keys, values), strict=True)
    )
    return first, second


def _through(chunk: Chunk, codec: str, depth: int) -> Chunk:
    """Return the chunk after encoding and decoding with an 8-bit codec."""
    if codec == ASYMMETRIC:
        return _mapped(chunk, chunk.layers, lambda x, _: asymmetric(x))
    arm = CODECS[codec]
    layers, tokens = quantised_region(arm, depth, len(chunk.ids))

    def back(x: Tensor, slot: int) -> Tensor:
        scheme = (arm.keys, arm.values)[slot]
        if scheme is None:
            return x
        part = x[:, tokens.start : tokens.stop].double().cpu().numpy()
        step = scale(part, SCHEMES[scheme], 8)
        created = torch.from_numpy(decoded(codes(part, step, 8), step)).to(x)
        return torch.cat([x[:, : tokens.start], created, x[:, tokens.stop :]], 1)

    return _mapped(chunk, layers, back)


def _mapped(chunk: Chunk, layers: Any, change: Callable[[Tensor, int], Tensor]) -> Chunk:
    return replace(chunk, layers={
        index: (change(pair[0], 0), change(pair[1], 1)) if index in layers else pair
        for index, pair in chunk.layers.items()
    })


def asymmetric(x: Tensor) -> Tensor:
    """Quantise a tensor in 256 equal steps from the smallest to the largest value, and dequantise it."""
    low, high = x.double().min(), x.double().max()
    step = (high - low).clamp(min=2.0**-126) / 255
    return (((x.double() - low) / step).round() * step + low).to(x.dtype)
