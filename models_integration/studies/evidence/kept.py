"""What each policy keeps of a prompt: it is observed once, each policy scores it once, budgets only select."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from models_integration.cache.continuation import Decision
from models_integration.session.method import Method
from models_integration.session.segment import ObservedSegment, decide
from models_integration.session.verbs import observe
from models_integration.studies.answers import cropped, needed, retentions
from models_integration.studies.budgets import read_budget
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
    """A policy that goes on deciding while tokens are decoded, and the cache that it goes on with.

    What is dropped and read again would leave no records behind, so its prompt ends before that.
    """

    method: Method
    decision: Decision
    observed: ObservedSegment
    placement: Placement


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read once, and what each policy keeps of it under each budget.

    Attributes:
        placement: what is dropped from it and read after it.
        observed: with the full cache, less what is dropped; its logits are those of the prompt's last token.
        kept: by policy, in the order of the budgets; less what is dropped.
        steps: policies that go on deciding, in the same order.
        budgets: as text.
        seconds: of the prefill, and of each policy's decisions.
    """

    placement: Placement
    observed: ObservedSegment
    kept: Mapping[str, Sequence[Retention]]
    steps: Mapping[str, Sequence[Step]]
    budgets: Sequence[str]
    seconds: Mapping[str, float]

    def followed_by(self, placement: Placement) -> "Prompt":
        """The same with another question behind it."""
        steps = {
            name: [replace(step, placement=placement) for step in own] for name, own in self.steps.items()
        } if placement.name == "after" else self.steps
        return replace(self, placement=placement, steps=steps)

    def set_of(self, policy: str, budget: str, sample: Sample) -> Retention:
        """What a cell keeps: a policy, or a control on this sample."""
        if policy not in self.kept:
            return control_set(policy, budget, sample, self.observed, self.placement)
        return self.kept[policy][self.budgets.index(budget)]

    def step_of(self, policy: str, budget: str) -> Step | None:
        """How a cell goes on deciding; None where it does not."""
        return self.steps[policy][self.budgets.index(budget)] if policy in self.steps else None


def steps(method: Method) -> bool:
    """Whether a policy goes on deciding while tokens are decoded."""
    return method.policy.cadence.every is not None or method.continuation.decode


def read_prompt(
    subject: Subject, methods: Mapping[str, Method], budgets: Sequence[str], placement: Placement,
) -> Prompt:
    """Observe a prompt once, and decide about it under every policy and budget.

    Args:
        subject: the model.
        methods: by the policy's text, under any budget.
        budgets: as text.
        placement: of the sample.

    Raises:
        SpecError: for a prompt that is not served, and what a policy refuses.
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
    # Nobody asks any more what the layers have shown, which may be larger than the cache.
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
    """What promises to be exact in its budget keeps no more, or its figures would not be those of its budget."""
    if policy.promises.budget_exact == "yes" and len(kept.positions) > B * kept.groups:
        mean = f"{len(kept.positions) / kept.groups:g}"
        raise SpecError(
            "budget", B, f"must not be exceeded, but {policy.name} keeps {mean} tokens"
        )
