"""Tokens of a prompt that each policy keeps. A prompt is observed once, and each policy scores once for all budgets."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from models_integration.cache.continuation import Decision
from models_integration.session.method import Method
from models_integration.session.segment import ObservedSegment, decide
from models_integration.session.verbs import observe
from models_integration.studies.answers import cropped, needed, read_budget, retentions
from models_integration.studies.evidence.controls import control_set
from models_integration.studies.subject import Subject
from models_integration.tasks import Placement, Sample
from reference.policies.retain import tokens_of
from spec.errors import SpecError
from spec.policy import Policy
from spec.retention import Retention

__all__ = ["Prompt", "Step", "read_prompt", "steps"]


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
    """

    placement: Placement
    observed: ObservedSegment
    kept: Mapping[str, Sequence[Retention]]
    steps: Mapping[str, Sequence[Step]]
    budgets: Sequence[str]
    seconds: Mapping[str, float]

    def followed_by(self, placement: Placement) -> "Prompt":
        """Return the prompt with a different question."""
        steps = {
            name: [replace(step, placement=placement) for step in own] for name, own in self.steps.items()
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
    return method.policy.cadence.every is not None or method.continuation.decode


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
    going_on = {name: method for name, method in methods.items() if steps(method)}
    if placement.dropped_slots and going_on:
        once = replace(placement, prompt_ids=placement.prompt_ids[: -placement.dropped_slots], dropped_slots=0)
        own = read_prompt(subject, going_on, budgets, once)
        others = {name: method for name, method in methods.items() if name not in going_on}
        prompt = read_prompt(subject, others, budgets, placement)
        kept, seconds = {**prompt.kept, **own.kept}, {**own.seconds, **prompt.seconds}
        return replace(prompt, kept=kept, steps=own.steps, seconds=seconds)
    start = time.perf_counter()
    ids = torch.tensor([placement.prompt_ids], device=subject.model.device)
    needs = needed(method.policy.scorer.needs for method in methods.values())
    observed = observe(subject.model, ids, needs=needs)
    seconds, kept, following = {"prefill": time.perf_counter() - start}, {}, {}
    for name, method in methods.items():
        start = time.perf_counter()
        if name in going_on:
            following[name] = [_step(subject, name, budget, observed, placement) for budget in budgets]
            kept[name] = [step.decision.retentions[0] for step in following[name]]
        else:
            kept[name] = _kept(method.policy, budgets, observed, placement)
        seconds[name] = time.perf_counter() - start
    # The recorded attention inputs are no longer needed, and can be larger than the cache.
    observed.recorder.seen.clear()
    if placement.dropped_slots:
        observed.cache.crop(-placement.dropped_slots)
    return Prompt(placement, observed, kept, following, budgets, seconds)


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
