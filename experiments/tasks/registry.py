"""Tasks by name: the tasks of `TABLE`, benchmark files, and your own tasks.

    from experiments.tasks.context import joined

    def COLOUR(ground, length, index, seed):
        name = str(ground.rng(length, index, seed).choice(["red", "blue"]))
        fact, filler = ground.encode(f"\\nThe door is {name}."), ground.encode("\\nThe house is old." * 20)
        text = joined(ground, length, index, seed, [fact, filler])
        about = {"task": "colour", "metric": "contains"}
        return [ground.sample(text.ids, "Which colour?", "The door is", name, text.spans[:1], **about)]
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.tasks.arithmetic import arithmetic_samples, math_file
from experiments.tasks.context import Ground, Maker
from experiments.tasks.in_prose import (
    delayed_in_prose_samples,
    fact_samples,
    keys_in_prose_samples,
    prose_continuation_samples,
)
from experiments.tasks.key_values import FORMS, in_turns, key_value_samples
from experiments.tasks.loaders import LM_EVAL, infinitebench_file, longbench_file, loogle_file, ruler_file
from experiments.tasks.metrics import BOXED, CONTAINS, FIRST_NUMBER, REGEX, STRING_MATCH_ALL
from experiments.tasks.needle import (
    CONFIRM,
    DELAYED_ASSOCIATION,
    DEV,
    NEEDLE,
    PLACEMENTS,
    Sample,
    delayed_association_sample,
    draw_sample,
    needle_sample,
)
from experiments.tasks.placed_fact import placed_fact_samples
from experiments.tasks.questions import question_task
from experiments.tasks.rows import OfFile
from experiments.tasks.ruler import DIALECTS, NIAH, niah_samples, variable_tracking_samples
from experiments.tasks.ruler_words import cwe_samples, fwe_samples, vt_samples
from spec.errors import SpecError
from spec.files import parse_toml
from spec.plugins import find_plugin
from spec.validate import did_you_mean

__all__ = [
    "CHAINS",
    "ENTRY_POINTS",
    "FILES",
    "QUESTIONS",
    "QUESTION_TASK",
    "TABLE",
    "TEXTS",
    "Entry",
    "Task",
    "files_of",
    "imports_code",
    "question_constants",
    "resolve_task",
]

QUESTION_TASK = "questions"
"""Name of the task of your own questions: `questions(file="q.csv", text="t.txt", grade="exact")`."""

ENTRY_POINTS = "kvspec.tasks"
QUESTIONS, CHAINS = 5, 2
"""Number of questions on one context, for tasks with several questions. A question about a chain needs five lines."""
SENTENCES, PROSE, LIST, FILE, USER = "filler sentences", "running text", "a list", "a file", "your own"
TEXTS = "prose, records, Python source"
"""Kinds of text from which contexts are made. `PROSE` and `LIST` use windows of the text that comes with kvspec."""


@dataclass(frozen=True)
class Entry:
    """Entry of the table of tasks.

    Attributes:
        about: what the question is about.
        make: function that returns the samples of one context. The result depends only on the arguments.
        metric: metric of the answer. "" if each file has a separate metric.
        assembly: text from which the contexts are made.
        constants: constants that you can set by name, as in `needle(depth=0.5)`. Default: the index of the sample
            decides.
        placements: supported positions of the question.
        gold: True if the gold answer has tokens, so that its likelihood can be measured.
        rows: number of contexts in a file; 0 for all other tasks.
        longest: function that returns the number of tokens of the longest context, for a file whose contexts are never
            cut. None: the requested length counts.
    """

    about: str
    make: Maker
    metric: str
    assembly: str
    constants: tuple[str, ...] = ()
    placements: tuple[str, ...] = PLACEMENTS
    gold: bool = True
    rows: int = 0
    longest: Callable[[Ground], int] | None = None


@dataclass(frozen=True)
class Task:
    """A task. Each call checks the samples.

    Attributes:
        name: name that the user gave.
        entry: entry of the table of tasks, or an entry for the user's file or function.
        digest: hash of the file of the user's module.
    """

    name: str
    entry: Entry
    digest: str = ""

    @property
    def built_in(self) -> bool:
        """True if the samples are made by kvspec, and come neither from a file nor from the user's function."""
        return self.entry.assembly not in (FILE, USER)

    def lengths(self, ground: Ground, requested: Sequence[int]) -> Sequence[int]:
        """Return the requested lengths, or the length of the longest context if the contexts are never cut."""
        return requested if self.entry.longest is None else (self.entry.longest(ground),)

    def check_placement(self, placement: str) -> None:
        """Check that the task supports a placement.

        Raises:
            SpecError: if the task does not support the placement.
        """
        if placement not in self.entry.placements:
            reason = (
                f"{self.name} supports only {', '.join(self.entry.placements)}: the earlier turns follow the context"
            )
            raise SpecError("placements", placement, reason)

    def __call__(self, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        """Return the samples of context number `index`: `length` tokens, or at most that of a file or own function.

        Raises:
            SpecError: if the task raises the error, or if the task returns invalid samples.
        """
        samples = tuple(self.entry.make(ground, length, index, seed))
        if not samples or not all(isinstance(sample, Sample) for sample in samples):
            raise SpecError("task", self.name, "must return only Sample objects, and at least one Sample")
        context = samples[0].context_ids
        if not (len(context) == length or (not self.built_in and 0 < len(context) < length)):
            n = len(context)
            reason = f"has a context of {n} tokens, and must have 1 to {length}: give --length {n}" if n else "is empty"
            raise SpecError("task", self.name, reason)
        if any(sample.context_ids != context for sample in samples):
            reason = "must return samples with equal context_ids: all questions have one context"
            raise SpecError("task", self.name, reason)
        for start, stop in (span for sample in samples for span in sample.evidence):
            if not 0 <= start < stop <= len(context):
                raise SpecError("task", self.name, f"has evidence at {(start, stop)}, outside its {length} tokens")
        return samples


def _needle(ground: Ground, length: int, index: int, seed: int, *, depth: float | None = None) -> list[Sample]:
    if depth is None:
        return [draw_sample(NEEDLE, ground.tokenizer, length, index, seed, frame=ground.frame)]
    return [needle_sample(ground.tokenizer, length, depth, (seed, length, index), frame=ground.frame)]


def _delayed(ground: Ground, length: int, index: int, seed: int, *, density: str = "") -> list[Sample]:
    if not density:
        return [draw_sample(DELAYED_ASSOCIATION, ground.tokenizer, length, index, seed, frame=ground.frame)]
    key = (seed, length, index)
    return [delayed_association_sample(ground.tokenizer, length, density, key, frame=ground.frame)]


def _turns(make: Maker, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    return in_turns(ground, make(ground, length, index, seed))


_SHARED: Mapping[str, Entry] = {
    **{
        f"key_value_{form}": Entry(
            "the values of keys of a JSON object", partial(key_value_samples, questions=QUESTIONS, form=form), CONTAINS,
            LIST,
        ) for form in FORMS
    },
    "variable_tracking": Entry(
        "the names of all variables with a given value", partial(variable_tracking_samples, questions=CHAINS),
        "names found", LIST,
    ),
}
_RULER: Mapping[str, Callable[[str, Ground, int, int, int], Sequence[Sample]]] = {
    **{name: partial(niah_samples, name) for name in NIAH}, "vt": vt_samples, "cwe": cwe_samples, "fwe": fwe_samples,
}
_DEPTH, _DENSITY = ("depth",), ("density",)
TABLE: Mapping[str, Entry] = {
    NEEDLE: Entry("a fact at a given depth", _needle, FIRST_NUMBER, SENTENCES, _DEPTH, gold=False),
    DELAYED_ASSOCIATION: Entry(
        "a fact at the start of a text about the same topic", _delayed, FIRST_NUMBER, SENTENCES, _DENSITY, gold=False
    ),
    "fact": Entry("a number or a word at a given depth", fact_samples, CONTAINS, TEXTS, ("value",)),
    "needle_in_prose": Entry("a fact at a given depth", keys_in_prose_samples, FIRST_NUMBER, PROSE, _DEPTH),
    **{
        f"keys_in_prose_{keys}": Entry(
            f"one of {keys} similar facts", partial(keys_in_prose_samples, keys=keys), FIRST_NUMBER, PROSE, _DEPTH
        ) for keys in (2, 4)
    },
    "delayed_association_in_prose": Entry(
        "a fact at the start of a text about the same topic", delayed_in_prose_samples, FIRST_NUMBER, PROSE, _DENSITY
    ),
    "placed_fact": Entry(
        "a fact at a given depth, with or without mentions of its topic", placed_fact_samples, CONTAINS, PROSE,
        ("depth", "mentions", "value"),
    ),
    **_SHARED,
    **{
        f"{name}_turns": replace(
            entry, about=f"{entry.about}, in turns", make=partial(_turns, entry.make), placements=PLACEMENTS[:1]
        ) for name, entry in _SHARED.items()
    },
    "arithmetic": Entry(
        "the result of a calculation, in a box", arithmetic_samples, BOXED, LIST, ("part",), gold=False
    ),
    "prose_continuation": Entry("the continuation of a text", prose_continuation_samples, "rouge_l", PROSE),
    **{
        f"{dialect.replace('-', '_')}_{name}": Entry(
            f"{name} of RULER, in the form of {dialect}", partial(make, dialect), STRING_MATCH_ALL, LIST
        ) for dialect in DIALECTS for name, make in _RULER.items()
    },
}
"""Tasks by name. Tasks with `PROSE` use windows of the text that do not overlap."""
FILES: Mapping[str, Callable[[Path], OfFile]] = {
    "ruler-file": ruler_file, "ruler-lm-eval-file": partial(ruler_file, dialect=LM_EVAL),
    "longbench-file": longbench_file,
    "loogle-file": loogle_file, "infinitebench-file": infinitebench_file, "math-file": math_file,
    "math-dev-file": partial(math_file, part=DEV), "math-confirm-file": partial(math_file, part=CONFIRM),
}


def resolve_task(text: str) -> Task:
    """Return the task with this name.

    A name is a task of `TABLE` with or without constants, as in `needle(depth=0.5)`. `questions(file="q.csv")` reads
    your own questions, also with `text="t.txt"` and `grade="f1"`. A name can also be `KIND:PATH` for a benchmark file
    (a kind of `FILES`), `module:ATTRIBUTE` for your function, or the name of an entry point. The module can be
    installed or in the current folder.

    Raises:
        SpecError: if the file does not have the format of its kind, or if the name or a constant is unknown. Also if
            the module cannot be loaded, or if the attribute is not a function.
    """
    name, bracket, rest = text.partition("(")
    if name in TABLE:
        entry = TABLE[name]
        constants = _constants(text, rest, entry.constants) if bracket else {}
        return Task(text, replace(entry, make=partial(entry.make, **constants)) if constants else entry)
    if name == QUESTION_TASK and bracket:
        return _question_task(text)
    kind, _, path = text.partition(":")
    return _file_task(text, kind, Path(path)) if kind in FILES else _user_task(text, TABLE)


def imports_code(text: str) -> bool:
    """Return True if a task is code of the user, which `resolve_task` imports: `module:ATTRIBUTE` or an entry point."""
    name, bracket, _ = text.partition("(")
    return not (name in TABLE or (name == QUESTION_TASK and bracket) or text.partition(":")[0] in FILES)


def files_of(text: str) -> list[Path]:
    """Return the paths in the name of a task: the files of your own questions, or a benchmark file.

    Raises:
        SpecError: if the constants of your own questions are invalid.
    """
    if text.partition("(")[0] == QUESTION_TASK:
        constants = question_constants(text)
        return [Path(constants[key]) for key in ("file", "text") if key in constants]
    kind, _, path = text.partition(":")
    return [Path(path)] if kind in FILES else []


def question_constants(text: str) -> dict[str, Any]:
    """Return the constants in the name of your own questions: `file`, and perhaps `text` and `grade`.

    Raises:
        SpecError: if the constants are invalid.
    """
    constants = _constants(text, text.partition("(")[2], ("file", "text", "grade"))
    if "file" not in constants:
        raise SpecError("task", text, 'lacks the file of questions, as in questions(file="q.csv")')
    return constants


def _question_task(text: str) -> Task:
    constants = question_constants(text)
    created = question_task(**constants)
    entry = Entry(QUESTION_TASK, created, "", FILE, rows=len(created.questions), longest=created.longest)
    return Task(text, replace(entry, gold=created.grade != REGEX))


def _file_task(text: str, kind: str, path: Path) -> Task:
    if not path.is_file():
        raise SpecError("tasks", text, f"has no file {str(path)!r}: give the path of a benchmark file after {kind}:")
    created = FILES[kind](path)
    return Task(text, Entry(kind, created, "", FILE, rows=created.rows))


def _constants(text: str, rest: str, known: Collection[str]) -> dict[str, Any]:
    """Return the constants in parentheses. The values are parsed as TOML."""
    form = "must be a task name, or a task name with constants, such as needle(depth=0.5)"
    if not rest.endswith(")") or "\n" in rest:
        raise SpecError("task", text, form)
    try:
        given: dict[str, Any] = parse_toml(f"constants = {{{rest[:-1]}}}")["constants"]
    except ValueError as error:  # a number of thousands of digits, and deep lists
        raise SpecError("task", text, f"{form}: {error}") from error
    for constant, value in given.items():
        if constant not in known:
            raise SpecError(
                "task", text, f"has no constant {constant}; the constants are {', '.join(known) or 'none'}"
            )
        if isinstance(value, str) is (constant == "depth"):
            raise SpecError(constant, value, f"must be a {'number' if constant == 'depth' else 'text'} ({text})")
    return given


def _user_task(name: str, known: Collection[str]) -> Task:
    try:
        result = find_plugin("task", name, ENTRY_POINTS, known)
    except SpecError as error:
        if near := did_you_mean(name.partition(":")[0], FILES):  # rulerfile:x.jsonl
            raise SpecError(error.argument, error.value, f"{error.bound}{near}") from error
        raise
    if not callable(result.value):
        kind = type(result.value).__name__
        raise SpecError("task", name, f"must be a function of ground, length, index, seed; is {kind}")
    return Task(name, Entry("your own", result.value, "", USER), digest=result.digest)
