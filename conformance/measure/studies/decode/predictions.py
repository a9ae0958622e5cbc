"""The audit's three predictions of decode, measured on the pocket model."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from conformance.measure.studies.decode.plan import PROMPT, draw_conversation
from conformance.measure.studies.decode.probes import (
    Flags,
    changed_flags,
    fixed_points,
    flags_of,
    held_up,
    surviving_pairs,
)
from conformance.measure.studies.decode.rules import ARMS, T_BREATH, Breathing
from conformance.measure.studies.decode.run import blocks, hold, read_block, read_prompt
from models_integration.studies.subject import Subject
from reference.crystalcache import empty_state, extend
from spec.budget import parse_budget
from spec.parameters import PAPER

__all__ = ["IMPACTS", "STEPS", "chunk_pairs", "impact_sweep", "predictions", "query_changes"]

IMPACTS = (1.0, 5.0, 8.0, 10.0, 10.75, 11.0, 12.0, 14.0, 20.0)
BREATHS = 32
ARMS_ASKED = ("wide: on", "middle: on", "tight: on")
CHUNKS = ((2048, 128), (4096, 1024))
"""Tokens of a prompt, and C; the second is the paper's."""
STEPS = len(ARMS_ASKED) + 1 + len(CHUNKS)
"""What `predictions` reports for each conversation."""


def query_changes(subject: Subject, index: int, arm: str, tokens: int) -> list[list[int]]:
    """Old positions whose flag depends on the question read since, and positions compared, after 1 and 2 more breaths.

    From the cache after a stream of `tokens` tokens, each question is read and the same filler behind it, up to two
    breaths. All are compared with the conversation's first question.
    """
    conversation = draw_conversation(subject.tokenizer, index, tokens + 2 * T_BREATH)
    ids, end = conversation.ids, PROMPT + tokens
    reading, filled = read_prompt(subject, ids[:PROMPT])
    cache, memory = filled(), ARMS[arm].start(reading)
    hold(cache, memory)
    for block in blocks(ids[PROMPT:end]):
        memory = read_block(subject.model, cache, memory, block, reading.engine)
    counts, firsts = [[0, 0], [0, 0]], list[Flags]()
    for number, question in enumerate(conversation.questions):
        fork, branch = deepcopy(cache), memory
        way = (*question.ids, *ids[end:])[: 2 * T_BREATH]
        for breath, block in enumerate(blocks(way)):
            branch = read_block(subject.model, fork, branch, block, reading.engine)
            assert isinstance(branch, Breathing)
            flags = flags_of(branch.state, branch.parameters, branch.engine)
            old = flags.positions < end
            flags = flags._replace(positions=flags.positions[old], active=flags.active[old])
            if number == 0:
                firsts.append(flags)
            changed, common = changed_flags(firsts[breath], flags)
            counts[breath][0] += changed if number else 0
            counts[breath][1] += common if number else 0
    return counts


def impact_sweep(subject: Subject, index: int) -> dict[float, list[float]]:
    """Median D of active trunks of a conversation's first 2 048 tokens after 32 breaths, by impact: all, and linked.

    Linked trunks have a neighbour at the end of the prefill.
    """
    ids = draw_conversation(subject.tokenizer, index, 2048 - PROMPT).ids
    reading, _ = read_prompt(subject, ids)
    view = reading.view
    state = extend(
        empty_state(parse_budget("100%")), view.q, view.k, reading.ids, reading.sentence_ends, PAPER, reading.engine,
        scaling=view.scaling, softcap=view.softcap,
    )
    active = reading.engine.require_breath().activation(state.live, PAPER)
    linked = (np.diff(state.W.indptr) > 0)[active]
    medians = {}
    for impact in IMPACTS:
        D = held_up(state, impact, PAPER, reading.engine, BREATHS)
        medians[impact] = [float(np.median(of)) for of in (D, D[linked]) if len(of)]
    return medians


def chunk_pairs(subject: Subject, index: int, tokens: int, C: int) -> list[list[int]]:
    """Pairs of trunks inside a chunk, then across chunks: joined, above tau_edge, and left after 32 breaths."""
    ids = draw_conversation(subject.tokenizer, index, tokens - PROMPT).ids
    reading, _ = read_prompt(subject, ids)
    return [list(pairs) for pairs in surviving_pairs(reading, replace(PAPER, C=C), BREATHS)]


@torch.no_grad()
def predictions(subject: Subject, contexts: int, tokens: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """All three, on that many conversations from number 0."""
    measured: dict[str, Any] = {"fixed points": {impact: fixed_points(impact, PAPER) for impact in IMPACTS}}
    for index in range(contexts):
        for arm in ARMS_ASKED:
            measured.setdefault(f"queries, {arm}", []).append(query_changes(subject, index, arm, tokens))
            progress(f"queries, {arm}")
        measured.setdefault("impacts", []).append(impact_sweep(subject, index))
        progress("impacts")
        for length, C in CHUNKS:
            measured.setdefault(f"pairs, {length} tokens, C = {C}", []).append(chunk_pairs(subject, index, length, C))
            progress(f"pairs, C = {C}")
    return measured
