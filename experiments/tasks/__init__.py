"""Tasks for the comparison of policies, with exact context lengths and seeds, for any tokenizer."""

from experiments.tasks.assembly import Filler
from experiments.tasks.metrics import is_exact_match
from experiments.tasks.needle import (
    DEFAULT_FILLER,
    DEFAULT_PLACEMENT,
    DENSITIES,
    DEPTHS,
    MAX_NEW_TOKENS,
    PLACEMENTS,
    TASKS,
    Placement,
    Sample,
    delayed_association_sample,
    draw_sample,
    needle_sample,
    place,
    score,
)
from models_integration.model.frame import TaskTokenizer

__all__ = [
    "DEFAULT_FILLER", "DEFAULT_PLACEMENT", "DENSITIES", "DEPTHS", "MAX_NEW_TOKENS", "PLACEMENTS", "TASKS", "Filler",
    "Placement", "Sample", "TaskTokenizer", "delayed_association_sample", "draw_sample", "is_exact_match",
    "needle_sample", "place", "score",
]
