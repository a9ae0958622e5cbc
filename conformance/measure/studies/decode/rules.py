"""What becomes of one conversation's cache under an arm: which positions are held after the prompt and each block.

Nothing is evicted between two breaths, so a stream is read in blocks of T_breath tokens: each of them attends to what
it would attend to as a decode step of its own. The state still takes every token one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from reference.crystalcache import decode_step, empty_state, extend
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.backend import Backend
from spec.budget import parse_budget
from spec.decode import DecodeState
from spec.parameters import ESSAY, PAPER, CrystalCacheParameters
from spec.policy import LayerView

__all__ = ["ARMS", "BASES", "FULL", "T_BREATH", "Arm", "Breathing", "Memory", "Reading"]

T_BREATH = PAPER.T_breath
FULL = "full"


@dataclass(frozen=True)
class Reading:
    """A prompt that has been read, and what decides about it."""

    ids: Int64[IntVector, " n"]
    view: LayerView
    sentence_ends: frozenset[int]
    engine: Backend


class Memory(Protocol):
    """A cache's contents, as a pure function of what was read."""

    @property
    def held(self) -> IntVector:
        """Positions held, ascending."""
        ...

    def after(self, ids: Int64[IntVector, " T"], norms: Float64[Vector, " T"]) -> "Memory":
        """What is held after a block, whose inverse key norms these are."""
        ...


@dataclass(frozen=True)
class Growing:
    """Everything read after the prompt is held."""

    held: IntVector
    seen: int

    def after(self, ids: Int64[IntVector, " T"], norms: Float64[Vector, " T"]) -> "Growing":
        """One more block."""
        seen = self.seen + len(ids)
        return Growing(np.concatenate([self.held, np.arange(self.seen, seen)]), seen)


@dataclass(frozen=True)
class Window:
    """StreamingLLM: sinks, and the most recent tokens."""

    budget: int
    seen: int

    @property
    def held(self) -> IntVector:
        """4 sinks, and the last of the others."""
        positions = np.arange(self.seen)
        recent = self.seen - (self.budget - PAPER.N_sink)
        return positions[(positions < PAPER.N_sink) | (positions >= recent)]

    def after(self, ids: Int64[IntVector, " T"], norms: Float64[Vector, " T"]) -> "Window":
        """One more block."""
        return Window(self.budget, self.seen + len(ids))


@dataclass(frozen=True)
class Breathing:
    """CrystalCache with decode: every T_breath-th token ends in a breath."""

    state: DecodeState
    sentence_ends: frozenset[int]
    parameters: CrystalCacheParameters
    engine: Backend

    @property
    def held(self) -> IntVector:
        """What the state says that the cache must hold."""
        return self.state.stored

    def after(self, ids: Int64[IntVector, " T"], norms: Float64[Vector, " T"]) -> "Breathing":
        """One decode step for each token."""
        state = self.state
        for token, norm in zip(ids.tolist(), norms.tolist(), strict=True):
            state = decode_step(state, token, norm, self.sentence_ends, self.parameters, self.engine)
        return replace(self, state=state)


@dataclass(frozen=True)
class Arm:
    """One way to hold a cache.

    Attributes:
        kind: "full", "off" (the prompt alone is compacted), "window" or "breathing".
        budget: slots after the prompt and after each breath; what it is for "full" says nothing.
        parameters: CrystalCache's.
    """

    kind: str
    budget: int = 1
    parameters: CrystalCacheParameters = PAPER

    def start(self, prompt: Reading) -> Memory:
        """What is held of a prompt."""
        n = len(prompt.ids)
        if self.kind == FULL:
            return Growing(np.arange(n), n)
        if self.kind == "window":
            return Window(self.budget, n)
        view = prompt.view
        state = extend(
            empty_state(parse_budget(self.budget)), view.q, view.k, prompt.ids, prompt.sentence_ends, self.parameters,
            prompt.engine, scaling=view.scaling, softcap=view.softcap,
        )
        if self.kind == "off":
            return Growing(state.stored, n)
        return Breathing(state, prompt.sentence_ends, self.parameters, prompt.engine)


_ON = replace(PAPER, breath_protection="sink+recent")
_BREATHING = {
    "on": _ON,
    "static graph": replace(_ON, hebb="static"),
    "no resonance": replace(_ON, alpha_res=0.0),
    "no decay": replace(_ON, beta_0=0.0),
    "PAPER": PAPER,
    "ESSAY": ESSAY,
}


def _setting(name: str, budget: int) -> dict[str, Arm]:
    breathing = {f"{name}: {arm}": Arm("breathing", budget, values) for arm, values in _BREATHING.items()}
    return {**breathing, f"{name}: window": Arm("window", budget)}


# The budgets give equal mean caches over 2 048 steps: 1 217 slots wide, 667 middle, 352 tight.
ARMS: Mapping[str, Arm] = {
    FULL: Arm(FULL), "wide: off": Arm("off", 192), **_setting("wide", 1384), **_setting("middle", 640),
    **_setting("tight", 320),
}
BASES: Mapping[str, str] = {name: f"{name.partition(':')[0]}: on" for name in ARMS if name != FULL}
"""What each arm is compared with."""
