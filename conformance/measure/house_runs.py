"""How many files of models_integration a run enters: those with a function that Python calls meanwhile.

Each scenario is run once before it is counted, so that neither imports nor caches of a first run belong to it. The
readings below give 16, 16, 8, 34 and 12 at commit d8c661a, before the package had rooms:

- a first prompt: CrystalCache is made, its context opened, one forward reads a prompt, the context is left;
- a second turn: in an open context, one forward of several tokens behind the compacted prompt;
- a decode step: in an open context, the forward of one token behind the compacted prompt;
- a compare cell: what `kvspec compare` does with a plan of one cell (CrystalCache at 0.3 on one needle), the model's
  loading, the table and the picture included, the command line's parser not;
- an injection: `Library.inject` of one stored chunk behind a compacted prompt; the Library exists and has put it.

The model is a tiny random Llama; the compare cell takes the pocket model.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from models_integration import CrystalCache
from models_integration.studies.subject import Loading
from reference.injection.wrappers import Vocabulary

__all__ = ["SCENARIOS", "entered"]

PACKAGE = Path(__file__).resolve().parents[2] / "models_integration"
TOKENS, ENDS = 131, frozenset(range(3, 131, 9))

# Where a name stood before the rooms, and where it stands in them: the first that is there is taken.
PLACES: dict[str, tuple[str, ...]] = {
    "Plan": (
        "models_integration.evaluation.cells", "models_integration.studies.compare.cells",
        "models_integration.studies.compare.plan",
    ),
    "run": ("models_integration.cli.compare",),
    "Archive": ("models_integration.archive.store",),
    "Library": ("models_integration.archive.library",),
}


def found(name: str) -> Any:
    """The public object of this name.

    Raises:
        LookupError: when it stands at none of its places.
    """
    for place in PLACES[name]:
        try:
            return getattr(import_module(place), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise LookupError(f"{name} stands at none of {', '.join(PLACES[name])}: tell PLACES where it is")


@contextmanager
def watching(files: set[str]) -> Iterator[None]:
    """Adds the files of the package with a function that is called inside, in any thread."""
    prefix = f"{PACKAGE}/"

    def called(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            files.add(frame.f_code.co_filename.removeprefix(prefix))

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def tiny() -> PreTrainedModel:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.train(False)
    return model


def ids(n: int) -> Tensor:
    """Random token ids, (1, n)."""
    return torch.randint(3, TOKENS, (1, n), generator=torch.Generator().manual_seed(n))


def crystal_cache() -> CrystalCache:
    """The policy under which the tiny model runs."""
    return CrystalCache(0.5, sentence_ends=ENDS, backend="numpy")


def first_prompt(files: set[str]) -> None:
    """A context with one prompt in it."""
    model, prompt = tiny(), ids(400)
    with torch.no_grad(), watching(files), crystal_cache()(model):
        model(input_ids=prompt)


def follow(files: set[str], n: int) -> None:
    """A forward of n tokens behind a compacted prompt, in the same context."""
    model = tiny()
    with torch.no_grad(), crystal_cache()(model) as run:
        model(input_ids=ids(400))
        with watching(files):
            model(input_ids=ids(n), past_key_values=run.cache)


def compare_cell(files: set[str]) -> None:
    """One cell on the pocket model, from its plan to its picture."""
    run, plan = found("run"), found("Plan")
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()), watching(files):
        one = plan(("crystalcache",), ("0.3",), ("needle",), length=512, samples=1, controls=False)
        run(one, Loading(backend="numpy"), Path(folder), batch_size=1, workers=1)


def injection(files: set[str]) -> None:
    """One stored chunk, spliced behind a compacted prompt."""
    model = tiny()
    with TemporaryDirectory() as folder, found("Archive")(Path(folder)) as archive:
        # A raw chunk has no wrapper: nothing is encoded.
        library = found("Library")(archive, model, Vocabulary(lambda text: [], lambda tokens: ""), "tenant")
        key = library.put(ids(40)[0].tolist())
        with torch.no_grad(), crystal_cache()(model) as run:
            model(input_ids=ids(400))
        with watching(files):
            library.inject(run.cache, [key])


SCENARIOS: dict[str, tuple[Callable[[set[str]], None], int]] = {
    "a first prompt": (first_prompt, 10),
    "a second turn": (lambda files: follow(files, 20), 10),
    "a decode step": (lambda files: follow(files, 1), 6),
    "a compare cell": (compare_cell, 18),
    "an injection": (injection, 8),
}
"""What is run, and how many files it should enter at most."""


def entered(scenario: Callable[[set[str]], None]) -> list[str]:
    """Files of models_integration that the scenario enters, at its second run."""
    scenario(set())
    files: set[str] = set()
    scenario(files)
    return sorted(files)
