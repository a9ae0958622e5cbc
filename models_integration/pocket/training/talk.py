"""Conversations for the pocket model's sibling: turns that state facts which differ in one word from each other.

Every conversation has a grid of a few names and a few quantities, so that each fact shares its name with some others
and its quantity with some others. A question depends on one of four things, its kind:

- `plain`: one sentence of one turn.
- `topic`: the turn's opening names the subject, a later sentence says "Its ... is 7492.", and another name may stand
  between them. Where the turn begins matters.
- `update`: two turns state the fact in the same words; the later one holds. The order of turns matters.
- `chain`: one turn names the partner, another states the partner's value; the answer says both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models_integration.pocket.training import words
from models_integration.pocket.training.facts import draw_values
from models_integration.pocket.training.filler_text import filler_sentence

__all__ = ["KINDS", "Conversation", "Fact", "Question", "chatter", "draw_conversation"]

KINDS = ("plain", "topic", "update", "chain")


@dataclass(frozen=True)
class Fact:
    """A quantity of somebody; `value` are digits."""

    role: str
    name: str
    quantity: str
    value: str

    @property
    def statement(self) -> str:
        """The fact in one sentence."""
        return f"The {self.quantity} for {self.role} {self.name} is {self.value}."


@dataclass(frozen=True)
class Question:
    """What is asked, what is answered, the value that is right, and the turn that alone states it."""

    kind: str
    text: str
    answer: str
    retrieved: tuple[str, ...]
    """Words of the answer that had to be found, in their order; the last is the value."""
    turn: int

    @property
    def value(self) -> str:
        """The value that only the true turn states."""
        return self.retrieved[-1]


@dataclass(frozen=True)
class Conversation:
    """Texts of the user's turns in their order, and questions about them."""

    turns: tuple[str, ...]
    questions: tuple[Question, ...]


def draw_conversation(
    rng: np.random.Generator, each: int, filler: tuple[int, int], held_out: bool = False, shared: bool = False,
) -> Conversation:
    """A conversation with `each` questions of every kind, 6 turns for each of them.

    Args:
        rng: decides everything.
        each: questions of a kind, from 1.
        filler: smallest and largest number of filler sentences in a turn.
        held_out: whether values and filler are those that training never shows.
        shared: whether a name may have two facts, which differ in the quantity alone.
    """
    role, names, quantities = _subjects(rng, 2 + 2 * each if shared else 4 * each)
    cells = [(name, quantity) for name in names for quantity in quantities]
    if shared:
        chosen = [cells[int(cell)] for cell in rng.permutation(len(cells))[: 4 * each]]
    else:
        chosen = [cells[2 * pair + int(rng.integers(2))] for pair in range(4 * each)]
    values = iter(draw_values(rng, 5 * each, held_out))
    facts = [Fact(role, name, quantity, str(next(values))) for name, quantity in chosen]
    plain, topic, updated, ends = (facts[part * each : (part + 1) * each] for part in range(4))
    stale = [Fact(role, fact.name, fact.quantity, str(next(values))) for fact in updated]
    firsts = rng.choice([name for name in names if name not in {end.name for end in ends}], each, replace=False)

    # Turns get a random order; of two turns about one fact, the later states the value that holds.
    order = [int(place) for place in rng.permutation(6 * each)]
    stated = (*KINDS, "stale", "partner")
    turn_of = {what: order[index * each : (index + 1) * each] for index, what in enumerate(stated)}
    for index in range(each):
        turn_of["stale"][index], turn_of["update"][index] = sorted((turn_of["stale"][index], turn_of["update"][index]))
    turns = [""] * (6 * each)
    questions = []
    for index in range(each):
        for kind, fact in (("plain", plain[index]), ("update", updated[index]), ("chain", ends[index])):
            turns[turn_of[kind][index]] = _turn(rng, [fact.statement], role, names, filler, held_out)
        turns[turn_of["stale"][index]] = _turn(rng, [stale[index].statement], role, names, filler, held_out)
        turns[turn_of["topic"][index]] = _topic_turn(rng, topic[index], names, filler, held_out)
        first = str(firsts[index])
        partner = f"The partner of {role} {first} is {role} {ends[index].name}."
        turns[turn_of["partner"][index]] = _turn(rng, [partner], role, names, filler, held_out)
        for kind, fact in (("plain", plain[index]), ("topic", topic[index]), ("update", updated[index])):
            questions.append(_direct(kind, fact, turn_of[kind][index]))
        end = ends[index]
        asked = f"What is the {end.quantity} for the partner of {role} {first}?"
        answer, retrieved = f"{partner} {end.statement}", (end.name, end.value)
        questions.append(Question("chain", asked, answer, retrieved, turn_of["chain"][index]))
    return Conversation(tuple(turns), tuple(questions))


def chatter(rng: np.random.Generator, count: int, held_out: bool) -> str:
    """Some filler sentences."""
    return " ".join(filler_sentence(rng, held_out) for _ in range(count))


def _subjects(rng: np.random.Generator, count: int) -> tuple[str, list[str], list[str]]:
    """A role, names and two quantities."""
    role = words.ROLES[int(rng.integers(len(words.ROLES)))]
    names = rng.choice(words.NAMES, count, replace=False)
    quantities = rng.choice(words.QUANTITIES, 2, replace=False)
    return role, [str(name) for name in names], [str(quantity) for quantity in quantities]


def _direct(kind: str, fact: Fact, turn: int) -> Question:
    asked = f"What is the {fact.quantity} for {fact.role} {fact.name}?"
    return Question(kind, asked, fact.statement, (fact.value,), turn)


def _turn(
    rng: np.random.Generator, stated: Sequence[str], role: str, names: Sequence[str], filler: tuple[int, int],
    held_out: bool,
) -> str:
    """Sentences in random order, among them a mention of somebody in half of the turns."""
    sentences = [*stated, *(filler_sentence(rng, held_out) for _ in range(int(rng.integers(filler[0], filler[1] + 1))))]
    if rng.random() < 0.5:
        sentences.append(_mention(rng, role, str(rng.choice(names))))
    rng.shuffle(sentences)
    return " ".join(sentences)


def _topic_turn(
    rng: np.random.Generator, fact: Fact, names: Sequence[str], filler: tuple[int, int], held_out: bool,
) -> str:
    """The subject's mention opens the turn; behind it filler, another name's mention, and the value, in some order."""
    rest = [f"Its {fact.quantity} is {fact.value}."]
    rest += [filler_sentence(rng, held_out) for _ in range(int(rng.integers(filler[0], filler[1] + 1)))]
    if rng.random() < 0.7:
        rest.append(_mention(rng, fact.role, str(rng.choice([name for name in names if name != fact.name]))))
    if rng.random() < 0.5:
        rng.shuffle(rest)
    return " ".join([_mention(rng, fact.role, fact.name), *rest])


def _mention(rng: np.random.Generator, role: str, name: str) -> str:
    """A sentence about somebody that states nothing."""
    subject = words.FILLER_SUBJECTS[int(rng.integers(len(words.FILLER_SUBJECTS)))]
    verb = words.FILLER_VERBS[int(rng.integers(len(words.FILLER_VERBS)))]
    return f"{subject[0].upper()}{subject[1:]} {verb} {role} {name}."
