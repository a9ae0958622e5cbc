"""Rules of a run in a TOML file: claims and study. The file is written before the confirming samples are run.

`kvspec compare` makes such rules from their options.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from experiments.studies.answers import read_budget
from experiments.studies.evidence.kept import (
    BLIND,
    CONTROL_BOUNDS,
    CONTROLS,
    EVERY_CONTROL,
    EVIDENCE,
    FULL,
    RANDOMS,
    default_controls,
)
from experiments.studies.subject import policy_in_rows, versioned
from experiments.studies.toml_records import is_list_of, record_of, tables_of
from experiments.tasks import PLACEMENTS
from experiments.tasks.needle import CONFIRM, DEV, part_of
from experiments.tasks.registry import imports_code, resolve_task
from models_integration.policies.methods import parse_policy
from models_integration.policies.sizes import is_size
from reference.calibration import Calibration, load_calibration
from reference.policies.names import AT_PROMPT, is_built_in
from spec.errors import SpecError
from spec.files import decode_text, parse_toml, read_file
from spec.validate import check_choices, check_once

__all__ = [
    "ALL", "AT_PROMPT", "COMPUTED", "KEPT", "MEASURES", "PARTS", "TEMPLATE", "Claim", "Rules", "Stage", "check_budget",
    "load_rules", "rules_of", "rules_text",
]

KEPT = "kept"
MEASURES = ("recovery", "accuracy", KEPT)
"""Recovery of the likelihood, right answers, and the fraction of evidence tokens that a policy keeps."""
TEMPLATE = "template"
CLUSTERS = ("", TEMPLATE)
PARTS = (DEV, CONFIRM)
MOST_SAMPLES = 10**6
"""Largest number of contexts, or of questions on a context. Samples are made before the first one is measured."""
MOST_SEED = 2**53
ALL = "all"
"""Name for both parts, for rules without claims."""

@dataclass(frozen=True)
class Claim:
    """Claim to decide: `first` is better than `second` by at least `difference`.

    A negative difference claims non-inferiority: `first` is not worse than `second` by more than this. `second` may
    then be the full cache.

    Attributes:
        measure: a name of MEASURES.
        second_tasks: tasks of `second`, one for each task of `first`, with the same index, if the tasks differ. The
            claim may then compare a policy with itself.
        clusters: "template" if samples with the same template of the fact count as one observation in the interval and
            the p value. Default: the samples of a context.

    Raises:
        SpecError: if measure or clusters are unknown, if the difference is 0 or outside [-1, 1], or if `second_tasks`
            has a different number of tasks.
    """

    name: str
    first: str
    second: str
    budget: str
    placement: str
    tasks: tuple[str, ...]
    measure: str
    difference: float
    second_tasks: tuple[str, ...] = ()
    clusters: str = ""

    def __post_init__(self) -> None:
        check_choices("measure", (self.measure,), MEASURES)
        if self.clusters not in CLUSTERS:
            reason = f"must be {TEMPLATE!r}, or leave the key out (claim {self.name!r})"
            raise SpecError("clusters", self.clusters, reason)
        if not self.tasks:
            raise SpecError("tasks", (), f"must have at least one (claim {self.name!r})")
        if not self.second_tasks:
            check_once(f"claim {self.name!r}: tasks", self.tasks)
        if self.second_tasks and len(self.second_tasks) != len(self.tasks):
            raise SpecError("second_tasks", self.second_tasks, f"must have {len(self.tasks)} tasks, as tasks has")
        if self.second_tasks and self.measure == "recovery":
            raise SpecError("measure", self.measure, "must be accuracy or kept if the claim has second_tasks")
        if not 0 < abs(self.difference) <= 1:
            raise SpecError("difference", self.difference, f"must lie in [-1, 1] and not be 0 (claim {self.name!r})")


_LISTS = ("models", "seeds", "lengths", "placements", "tasks", "policies", "budgets", "controls")


@dataclass(frozen=True)
class Stage:
    """Stage of a method, given by a policy that ends with this stage."""

    name: str
    policy: str


@dataclass(frozen=True)
class Rules:
    """Contents of a run, and claims about the results.

    Attributes:
        claims: claims in the order of the report. Holm's correction covers all claims.
        stages: stages of one method, in order. The page shows at which stage evidence is lost.
        lengths: lengths of contexts in tokens. Not used for your own questions, whose texts are never cut.
        models: models, as for the option `--model`.
        contexts: number of contexts of each task and length, for both parts together. A file gives at most one per row.
        questions: largest number of questions on each context.
        seeds: seeds. All samples are made once for each seed.
        tasks: tasks as text: `needle`, `needle(depth=0.5)`, `ruler-file:PATH`, `module:ATTRIBUTE`.
        policies: policies as text, such as `crystalcache(alpha=0)`. `h2o@prompt` evicts only at the end of the prompt,
            and `h2o` also while decoding.
        budgets: budgets of all policies and controls. Without budgets, only full cache and no context are run.
        calibration: file in the folder of the rules, written by `kvspec calibrate RULES.toml`, or "".
        digest: SHA-256 of the file and of the user's modules named in the file, hexadecimal. Every row has this digest.
        bare: True if no chat template is used. Otherwise the tokenizer's chat template is used, if there is one.
        controls: controls to run. Default: CONTROLS, and the random controls for the policies' units.
        commit: commit with the rules, for rows that confirm claims, or "".
        source: path of the rules file, or "" without a file.
        answer_tokens: largest number of answer tokens, if smaller than in the task. 0 means the number of the task.
        answers: False if only the kept tokens are measured. No question is read, and the model runs only the layers
            that the policies use.

    Raises:
        SpecError: if a name is unknown, a number is below 1, a list is empty, or a claim needs a cell that is not run.
    """

    claims: tuple[Claim, ...]
    stages: tuple[Stage, ...]
    title: str
    models: tuple[str, ...]
    contexts: int
    questions: int
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    placements: tuple[str, ...]
    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    digest: str
    calibration: str = ""
    bare: bool = False
    controls: tuple[str, ...] = CONTROLS
    commit: str = ""
    source: str = ""
    answer_tokens: int = 0
    answers: bool = True

    def __post_init__(self) -> None:
        check_choices("controls", self.controls, EVERY_CONTROL)
        if both := [name for name in EVERY_CONTROL if name in self.policies]:
            raise SpecError("policies", both[0], "is a control: write the name in controls, not in policies")
        for policy in self.policies:
            _, constants = parse_policy(policy.removesuffix(AT_PROMPT))
            if constants.get("stream"):
                raise SpecError(
                    "policies", policy,
                    "evicts while the model reads the prompt, but a study needs one forward pass for all policies",
                )
        check_choices("placements", self.placements, PLACEMENTS)
        for name in _LISTS:
            check_once(name, getattr(self, name))
        tasks = [resolve_task(task) for task in self.tasks]
        for task, placement in product(tasks, self.placements):
            task.check_placement(placement)
        for budget in self.budgets:
            check_budget("budgets", budget)
        self._check_numbers()
        unlimited = all(task.entry.longest for task in tasks)
        for name in ("models", "seeds", "lengths", "placements", "tasks"):
            if not getattr(self, name) and not (name == "lengths" and unlimited):
                raise SpecError(name, (), "must have at least one")
        if not self.budgets and set(self.controls) & set(CONTROL_BOUNDS):
            raise SpecError("budgets", (), f"must have at least one, for the controls {', '.join(CONTROL_BOUNDS)}")
        if not self.answers:
            self._check_without_answers()
        if not (self.policies or self.controls):
            raise SpecError("policies", (), "must have at least one policy, if there are no controls")
        if len({claim.name for claim in self.claims}) < len(self.claims):
            raise SpecError("claims", [claim.name for claim in self.claims], "must have different names")
        for claim in self.claims:
            self._check_run(claim)
        for stage in self.stages:
            check_choices(f"stage {stage.name!r}: policy", (stage.policy,), self.policies)

    def _check_numbers(self) -> None:
        if self.answer_tokens < 0:
            raise SpecError("answer_tokens", self.answer_tokens, "must be at least 1, or 0 for the number of the task")
        for name in ("contexts", "questions", "lengths"):
            value = getattr(self, name)
            each = value if isinstance(value, tuple) else (value,)
            if (least := min(each, default=1)) < 1:
                raise SpecError(name, least, "must be at least 1")
            if name != "lengths" and each[0] > MOST_SAMPLES:
                raise SpecError(name, each[0], f"must be at most {MOST_SAMPLES}")
        for seed in self.seeds:
            if not 0 <= seed <= MOST_SEED:
                raise SpecError("seeds", seed, f"must not be negative, and at most {MOST_SEED}")

    def _check_without_answers(self) -> None:
        if read := [name for name in self.controls if name not in RANDOMS]:
            raise SpecError("controls", read[0], f"needs answers = true; the other controls are {', '.join(RANDOMS)}")
        if late := [name for name in self.policies if name.endswith(AT_PROMPT)]:
            raise SpecError("policies", late[0], f"needs answers = true, because of {AT_PROMPT}")
        for claim in self.claims:
            if claim.measure != KEPT:
                raise SpecError(f"claim {claim.name!r}: measure", claim.measure, f"must be {KEPT} if answers = false")

    def _check_run(self, claim: Claim) -> None:
        drawn = (*RANDOMS, EVIDENCE, *((FULL,) if claim.difference < 0 else ()))
        compared = (*self.policies, *(name for name in drawn if name in self.controls))
        check_choices(f"claim {claim.name!r}: policy", (claim.first, claim.second), compared)
        check_choices(f"claim {claim.name!r}: budget", (claim.budget,), self.budgets)
        check_choices(f"claim {claim.name!r}: placement", (claim.placement,), self.placements)
        check_choices(f"claim {claim.name!r}: tasks", (*claim.tasks, *claim.second_tasks), self.tasks)
        if claim.measure == "recovery" and {FULL, BLIND} - set(self.controls):
            raise SpecError(
                "controls", self.controls, f"must contain {FULL} and {BLIND}, which recovery is computed from"
            )
        if claim.measure == "recovery" and (without := [t for t in claim.tasks if not resolve_task(t).entry.gold]):
            reason = "has no gold answer, so recovery cannot be computed: use measure = \"accuracy\""
            raise SpecError(f"claim {claim.name!r}: tasks", without[0], reason)

    def calibrated(self, folder: Path) -> Calibration | None:
        """Return the calibration for the policies, or None.

        Raises:
            SpecError: if the file is not a calibration, or was computed on a confirming context.
        """
        if not self.calibration:
            return None
        result = load_calibration(folder / self.calibration)
        for context in result.samples or ():
            if part_of(context) != DEV:
                raise SpecError(
                    "calibration", self.calibration,
                    f"was made from {context}, a context of the confirm part; calibrate on a different text",
                )
        return result


def check_budget(argument: str, budget: str, memory: bool = False) -> None:
    """Check a budget that a user wrote. With `memory`, a memory such as 64MiB is valid too.

    Raises:
        SpecError: if the text is invalid, or is "1" (one token), which is probably meant as the fraction 1.0.
    """
    if not (memory and is_size(budget)) and read_budget(budget, argument).count == 1:
        raise SpecError(argument, budget, "is one token: write 1.0 for all tokens, or at least 2 tokens")


def load_rules(path: Path, plugins: bool = True) -> Rules:
    """Read a rules file with the tables [study], [[claim]] and [[stage]].

    Args:
        path: rules file.
        plugins: if False, no module that the file names is imported, and the file must name only policies and tasks of
            kvspec.

    Raises:
        SpecError: if the file cannot be read or is not TOML, if a key is missing, unknown or of a wrong type, or as in
            `Rules`. Without `plugins`, also if a policy or task is not part of kvspec.
    """
    text = decode_text("rules", path, read_file("rules", path))
    try:
        read = parse_toml(text)
    except ValueError as error:
        raise SpecError("rules", str(path), f"must be a TOML file: {error}") from error
    try:
        rules = _read(read, plugins)
        digest = hashlib.sha256(b"\0".join([text.encode(), *_user_digests(rules)])).hexdigest()
    except SpecError as error:
        raise SpecError(error.argument, error.value, f"{error.bound} (in {path})") from error
    return replace(rules, digest=digest, source=str(path))


def rules_text(**study: Any) -> str:
    """Return the text of a rules file without claims."""
    # TOML has the escapes of JSON, and also needs an escape for the character DEL.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in study.items()]
    return "".join(["[study]\n", *lines]).replace("\x7f", r"\u007f")


def rules_of(**study: Any) -> Rules:
    """Return the rules for the options of a command. The digest covers only the user's modules. A second command can
    therefore add policies, budgets or samples to the rows of the first command.

    Raises:
        SpecError: as in `load_rules`.
    """
    rules = _read({"study": study})
    return replace(rules, digest=hashlib.sha256(b"\0".join([b"options", *_user_digests(rules)])).hexdigest())


COMPUTED = ("claims", "stages", "digest", "commit", "source")
"""Fields of `Rules` that are no keys of [study]."""
_SINGULAR = {"model": "models", "seed": "seeds"}


def _read(read: Mapping[str, Any], plugins: bool = True) -> Rules:
    """Return the rules of the tables of a rules file, without a digest."""
    unknown = sorted(set(read) - {"claim", "stage", "study"})
    if unknown or "study" not in read:
        raise SpecError("rules", unknown, "must have [study], and may have [[stage]] and [[claim]], but no other table")
    if not isinstance(read["study"], Mapping):
        raise SpecError("study", read["study"], "must be a table: type [study], and then a line for each key")
    claims, stages = (
        tuple(record_of("rules", kind, entry) for entry in tables_of(read, name))
        for name, kind in (("claim", Claim), ("stage", Stage))
    )
    given: Mapping[str, Any] = read["study"]
    study = {_SINGULAR.get(name, name): [one] if name in _SINGULAR else one for name, one in given.items()}
    if len(study) < len(given):
        raise SpecError("rules", sorted(given), "must have either model or models, and either seed or seeds")
    if not plugins:
        _check_built_in(study)
    policies = study.get("policies")
    if "controls" not in study and is_list_of(policies, str):
        study["controls"] = list(default_controls(policies))
    return record_of("rules", Rules, study, {"claims": claims, "stages": stages, "digest": ""}, COMPUTED)


def _check_built_in(study: Mapping[str, Any]) -> None:
    """Check that all policies and tasks are part of kvspec. No module is imported."""
    texts = {
        name: [one for one in study.get(name, ()) if isinstance(one, str)]
        for name in ("policies", "tasks") if isinstance(study.get(name), list)
    }
    refused = [("policies", one) for one in texts.get("policies", ()) if not is_built_in(one.removesuffix(AT_PROMPT))]
    refused += [("tasks", one) for one in texts.get("tasks", ()) if imports_code(one)]
    for argument, text in refused:
        reason = "is not part of kvspec, and an audit imports no other code: move the file out of the audited folder"
        raise SpecError(argument, text, reason)


def _user_digests(rules: Rules) -> Iterator[bytes]:
    """Yield the user's own policies and tasks, with the digests of the modules' files."""
    for policy in rules.policies:
        text = policy.removesuffix(AT_PROMPT)
        if (named := policy_in_rows(text)) != text:
            yield named.encode()
    for task in rules.tasks:
        if digest := resolve_task(task).digest:
            yield versioned(task, digest).encode()
