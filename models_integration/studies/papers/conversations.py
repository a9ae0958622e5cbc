"""Conversations for the paper on cross-session injection: generated conversations, and conversations of LoCoMo."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models_integration.tasks.samples import DEFAULT_FILLER, generator
from spec.errors import SpecError

__all__ = ["TURNS", "Talk", "draw_talk", "read_locomo"]

TURNS = 18
"""Number of turns of a generated conversation."""
_ADVERSARIAL = 5
"""LoCoMo's category of questions without an answer. The paper does not use these questions."""
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
    """Conversation: texts of turns and of unrelated turns, a question about one turn, and the right value."""

    turns: Sequence[str]
    fillers: Sequence[str]
    question: str
    value: str


def draw_talk(index: int, seed: int = 0) -> Talk:
    """Return conversation `index`. Each turn states one fact with the same subject or quantity as some different facts.

    In conversations with odd index, the turn with the answer names the subject only in the first sentence.
    """
    rng = generator((seed, index))
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

    A turn has the form "(date) speaker: text". `value` is the gold answer.

    Raises:
        SpecError: if the file does not have the format of LoCoMo's repository.
    """
    try:
        made = [_talks(sample) for sample in json.loads(path.read_bytes())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError("file", str(path), f"must be LoCoMo's locomo10.json: {error!r}") from error
    return [talks[at] for at in range(max(map(len, made), default=0)) for talks in made if at < len(talks)]


def _talks(sample: Mapping[str, Any]) -> list[Talk]:
    """Return a conversation with each of its questions."""
    held, turns, number = sample["conversation"], list[str](), 1
    while (session := held.get(f"session_{number}")) is not None:
        date = held[f"session_{number}_date_time"]
        turns += [f"({date}) {turn['speaker']}: {turn['text']}" for turn in session]
        number += 1
    return [
        Talk(turns, (), str(asked["question"]), str(asked["answer"])) for asked in sample["qa"]
        if asked["category"] != _ADVERSARIAL
    ]
