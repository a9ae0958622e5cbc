"""A small study on the pocket model: which arm answers from archived chunks, and how that differs from text.

r@1 by a written rule: of the chunks, exactly one states the value that is asked for, and the answer contains that
value. The model was trained on facts in running text, not on conversations: its wrapper is one BOS before a chunk and
one EOS behind it, and what wrappers do for chat models is not measured here.

    python -m models_integration.archive.study --queries 60
"""

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from models_integration.archive import baselines
from models_integration.archive.baselines import ARMS, Case
from models_integration.archive.codec import decode, encode
from models_integration.archive.gaps import layer_masks
from models_integration.archive.pins import Pins, corpus_digest
from models_integration.archive.retrieval import lexical
from models_integration.archive.rope import Rotary, recognise
from models_integration.archive.splice import Chunk, computed, upper_half
from models_integration.cache import RetainedCache
from models_integration.pocket import load_pocket
from models_integration.pocket.facts import draw_values
from models_integration.pocket.filler_text import held_out_filler
from models_integration.tasks.templates import FRAMING_SENTENCE, NEEDLE_TEMPLATES, QUESTION_FRAME
from reference.injection.quantisers import ARMS as CODECS
from reference.statistics import bootstrap, draws, mcnemar, wilson

__all__ = ["Asked", "arms", "ask", "draw_queries", "pinned", "report"]

CHUNKS, SELECTED, AROUND, NEW_TOKENS, RESAMPLES = 6, 3, 4, 20, 10_000


@dataclass(frozen=True)
class Asked:
    """A question, the value that answers it, and chunks by name, one of which states it."""

    question: str
    value: str
    truth: str
    chunks: Mapping[str, str]


def draw_queries(count: int, seed: int) -> list[Asked]:
    """Facts of one template about different subjects, each in a chunk of its own, with values held out of training."""
    rng, filler = np.random.default_rng(seed), held_out_filler(seed)
    found = []
    for at in range(count):
        template = NEEDLE_TEMPLATES[at % len(NEEDLE_TEMPLATES)]
        others = rng.choice(len(template.other_keys), CHUNKS - 1, replace=False)
        keys = [template.key, *(template.other_keys[other] for other in others)]
        chunks = {}
        for key, value in zip(keys, draw_values(rng, CHUNKS, held_out=True), strict=True):
            around = [filler[int(place)] for place in rng.choice(len(filler), 2 * AROUND, replace=False)]
            text = " ".join([*around[:AROUND], template.state(value, key), *around[AROUND:]])
            chunks[hashlib.sha256(text.encode()).hexdigest()[:12]] = " " + text
            if key == template.key:
                truth, answer = next(reversed(chunks)), str(value)
        found.append(Asked(QUESTION_FRAME.format(question=template.ask()), answer, truth, chunks))
    return found


def pinned(queries: Sequence[Asked], encode_text: Callable[[str], list[int]]) -> Pins:
    """BM25's first chunks of each query: chosen once, for all arms."""
    corpus = {name: encode_text(text) for query in queries for name, text in query.chunks.items()}
    chosen = {
        str(at): tuple(lexical(query.chunks)(query.question)[:SELECTED]) for at, query in enumerate(queries)
    }
    return Pins(corpus_digest(corpus), {"ranker": "bm25s", "selected": str(SELECTED)}, chosen)


Study = Callable[[Case], RetainedCache]


def arms(depth: int) -> dict[str, Study]:
    """The baselines, the codecs on the raw chunks, and the raw chunks' upper half."""
    def coded(codec: str) -> Study:
        def arm(case: Case) -> RetainedCache:
            return baselines.inject_raw(replace(case, raw=tuple(_recoded(chunk, codec, depth) for chunk in case.raw)))

        return arm

    def upper(case: Case) -> RetainedCache:
        half = tuple(replace(chunk, layers=upper_half(chunk.layers, depth)) for chunk in case.raw)
        return baselines.inject_raw(replace(case, raw=half))

    return {**ARMS, **{f"raw {codec}": coded(codec) for codec in CODECS if codec != "none"}, "raw upper half": upper}


def _recoded(chunk: Chunk, codec: str, depth: int) -> Chunk:
    tensors = encode(chunk.layers, codec, depth)
    dtype = next(iter(chunk.layers.values()))[0].dtype
    return replace(chunk, layers={layer: decode(tensors, layer, dtype) for layer in chunk.layers})


def case_of(model: Any, tokenizer: Any, rotary: Rotary, texts: Sequence[str], room: int) -> Case:
    """The session has read one sentence; the chunks come in the order of the selection."""
    parts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    opening, closing = tokenizer.bos_token_id, tokenizer.eos_token_id
    return Case(
        model, rotary, tuple(tokenizer(FRAMING_SENTENCE).input_ids),
        tuple(computed(model, part, rotary) for part in parts),
        tuple(computed(model, [opening, *part, closing], rotary, 0, (0, len(part) + 1)) for part in parts),
        (opening,), room,
    )


def ask(model: Any, tokenizer: Any, cache: RetainedCache, question: str) -> str:
    """The greedy answer behind what the cache holds."""
    ids, answer = tokenizer(" " + question, add_special_tokens=False).input_ids, []
    with torch.no_grad(), layer_masks(model, cache):
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
            ids = [int(logits[0, -1].argmax())]
            if ids[0] == tokenizer.eos_token_id:
                break
            answer += ids
    return str(tokenizer.decode(answer))


def report(outcomes: Mapping[str, Sequence[bool]], against: str, seed: int) -> str:
    """A table: r@1 with its Wilson interval, and the exact test and the paired bootstrap against one arm."""
    base = np.array(outcomes[against], dtype=np.float64)
    drawn = draws(len(base), RESAMPLES, seed)
    lines = [f"| arm | r@1 | 95 % Wilson | lost, won against {against} | exact p | difference, 95 % bootstrap |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, right in outcomes.items():
        share = np.array(right, dtype=np.float64)
        low, high = wilson(int(share.sum()), len(share))
        lost, won = int(((base == 1) & (share == 0)).sum()), int(((base == 0) & (share == 1)).sum())
        interval = bootstrap(share - base, drawn)
        lines.append(
            f"| {name} | {share.mean():.3f} | {low:.2f} to {high:.2f} | {lost}, {won} | {mcnemar(lost, won):.3f}"
            f" | {share.mean() - base.mean():+.3f} [{interval.low:+.3f} {interval.high:+.3f}] |"
        )
    return "\n".join(lines)


def first_token(model: Any, case: Case, arm: Study, question: Sequence[int], rounds: int) -> float:
    """Median seconds from chunks in memory to the logits behind the question; the session is read anew."""
    seconds = []
    for _ in range(rounds):
        began = perf_counter()
        with torch.no_grad():
            model(input_ids=torch.tensor([list(question)]), past_key_values=arm(case), use_cache=True)
        seconds.append(perf_counter() - began)
    return median(seconds)


def latency(model: Any, tokenizer: Any, rotary: Rotary, query: Asked, rounds: int) -> str:
    """Time to the first token of injected chunks and of the same text, by the number of chunks."""
    question = tokenizer(" " + query.question, add_special_tokens=False).input_ids
    lines = ["| chunks | tokens | inject, ms | text, ms | text / inject |", "| --- | --- | --- | --- | --- |"]
    for count in (1, 3, 12, 48):
        texts = [list(query.chunks.values())[at % CHUNKS] for at in range(count)]
        case = case_of(model, tokenizer, rotary, texts, len(question))
        tokens = sum(len(chunk.visible) for chunk in case.raw)
        spliced, text = (first_token(model, case, ARMS[name], question, rounds) for name in ("inject_raw", "text"))
        lines.append(f"| {count} | {tokens} | {1e3 * spliced:.1f} | {1e3 * text:.1f} | {text / spliced:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Draw, pin, ask every arm, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for models this small, more threads wait more than they work
    model, tokenizer = load_pocket()
    rotary, queries = recognise(model), draw_queries(options.queries, options.seed)
    pins = pinned(queries, lambda text: list(tokenizer(text, add_special_tokens=False).input_ids))
    hits = sum(query.truth in pins.chosen[str(at)] for at, query in enumerate(queries))
    print(f"pins {pins.digest[:16]}, {len(queries)} queries, gt_in_top3 {hits / len(queries):.3f}")
    chosen, outcomes = arms(len(rotary.layers)), {}
    for name in chosen:
        outcomes[name] = [False] * len(queries)
    for at, query in enumerate(queries):
        texts = [query.chunks[name] for name in pins.chosen[str(at)]]
        case = case_of(model, tokenizer, rotary, texts, NEW_TOKENS + 40)
        for name, arm in chosen.items():
            outcomes[name][at] = query.value in ask(model, tokenizer, arm(case), query.question)
    print(report(outcomes, "text", options.seed))
    print(latency(model, tokenizer, rotary, queries[0], rounds=9))


if __name__ == "__main__":
    main()
