"""The sentences of the two retrieval tasks: facts, questions, framing, mentions, and the filler between them.

They stand in `assets/sentences.toml`. The delayed-association templates and both pools of mentions are those of
Appendix B.1 of the CrystalCache paper, word for word. Section 4.2 prints two of its five needle templates; the other
three are ours and keep their form: one subject, one four-digit value.
"""

import tomllib
from pathlib import Path

from models_integration.tasks.assembly import FactTemplate, Filler, TopicTemplate

__all__ = [
    "ALL_VALUES", "DEFAULT_FILLER", "FRAMING_SENTENCE", "NEEDLE_TEMPLATES", "QUESTION_FRAME", "TOPIC_TEMPLATES",
]

ALL_VALUES = range(1000, 10_000)
QUESTION_FRAME = "Question: {question} Answer:"
FRAMING_SENTENCE = "The following report summarizes recent activity."

_TEXTS = tomllib.loads((Path(__file__).parent / "assets" / "sentences.toml").read_text(encoding="utf-8"))
_FACTS = {
    name: FactTemplate(name, fact["fact"], fact["question"], fact["key"], tuple(fact["other_keys"]))
    for name, fact in _TEXTS["facts"].items()
}

NEEDLE_TEMPLATES: tuple[FactTemplate, ...] = tuple(_FACTS[name] for name in _TEXTS["needles"])
TOPIC_TEMPLATES: tuple[TopicTemplate, ...] = tuple(
    TopicTemplate(_FACTS[topic["fact"]], tuple(topic["high_density"]), tuple(topic["low_density"]))
    for topic in _TEXTS["topics"]
)
DEFAULT_FILLER: Filler = tuple(line for line in _TEXTS["filler"].splitlines() if line)
