"""The rules of a run: one TOML file, claims first, written before the samples that confirm them are run.

The options of `kvspec compare` and `kvspec sweep` write such rules too.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from models_integration.policies.methods import spelled
from models_integration.studies.budgets import read_budget
from models_integration.studies.evidence.controls import (
    BLIND,
    CONTROL_BOUNDS,
    CONTROLS,
    EVERY_CONTROL,
    EVIDENCE,
    FULL,
    RANDOMS,
    default_controls,
)
from models_integration.studies.subject import policy_in_rows, versioned
from models_integration.tasks import PLACEMENTS
from models_integration.tasks.registry import resolve_task
from models_integration.tasks.samples import CONFIRM, DEV, part_of
from reference.calibration import Calibration, load_calibration
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "ALL", "AT_PROMPT", "MEASURES", "PARTS", "Claim", "Rules", "Stage", "check_budget", "load_rules",
    "rules_of", "rules_text",
]

MEASURES = ("recovery", "accuracy")
PARTS = (DEV, CONFIRM)
ALL = "all"
"""Both parts: of rules that claim nothing."""
AT_PROMPT = "@prompt"
"""Behind a policy that otherwise decides while tokens are decoded: it decides at the prompt's end alone."""

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """What the study is to decide: that `first` does better than `second`, by at least `difference`.

    A negative difference claims non-inferiority: `first` is not worse than `second` by more than this. `second` may
    then be the full cache.

    Raises:
        SpecError: for an unknown measure, or a difference that is 0 or not in [-1, 1].
    """

    name: str
    first: str
    second: str
    budget: str
    placement: str
    tasks: tuple[str, ...]
    measure: str
    difference: float

    def __post_init__(self) -> None:
        check_choices("measure", (self.measure,), MEASURES)
        if not 0 < abs(self.difference) <= 1:
            raise SpecError("difference", self.difference, f"must lie in [-1, 1] and not be 0 (claim {self.name!r})")


@dataclass(frozen=True)
class Stage:
    """A stage of a method, by the policy that goes as far as it and no farther."""

    name: str
    policy: str


@dataclass(frozen=True)
class Rules:
    """What is run, and what is claimed of it.

    Attributes:
        claims: in the order in which they are reported; Holm's correction is over all of them.
        stages: of one method, in its order: the page says at which of them evidence is lost.
        models: as `--model` of the other commands.
        contexts: of each task and length; both parts together. A task of a file has at most one for each of its rows.
        questions: on each context, at most.
        seeds: of all samples, each once.
        tasks: as text: `needle`, `needle(depth=0.5)`, `ruler-file:PATH`, `module:ATTRIBUTE`.
        policies: beside the controls, as text: `crystalcache(alpha=0)`; `h2o@prompt` decides at the prompt's end alone,
            `h2o` while tokens are decoded too.
        budgets: of every policy and of the controls; without any, full cache and blind run alone.
        calibration: a file that `kvspec calibrate RULES.toml` wrote, beside the rules; "" for none.
        digest: SHA-256 of the file, hexadecimal, and of the user's own modules that it names; in every row.
        bare: whether texts are bare; otherwise the tokenizer's chat template, if it has one, stands around them.
        controls: what is run beside the policies; by default CONTROLS and the random controls of the policies' units.
        commit: the commit that holds the rules, in the rows that confirm claims; "" for other rows.
        answer_tokens: the longest answer that is decoded, if it is shorter than the task's; 0 for the task's.

    Raises:
        SpecError: for an unknown name, a number below 1, a list with nothing in it, or a claim about what is not run.
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
    answer_tokens: int = 0

    def __post_init__(self) -> None:
        check_choices("controls", self.controls, EVERY_CONTROL)
        if both := [name for name in EVERY_CONTROL if name in self.policies]:
            raise SpecError("policies", both[0], "is a control: write the name in controls, not in policies")
        for policy in self.policies:
            _, constants = spelled(policy.removesuffix(AT_PROMPT))
            if constants.get("stream"):
                raise SpecError(
                    "policies", policy,
                    "evicts while the model reads the prompt, but a study needs one forward pass for all policies",
                )
        check_choices("placements", self.placements, PLACEMENTS)
        for task in map(resolve_task, self.tasks):
            for placement in self.placements:
                task.check_placement(placement)
        for budget in self.budgets:
            check_budget("budgets", budget)
        for name in ("contexts", "questions", "lengths"):
            value = getattr(self, name)
            least = min(value if isinstance(value, tuple) else (value,), default=1)
            if least < 1:
                raise SpecError(name, least, "must be at least 1")
        for name in ("models", "seeds", "lengths", "placements", "tasks"):
            if not getattr(self, name):
                raise SpecError(name, (), "must have at least one")
        if not self.budgets and set(self.controls) & set(CONTROL_BOUNDS):
            raise SpecError("budgets", (), f"must have at least one, for the controls {', '.join(CONTROL_BOUNDS)}")
        if not (self.policies or self.controls):
            raise SpecError("policies", (), "must have at least one policy, if there are no controls")
        if len({claim.name for claim in self.claims}) < len(self.claims):
            raise SpecError("claims", [claim.name for claim in self.claims], "must have different names")
        for claim in self.claims:
            self._check_run(claim)
        for stage in self.stages:
            check_choices(f"stage {stage.name!r}: policy", (stage.policy,), self.policies)

    def _check_run(self, claim: Claim) -> None:
        drawn = (*RANDOMS, EVIDENCE, *((FULL,) if claim.difference < 0 else ()))
        compared = (*self.policies, *(name for name in drawn if name in self.controls))
        check_choices(f"claim {claim.name!r}: policy", (claim.first, claim.second), compared)
        check_choices(f"claim {claim.name!r}: budget", (claim.budget,), self.budgets)
        check_choices(f"claim {claim.name!r}: placement", (claim.placement,), self.placements)
        check_choices(f"claim {claim.name!r}: tasks", claim.tasks, self.tasks)
        if claim.measure == "recovery" and {FULL, BLIND} - set(self.controls):
            raise SpecError(
                "controls", self.controls, f"must contain {FULL} and {BLIND}, which recovery is computed from"
            )
        if claim.measure == "recovery" and (without := [t for t in claim.tasks if not resolve_task(t).entry.gold]):
            reason = "has no gold answer, so recovery cannot be computed: use measure = \"accuracy\""
            raise SpecError(f"claim {claim.name!r}: tasks", without[0], reason)

    def calibrated(self, folder: Path) -> Calibration | None:
        """The statistics that its policies may use.

        Raises:
            SpecError: for a file that is none, or that was taken over a context that confirms.
        """
        if not self.calibration:
            return None
        found = load_calibration(folder / self.calibration)
        for context in found.samples or ():
            if part_of(context) != DEV:
                raise SpecError(
                    "calibration", self.calibration,
                    f"was made from {context}, a context of the confirm part; calibrate on a different text",
                )
        return found


def check_budget(argument: str, budget: str) -> None:
    """A budget that somebody wrote is one.

    Raises:
        SpecError: for another text, and for one token, which is a share without its point.
    """
    if read_budget(budget, argument).count == 1:
        raise SpecError(argument, budget, "is one token: write 1.0 for all tokens, or at least 2 tokens")


def load_rules(path: Path) -> Rules:
    """Read a rules file: any number of [[claim]] and [[stage]], and [study].

    Raises:
        SpecError: for a file that cannot be read or is no TOML, a name that is missing, unknown or of another type,
            and what `Rules` refuses.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise SpecError("rules", str(path), f"must be a TOML file: {error}") from error
    return _read(text, str(path))


def rules_text(**study: Any) -> str:
    """The text of a rules file without claims."""
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in study.items()]
    return "".join(["[study]\n", *lines])


def rules_of(**study: Any) -> Rules:
    """The rules that options of a command stand for. Their digest is about the user's own modules alone: a second
    command adds policies, budgets or samples to the rows of the first.

    Raises:
        SpecError: as `load_rules`.
    """
    rules = _read(rules_text(**study), "the options")
    return replace(rules, digest=hashlib.sha256(b"\0".join([b"options", *_own(rules)])).hexdigest())


_SINGULAR = {"model": "models", "seed": "seeds"}


def _read(text: str, where: str) -> Rules:
    try:
        read = tomllib.loads(text)
    except ValueError as error:
        raise SpecError("rules", where, f"must be a TOML file: {error}") from error
    unknown = sorted(set(read) - {"claim", "stage", "study"})
    if unknown or "study" not in read:
        raise SpecError("rules", unknown, "must have [study], and may have [[stage]] and [[claim]], but no other table")
    claims, stages = (
        tuple(_made(kind, entry) for entry in read.get(name, ())) for name, kind in (("claim", Claim), ("stage", Stage))
    )
    study = {_SINGULAR.get(name, name): [one] if name in _SINGULAR else one for name, one in read["study"].items()}
    if len(study) < len(read["study"]):
        raise SpecError("rules", where, "must have either model or models, and either seed or seeds")
    policies = study.get("policies")
    if "controls" not in study and isinstance(policies, list) and all(isinstance(one, str) for one in policies):
        study["controls"] = list(default_controls(policies))
    rules = _made(Rules, {**study, "claims": claims, "stages": stages, "digest": "", "commit": ""})
    return replace(rules, digest=hashlib.sha256(b"\0".join([text.encode(), *_own(rules)])).hexdigest())


def _own(rules: Rules) -> Iterator[bytes]:
    """The user's own policies and tasks, with the digests of their modules' files."""
    for policy in rules.policies:
        text = policy.removesuffix(AT_PROMPT)
        if (named := policy_in_rows(text)) != text:
            yield named.encode()
    for task in rules.tasks:
        if digest := resolve_task(task).digest:
            yield versioned(task, digest).encode()


def _made(kind: type[T], given: dict[str, Any]) -> T:
    own = fields(kind)  # type: ignore[arg-type]  # all are dataclasses
    types = {field.name: field.type for field in own}
    needed = {field.name for field in own if field.default is MISSING}
    if not needed <= set(given) <= set(types):
        wrong = sorted(needed - set(given) | set(given) - set(types))
        raise SpecError("rules", wrong, f"missing or unknown: {kind.__name__} has {', '.join(types)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, value in values.items():
        if not _fits(value, types[name]):
            raise SpecError(name, value, f"must be of the type {getattr(types[name], '__name__', types[name])}")
    return kind(**values)


def _fits(value: object, wanted: Any) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(wanted, type):
        return type(value) is wanted
    (item, _) = wanted.__args__
    return isinstance(value, tuple) and all(type(one) is item for one in value)
