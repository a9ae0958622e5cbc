"""The page of both halves: kept sets and answers by press and budget."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from transformers import AutoTokenizer

from conformance.measure.peers.prompts.plan import COUNTERPARTS, MODEL, UNEXPLAINED, Plan, constants
from conformance.measure.peers.sets import overlap, unpacked
from models_integration.model.published_weights import located
from models_integration.studies.results import Row
from models_integration.tasks.assembly import decode
from models_integration.tasks.metrics import judge
from spec.errors import SpecError

__all__ = ["Cell", "Right", "cell_of", "page", "paired", "write_page"]

Right: TypeAlias = Callable[[Row, Sequence[int]], bool]
"""Whether tokens answer a prompt."""
Pairs: TypeAlias = Sequence[tuple[Row, Row]]
"""What our half and the other have written of each prompt."""


@dataclass(frozen=True)
class Cell:
    """A press under a budget, over all prompts."""

    tokens: tuple[float, float]
    """Kept by a head on average: ours, the press's."""
    same: int
    """Prompts whose kept sets are equal in all layers and heads."""
    overlap: float
    """Jaccard, mean over heads."""
    readings: Counter[str]
    """Layers that each reading is for, and those that none explains."""
    read_same: int
    """Prompts whose kept sets are equal once ours are read so."""
    read_overlap: float
    differing: Counter[int]
    """Heads, by their layer, that differ even so."""
    answers: int
    """Prompts whose answers are equal."""
    same_answers: int
    """Those among them whose sets are equal."""
    right: tuple[int, int]
    refused: int
    """Prompts whose question kvpress could not read at once."""


def paired(plan: Plan) -> list[tuple[Row, Row]]:
    """The prompts that both halves have written.

    Raises:
        SpecError: where there is none.
    """
    ours, theirs = plan.rows("ours"), plan.rows("theirs")
    found = [(row, theirs[prompt]) for prompt, row in ours.items() if prompt in theirs][: plan.prompts]
    if not found:
        raise SpecError("out", str(plan.out), "must hold prompts that both halves have written")
    return found


def cell_of(pairs: Pairs, press: str, budget: str, right: Right) -> Cell:
    """What all prompts say of a press and a budget."""
    policy, readings, differing = COUNTERPARTS[press], Counter[str](), Counter[int]()
    sets, said, judged = [], [], np.zeros(2, dtype=np.int64)
    for ours, theirs in pairs:
        n, explained = ours["length"], theirs["explained"][press][budget]
        own, other = unpacked(ours["kept"][policy][budget], n), unpacked(theirs["kept"][press][budget], n)
        read = unpacked(explained["kept"], n)
        sets.append((own.sum(), other.sum(), overlap(own, other), overlap(read, other)))
        wrong = np.flatnonzero((read != other).any(axis=1))
        differing.update((wrong // (len(read) // explained["layers"])).tolist())
        readings.update(explained["readings"])
        answers = ours["answers"][policy][budget], theirs["answers"][press][budget]["ids"]
        said.append(answers[0] == answers[1])
        judged += [right(ours, answer) for answer in answers]
    kept, others, overlaps, read_overlaps = (np.array(column) for column in zip(*sets, strict=True))
    heads, same = overlaps.shape[1], (overlaps == 1).all(axis=1)
    return Cell(
        (float(kept.mean()) / heads, float(others.mean()) / heads), int(same.sum()),
        float(overlaps.mean()), readings, int((read_overlaps == 1).all(axis=1).sum()), float(read_overlaps.mean()),
        differing, sum(said), int((same & said).sum()), (int(judged[0]), int(judged[1])),
        sum(bool(theirs["answers"][press][budget]["refused"]) for _, theirs in pairs),
    )


def markdown_text(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table under its title."""
    every = [headings, ["---"] * len(headings), *lines]
    return f"{title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in every)


def page(plan: Plan, pairs: Pairs, right: Right) -> str:
    """The page as Markdown."""
    cells = {(press, budget): cell_of(pairs, press, budget, right) for press in COUNTERPARTS for budget in plan.budgets}
    layers = len(pairs[0][0]["keys"])
    sets = markdown_text("## Kept sets", SETS, (
        [*name, f"{one.tokens[0]:g} / {one.tokens[1]:g}", f"{one.same}", f"{one.overlap:.6f}",
         named(one, len(pairs) * layers), f"{one.read_same}", f"{one.read_overlap:.6f}", behind(one.differing)]
        for name, one in cells.items()
    ))
    answers = markdown_text("## Answers", ANSWERS, (
        [*name, f"{one.answers}", f"{one.right[0]}", f"{one.right[1]}"] for name, one in cells.items()
    ))
    parts = ["# kvpress on the same prompts", head(plan, pairs), sets, notes(pairs, cells), answers,
             about_answers(pairs, cells, right)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


SETS = ("Press", "Budget", "Tokens a head, ours / kvpress", "Equal sets", "Overlap", "Readings", "Equal sets as read",
        "Overlap as read", "Heads that still differ")
ANSWERS = ("Press", "Budget", "Equal answers", "Right, ours", "Right, kvpress")


def named(cell: Cell, layers: int) -> str:
    """The readings, with the layers that each is for where these are not all."""
    texts = [name if count == layers else f"{name} ({count} of {layers})" for name, count in cell.readings.items()]
    return ", ".join(texts) or "none"


def behind(differing: Counter[int]) -> str:
    """How many heads differ, and in which layer most of them."""
    if not differing:
        return "0"
    layer, most = differing.most_common(1)[0]
    return f"{differing.total()}" + (f" ({most} in layer {layer})" if most < differing.total() or most > 1 else "")


def head(plan: Plan, pairs: Pairs) -> str:
    """What was compared."""
    ours, theirs = pairs[-1]
    tasks, given = Counter(row["task"] for row, _ in pairs), constants(0)
    digests = hashlib.sha256("".join(sorted(row["prompt"] for row, _ in pairs)).encode()).hexdigest()
    return (
        f"Written by `nox -s peers -- prompts` on {max(row['date'] for _, row in pairs)}. {len(pairs)} prompts"
        f" ({', '.join(f'{task} {count}' for task, count in tasks.items())}) of {ours['model']}; each context of"
        f" {plan.length} tokens falls by its digest into the study's development part, and the question is read after"
        f" the cache is compacted. SHA-256 of their sorted digests: {digests}.\n\nBoth sides read the same token ids"
        f" with the same weights. Ours: {versions(ours)}; float32 tensors, decided in float64. Theirs:"
        f" {versions(theirs)}, {theirs['attention']} attention, decided in {theirs['dtype'].removeprefix('torch.')}."
        f" Constants on both sides: window {given.window}, pool {given.kernel}, chunk {given.chunk}, sinks"
        f" {given.sinks}, future {given.future}; a press's ratio is the one that keeps as many tokens as our budget."
        f" CPU time: {sum(row['seconds'] for row, _ in pairs) / 60:.0f} minutes for our half,"
        f" {sum(row['seconds'] for _, row in pairs) / 60:.0f} for theirs."
    )


def versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())


def notes(pairs: Pairs, cells: dict[tuple[str, str], Cell]) -> str:
    """What the columns mean, and how far they carry."""
    alike = sum(ours["keys"] == theirs["keys"] for ours, theirs in pairs)
    checked = [theirs["checked"]["equal"] for _, theirs in pairs if "checked" in theirs]
    every = len(cells) * len(pairs) * len(pairs[0][0]["keys"])
    unexplained = sum(one.readings[UNEXPLAINED] for one in cells.values())
    none, some = ([one.overlap for one in cells.values() if bool(one.readings) is read] for read in (False, True))
    return (
        f"Where no reading is needed the overlap is at least {min(none, default=1):.4f}; elsewhere it is"
        f" {min(some, default=1):.4f} to {max(some, default=1):.4f}, and the readings say why.\n\n"
        "*Equal sets*: prompts whose kept sets are equal in all layers and heads; *overlap*: tokens that both keep"
        " among those that either keeps, mean over heads. *Readings* are the named differences of [the comparison on"
        " random inputs](../../docs/peers.md): with them our policies keep exactly what the press keeps when both"
        " decide in float64 on a prompt's own queries, keys and values, in"
        f" {every - unexplained} of {every} layers. *As read*: ours under these readings beside the press as it is run,"
        " in float32; what still differs is rounding. In layer 0 tokens of one id have keys of one norm, but for the"
        " rounding of their rotation: Knorm's ties.\n\n"
        f"The two prefills have the same keys to the last bit on {alike} of {len(pairs)} prompts. All presses decide on"
        " one prefill, by their own hooks; one press and budget each of the first prompts was also run on a prefill of"
        f" its own: the same sets on {sum(checked)} of {len(checked)}."
    )


def about_answers(pairs: Pairs, cells: dict[tuple[str, str], Cell], right: Right) -> str:
    """Of the answers: the full cache, and what kvpress could not read."""
    own = sum(right(ours, ours["full"]) for ours, _ in pairs)
    other = sum(right(ours, theirs["full"]) for ours, theirs in pairs)
    alike = sum(ours["full"] == theirs["full"] for ours, theirs in pairs)
    refused = {name: one.refused for name, one in cells.items() if one.refused}
    texts = [
        f"Of {len(pairs)} prompts; greedy, by our compacted cache and by kvpress's own pipeline. With the full cache"
        f" {own} answers are right here and {other} there; {alike} are equal. Where the kept sets are equal, so are"
        f" {sum(one.same_answers for one in cells.values())} of {sum(one.same for one in cells.values())} answers."
    ]
    texts += [
        f"At the budget {budget} kvpress's pipeline fails on {count} questions under {press}, whose layers keep"
        " different numbers of tokens; their tokens were read one by one."
        for (press, budget), count in refused.items()
    ]
    return " ".join(texts)


def write_page(plan: Plan, path: Path) -> None:
    """Write the page, with answers judged by their tasks' metrics."""
    tokenizer = AutoTokenizer.from_pretrained(located(MODEL))

    def right(ours: Row, ids: Sequence[int]) -> bool:
        return judge(ours["metric"], decode(tokenizer, ids), ours["references"]) == 1

    path.write_text(page(plan, paired(plan), right), encoding="utf-8")
