"""Tokens of a prompt that controls and policies keep.

Controls are sets of kept tokens that are right or wrong by construction. An invalid run fails the controls. A prompt is
observed once, and each policy scores once for all budgets.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from experiments.studies.answers import cropped, needed, read_budget, retentions
from experiments.studies.evidence.trunk_forms import TRUNK_FORMS, seed_of
from experiments.studies.subject import Subject
from experiments.tasks import Placement, Sample
from experiments.tasks.metrics import RIGHT_OR_WRONG
from experiments.tasks.needle import DELAYED_ASSOCIATION, NEEDLE
from models_integration.cache.continuation import Decision
from models_integration.cache.renumbering import RENUMBERED, Numbering, numbering_of
from models_integration.policies.methods import parse_policy
from models_integration.session.method import Method, decide
from models_integration.session.observed import ObservedSegment
from models_integration.session.verbs import observe
from reference.crystalcache.protection import effective_budget
from reference.policies.budgets import even, tokens_of
from reference.policies.kvzip_heads import FullHeads
from reference.policies.protections import SinkAndRecent, protecting
from reference.policies.scorers import recency
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, IntVector
from spec.budget import Budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.policy import Needs, Observation, Policy, Scorer, Scores
from spec.retention import Granularity, Retention

__all__ = [
    "BLIND", "CONTROLS", "CONTROL_BOUNDS", "EVERY_CONTROL", "EVIDENCE", "FULL", "RANDOM", "RANDOMS", "RANDOM_TRUNKS",
    "WINDOWS", "Prompt", "Step", "bounds_of", "control_of", "control_set", "control_tokens", "default_controls",
    "evidence_mask", "random_policy", "random_trunks", "read_prompt", "steps",
]

FULL, BLIND, RANDOM, EVIDENCE = "fullcache", "blind", "random", "evidence"
RANDOM_LAYERS, RANDOM_SHARED = "random-layers", "random-shared"
RANDOM_TRUNKS, RANDOM_HEADS = "random-trunks", "random-heads"
RANDOM_SETS: Mapping[str, Granularity] = {
    RANDOM: Granularity.HEAD, RANDOM_LAYERS: Granularity.LAYER, RANDOM_SHARED: Granularity.MODEL,
}
"""Controls with random tokens: a set for each layer and KV head, a set for each layer, or one set."""
RANDOMS = (*RANDOM_SETS, RANDOM_TRUNKS, *TRUNK_FORMS, RANDOM_HEADS)
"""All random controls: random tokens, CrystalCache's trunks in random order or with a different impact, and random full
heads."""
HEAD_WINDOW = 64, 256
"""Numbers of first and recent tokens of a streaming head, as in `kvzip-heads`."""
HEAD_FLOOR = sum(HEAD_WINDOW)
CONTROLS = (FULL, BLIND, RANDOM, RANDOM_SHARED, EVIDENCE)
"""Controls of every study: full cache, no context, two random sets, and evidence plus a random set."""
WITHOUT, ONLY, HOLDS, MISSES = "without needle", "only needle", "window holds needle", "window misses needle"
CONTROL_BOUNDS: dict[str, tuple[str, float]] = {
    WITHOUT: ("<=", 0.05), ONLY: (">=", 0.9), HOLDS: (">=", 0.9), MISSES: ("<=", 0.1),
}
"""Fraction of right answers that each control must reach or must not exceed."""
WINDOWS = {(NEEDLE, HOLDS): f"{NEEDLE}(depth=1.0)", (NEEDLE, MISSES): f"{NEEDLE}(depth=0.25)"}
"""Controls of the recent window that need a fact at a different place, with the task that makes the sample."""
EVERY_CONTROL = (FULL, BLIND, *RANDOMS, EVIDENCE, *CONTROL_BOUNDS)


def default_controls(policies: Iterable[str]) -> tuple[str, ...]:
    """Return CONTROLS, with random trunks or random heads if a policy keeps such units."""
    needed_controls = dict.fromkeys(control_of(policy, Granularity.HEAD.value) for policy in policies)
    return *CONTROLS, *(name for name in needed_controls if name not in CONTROLS)


def control_of(policy: str, granularity: str) -> str:
    """Return the random control that keeps the same kind of units as a policy: trunks, heads or tokens.

    Args:
        policy: policy as text, with constants, or a name of TRUNK_FORMS.
        granularity: value of the policy's `Granularity`.
    """
    name = policy.partition("(")[0]
    if name in TRUNK_FORMS or (name == "crystalcache" and parse_policy(policy)[1].get("T_max") != 1):
        return RANDOM_TRUNKS
    if name == "kvzip-heads":
        return RANDOM_HEADS
    return next(control for control, unit in RANDOM_SETS.items() if unit.value == granularity)


def bounds_of(task: str, sample: Sample) -> Sequence[str]:
    """Return the controls with a bound for which a task's samples are suitable: one fact, and a right-or-wrong answer.

    A fact in prose may be inside or outside the recent window.
    """
    if len(sample.evidence) != 1 or sample.metric not in RIGHT_OR_WRONG:
        return ()
    return (WITHOUT, ONLY, *((MISSES,) if task.partition("(")[0] == DELAYED_ASSOCIATION else ()))


def control_tokens(budget: str, length: int) -> int:
    """Return B of a control of the recent window. B includes sinks and window."""
    return min(length, effective_budget(read_budget(budget), length, PAPER.N_sink, PAPER.W_recent))


def evidence_mask(sample: Sample, seen: int) -> BoolVector:
    """Return a mask (seen,) that is True for the sample's evidence."""
    result = np.zeros(seen, dtype=np.bool_)
    for start, stop in sample.evidence:
        result[start:stop] = True
    return result


def control_set(
    name: str, budget: str, sample: Sample, observed: ObservedSegment, placement: Placement,
) -> Retention:
    """Return the tokens of a prompt that a control keeps, without the dropped tokens."""
    seen = len(placement.prompt_ids)
    if name in (*RANDOMS, EVIDENCE):
        kept = _drawn(name, budget, sample, observed, placement)
    else:
        evidence = evidence_mask(sample, seen)
        B = control_tokens(budget, sample.length) if name in (HOLDS, MISSES) else 0
        masks = {FULL: ~np.zeros(seen, dtype=np.bool_), BLIND: np.zeros(seen, dtype=np.bool_), WITHOUT: ~evidence}
        window = SinkAndRecent(PAPER.N_sink, max(PAPER.W_recent, B - PAPER.N_sink))(seen)
        masks[ONLY] = evidence | window
        kept = Retention.shared(np.flatnonzero(masks.get(name, window)), seen)
    return cropped(kept, placement.dropped_slots)


def _drawn(
    name: str, budget: str, sample: Sample, observed: ObservedSegment, placement: Placement,
) -> Retention:
    seen = len(placement.prompt_ids)
    B, seed = read_budget(budget).tokens(seen), seed_of(placement.prompt_ids)
    if name == RANDOM_HEADS:
        return retentions(_random_heads(seed), [Budget(count=B)], observed)[0]
    policy = random_policy(seed, B, RANDOM_SETS.get(name, Granularity.HEAD))
    if name == EVIDENCE:
        positions = np.flatnonzero(evidence_mask(sample, seen)).tolist()
        if len(positions) + policy.floor > B:
            policy = random_policy(seed, 0)
        policy = protecting(policy, positions)
    return retentions(policy, [Budget(count=B)], observed)[0]


class RandomScores:
    """Scorer that draws random scores for each set of kept tokens."""

    needs = Needs()

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        shape = observation.groups, observation.seen
        return Scores(np.random.default_rng(self._seed).random(shape), np.arange(observation.seen + 1))


def random_policy(seed: int, B: int, granularity: Granularity = Granularity.HEAD) -> Policy:
    """Return a policy with random sets of tokens. Sinks and recent window of the paper are also kept if B allows."""
    fits = PAPER.N_sink + PAPER.W_recent <= B
    protection = SinkAndRecent(PAPER.N_sink, PAPER.W_recent) if fits else SinkAndRecent(0, 0)
    return Policy(RANDOM, RandomScores(seed), even, top_units, protection, granularity=granularity, least=1)


def _random_heads(seed: int) -> Policy:
    """Return `kvzip-heads` with a random order of the heads."""

    def shares(total: int, scores: Scores, /) -> IntVector:
        return FullHeads(np.random.default_rng(seed).random(len(scores.values)), HEAD_FLOOR)(total, scores)

    protection = SinkAndRecent(*HEAD_WINDOW)
    return Policy(
        RANDOM_HEADS, recency, shares, top_units, protection, granularity=Granularity.HEAD,
    )


@dataclass(frozen=True)
class RandomTrunks:
    """Scorer that gives CrystalCache's trunks random scores. In a partly kept trunk, random tokens are kept."""

    scorer: Scorer

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        scores = self.scorer(observation, protected)
        assert observation.token_ids is not None
        rng = np.random.default_rng(seed_of(observation.token_ids.tolist()))
        shape = len(scores.values), observation.seen
        return replace(scores, values=rng.random(scores.values.shape), members=rng.random(shape))


def random_trunks(crystalcache: Policy) -> Policy:
    """Return CrystalCache with a random order of trunks."""
    return replace(crystalcache, name=RANDOM_TRUNKS, scorer=RandomTrunks(crystalcache.scorer))


@dataclass(frozen=True)
class Step:
    """Policy that evicts while tokens are decoded, and the cache after the prompt.

    Tokens that are dropped and read again would have no records, so the prompt ends before these tokens.
    """

    method: Method
    decision: Decision
    observed: ObservedSegment
    placement: Placement


@dataclass(frozen=True)
class Prompt:
    """Prompt that was processed once, with the tokens that each policy keeps for each budget.

    Attributes:
        placement: tokens dropped from the prompt, and tokens read after the prompt.
        observed: observation with the full cache, without dropped tokens. The logits follow the prompt's last token.
        kept: kept tokens by policy, in the order of the budgets, without dropped tokens.
        steps: policies that evict while decoding, in the same order.
        budgets: budgets as text.
        seconds: duration of the prefill, and of each policy's decisions.
        renumbered: policies that renumber the positions of the kept tokens, with the numbering of the model.
    """

    placement: Placement
    observed: ObservedSegment
    kept: Mapping[str, Sequence[Retention]]
    steps: Mapping[str, Sequence[Step]]
    budgets: Sequence[str]
    seconds: Mapping[str, float]
    renumbered: Mapping[str, Numbering]

    def followed_by(self, placement: Placement) -> "Prompt":
        """Return the prompt with a different question."""
        steps = {
            name: [replace(step, placement=placement) for step in steps_of_policy]
            for name, steps_of_policy in self.steps.items()
        } if placement.name == "after" else self.steps
        return replace(self, placement=placement, steps=steps)

    def set_of(self, policy: str, budget: str, sample: Sample) -> Retention:
        """Return the tokens that a cell (a policy, or a control on this sample) keeps."""
        if policy not in self.kept:
            return control_set(policy, budget, sample, self.observed, self.placement)
        return self.kept[policy][self.budgets.index(budget)]

    def step_of(self, policy: str, budget: str) -> Step | None:
        """Return the step of a cell that evicts while decoding, or None."""
        return self.steps[policy][self.budgets.index(budget)] if policy in self.steps else None


def steps(method: Method) -> bool:
    """Return True if a policy evicts while tokens are decoded."""
    return method.decode


def read_prompt(
    subject: Subject, methods: Mapping[str, Method], budgets: Sequence[str], placement: Placement,
) -> Prompt:
    """Observe a prompt once, and select the kept tokens for every policy and budget.

    Args:
        subject: model of the study.
        methods: policies bound to the model, by the policy's text. The budget is ignored.
        budgets: budgets as text.
        placement: placement of the sample.

    Raises:
        SpecError: if kvspec does not support the prompt, or if a policy raises the error.
    """
    if placement.dropped_slots and any(map(steps, methods.values())):
        return _read_twice(subject, methods, budgets, placement)
    start = time.perf_counter()
    ids = torch.tensor([placement.prompt_ids], device=subject.model.device)
    needs = needed(method.policy.scorer.needs for method in methods.values())
    observed = observe(subject.model, ids, needs=needs)
    seconds, kept, following = {"prefill": time.perf_counter() - start}, {}, {}
    for name, method in methods.items():
        start = time.perf_counter()
        if steps(method):
            following[name] = [_step(subject, name, budget, observed, placement) for budget in budgets]
            kept[name] = [step.decision.retentions[0] for step in following[name]]
        else:
            kept[name] = _kept(method.policy, budgets, observed, placement)
        seconds[name] = time.perf_counter() - start
    # The recorded attention inputs are no longer needed, and can be larger than the cache.
    observed.recorder.seen.clear()
    if placement.dropped_slots:
        observed.cache.crop(-placement.dropped_slots)
    renumbered = {
        name: numbering_of(subject.model, observed.architecture) for name, method in methods.items()
        if method.positions == RENUMBERED
    }
    return Prompt(placement, observed, kept, following, budgets, seconds, renumbered)


def _read_twice(
    subject: Subject, methods: Mapping[str, Method], budgets: Sequence[str], placement: Placement,
) -> Prompt:
    """Observe a prompt without the dropped slots for policies that evict in decode steps, and again for the others."""
    going_on = {name: method for name, method in methods.items() if steps(method)}
    others = {name: method for name, method in methods.items() if name not in going_on}
    once = replace(placement, prompt_ids=placement.prompt_ids[: -placement.dropped_slots], dropped_slots=0)
    first, prompt = read_prompt(subject, going_on, budgets, once), read_prompt(subject, others, budgets, placement)
    return replace(
        prompt, kept={**prompt.kept, **first.kept}, steps=first.steps, seconds={**first.seconds, **prompt.seconds},
        renumbered={**prompt.renumbered, **first.renumbered},
    )


def _step(subject: Subject, policy: str, budget: str, observed: ObservedSegment, placement: Placement) -> Step:
    method = subject.policy(policy, read_budget(budget)).on(subject.model)
    return Step(method, decide(method, observed), observed, placement)


def _kept(
    policy: Policy, budgets: Sequence[str], observed: ObservedSegment, placement: Placement,
) -> list[Retention]:
    wanted = [read_budget(budget) for budget in budgets]
    try:
        each = retentions(policy, wanted, observed)
        for budget, kept in zip(wanted, each, strict=True):
            _check_promise(policy, tokens_of(policy, budget, kept.seen), kept)
    except Exception as error:
        error.add_note(f"policy {policy.name}")
        raise
    return [cropped(retention, placement.dropped_slots) for retention in each]


def _check_promise(policy: Policy, B: int, kept: Retention) -> None:
    """Check that a policy that guarantees its budget keeps no more tokens. Results must belong to their budget."""
    if policy.promises.budget_exact == "yes" and len(kept.positions) > B * kept.groups:
        mean = f"{len(kept.positions) / kept.groups:g}"
        raise SpecError(
            "budget", B, f"must not be exceeded, but {policy.name} keeps {mean} tokens"
        )
