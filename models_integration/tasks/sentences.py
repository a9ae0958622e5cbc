"""The sentences of the two retrieval tasks: facts, questions, framing, mentions, and the filler between them.

The delayed-association templates and both pools of mentions are those of Appendix B.1 of the CrystalCache
paper, word for word. Section 4.2 prints two of its five needle templates; the other three are ours and keep
their form: one subject, one four-digit value.
"""

from models_integration.tasks.assembly import FactTemplate, Filler, TopicTemplate

__all__ = [
    "ALL_VALUES", "DEFAULT_FILLER", "FRAMING_SENTENCE", "NEEDLE_TEMPLATES", "ORGANISATIONAL_PARAGRAPHS",
    "QUESTION_FRAME", "TOPIC_TEMPLATES",
]

ALL_VALUES = range(1000, 10_000)
QUESTION_FRAME = "Question: {question} Answer:"
FRAMING_SENTENCE = "The following report summarizes recent activity."

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

# Several paragraphs, so that a long context is not one loop of a few sentences.
ORGANISATIONAL_PARAGRAPHS: tuple[tuple[str, ...], ...] = (
    (
        "The department held its regular meeting on the second floor.",
        "Several items on the agenda were carried over from the previous session.",
        "A short summary was sent to everyone who could not attend.",
        "The chair thanked the members for their careful preparation.",
        "New guidelines for travel requests will take effect next month.",
        "Questions about the guidelines should be sent to the office manager.",
    ),
    (
        "The facilities team completed the inspection of the main building.",
        "Two meeting rooms will be closed while the windows are replaced.",
        "Staff are asked to leave the corridors clear during the work.",
        "The contractor expects to finish before the end of the season.",
        "A notice with the new seating plan was placed near the entrance.",
    ),
    (
        "The finance group compared the current budget with earlier forecasts.",
        "Most of the costs were in line with what had been planned.",
        "Savings on printing were used to pay for additional training.",
        "The auditors asked for a clearer record of small purchases.",
        "A revised form is available on the internal website.",
        "Managers should approve open invoices by the end of the week.",
    ),
    (
        "The training program welcomed a new group of colleagues this spring.",
        "Each participant was paired with an experienced mentor.",
        "The first workshop covered writing, planning and presentation skills.",
        "Feedback from the participants was positive and detailed.",
        "A second workshop will look at how teams share what they learn.",
    ),
    (
        "Customer support answered more letters than in any earlier period.",
        "The average waiting time fell after the new schedule was introduced.",
        "Some callers still found the menu difficult to follow.",
        "The script was shortened and tested with a small panel.",
        "Results from the panel will be presented at the next assembly.",
        "Everyone agreed that patient explanations matter more than speed.",
    ),
    (
        "The library committee ordered new shelves for the reading room.",
        "Older journals were moved to the archive across the courtyard.",
        "Visitors can request them at the desk during opening hours.",
        "Volunteers helped to label the boxes and update the catalogue.",
        "The committee will meet again after the summer break.",
    ),
)

DEFAULT_FILLER: Filler = tuple(sentence for paragraph in ORGANISATIONAL_PARAGRAPHS for sentence in paragraph)
