"""The stages of training as data: what the rows hold, how long they are, how fast to learn."""

from dataclasses import dataclass

import numpy as np

from models_integration.pocket.training.batches import RowPlan

__all__ = ["SPAN", "STAGES", "TOTAL_STEPS", "Stage", "draw_plan", "rate_at", "stage_at"]

SPAN = 4480
"""Positions that rows with jumps stretch to: the longest evaluated context plus question and answer."""


@dataclass(frozen=True)
class Stage:
    """A run of steps.

    Attributes:
        name: for the log.
        steps: how many optimiser steps.
        rate: learning rate at the start and at the end, linear in between.
        plans: row plans with their weights; one is drawn per step.
        tokens: tokens per step; the number of rows follows from the plan's length.
    """

    name: str
    steps: int
    rate: tuple[float, float]
    plans: tuple[tuple[float, RowPlan], ...]
    tokens: int = 6144


_TINY = RowPlan(64, (1, 1), 1, span=SPAN, topic_share=0.0)
_DENSE = RowPlan(192, (2, 5), 5, topic_share=0.1)
_DENSE_JUMPS = RowPlan(192, (1, 6), 5, span=SPAN, gap_share=0.8)
_SHORT = RowPlan(256, (1, 8), 6, span=SPAN)
_SPARSE = RowPlan(256, (1, 2), 2, span=SPAN, topic_share=0.4)
_HALF = RowPlan(512, (1, 14), 8, span=SPAN)
_ONE_K = RowPlan(1024, (1, 20), 10, span=SPAN, topic_share=0.3)
_TWO_K = RowPlan(2048, (1, 24), 12, span=SPAN, topic_share=0.3)
_TWO_K_SPARSE = RowPlan(2048, (1, 4), 4, filled=(0.7, 1.0), topic_share=0.5)
_FOUR_K = RowPlan(4352, (1, 24), 12, filled=(0.5, 1.0), topic_share=0.3)

_LONG_PLANS = (
    (0.05, _TINY),
    (0.1, _DENSE_JUMPS),
    (0.1, _SHORT),
    (0.1, _SPARSE),
    (0.1, _HALF),
    (0.15, _ONE_K),
    (0.15, _TWO_K),
    (0.15, _TWO_K_SPARSE),
    (0.1, _FOUR_K),
)

STAGES: tuple[Stage, ...] = (
    Stage("dense", 200, (3e-3, 3e-3), ((1.0, _DENSE),)),
    Stage(
        "jumps",
        400,
        (3e-3, 3e-3),
        ((0.05, _TINY), (0.4, _DENSE_JUMPS), (0.35, _SHORT), (0.1, _SPARSE), (0.1, _HALF)),
    ),
    Stage(
        "mixed",
        350,
        (3e-3, 2e-3),
        (
            (0.05, _TINY),
            (0.2, _DENSE_JUMPS),
            (0.2, _SHORT),
            (0.1, _SPARSE),
            (0.2, _HALF),
            (0.15, _ONE_K),
            (0.1, _TWO_K),
        ),
        tokens=8192,
    ),
    Stage("long", 450, (2e-3, 1e-5), _LONG_PLANS, tokens=8704),
)

TOTAL_STEPS = sum(stage.steps for stage in STAGES)
WARMUP_STEPS = 50


def stage_at(step: int) -> tuple[Stage, float]:
    """The stage that holds a step, from 0, and the share of it that is done."""
    for stage in STAGES:
        if step < stage.steps:
            return stage, step / stage.steps
        step -= stage.steps
    raise ValueError(f"step lies {step} past the end of the curriculum of {TOTAL_STEPS} steps")


def rate_at(step: int) -> float:
    """The learning rate of a step, warm-up included."""
    stage, done = stage_at(step)
    first, last = stage.rate
    return (first + (last - first) * done) * min(1.0, (step + 1) / WARMUP_STEPS)


def draw_plan(rng: np.random.Generator, stage: Stage) -> tuple[RowPlan, int]:
    """The row plan of one step, drawn by its weight, and the number of rows that fills the step's tokens."""
    weights = np.array([weight for weight, _ in stage.plans])
    plan = stage.plans[int(rng.choice(len(weights), p=weights / weights.sum()))][1]
    return plan, max(1, stage.tokens // plan.length)
