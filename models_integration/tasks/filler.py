"""Filler text: generic organisational prose that carries no fact a question asks for.

A filler is any sequence of sentences; tasks repeat it until the wanted number of tokens is reached, as step 4
of Appendix B.2 says. The default holds several paragraphs, so that a long context is not one loop of a few
sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Filler: TypeAlias = Sequence[str]

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
