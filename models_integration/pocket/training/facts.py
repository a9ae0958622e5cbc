"""Facts the pocket model is trained to retrieve: the tasks' own templates and many other subjects.

Only the subjects and sentence forms are shared with the evaluation; its filler sentences and its values are
held out (see `is_held_out_value` and `filler_text.is_held_out`).
"""

from dataclasses import dataclass

import numpy as np

from models_integration.pocket.training import words
from models_integration.tasks.assembly import FactTemplate, TopicTemplate
from models_integration.tasks.sentences import ALL_VALUES, NEEDLE_TEMPLATES, TOPIC_TEMPLATES

__all__ = [
    "HELD_OUT_VALUES", "Fact", "draw_facts", "draw_template", "draw_topic", "draw_values", "is_held_out_value",
    "make_fact",
]

HELD_OUT_VALUE_RESIDUE = 7
"""Values that leave this remainder modulo 10 after mixing are never shown in training."""


@dataclass(frozen=True)
class Fact:
    """One fact in three parts, so that the value's digits can be told apart from the words around them."""

    before: str
    value: int
    after: str
    question: str

    @property
    def sentence(self) -> str:
        """The whole statement."""
        return f"{self.before} {self.value}{self.after}"


def is_held_out_value(value: int) -> bool:
    """Whether a value is reserved for evaluation: one in ten, spread over the whole range."""
    return (value * 7919 // 13) % 10 == HELD_OUT_VALUE_RESIDUE


HELD_OUT_VALUES = tuple(value for value in ALL_VALUES if is_held_out_value(value))


def draw_values(rng: np.random.Generator, count: int, held_out: bool = False) -> list[int]:
    """Distinct four-digit values, drawn from the training set or from the held-out set."""
    values: list[int] = []
    while len(values) < count:
        value = ALL_VALUES[int(rng.integers(len(ALL_VALUES)))]
        if is_held_out_value(value) == held_out and value not in values:
            values.append(value)
    return values


def make_fact(template: FactTemplate, key: str, value: int) -> Fact:
    """A template's statement about `key`, split at its value."""
    before, after = template.state("{}", key).split(" {}")
    return Fact(before, value, after, template.ask(key))


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _quantity_for_name(rng: np.random.Generator) -> FactTemplate:
    quantity, role = _pick(rng, words.QUANTITIES), _pick(rng, words.ROLES)
    subject = f"The {quantity} for {role} {{key}}"
    question = f"What is the {quantity} for {role} {{key}}?"
    return FactTemplate("quantity_for_name", subject + " is {value}.", question, "", words.NAMES)


def _invented_subject(rng: np.random.Generator) -> FactTemplate:
    quantity = _pick(rng, words.QUANTITIES)
    names = tuple(words.invented_word(rng).capitalize() for _ in range(8))
    subject = f"The {quantity} of {{key}}"
    return FactTemplate("invented", subject + " is {value}.", f"What is the {quantity} of {{key}}?", "", names)


def _possessive(rng: np.random.Generator) -> FactTemplate:
    quantity, role = _pick(rng, words.QUANTITIES), _pick(rng, words.ROLES)
    fact, question = f"{role} {{key}}’s {quantity} is {{value}}.", f"What is {role} {{key}}’s {quantity}?"
    return FactTemplate("possessive", fact, question, "", words.NAMES)


def _degrees(rng: np.random.Generator) -> FactTemplate:
    quantity, role = _pick(rng, words.QUANTITIES), _pick(rng, words.ROLES)
    fact = f"The {quantity} for {role} {{key}} is {{value}} degrees."
    question = f"What is the {quantity} for {role} {{key}} in degrees?"
    return FactTemplate("degrees", fact, question, "", words.LETTERS + words.NAMES)


def _described_thing(rng: np.random.Generator) -> FactTemplate:
    quantity, thing = _pick(rng, words.QUANTITIES), _pick(rng, words.THINGS)
    fact = f"The {quantity} of the {{key}} {thing} is {{value}}."
    question = f"What is the {quantity} of the {{key}} {thing}?"
    return FactTemplate("described_thing", fact, question, "", words.ADJECTIVES)


def _described_quantity(rng: np.random.Generator) -> FactTemplate:
    quantity = _pick(rng, words.QUANTITIES)
    fact, question = f"The {{key}} {quantity} is {{value}}.", f"What is the {{key}} {quantity}?"
    return FactTemplate("described_quantity", fact, question, "", words.ADJECTIVES)


_GENERATED_FORMS = (
    _quantity_for_name,
    _possessive,
    _degrees,
    _described_thing,
    _described_quantity,
    _invented_subject,
)
_TASK_TEMPLATES = NEEDLE_TEMPLATES + tuple(topic.fact for topic in TOPIC_TEMPLATES)
_TASK_SHARE = 0.5


def draw_template(rng: np.random.Generator) -> FactTemplate:
    """A sentence form: one of the tasks' own in half the draws, otherwise a generated one."""
    if rng.random() < _TASK_SHARE:
        return _TASK_TEMPLATES[int(rng.integers(len(_TASK_TEMPLATES)))]
    return _GENERATED_FORMS[int(rng.integers(len(_GENERATED_FORMS)))](rng)


def _keys_of(template: FactTemplate) -> tuple[str, ...]:
    return ((template.key,) if template.key else ()) + template.other_keys


def draw_facts(rng: np.random.Generator, count: int, one_form_share: float, held_out: bool = False) -> list[Fact]:
    """Facts with distinct values and distinct questions.

    With probability `one_form_share` all of them share one sentence form as far as its subjects go, which is
    the hard case: only the subject tells them apart.
    """
    values = draw_values(rng, count, held_out)
    facts: list[Fact] = []
    asked: set[str] = set()
    shared = draw_template(rng) if rng.random() < one_form_share else None
    while len(facts) < count:
        exhausted = shared is not None and len(facts) >= len(_keys_of(shared))
        template = draw_template(rng) if shared is None or exhausted else shared
        fact = make_fact(template, _pick(rng, _keys_of(template)), values[len(facts)])
        if fact.question not in asked:
            asked.add(fact.question)
            facts.append(fact)
    return facts


def draw_topic(rng: np.random.Generator) -> tuple[TopicTemplate, list[str]]:
    """A delayed-association topic, and the mentions of one of its densities."""
    topic = TOPIC_TEMPLATES[int(rng.integers(len(TOPIC_TEMPLATES)))]
    return topic, list(topic.high_density if rng.random() < 0.5 else topic.low_density)
