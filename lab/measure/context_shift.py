"""Measure llama.cpp's context shift against renumbered positions: `python -m lab.measure.context_shift`.

The command writes the table of docs/results/llama_cpp.md. It needs llama-cpp-python (`nox -s lab -- extra llamacpp`
makes the environment). Between two shifts both engines read the same tokens. The oracle masks what the shifts removed,
and turns each key once, from the position at which the key was computed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.cache_suite.oracle import Masked
from conformance.paths import DOCS
from lab import pages
from lab.measure.gguf_files import write_gguf
from models_integration.pocket import model_folder

SHIFTS = (0, 1, 10, 100, 1000)
"""Numbers of shifts after which log-probabilities are compared."""
DTYPES = {"float32": 0, "float16": 1}
"""Dtypes of the cache, as numbers of `ggml_type`."""


class Case(NamedTuple):
    """Sizes of a shift: number of cells, number of first cells that stay, and number of cells that a shift removes."""

    cells: int
    keep: int
    discard: int


CASES = (Case(20, 4, 8), Case(512, 4, 1), Case(1024, 4, 1))
"""The first case removes half of the cells after `keep`, as llama-server does with `--context-shift`."""
HEAD = (
    "cells", "kept at the start", "removed by a shift", "cache", "shifts", "from renumbered", "from kept",
    "most turns of a key",
)


class Context:
    """Cells of a context: the positions of the text, and how often llama.cpp turned each key."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.turns: list[int] = []
        self.seen = 0

    def read(self, tokens: int) -> None:
        """Add cells for new tokens."""
        self.stored += range(self.seen, self.seen + tokens)
        self.turns += [0] * tokens
        self.seen += tokens

    def shift(self, keep: int, discard: int) -> None:
        """Remove `discard` cells after the first `keep` cells. The keys of all later cells are turned."""
        del self.stored[keep : keep + discard], self.turns[keep : keep + discard]
        self.turns[keep:] = [turns + 1 for turns in self.turns[keep:]]


class Difference(NamedTuple):
    """Largest differences from the two rules, relative to the largest log-probability, and most turns of a key."""

    shifts: int
    renumbered: float
    kept: float
    turns: int


def open_context(file: Path, cells: int, dtype: str) -> Any:
    """Return llama.cpp with a context of `cells` cells. Without flash attention, all sums are float32."""
    import llama_cpp as cpp

    return cpp.Llama(
        str(file), n_ctx=cells, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False,
        type_k=DTYPES[dtype], type_v=DTYPES[dtype],
    )


def shift(llama: Any, keep: int, discard: int) -> None:
    """Shift a context as llama.cpp's server does. The next forward pass turns the keys."""
    import llama_cpp as cpp

    memory, cells = cpp.llama_get_memory(llama.ctx), llama.n_tokens
    assert cpp.llama_memory_seq_rm(memory, 0, keep, keep + discard)
    cpp.llama_memory_seq_add(memory, 0, keep + discard, cells, -discard)
    llama.n_tokens = cells - discard


def read(llama: Any, ids: Sequence[int]) -> Tensor:
    """Read tokens, and return their log-probabilities."""
    llama.eval(list(ids))
    return torch.from_numpy(llama.scores[llama.n_tokens - len(ids) : llama.n_tokens].copy()).double().log_softmax(-1)


def measure(model: PreTrainedModel, file: Path, case: Case, dtype: str, shifts: Sequence[int]) -> Iterator[Difference]:
    """Yield the differences after each of `shifts` shifts.

    After a shift, both engines read as many tokens as the shift removed. The log-probabilities of these tokens are
    compared.
    """
    llama, context, rules = open_context(file, case.cells, dtype), Context(), (Masked(model, True), Masked(model))
    rng = np.random.default_rng(0)
    for done in range(max(shifts) + 1):
        tokens = rng.integers(3, model.config.vocab_size, case.discard if done else case.cells).tolist()
        context.read(len(tokens))
        actual = read(llama, tokens)
        expected = [rule.read(torch.tensor([tokens]))[0].double().log_softmax(-1) for rule in rules]
        if done in shifts:
            numbered, kept = (float((actual - one).abs().max() / one.abs().max()) for one in expected)
            yield Difference(done, numbered, kept, max(context.turns))
        shift(llama, case.keep, case.discard)
        context.shift(case.keep, case.discard)
        for rule in rules:
            rule.keep([[context.stored]] * len(rule.visible))
    llama.close()


def rows(model: PreTrainedModel, file: Path) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for case in CASES:
        for dtype in DTYPES:
            for one in measure(model, file, case, dtype, SHIFTS):
                yield [
                    *map(str, case), dtype, str(one.shifts), f"{one.renumbered:.1e}", f"{one.kept:.1e}", str(one.turns),
                ]


def main() -> None:
    """Measure the pocket model, and write the table of the page."""
    torch.set_num_threads(1)
    folder = str(model_folder("pocket"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with TemporaryDirectory() as home:
        file = Path(home, "pocket.gguf")
        write_gguf(file, model, GGMLQuantizationType.F32)
        table = pages.table(HEAD, rows(model, file))
    pages.write(DOCS / "results" / "llama_cpp.md", {"shifts": table}.__getitem__)


if __name__ == "__main__":
    main()
