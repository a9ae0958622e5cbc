"""Chains of assignments in noise, and which names hold a value: RULER's `vt`, also in SCBench's shape."""

import string
from dataclasses import dataclass

import numpy as np

from models_integration.tasks.context import Ground, as_many, check_unprotected, different, letters, listed, places
from models_integration.tasks.samples import Sample
from spec.errors import SpecError

__all__ = ["HOPS", "INSTRUCTION", "NOISE", "Chain", "draw_chains", "variable_tracking_samples"]

HOPS = 4
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"


@dataclass(frozen=True)
class Chain:
    """Names that hold one value, each given on to the next."""

    value: str
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The assignments, in order."""
        given = zip(self.names[1:], self.names, strict=False)
        return [f"VAR {self.names[0]} = {self.value}", *(f"VAR {name} = VAR {other} " for name, other in given)]

    @property
    def question(self) -> str:
        """What is asked about it."""
        return f"\nQuestion: Find all variables that are assigned the value {self.value} in the text above."

    @property
    def opening(self) -> str:
        """How the answer begins, with the spaces that RULER has around it."""
        return (
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(self.names)} variables are assigned the value {self.value}, they are: "
        )


def draw_chains(rng: np.random.Generator, count: int, size: int) -> list[Chain]:
    """Chains of `HOPS` hops with different values and names of `size` capital letters."""
    values = different(lambda: str(int(rng.integers(10_000, 100_000))), count)
    names = different(lambda: letters(rng, size, string.ascii_uppercase), count * (HOPS + 1))
    return [Chain(value, tuple(names[at::count])) for at, value in enumerate(values)]


def variable_tracking_samples(
    ground: Ground, length: int, index: int, seed: int, *, questions: int = 1, example: str = ""
) -> tuple[Sample, ...]:
    """The questions of context number `index`: one chain for each, of five names of five capital letters.

    The assignments stand in their order in lines of noise, all outside sinks and recent window; they are the evidence.

    Args:
        ground, length, index, seed, questions: as `key_value_samples`'; the depth of one assignment takes turns.
        example: RULER's, before the instruction; the answer's opening then keeps its spaces.

    Raises:
        SpecError: for no question, or a length that holds no such context.
    """
    if questions < 1:
        raise SpecError("questions", questions, "must be at least 1")
    rng = ground.rng(length, index, seed, questions)
    chains = draw_chains(rng, questions, 5)
    whose = rng.permutation(np.repeat(np.arange(questions), HOPS + 1)).tolist()
    rest = [iter(chain.lines) for chain in chains]
    lines = [ground.encode(f"\n{next(rest[at])}") for at in whose]
    head, noise = ground.encode(f"\n\n{example}{INSTRUCTION}"), ground.encode(f"\n{NOISE}")
    units = as_many(lambda: noise, ground.room(length, head, *lines))
    where = places(rng, units, len(lines), index, length)
    text = listed(ground, length, index, seed, head, units, dict(zip(where, lines, strict=True)))
    return tuple(
        check_unprotected(ground.sample(
            text.ids, chain.question, chain.opening if example else chain.opening.strip(), " ".join(chain.names),
            [span for span, at in zip(text.spans, whose, strict=True) if at == number], gap="" if example else " ",
            task="variable_tracking", metadata={"value": chain.value}, metric="names found", references=chain.names,
        ))
        for number, chain in enumerate(chains)
    )
