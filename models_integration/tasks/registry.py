"""Tasks by name: ours, RULER v1's in two dialects, files of benchmarks as `ruler-file:PATH` (or `ruler-lm-eval-file`,
`scbench-file`, `scbench-turns-file`, `longbench-file`), and the user's own as `module:ATTRIBUTE` or an entry point of
ENTRY_POINTS:

    from models_integration.tasks.context import joined

    def COLOUR(ground, length, index, seed):
        name = str(ground.rng(length, index, seed).choice(["red", "blue"]))
        fact, filler = ground.encode(f"\\nThe door is {name}."), ground.encode("\\nThe house is old." * 20)
        text = joined(ground, length, index, seed, [fact, filler])
        about = {"task": "colour", "metric": "contains"}
        return [ground.sample(text.ids, "Which colour?", "The door is", name, text.spans[:1], **about)]
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from models_integration.tasks.context import Ground, Maker
from models_integration.tasks.delayed_in_prose import delayed_in_prose_samples
from models_integration.tasks.key_value import FORMS, key_value_samples
from models_integration.tasks.keys_in_prose import keys_in_prose_samples
from models_integration.tasks.loaders import LM_EVAL, longbench_file, ruler_file, scbench_file
from models_integration.tasks.prefix_suffix import prefix_suffix_samples
from models_integration.tasks.prose_continuation import prose_continuation_samples
from models_integration.tasks.ruler import DIALECTS
from models_integration.tasks.ruler_niah import NIAH, niah_samples
from models_integration.tasks.ruler_words import cwe_samples, fwe_samples, vt_samples
from models_integration.tasks.samples import Sample
from models_integration.tasks.turns import in_turns
from models_integration.tasks.variable_tracking import variable_tracking_samples
from spec.errors import SpecError
from spec.plugins import find_plugin

__all__ = ["BUILT_IN", "CHAINS", "ENTRY_POINTS", "FILES", "IN_PROSE", "QUESTIONS", "Task", "own_task", "resolve_task"]

ENTRY_POINTS = "kvspec.tasks"
QUESTIONS, CHAINS = 5, 2
"""Questions on one context, where a task has several; a question about a chain needs five lines of its own."""


@dataclass(frozen=True)
class Task:
    """A task, whose samples are checked as they are made.

    Attributes:
        name: what it was asked for as.
        make: what makes the samples of one context; a pure function of its arguments.
        of_file: whether contexts are a file's, and may be shorter than what is asked for.
        digest: of the file of a user's own module.
    """

    name: str
    make: Maker
    of_file: bool = False
    digest: str = ""

    def __call__(self, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        """The samples of context number `index`, which have one context of `length` tokens; of a file at most so many.

        Raises:
            SpecError: what the task refuses; and for anything but such samples.
        """
        samples = tuple(self.make(ground, length, index, seed))
        if not samples or not all(isinstance(sample, Sample) for sample in samples):
            raise SpecError("task", self.name, "must give at least one Sample, and nothing else")
        context = samples[0].context_ids
        fits = len(context) == length or (self.of_file and 0 < len(context) < length)
        if not fits or any(sample.context_ids != context for sample in samples):
            raise SpecError("task", self.name, f"must give one context of {length} tokens, and gave {len(context)}")
        for start, stop in (span for sample in samples for span in sample.evidence):
            if not 0 <= start < stop <= len(context):
                raise SpecError("task", self.name, f"has evidence at {(start, stop)}, outside its {length} tokens")
        return samples


def _turns(make: Maker, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    return in_turns(ground, make(ground, length, index, seed))


_SHARED: Mapping[str, Maker] = {
    **{f"key_value_{form}": partial(key_value_samples, questions=QUESTIONS, form=form) for form in FORMS},
    "prefix_suffix": partial(prefix_suffix_samples, questions=QUESTIONS),
    "variable_tracking": partial(variable_tracking_samples, questions=CHAINS),
}
_RULER: Mapping[str, Callable[[str, Ground, int, int, int], Sequence[Sample]]] = {
    **{name: partial(niah_samples, name) for name in NIAH}, "vt": vt_samples, "cwe": cwe_samples, "fwe": fwe_samples,
}
BUILT_IN: Mapping[str, Maker] = {
    "needle_in_prose": keys_in_prose_samples,
    "keys_in_prose_2": partial(keys_in_prose_samples, keys=2),
    "keys_in_prose_4": partial(keys_in_prose_samples, keys=4),
    "delayed_association_in_prose": delayed_in_prose_samples,
    **_SHARED,
    **{f"{name}_turns": partial(_turns, make) for name, make in _SHARED.items()},
    "prose_continuation": prose_continuation_samples,
    **{
        f"{dialect.replace('-', '_')}_{name}": partial(make, dialect)
        for dialect in DIALECTS for name, make in _RULER.items()
    },
}
FILES: Mapping[str, Callable[[Path], Maker]] = {
    "ruler-file": ruler_file, "ruler-lm-eval-file": partial(ruler_file, dialect=LM_EVAL), "scbench-file": scbench_file,
    "scbench-turns-file": partial(scbench_file, turns=True), "longbench-file": longbench_file,
}

IN_PROSE = ("needle_in_prose", "keys_in_prose_2", "keys_in_prose_4")
"""Those with one fact to keep and one number for an answer, in running text."""


def resolve_task(name: str) -> Task:
    """A task of `BUILT_IN`; `KIND:PATH`, a file of a kind of `FILES`; or a user's own.

    Raises:
        SpecError: for a file that is not as its kind describes it; as `own_task`.
    """
    if name in BUILT_IN:
        return Task(name, BUILT_IN[name])
    kind, _, path = name.partition(":")
    if kind in FILES:
        return Task(name, FILES[kind](Path(path)), of_file=True)
    return own_task(name, BUILT_IN)


def own_task(name: str, known: Collection[str]) -> Task:
    """A user's function like those of `BUILT_IN`: `module:ATTRIBUTE`, of a module that is installed or lies here, or
    the name of an entry point; `known` are the names beside them.

    Raises:
        SpecError: for an unknown name, a module that cannot be loaded, and an attribute that is no function.
    """
    found = find_plugin("task", name, ENTRY_POINTS, known)
    if not callable(found.value):
        kind = type(found.value).__name__
        raise SpecError("task", name, f"must be a function of ground, length, index, seed; is {kind}")
    return Task(name, found.value, digest=found.digest)
