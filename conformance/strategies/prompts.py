"""Whole prompts for the pipeline."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance.strategies.attention import AttentionInputs, attention_inputs
from conformance.strategies.parameters import ablations
from conformance.strategies.sizes import PROMPT_TOKENS
from conformance.strategies.text import sentence_ends, token_ids
from spec.arrays import IntVector
from spec.parameters import TINY, CrystalCacheParameters

__all__ = ["Prompt", "budget_fractions", "prompts", "random_prompt"]


@dataclass(frozen=True)
class Prompt:
    """Everything that `prefill` is given."""

    inputs: AttentionInputs
    token_ids: IntVector
    sentence_ends: frozenset[int]
    budget: str

    @property
    def share(self) -> Fraction:
        return Fraction(self.budget)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `prefill`."""
        inputs = self.inputs
        return {
            "q": inputs.q, "k": inputs.k, "token_ids": self.token_ids, "sentence_ends": self.sentence_ends,
            "budget": self.budget, "parameters": inputs.parameters, "scaling": inputs.scaling,
            "softcap": inputs.softcap,
        }


def budget_fractions() -> st.SearchStrategy[str]:
    """Decimals in (0, 1], the awkward ones of binary floating point among them."""
    awkward = st.sampled_from(["0.3", "0.5", "0.28", "0.07", "0.14", "0.55", "0.1", "1.0"])
    return st.one_of(awkward, st.integers(1, 100).map(lambda percent: f"{percent / 100:.2f}"))


@st.composite
def prompts(draw: st.DrawFn, max_n: int = PROMPT_TOKENS) -> Prompt:
    """A prompt with small parameters, or TINY, at any fraction."""
    inputs = draw(attention_inputs(st.one_of(st.just(TINY), ablations()), max_n), label="inputs")
    n = len(inputs.positions)
    return Prompt(
        inputs, draw(token_ids(n), label="ids"), draw(sentence_ends(), label="ends"),
        draw(budget_fractions(), label="budget"),
    )


def random_prompt(rng: np.random.Generator, p: CrystalCacheParameters, n: int) -> Prompt:
    """A prompt of n tokens in float32 from a seed: topics that come back, so that trunks link."""
    H, H_kv, d = 4, 2, 8
    topic = rng.standard_normal((5, d))[rng.integers(0, 5, n)]
    q = (topic + rng.standard_normal((H, n, d))).astype(np.float32)
    k = (topic + rng.standard_normal((H_kv, n, d))).astype(np.float32)
    inputs = AttentionInputs(q, k, np.arange(n), p, d**-0.5, None)
    ids = rng.zipf(1.5, n).clip(0, 50).astype(np.int64)
    return Prompt(inputs, ids, frozenset({2, 7}), ["0.3", "0.5"][int(rng.integers(0, 2))])
