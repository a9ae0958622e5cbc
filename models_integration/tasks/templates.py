"""The sentences of the two retrieval tasks: facts, questions, framing and mentions.

The delayed-association templates and both pools of mentions are those of Appendix B.1 of the CrystalCache
paper, word for word. Section 4.2 prints two of its five needle templates; the other three are ours and keep
their form: one subject, one four-digit value.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE_LOW = 1000
VALUE_HIGH = 9999
ALL_VALUES = range(VALUE_LOW, VALUE_HIGH + 1)
QUESTION_FRAME = "Question: {question} Answer:"
FRAMING_SENTENCE = "The following report summarizes recent activity."


@dataclass(frozen=True, slots=True)
class FactTemplate:
    """One form of a critical fact.

    Attributes:
        name: A short stable identifier, reported in results.
        fact: The sentence, with the fields ``{key}`` and ``{value}``.
        question: What is asked about it, with the field ``{key}``.
        key: The subject of the fact that is asked for.
        other_keys: Subjects for distractor facts, which carry other values.
    """

    name: str
    fact: str
    question: str
    key: str
    other_keys: tuple[str, ...]

    def state(self, value: int | str, key: str | None = None) -> str:
        """Return the fact as a sentence about ``key`` (the template's own unless given)."""
        return self.fact.format(key=self.key if key is None else key, value=value)

    def ask(self, key: str | None = None) -> str:
        """Return the question about ``key`` (the template's own unless given)."""
        return self.question.format(key=self.key if key is None else key)


@dataclass(frozen=True, slots=True)
class TopicTemplate:
    """A fact about a topic and the two pools of mentions that keep the topic alive (Appendix B.1)."""

    fact: FactTemplate
    high_density: tuple[str, ...]
    low_density: tuple[str, ...]


_PROJECTS = ("Borealis", "Falcon", "Meridian", "Sequoia", "Titan", "Zephyr", "Horizon", "Cascade")
_AGENTS = ("Sparrow", "Heron", "Kestrel", "Raven", "Osprey", "Condor", "Magpie", "Swift")
_FORMULAS = ("Y", "Z", "Q", "K", "B", "T", "M", "V")

SECRET_CODE = FactTemplate(
    name="project_aurora",
    fact="The secret code for Project {key} is {value}.",
    question="What is the secret code for Project {key}?",
    key="Aurora",
    other_keys=_PROJECTS,
)

NEEDLE_TEMPLATES: tuple[FactTemplate, ...] = (
    FactTemplate(
        name="magic_number",
        fact="The special {key} number is {value}.",
        question="What is the special {key} number?",
        key="magic",
        other_keys=("lucky", "golden", "silver", "hidden", "royal", "winning", "broken", "ancient"),
    ),
    SECRET_CODE,
    FactTemplate(
        name="north_vault",
        fact="The access key for the {key} vault is {value}.",
        question="What is the access key for the {key} vault?",
        key="north",
        other_keys=("south", "east", "west", "upper", "lower", "central", "outer", "inner"),
    ),
    FactTemplate(
        name="lost_satellite",
        fact="The serial number of the {key} satellite is {value}.",
        question="What is the serial number of the {key} satellite?",
        key="lost",
        other_keys=("first", "second", "third", "old", "new", "spare", "small", "heavy"),
    ),
    FactTemplate(
        name="doctor_marlow",
        fact="The room number of Doctor {key} is {value}.",
        question="What is the room number of Doctor {key}?",
        key="Marlow",
        other_keys=("Avery", "Bennett", "Carver", "Dalton", "Ellis", "Foster", "Garner", "Hollis"),
    ),
)

TOPIC_TEMPLATES: tuple[TopicTemplate, ...] = (
    TopicTemplate(
        fact=SECRET_CODE,
        high_density=(
            "The team discussed Project Aurora’s timeline and milestones.",
            "Progress reports for Project Aurora were reviewed by management.",
            "The Aurora initiative has been a key focus this quarter.",
            "Resources were reallocated to support Project Aurora’s goals.",
        ),
        low_density=(
            "Various projects were discussed in the meeting.",
            "The quarterly review covered several ongoing initiatives.",
        ),
    ),
    TopicTemplate(
        fact=FactTemplate(
            name="agent_nightingale",
            fact="Agent {key}’s extraction point is {value}.",
            question="What is Agent {key}’s extraction point?",
            key="Nightingale",
            other_keys=_AGENTS,
        ),
        high_density=(
            "Agent Nightingale reported in from the field yesterday.",
            "The handler confirmed Nightingale’s cover remains intact.",
            "Updates on Nightingale’s mission status were classified.",
            "Nightingale’s next check-in is scheduled for tomorrow.",
        ),
        low_density=(
            "Field agents continued standard operations.",
            "Status updates were provided for all active agents.",
        ),
    ),
    TopicTemplate(
        fact=FactTemplate(
            name="formula_x",
            fact="The activation temperature for Formula {key} is {value} degrees.",
            question="What is the activation temperature for Formula {key} in degrees?",
            key="X",
            other_keys=_FORMULAS,
        ),
        high_density=(
            "Formula X showed promising results in the latest trial.",
            "The researchers adjusted Formula X’s concentration levels.",
            "Testing of Formula X continues in Lab 7.",
            "Formula X outperformed all other candidate compounds.",
        ),
        low_density=(
            "Laboratory experiments continued as scheduled.",
            "Multiple formulas were tested this week.",
        ),
    ),
)
