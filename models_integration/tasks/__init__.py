"""Retrieval tasks: needle and delayed association, token-exact and seeded, for any tokenizer."""

from models_integration.tasks.cells import TASKS, draw_sample
from models_integration.tasks.delayed_association import DENSITIES, delayed_association_sample
from models_integration.tasks.filler import DEFAULT_FILLER, Filler
from models_integration.tasks.needle import DEPTHS, needle_sample
from models_integration.tasks.placements import DEFAULT_PLACEMENT, PLACEMENTS, Placement, place
from models_integration.tasks.sample import Sample, TaskTokenizer
from models_integration.tasks.scoring import MAX_NEW_TOKENS, is_exact_match, score

__all__ = [
    "DEFAULT_FILLER",
    "DEFAULT_PLACEMENT",
    "DENSITIES",
    "DEPTHS",
    "MAX_NEW_TOKENS",
    "PLACEMENTS",
    "TASKS",
    "Filler",
    "Placement",
    "Sample",
    "TaskTokenizer",
    "delayed_association_sample",
    "draw_sample",
    "is_exact_match",
    "needle_sample",
    "place",
    "score",
]
