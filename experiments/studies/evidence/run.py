"""Run of a study's rules. Samples are measured in a fixed order, and each sample is stored as one row immediately."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from experiments.studies.answers import attempted, read_budget
from experiments.studies.evidence.kept import (
    BLIND,
    EVIDENCE,
    FULL,
    RANDOM_TRUNKS,
    RANDOMS,
    WINDOWS,
    Prompt,
    bounds_of,
    random_trunks,
    read_prompt,
    steps,
)
from experiments.studies.evidence.measure import kept_rows, measure
from experiments.studies.evidence.protocol import processor
from experiments.studies.evidence.rules import ALL, AT_PROMPT, Rules
from experiments.studies.evidence.trunk_forms import TRUNK_FORMS
from experiments.studies.leases import Leases
from experiments.studies.report import title_of
from experiments.studies.results import ERROR, Row, load_rows, unit_named
from experiments.studies.subject import Subject
from experiments.tasks import Sample, place
from experiments.tasks.context import Ground, Prose, read_prose
from experiments.tasks.in_prose import most_contexts
from experiments.tasks.questions import USER
from experiments.tasks.registry import FILE, SENTENCES, TEXTS, Task, resolve_task
from models_integration.model.frame import NO_TEMPLATE, frame_of
from models_integration.session.method import Method
from models_integration.session.stages import describe_stages
from reference.policies.kept import floor_reason
from spec import SPEC_VERSION
from spec.errors import SpecError
from spec.policy import SEGMENT_END

__all__ = [
    "IDENTITY", "ONE_STUDY", "Cell", "Item", "Measuring", "check_budgets", "items", "leases", "left_of", "merged",
    "methods", "rows_of", "run_items", "study_unit",
]

ONE_STUDY = ("rules", "model", "template", "calibration", "backend", "spec_version")
"""Columns that are equal in all rows of one study. Rows that differ in one of these columns are never combined.
`template` is the digest of the chat template, or None without a template."""
IDENTITY = (
    *ONE_STUDY, "task", "metric", "length", "index", "question", "placement", "seed", "chat_template", "control",
    "sample",
)
"""Columns that identify the sample of a row. Several rows of the same sample can have different cells."""
Cell = tuple[str, str]
"""Policy or control, and budget, as text."""


@dataclass(frozen=True)
class Item:
    """Sample, and its place in a run.

    Attributes:
        control: the only control that uses the sample, or "" for a sample of the task itself.
    """

    task: str
    length: int
    index: int
    question: int
    placement: str
    sample: Sample
    seed: int = 0
    control: str = ""

    @property
    def title(self) -> str:
        """Title for the display of progress."""
        number = f" {self.question + 1}" if self.sample.dialect == USER else ""
        aim = f"control '{self.control}'" if self.control else f"question{number} {self.placement.replace('_', ' ')}"
        return f"{title_of(self.task)}, {self.context_length} tokens, {aim}"

    @property
    def context_length(self) -> int:
        """Number of context tokens from which budgets are computed: the tokens of your own text, or the length."""
        return self.sample.length if self.sample.dialect == USER else self.length

    @property
    def digest(self) -> str:
        """SHA-256 of all data of the sample (tokens, evidence, metric, references, ...), hexadecimal."""
        parts = {**vars(self.sample), "metadata": dict(self.sample.metadata)}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def identity(self, rules: Rules, subject: Subject) -> Row:
        """Return the values of the columns IDENTITY. Only rows of this item have these values."""
        return {
            "rules": rules.digest, "model": subject.name, "template": _template(rules, subject),
            "sample": self.digest, "placement": self.placement, "task": self.task,
            "metric": self.sample.metric, "length": self.length, "index": self.index,
            "question": self.question, "seed": self.seed, "chat_template": self.sample.chat_template,
            "control": self.control or None, "calibration": _calibration(subject), "backend": subject.backend,
            "spec_version": SPEC_VERSION,
        }

    def cells(self, rules: Rules) -> tuple[Cell, ...]:
        """Return the cells to measure, in the order of a row."""
        if self.control:
            return ((self.control, rules.budgets[0]),)
        controls = [name for name in rules.controls if name in bounds_of(self.task, self.sample)]
        ends = [(name, at) for name, at in ((FULL, "1.0"), (BLIND, "0")) if name in rules.controls]
        drawn = [name for name in (*RANDOMS, EVIDENCE) if name in rules.controls]
        limited = [(name, budget) for budget in rules.budgets for name in (*rules.policies, *drawn)]
        bounded = [(name, rules.budgets[0] if name.startswith("window") else "1.0") for name in controls]
        return (*ends, *limited, *bounded)

    def unit(self, rules: Rules, subject: Subject, cells: Iterable[Cell] | None = None) -> str:
        """Return the unit of work for a row with these cells. Default: all cells."""
        return _unit(self.identity(rules, subject), self.cells(rules) if cells is None else cells)


def items(rules: Rules, subject: Subject, parts: Sequence[str]) -> Iterator[Item]:
    """Yield the samples of parts. Tasks, lengths and placements alternate, so that a partial run is useful too.

    Raises:
        SpecError: if there are more contexts than windows of the running text, if a length exceeds the model's
            positions, or if a task raises the error.
    """
    tasks = {name: resolve_task(name) for name in rules.tasks}
    reading = [name for name, task in tasks.items() if task.entry.assembly not in (SENTENCES, FILE)]
    prose = read_prose(subject.tokenizer) if reading else Prose("none", (), ())
    for name in reading:
        distinct = most_contexts if tasks[name].entry.assembly == TEXTS else Prose.windows
        if rules.contexts > (most := min(distinct(prose, length) for length in rules.lengths)):
            raise SpecError("contexts", rules.contexts, f"must be at most {most}, the different windows of {name}")
    ground = Ground(subject.tokenizer, prose, frame_of(subject.tokenizer, rules.bare))
    lengths = {name: task.lengths(ground, rules.lengths) for name, task in tasks.items()}
    for index in range(rules.contexts):
        for seed in rules.seeds:
            for name, task in tasks.items():
                for length in lengths[name] if index < (task.entry.rows or rules.contexts) else ():
                    if task.built_in:  # the contexts of a file or of an own function can be shorter
                        subject.check_positions("lengths", length)
                    samples = _drawn(rules, task, ground, length, index, seed)
                    for sample in samples:
                        _check_sample(subject, task, index, sample)
                    if samples[0].part in parts:
                        for placement in rules.placements:
                            for question, sample in enumerate(samples[: rules.questions]):
                                yield Item(name, length, index, question, placement, sample, seed)
                            yield from _window_items(rules, ground, Item(
                                name, length, index, 0, placement, samples[0], seed
                            ))


def _check_sample(subject: Subject, task: Task, index: int, sample: Sample) -> None:
    """Check that the model has positions for a sample. A text of the user is named by its number in the file."""
    if task.entry.longest is None:
        subject.check_sample("lengths", sample)
        return
    try:
        subject.check_sample("text", sample)
    except SpecError as error:
        where, model = f"number {index + 1} of {task.name}", "choose a --model with more positions"
        raise SpecError("text", where, f"{error.value} {error.bound}: shorten the text, or {model}") from error


def _window_items(rules: Rules, ground: Ground, item: Item) -> Iterator[Item]:
    """Yield the samples of the controls that need the fact at a special depth."""
    for (task, control), drawn_by in WINDOWS.items():
        if item.task == task and control in rules.controls:
            (sample,) = _drawn(rules, resolve_task(drawn_by), ground, item.length, item.index, item.seed)
            yield replace(item, sample=sample, control=control)


def _drawn(rules: Rules, task: Task, ground: Ground, length: int, index: int, seed: int) -> list[Sample]:
    """Return the samples of a task, with the answer length limited by the rules."""
    samples, most = task(ground, length, index, seed), rules.answer_tokens
    return [replace(one, max_new_tokens=min(most or one.max_new_tokens, one.max_new_tokens)) for one in samples]


def methods(rules: Rules, subject: Subject) -> dict[str, Method]:
    """Return the policies bound to the model, and the controls that are such policies with random scores.

    Raises:
        SpecError: if a policy does not support the model, or if its calibration is missing. Also if its name has the
            suffix `@prompt` although the policy always evicts only at the end of the prompt.
    """
    result, budget = {}, read_budget(rules.budgets[0] if rules.budgets else "1.0")
    for name in rules.policies:
        text = name.removesuffix(AT_PROMPT)
        try:
            method = subject.policy(text, budget).on(subject.model)
        except SpecError as error:
            raise SpecError(error.argument, error.value, f"{error.bound} (policy {name})") from error
        if text != name and not steps(method):
            raise SpecError("policies", name, f"always evicts only after the prompt, so leave out {AT_PROMPT}")
        if text != name:
            policy = replace(method.policy, cadence=SEGMENT_END)
            method = Method(policy, method.budget, method.engine, positions=method.positions)
        result[name] = method
    if RANDOM_TRUNKS in rules.controls:
        method = subject.policy("crystalcache", budget).on(subject.model)
        result[RANDOM_TRUNKS] = replace(method, policy=random_trunks(method.policy))
    for name in (one for one in TRUNK_FORMS if one in rules.controls):
        method = subject.policy(TRUNK_FORMS[name].base, budget).on(subject.model)
        result[name] = replace(method, policy=TRUNK_FORMS[name].of(method.policy, name))
    return result


def check_budgets(rules: Rules, policies: Mapping[str, Method], lengths: Iterable[int]) -> Iterator[str]:
    """Check that budgets are different.

    Args:
        rules: rules of the run.
        policies: policies by name.
        lengths: lengths of the contexts, in tokens.

    Yields:
        A warning for each budget below the floor of a policy. Such a policy keeps more tokens, as in a session.

    Raises:
        SpecError: if the check fails.
    """
    for length in lengths:
        seen = dict[int, str]()
        for budget in rules.budgets:
            tokens = read_budget(budget).tokens(length)
            for method in policies.values():
                floor = min(method.policy.floor, length)
                if tokens < floor:
                    yield (
                        f"budget {budget} is {tokens} of {length} tokens, but {floor_reason(method.policy)}; the"
                        " results show the tokens kept, and do not compare policies at this budget"
                    )
            other = seen.setdefault(min(tokens, length), budget)
            if other != budget:
                same = f"is {min(tokens, length)} of {length} tokens, as is budget {other}: leave out one of the two"
                raise SpecError("budgets", budget, same)


def leases(path: Path) -> Leases:
    """Return the queue from which parallel workers claim the samples of a results file."""
    return Leases(path, study_unit)


def study_unit(row: Row) -> str | None:
    """Return the unit of a row of a run, or None for different rows."""
    if not {"rules", "sample"} <= row.keys():
        return None
    return _unit(row, ((cell["policy"], cell["budget"]) for cell in row.get("cells", ())))


def _unit(row: Row, cells: Iterable[Cell]) -> str:
    return unit_named([_key(row), sorted(cells)])


def _key(row: Row) -> dict[str, object]:
    return {name: row.get(name) for name in IDENTITY}


def left_of(
    path: Path, rules: Rules, subject: Subject, every: Iterable[Item],
) -> dict[str, tuple[Item, tuple[Cell, ...]]]:
    """Return the samples with missing cells by unit, and the missing cells."""
    stored, result = {unit_named(_key(row)): row for row in merged(load_rows(path))}, {}
    for item in every:
        row = stored.get(unit_named(item.identity(rules, subject)), {"cells": ()})
        here = {(cell["policy"], cell["budget"]) for cell in row["cells"]}
        cells = tuple(cell for cell in item.cells(rules) if cell not in here)
        if cells:
            result[item.unit(rules, subject, cells)] = item, cells
    return result


def rows_of(path: Path, rules: Rules, subject: Subject, every: Iterable[Item]) -> list[Row]:
    """Return the stored rows of these samples from all runs, with only the cells of the rules."""
    stored, result = {unit_named(_key(row)): row for row in merged(load_rows(path))}, []
    for item in every:
        if row := stored.get(unit_named(item.identity(rules, subject))):
            cells = {(cell["policy"], cell["budget"]): cell for cell in row["cells"]}
            result.append({**row, "cells": [cells[cell] for cell in item.cells(rules) if cell in cells]})
    return result


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return one row per sample, with the cells and the durations of all rows of the sample."""
    result: dict[str, Row] = {}
    for row in rows:
        before = result.setdefault(unit_named(_key(row)), {"cells": (), "seconds": {}})
        cells = {(cell["policy"], cell["budget"]): cell for cell in (*before["cells"], *row["cells"])}
        before |= {**row, "cells": [*cells.values()], "seconds": {**before["seconds"], **row.get("seconds", {})}}
    return list(result.values())


class Measuring:
    """Measures samples. Consecutive samples with equal prompts share one reading of the prompt."""

    def __init__(self, subject: Subject, rules: Rules, policies: Mapping[str, Method], batch_size: int) -> None:
        self._subject, self._rules, self._policies, self._batch_size = subject, rules, policies, batch_size
        self._reader = subject if rules.answers else subject.first_layers(_layers_read(policies.values()))
        self._names, self._prompt = set[str](), list[Prompt]()

    def __call__(self, item: Item, cells: Sequence[Cell]) -> Row:
        """Return the measurements of the cells of a sample.

        Raises:
            SpecError: if kvspec does not support the prompt, or if a policy raises the error.
        """
        placement = place(item.sample, item.placement)
        names = {name for name, _ in cells if name in self._policies}
        if not (self._prompt and self._prompt[0].placement.prompt_ids == placement.prompt_ids and names <= self._names):
            self.forget()
            some = {name: method for name, method in self._policies.items() if name in names}
            self._names = names
            self._prompt.append(read_prompt(self._reader, some, self._rules.budgets, placement))
        if not self._rules.answers:
            return kept_rows(item.sample, self._prompt[0], cells)
        prompt = self._prompt[0].followed_by(placement)
        return measure(self._subject, item.sample, prompt, cells, self._batch_size)

    def forget(self) -> None:
        """Free the memory of the last prompt."""
        self._prompt.clear()

    def row(self, item: Item, measured: Row) -> Row:
        """Return the row of a sample: identity, part, commit, description and measurements."""
        rules = self._rules
        for cell in measured.get("cells", ()):
            if cell["policy"] in self._policies:
                cell["backend"] = describe_stages(self._policies[cell["policy"]], on_device=False)
        part = item.sample.part if rules.claims else ALL
        registered = {"commit": rules.commit} if rules.commit else {}
        return {**item.identity(rules, self._subject), "part": part, **registered, **_about(item), **measured}


def run_items(
    subject: Subject, rules: Rules, policies: Mapping[str, Method],
    wanted: Mapping[str, tuple[Item, tuple[Cell, ...]]], leases: Leases, batch_size: int,
    progress: Callable[[str], None],
) -> None:
    """Measure samples one after the other, together with all other workers. `progress` is called for each sample.

    Each row is on the disk before the next sample starts, so a run can be stopped at any time. The run ends when all
    samples are stored by any worker. A sample that fails has a row with the error.
    """
    measuring = Measuring(subject, rules, policies, batch_size)

    def done(unit: str) -> None:
        progress(f"{wanted[unit][0].title}{f'; {len(leases.failed)} FAILED' if leases.failed else ''}")

    for unit in leases.units(wanted, done):
        item, cells = wanted[unit]
        row = attempted(partial(measuring, item, cells), leases)
        if ERROR in row:
            measuring.forget()
            row["cells"] = [{"policy": policy, "budget": budget} for policy, budget in cells]
        leases.add(measuring.row(item, row))


def _layers_read(policies: Iterable[Method]) -> int | None:
    """Return the number of first layers that the policies need, or None for all layers."""
    needs = [method.policy.scorer.needs for method in policies]
    if any(one.layers == "all" or one.rehearsal or (one.layers == "observed" and one.observed < 0) for one in needs):
        return None
    return 1 + max((one.observed for one in needs if one.layers == "observed"), default=0)


def _about(item: Item) -> Row:
    sample = item.sample
    return {
        "context": sample.context_digest, "metadata": dict(sample.metadata),
        "prompt_tokens": len(place(sample, item.placement).prompt_ids), "question_tokens": len(sample.question_ids),
        "answer_tokens": len(sample.answer_ids),
        "evidence_tokens": sum(stop - start for start, stop in sample.evidence),
        "versions": {
            "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "processor": processor(),
    }


def _template(rules: Rules, subject: Subject) -> str | None:
    name = frame_of(subject.tokenizer, rules.bare).name
    return None if name == NO_TEMPLATE else name


def _calibration(subject: Subject) -> Row | None:
    """Return the digest of the calibration, and whether the calibration file lists its contexts."""
    used = subject.calibration
    return None if used is None else {"digest": used.digest, "controlled": used.samples is not None}
