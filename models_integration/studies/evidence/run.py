"""The run of a study's part: samples in a fixed order, each stored as one row as soon as all its cells are measured."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from models_integration.studies.answers import attempted
from models_integration.studies.evidence.kept import Prompt, read_prompt
from models_integration.studies.evidence.measure import measure
from models_integration.studies.evidence.rules import AT_PROMPT, Rules
from models_integration.studies.leases import Leases, unit_named
from models_integration.studies.results import ERROR, Row
from models_integration.studies.subject import Subject
from models_integration.tasks import Sample, place
from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground
from models_integration.tasks.prose import Prose
from models_integration.tasks.registry import FILES, resolve_task
from spec import SPEC_VERSION
from spec.errors import SpecError
from spec.policy import SEGMENT_END, Policy

__all__ = ["IDENTITY", "ONE_STUDY", "Item", "check_windows", "items", "leases", "methods", "run_part", "study_unit"]

ONE_STUDY = ("rules", "model", "calibration", "backend", "spec_version")
"""What all rows of one study share; rows that differ in one of these are never counted together."""
IDENTITY = (*ONE_STUDY, "task", "length", "index", "question", "placement", "sample")
"""The columns that tell a row from all others."""


@dataclass(frozen=True)
class Item:
    """A sample at its place in a study: one row."""

    task: str
    length: int
    index: int
    question: int
    placement: str
    sample: Sample

    @property
    def title(self) -> str:
        """What progress calls it."""
        return f"{self.task}, {self.length}, {self.placement}"

    @property
    def digest(self) -> str:
        """SHA-256 of the whole sample: tokens, evidence, metric, references and all else; hexadecimal."""
        parts = {**vars(self.sample), "metadata": dict(self.sample.metadata)}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def identity(self, rules: Rules, subject: Subject) -> Row:
        """The columns IDENTITY, whose values only this item's row has."""
        return {
            "rules": rules.digest, "model": subject.name, "sample": self.digest, "placement": self.placement,
            "task": self.task, "length": self.length, "index": self.index, "question": self.question,
            "calibration": _calibration(subject), "backend": subject.backend, "spec_version": SPEC_VERSION,
        }

    def unit(self, rules: Rules, subject: Subject) -> str:
        """Its row's unit of work."""
        unit = study_unit(self.identity(rules, subject))
        assert unit is not None
        return unit


def items(rules: Rules, subject: Subject, prose: Prose, parts: Sequence[str]) -> Iterator[Item]:
    """The samples of parts; those of all tasks, lengths and placements take turns, so that a run may end anywhere.

    Raises:
        SpecError: for a task without gold answer tokens, a length beyond the model's positions, and what the tasks
            refuse.
    """
    ground = Ground(subject.tokenizer, prose, bare(subject.tokenizer))
    tasks = {name: resolve_task(name) for name in rules.tasks}
    for index in range(rules.contexts):
        for task in rules.tasks:
            for length in rules.lengths:
                if task.partition(":")[0] not in FILES:  # those cut what is longer, and may have less
                    subject.check_positions("lengths", length)
                samples = tasks[task](ground, length, index, rules.seed)
                for sample in samples:
                    subject.check_sample("lengths", sample)
                if not all(sample.answer_ids for sample in samples):
                    raise SpecError("tasks", task, "has no gold answer tokens, whose likelihood is measured")
                if Rules.part_of(samples[0].context_digest) in parts:
                    for placement in rules.placements:
                        for question, sample in enumerate(samples[: rules.questions]):
                            yield Item(task, length, index, question, placement, sample)


def check_windows(rules: Rules, prose: Prose) -> None:
    """Contexts of one length have no text in common; those of files are as they are.

    Raises:
        SpecError: for more contexts than the text has windows.
    """
    if all(name.partition(":")[0] in FILES for name in rules.tasks):
        return
    most = min(prose.windows(length) for length in rules.lengths)
    if rules.contexts > most:
        raise SpecError("contexts", rules.contexts, f"must be at most {most}, the windows of {prose.name}")


def methods(rules: Rules, subject: Subject) -> dict[str, Policy]:
    """The policies on the model.

    Raises:
        SpecError: for one that it does not serve, or whose name does not say how it decides.
    """
    found = {}
    for name in rules.policies:
        policy = subject.policy(name.removesuffix(AT_PROMPT), "1.0").on(subject.model).policy
        if (policy.cadence.every is None) is name.endswith(AT_PROMPT):
            raise SpecError(
                "policies", name, f"a name ends in {AT_PROMPT} where, and only where, the policy decides while tokens"
                " are decoded: one forward cannot stand for that"
            )
        found[name] = replace(policy, cadence=SEGMENT_END)
    return found


def leases(path: Path) -> Leases:
    """A worker's share of the samples of a results file."""
    return Leases(path, study_unit)


def study_unit(row: Row) -> str | None:
    """The unit of a study's row; None for other rows."""
    if not {"rules", "sample"} <= row.keys():
        return None
    return unit_named({key: row.get(key) for key in IDENTITY})


def run_part(
    subject: Subject, rules: Rules, policies: Mapping[str, Policy], wanted: Mapping[str, Item], own: Leases,
    batch_size: int, progress: Callable[[str], None],
) -> None:
    """Measure samples by their units, one after the other, beside any other workers; `progress` is told of each.

    Each row is on the disk before the next sample starts, so that a run may be stopped at any time. It ends when all
    are stored, by whomever. What cannot be measured has a row with its error.
    """
    prompt: list[Prompt] = []

    def measured(item: Item) -> Row:
        placement = place(item.sample, item.placement)
        if not prompt or prompt[0].placement.prompt_ids != placement.prompt_ids:
            prompt.clear()
            prompt.append(read_prompt(subject, policies, rules.budgets, placement))
        return measure(subject, item.sample, prompt[0].followed_by(placement), rules.budgets, batch_size)

    def done(unit: str) -> None:
        progress(f"{wanted[unit].title}{f'; {len(own.failed)} FAILED' if own.failed else ''}")

    for unit in own.units(wanted, done):
        item = wanted[unit]
        identity = {**item.identity(rules, subject), "part": Rules.part_of(item.sample.context_digest)}
        row = attempted(partial(measured, item), own)
        if ERROR in row:
            prompt.clear()
        own.add({**identity, **_about(item.sample, rules), **row})


def _about(sample: Sample, rules: Rules) -> Row:
    return {
        "seed": rules.seed, "context": sample.context_digest, "chat_template": sample.chat_template,
        "metric": sample.metric, "metadata": dict(sample.metadata), "question_tokens": len(sample.question_ids),
        "answer_tokens": len(sample.answer_ids),
        "evidence_tokens": sum(stop - start for start, stop in sample.evidence),
        "versions": {
            "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _calibration(subject: Subject) -> Row | None:
    """Which statistics, and whether their file says over which contexts they were taken."""
    used = subject.calibration
    return None if used is None else {"digest": used.digest, "controlled": used.samples is not None}
