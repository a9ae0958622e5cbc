"""Rules of a run in a TOML file: claims and study. The file is written before the confirming samples are run.

`kvspec compare` makes such rules from their options.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

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
from experiments.tasks import PLACEMENTS
from experiments.tasks.needle import CONFIRM, DEV, part_of
from experiments.tasks.registry import imports_code, resolve_task
from models_integration.policies.methods import parse_policy
from models_integration.policies.sizes import is_size
from reference.calibration import Calibration, load_calibration
from reference.policies.names import AT_PROMPT, is_built_in
from spec.errors import SpecError
from spec.files import decode_text, parse_toml, read_file
from spec.validate import check_choices, did_you_mean

__all__ = [
    "ALL", "AT_PROMPT", "COMPUTED", "KEPT", "MEASURES", "PARTS", "TEMPLATE", "Claim", "Rules", "Stage", "check_budget",
    "check_fields", "load_rules", "rules_of", "rules_text",
]

KEPT = "kept"
MEASURES = ("recovery", "accuracy", KEPT)
"""Recovery of the likelihood, right answers, and the fraction of evidence tokens that a policy keeps."""
TEMPLATE = "template"
CLUSTERS = ("", TEMPLATE)
PARTS = (DEV, CONFIRM)
ALL = "all"
"""Name for both parts, for rules without claims."""

T = TypeVar("T")


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
        check_choices("clusters", (self.clusters,), CLUSTERS)
        if self.second_tasks and len(self.second_tasks) != len(self.tasks):
            raise SpecError("second_tasks", self.second_tasks, f"must have {len(self.tasks)} tasks, as tasks has")
        if self.second_tasks and self.measure == "recovery":
            raise SpecError("measure", self.measure, "must be accuracy or kept if the claim has second_tasks")
        if not 0 < abs(self.difference) <= 1:
            raise SpecError("difference", self.difference, f"must lie in [-1, 1] and not be 0 (claim {self.name!r})")


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
        tasks = [resolve_task(task) for task in self.tasks]
        for task, placement in product(tasks, self.placements):
            task.check_placement(placement)
        for budget in self.budgets:
            check_budget("budgets", budget)
        for name in ("contexts", "questions", "lengths"):
            value = getattr(self, name)
            least = min(value if isinstance(value, tuple) else (value,), default=1)
            if least < 1:
                raise SpecError(name, least, "must be at least 1")
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
    return replace(_read(text, str(path), plugins), source=str(path))


def rules_text(**study: Any) -> str:
    """Return the text of a rules file without claims."""
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in study.items()]
    return "".join(["[study]\n", *lines])


def rules_of(**study: Any) -> Rules:
    """Return the rules for the options of a command. The digest covers only the user's modules. A second command can
    therefore add policies, budgets or samples to the rows of the first command.

    Raises:
        SpecError: as in `load_rules`.
    """
    rules = _read(rules_text(**study), "the options")
    return replace(rules, digest=hashlib.sha256(b"\0".join([b"options", *_user_digests(rules)])).hexdigest())


COMPUTED = ("claims", "stages", "digest", "commit", "source")
"""Fields of `Rules` that are no keys of [study]."""
_SINGULAR = {"model": "models", "seed": "seeds"}


def _read(text: str, where: str, plugins: bool = True) -> Rules:
    try:
        read = parse_toml(text)
    except ValueError as error:
        raise SpecError("rules", where, f"must be a TOML file: {error}") from error
    unknown = sorted(set(read) - {"claim", "stage", "study"})
    if unknown or "study" not in read:
        raise SpecError("rules", unknown, "must have [study], and may have [[stage]] and [[claim]], but no other table")
    claims, stages = (
        tuple(_checked(kind, entry) for entry in read.get(name, ()))
        for name, kind in (("claim", Claim), ("stage", Stage))
    )
    study = {_SINGULAR.get(name, name): [one] if name in _SINGULAR else one for name, one in read["study"].items()}
    if len(study) < len(read["study"]):
        raise SpecError("rules", where, "must have either model or models, and either seed or seeds")
    if not plugins:
        _check_built_in(study, where)
    policies = study.get("policies")
    if "controls" not in study and isinstance(policies, list) and all(isinstance(one, str) for one in policies):
        study["controls"] = list(default_controls(policies))
    rules = _checked(Rules, {**study, "claims": claims, "stages": stages, "digest": "", "commit": ""})
    return replace(rules, digest=hashlib.sha256(b"\0".join([text.encode(), *_user_digests(rules)])).hexdigest())


def _check_built_in(study: Mapping[str, Any], where: str) -> None:
    """Check that all policies and tasks are part of kvspec. No module is imported."""
    texts = {
        name: [one for one in study.get(name, ()) if isinstance(one, str)]
        for name in ("policies", "tasks") if isinstance(study.get(name), list)
    }
    refused = [("policies", one) for one in texts.get("policies", ()) if not is_built_in(one.removesuffix(AT_PROMPT))]
    refused += [("tasks", one) for one in texts.get("tasks", ()) if imports_code(one)]
    for argument, text in refused:
        reason = f"is not part of kvspec, and an audit imports no other code: move {where} out of the audited folder"
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


def check_fields(argument: str, kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of the fields of a dataclass by name, if the given values fit.

    Raises:
        SpecError: if a field is missing or unknown.
    """
    types = {field.name: field.type for field in fields(kind)}
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    if not needed <= set(given) <= set(types):
        missing, unknown = sorted(needed - set(given)), sorted(set(given) - set(types))
        named = [name for name in types if kind is not Rules or name not in COMPUTED]
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unknown: {', '.join(unknown)}"] if unknown else []
        hint = did_you_mean(unknown[0], named) if unknown else ""
        raise SpecError(argument, missing + unknown, f"{'; '.join(parts)}{hint}; the keys are {', '.join(named)}")
    return types


def _checked(kind: type[T], given: dict[str, Any]) -> T:
    types = check_fields("rules", kind, given)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, value in values.items():
        if not _fits(value, types[name]):
            raise SpecError(name, given[name], _type_bound(name, value, types[name]))
    return kind(**values)


def _type_bound(name: str, value: Any, wanted: Any) -> str:
    """Return the error text for a value of a wrong type. For a list, the text has an example."""
    if isinstance(wanted, type):
        return f"must be of the type {wanted.__name__}"
    (item, _), values = wanted.__args__, value if isinstance(value, tuple) else (value,)
    example = [str(one) for one in values] if item is str else [one for one in values if type(one) is int] or [3]
    return f"must be a list of {'texts in quotes' if item is str else 'integers'}: type {name} = {json.dumps(example)}"


def _fits(value: object, wanted: Any) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(wanted, type):
        return type(value) is wanted
    (item, _) = wanted.__args__
    return isinstance(value, tuple) and all(type(one) is item for one in value)
